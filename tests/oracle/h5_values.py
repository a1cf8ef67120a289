#!/usr/bin/env python3
"""Every value of every dtype in stock h5py, which must never show a wrong number. torch saves all values and fsdpckpt converts
them to a full file and to shards. h5py shows the same values, if necessary in a wider float, or the bits as uint8.

usage: h5_values.py FSDPCKPT       exit 77 without torch or h5py
FSDPCKPT_H5PY_PYTHONS: more Pythons, separated by ":", whose h5py (with another HDF5) must show the same.
"""
import json
import os
import subprocess
import sys
import tempfile

try:
    import h5py
    import numpy as np
except ImportError as e:
    print("skipped: %s" % e)
    sys.exit(77)

BITS = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2")


def compare(home):
    """Compares the values in h5py with expected.npz. Needs only h5py and numpy."""
    expected = np.load(os.path.join(home, "expected.npz"))
    bad = 0
    for name in ("full.h5", "sharded/index.h5"):
        with h5py.File(os.path.join(home, name), "r") as f:
            for key in sorted(expected.files):
                shown, want = f[key][()], expected[key]
                same = shown.shape == want.shape
                if same and want.dtype.kind in "fc":
                    same = np.array_equal(shown.astype(want.dtype), want, equal_nan=True)
                    same = same and np.array_equal(np.signbit(shown.real), np.signbit(want.real) & ~np.isnan(want)
                                                   | np.signbit(shown.real) & np.isnan(want))
                elif same:
                    same = shown.dtype == want.dtype and np.array_equal(shown, want)
                if not same:
                    print("%s: %s: h5py with HDF5 %s shows other values" % (name, key, h5py.version.hdf5_version))
                    bad += 1
    print("h5py %s with HDF5 %s: %d dtypes" % (h5py.version.version, h5py.version.hdf5_version, len(expected.files)))
    return bad


def make(tool, home):
    import torch
    tensors, expected = {}, {}
    for name in ("bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "bfloat16",
                 "float32", "float64", "complex32", "complex64", "complex128", "float8_e5m2") + BITS:
        dtype = getattr(torch, name, None)
        if dtype is None:
            continue
        if name == "bool":
            t = torch.tensor([False, True] * 8)
        elif name in BITS or name == "float8_e5m2" or dtype in (torch.uint8, torch.int8):
            t = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(dtype)
        elif dtype in (torch.float16, torch.bfloat16, torch.int16, torch.uint16):
            t = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
        else:
            bits = torch.randint(-2**62, 2**62, (512,), generator=torch.Generator().manual_seed(1)) * 2
            t = bits.view(dtype)
        tensors[name] = t
        if name in BITS:
            expected[name] = t.view(torch.uint8).numpy()
        elif name in ("bfloat16", "float8_e5m2"):
            expected[name] = t.to(torch.float32).numpy()
        elif name == "complex32":
            continue  # numpy has no such type; h5py shows a compound of two float16
        else:
            expected[name] = t.numpy()
    torch.save(tensors, os.path.join(home, "values.pt"))
    np.savez(os.path.join(home, "expected.npz"), **expected)
    subprocess.run([tool, "consolidate", "values.pt", "-o", "full.h5", "-q"], cwd=home, check=True)
    subprocess.run([tool, "reshard", "values.pt", "-o", "sharded", "--dp", "4", "-q"], cwd=home, check=True)


def shuffled_by_another_size(tool, home):
    """The shuffle filter has an element size of its own, which libhdf5 goes by."""
    path = os.path.join(home, "shuffled.h5")
    with h5py.File(path, "w") as f:
        f.create_dataset("w", data=np.arange(1000, dtype="f4"), chunks=(250,), shuffle=True, compression=4)
    with open(path, "rb") as f:
        data = f.read()
    assert data.count(b"shuffle\0\4\0\0\0") == 1
    with open(path, "wb") as f:
        f.write(data.replace(b"shuffle\0\4\0\0\0", b"shuffle\0\2\0\0\0"))
    subprocess.run([tool, "extract", path, "w", "-o", "w.npy", "-q"], cwd=home, check=True)
    with h5py.File(path, "r") as f:
        same = np.array_equal(np.load(os.path.join(home, "w.npy")).view("u4"), f["w"][()].view("u4"))
    if not same:
        print("shuffled by another element size: other values than h5py's")
    return not same


