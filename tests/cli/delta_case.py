"""What the tests of deltas share: a model of small tensors with random bytes, training steps that change some of them, and folders in
the form of the Hugging Face hub. weight_sync.py writes and reads the format itself.

A model is {name: bytes}; with its dtypes and shapes it is {name: (dtype, shape, bytes)}.
"""

import json
import math
import os
import random
import struct

import harness
import weight_sync

SIZES = {"BF16": 2, "I32": 4, "F8_E4M3": 1, "U8": 1, "F32": 4, "F16": 2}
CHANGED = ("layers.0.w", "codes.qweight", "fp8", "packed", "scalar")


def shapes(*large):
    """The tensors of a model. `large` is the shape of the largest one."""
    return {"layers.0.w": ("BF16", [*large]), "layers.1.w": ("BF16", [300, 20]), "codes.qweight": ("I32", [64, 32]),
            "fp8": ("F8_E4M3", [33, 7]), "packed": ("U8", [40, 5]), "scalar": ("F32", []), "none": ("F32", [0, 4]), "same": ("F16", [100])}


def random_model(shapes_of, seed):
    rng = random.Random(seed)
    return {name: rng.randbytes(math.prod(shape) * SIZES[dtype]) for name, (dtype, shape) in shapes_of.items()}


def changed(model, seed, names=CHANGED, share=50):
    """Changes a byte in `share`, and the last one, of some tensors, as a training step does."""
    rng, made = random.Random(seed), dict(model)
    for name in names:
        data = bytearray(made[name])
        for place in (len(data) - 1, *(rng.randrange(len(data)) for _ in range(len(data) // share + 1))):
            data[place] ^= rng.randrange(1, 256)
        made[name] = bytes(data)
    return made


def typed(model, shapes_of):
    return {name: (*shapes_of[name][:2], data) for name, data in model.items()}


def raw(tensors):
    return {name: data for name, (_, _, data) in tensors.items()}


class Case(harness.Case):
    def save(self, folder, tensors, files=1, index=False):
        """Writes tensors with their dtypes and shapes as a folder of the hub."""
        os.makedirs(self.path(folder))
        names, weight_map = list(tensors), {}
        for k in range(files):
            file = f"model-{k + 1:05d}-of-{files:05d}.safetensors"
            weight_sync.write_file(self.path(folder, file), {"format": "pt"}, {name: tensors[name] for name in names[k::files]})
            weight_map.update(dict.fromkeys(names[k::files], file))
        if index and files > 1:
            with open(self.path(folder, "model.safetensors.index.json"), "w") as f:
                json.dump({"metadata": {"total_size": 1}, "weight_map": weight_map}, f)

    def contents(self, folder):
        """{path in the folder: bytes}"""
        found = {}
        for directory, _, names in os.walk(self.path(folder)):
            for name in names:
                with open(os.path.join(directory, name), "rb") as f:
                    found[os.path.relpath(os.path.join(directory, name), self.path(folder))] = f.read()
        return found

    def set_state(self, model, number):
        """Gives a model the state of a version, as SGLang writes it."""
        os.makedirs(self.path(model, ".weight_sync"), exist_ok=True)
        with open(self.path(model, ".weight_sync/state.json"), "w") as f:
            json.dump({"version": f"{number:06d}"}, f)

    def put_frame(self, version, name, frame, checksum=None):
        """Stores another frame of a tensor in a delta, and perhaps another checksum."""
        for file in os.listdir(version):
            path = os.path.join(version, file)
            metadata, tensors = weight_sync.read_file(path) if file.endswith(".safetensors") else ({}, {})
            if name in tensors:
                frames = {**{key: data for key, (_, data) in tensors.items()}, name: frame}
                weight_sync.write_file(path, {**metadata, name: checksum or metadata[name]},
                                       {key: ("U8", [len(data)], data) for key, data in frames.items()})


def lying_frames(size):
    """(what, frame, encoding, what is said of it) for a tensor of `size` bytes."""
    good = weight_sync.compress(bytes(size))

    def positions(count, *at, values):
        return weight_sync.compress(struct.pack(f"<{len(at) + 1}I", count, *at) + values)

    return [("a frame that is shorter", weight_sync.compress(bytes(size - 1)), "xor", f"the frame has {size - 1} bytes"),
            ("a frame that is longer", weight_sync.compress(bytes(size + 1)), "xor", f"the frame has {size + 1} bytes"),
            ("a bomb", weight_sync.compress(bytes(1 << 28)), "xor", "the frame has 268435456 bytes"),
            ("a truncated frame", weight_sync.compress(bytes(i % 251 for i in range(size)))[:-3], "xor", "truncated"),
            ("no frame", b"not zstd, but long enough", "xor", "no zstd frame"), ("no bytes", b"", "xor", "no zstd frame"),
            ("bytes after it", good + b"x", "xor", "bytes follow"),
            ("a position outside", positions(1, size, values=b"x"), "overwrite", f"position {size}"),
            ("the last position", positions(1, 2**32 - 1, values=b"x"), "overwrite", "position 4294967295"),
            ("more positions than bytes", positions(size + 1, 1, values=b"x"), "overwrite", "changes"),
            ("fewer positions", positions(3, 1, values=b""), "overwrite", "shorter"),
            ("fewer values", positions(2, 1, 2, values=b"x"), "overwrite", "shorter"),
            ("more values", positions(1, 1, values=b"xy"), "overwrite", "longer"),
            ("positions that go back", positions(2, 5, 4, values=b"xy"), "overwrite", "ascending order"),
            ("a position twice", positions(2, 5, 5, values=b"xy"), "overwrite", "ascending order"),
            ("a count that is cut", weight_sync.compress(b"\1"), "overwrite", "shorter")]
