#!/usr/bin/env python3
"""torch.distributed.checkpoint with HDF5Writer and HDF5Reader next to FileSystemWriter and FileSystemReader, in turn.

Usage: PYTHONPATH=build/release/python bench/torch_save.py [--dir DIR] [--size BYTES] [--ranks N] [--rounds N]

Each of N gloo ranks on this machine saves its shard (bf16, Shard(0)) of a model of --size bytes and loads it again. Both writers sync
their files. Times are from a barrier until the last rank is done; the best of the rounds counts. --cold drops the page cache of the
files before each load. The memory is the highest growth of a rank's resident memory during a save.
"""

import argparse
import json
import os
import shutil
import tempfile
import threading
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from fsdpckpt.torch import HDF5Reader, HDF5Writer

ROWS, COLUMNS = 4096, 2048


def make_state(size):
    """Tensors of 16 MiB, and as many small ones."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    torch.manual_seed(dist.get_rank())

    def shard(*shape):
        local = torch.randn(shape[0] // dist.get_world_size(), *shape[1:]).to(torch.bfloat16)
        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False)

    count = size // (2 * ROWS * COLUMNS)
    large = {f"layers.{i}.weight": shard(ROWS, COLUMNS) for i in range(count)}
    return {"model": large | {f"layers.{i}.norm": shard(COLUMNS) for i in range(count)}, "step": 1}


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


class Peak:
    """The highest growth of the resident memory in a with block."""

    def __enter__(self):
        self.before, self.most, self.done = resident(), 0, False
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def watch(self):
        while not self.done:
            self.most = max(self.most, resident() - self.before)
            time.sleep(0.01)

    def __exit__(self, *_):
        self.done = True
        self.thread.join()


def timed(function):
    dist.barrier()
    begin = time.perf_counter()
    function()
    dist.barrier()
    return time.perf_counter() - begin


def drop_cache(folder):
    for path in Path(folder).iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def run(rank, options, folder, results):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=options.ranks)
    state = make_state(options.size)
    ways = {
        "hdf5": (lambda path: HDF5Writer(path), HDF5Reader),
        "filesystem": (lambda path: dcp.FileSystemWriter(path, sync_files=True), dcp.FileSystemReader),
    }
    times = {f"{kind} {name}": [] for kind in ("save", "load") for name in ways}
    memory = dict.fromkeys(ways, 0)
    for step in range(options.rounds):
        for name in sorted(ways, reverse=step % 2 == 1):
            writer, reader = ways[name]
            path = os.path.join(folder, f"{name}-{step}")
            with Peak() as peak:
                times[f"save {name}"].append(timed(lambda: dcp.save(state, storage_writer=writer(path))))
            memory[name] = max(memory[name], peak.most)
            if rank == 0 and options.cold:
                drop_cache(path)
            times[f"load {name}"].append(timed(lambda: dcp.load(state, storage_reader=reader(path))))
            if rank == 0:
                shutil.rmtree(path)
            dist.barrier()
    peaks = [None] * options.ranks
    dist.all_gather_object(peaks, memory)
    if rank == 0:
        best = {name: min(seconds) for name, seconds in times.items()}
        Path(results).write_text(json.dumps([best, {name: max(peak[name] for peak in peaks) for name in ways}]))
    dist.barrier()
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", help="where to write the checkpoints")
    parser.add_argument("--size", type=int, default=2 << 30, help="bytes of the model")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cold", action="store_true", help="drop the page cache before each load")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        results = os.path.join(folder, "results")
        torch.multiprocessing.spawn(run, (options, folder, results), nprocs=options.ranks)
        best, memory = json.loads(Path(results).read_text())
    for kind in ("save", "load"):
        ours, theirs = best[f"{kind} hdf5"], best[f"{kind} filesystem"]
        print(f"{kind}: HDF5 {ours:.2f} s, FileSystem {theirs:.2f} s: {ours / theirs:.2f} x")
    print("memory of a save, per rank: " + ", ".join(f"{name} {most >> 20} MiB" for name, most in memory.items()))


if __name__ == "__main__":
    main()
