#!/usr/bin/env python3
"""Models that FSDP2 has trained on two ranks and saved with DCP, exported like a reference that the safetensors package wrote: names,
dtypes, shapes, bytes, files and the index, as the package and torch read them.

usage: export.py FSDPCKPT       exit 77 without torch, numpy and safetensors
"""
import json
import os
import sys
import tempfile

try:
    import torch
    import torch.distributed.checkpoint as dcp
    from safetensors import safe_open
    from safetensors.torch import save_file
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.fsdp import fully_shard
except ImportError as e:
    print("skipped: %s" % e)
    sys.exit(77)

import gloo
from checks import must, must_run

ROWS = 37  # of the vocabulary; trained with 48


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(12)
        self.up = torch.nn.Linear(12, 20)
        self.down = torch.nn.Linear(20, 12, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Inner(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(48, 12)
        self.layers = torch.nn.ModuleList(Block() for _ in range(3))


class Model(torch.nn.Module):
    """Named like a model of transformers."""

    def __init__(self, tied):
        super().__init__()
        self.model = Inner()
        self.lm_head = torch.nn.Linear(12, 48, bias=False)
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, ids):
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x)
        return self.lm_head(x)


def train(rank, world, folder, tied):
    """Rank 0 returns the weights after one step."""
    torch.manual_seed(3)
    model = Model(tied)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.arange(6).reshape(2, 3)).square().mean().backward()
    adam.step()
    weights, state = get_state_dict(model, adam)
    dcp.save({"model": {"_orig_mod." + n: t for n, t in weights.items()}, "optimizer": state, "step": 7,
              "lr_scheduler": {"last_epoch": 7}}, checkpoint_id=folder)
    full = {n: t.full_tensor().clone() for n, t in weights.items()}
    return full if rank == 0 else None


def reference(root, weights, files):
    """Writes the directory of a model: its tensors in the files, their index, a configuration."""
    os.makedirs(root)
    names = ["model-%05d-of-%05d.safetensors" % (i + 1, len(files)) for i in range(len(files))]
    for name, part in zip(names, files):
        save_file({n: torch.zeros_like(weights[n]) for n in part}, os.path.join(root, name), metadata={"format": "pt"})
    with open(os.path.join(root, "model.safetensors.index.json"), "w", encoding="utf-8") as f:
        json.dump({"metadata": {"total_size": sum(t.nbytes for t in weights.values())},
                   "weight_map": {n: name for name, part in zip(names, files) for n in part}}, f)
    with open(os.path.join(root, "config.json"), "w", encoding="utf-8") as f:
        json.dump({"vocab_size": ROWS}, f)


def read(root, ref):
    """The tensors as the index finds them; the index and the files must be those of the reference."""
    index, other = (json.load(open(os.path.join(d, "model.safetensors.index.json"), encoding="utf-8")) for d in (root, ref))
    must(index["weight_map"] == other["weight_map"], "the files differ", index)
    must(index["metadata"]["total_size"] == other["metadata"]["total_size"], "total_size differs", index)
    got = {}
    for file in sorted(set(index["weight_map"].values())):
        with safe_open(os.path.join(root, file), "pt") as f:
            must(f.metadata()["format"] == "pt", "the format of", file)
            must(set(f.keys()) == {n for n, at in index["weight_map"].items() if at == file}, "the tensors of", file)
            got.update({n: f.get_tensor(n) for n in f.keys()})
    return got


def case(program, home, tied):
    here = lambda name: os.path.join(home, name + str(tied))
    trained = gloo.run(2, train, here("dcp"), tied)[0]
    want = {}
    for name, t in trained.items():
        rows = t[:ROWS] if t.shape[0] == 48 else t
        want[name] = rows if "norm" in name else rows.to(torch.bfloat16)  # mixed dtypes
    if tied:
        del want["lm_head.weight"]
    names = sorted(want)
    reference(here("ref"), want, [names[:2], names[2:9], names[9:]])
    run = must_run(program, "export", here("dcp"), "-o", here("out"), "--like", here("ref"))
    must(("tied:     lm_head.weight is model.embed_tokens.weight" in run.stdout) == tied, run.stdout)
    got = read(here("out"), here("ref"))
    must(sorted(got) == names, "names", sorted(got))
    for name in names:
        must(got[name].dtype == want[name].dtype and torch.equal(got[name], want[name]), name)
    # Without a reference: the model as it was trained.
    must_run(program, "export", here("dcp"), "-o", here("plain"))
    with safe_open(os.path.join(here("plain"), "model.safetensors"), "pt") as f:
        must(sorted(f.keys()) == sorted(trained), "names without a reference")
        must(all(torch.equal(f.get_tensor(n), trained[n]) for n in f.keys()), "bytes without a reference")


def main():
    with tempfile.TemporaryDirectory(prefix="fc-export-") as home:
        for tied in (False, True):
            case(sys.argv[1], home, tied)
    return 0


if __name__ == "__main__":
    sys.exit(main())
