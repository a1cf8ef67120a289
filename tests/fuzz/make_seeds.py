#!/usr/bin/env python3
"""Makes seeds for the fuzzers from the corpus: pickles, torch.save archives, and whole small checkpoints.

    make_seeds.py CORPUS OUT
"""
import os
import struct
import sys


def write(out, kind, data):
    folder = os.path.join(out, kind)
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, f"{len(os.listdir(folder)):04d}"), "wb") as f:
        f.write(data)


def read(*path):
    with open(os.path.join(*path), "rb") as f:
        return f.read()


def archives(data):
    """The consecutive torch.save archives in a .distcp file."""
    at = 0
    while at < len(data):
        end = data.find(b"PK\5\6", at)
        if end < 0:
            return
        yield data[at:end + 22]
        at = end + 22


def main():
    corpus, out = sys.argv[1:]
    if os.path.isdir(out):
        return
    for kind in ("good", "bad", "unsupported"):
        folder = os.path.join(corpus, kind)
        for case in sorted(os.listdir(folder)) if os.path.isdir(folder) else []:
            path = os.path.join(folder, case)
            if case.startswith("st-"):
                for name in sorted(os.listdir(path)):
                    if name.endswith(".safetensors"):
                        write(out, "safetensors", read(path, name))
            if not case.startswith("dcp-") or not os.path.exists(os.path.join(path, ".metadata")):
                continue
            metadata = read(path, ".metadata")
            data = os.path.join(path, "__0_0.distcp")
            items = read(data) if os.path.isfile(data) and not os.path.islink(data) else b""
            if len(metadata) < 4096:
                write(out, "pickle", metadata)
            if len(metadata) + len(items) < 16384:
                write(out, "dcp", struct.pack("<I", len(metadata)) + metadata + items)
            for archive in list(archives(items))[:4]:
                write(out, "zip", archive)
                start = archive.find(b"\x80\x02")
                write(out, "pickle", archive[start:archive.find(b"PK\1\2", start)])
    torch_files(corpus, out)


def torch_files(corpus, out):
    """Whole torch.save files and their pickles, including DTensors and ShardedTensors."""
    for folder, _, names in sorted(os.walk(os.path.join(corpus, "pt"))):
        for name in sorted(names):
            if name.endswith(".pt"):
                data = read(folder, name)
                write(out, "pt", data)
                if data[:2] == b"PK":
                    start = data.find(b"\x80\x02")
                    write(out, "pt", data[start:data.find(b"PK\7\x08", start)])


if __name__ == "__main__":
    main()
