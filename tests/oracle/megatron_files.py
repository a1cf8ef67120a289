"""What the tests of Megatron checkpoints share."""
import hashlib
import os
import shutil

import safetensors
import torch


def digests(path):
    with open(path, "rb") as f:
        return {n: (list(t["shape"]), hashlib.sha256(bytes(t["data"])).hexdigest())
                for n, t in safetensors.deserialize(f.read())}


def edited(case, home, name, change):
    """A copy in which `change` has edited each rank's file."""
    copy = os.path.join(home, name)
    shutil.copytree(case, copy)
    for folder, _, files in os.walk(copy):
        for f in files:
            if f.endswith(".pt"):
                path = os.path.join(folder, f)
                state = torch.load(path, weights_only=False)
                change(os.path.basename(folder), state)
                torch.save(state, path)
    return copy
