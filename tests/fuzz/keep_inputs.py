#!/usr/bin/env python3
"""Packs the inputs of a fuzzer for replay.c. First reduce them: fuzz_NAME -merge=1 -use_counters=0 REDUCED CORPUS SEEDS

    keep_inputs.py REDUCED tests/fuzz/kept/NAME.gz
"""
import gzip
import os
import struct
import sys


def main():
    folder, out = sys.argv[1:]
    inputs = []
    for name in os.listdir(folder):
        with open(os.path.join(folder, name), "rb") as f:
            inputs.append(f.read())
    with gzip.GzipFile(out, "wb", 9, mtime=0) as f:
        for data in sorted(inputs):  # alike inputs next to each other compress well
            f.write(struct.pack("<I", len(data)) + data)


if __name__ == "__main__":
    main()
