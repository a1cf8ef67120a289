#!/usr/bin/env python3
"""diff against numpy and torch: every dtype, special values, tolerances, layouts, formats.

torch.distributed.checkpoint saves two state dicts, and one of them is converted to other layouts. For each tensor, diff must
report what numpy computes: how many elements differ, the first of them, the largest errors and where they are, NaNs.

usage: diff.py FSDPCKPT        exit 77 without torch
"""
import itertools
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import warnings

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
try:
    import numpy as np
    import torch
    import torch.distributed.checkpoint as dcp
except ImportError as e:
    print("skipped: %s" % e)
    sys.exit(77)

PROGRAM = sys.argv[1]
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
          torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
INTS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64]
COMPLEX = [torch.complex64, torch.complex128]
SHAPE = (37, 53)
failures = []


def check(condition, *what):
    if not condition:
        failures.append(what)
        print("FAILED:", *what)


def run(*args, status=0):
    p = subprocess.run([PROGRAM, *map(str, args)], capture_output=True, text=True)
    if p.returncode != status or p.stderr:
        raise SystemExit("%s: exit %d instead of %d: %s%s" % (args, p.returncode, status, p.stdout[-500:], p.stderr))
    return p.stdout


def bits(t):
    """The elements as unsigned integers; complex elements as bytes."""
    n = t.element_size()
    raw = np.frombuffer(t.contiguous().view(-1).view(torch.uint8).numpy().tobytes(), np.uint8)
    return raw.reshape(-1, n)


def values(t):
    if t.dtype in COMPLEX:
        return t.reshape(-1).to(torch.complex128).numpy()
    if t.dtype.is_floating_point:
        return t.reshape(-1).to(torch.float64).numpy()
    return np.array([int(x) for x in t.reshape(-1).tolist()], dtype=object)


def distances(a, b):
    """|a - b| and |b| in float64; integers are subtracted exactly first."""
    if a.dtype == object or b.dtype == object:
        return (np.array([float(abs(x - y)) for x, y in zip(a, b)]), np.array([float(abs(y)) for y in b]))
    with np.errstate(all="ignore"):
        return np.abs(a - b), np.abs(b)


def isclose(a, b, rtol, atol, equal_nan):
    if a.dtype == object:
        d, size = distances(a, b)
        return (d <= atol + rtol * size) | (d == 0)
    with np.errstate(all="ignore"):
        return np.isclose(a, b, rtol=rtol, atol=atol, equal_nan=equal_nan)


def expected(ta, tb, tolerance, equal_nan):
    """What diff should report for one tensor: (different, first, max_abs, max_rel, nan_both, nan_one)."""
    a, b = values(ta), values(tb)
    numbers = a.dtype != object
    nan_a, nan_b = (np.isnan(a), np.isnan(b)) if numbers else (np.zeros(a.shape, bool),) * 2
    if tolerance is None:
        equal = (bits(ta) == bits(tb)).all(axis=1)
        if equal_nan:
            equal |= nan_a & nan_b
    else:
        equal = isclose(a, b, *tolerance, equal_nan)
    different = ~equal
    d, size = distances(a, b)
    same = np.array([x == y for x, y in zip(a, b)]) if not numbers else a == b
    d = np.where(same, 0.0, d)
    d = np.where(np.isnan(d), 0.0, d)
    with np.errstate(all="ignore"):
        rel = np.where(d > 0, d / size, 0.0)
    rel = np.where(np.isnan(rel), 0.0, rel)
    return (int(different.sum()), int(np.argmax(different)) if different.any() else None, float(d.max()), float(rel.max()),
            int((nan_a & nan_b & different).sum()), int(((nan_a ^ nan_b) & different).sum()), d, rel)


def real(x):
    return float(x)


def compare_item(name, item, ta, tb, tolerance, equal_nan, context):
    different, first, max_abs, max_rel, nan_both, nan_one, d, rel = expected(ta, tb, tolerance, equal_nan)
    where = (context, name)
    if item is None:
        check(different == 0, where, "not told", different)
        check(tolerance is None or max_abs == 0, where, "not told although close")
        return
    check(item["different"] == different, where, "different", item["different"], different)
    if first is not None:
        check(item["first"]["index"] == list(map(int, np.unravel_index(first, SHAPE))), where, "first", item, first)
    # hypot and abs may differ in the last bit
    check(np.isclose(real(item["max_abs"]), max_abs, rtol=1e-15, atol=0), where, "max_abs", item["max_abs"], max_abs)
    check(np.isclose(real(item["max_rel"]), max_rel, rtol=1e-15, atol=0), where, "max_rel", item["max_rel"], max_rel)
    if max_abs > 0:
        at = np.ravel_multi_index(item["max_abs_index"], SHAPE)
        check(np.isclose(d[at], max_abs, rtol=1e-15, atol=0), where, "max_abs_index")
        at = np.ravel_multi_index(item["max_rel_index"], SHAPE)
        check(np.isclose(rel[at], max_rel, rtol=1e-15, atol=0), where, "max_rel_index")
    check(item["nan_both"] == nan_both, where, "nan_both", item["nan_both"], nan_both)
    check(item["nan_one"] == nan_one, where, "nan_one", item["nan_one"], nan_one)


