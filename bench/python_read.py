#!/usr/bin/env python3
"""Opening a checkpoint and reading one tensor of it from Python, next to safetensors and PyTorch, in turn.

Usage: PYTHONPATH=build/release/python bench/python_read.py [--dir DIR] [--rounds N]

256 tensors of 2 MiB (bf16), and slices of one tensor of 512 MiB (float32) in safetensors. Every program opens the checkpoint anew each
time; the page cache is warm, and imports are left out.
"""

import argparse
import os
import tempfile
import time
import warnings

import safetensors
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

import fsdpckpt

NAME, ROWS, COLUMNS = "layers.200.w", 1024, 1024
PART = (slice(100, 116), slice(0, 512))
LARGE = (32768, 4096)


def ours(path, part):
    with fsdpckpt.open(path) as checkpoint:
        return checkpoint[NAME][part] if part else checkpoint[NAME].torch()


def theirs(path, part):
    with safetensors.safe_open(path, "pt") as file:
        return file.get_slice(NAME)[part] if part else file.get_tensor(NAME).clone()  # get_tensor maps the file


def by_dcp(path, _):
    state = {NAME: torch.empty(ROWS, COLUMNS, dtype=torch.bfloat16)}
    dcp.load(state, checkpoint_id=path, no_dist=True)


def slices_of(path, rounds):
    """Seconds of each way to copy each slice of the tensor "w" to memory of its own."""
    half = LARGE[0] // 2
    slices = {"1 row": slice(100, 101), "1% of rows": slice(100, 428), "50% of rows": slice(100, 100 + half),
              "1 column": (slice(None), slice(100, 101)), "1% of columns": (slice(None), slice(100, 140)),
              "50% of columns": (slice(None), slice(100, 100 + LARGE[1] // 2))}

    def by_safetensors(index, framework):
        with safetensors.safe_open(path, framework) as file:
            part = file.get_slice("w")[index]
            return part.clone() if framework == "pt" else part  # a tensor of PyTorch is a part of the mapped file

    def by_fsdpckpt(index, read):
        with fsdpckpt.open(path) as checkpoint:
            return read(checkpoint["w"], index)

    ways = {"safetensors, NumPy": lambda i: by_safetensors(i, "np"), "fsdpckpt t[i]": lambda i: by_fsdpckpt(i, lambda t, i: t[i]),
            "safetensors, PyTorch": lambda i: by_safetensors(i, "pt"),
            "fsdpckpt t.torch(i)": lambda i: by_fsdpckpt(i, lambda t, i: t.torch(i)),
            "fsdpckpt t.torch(i, mmap=True)": lambda i: by_fsdpckpt(i, lambda t, i: t.torch(i, mmap=True).clone())}
    best = {}
    for name, index in slices.items():
        for _ in range(rounds if not name.startswith("50%") else max(rounds // 4, 1)):
            for way, run in ways.items():
                began = time.perf_counter()
                run(index)
                best[name, way] = min(best.get((name, way), 1e9), time.perf_counter() - began)
    print(f"\n{'slice of 512 MiB, copied':32}" + "".join(f"{name:>16}" for name in slices) + f"   (best of {rounds}, ms)")
    for way in ways:
        print(f"{way:32}" + "".join(f"{best[name, way] * 1e3:16.2f}" for name in slices))


def prepare(folder):
    torch.manual_seed(0)
    state = {f"layers.{i}.w": torch.randn(ROWS, COLUMNS).to(torch.bfloat16) for i in range(256)}
    paths = {to: os.path.join(folder, to) for to in ("model.safetensors", "model.h5", "dcp", "sharded")}
    safetensors.torch.save_file(state, paths["model.safetensors"])
    dcp.save(state, checkpoint_id=paths["dcp"], no_dist=True)
    fsdpckpt.save(state, paths["model.h5"], progress=None)
    fsdpckpt.reshard(paths["model.h5"], paths["sharded"], to="h5", dp=8, progress=None)
    return paths


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", help="where to write the checkpoints (2.7 GB)")
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        paths = prepare(folder)
        jobs = [
            ("model.safetensors", "safetensors safe_open", theirs, "model.safetensors"),
            ("model.safetensors", "fsdpckpt", ours, "model.safetensors"),
            ("DCP", "torch.distributed.checkpoint.load", by_dcp, "dcp"),
            ("DCP", "fsdpckpt", ours, "dcp"),
            ("HDF5, 8 shards", "fsdpckpt", ours, "sharded"),
            ("HDF5, full", "fsdpckpt", ours, "model.h5"),
        ]
        best = {}
        for _ in range(options.rounds):
            for job in jobs:
                for part in (None, PART):
                    if part is None or job[2] is not by_dcp:
                        began = time.perf_counter()
                        job[2](paths[job[3]], part)
                        seconds = time.perf_counter() - began
                        best[job, part is None] = min(best.get((job, part is None), seconds), seconds)
    print(f"{'checkpoint':20} {'program':36} {'2 MiB':>10} {'16 x 512':>10}   (best of {options.rounds}, ms)")
    for job in jobs:
        part = f"{best[job, False] * 1e3:10.2f}" if (job, False) in best else f"{'-':>10}"
        print(f"{job[0]:20} {job[1]:36} {best[job, True] * 1e3:10.2f} {part}")
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        path = os.path.join(folder, "large.safetensors")
        safetensors.torch.save_file({"w": torch.randn(*LARGE)}, path)
        slices_of(path, options.rounds)


if __name__ == "__main__":
    main()
