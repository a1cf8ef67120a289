#!/usr/bin/env python3
"""Compressed targets and compressed sources, against stock h5py.

torch writes a checkpoint with every dtype, shapes with incomplete chunks, and noise that cannot be compressed. It is
consolidated and resharded with --compress. h5py must read the same bits as from the uncompressed file, through chunks, shuffle
and gzip. The output must not depend on the number of threads, and a conversion back must give the uncompressed file byte for
byte. Then both commands convert files that h5py compressed with various chunk shapes and filters.

usage: compress.py FSDPCKPT        exit 77 without torch or h5py
"""
import json
import logging
import os
import shutil
import sys
import tempfile
import warnings

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
try:
    import h5py
    import numpy as np
    import torch
    import torch.distributed.checkpoint as dcp
except ImportError as e:
    print("skipped: %s" % e)
    sys.exit(77)

from checks import Failure, must, must_run
from convert import MESHES

LEAST = 16 << 10  # bytes; smaller tensors are not compressed
DTYPES = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
          "float8_e5m2fnuz", "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool",
          "complex64", "complex128"]
SHAPES = [(40003,), (301, 257), (3, 1, 20000), (17, 5, 3, 101), (7, 300001), (5,), (), (3, 0, 9)]


def values(shape, dtype, kind):
    """Gaussian weights, noise, or zeros with a few ones."""
    torch_dtype = getattr(torch, dtype)
    size = torch.empty(0, dtype=torch_dtype).element_size()
    count = int(np.prod(shape))
    if count == 0:
        return torch.zeros(shape, dtype=torch_dtype)
    if dtype == "bool":
        return torch.rand(shape) < 0.3
    if kind == "noise":
        return torch.randint(0, 256, (count * size,), dtype=torch.uint8).view(torch_dtype).reshape(shape)
    if kind == "zeros":
        out = torch.zeros(count, dtype=torch.uint8).repeat(size)
        out[::997] = 1
        return out.view(torch_dtype).reshape(shape)
    if torch_dtype.is_floating_point or torch_dtype.is_complex:
        wide = torch.randn(shape, dtype=torch.float32) * 0.02
        return wide.to(torch_dtype)
    return torch.arange(count, dtype=torch.int64).remainder(100).to(torch_dtype).reshape(shape)


def make_source(path):
    torch.manual_seed(1)
    tensors = {}
    for i, dtype in enumerate(DTYPES):
        for j, shape in enumerate(SHAPES):
            if np.prod(shape) > 1e6 and dtype not in ("bfloat16", "float64", "bool"):
                continue
            kind = ["weights", "noise", "zeros"][(i + j) % 3]
            tensors["layers.%d.%s.%s" % (j, dtype, kind)] = values(shape, dtype, kind)
    tensors["layers.weights.up"] = values((4096, 512), "bfloat16", "weights")
    dcp.save({"model": tensors, "step": 7}, checkpoint_id=path)


def bits(dataset):
    out = np.empty(dataset.shape, np.dtype("V%d" % dataset.id.get_type().get_size()))
    if out.size:
        dataset.id.read(h5py.h5s.ALL, h5py.h5s.ALL, out, dataset.id.get_type())
    return out.tobytes()


def datasets(path):
    found = {}
    with h5py.File(path, "r") as f:
        f.visititems(lambda name, d: found.update({name: (d.shape, bits(d), dict(
            chunks=d.chunks, compression=d.compression, level=d.compression_opts, shuffle=d.shuffle,
            stored=d.id.get_storage_size(), element=d.id.get_type().get_size(), object="json" in d.attrs))})
                     if isinstance(d, h5py.Dataset) else None)
    return found


def must_hold_the_same(path, reference):
    found = datasets(path)
    must(found.keys() == reference.keys(), "%s: other datasets" % path)
    for name, (shape, data, _) in found.items():
        must(shape == reference[name][0] and data == reference[name][1], "%s: %s differs" % (path, name))
    return found


def must_be_equal(a, b):
    with open(a, "rb") as x, open(b, "rb") as y:
        must(x.read() == y.read(), "%s and %s differ" % (a, b))


