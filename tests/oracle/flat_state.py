"""FSDP1's LOCAL_STATE_DICT, in: real FSDP on gloo saves flat parameters with torch.save and dcp.save, fsdpckpt takes
them apart with --schema, and torch compares every byte with the model's.

usage: flat_state.py FSDPCKPT

Exit status 77 when torch is missing.
"""

import json
import logging
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import warnings

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
try:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch import nn
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import MixedPrecision, StateDictType
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    import gloo
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)

PROGRAM = sys.argv[1]


class Block(nn.Module):
    """Sizes that no number of ranks divides; names whose alphabetical order is another."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(3, 5)
        self.act = nn.LayerNorm(5)
        self.deep = nn.Parameter(torch.randn(2, 3, 4, 3))
        self.register_buffer("mask", torch.tensor([1, 2, 3]))
        self.register_buffer("scale", torch.randn(2))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(7, 5)
        self.layers = nn.ModuleList([Block() for _ in range(12)])
        self.norm = nn.BatchNorm1d(5)
        self.one = nn.Parameter(torch.randn(()).reshape(1))
        self.head = nn.Linear(5, 7, bias=False)


class Tied(Model):
    def __init__(self):
        super().__init__()
        self.head.weight = self.emb.weight


class Tiny(nn.Module):
    """Fewer elements than ranks: ranks without any."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(1, 1)
        self.inner = nn.Linear(2, 1)


# name: (model, ranks, arguments of FSDP)
CASES = {
    "blocks": (Model, 3, {"wrap": True}),
    "root": (Model, 2, {}),
    "tied": (Tied, 2, {"wrap": True}),
    "tiny": (Tiny, 4, {}),
    "aligned": (Model, 3, {"wrap": True, "use_orig_params": True}),
    "aligned tied": (Tied, 2, {"use_orig_params": True}),
    "aligned to bfloat16": (Model, 2, {"wrap": True, "use_orig_params": True, "bf16": True}),
    "ignored": (Model, 2, {"wrap": True, "ignore": True}),
    "double": (Model, 3, {"double": True, "wrap": True}),
}


def check(condition, *text):
    if not condition:
        raise AssertionError(" ".join(map(str, text)))


def run(*argv, ok=0):
    done = subprocess.run([PROGRAM, *map(str, argv)], capture_output=True, text=True)
    check(done.returncode == ok, argv, done.returncode, done.stderr)
    return done.stderr


def make(case):
    cls, _, how = CASES[case]
    torch.manual_seed(3)
    model = cls()
    return model.double() if how.get("double") else model


def wrap(case, model, world):
    how = CASES[case][2]
    more = {"use_orig_params": how.get("use_orig_params", False)}
    if how.get("wrap"):
        more["auto_wrap_policy"] = ModuleWrapPolicy({Block})
    if how.get("bf16"):
        more["mixed_precision"] = MixedPrecision(param_dtype=torch.bfloat16)
    if how.get("ignore"):
        more["ignored_states"] = [model.norm.weight, model.layers[1].act.bias]
    return FSDP(model, device_id=torch.device("cpu"), **more)


def save(rank, world, home, case):
    """One rank: the same model everywhere, flat parameters to files."""
    model = wrap(case, make(case), world)
    out = pathlib.Path(home) / case
    out.mkdir(exist_ok=True)
    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        state = model.state_dict()
        torch.save(state, out / f"model_world_size_{world}_rank_{rank}.pt")
        dcp.save({"model": state}, checkpoint_id=f"{home}/{case}.dcp")


def equal(path, wanted, prefix=""):
    got = torch.load(path)
    got = got[prefix] if prefix else got
    check(list(got) == list(wanted), path, list(got), list(wanted))
    for name, value in wanted.items():
        check(got[name].dtype == value.dtype and got[name].shape == value.shape, path, name, got[name].shape)
        check(torch.equal(got[name].flatten().view(torch.uint8), value.flatten().view(torch.uint8)), path, name)
    return got


