#!/usr/bin/env python3
"""Makes a ZeRO-3 checkpoint for measurements, with real DeepSpeed (gloo, CPU): make_zero3.py DIR --size 2G

It has about SIZE bytes over 4 ranks: fp32 master weights and the two moments of AdamW for bf16 parameters with LLaMA's
names and shapes, after one step. That is 12 bytes per parameter. Needs torch and deepspeed.
"""
import argparse
import os
import socket
import sys

os.environ.update(DS_ACCELERATOR="cpu", DS_BUILD_OPS="0")
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tests", "corpus"))

import torch
import torch.multiprocessing as mp
from torch import nn

import make_big

BYTES = 12  # of the checkpoint, per parameter
DIMS = (1024, 2816, 8192)


class Leaf(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape, dtype=torch.bfloat16))

    def forward(self, x):
        return self.weight.float().square().mean() * x


class Model(nn.Module):
    """A module per parameter, because DeepSpeed gathers by module."""

    def __init__(self, shapes):
        super().__init__()
        self.leaves = []
        for name, shape in shapes:
            *path, last, _ = name.split(".")
            at = self
            for part in path:
                if not hasattr(at, part):
                    at.add_module(part, nn.Module())
                at = getattr(at, part)
            at.add_module(last, Leaf(shape))
            self.leaves.append(name)

    def forward(self, x):
        return sum(self.get_submodule(name.rsplit(".", 1)[0])(x) for name in self.leaves)


def run(rank, args, port):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(args.ranks), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=str(port))
    import deepspeed
    deepspeed.init_distributed("gloo")
    torch.manual_seed(1)
    model = Model(make_big.llama(make_big.parse_size(args.size) * 2 // BYTES, DIMS))
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "bf16": {"enabled": True},
              "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
                                           config=config)
    engine.backward(engine(torch.tensor(1.)))
    engine.step()
    engine.save_checkpoint(args.dir)


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("dir")
    ap.add_argument("--size", default="2G", help="about how many bytes: 512M, 2G")
    ap.add_argument("--ranks", type=int, default=4)
    args = ap.parse_args()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(run, args=(args, port), nprocs=args.ranks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
