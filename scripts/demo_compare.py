"""Compares the demo's HDF5 files with what PyTorch itself loads from its checkpoint, byte for byte.

Usage: demo_compare.py DIRECTORY
"""

import sys
import tempfile
import warnings
from pathlib import Path

import h5py
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

warnings.filterwarnings("ignore")


def flatten(value, path=()):
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from flatten(inner, (*path, str(key)))
    elif isinstance(value, (list, tuple)):
        for i, inner in enumerate(value):
            yield from flatten(inner, (*path, str(i)))
    elif isinstance(value, torch.Tensor):
        yield path, value


def main():
    demo = Path(sys.argv[1])
    with tempfile.NamedTemporaryFile(suffix=".pt") as f:
        dcp_to_torch_save(demo / "ckpt", f.name)
        truth = dict(flatten(torch.load(f.name, weights_only=False)))
    for name in ("model.h5", "resharded/index.h5"):
        with h5py.File(demo / name) as h5:
            total = 0
            for path, tensor in truth.items():
                node = h5
                for element in path:
                    node = node[element.replace("%", "%25").replace("/", "%2F")]
                got = torch.from_numpy(node[()]) if node.shape else torch.tensor(node[()])
                if got.dtype != tensor.dtype or got.shape != tensor.shape or not torch.equal(
                        got.contiguous().view(-1).view(torch.uint8), tensor.contiguous().view(-1).view(torch.uint8)):
                    sys.exit(f"{name}: {'.'.join(path)} differs")
                total += tensor.numel() * tensor.element_size()
            print(f"{name}: {len(truth)} tensors, {total} bytes, all equal")


if __name__ == "__main__":
    main()