def case_in(home, case):
    world = CASES[case][1]
    gloo.run(world, save, home, case)
    wanted = make(case).state_dict()
    torch.save(wanted, f"{home}/{case}.whole.pt")
    schema = f"{home}/{case}.json"
    with open(schema, "w") as f:
        subprocess.run([PROGRAM, "schema", f"{home}/{case}.whole.pt"], stdout=f, check=True)
    check(json.load(open(schema))["order"] == "model", "the order is not told")
    for told in (schema, f"{home}/{case}.whole.pt"):
        run("consolidate", f"{home}/{case}", "-o", f"{home}/out.pt", "--schema", told, "--force")
        got = equal(f"{home}/out.pt", wanted)
        if "Tied" in CASES[case][0].__name__:
            check(got["head.weight"].data_ptr() == got["emb.weight"].data_ptr(), case, "no longer tied")
    run("check", f"{home}/{case}", "--schema", schema)
    run("reshard", f"{home}/{case}", "-o", f"{home}/out.dcp", "--to", "dcp", "--dp", 3, "--schema", schema, "--force")
    whole = {k: torch.zeros_like(v) for k, v in wanted.items()}
    dcp.load(whole, checkpoint_id=f"{home}/out.dcp", no_dist=True)
    for name, value in wanted.items():
        check(torch.equal(whole[name], value), case, name, "resharded")
    if CASES[case][2].get("use_orig_params"):
        # Beside flat parameters torch stores some rank's part of each parameter, which may be as large as a buffer.
        done = subprocess.run([PROGRAM, "consolidate", f"{home}/{case}.dcp", "-o", f"{home}/{case}.out.pt", "--schema",
                               schema], capture_output=True, text=True)
        if done.returncode == 0:
            equal(f"{home}/{case}.out.pt", wanted, "model")
        else:
            check("flat_param'" in done.stderr and done.stderr.count("\n") == 1, done.stderr)
    else:
        run("consolidate", f"{home}/{case}.dcp", "-o", f"{home}/out.pt", "--schema", schema, "--force")
        equal(f"{home}/out.pt", wanted, "model")
        run("consolidate", f"{home}/{case}.dcp", "-o", f"{home}/out.h5", "--schema", schema, "--force")
        run("diff", f"{home}/{case}.dcp", f"{home}/out.h5", "--schema", schema)


def replicas(home):
    """HYBRID_SHARD, whose second half of ranks holds what the first one does. (torch 2.15 fails to save that.)"""
    os.mkdir(f"{home}/hybrid")
    for rank in range(4):
        shutil.copy(f"{home}/root/model_world_size_2_rank_{rank % 2}.pt",
                    f"{home}/hybrid/model_world_size_4_rank_{rank}.pt")
    run("consolidate", f"{home}/hybrid", "-o", f"{home}/out.pt", "--schema", f"{home}/root.json", "--force")
    equal(f"{home}/out.pt", make("root").state_dict())


def refusals(home):
    """What is not known, and what does not fit, is one line."""
    source, whole = f"{home}/blocks", torch.load(f"{home}/blocks.whole.pt")

    def refused(told, *words, code=2):
        text = run("consolidate", source, "-o", f"{home}/no.pt", "--schema", told, ok=code)
        check(text.count("\n") == 1 and all(w in text for w in words), told, text)
        check(not pathlib.Path(f"{home}/no.pt").exists(), told, "was written")

    def saved(state):
        torch.save(state, f"{home}/told.pt")
        return f"{home}/told.pt"

    run("consolidate", f"{home}/blocks.whole.pt", "-o", f"{home}/sorted.safetensors", "--force")
    refused(f"{home}/sorted.safetensors", "order", '"order": "model"')
    run("consolidate", f"{home}/sorted.safetensors", "-o", f"{home}/sorted.pt", "--force")
    refused(f"{home}/sorted.pt", "alphabetical")
    schema = json.loads(subprocess.run([PROGRAM, "schema", f"{home}/sorted.pt"], capture_output=True).stdout)
    check("order" not in schema, "a sorted file's order is told as the model's")
    pathlib.Path(f"{home}/told.json").write_text(json.dumps(schema))
    refused(f"{home}/told.json", "does not say")
    refused(source, "flat parameters itself")
    refused(saved({k: v for k, v in whole.items() if k != "layers.1.mix.bias"}), "layers.1._flat_param", "another model")
    refused(saved({**whole, "emb.more": torch.zeros(1)}), "_flat_param", "another model")
    refused(saved({**whole, "layers.0.lost": torch.zeros(2, dtype=torch.int64)}), "layers.0.lost")
    refused(saved({"a": whole, "b": whole}), "more than one state dict")
    text = run("consolidate", f"{home}/blocks.whole.pt", "-o", f"{home}/no.pt", "--schema", f"{home}/blocks.json", ok=2)
    check("no flat parameters" in text, text)
    text = run("consolidate", source, "-o", f"{home}/flat.pt")
    check("--schema" in text, text)
    check("_flat_param" in torch.load(f"{home}/flat.pt"), "without a schema they stay")
    # A tie that the file has lost is told in a schema.
    source = f"{home}/tied"
    told = json.loads(pathlib.Path(f"{home}/tied.json").read_text())
    for entry in told["tensors"]:
        entry.pop("same_as", None)
    pathlib.Path(f"{home}/told.json").write_text(json.dumps(told))
    refused(f"{home}/told.json", "same_as")


def main():
    with tempfile.TemporaryDirectory() as home:
        for case in CASES:
            case_in(home, case)
        replicas(home)
        refusals(home)
    print(f"{len(CASES)} cases")
    return 0


if __name__ == "__main__":
    sys.exit(main())
