#!/usr/bin/env python3
"""Makes one HDF5 file of Gaussian bf16 weights, contiguous, with LLaMA's names and shapes: make_weights.py FILE --size 1G

The compression ratio depends on the values, so these resemble trained weights: each tensor is normal with its own
deviation. Tensors are windows into one pool of random numbers, because drawing each value would take too long.
"""
import argparse

import h5py
import numpy as np

HIDDEN, WIDE = 4096, 14336
SHAPES = {"attn.wq": (HIDDEN, HIDDEN), "attn.wk": (HIDDEN // 4, HIDDEN), "attn.wv": (HIDDEN // 4, HIDDEN),
          "attn.wo": (HIDDEN, HIDDEN), "mlp.gate": (WIDE, HIDDEN), "mlp.up": (WIDE, HIDDEN), "mlp.down": (HIDDEN, WIDE),
          "norm": (HIDDEN,)}


def bfloat16():
    t = h5py.h5t.IEEE_F32LE.copy()
    t.set_fields(15, 7, 8, 0, 7)
    t.set_precision(16)
    t.set_size(2)
    t.set_ebias(127)
    return t


def to_bf16(values):
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("file")
    ap.add_argument("--size", default="1G")
    args = ap.parse_args()
    wanted = int(args.size[:-1]) << {"K": 10, "M": 20, "G": 30}[args.size[-1]]
    rng = np.random.default_rng(0)
    pool = rng.standard_normal(WIDE * HIDDEN + (1 << 22), dtype=np.float32)
    kind, made, layer = bfloat16(), 0, 0
    with h5py.File(args.file, "w") as f:
        while made < wanted:
            for name, shape in SHAPES.items():
                count = int(np.prod(shape))
                at = int(rng.integers(0, 1 << 22))
                values = to_bf16(pool[at:at + count] * np.float32(rng.uniform(0.01, 0.05))).reshape(shape)
                d = h5py.h5d.create(f.id, ("layers.%d.%s" % (layer, name)).encode(), kind,
                                    h5py.h5s.create_simple(shape))
                d.write(h5py.h5s.ALL, h5py.h5s.ALL, values, kind)
                made += 2 * count
            layer += 1


if __name__ == "__main__":
    main()
