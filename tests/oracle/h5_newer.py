#!/usr/bin/env python3
"""Files of HDF5 2.0 with libver="latest", whose layouts older versions of libhdf5 cannot read: h5_newer.py COMMAND

h5py writes random datasets with every index of chunks, and the command's copy must have the same elements. Damaged indexes must give
one line. Skipped (77) where h5py has an older HDF5.
"""
import os
import random
import subprocess
import sys
import tempfile

try:
    import h5py
    import numpy as np
except ImportError:
    sys.exit(77)

COMMAND = sys.argv[1]
SEED = int(os.environ.get("FSDPCKPT_SEED", "20"))
failures = []


def check(ok, text):
    if not ok:
        failures.append(text)
        print(text)


def run(*args):
    return subprocess.run([COMMAND, *args, "-q"], capture_output=True, text=True)


def same(path, name, copy):
    """Compares every tensor of a file with its copy by h5py."""
    p = run("consolidate", path, "-o", copy, "--force", "--exclude", "@attributes")
    check(p.returncode == 0, f"{name}: exit {p.returncode}: {p.stderr}")
    if p.returncode:
        return
    with h5py.File(path) as a, h5py.File(copy) as b:
        def visit(key, d):
            if isinstance(d, h5py.Dataset):
                check(key in b and d[()].tobytes() == b[key][()].tobytes(), f"{name}: {key} differs")
        a.visititems(visit)


def datasets(f, rng):
    """One dataset per kind of index and a few more, some of them only partly written, with chunks whose filters were skipped."""
    for number in range(60):
        ndim = rng.randint(1, 3)
        shape = tuple(rng.choice((1, 5, 17, 60, 200 if ndim < 3 else 20, 3000 if ndim == 1 else 9)) for _ in range(ndim))
        chunk = tuple(rng.randint(1, min(n, 40)) for n in shape)
        kind = rng.choice(("single", "fixed", "extensible", "tree"))
        most = tuple(n + rng.choice((0, 0, 7)) for n in shape)
        if kind == "single":
            chunk = most = shape
        elif kind == "extensible":
            most = list(most)
            most[rng.randrange(ndim)] = None
        elif kind == "tree":
            most = [None if k < 2 else n for k, n in enumerate(most)]
        options = {"compression": 1} if rng.random() < .7 else {"shuffle": True, "fletcher32": True}
        dtype = rng.choice(("<f4", "<f2", "<i8", "u1", "?"))
        d = f.create_dataset(f"g{number % 7}/{kind}{number}", shape, dtype, chunks=chunk, maxshape=tuple(most), **options)
        data = np.random.default_rng(number).integers(0, 90, shape).astype(dtype)
        if rng.random() < .3:  # part of it
            at = tuple(slice(rng.randrange(n), None) for n in shape)
            d[at] = data[at]
        else:
            d[...] = data
        if rng.random() < .3:  # a chunk without its filters
            size = int(np.prod(chunk)) * d.dtype.itemsize
            d.id.write_direct_chunk((0,) * ndim, bytes(size), (1 << d.id.get_create_plist().get_nfilters()) - 1)


def every_index(home):
    rng = random.Random(SEED)
    path = os.path.join(home, "random.h5")
    with h5py.File(path, "w", libver="latest") as f:
        datasets(f, rng)
        f.attrs["flag"] = True
        f["g1"].attrs["names"] = ["a", "b"]
    same(path, "random", os.path.join(home, "copy.h5"))


def large_indexes(home):
    """Pages of arrays, secondary blocks, trees of several levels; the last chunks are of the largest blocks."""
    path = os.path.join(home, "large.h5")
    with h5py.File(path, "w", libver="latest") as f:
        data = np.arange(30000, dtype="<u2")
        f.create_dataset("fixed", data=data, chunks=(4,), compression=1)
        f.create_dataset("extensible", data=data, chunks=(4,), maxshape=(None,), compression=1)
        f.create_dataset("second", data=data.reshape(5, 6000), chunks=(5, 1), maxshape=(9, None), compression=1)
        f.create_dataset("tree", data=data.reshape(100, 300), chunks=(2, 3), maxshape=(None, None), compression=1)
        sparse = f.create_dataset("sparse", (100000,), "<u2", chunks=(4,), compression=1, fillvalue=7)
        grown = f.create_dataset("grown", (100000,), "<u2", chunks=(4,), maxshape=(None,), compression=1, fillvalue=7)
        for at in (0, 5, 4097 * 4, 60000, 99999):
            sparse[at] = grown[at] = at % 1000
        shrunk = f.create_dataset("shrunk", data=data, chunks=(100,), maxshape=(None,), compression=1)
        shrunk.resize((1234,))
    same(path, "large", os.path.join(home, "copy.h5"))


