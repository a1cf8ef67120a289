"""Makes good/h5-blosc2.h5 and unsupported/h5-blosc2.h5 again: make_h5_blosc2.py [FOLDER]

good: each group has `plain`, the truth, and the same array through Blosc 2: as hdf5plugin's filter writes it, and as python-blosc2 makes
frames and chunks with more choice, which are stored as they are. The truth is what hdf5plugin's filter reads, and a mistake in the
latter is an error here. unsupported: what that filter reads and fsdpckpt does not. Written with h5py 3.16.0, hdf5plugin 7.1.0 and
blosc2 4.14.1.
"""
import os
import sys

import blosc2
import h5py
import hdf5plugin as plugin
import numpy as np

HERE = sys.argv[1] if len(sys.argv) > 1 else os.path.dirname(os.path.abspath(__file__))
FILTERS = {"none": 0, "byte": 1, "bit": 2, "delta": 3}
F, C = blosc2.Filter, blosc2.Codec


def array(shape, dtype):
    """Exponents repeat and the lowest bits do not, as in weights; the last elements are equal."""
    x = np.arange(np.prod(shape), dtype="u8").reshape(shape)
    noise = (x * 0x9E3779B97F4A7C15) >> np.uint64(56)
    return np.where(x < x.size * 0.7, x % 13 + noise % 5, 3).astype(dtype)


def written(group, x, chunk, codecs, filters, level=9):
    """Through hdf5plugin's filter."""
    for codec in codecs:
        for name in filters:
            group.create_dataset(f"{codec}-{name}", data=x, chunks=chunk,
                                 compression=plugin.Blosc2(cname=codec, clevel=level, filters=FILTERS[name]))


def stored(group, name, x, data):
    """One HDF5 chunk whose bytes were made elsewhere."""
    d = group.create_dataset(name, x.shape, x.dtype, chunks=x.shape, compression=32026, compression_opts=(0, 0, 0, 0, 5, 1, 0))
    d.id.write_direct_chunk((0,) * x.ndim, data)


def parameters(x, filters=(F.SHUFFLE,), meta=(0,), **options):
    return blosc2.CParams(**{"typesize": x.itemsize, "filters": list(filters), "filters_meta": list(meta), "nthreads": 1,
                             "codec": C.ZSTD, "clevel": 9, **options})


def frame(x, **options):
    """A frame with one chunk of consecutive bytes."""
    s = blosc2.SChunk(chunksize=x.nbytes, cparams=parameters(x, **options))
    s.append_data(x)
    return s.to_cframe()


def blocks(x, shape, **options):
    """A frame with one chunk, which is an array in blocks of `shape`."""
    return blosc2.asarray(x, chunks=x.shape, blocks=shape, cparams=parameters(x, **options)).to_cframe()


def check(f):
    for group in f.values():
        for name, d in group.items():
            if name == "no-frame":  # as HDF5-Blosc2 wrote it, before hdf5plugin had a filter; the latter does not read it
                read = blosc2.decompress2(d.id.read_direct_chunk((0,))[1])
            else:
                read = d[()].tobytes()
            if read != group["plain"][()].tobytes():
                raise SystemExit(f"{d.name} is not what was written")


