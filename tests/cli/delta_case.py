"""What the tests of deltas share: a model of small tensors with random bytes, training steps that change some of them, and folders in
the form of the Hugging Face hub. weight_sync.py writes and reads the format itself.

A model is {name: bytes}; with its dtypes and shapes it is {name: (dtype, shape, bytes)}.
"""

import json
import math
import os
import random

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
