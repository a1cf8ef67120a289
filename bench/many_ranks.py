#!/usr/bin/env python3
"""Measures how time and memory grow with the number of files, if what each rank holds is fixed.

    bench/many_ranks.py PROGRAM [--ranks 64,256,1024,4096] [--tensors 100] [--formats h5,dcp,pt,safetensors] [--files 256]

Each rank has one file with TENSORS tensors of 64 float16. reshard makes the files; inspect, check and consolidate read
them, each with at most --files open files (ulimit -n) and each the best of --rounds. The peers run in the same round:
what h5py, torch or safetensors need to open the same files, and torch to merge them, without the start of Python. Each
cell is the seconds, and after the slash the processor seconds, which other jobs on the machine disturb less. A peer that
took more than --patience seconds is left out for more ranks; 0 leaves out all. The last lines say how many times more
the largest number of ranks takes than the smallest. The Python in FSDPCKPT_PYTHON (default: this one) needs numpy, h5py,
safetensors and torch.
"""
import argparse
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time

PYTHON = os.environ.get("FSDPCKPT_PYTHON", sys.executable)
PEERS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "peers.py")
OPENS = {"h5": "open_h5py", "dcp": "read_dcp_metadata", "pt": "load_rank_files", "safetensors": "open_safetensors"}
MERGES = {"dcp": "dcp_to_torch", "pt": "merge_rank_files", "safetensors": "consolidate_hf"}
COMMANDS = ("reshard", "inspect", "check", "consolidate")
COLUMNS = ("ranks", "format", *(f"{c}, s" for c in COMMANDS), "peak, MiB", "peer opens, s", "peer merges, s", "its peak, MiB")


def make_source(path, ranks, tensors):
    """Runs in a separate process, because the peak memory of a command starts at that of its parent."""
    import numpy as np
    from safetensors.numpy import save_file
    random = np.random.default_rng(1)
    save_file({"model.layers.%d.w%d.weight" % (i // 10, i % 10): random.integers(0, 65536, (ranks, 64), np.uint16)
               .view(np.float16) for i in range(tensors)}, path)


def measure(command, files=None):
    """Returns the (seconds, processor seconds), the peak MiB and the output of a command."""
    def limit():
        if files:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    with tempfile.TemporaryFile("w+") as output:
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=output, preexec_fn=limit)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - started
        if status != 0:
            sys.exit("%s: failed with status %d" % (" ".join(command), status))
        output.seek(0)
        return (seconds, usage.ru_utime + usage.ru_stime), usage.ru_maxrss / 1024, output.read()


class Peers:
    """The peers of one format; a slow one is not asked again."""

    def __init__(self, patience):
        self.patience = patience
        self.slow = set()

    def measure(self, name, source, target):
        if not name or name in self.slow or self.patience == 0:
            return None, 0
        shutil.rmtree(target, ignore_errors=True)
        _, peak, text = measure([PYTHON, PEERS, name, source, target])
        seconds, used = (float(re.search(word + r": ([0-9.]+)", text).group(1)) for word in ("seconds", "processor"))
        if seconds > self.patience:
            self.slow.add(name)
        if os.path.isdir(target):
            shutil.rmtree(target)
        elif os.path.exists(target):
            os.remove(target)
        return (seconds, used), peak


def best(values):
    """The least (seconds, processor seconds) that were measured, or None."""
    found = [v for v in values if v is not None]
    return tuple(map(min, zip(*found))) if found else None


def measure_format(args, home, model, name, ranks, peers):
    """Returns the row of one format: seconds of each command, the peak, and the peers' times and peak."""
    made, whole, peak, theirs = os.path.join(home, "made"), os.path.join(home, "whole.safetensors"), 0, 0
    commands = {"reshard": [model, "-o", made, "--to", name, "--dp", str(ranks), "-q", "--force"], "inspect": [made],
                "check": [made], "consolidate": [made, "-o", whole, "--force", "-q"]}
    times = {key: [] for key in (*COMMANDS, "opens", "merges")}
    for _ in range(args.rounds):
        for command, rest in commands.items():
            seconds, memory, _ = measure([args.program, command, *rest], args.files)
            times[command].append(seconds)
            peak = max(peak, memory)
        for key, table in (("opens", OPENS), ("merges", MERGES)):
            seconds, memory = peers.measure(table.get(name), made, os.path.join(home, "merged"))
            times[key].append(seconds)
            theirs = max(theirs, memory)
    shutil.rmtree(made)
    return {**{key: best(values) for key, values in times.items()}, "peak": peak, "theirs": theirs}


def show(ranks, name, row):
    seconds = ["–" if row[key] is None else "%.2f / %.2f" % row[key] for key in (*COMMANDS, "opens", "merges")]
    theirs = "%.0f" % row["theirs"] if row["theirs"] else "–"
    cells = [f"{ranks:,}", name, *seconds[:4], "%.0f" % row["peak"], *seconds[4:], theirs]
    print("| " + " | ".join(cells) + " |", flush=True)


def main():
    if sys.argv[1:2] == ["--make"]:
        return make_source(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("program", type=os.path.abspath)
    parser.add_argument("--ranks", default="64,256,1024,4096")
    parser.add_argument("--tensors", type=int, default=100)
    parser.add_argument("--formats", default="h5,dcp,pt,safetensors")
    parser.add_argument("--files", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--patience", type=float, default=60)
    parser.add_argument("--directory", help="where the files go; default: a temporary directory")
    args = parser.parse_args()
    peers, rows = Peers(args.patience), {}
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS))
    with tempfile.TemporaryDirectory(dir=args.directory) as home:
        for ranks in map(int, args.ranks.split(",")):
            model = os.path.join(home, "model.safetensors")
            subprocess.run([PYTHON, os.path.abspath(__file__), "--make", model, str(ranks), str(args.tensors)], check=True)
            for name in args.formats.split(","):
                rows[name, ranks] = measure_format(args, home, model, name, ranks, peers)
                show(ranks, name, rows[name, ranks])
    least, most = min(r for _, r in rows), max(r for _, r in rows)
    print(f"\n{most / least:.0f} × the ranks take, in processor seconds and in memory:")
    for name in args.formats.split(","):
        few, many = rows[name, least], rows[name, most]
        print(f"{name}: " + ", ".join("%s %.0f ×" % (key, many[key][1] / max(few[key][1], 0.001)) for key in COMMANDS) +
              ", peak %.0f ×" % (many["peak"] / few["peak"]))


if __name__ == "__main__":
    main()