def lost_encoding(tool, home):
    """An object without the attribute `encoding` is damaged, and is not converted to something else."""
    import torch
    torch.save({"w": torch.zeros(2), "step": 7}, os.path.join(home, "object.pt"))
    subprocess.run([tool, "consolidate", "object.pt", "-o", "object.h5", "-q"], cwd=home, check=True)
    with h5py.File(os.path.join(home, "object.h5"), "a") as f:
        del f["step"].attrs["encoding"]
    bad = 0
    for status, *args in ((3, "convert", "object.h5", "-o", "back.pt"), (1, "check", "object.h5"), (1, "verify", "object.h5")):
        p = subprocess.run([tool, *args], cwd=home, capture_output=True, text=True)
        if p.returncode != status or "dataset /step: its attribute encoding is missing" not in p.stdout + p.stderr:
            print("an object without encoding:", p)
            bad += 1
    return bad > 0


def changed_encoding(tool, home):
    """The same with another encoding: conversions and inspect notice it, not only verify."""
    bad = 0
    for name in ("hdf5.bytes", "hdf5.string", "torch.sabe", ""):
        subprocess.run([tool, "consolidate", "object.pt", "-o", "changed.h5", "-q", "--force"], cwd=home, check=True)
        with h5py.File(os.path.join(home, "changed.h5"), "a") as f:
            f["step"].attrs["encoding"] = name
        for status, *args in ((3, "convert", "changed.h5", "-o", "back.pt"), (3, "convert", "changed.h5", "-o", "back.h5"),
                              (3, "inspect", "changed.h5"), (1, "check", "changed.h5"), (1, "verify", "changed.h5")):
            p = subprocess.run([tool, *args], cwd=home, capture_output=True, text=True)
            if p.returncode != status or "/step: its attribute encoding was changed" not in p.stdout + p.stderr:
                print("an object with encoding %r:" % name, p)
                bad += 1
    return bad > 0


def unreadable(tool, home):
    """check warns of every dataset that a conversion would refuse."""
    with h5py.File(os.path.join(home, "unreadable.h5"), "w") as f:
        f["good"] = np.ones(3)
        f["link"] = h5py.ExternalLink("missing.h5", "/x")
        layout = h5py.VirtualLayout((3,), "f4")
        layout[:] = h5py.VirtualSource("missing.h5", "d", (3,))
        f.create_virtual_dataset("virtual", layout)
        f.create_dataset("external", (4,), "f4", external=[("missing.raw", 0, 16)])
        kind = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        kind.set_chunk((100,))
        kind.set_filter(32999, h5py.h5z.FLAG_OPTIONAL, ())
        h5py.h5d.create(f.id, b"filter", h5py.h5t.IEEE_F32LE, h5py.h5s.create_simple((100,)), kind)
        f["filter"][:] = 1
        f["reference"] = f["good"].ref
        f.create_dataset("ragged", data=np.array([np.ones(2), np.ones(3)], dtype=object), dtype=h5py.vlen_dtype("f4"))
    p = subprocess.run([tool, "check", "unreadable.h5", "--json"], cwd=home, capture_output=True, text=True)
    found = {f["name"] for f in json.loads(p.stdout)["findings"] if f["kind"] == "unsupported"}
    if p.returncode != 0 or found != {"link", "virtual", "external", "filter", "reference", "ragged"}:
        print("unreadable datasets:", found, p)
        return True
    return False


def main():
    if sys.argv[1] == "--compare":
        return compare(sys.argv[2]) > 0
    try:
        import torch  # noqa: F401
    except ImportError as e:
        print("skipped: %s" % e)
        return 77
    with tempfile.TemporaryDirectory() as home:
        make(os.path.abspath(sys.argv[1]), home)
        bad = compare(home) > 0
        bad |= shuffled_by_another_size(os.path.abspath(sys.argv[1]), home)
        for test in (lost_encoding, changed_encoding, unreadable):
            bad |= test(os.path.abspath(sys.argv[1]), home)
        for python in filter(None, os.environ.get("FSDPCKPT_H5PY_PYTHONS", "").split(":")):
            bad |= subprocess.run([python, os.path.abspath(__file__), "--compare", home]).returncode != 0
    return bad


if __name__ == "__main__":
    sys.exit(main())
