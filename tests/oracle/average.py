#!/usr/bin/env python3
"""`fsdpckpt average` against the same formula in PyTorch, bit for bit.

torch writes the sources (torch.save and DCP; every dtype that has an average, tensors of several chunks, empty and 0-dimensional
tensors, shared integers). They are averaged equally and with weights, to one file and to shards, and torch loads the results.

usage: average.py FSDPCKPT        exit 77 without torch
"""
import logging
import os
import sys
import tempfile
import warnings

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
try:
    import torch
    import torch.distributed.checkpoint as dcp
except ImportError as e:
    print("skipped: %s" % e)
    sys.exit(77)

from checks import Failure, must_run
from torch_values import must_equal

FLOATS = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
          "float8_e5m2fnuz"]
SHAPES = [(), (7,), (0, 3), (300001,), (3, 201, 257)]


def state(seed):
    torch.manual_seed(seed)
    made = {}
    for dtype in FLOATS:
        for shape in SHAPES:
            made["%s%s" % (dtype, list(shape))] = (4 * torch.randn(shape, dtype=torch.float64)).to(getattr(torch, dtype))
    for dtype in ("complex64", "complex128"):
        made[dtype] = torch.randn(1001, 401, dtype=getattr(torch, dtype))
    special = torch.tensor([0.0, -0.0, float("inf"), 1e-45, 3e38, 1.0], dtype=torch.float32)
    made["special"] = special.roll(seed) if seed < 2 else special
    torch.manual_seed(99)  # the same in all sources
    made["ids"] = torch.randint(0, 9, (300001,))
    made["mask"] = torch.rand(50) > 0.5
    made["step"] = 17
    return made


def mean(tensors, weights):
    """Sums in the order of the sources, in float32 or float64, and rounds once."""
    wide = torch.float64 if tensors[0].dtype in (torch.float64, torch.complex128) else torch.float32
    parts = [(torch.view_as_real(t) if t.is_complex() else t).to(wide) for t in tensors]
    total = parts[0] if weights is None else weights[0] * parts[0]
    for i, x in enumerate(parts[1:], 1):
        total = total + (x if weights is None else weights[i] * x)
    if weights is None:
        total = total / len(parts)
    return torch.view_as_complex(total) if tensors[0].is_complex() else total.to(tensors[0].dtype)


def average(states, weights):
    """The mean of numbers; other values come from the first source."""
    def numbers(value):
        return torch.is_tensor(value) and (value.is_floating_point() or value.is_complex())
    return {name: mean([s[name] for s in states], weights) if numbers(first) else first
            for name, first in states[0].items()}


def main():
    tool = sys.argv[1]
    with tempfile.TemporaryDirectory(prefix="fsdpckpt-average-") as home:
        path = lambda name: os.path.join(home, name)
        states = [state(seed) for seed in range(3)]
        for i, s in enumerate(states[:2]):
            torch.save(s, path("%d.pt" % i))
        dcp.save(states[2], checkpoint_id=path("2"), no_dist=True)
        sources = [path("0.pt"), path("1.pt"), path("2")]
        must_run(tool, "average", *sources, "-o", path("mean.pt"), "-q")
        must_equal(average(states, None), torch.load(path("mean.pt"), weights_only=True), "mean")
        must_run(tool, "average", *sources, "-o", path("weighted.pt"), "-q", "--weights", "3,-1,0.5", "--memory", "1M")
        weights = [w / 2.5 for w in (3, -1, 0.5)]
        must_equal(average(states, weights), torch.load(path("weighted.pt"), weights_only=True), "weighted")
        must_run(tool, "average", *sources[:2], "-o", path("sharded"), "-q", "--dp", "3", "--to", "h5", "--compress", "1")
        must_run(tool, "consolidate", path("sharded"), "-o", path("again.pt"), "-q")
        must_equal(average(states[:2], None), torch.load(path("again.pt"), weights_only=True), "sharded")
    print("averages of %d values are torch's, bit for bit" % len(states[0]))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Failure as e:
        print(e)
        sys.exit(1)
