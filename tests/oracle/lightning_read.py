#!/usr/bin/env python3
"""PyTorch Lightning's sharded checkpoints: a DCP directory and meta.pt. torch writes them here as Lightning's
FSDPStrategy.save_checkpoint does, and loads our conversions of them.

usage: lightning_read.py FSDPCKPT       exit 77 without torch
"""
import os
import subprocess
import sys
import tempfile

try:
    import torch
    import torch.distributed.checkpoint as dcp
except ImportError as e:
    print("skipped: %s" % e)
    sys.exit(77)

from checks import record_damage_is_found
from torch_values import must_equal


class Hyper:
    """A class that only the training program has."""

    def __init__(self):
        self.width = 3


def save(directory):
    weight = torch.randn(5, 4).bfloat16()
    state = {"model": {"layer.weight": weight, "layer.bias": torch.randn(5)},
             "optimizer_0": {"state": {"layer.weight": {"step": torch.tensor(3.0), "exp_avg": torch.randn(5, 4)}},
                             "param_groups": [{"lr": 0.1, "betas": (0.9, 0.95), "params": ["layer.weight"]}]}}
    dcp.save(state, checkpoint_id=directory)
    meta = {"epoch": 3, "global_step": 500, "pytorch-lightning_version": "2.6.6", "loops": {"fit_loop": {"done": 7}},
            "lr_schedulers": [{"last_epoch": 3}], "ema": torch.randn(3, 2).t(), "hyper_parameters": Hyper()}
    torch.save(meta, os.path.join(directory, "meta.pt"))
    return {**state, **meta}


def run(*argv):
    return subprocess.run(argv, capture_output=True, text=True)


def main():
    program = sys.argv[1]
    with tempfile.TemporaryDirectory(prefix="fc-lightning-") as home:
        source, full, shards = (os.path.join(home, n) for n in ("ckpt", "full.pt", "shards"))
        want = save(source)
        for argv in (("reshard", source, "-o", shards, "--dp", "2"), ("consolidate", shards, "-o", full, "--trust-objects")):
            r = run(program, *argv, "-q")
            assert r.returncode == 0 and not r.stderr, r
        must_equal(want, torch.load(full, weights_only=False))
        assert "PyTorch Lightning" in run(program, "inspect", source).stdout
        assert run(program, "verify", source).returncode == 0
        record_damage_is_found(program, source, "__0_0.distcp")
        # A meta.pt of another program is not read; a note reports it.
        for other in ({"model": {"layer.weight": 1}}, 5):
            torch.save(other, os.path.join(source, "meta.pt"))
            assert run(program, "verify", source).returncode == 0
            r = run(program, "consolidate", source, "-o", full, "--force")
            assert r.returncode == 0 and "the file meta.pt is not read" in r.stderr and r.stderr.count("\n") == 1, r
            must_equal({name: want[name] for name in ("model", "optimizer_0")}, torch.load(full))
        with open(os.path.join(source, "meta.pt"), "r+b") as f:
            f.truncate(100)
        r = run(program, "consolidate", source, "-o", os.path.join(home, "no.h5"), "-q")
        assert r.returncode == 3 and "meta.pt" in r.stderr and r.stderr.count("\n") == 1, r
    return 0


if __name__ == "__main__":
    sys.exit(main())
