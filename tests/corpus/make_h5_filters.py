"""Makes good/h5-filters.h5, good/h5-filters-objects.h5 and unsupported/h5-filters.h5 again, with h5py and hdf5plugin: make_h5_filters.py [FOLDER]

good: for each dtype the group has `plain`, the truth, and the same array through each filter that is decoded. unsupported: the same
array through filters that are not. Written with h5py 3.16.0 (HDF5 2.0.0) and hdf5plugin 7.1.0.
"""
import os
import sys

import h5py
import hdf5plugin as plugin
import numpy as np

HERE = sys.argv[1] if len(sys.argv) > 1 else os.path.dirname(os.path.abspath(__file__))
BLOSC = {"none": plugin.Blosc.NOSHUFFLE, "byte": plugin.Blosc.SHUFFLE, "bit": plugin.Blosc.BITSHUFFLE}


def decoded():
    yield "lzf", dict(compression="lzf")
    yield "lzf-shuffle-fletcher32", dict(compression="lzf", shuffle=True, fletcher32=True)
    yield "zstd", dict(compression=plugin.Zstd(clevel=3))
    yield "zstd-shuffle", dict(compression=plugin.Zstd(clevel=3), shuffle=True)
    yield "bzip2", dict(compression=plugin.BZip2())
    yield "bzip2-shuffle", dict(compression=plugin.BZip2(blocksize=1), shuffle=True)
    yield "lz4", dict(compression=plugin.LZ4())
    yield "lz4-shuffle-blocks", dict(compression=plugin.LZ4(nbytes=1000), shuffle=True)
    yield "bitshuffle", dict(compression=plugin.Bitshuffle(cname="none"))
    yield "bitshuffle-blocks", dict(compression=plugin.Bitshuffle(nelems=64, cname="none"))
    yield "bitshuffle-lz4", dict(compression=plugin.Bitshuffle(cname="lz4"))
    yield "bitshuffle-lz4-blocks", dict(compression=plugin.Bitshuffle(nelems=64, cname="lz4"))
    yield "bitshuffle-zstd", dict(compression=plugin.Bitshuffle(cname="zstd"))
    for compressor in ("blosclz", "lz4", "zlib", "zstd"):
        for name, shuffle in BLOSC.items():
            yield f"blosc-{compressor}-{name}", dict(compression=plugin.Blosc(cname=compressor, clevel=9, shuffle=shuffle))
    yield "blosc2", dict(compression=plugin.Blosc2())  # more: make_h5_blosc2.py


def refused():
    yield "zfp", dict(compression=plugin.Zfp(reversible=True))
    yield "blosc-snappy", dict(compression=plugin.Blosc(cname="snappy", shuffle=plugin.Blosc.SHUFFLE))


def array(dtype):
    """Exponents repeat and the lowest bits do not, as in weights; the last rows are equal."""
    x = np.arange(41 * 33, dtype="u8").reshape(41, 33)
    noise = (x * 0x9E3779B97F4A7C15) >> np.uint64(56)
    return np.where(x < 600, x % 13 + noise % 5, 3).astype(dtype)


def create(name, dtypes, cases):
    with h5py.File(os.path.join(HERE, name), "w", libver=("v110", "v110")) as f:
        for dtype in dtypes:
            f[f"{dtype}/plain"] = array(dtype)
            for case, options in cases():
                f.create_dataset(f"{dtype}/{case}", data=array(dtype), chunks=(30, 33), **options)


def objects():
    """What only libhdf5 can read, through one filter of each kind."""
    values = {"text": np.array([b"word%d" % (i % 7) for i in range(300)]),
              "pair": np.array([(i % 9, i / 2) for i in range(300)], [("a", "<i4"), ("b", "<f8")])}
    with h5py.File(os.path.join(HERE, "good/h5-filters-objects.h5"), "w", libver=("v110", "v110")) as f:
        for group, data in values.items():
            f[f"{group}/plain"] = data
            for case, options in decoded():
                if case in ("lzf-shuffle-fletcher32", "zstd", "bzip2", "lz4", "bitshuffle", "bitshuffle-lz4", "blosc-zlib-byte", "blosc2"):
                    f.create_dataset(f"{group}/{case}", data=data, chunks=(128,), **options)


objects()
create("good/h5-filters.h5", ("f4", "f2"), decoded)
create("unsupported/h5-filters.h5", ("f4",), refused)
