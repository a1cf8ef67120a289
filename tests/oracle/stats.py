#!/usr/bin/env python3
"""inspect --stats against NumPy: every dtype, hard numbers, sharded and compressed data, folded lines, histograms.

usage: stats.py FSDPCKPT CORPUS      exit 77 without torch, numpy or ml_dtypes
"""
import json
import math
import os
import subprocess
import sys
import tempfile

try:
    import ml_dtypes
    import numpy as np
    import reference
    import torch
except ImportError as e:
    print("skipped: %s" % e)
    sys.exit(77)

PROGRAM, CORPUS = map(os.path.abspath, sys.argv[1:3])
CASES = ["dcp-torch2.15.0-dtypes", "dcp-torch2.15.0-dtypes-sharded", "dcp-torch2.15.0-2d-uneven", "dcp-torch2.15.0-shapes",
         "dcp-torch2.15.0-train", "dcp-torch2.15.0-empty", "dcp-torch2.15.0-strided", "dcp-torch2.15.0-dtypes-packed"]
SIZES = [(0,), (), (1,), (7,), (511,), (513, 1), (3, 0, 2), (8191,), (8192,), (100003,)]
REAL = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz",
        "float8_e8m0fnu", "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"]
COMPLEX = ["complex64", "complex128"]
FOUR_BITS = [0, .5, 1, 1.5, 2, 3, 4, 6]
problems = []


def run(*args):
    return subprocess.run([PROGRAM, *map(str, args)], check=True, capture_output=True, text=True).stdout


def stats_of(path, *args):
    return {t["name"]: t["stats"] for t in json.loads(run("inspect", path, "--stats", "--json", *args))["tensors"]}


def values(raw, dtype):
    """The elements in the range of NumPy's longdouble. Packed elements are two numbers each."""
    raw = np.frombuffer(raw, "u1")
    if dtype == "float4_e2m1fn_x2":
        codes = np.stack([raw & 15, raw >> 4], 1).reshape(-1)
        return np.array(FOUR_BITS + [-x for x in FOUR_BITS], np.longdouble)[codes]
    if dtype == "complex32":
        return raw.view(np.float16).astype(np.longdouble).view(np.clongdouble)
    if dtype.startswith("complex"):
        return raw.view(dtype).astype(np.clongdouble)
    kind = getattr(ml_dtypes, dtype) if hasattr(ml_dtypes, dtype) else dtype
    some = raw.view(kind)
    return (some.astype(np.float32) if hasattr(ml_dtypes, dtype) else some).astype(np.longdouble)


def near(a, b, scale, digits=1e-9):
    return abs(a - b) <= digits * abs(scale) + 1e-320


def check_moments(told, finite):
    mean = finite.mean()
    distances = np.abs(finite.astype(np.clongdouble) - mean) if np.iscomplexobj(finite) else np.abs(finite - mean)
    std = np.sqrt((distances ** 2).mean())
    scale = max(np.abs(finite).max(), 0)
    got = complex(*told["mean"]) if np.iscomplexobj(finite) else told["mean"]
    # A mean near zero is a difference of large numbers: its error is relative to them.
    if not near(got, mean, mean) and not near(got, mean, scale, 1e-15):
        yield "mean %r, not %r" % (got, mean)
    if not near(told["std"], std, std) and not near(told["std"], std, scale, 1e-15):
        yield "std %r, not %r" % (told["std"], std)


def check_histogram(h, finite):
    """Counts below each edge may differ by the values in a 32nd of a value around it."""
    if sum(h["counts"]) + h["below"] + h["above"] != len(finite):
        yield "histogram of %d values" % (sum(h["counts"]) + h["below"] + h["above"])
    edges = np.linspace(h["from"], h["to"], 65)
    up_to = h["below"]
    for count, edge in zip(h["counts"], edges[1:]):
        up_to += count
        slack = abs(edge) / 30 + 1e-37
        least, most = (finite < edge - slack).sum(), (finite <= edge + slack).sum()
        if not least - 1 <= up_to <= most + 1:
            yield "histogram: %d values up to %g, not %d to %d" % (up_to, edge, least, most)
            return


def check(label, told, raw, dtype):
    x = values(raw, dtype)
    nan = np.isnan(x)
    infinite = ~nan & np.isinf(x)
    finite = x[~nan & ~infinite]
    wanted = {"values": x.size, "finite": finite.size, "zeros": int((x == 0).sum()), "nan": int(nan.sum()), "inf": int(infinite.sum())}
    found = ["%s is %r, not %r" % (k, told[k], v) for k, v in wanted.items() if told[k] != v]
    ordered = finite.size > 0 and not np.iscomplexobj(x)
    if not ordered and (told["min"], told["max"], told["histogram"]) != (None, None, None):
        found.append("extremes of nothing")
    if finite.size == 0 and (told["mean"], told["std"]) != (None, None):
        found.append("mean of nothing")
    if ordered:
        lowest, highest = finite.min(), finite.max()
        integer = "int" in dtype or dtype == "bool"
        exact = (int, int) if integer else (np.float64, np.float64) if dtype == "float64" else (np.float32, np.float32)
        for key, value, kind in zip(("min", "max"), (lowest, highest), exact):
            if kind(told[key]) != kind(value) or isinstance(told[key], int) < integer:
                found.append("%s is %r, not %r" % (key, told[key], value))
    if finite.size:
        found += check_moments(told, finite)
    if ordered and told["histogram"]:
        found += check_histogram(told["histogram"], finite)
    elif ordered and max(abs(finite.min()), abs(finite.max())) < 3e38:
        found.append("no histogram")
    problems.extend("%s (%s): %s" % (label, dtype, p) for p in found)


