#!/usr/bin/env python3
"""HDF5 datasets of which h5py wrote few chunks or none: what verify, inspect --stats and diff find is what NumPy finds in the
values that h5py reads, and what they find after h5py has written all of them. Random shapes, chunks, dtypes and fill values.

usage: sparse.py FSDPCKPT        exit 77 without h5py
"""
import json
import os
import subprocess
import sys
import tempfile

try:
    import h5py
    import numpy as np
    from checks import check, finish, run
except ImportError as e:
    print("skipped: %s" % e)
    sys.exit(77)

DTYPES = ["i1", "u1", "i2", ">i2", "f2", "f4", ">f4", "f8", "i8", "u8", "c8", ">c16", "?"]
ROUNDS, DATASETS = 15, 12
random = np.random.default_rng(20)


def value(dtype):
    kind = np.dtype(dtype).kind
    if kind in "fc" and random.random() < 0.2:
        return np.dtype(dtype).type(np.nan)
    return np.dtype(dtype).type(random.integers(0, 2 if kind == "b" else 100))


def some_chunks(shape):
    return tuple(int(min(s, c)) for s, c in zip(shape, random.integers(1, 20, len(shape))))


def some_boxes(shape):
    boxes = []
    for _ in range(random.integers(0, 4)):
        low = [int(random.integers(0, s)) for s in shape]
        boxes.append((tuple(slice(x, x + int(random.integers(1, 8))) for x in low), int(random.integers(1 << 30))))
    return boxes


def describe():
    """What h5py is to make: shape, dtype, chunks, fill value, boxes that are written."""
    shape = tuple(int(n) for n in random.integers(1, 40, random.integers(0, 4)))
    dtype = DTYPES[random.integers(len(DTYPES))]
    chunked = len(shape) > 0 and random.random() < 0.85
    return {"shape": shape, "dtype": dtype, "chunks": some_chunks(shape) if chunked else None,
            "fillvalue": value(dtype) if random.random() < 0.7 else None,
            "compression": "gzip" if chunked and random.random() < 0.3 else None}, some_boxes(shape) if chunked else []


def other(what):
    """The same shape and dtype with other chunks, and sometimes with another fill value or other data."""
    how, boxes = what
    how = dict(how)
    if how["chunks"]:
        how["chunks"] = some_chunks(how["shape"])
    if random.random() < 0.3:
        how["fillvalue"] = value(how["dtype"])
    return how, boxes if random.random() < 0.5 else boxes[:1]


def make(path, datasets, dense):
    truth = {}
    with h5py.File(path, "w") as f:
        for name, (how, boxes) in datasets.items():
            d = f.create_dataset(name, **how)
            for box, seed in boxes:
                numbers = np.random.default_rng(seed).integers(0, 2 if d.dtype.kind == "b" else 100, d[box].shape)
                d[box] = numbers.astype(d.dtype)
            truth[name] = d[()]
            if dense:
                d[...] = truth[name]
    return truth


def sealed(program, path):
    run(program, "verify", "--seal", "-q", path)
    run(program, "verify", "-q", path)
    with open(path + ".fsdpckpt-seal.json") as f:
        return json.load(f)["tensors"]


def close(a, b):
    return bool(np.isclose(a, b, rtol=1e-6, atol=1e-6))


def check_stats(program, path, truth):
    listed = json.loads(run(program, "inspect", "--stats", "--json", path).stdout)
    for t in listed["tensors"]:
        stats, values = t["stats"], np.asarray(truth[t["name"]])
        wide = values.astype("c16" if values.dtype.kind == "c" else "f8").ravel()
        finite = wide[np.isfinite(wide)]
        where = "%s: %s: %s" % (path, t["name"], stats)
        check(stats["values"] == wide.size and stats["finite"] == finite.size and stats["nan"] == np.isnan(wide).sum()
              and stats["zeros"] == (wide == 0).sum(), where)
        if finite.size == 0:
            continue
        mean = complex(*stats["mean"]) if values.dtype.kind == "c" else stats["mean"]
        check(close(mean, finite.mean()) and close(stats["std"], finite.std()), where)
        if values.dtype.kind != "c":
            check(stats["min"] == finite.min() and stats["max"] == finite.max(), where)
            bins = stats["histogram"]
            check(sum(bins["counts"]) + bins["below"] + bins["above"] == finite.size, where)


def bits(a):
    return np.ascontiguousarray(a).view("u1").reshape(np.shape(a) + (-1,))


def check_diff(program, a, b, truth_a, truth_b):
    r = subprocess.run([program, "diff", "--data", "--json", a, b], capture_output=True, text=True)
    items = {i["name"]: i for i in json.loads(r.stdout)["items"]}
    for name, x in truth_a.items():
        where = np.argwhere((bits(x) != bits(truth_b[name])).any(-1))
        found = items.get(name, {"different": 0, "first": None})
        check(found["different"] == len(where), "%s %s: %s: %d different: %s" % (a, b, name, len(where), found))
        if len(where) > 0:
            check(found["first"]["index"] == where[0].tolist(), "%s: first is %s: %s" % (name, where[0], found))
        distance = np.abs(np.asarray(x, "c16") - truth_b[name])
        if len(where) > 0 and not np.isnan(distance).any():
            index = [int(i) for i in np.unravel_index(np.argmax(distance), distance.shape)]
            check(close(found["max_abs"], distance.max()) and (found["max_abs"] == 0 or found["max_abs_index"] == index),
                  "%s: largest is %s at %s: %s" % (name, distance.max(), index, found))


def compare(program, home):
    datasets = {"t%d" % i: describe() for i in range(DATASETS)}
    others = {name: other(what) for name, what in datasets.items()}
    a, a_dense, b, b_dense = (os.path.join(home, n + ".h5") for n in ("a", "a-dense", "b", "b-dense"))
    truth_a, truth_b = make(a, datasets, False), make(b, others, False)
    make(a_dense, datasets, True)
    make(b_dense, others, True)
    check(sealed(program, a) == sealed(program, a_dense), "digests of a")
    check(sealed(program, b) == sealed(program, b_dense), "digests of b")
    check_stats(program, a, truth_a)
    for x in (a, a_dense):
        for y in (b, b_dense):
            check_diff(program, x, y, truth_a, truth_b)


def own_file(program, home):
    """A dataset of ours with its recorded digest and only some of its chunks."""
    source, path = os.path.join(home, "foreign.h5"), os.path.join(home, "own.h5")
    values = np.full((50, 60), 2, "f4")
    values[3:7, 10:20] = 5
    with h5py.File(source, "w") as f:
        f["w"] = values
    run(program, "convert", source, "-o", path, "-q", "--force")
    for shape, good in (((50, 60), True), ((1 << 20, 1 << 19), False)):
        with h5py.File(path, "r+") as f:
            attributes = dict(f["w"].attrs)
            del f["w"]
            d = f.create_dataset("w", shape, "f4", chunks=(7, 9), fillvalue=2)
            d[3:7, 10:20] = 5
            d.attrs.update(attributes)
        found = json.loads(run(program, "verify", "--json", path, ok=1).stdout) # libhdf5's headers are others than ours
        damaged = [d for d in found["defects"] if d["tensor"] == "w"]
        check(len(damaged) == (0 if good else 1) and found["bytes_read"] < 1000, "own file: %s" % found)


def main():
    program = os.path.abspath(sys.argv[1])
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as home:
            compare(program, home)
    with tempfile.TemporaryDirectory() as home:
        own_file(program, home)
    return finish("sparse")


if __name__ == "__main__":
    sys.exit(main())
