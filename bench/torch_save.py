#!/usr/bin/env python3
"""torch.distributed.checkpoint with HDF5Writer and HDF5Reader next to FileSystemWriter and FileSystemReader, in turn.

Usage: PYTHONPATH=build/release/python bench/torch_save.py [--dir DIR] [--size BYTES] [--rounds N] [--ranks N,N] [--mesh same,other,whole]
           [--dtype bfloat16,float32] [--tensors large,small] [--every] [--docs FILE]

Each gloo rank on this machine saves its rows (Shard(0)) of a model of --size bytes and loads: its rows (same), its columns (other), or
all of the model (whole). A round of a way is:

    save         to the disk: both writers sync their files
    just saved   loads what this machine has just saved
    again        loads it once more
    cold         loads it after the page cache of its files was dropped

Times are from a barrier until the last rank is done. The ways take turns, and the ratios are those of the medians of the rounds; one
more round comes before them, which does not count. The
memory is the highest growth of a rank's resident memory during a save. Without options, the first line of the table is varied in
one respect in each other line; with --every, all combinations are measured. --docs puts the table into a file, between its markers.
"""

import argparse
import itertools
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import run as bench
from fsdpckpt.torch import HDF5Reader, HDF5Writer

BEGIN, END = "<!-- bench/torch_save: begin -->", "<!-- bench/torch_save: end -->"
SHAPES = {"large": (4096, 2048), "small": (256, 128)}
MOST_MATRICES = 1000  # PyTorch's plans of more take longer than the data
SIZES = {"large": "few large", "small": "many small"}
ALL = {"ranks": [4, 1, 2, 8], "mesh": ["same", "other", "whole"], "dtype": ["bfloat16", "float32"], "tensors": ["large", "small"]}
GOALS = {"save": 0.6, "just saved": 1.0, "again": 0.7, "cold": 0.9}
WAYS = {
    "hdf5": (HDF5Writer, HDF5Reader),
    "filesystem": (lambda path: dcp.FileSystemWriter(path, sync_files=True), dcp.FileSystemReader),
}


def make_state(case, size, mesh_of):
    """Matrices and as many vectors, whose rows, columns or wholes the ranks hold."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    dtype = getattr(torch, case["dtype"])
    rows, columns = SHAPES[case["tensors"]]
    torch.manual_seed(dist.get_rank())

    def held(*shape):
        place = Shard(len(shape) - 1) if mesh_of == "other" else Replicate() if mesh_of == "whole" else Shard(0)
        local = list(shape)
        if place.is_shard():
            local[place.dim] //= dist.get_world_size()
        return DTensor.from_local(torch.randn(local).to(dtype), mesh, [place], run_check=False)

    count = min(max(size // (dtype.itemsize * rows * columns), 1), MOST_MATRICES)
    matrices = {f"layers.{i}.weight": held(rows, columns) for i in range(count)}
    return {"model": matrices | {f"layers.{i}.norm": held(columns) for i in range(count)}, "step": 1}


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


def run_round(way, path, state, target, times):
    writer, reader = WAYS[way]
    with Peak() as peak:
        times["save"].append(timed(lambda: dcp.save(state, storage_writer=writer(path))))
    for case in ("just saved", "again", "cold"):
        if case == "cold" and dist.get_rank() == 0:
            drop_cache(path)
        times[case].append(timed(lambda: dcp.load(target, storage_reader=reader(path))))
    if dist.get_rank() == 0:
        shutil.rmtree(path)
        os.sync()
    dist.barrier()
    return peak.most


def run_rank(rank, case, options, folder, results):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=case["ranks"])
    state = make_state(case, options.size, "same")
    target = make_state(case, options.size, case["mesh"])
    times = {way: {kind: [] for kind in GOALS} for way in WAYS}
    memory = dict.fromkeys(WAYS, 0)
    for step in range(-1, options.rounds):  # the first, in which memory is new to the processes or to the machine, does not count
        counted = times if step >= 0 else {way: {kind: [] for kind in GOALS} for way in WAYS}
        for way in sorted(WAYS, reverse=step % 2 == 1):
            most = run_round(way, os.path.join(folder, f"{way}-{step}"), state, target, counted[way])
            memory[way] = max(memory[way], most)
    peaks = [None] * case["ranks"]
    dist.all_gather_object(peaks, memory)
    if rank == 0:
        memory = {way: max(peak[way] for peak in peaks) for way in WAYS}
        Path(results).write_text(json.dumps([times, memory]))
    dist.barrier()
    dist.destroy_process_group()


def measure(case, options):
    """Returns the table's line of a case."""
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        results = os.path.join(folder, "results")
        torch.multiprocessing.spawn(run_rank, (case, options, folder, results), nprocs=case["ranks"])
        times, memory = json.loads(Path(results).read_text())
    cells = [str(case["ranks"]), case["mesh"], case["dtype"], SIZES[case["tensors"]]]
    for kind in GOALS:
        ours, theirs = (statistics.median(times[way][kind]) for way in ("hdf5", "filesystem"))
        cells.append(f"{ours:.2f} / {theirs:.2f} s: {ours / theirs:.2f} ×")
        if ours / theirs > GOALS[kind]:
            cells[-1] += " **not yet**"
    cells.append(f"{memory['hdf5'] >> 20} / {memory['filesystem'] >> 20} MiB")
    line = "| " + " | ".join(cells) + " |"
    print(line, file=sys.stderr)
    return line


def choose_cases(options):
    """The cases that the options name; without --every, those that differ from the first in at most one respect."""
    values = {name: [type(all_values[0])(value) for value in (getattr(options, name) or "").split(",") if value] or all_values
              for name, all_values in ALL.items()}
    cases = [dict(zip(values, row)) for row in itertools.product(*values.values())]
    for case in cases:
        if any(case[name] not in all_values for name, all_values in ALL.items() if name != "ranks"):
            sys.exit(f"torch_save.py: no such case: {case}")
    one = [case for case in cases if case["ranks"] > 1 or case["mesh"] == "same" or len(values["mesh"]) == 1]
    return [case for case in one if options.every or sum(case[name] != values[name][0] for name in values) <= 1]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dir", help="where to write the checkpoints")
    parser.add_argument("--size", type=int, default=512 << 20, help="bytes of the model (default: 512 MiB)")
    parser.add_argument("--rounds", type=int, default=5)
    for name, values in ALL.items():
        parser.add_argument(f"--{name}", help=f"default: {','.join(map(str, values))}")
    parser.add_argument("--every", action="store_true", help="all combinations")
    parser.add_argument("--docs", metavar="FILE", help="put the table into this file, between its markers")
    options = parser.parse_args()
    lines = [measure(case, options) for case in choose_cases(options)]
    goals = "".join(f" {kind}, ≤ {goal} × |" for kind, goal in GOALS.items())
    text = "%s. %d MiB per checkpoint, %d rounds, %s. Each cell: ours / PyTorch's, and the ratio.\n\n" % (
        bench.machine(os.path.realpath(options.dir or tempfile.gettempdir())), options.size >> 20, options.rounds,
        time.strftime("%Y-%m-%d", time.gmtime()))
    text += f"| ranks | mesh | dtype | tensors |{goals} memory of a save |\n{'|---' * 9}|\n" + "\n".join(lines)
    print(text)
    if options.docs:
        bench.write_docs(options.docs, text, BEGIN, END)


if __name__ == "__main__":
    main()
