"""Reads and writes safetensors files for the tests of the command, with Python's standard library only."""

import json
import struct

SIZES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E8M0": 1, "U8": 1, "I64": 8, "I32": 4, "U32": 4, "I16": 2, "I8": 1}


def head(shapes, metadata=None):
    """The head of a file with these tensors: {name: (dtype, shape)}. Returns it, the offsets of the data and its size."""
    header, at = {"__metadata__": metadata} if metadata else {}, 0
    for name, (dtype, shape) in shapes.items():
        size = SIZES[dtype]
        for dim in shape:
            size *= dim
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    header.pop("__metadata__", None)
    return struct.pack("<Q", len(text)) + text, [entry["data_offsets"][0] for entry in header.values()], at


def read(path):
    """{name: (dtype, shape, bytes)}"""
    with open(path, "rb") as f:
        data = f.read()
    size, = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + size])
    header.pop("__metadata__", None)
    return {name: (t["dtype"], t["shape"], data[8 + size + t["data_offsets"][0]:8 + size + t["data_offsets"][1]])
            for name, t in header.items()}


def write(path, tensors, metadata=None):
    """{name: (dtype, shape, bytes)}; metadata: {name: text}"""
    start, _, size = head({name: (dtype, shape) for name, (dtype, shape, _) in tensors.items()}, metadata)
    data = b"".join(tensor[2] for tensor in tensors.values())
    assert len(data) == size
    with open(path, "wb") as f:
        f.write(start + data)


def write_zeros(path, shapes):
    """{name: (dtype, shape)}"""
    start, _, size = head(shapes)
    with open(path, "wb") as f:
        f.write(start)
        f.truncate(len(start) + size)