def random_bits(dtype, generator):
    """Any bit pattern: NaN of all kinds, infinities, subnormals."""
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 256, (*SHAPE, size), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(SHAPE)


def nearby(t, generator):
    """A tensor that is close to `t` in some elements, far from it in others, and pairs up all special values."""
    out = t.clone()
    if t.dtype.is_floating_point or t.dtype.is_complex:
        wide = torch.complex128 if t.dtype.is_complex else torch.float64
        noise = 1 + 1e-3 * torch.randn(SHAPE, generator=generator, dtype=torch.float64)
        pick = torch.rand(SHAPE, generator=generator) < 0.3
        changed = (t.to(wide) * noise).to(t.dtype)
        out = torch.where(pick.expand_as(t), changed.to(wide), t.to(wide)).to(t.dtype)
        special = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1.0, 2.0], dtype=torch.float64)
        pairs = torch.cartesian_prod(special, special)
        n = len(pairs)
        t.view(-1)[:n] = pairs[:, 0].to(t.dtype)
        out.view(-1)[:n] = pairs[:, 1].to(t.dtype)
        return out
    flat = out.view(-1)
    info = torch.iinfo(t.dtype)
    flat[5], t.view(-1)[5] = info.min, info.max
    flat[-1], t.view(-1)[-1] = info.max, info.min
    flat[100] = t.view(-1)[100] // 2
    return out


def make_states(generator):
    a, b = {}, {}
    for dtype in FLOATS + COMPLEX:
        name = str(dtype).replace("torch.", "")
        t = (100 * torch.randn(SHAPE, generator=generator, dtype=torch.float64)).to(dtype)
        b[name + ".near"] = nearby(t, generator)
        a[name + ".near"] = t
        a[name + ".same"] = b[name + ".same"] = random_bits(dtype, generator)
        a[name + ".bits"], b[name + ".bits"] = random_bits(dtype, generator), random_bits(dtype, generator)
    for dtype in INTS:
        name = str(dtype).replace("torch.", "")
        t = random_bits(dtype, generator)
        b[name + ".near"] = nearby(t, generator) if dtype in INTS[:5] else random_bits(dtype, generator)
        a[name + ".near"] = t
        a[name + ".same"] = b[name + ".same"] = random_bits(dtype, generator)
    flags = torch.rand(SHAPE, generator=generator) < 0.5
    a["bool.near"], b["bool.near"] = flags, flags ^ (torch.rand(SHAPE, generator=generator) < 0.01)
    # 448 and 416 are neighbours in e4m3fn; a tool that treats the type as IEEE takes both for NaN and calls them equal.
    a["fp8.neighbours"] = torch.full(SHAPE, 448.0).to(torch.float8_e4m3fn)
    b["fp8.neighbours"] = torch.full(SHAPE, 416.0).to(torch.float8_e4m3fn)
    return a, b


def compare_states(path_a, path_b, a, b, context):
    for tolerance, equal_nan in itertools.product([None, (0.0, 0.0), (1e-3, 0.0), (1e-2, 1e-1)], [False, True]):
        options = [] if tolerance is None else ["--rtol", tolerance[0], "--atol", tolerance[1]]
        options += ["--equal-nan"] if equal_nan else []
        p = subprocess.run([PROGRAM, "diff", path_a, path_b, "--json", *map(str, options)], capture_output=True, text=True)
        check(p.returncode == 1 and not p.stderr, context, options, p.returncode, p.stderr)
        told = json.loads(p.stdout)
        items = {i["name"]: i for i in told["items"]}
        check(told["only_a"] == told["only_b"] == 0, context, "names")
        for name in a:
            compare_item(name, items.get(name), a[name], b[name], tolerance, equal_nan, (context, *options))
        quiet = subprocess.run([PROGRAM, "diff", path_a, path_b, "-q", *map(str, options)], capture_output=True)
        check(quiet.returncode == 1 and not quiet.stdout and not quiet.stderr, context, options, "quiet")


