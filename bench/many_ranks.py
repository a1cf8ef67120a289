#!/usr/bin/env python3
"""Measures how time and memory grow with the number of ranks if the tensors per rank are fixed. One table per format.

    bench/many_ranks.py PROGRAM [--ranks 64,256,1024,4096] [--tensors 100] [--formats h5,dcp,pt,safetensors] [--files 256]

Each rank holds TENSORS tensors of 64 bfloat16. For each number of ranks and each format, it measures reshard, inspect,
check and consolidate with at most --files open files (ulimit -n), and the time h5py takes to open every dataset of
index.h5. Each is measured once, so the machine should be idle. The last column, the time of consolidate per rank, shows
whether growth is linear. Needs numpy and safetensors; h5py for its column.
"""
import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time

COLUMNS = ("ranks", "format", "reshard", "inspect", "check", "consolidate", "MiB", "ms per rank")


def source(path, ranks, tensors):
    """Runs in a separate process, because the peak memory of a command starts at that of its parent."""
    import numpy as np
    from safetensors.numpy import save_file
    random = np.random.default_rng(1)
    save_file({"model.layers.%d.w%d.weight" % (i // 10, i % 10): random.integers(0, 65536, (ranks, 64), np.uint16)
               for i in range(tensors)}, path)


def measure(command, files):
    """Returns the seconds and the peak MiB of a command."""
    def limit():
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, preexec_fn=limit)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    if status != 0:
        sys.exit("%s: failed with status %d" % (" ".join(command), status))
    return seconds, usage.ru_maxrss / 1024


def h5py_seconds(index):
    import h5py
    started = time.perf_counter()
    with h5py.File(index) as f:
        f.visititems(lambda name, value: None)
    print("%.2f s" % (time.perf_counter() - started))


def apart(*arguments):
    """Returns the output of this program with these arguments."""
    command = [sys.executable, os.path.abspath(__file__), *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def main():
    if sys.argv[1:2] == ["--make"]:
        return source(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    if sys.argv[1:2] == ["--h5py"]:
        return h5py_seconds(sys.argv[2])
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("program")
    parser.add_argument("--ranks", default="64,256,1024,4096")
    parser.add_argument("--tensors", type=int, default=100)
    parser.add_argument("--formats", default="h5,dcp,pt,safetensors")
    parser.add_argument("--files", type=int, default=256)
    parser.add_argument("--directory", help="where the files go; default: a temporary directory")
    args = parser.parse_args()
    program = os.path.abspath(args.program)
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS))
    with tempfile.TemporaryDirectory(dir=args.directory) as home:
        for ranks in map(int, args.ranks.split(",")):
            model = os.path.join(home, "model.safetensors")
            apart("--make", model, ranks, args.tensors)
            for name in args.formats.split(","):
                made, whole = os.path.join(home, "made"), os.path.join(home, "whole.safetensors")
                peak, row = 0, []
                for command in (["reshard", model, "-o", made, "--to", name, "--dp", str(ranks), "-q"],
                                ["inspect", made], ["check", made],
                                ["consolidate", made, "-o", whole, "--force", "-q"]):
                    seconds, memory = measure([program, *command], args.files)
                    peak = max(peak, memory)
                    row.append(seconds)
                print("| %d | %s | %s | %.0f | %.2f |" % (ranks, name, " | ".join("%.2f s" % s for s in row), peak,
                                                         1000 * row[-1] / ranks), flush=True)
                if name == "h5":
                    print("| %d | h5py opens index.h5 | | %s | | | | |" % (ranks, apart("--h5py", os.path.join(made, "index.h5"))),
                          flush=True)
                shutil.rmtree(made)


if __name__ == "__main__":
    main()