def types(home):
    """Datatypes that HDF5 2.0 gives a newer version."""
    path = os.path.join(home, "types.h5")
    with h5py.File(path, "w", libver="latest") as f:
        f["bool"] = np.array([[True, False, True]])
        f["complex"] = np.array([1 + 2j, 3], "c8")
        f["compound"] = np.array([(1, 2.5)], [("number", "<i4"), ("x", "<f8", (2,))])
        f["text"] = ["one", "two"]
        f["bool"].attrs.update(flag=True, c=1j, words=["a", "b"], pair=np.array([(1, 2)], [("a", "i1"), ("b", "i2")]))
        f.attrs["root"] = np.array([True, False])
    p = run("extract", path, "@attributes", "--to", "json")
    check(p.returncode == 0 and '"flag": true' in p.stdout, f"attributes: {p}")
    p = run("extract", path, "text", "--to", "json")
    check(p.returncode == 0 and '["one", "two"]' in p.stdout, f"text: {p}")
    p = run("consolidate", path, "-o", os.path.join(home, "copy.h5"), "--force", "--exclude", "@attributes")
    check(p.returncode == 0, f"types: {p}")
    with h5py.File(path) as a, h5py.File(os.path.join(home, "copy.h5")) as b:
        for name in ("bool", "complex", "compound"):
            check(a[name][()].tobytes() == b[name][()].tobytes(), f"{name} differs")


def unsupported(home):
    """What only libhdf5 2.0 could read gives one line that says what to do."""
    path = os.path.join(home, "unsupported.h5")
    with h5py.File(path, "w", libver="latest") as f:
        f.create_dataset("compound", data=np.zeros(90, [("a", "<i4"), ("b", "<f8")]), chunks=(10,), compression=1)
        f.create_dataset("text", data=np.array([b"ab"] * 90), chunks=(10,), compression=1)
    for name in ("compound", "text"):
        p = run("consolidate", path, "-o", os.path.join(home, "no.h5"), "--include", name)
        check(p.returncode == 5 and p.stderr.count("\n") == 1 and "save it again with libver" in p.stderr, f"{name}: {p}")


def damage(home):
    """Changes bytes of indexes: exit 3 with one line, or the same elements where the byte means nothing."""
    path, bad, told = os.path.join(home, "whole.h5"), os.path.join(home, "bad.h5"), 0
    data = np.arange(900, dtype="<f4").reshape(30, 30)
    rng = random.Random(SEED)
    for most in ((30, 30), (None, 30), (None, None)):
        with h5py.File(path, "w", libver="latest") as f:
            f.create_dataset("x", data=data, chunks=(7, 8), maxshape=most, compression=1)
        with open(path, "rb") as f:
            whole = f.read()
        starts = [i for s in (b"FAHD", b"FADB", b"EAHD", b"EAIB", b"EADB", b"BTHD", b"BTLF", b"OHDR") for i in [whole.find(s)] if i > 0]
        for _ in range(40):
            at = rng.choice(starts) + rng.randrange(90)
            with open(bad, "wb") as f:
                f.write(whole[:at] + bytes([whole[at] ^ 1 << rng.randrange(8)]) + whole[at + 1:])
            p = subprocess.run([COMMAND, "extract", bad, "x"], capture_output=True)
            told += p.returncode != 0
            check(p.stdout == data.tobytes() if p.returncode == 0 else p.returncode in (2, 3, 5) and p.stderr.count(b"\n") == 1,
                  f"{most}, byte {at}: {p}")
    check(told > 60, f"only {told} damaged files were refused")


def main():
    if h5py.version.hdf5_version_tuple < (2, 0, 0):
        print("this h5py writes no files of HDF5 2.0")
        return 77
    with tempfile.TemporaryDirectory(prefix="fsdpckpt-") as home:
        for part in (every_index, large_indexes, types, unsupported, damage):
            part(home)
    print(f"{len(failures)} failures")
    return len(failures) > 0


sys.exit(main())
