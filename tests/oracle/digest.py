#!/usr/bin/env python3
"""Digests in our HDF5 files against a CRC-64 of torch's own bytes: digest.py FSDPCKPT

Digests of whole tensors in full files and in index.h5, of local boxes in shard files, and of the headers of every file; for
uncut tensors, cuts in rows and columns, compression and casts. Where a conversion can detect a damaged source, it refuses it.
"""
import glob
import os
import subprocess
import sys
import tempfile

try:
    import h5py
    import numpy as np
    import torch
    import torch.distributed.checkpoint as dcp
    from torch_values import bits
except ImportError:
    sys.exit(77)

fsdpckpt = sys.argv[1]
TABLE = []
for i in range(256):
    c = i
    for _ in range(8):
        c = c >> 1 ^ (0xC96C5795D7870F42 if c & 1 else 0)
    TABLE.append(c)


def crc64(data):
    c = 0xFFFFFFFFFFFFFFFF
    for b in data:
        c = TABLE[(c ^ b) & 255] ^ c >> 8
    return c ^ 0xFFFFFFFFFFFFFFFF


def run(*args, status=0):
    p = subprocess.run([fsdpckpt, *args, "-q"], capture_output=True, text=True)
    assert p.returncode == status, (args, p.returncode, p.stderr)
    return p.stderr


STATE = {
    "rows": torch.randn(37, 16), "attention.wq.weight": torch.randn(24, 20).bfloat16(),
    "attention.wo.weight": torch.randn(20, 24).half(), "deep": torch.randint(0, 255, (3, 5, 7, 2), dtype=torch.uint8),
    "long": torch.arange(9000, dtype=torch.int64) // 7, "scalar": torch.tensor(3.5), "none": torch.empty(4, 0),
    "yes": torch.tensor([True, False, True]), "z": torch.randn(6, 2, dtype=torch.complex64),
    "tall": torch.randn(300, 40, dtype=torch.float64),
}


def datasets(f):
    found = []
    f.visititems(lambda name, o: found.append((name, o)) if isinstance(o, h5py.Dataset) else None)
    return found


def check_headers(path):
    """The attribute is the CRC of the file with data, the attribute itself and one checksum set to 0. Finds that checksum."""
    with h5py.File(path, "r") as f:
        value = int(f.attrs["header_crc64"])
        extents = []
        for _, ds in datasets(f):
            if ds.chunks:
                for i in range(ds.id.get_num_chunks()):
                    info = ds.id.get_chunk_info(i)
                    extents.append((info.byte_offset, info.size))
            elif ds.id.get_offset() is not None:
                extents.append((ds.id.get_offset(), ds.id.get_storage_size()))
    data = bytearray(open(path, "rb").read())
    for at, size in extents:
        data[at:at + size] = bytes(size)
    field = value.to_bytes(8, "little")
    at = data.find(field)
    assert at > 0 and data.find(field, at + 1) < 0, path
    data[at:at + 8] = bytes(8)
    fits = 0
    for check in range(at + 8, min(at + 400, len(data) - 3)):
        if data[check:check + 4] != bytes(4):
            masked = data[:check] + bytes(4) + data[check + 4:]
            fits += crc64(masked) == value
    assert fits == 1, (path, fits)


def check_whole(path, dtype=None):
    with h5py.File(path, "r") as f:
        for name, ds in datasets(f):
            t = STATE[name]
            if dtype and t.dtype.is_floating_point:
                t = t.to(dtype)
            assert ds.attrs["crc64"].dtype == np.uint64, name
            assert int(ds.attrs["crc64"]) == crc64(bits(t)), (path, name)


def check_shards(folder):
    covered = 0
    for path in glob.glob(f"{folder}/shard-*.h5"):
        with h5py.File(path, "r") as f:
            for name, ds in datasets(f):
                if "owner" in ds.attrs:
                    assert "crc64" not in ds.attrs, (path, name)
                    continue
                box = tuple(slice(o, o + n) for o, n in zip(ds.attrs["offsets"], ds.shape))
                assert int(ds.attrs["crc64"]) == crc64(bits(STATE[name][box])), (path, name)
                covered += ds.size
    assert covered == sum(t.numel() for t in STATE.values()), covered


def damage(path, name):
    """Flips a bit of the data of a dataset, contiguous or chunked."""
    with h5py.File(path, "r") as f:
        ds = f[name]
        at = ds.id.get_chunk_info(0).byte_offset if ds.chunks else ds.id.get_offset()
    with open(path, "r+b") as f:
        f.seek(at + 5)
        b = f.read(1)
        f.seek(at + 5)
        f.write(bytes([b[0] ^ 4]))


def main():
    torch.manual_seed(1)
    with tempfile.TemporaryDirectory() as d:
        os.chdir(d)
        dcp.save(STATE, checkpoint_id="src")
        run("consolidate", "src", "-o", "full.h5")
        run("consolidate", "src", "-o", "small.h5", "--compress", "1")
        run("consolidate", "src", "-o", "cast.h5", "--dtype", "bfloat16")
        run("reshard", "full.h5", "-o", "rows", "--dp", "5")
        run("reshard", "small.h5", "-o", "both", "--dp", "2", "--tp", "3")
        run("reshard", "both", "-o", "tight", "--dp", "3", "--tp", "2", "--replicas", "2", "--compress", "6")
        run("consolidate", "tight", "-o", "again.h5")
        assert open("again.h5", "rb").read() == open("full.h5", "rb").read()
        for path in ("full.h5", "small.h5", "rows/index.h5", "both/index.h5", "tight/index.h5"):
            check_whole(path)
        check_whole("cast.h5", torch.bfloat16)
        for folder in ("rows", "both", "tight"):
            check_shards(folder)
        few = ("--include", "yes", "--include", "rows")  # Python's CRC is slow
        run("consolidate", "src", "-o", "few.h5", *few)
        run("reshard", "src", "-o", "few", "--dp", "2", *few)
        run("consolidate", "src", "-o", "long.h5", "--include", "long", "--compress", "1")
        for path in ("few.h5", "few/index.h5", "few/shard-00001-of-00002.h5", "long.h5"):
            check_headers(path)
        for path, folder, name in (("full.h5", "full.h5", "tall"), ("both/shard-00000-of-00006.h5", "both", "rows"),
                                   ("tight/shard-00000-of-00012.h5", "tight", "attention.wq.weight")):
            damage(path, name)
            said = run("consolidate", folder, "-o", "bad.h5", status=3)
            assert f"tensor {name}: " in said and "bad.h5" not in os.listdir("."), said
            run("consolidate", folder, "-o", "bad.h5", "--exclude", name)
            os.unlink("bad.h5")


if __name__ == "__main__":
    main()
