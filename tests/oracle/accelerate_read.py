#!/usr/bin/env python3
"""Folders that Hugging Face accelerate and its Trainer write for FSDP. torch writes the two DCP checkpoints here as accelerate's
save_fsdp_model and save_fsdp_optimizer do. fsdpckpt reads both as one checkpoint, and torch loads each conversion.

usage: accelerate_read.py FSDPCKPT      exit 77 without torch
"""
import logging
import os
import shutil
import sys
import tempfile

logging.disable(logging.WARNING)
try:
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
except ImportError as e:
    print("skipped: %s" % e)
    sys.exit(77)

from checks import must_run as run
from checks import record_damage_is_found
from torch_values import kept, must_equal


def save(folder):
    """Saves what get_state_dict returns in the two folders, and a scheduler's state next to them."""
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3, bias=False))
    adam = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 5)).sum().backward()
    adam.step()
    truth = dict(zip(("model", "optimizer"), get_state_dict(model, adam)))
    for name, key in (("pytorch_model_fsdp_0", "model"), ("optimizer_0", "optimizer")):
        dcp.save({key: truth[key]}, checkpoint_id=os.path.join(folder, name))
    torch.save({"last_epoch": 1}, os.path.join(folder, "scheduler.pt"))
    return truth


def main():
    program = sys.argv[1]
    with tempfile.TemporaryDirectory(prefix="fc-accelerate-") as home:
        source, full, shards = (os.path.join(home, n) for n in ("checkpoint-1", "full.pt", "shards"))
        truth = kept(save(source))
        for argv in (("reshard", source, "-o", shards, "--dp", "3"), ("consolidate", shards, "-o", full)):
            run(program, *argv)
        must_equal(truth, torch.load(full))
        r = run(program, "consolidate", source, "-o", full, "--force")
        must_equal(truth, torch.load(full))
        assert "scheduler.pt in the same directory is not part of the checkpoint" in r.stderr and r.stderr.count("\n") == 2, r
        assert "--model-only converts the model only" in r.stderr, r
        run(program, "diff", source, shards, "--data")
        run(program, "check", source)
        run(program, "convert", source, "-o", os.path.join(home, "again"), "--to", "dcp")
        run(program, "diff", source, os.path.join(home, "again"), "--data")
        # Damage in either folder is found.
        data = os.path.join(source, "optimizer_0", "__0_0.distcp")
        assert "covered by digests" in run(program, "verify", source).stdout
        record_damage_is_found(program, source, "pytorch_model_fsdp_0/__0_0.distcp")
        with open(data, "r+b") as f:
            at = f.read().index(truth["optimizer"]["state"]["0.weight"]["exp_avg"].numpy().tobytes())
            f.seek(at)
            f.write(b"\xff")
        r = run(program, "verify", source, ok=(1,))
        assert "optimizer_0/__0_0.distcp" in r.stdout + r.stderr, r
        r = run(program, "consolidate", source, "-o", os.path.join(home, "no.pt"), ok=(3,))
        assert "optimizer_0/__0_0.distcp" in r.stderr and r.stderr.count("\n") == 1, r
        # Several models have names of their own, and the optimizer is optional.
        shutil.rmtree(os.path.join(source, "optimizer_0"))
        shutil.copytree(os.path.join(source, "pytorch_model_fsdp_0"), os.path.join(source, "pytorch_model_fsdp_1"))
        run(program, "consolidate", source, "-o", full, "--force")
        must_equal({"model": truth["model"], "model_1": truth["model"]}, torch.load(full))
        shutil.rmtree(os.path.join(source, "pytorch_model_fsdp_1"))
        run(program, "consolidate", source, "-o", full, "--force")
        must_equal({"model": truth["model"]}, torch.load(full))
        # A folder that is a link out of the checkpoint is refused.
        os.rename(os.path.join(source, "pytorch_model_fsdp_0"), os.path.join(home, "elsewhere"))
        os.symlink("../elsewhere", os.path.join(source, "pytorch_model_fsdp_0"))
        r = run(program, "inspect", source, ok=(3,))
        assert "--follow-external" in r.stderr, r
        run(program, "inspect", source, "--follow-external")
    return 0


if __name__ == "__main__":
    sys.exit(main())
