#!/usr/bin/env python3
"""Writes an HDF5 file of many small tensors, to measure the cost of headers: make_many.py FILE [COUNT]"""
import sys

import h5py
import numpy as np

with h5py.File(sys.argv[1], "w") as f:
    for i in range(int(sys.argv[2]) if len(sys.argv) > 2 else 1000):
        f.create_dataset("model.layers.%d.mlp.down_proj.weight" % i, data=np.full((64, 32), i, np.float32))
