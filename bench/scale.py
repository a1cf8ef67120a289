#!/usr/bin/env python3
"""Makes tables of the data that 8 … 16,384 ranks hold, send and keep in memory for a model of 10^12 parameters.

    bench/scale.py build/dev/bench/scale_plan                        # prints them
    bench/scale.py build/dev/bench/scale_plan --docs docs/SCALING.md # writes them into that file

The numbers come from scale_plan, which plans with the library and reads no data, so they are the same on every machine.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
BEGIN, END = "<!-- bench/scale: begin -->", "<!-- bench/scale: end -->"
RANKS = (8, 64, 512, 1024, 4096, 16384)
DATASET, MAPPING = 560, 145  # header bytes, measured on 1,000 tensors over 256 and 1,024 ranks


def size(n):
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if n < 1000 or unit == "TB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.3g} {unit}" if n < 1000 else f"{n:,.0f} {unit}"
        n /= 1000


def table(head, rows):
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield "| " + " | ".join(str(c) for c in row) + " |"
    yield ""


class Plans:
    def __init__(self, program, schema):
        self.program, self.schema, self.known = program, schema, {}

    def __call__(self, source, target):
        if (source, target) not in self.known:
            out = subprocess.run([self.program, self.schema, source, target], check=True, capture_output=True, text=True)
            self.known[source, target] = json.loads(out.stdout)
        return self.known[source, target]


def held(plan):
    yield "The memory of one rank, fully sharded: bf16 weights as FSDP2 shards them (Shard(0) of each tensor) and as FSDP1 does (one flat"
    yield "parameter per unit), and float32 weights, gradients and Adam state (16 bytes per parameter) of the busiest rank."
    yield ""
    rows = []
    for n in RANKS:
        p = plan(str(n), f"{n // 8}x8")
        rows.append((f"{n:,}", size(2 * p["numel"] / n), f"{size(p['from_smallest'])} – {size(p['from_largest'])}",
                     f"{p['from_largest'] * n / (2 * p['numel']):.3f}",
                     f"{size(p['to_smallest'])} – {size(p['to_largest'])}", size(2 * p["shard_numel"]),
                     size(8 * p["from_largest"])))
    yield from table(("ranks", "even share", "Shard(0)", "largest : even", "dp × tp 8", "flat", "training state"), rows)


def step(plan):
    yield "A training step of FSDP with one unit per transformer block, all in bf16: the bytes that each rank receives for two all-gathers"
    yield "of every unit (forward, backward) and sends to reduce-scatter the gradients, the number of messages as a ring"
    yield "and as a tree of recursive halving, and the bytes that are unsharded at a time when the next unit is prefetched."
    yield ""
    rows = []
    for n in RANKS:
        p = plan(str(n), f"{n // 8}x8")
        shard = 2 * p["shard_numel"]
        rows.append((f"{n:,}", p["units"], size(2 * (n - 1) * shard), size((n - 1) * shard),
                     f"{3 * p['units'] * (n - 1):,}", f"{3 * p['units'] * (n - 1).bit_length():,}",
                     size(shard / p["units"]), size(p["two_units"])))
    yield from table(("ranks", "units", "all-gathered", "reduce-scattered", "messages, ring", "messages, tree",
                      "per message, ring", "unsharded"), rows)


def moved(plan):
    yield "A change of layout: which rank reads from which. A message is the part of one tensor that one rank needs from another; partners are"
    yield "the ranks that one rank reads from."
    yield ""
    rows = []
    for n in RANKS:
        for source, target in ((str(n), f"{n // 8}x8"), (f"{n // 8}x8", str(n)), (str(n), str(n // 2))):
            p = plan(source, target)
            rows.append((source.replace("x", " × "), target.replace("x", " × "), size(p["remote_bytes"]),
                         f"{p['messages']:,}", f"{p['most_messages']:,}", f"{p['most_partners']:,}",
                         size(p["remote_bytes"] / p["messages"]) if p["messages"] else "–", size(p["most_received"])))
    yield from table(("from", "to", "moves", "messages", "most of one rank", "partners at most", "per message", "most received"),
                     rows)


def files(plan):
    yield f"The sharded HDF5 target, with {DATASET} bytes of headers per dataset and {MAPPING} per mapping of `index.h5`:"
    yield ""
    rows = []
    for n in RANKS:
        p = plan(str(n), f"{n // 8}x8")
        datasets = n * p["tensors"]
        rows.append((f"{n // 8} × 8", f"{n:,}", f"{datasets:,}", size(datasets * DATASET), size(p["tensors"] * DATASET),
                     f"{p['boxes']:,}", size(p["boxes"] * MAPPING)))
    yield from table(("mesh", "shard files", "datasets", "headers", "of one file", "mappings", "`index.h5`"), rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", help="scale_plan of the build")
    parser.add_argument("--docs", help="replace the tables in this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        schema = os.path.join(home, "dense.json")
        with open(schema, "w") as f:
            subprocess.run([sys.executable, os.path.join(HERE, "make_schema.py"), "dense"], stdout=f,
                           stderr=subprocess.DEVNULL, check=True)
        plan = Plans(args.program, schema)
        text = "\n".join(line for part in (held, step, moved, files) for line in part(plan))
        peak = max(p["peak_kib"] for p in plan.known.values())
        seconds = sum(p["seconds"] for p in plan.known.values())
    print(text)
    print(f"{len(plan.known)} plans, {seconds:.1f} s, {peak // 1024} MiB at most", file=sys.stderr)
    if args.docs:
        with open(args.docs) as f:
            before, _, rest = f.read().partition(BEGIN)
        after = rest.partition(END)[2]
        with open(args.docs, "w") as f:
            f.write(before + BEGIN + "\n" + text + END + after)


if __name__ == "__main__":
    main()
