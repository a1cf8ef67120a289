#!/usr/bin/env python3
"""Writes what the fault tests of export need and the corpus lacks: a model, and a reference with side files.

usage: make_sources.py DIRECTORY
"""
import json
import os
import shutil
import struct
import sys


def write(path, tensors):
    """tensors: {name: shape}. Every value is 1.0, in float32."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    header, data = {}, b""
    for name, shape in tensors.items():
        count = 1
        for n in shape:
            count *= n
        more = struct.pack("<f", 1) * count
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + len(more)]}
        data += more
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + data)


def main():
    out = sys.argv[1]
    shutil.rmtree(out, ignore_errors=True)
    model = {"model.embed_tokens.weight": [6, 4], "model.layers.0.mlp.up_proj.weight": [3, 4],
             "model.norm.weight": [4]}
    write(os.path.join(out, "model", "model.safetensors"), model)
    write(os.path.join(out, "reference", "model.safetensors"), model)
    for name, text in {"config.json": '{"vocab_size": 6}', "tokenizer.json": "{}"}.items():
        with open(os.path.join(out, "reference", name), "w", encoding="utf-8") as f:
            f.write(text)


if __name__ == "__main__":
    main()
