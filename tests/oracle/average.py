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
from fractions import Fraction

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
try:
    import numpy as np
    import torch
    import torch.distributed.checkpoint as dcp
except ImportError as e:
    print("skipped: %s" % e)
    sys.exit(77)

from checks import must_run, run_main
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


def rounded(exact, dtype):
    """float64 values rounded once to a narrower type. torch rounds to float32 in between, so the neighbours are tried."""
    if dtype == torch.float32:
        return exact.to(dtype)
    best = exact.to(dtype)
    bits = best.view(torch.uint8 if best.itemsize == 1 else torch.int16)
    for step in (1, -1):
        other = (bits + step).view(dtype)
        this, that = best.double(), other.double()
        near, far = (that - exact).abs(), (this - exact).abs()
        ties = (near == far) & ((bits & 1) == 1)
        better = that.isfinite() & this.isfinite() & (that.signbit() == this.signbit()) & ((near < far) | ties)
        best = torch.where(better, other.view(bits.dtype), best.view(bits.dtype)).view(dtype)
        bits = best.view(bits.dtype)
    return best


def exact_mean(parts, weights):
    """float64 values of float64 parts, rounded once: with 64 bits, and where these leave a doubt, as rational numbers."""
    divisor = len(parts) if weights is None else 1
    weights = [1.0] * len(parts) if weights is None else weights
    terms = [np.longdouble(w) * p.astype(np.longdouble) for w, p in zip(weights, parts)]
    wide, doubt = sum(terms) / divisor, sum(abs(t) for t in terms) * np.longdouble(2) ** -60
    out = np.array(wide.astype(np.float64))
    for at in zip(*np.nonzero((wide - doubt).astype(np.float64) != (wide + doubt).astype(np.float64))):
        out[at] = float(sum(Fraction(w) * Fraction(float(p[at])) for w, p in zip(weights, parts)) / divisor)
    return torch.from_numpy(out)


def mean(tensors, weights):
    """Narrow types: numpy's mean in float64, rounded once. float64: the exact mean, rounded once."""
    dtype = tensors[0].dtype
    parts = [(torch.view_as_real(t) if t.is_complex() else t).double().numpy() for t in tensors]
    if dtype in (torch.float64, torch.complex128):
        total = exact_mean([np.atleast_1d(p) for p in parts], weights).reshape(parts[0].shape)
    elif weights is None:
        total = torch.from_numpy(np.asarray(np.mean(parts, axis=0)))
    else:
        terms = [w * p for w, p in zip(weights, parts)]
        total = torch.from_numpy(np.asarray(sum(terms[1:], terms[0])))  # from the first term: 0 + -0 is 0
    if tensors[0].is_complex():
        return torch.view_as_complex(total.to(torch.float32) if dtype == torch.complex64 else total)
    return total if dtype == torch.float64 else rounded(total, dtype)


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
    print("averages of %d values are numpy's, rounded once, bit for bit" % len(states[0]))
    return 0


if __name__ == "__main__":
    run_main(main)
