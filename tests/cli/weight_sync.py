"""The delta format of slime, miles and SGLang, written from its description, for the tests: reads and writes versions, and applies
them to a model in memory. Frames and checksums are those of libzstd and libxxhash, called by ctypes, so that the tests share no
code with fsdpckpt.
"""

import ctypes
import ctypes.util
import json
import os
import struct
import sys
import zlib


def load(name):
    found = ctypes.util.find_library(name)
    if not found:
        print(f"there is no lib{name}")
        sys.exit(77)
    return ctypes.CDLL(found)


ZSTD, XXHASH = load("zstd"), load("xxhash")
for function in (ZSTD.ZSTD_compress, ZSTD.ZSTD_decompress, ZSTD.ZSTD_compressBound):
    function.restype = ctypes.c_size_t
ZSTD.ZSTD_getFrameContentSize.restype = ctypes.c_ulonglong
ZSTD.ZSTD_findFrameCompressedSize.restype = ctypes.c_size_t


class Hash128(ctypes.Structure):
    _fields_ = [("low", ctypes.c_uint64), ("high", ctypes.c_uint64)]


XXHASH.XXH3_128bits.restype = Hash128


def compress(data, level=1):
    room = ZSTD.ZSTD_compressBound(ctypes.c_size_t(len(data)))
    out = ctypes.create_string_buffer(room)
    size = ZSTD.ZSTD_compress(out, ctypes.c_size_t(room), bytes(data), ctypes.c_size_t(len(data)), level)
    return out.raw[:size]


def decompress(frame):
    """Decodes one frame, which must be all there is."""
    frame = bytes(frame)
    assert ZSTD.ZSTD_findFrameCompressedSize(frame, ctypes.c_size_t(len(frame))) == len(frame), "more than one frame"
    size = ZSTD.ZSTD_getFrameContentSize(frame, ctypes.c_size_t(len(frame)))
    out = ctypes.create_string_buffer(max(size, 1))
    got = ZSTD.ZSTD_decompress(out, ctypes.c_size_t(size), frame, ctypes.c_size_t(len(frame)))
    assert got == size, "damaged frame"
    return out.raw[:size]


def xxh3_128(data):
    value = XXHASH.XXH3_128bits(bytes(data), ctypes.c_size_t(len(data)))
    return f"{value.high:016x}{value.low:016x}"


CHECKSUMS = {"xxh3-128": xxh3_128, "adler32": lambda data: f"{zlib.adler32(data):08x}"}


def xor(a, b):
    return (int.from_bytes(a, "little") ^ int.from_bytes(b, "little")).to_bytes(len(a), "little")


def encode(encoding, old, new):
    if encoding == "xor":
        return xor(old, new)
    at = [i for i in range(len(new)) if old[i] != new[i]]
    return struct.pack(f"<I{len(at)}I", len(at), *at) + bytes(new[i] for i in at)


def decode(encoding, old, data):
    if encoding == "xor":
        return xor(old, data)
    count, = struct.unpack_from("<I", data)
    new = bytearray(old)
    for place, value in zip(struct.unpack_from(f"<{count}I", data, 4), data[4 + 4 * count:], strict=True):
        new[place] = value
    return bytes(new)


def read_file(path):
    """A safetensors file: its __metadata__ and {name: (entry, bytes)}."""
    with open(path, "rb") as f:
        data = f.read()
    size, = struct.unpack_from("<Q", data)
    header = json.loads(data[8:8 + size])
    metadata = header.pop("__metadata__", {})
    ends = sorted((*entry["data_offsets"],) for entry in header.values())
    assert [begin for begin, _ in ends] == [0, *(end for _, end in ends)][:len(ends)] and (8 + size) % 8 == 0, "gaps"
    assert not ends or 8 + size + ends[-1][1] == len(data), "bytes that belong to no tensor"
    return metadata, {name: (entry, data[8 + size + entry["data_offsets"][0]:8 + size + entry["data_offsets"][1]])
                      for name, entry in header.items()}


def write_file(path, metadata, tensors):
    """{name: (dtype, shape, bytes)}"""
    header, at = ({"__metadata__": metadata} if metadata is not None else {}), 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values()))


def read_model(folder):
    """{name: bytes} of a Hugging Face folder."""
    found = {}
    for name in sorted(os.listdir(folder)):
        if name.endswith(".safetensors"):
            found.update({key: data for key, (_, data) in read_file(os.path.join(folder, name))[1].items()})
    return found


def read_version(folder):
    """The metadata of a delta, and {name: (frame, checksum)}. The index and the files must agree."""
    with open(os.path.join(folder, "model.safetensors.index.json"), encoding="utf-8") as f:
        index = json.load(f)
    found = {}
    for file in sorted(set(index["weight_map"].values())):
        checksums, tensors = read_file(os.path.join(folder, file))
        assert set(checksums) == set(tensors), (checksums.keys(), tensors.keys())
        for name, (entry, data) in tensors.items():
            assert entry["dtype"] == "U8" and entry["shape"] == [len(data)] and index["weight_map"][name] == file
            found[name] = data, checksums[name]
    assert set(found) == set(index["weight_map"])
    return index["metadata"], found


def apply(model, folder):
    """Applies a delta to {name: bytes}, in place. Checks everything that the format promises."""
    metadata, tensors = read_version(folder)
    assert metadata["compression_format"] == "zstd"
    for name, (frame, checksum) in tensors.items():
        model[name] = decode(metadata["delta_encoding"], model[name], decompress(frame))
        assert CHECKSUMS[metadata["checksum_format"]](model[name]) == checksum, name
    return metadata


def write_version(folder, old, new, number, base=None, encoding="xor", checksum="xxh3-128", files=1, numbered_from=0):
    """Writes the delta between two models {name: bytes} as slime does: files count from 0."""
    os.makedirs(folder)
    changed = [name for name in new if old[name] != new[name]]
    weight_map = {}
    for k in range(min(files, len(changed))):
        file = f"model-{k + numbered_from:05d}-of-{files:05d}.safetensors"
        names = changed[k::files]
        frames = {name: compress(encode(encoding, old[name], new[name])) for name in names}
        write_file(os.path.join(folder, file), {name: CHECKSUMS[checksum](new[name]) for name in names},
                   {name: ("U8", [len(frame)], frame) for name, frame in frames.items()})
        weight_map.update(dict.fromkeys(names, file))
    write_index(folder, weight_map, number, base, encoding, checksum)


def write_index(folder, weight_map, number, base=None, encoding="xor", checksum="xxh3-128", **more):
    metadata = {"version": f"{number:06d}", "base_version": f"{number - 1 if base is None else base:06d}",
                "delta_encoding": encoding, "compression_format": "zstd", "checksum_format": checksum, **more}
    with open(os.path.join(folder, "model.safetensors.index.json"), "w", encoding="utf-8") as f:
        json.dump({"metadata": metadata, "weight_map": weight_map}, f)