def check_mixed(home):
    """The same values in other dtypes differ without a tolerance, and are equal within one."""
    generator = torch.Generator().manual_seed(5)
    wide = torch.randn(SHAPE, generator=generator)
    for i, narrow in enumerate([torch.bfloat16, torch.float16, torch.float64, torch.float8_e5m2]):
        a, b = {"w": wide}, {"w": wide.to(narrow)}
        pa, pb = os.path.join(home, "wide%d" % i), os.path.join(home, "narrow%d" % i)
        dcp.save(a, checkpoint_id=pa, no_dist=True)
        dcp.save(b, checkpoint_id=pb, no_dist=True)
        told = json.loads(run("diff", pa, pb, "--json", status=1))
        check(told["items"][0]["result"] == "dtype", "mixed", narrow, told)
        err = (wide.double() - b["w"].double()).abs()
        atol = float(err.max())
        told = json.loads(run("diff", pa, pb, "--json", "--atol", repr(atol)))
        if atol > 0:
            check(told["items"][0]["max_abs"] == atol, "mixed", narrow, told)
            told = json.loads(run("diff", pa, pb, "--json", "--atol", repr(atol * 0.999999), status=1))
            check(told["items"][0]["different"] == int((err > atol * 0.999999).sum()), "mixed", narrow, told)


def check_testing(home):
    """For tensors of one dtype, torch.testing.assert_close agrees."""
    generator = torch.Generator().manual_seed(6)
    a = torch.randn(SHAPE, generator=generator, dtype=torch.float64)
    b = a * (1 + 1e-6 * torch.randn(SHAPE, generator=generator, dtype=torch.float64))
    pa, pb = os.path.join(home, "ta"), os.path.join(home, "tb")
    dcp.save({"w": a}, checkpoint_id=pa, no_dist=True)
    dcp.save({"w": b}, checkpoint_id=pb, no_dist=True)
    for rtol, atol in itertools.product([0, 1e-8, 1e-6, 4e-6, 1e-3], [0, 1e-9, 1e-6, 1e-2]):
        try:
            torch.testing.assert_close(a, b, rtol=rtol, atol=atol)
            status = 0
        except AssertionError:
            status = 1
        run("diff", pa, pb, "-q", "--rtol", rtol, "--atol", atol, status=status)


def check_tiles(home):
    """Several threads compare a tensor of many tiles. Their results are combined into one."""
    generator = torch.Generator().manual_seed(8)
    a = torch.randn(1200, 500, generator=generator)
    pa = os.path.join(home, "many-a")
    dcp.save({"w": a}, checkpoint_id=pa, no_dist=True)
    for i in range(12):
        b = a.clone()
        at = torch.randint(0, a.numel(), (4,), generator=generator)
        b.view(-1)[at] += torch.tensor([3.0, 5.0, 5.0, 4.0])
        pb = os.path.join(home, "many-b%d" % i)
        dcp.save({"w": b}, checkpoint_id=pb, no_dist=True)
        d = (a.double() - b.double()).abs().view(-1)
        item = json.loads(run("diff", pa, pb, "--json", "--memory", "8M", "-j", 4, status=1))["items"][0]
        flat = lambda index: index[0] * 500 + index[1]
        check(item["different"] == int((d > 0).sum()), "tiles", i, item)
        check(flat(item["first"]["index"]) == int(at.min()), "tiles", i, item, at)
        check(item["max_abs"] == float(d.max()) and flat(item["max_abs_index"]) == int(d.argmax()), "tiles", i, item)


def main():
    home = tempfile.mkdtemp(prefix="fc-diff-")
    try:
        a, b = make_states(torch.Generator().manual_seed(7))
        pa, pb = os.path.join(home, "a"), os.path.join(home, "b")
        dcp.save(a, checkpoint_id=pa, no_dist=True)
        dcp.save(b, checkpoint_id=pb, no_dist=True)
        compare_states(pa, pb, a, b, "dcp")
        layouts = {"full.h5": ["consolidate"], "packed.h5": ["consolidate", "--compress", "1"],
                   "sharded": ["reshard", "--dp", "5"]}
        plan = os.path.join(home, "plan.json")
        with open(plan, "w") as f:
            json.dump({"*": "rowwise"}, f)
        layouts["tp"] = ["reshard", "--dp", "2", "--tp", "3", "--tp-plan", plan]
        for name, (command, *options) in layouts.items():
            out = os.path.join(home, name)
            run(command, pb, "-o", out, "-q", *options)
            run("diff", pb, out)
            run("diff", out, pb, "--data", "--memory", "1M", "-j", "3")
        compare_states(pa, os.path.join(home, "tp"), a, b, "dcp and 2D shards")
        compare_states(os.path.join(home, "sharded"), pa, b, a, "shards and dcp")
        check_mixed(home)
        check_testing(home)
        check_tiles(home)
    finally:
        shutil.rmtree(home)
    print("%d dtypes, %d failed" % (len(FLOATS + INTS + COMPLEX) + 1, len(failures)))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
