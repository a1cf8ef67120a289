#!/usr/bin/env python3
"""extract: every tensor of torch's checkpoints, read by NumPy and as raw bytes. The .npy header equals that of numpy.save.

usage: extract.py FSDPCKPT CORPUS      exit 77 without torch or numpy
"""
import io
import os
import subprocess
import sys

try:
    import ml_dtypes
    import numpy as np
    import reference
except ImportError as e:
    print("skipped: %s" % e)
    sys.exit(77)

CASES = ["dcp-torch2.15.0-dtypes-sharded", "dcp-torch2.15.0-shapes", "dcp-torch2.15.0-2d-uneven", "dcp-torch2.15.0-empty"]
ML = ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"]


def extract(program, *args):
    return subprocess.run([program, "extract", *args], check=True, capture_output=True).stdout


def problem(npy, value):
    _, dtype, shape, raw = value
    array = np.load(io.BytesIO(npy), allow_pickle=False)
    if array.shape != shape:
        return "shape %s, not %s" % (array.shape, shape)
    if dtype in ML:
        array = array.view(getattr(ml_dtypes, dtype)) if array.size else array.astype(getattr(ml_dtypes, dtype))
    elif dtype != "complex32" and str(array.dtype) != dtype:
        return "dtype %s, not %s" % (array.dtype, dtype)
    if array.tobytes() != raw:
        return "other elements"
    if dtype not in ML and dtype != "complex32":
        saved = io.BytesIO()
        np.save(saved, array)
        if saved.getvalue() != npy:
            return "not the bytes of numpy.save"
    return None


def main():
    program, corpus = sys.argv[1:3]
    failed = count = 0
    for case in CASES:
        source = os.path.join(corpus, case)
        for name, value in reference.load_dcp(source).items():
            bad = problem(extract(program, source, name, "--to", "npy"), value)
            if extract(program, source, name) != value[3]:
                bad = "raw: other bytes"
            count += 1
            if bad:
                failed += 1
                print("%s: %s (%s): %s" % (case, name, value[1], bad))
    print("%d tensors, %d wrong" % (count, failed))
    return 1 if failed or count < 40 else 0


if __name__ == "__main__":
    sys.exit(main())