def good(f):
    def group(name, x):
        g = f.create_group(name)
        g["plain"] = x
        return g, x

    every = ("blosclz", "lz4", "lz4hc", "zlib", "zstd")
    g, x = group("f4", array((41, 33), "f4"))
    written(g, x, (30, 33), every, FILTERS)
    g, x = group("f4-stored", array((41, 33), "f4"))
    written(g, x, (17, 19), ["lz4"], FILTERS, level=0)
    g, x = group("f2", array(3000, "f2"))
    written(g, x, (1999,), ("blosclz", "zstd"), FILTERS)
    stored(g, "blocks", x, frame(x, blocksize=1024))
    stored(g, "blocks-lz4", x, frame(x, blocksize=1024, codec=C.LZ4, splitmode=blosc2.SplitMode.ALWAYS_SPLIT))
    stored(g, "blocks-delta", x, frame(x, blocksize=1024, filters=(F.DELTA,)))
    stored(g, "blocks-delta-bit", x, frame(x, blocksize=1024, filters=(F.DELTA, F.BITSHUFFLE), meta=(0, 0)))
    stored(g, "blocks-byte-byte", x, frame(x, blocksize=1024, filters=(F.SHUFFLE, F.SHUFFLE), meta=(0, 0)))
    stored(g, "blocks-grouped", x, frame(x, blocksize=1024, meta=(4,)))
    stored(g, "no-frame", x, blosc2.compress2(x, cparams=parameters(x, blocksize=1024)))
    g, x = group("i1", array(1001, "i1"))
    written(g, x, (1001,), ("blosclz", "lz4"), FILTERS)
    g, x = group("u1-one", array((1, 1), "u1"))
    written(g, x, (1, 1), ("blosclz", "zstd"), FILTERS)
    g, x = group("c16", array(301, "c16"))
    written(g, x, (150,), ("lz4",), FILTERS)
    g, x = group("f8", array((5, 7, 9), "f8"))
    written(g, x, (5, 7, 9), ("lz4",), FILTERS)
    for name in ("byte", "bit", "delta"):
        stored(g, f"edges-{name}", x, blocks(x, (2, 3, 4), filters=(F(FILTERS[name]),)))
    stored(g, "edges-delta-byte", x, blocks(x, (2, 3, 4), filters=(F.DELTA, F.SHUFFLE), meta=(0, 0)))
    stored(g, "edges-stored", x, blocks(x, (2, 3, 4), clevel=0))
    stored(g, "rows", x, blocks(x, (1, 1, 9)))
    g, x = group("i2", array((3, 4, 5, 6), "i2"))
    stored(g, "edges", x, blocks(x, (2, 2, 3, 4), codec=C.LZ4HC))
    # The lowest bits of the mantissa are gone, so what remains is the truth.
    x = array(700, "f4") / 7
    cut = (x.view("u4") & np.uint32(2**32 - 2**13)).view("f4")
    g, _ = group("truncated", cut)
    stored(g, "bits", x, frame(x, filters=(F.TRUNC_PREC, F.SHUFFLE), meta=(10, 0)))
    for dtype, value in (("f4", 0), ("f8", np.nan), ("f4", np.nan), ("f2", 7), ("i8", -3)):
        g, x = group(f"equal-{dtype}-{value}", np.full((31, 9), value, dtype))
        written(g, x, (31, 9), ("blosclz",), ("byte",))
        stored(g, "array", x, blosc2.full(x.shape, value, x.dtype, chunks=x.shape, blocks=(4, 5)).to_cframe())
        s = blosc2.SChunk(chunksize=x.nbytes, cparams=parameters(x))
        s.fill_special(x.size, blosc2.SpecialValue.NAN if value != value else blosc2.SpecialValue.ZERO if value == 0 else
                       blosc2.SpecialValue.VALUE, x.dtype.type(value))
        stored(g, "frame", x, s.to_cframe())


def refused(f):
    x = array((40, 30), "f4")
    g = f.create_group("f4")
    g["plain"] = x
    stored(g, "zfp", x, blocks(x, (8, 8), codec=C.ZFP_PREC, codec_meta=32, filters=(F.NOFILTER,)))
    y = np.tile(np.arange(4, dtype="u1"), (64, 16))
    stored(g, "ndlz", y, blocks(y, (32, 32), codec=C.NDLZ, codec_meta=4, filters=(F.NOFILTER,)))
    stored(g, "bytedelta", x, frame(x, filters=(F.SHUFFLE, F.BYTEDELTA), meta=(0, 4)))
    stored(g, "byte-delta", x, frame(x, filters=(F.SHUFFLE, F.DELTA), meta=(0, 0)))
    y = np.tile(array(997, "f4"), 40)
    stored(g, "dictionary", y, frame(y, use_dict=True, blocksize=4096))
    stored(g, "chunks", x, blosc2.asarray(x, chunks=(20, 30), blocks=(10, 30), cparams=parameters(x)).to_cframe())


for name, fill in (("good/h5-blosc2.h5", good), ("unsupported/h5-blosc2.h5", refused)):
    with h5py.File(os.path.join(HERE, name), "w", libver=("v110", "v110")) as made:
        fill(made)
        if fill is good:
            check(made)
