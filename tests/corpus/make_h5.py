"""Makes the HDF5 files of tests/corpus again, with h5py: make_h5.py [FOLDER]

Not made here: bad/h5-segv-*.h5, which tests/oracle/h5_hostile.py found. libhdf5 1.10.8 crashes on them.
"""
import os
import sys

import h5py
import numpy as np

HERE = sys.argv[1] if len(sys.argv) > 1 else os.path.dirname(os.path.abspath(__file__))


def create(name, **options):
    path = os.path.join(HERE, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    return h5py.File(path, "w", **options)


def layouts(f):
    f["contiguous"] = np.arange(6, dtype="<f4").reshape(2, 3)
    dcpl = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    dcpl.set_layout(h5py.h5d.COMPACT)
    d = h5py.h5d.create(f.id, b"compact", h5py.h5t.STD_I16LE, h5py.h5s.create_simple((3,)), dcpl)
    d.write(h5py.h5s.ALL, h5py.h5s.ALL, np.array([1, -2, 3], "<i2"))
    f.create_dataset("filtered", data=np.arange(60, dtype="<i4").reshape(6, 10), chunks=(4, 4), compression=6,
                     shuffle=True, fletcher32=True)
    f.create_dataset("chunked", data=np.arange(10, dtype="u1"), chunks=(4,))
    f.create_dataset("never_written", (4, 5), "<f8", fillvalue=2.5)
    f.create_dataset("partly_written", (6, 9), "<i4", chunks=(2, 3), fillvalue=-1)[2:4, 3:6] = 7
    f["big_endian"] = np.arange(3, dtype=">u2")
    f["scalar"] = np.float32(1.5)
    f["empty"] = np.zeros((0, 4), "<f4")
    f.create_dataset("scaleoffset", data=np.arange(100, 140), chunks=(16,), scaleoffset=0)
    f["deep/er/tensor"] = np.array([True, False])
    f["deep/tied"] = f["contiguous"]
    f["text"] = "two words"
    f["point"] = np.array((1, 2.0), dtype=[("a", "<i4"), ("b", "<f8")])
    f.attrs["keras_version"] = "3.0"


def main():
    with create("good/h5-layouts.h5") as f:
        layouts(f)
    with create("good/h5-userblock.h5", userblock_size=2048) as f:
        layouts(f)
    with create("good/h5-packed.h5") as f:
        # Large enough to be compressed by a conversion, and small on disk.
        f.create_dataset("ids", data=np.arange(20000, dtype="<i4"), chunks=(6000,), compression=6, shuffle=True)
        f.create_dataset("layers.0.weight", data=(np.arange(90000) % 97).astype("<f2").reshape(300, 300),
                         chunks=(128, 200), compression=1, shuffle=True, fletcher32=True)
        f["bias"] = np.arange(7, dtype="<f4")
    with create("unsupported/h5-parts.h5") as f:
        f["ok"] = np.arange(3, dtype="<f4")
        f.create_dataset("lzf", data=np.arange(9), compression="lzf", chunks=(3,))
        f["refs"] = np.array([f["ok"].ref], dtype=h5py.ref_dtype)
        f["outside"] = h5py.ExternalLink("/etc/passwd", "/x")
        f["nowhere"] = h5py.SoftLink("/not/here")
        f.create_dataset("external", (4,), "u1", external=[("/etc/passwd", 0, 4)])
        v = h5py.VirtualLayout((3,), "<f4")
        v[:] = h5py.VirtualSource("/etc/other.h5", "ok", (3,))
        f.create_virtual_dataset("virtual", v)
    with create("unsupported/h5-schema-3.h5") as f:
        f.attrs["fsdpckpt_schema"] = 3
    with create("bad/h5-dtype-lies.h5") as f:
        f.attrs["fsdpckpt_schema"] = 1
        f["w"] = np.arange(3, dtype="<f4")
        f["w"].attrs["dtype"] = "int32"
    with create("bad/h5-name.h5") as f:
        f.attrs["fsdpckpt_schema"] = 1
        f["a%41"] = 1
    with create("bad/h5-same-name.h5") as f:
        f.attrs["fsdpckpt_schema"] = 1
        f["a.b/c"] = 1
        f["a/b.c"] = 2
    path = os.path.join(HERE, "good/h5-layouts.h5")
    with open(path, "rb") as f:
        data = f.read()
    with open(os.path.join(HERE, "bad/h5-truncated.h5"), "wb") as f:
        f.write(data[: len(data) * 2 // 3])


main()