def check_storage(found, level):
    """Tensors of at least LEAST bytes are chunked with shuffle and gzip. Noise must not become larger."""
    compressed = 0
    for name, (shape, data, how) in found.items():
        if len(data) < LEAST or how["object"] or shape == ():
            must(how["chunks"] is None, "%s: %d bytes, but chunked" % (name, len(data)))
            continue
        compressed += 1
        chunk = how["chunks"]
        must(chunk is not None and how["compression"] == "gzip" and how["level"] == level, "%s: not deflated" % name)
        must(how["shuffle"] == (how["element"] > 1), "%s: shuffle is %s" % (name, how["shuffle"]))
        must(np.prod(chunk) * how["element"] <= 1 << 20, "%s: a chunk is %s" % (name, chunk))
        padded = np.prod([-(-s // c) * c for s, c in zip(shape, chunk)]) * how["element"]
        must(how["stored"] <= padded, "%s: %d bytes take %d" % (name, len(data), how["stored"]))
        if "zeros" in name and "bool" not in name:
            must(how["stored"] < len(data) / 20, "%s: %d bytes take %d" % (name, len(data), how["stored"]))
        if name.endswith("weights.up"):
            must(how["stored"] < 0.73 * len(data), "%s: %d bytes take %d" % (name, len(data), how["stored"]))
    must(compressed > 40, "only %d datasets are compressed" % compressed)


def targets(program, home):
    source, raw = os.path.join(home, "source"), os.path.join(home, "raw.h5")
    make_source(source)
    must_run(program, "consolidate", source, "-o", raw, "-q")
    reference = datasets(raw)
    for level in (9, 6, 1):
        one, four = os.path.join(home, "one.h5"), os.path.join(home, "four.h5")
        option = ["--compress", str(level), "--force"]
        if level == 9:  # the same code as 6 but ten times as slow, so one run is enough
            must_run(program, "consolidate", source, "-o", one, "-q", *option)
            check_storage(must_hold_the_same(one, reference), level)
            continue
        must_run(program, "consolidate", source, "-o", one, "-q", "-j1", *option)
        report = json.loads(must_run(program, "consolidate", source, "-o", four, "--json", "-j4", *option).stdout)
        must_be_equal(one, four)
        check_storage(must_hold_the_same(one, reference), level)
        size = os.path.getsize(one)
        must(size > report["stored_bytes"] > 0.9 * size, "stored_bytes %d of %d" % (report["stored_bytes"], size))
        back, again = os.path.join(home, "back.h5"), os.path.join(home, "again.h5")
        must_run(program, "consolidate", one, "-o", back, "-q", "--force")
        must_be_equal(back, raw)
        must_run(program, "consolidate", one, "-o", again, "-q", *option, "--memory", "16M")
        must_be_equal(again, one)
        print("level %d: %d datasets, equal" % (level, len(reference)))
    plan = os.path.join(home, "plan.json")
    with open(plan, "w", encoding="utf-8") as f:
        json.dump({"*": "colwise", "layers.1.*": "rowwise", "*.up": "rowwise"}, f)
    for mesh in MESHES:
        out, other, back = (os.path.join(home, n) for n in ("out", "other", "back.h5"))
        options = [*mesh, "--compress", "1", "-q"] + (["--tp-plan", plan] if "--tp" in mesh else [])
        must_run(program, "reshard", source, "-o", out, *options)
        must_hold_the_same(os.path.join(out, "index.h5"), reference)
        must_run(program, "reshard", os.path.join(home, "one.h5"), "-o", other, *options, "-j4")
        for name in sorted(os.listdir(out)):
            must_be_equal(os.path.join(out, name), os.path.join(other, name))
        must_run(program, "consolidate", out, "-o", back, "-q", "--force")
        must_be_equal(back, raw)
        shutil.rmtree(out)
        shutil.rmtree(other)
        print("%s: equal" % " ".join(mesh))


def sources(program, home):
    path = os.path.join(home, "foreign.h5")
    rng = np.random.default_rng(3)
    wide = (rng.standard_normal((500, 600)) * 0.02).astype("f4")
    with h5py.File(path, "w") as f:
        pipelines = {"gzip": dict(compression="gzip", compression_opts=2),
                     "shuffle": dict(compression="gzip", compression_opts=1, shuffle=True),
                     "sums": dict(compression="gzip", shuffle=True, fletcher32=True),
                     "only_shuffled": dict(shuffle=True), "only_sums": dict(fletcher32=True), "plain": {}}
        for name, pipeline in pipelines.items():
            for chunks in ((500, 600), (64, 64), (1, 600), (500, 7), (33, 400), True):
                for data in (wide, wide.astype("f8"), (wide * 1e4).astype(">i2"), wide > 0):
                    f.create_dataset("%s/%s/%s" % (name, str(chunks).replace(", ", "x"), data.dtype.str[1:]), data=data,
                                     chunks=chunks, **pipeline)
        holes = f.create_dataset("holes", shape=(5000, 300), dtype="i4", chunks=(100, 100), compression="gzip",
                                 fillvalue=-7)
        holes[1000:1100, 50:150] = 3
    raw, packed = os.path.join(home, "foreign-raw.h5"), os.path.join(home, "foreign-packed.h5")
    must_run(program, "consolidate", path, "-o", raw, "-q")
    must_run(program, "consolidate", path, "-o", packed, "-q", "--compress", "1", "-j3")
    with h5py.File(path, "r") as f, h5py.File(raw, "r") as a, h5py.File(packed, "r") as b:
        names = []
        f.visititems(lambda name, d: names.append(name) if isinstance(d, h5py.Dataset) else None)
        for name in names:
            must(np.array_equal(f[name][...], a[name][...]), "%s differs" % name)
            must(np.array_equal(f[name][...], b[name][...]), "%s differs when compressed" % name)
    print("%d datasets compressed by h5py: equal" % len(names))


def main():
    home = tempfile.mkdtemp(prefix="fc-compress-")
    try:
        targets(sys.argv[1], home)
        sources(sys.argv[1], home)
    except Failure as e:
        print("FAILED: %s" % e)
        return 1
    finally:
        shutil.rmtree(home)
    return 0


if __name__ == "__main__":
    sys.exit(main())