def raw_of(t):
    return t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b""


def check_file(path, tensors, *args):
    told = stats_of(path, *args)
    if set(told) != set(tensors):
        problems.append("%s: other names" % path)
        return
    for name, t in tensors.items():
        check("%s: %s" % (os.path.basename(path), name), told[name], raw_of(t), str(t.dtype)[6:])


def random_tensors():
    g = torch.Generator().manual_seed(7)
    out = {}
    for dtype in REAL + COMPLEX:
        kind = getattr(torch, dtype)
        for i, shape in enumerate(SIZES):
            bits = torch.randint(0, 256, (math.prod(shape) * kind.itemsize,), dtype=torch.uint8, generator=g)
            if dtype == "bool":
                bits &= 1
            elif i % 2 and kind.is_floating_point and kind.itemsize > 1:  # as weights are
                bits = (torch.randn(math.prod(shape), generator=g) * .02 - .001).to(kind).view(torch.uint8)
            out["%s.n%d" % (dtype, i)] = bits.view(kind).reshape(shape)
    return out


def hard_tensors():
    g = torch.Generator().manual_seed(8)
    noise = torch.randn(70001, generator=g, dtype=torch.float64)
    with_holes = noise.clone()
    with_holes[::5], with_holes[1::700], with_holes[2::900] = float("nan"), float("inf"), -float("inf")
    return {
        "offset32": (1e6 + noise).float(),
        "offset64": 1e12 + noise * 1e-3,
        "huge": noise * 1e305,
        "tiny": noise * 1e-200,
        "subnormal": noise * 1e-310,
        "subnormal32": (noise * 1e-41).float(),
        "both": torch.where(noise > 0, noise * 1e300, noise * 1e-300),
        "constant": torch.full((9999,), 0.1),
        "constant16": torch.full((99999,), 0.1, dtype=torch.bfloat16),
        "zeros": torch.zeros(4097),
        "negative_zero": torch.full((5,), -0.0),
        "cancels": torch.cat([noise, -noise]) * 1e8,
        "sorted": noise.sort().values + 1e5,
        "one_spike": torch.cat([noise.float() * 1e-3, torch.tensor([1e9])]),
        "holes64": with_holes,
        "holes32": with_holes.float(),
        "holes16": with_holes.bfloat16(),
        "few_holes16": with_holes[:100].bfloat16(),
        "only_nan": torch.full((600,), float("nan")),
        "only_nan16": torch.full((60000,), float("nan"), dtype=torch.float16),
        "big_ints": torch.tensor([2 ** 63 - 1, -2 ** 63, 2 ** 62 + 1]),
        "near_ints": 2 ** 62 + torch.arange(5000),
        "complex_holes": torch.complex(with_holes, noise),
    }


def check_folded(folder):
    """A folded line is the statistics of all its tensors."""
    path = os.path.join(folder, "layers.pt")
    parts = [torch.randn(1000 + i) * (i + 1) + i for i in range(12)]
    torch.save({"layers.%d.w" % i: torch.cat([p[:900]]) for i, p in enumerate(parts)}, path)
    line = next(x for x in run("inspect", path, "--stats").splitlines() if x.startswith("layers.{0..11}.w"))
    x = torch.cat([p[:900] for p in parts]).double()
    wanted = ["%.4g" % v for v in (x.mean(), x.std(correction=0), x.min(), x.max())] + ["0", "0", "0"]
    if line.split()[-7:] != wanted:
        problems.append("folded: %s, not %s" % (line, wanted))


def check_corpus():
    for case in CASES:
        path = os.path.join(CORPUS, case)
        told = stats_of(path)
        loaded = {name: v for name, v in reference.load_dcp(path).items() if name in told}
        if set(loaded) != set(told):
            problems.append("%s: only one side has %s" % (case, set(loaded) ^ set(told)))
        for name, (_, dtype, _, raw) in loaded.items():
            check("%s: %s" % (case, name), told[name], raw, dtype)


def main():
    np.seterr(invalid="ignore")  # signaling NaN
    check_corpus()
    with tempfile.TemporaryDirectory() as folder:
        files = {"random": random_tensors(), "hard": hard_tensors()}
        for name, tensors in files.items():
            path = os.path.join(folder, name + ".pt")
            torch.save(tensors, path)
            check_file(path, tensors)
            check_file(path, tensors, "--jobs", 1, "--memory", "1M")
        run("reshard", os.path.join(folder, "hard.pt"), "-o", os.path.join(folder, "sharded"), "--to", "h5", "--dp", 3,
            "--compress", 1)
        check_file(os.path.join(folder, "sharded"), files["hard"])
        one = json.loads(run("inspect", os.path.join(folder, "hard.pt"), "--tensor", "offset32", "--stats", "--json"))
        check("--tensor", one["stats"], raw_of(files["hard"]["offset32"]), "float32")
        check_folded(folder)
    for p in problems[:40]:
        print(p)
    print("%d problems" % len(problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
