#!/usr/bin/env python3
"""One value of a checkpoint that megatron-core wrote is changed at a time. Damage is refused with one line that says what is wrong,
and nothing is written. If the state of the optimizer cannot be named, a note says why, and the model is read unchanged.

usage: megatron_changed.py FSDPCKPT RANKS       exit 77 without torch or safetensors
"""
import json
import os
import shutil
import sys
import tempfile

try:
    import torch
    from checks import check, finish, refused, run
    from edits import GONE, SPARSE, Add, Apply, changed
except ImportError as e:
    print("skipped: %s" % e)
    sys.exit(77)

GPT, FLAT, MOE, GROUPED, ONE = "tp2-gpt", "tp2dp2-distributed", "ep2-moe", "tp2ep2-grouped", "one-grouped"
ALL = ""
PROJ, FC1 = "decoder.layers.0.self_attention.linear_proj.weight", "decoder.layers.0.mlp.linear_fc1.weight"
NORM, QUERY = "decoder.final_layernorm.weight", "decoder.layers.0.self_attention.linear_q.weight"
MLP = "decoder.layers.0.mlp."
ONCE = torch.ones(4)
TWICE = {"a.b": ONCE, "a": {"b": ONCE}}
VAST = torch.zeros(1).expand(2**60)


def renumbered(model):
    return {k.replace("local_experts.1.", "local_experts.7."): v for k, v in model.items()}


# case, ranks whose names begin with this, keys that lead to the changed value, its new value, exit status, words of the message
REFUSED = (
    (GPT, "mp_rank_01", (), [1], 3, "it does not hold a dict"),
    (GPT, ALL, ("model",), GONE, 3, "'model' is missing"),
    (GPT, "mp_rank_01", (), Add({5: 1}), 5, "the key of a member is not a string"),
    (GPT, ALL, (), Add({"x.y": 1, "x": {"y": 2}, "x.y.mp_rank_00": 3}), 5, "the name x.y.mp_rank_00 appears twice"),
    (GPT, "mp_rank_01", ("model", FC1), 5, 3, "linear_fc1.weight: its dtype or shape differs"),
    (GPT, "mp_rank_00", ("model", NORM), 5, 3, "final_layernorm.weight: its dtype or shape differs"),
    (GPT, "mp_rank_01", ("model", FC1), Apply(torch.Tensor.float), 3, "linear_fc1.weight: its dtype or shape differs"),
    (GPT, "mp_rank_01", ("model", PROJ), Apply(torch.Tensor.flatten), 3, "linear_proj.weight: its dtype or shape differs"),
    (GPT, ALL, ("model", PROJ), Apply(torch.Tensor.flatten), 3, "too few dimensions to be sharded along dimension 1"),
    (GPT, ALL, ("model", FC1), torch.ones(()), 3, "too few dimensions to be sharded along dimension 0"),
    (GPT, ALL, ("model", MLP + "linear_fc2.weight"), ONCE, 5, "linear_fc1.weight: it is unclear whether it holds a gate"),
    (GPT, ALL, ("model",), Add({QUERY: VAST}), 3, "its size overflows"),
    (GPT, ALL, ("model",), Add(TWICE), 3, "tensor model.a.b appears twice"),
    (GPT, "mp_rank_00", ("model",), Add({"a": ONCE}), 3, "tensor model.a is missing"),
    (ONE, ALL, ("model",), Add(TWICE), 3, "tensor model.a.b appears twice"),
    (GPT, "mp_rank_01", ("optimizer", "optimizer", "param_groups"), GONE, 3, "the states of its optimizer have no names"),
    (MOE, ALL, ("model",), Apply(renumbered), 3, "the number of its expert exceeds the number of experts, 2"),
    (GROUPED, ALL, ("model", MLP + "experts.weight1"), Apply(lambda w: w.t().contiguous().t()), 3, "it is not a matrix of 2 experts"),
    (GROUPED, ALL, ("model", MLP + "experts.weight2"), Apply(lambda w: w.t().contiguous().t()), 3, "it is not a matrix of 2 experts"),
    (GROUPED, "mp_rank_01", ("model", MLP + "router.weight"), Apply(lambda w: w[:2]), 3, "the rank has 1 experts of the layer"),
    (GROUPED, ALL, ("model", MLP + "router.weight"), Apply(torch.Tensor.flatten), 5, "it is unknown how many experts it holds"),
    (GROUPED, ALL, ("model", MLP + "router.weight"), SPARSE, 5, "it is unknown how many experts it holds"),
)

INNER = ("optimizer", "optimizer")
GROUPS, STATE, MASTERS = (*INNER, "param_groups"), (*INNER, "state"), ("optimizer", "fp32_from_fp16_params")
DECAY, SIZES = "are not those with and without weight decay", "the sizes of its groups differ"
NUMBERS, SHAPES = "the numbers of its states differ", "the shapes of its states differ"
MASTERLESS, COUNT = "its fp32 masters are not the model's 16-bit parameters", "its number of parameters differs"
LAYOUT = "its buckets have an unknown layout"


def parted(groups):
    first, second = groups
    return [{**first, "params": first["params"][:5]}, {**first, "params": first["params"][5:]}, second]


def moved(groups):
    first, second = groups
    return [{**first, "params": first["params"][:-1]}, {**second, "params": [*second["params"], first["params"][-1]]}]


# The same for the optimizers of all ranks. If words of the note are given, the states keep their numbers, else they have names.
OPTIMIZERS = (
    (("optimizer",), [], "it consists of an unsupported number of optimizers"),
    (("optimizer",), Apply(lambda o: [o] * 4), "it consists of an unsupported number of optimizers"),
    (("optimizer",), Apply(lambda o: [o, {"param_groups": [{"params": [0]}]}]), "only some of its optimizers have a state"),
    (("optimizer",), 5, "it has no groups of parameters"),
    (GROUPS, 5, "it has no groups of parameters"),
    (GROUPS, Apply(lambda g: g + [{"params": []}] * 63), "it has too many groups of parameters"),
    (GROUPS, Apply(lambda g: g + [{"params": []}]), ""),
    (GROUPS, Apply(parted), DECAY),
    (GROUPS, Apply(moved), SIZES),
    ((*GROUPS, 0), 5, "a group of parameters has no list of parameters"),
    ((*GROUPS, 0, "params"), GONE, "a group of parameters has no list of parameters"),
    ((*GROUPS, 0, "params"), Apply(lambda n: n[1:]), COUNT),
    ((*GROUPS, 0, "params", 0), "x", SIZES),
    ((*GROUPS, 0, "params", 0), -1, SIZES),
    ((*GROUPS, 0, "params", 0), 99, SIZES),
    ((*GROUPS, 1, "params", 1), 10, SIZES),
    ((*GROUPS, 1, "wd_mult"), 1.0, DECAY),
    ((*GROUPS, 1, "wd_mult"), "x", DECAY),
    ((*GROUPS, 1, "wd_mult"), 1, DECAY),
    ((*GROUPS, 1, "wd_mult"), 0, ""),
    ((*GROUPS, 1), Apply(lambda g: {"weight_decay": 0.0, "params": g["params"]}), ""),
    ((*GROUPS, 1), Apply(lambda g: {"params": g["params"]}), DECAY),
    ((*GROUPS, 0, "wd_mult"), 0.0, DECAY),
    (STATE, Add({99: {}}), NUMBERS),
    (STATE, Add({-1: {}}), NUMBERS),
    (STATE, Add({"x": {}}), NUMBERS),
    ((*STATE, 0), 5, NUMBERS),
    ((*STATE, 0), Add({5: 5}), SHAPES),
    ((*STATE, 0, "exp_avg"), torch.ones(3, 3), SHAPES),
    ((*STATE, 0, "exp_avg"), torch.ones(3), SHAPES),
    ((*STATE, 0), Add({"note": "kept"}), ""),
    (MASTERS, Apply(lambda m: m[:1]), MASTERLESS),
    (MASTERS, Apply(lambda m: [5, m[1]]), MASTERLESS),
    (MASTERS, Apply(lambda m: [*m, []]), MASTERLESS),
    ((*MASTERS, 0), Apply(lambda m: m[1:]), MASTERLESS),
    ((*MASTERS, 0), Apply(lambda m: [*m, ONCE]), MASTERLESS),
    ((*MASTERS, 0, 0), ONCE, MASTERLESS),
    ((*MASTERS, 0, 0), SPARSE, MASTERLESS),
    ((*MASTERS, 1), Apply(lambda m: m[:-1]), MASTERLESS),
)

PAIR = (torch.bfloat16, torch.float32)
# The same for distrib_optim.pt of one rank. Its layout is then unknown.
DISTRIBUTED = (
    (("buckets_coalesced",), False),
    (("buckets_coalesced",), GONE),
    ((0,), 5),
    ((0,), {}),
    ((0,), Apply(lambda types: {5: 5})),
    ((), Apply(lambda d: {**d, 1: d[0]})),
    ((), Apply(lambda d: {"buckets_coalesced": True, "zero": d[0]})),
    ((), Apply(lambda d: {"buckets_coalesced": True, 1: d[0]})),
    ((0, PAIR, "param"), GONE),
    ((0, PAIR, "param"), 5),
    ((0, PAIR, "param"), SPARSE),
    ((0, PAIR, "param"), Apply(torch.Tensor.double)),
    ((0, PAIR, "param"), Apply(lambda p: p[None])),
    ((0, PAIR, "param"), Apply(lambda p: p.repeat(2)[::2])),
    ((0, PAIR, "param"), Apply(lambda p: torch._neg_view(-p))),
    ((0, PAIR, "param"), Apply(lambda p: p[:100].clone())),
    ((0, PAIR, "exp_avg"), Apply(lambda p: p[:-1].clone())),
)


class Home:
    """A copy of each case that is used, in which one value at a time is changed."""

    def __init__(self, program, ranks, path):
        self.program, self.ranks, self.path = program, ranks, path

    def change(self, case, ranks, file, keys, new):
        """Returns the checkpoint and what restores it."""
        original, path = os.path.join(self.ranks, case), os.path.join(self.path, case)
        if not os.path.exists(path):
            shutil.copytree(original, path)
        step = os.path.join(path, "iter_0000010")
        found = [os.path.join(r, file) for r in sorted(os.listdir(step)) if r.startswith(ranks)]
        for name in found:
            state = torch.load(os.path.join(step, name), weights_only=False)
            torch.save(changed(state, keys, new), os.path.join(step, name))

        def restore():
            for name in found:
                shutil.copy(os.path.join(original, "iter_0000010", name), os.path.join(step, name))
        return path, restore

    def inspect(self, checkpoint):
        listed = json.loads(run(self.program, "inspect", checkpoint, "--json").stdout)
        return {t["name"] for t in listed["tensors"] + listed["objects"]}, listed.get("note") or ""

    def noted(self, case, ranks, file, keys, new, words):
        """The model is the same. If there are words of a note, no state of the optimizer has a name."""
        checkpoint, restore = self.change(case, ranks, file, keys, new)
        what = "%s: %s" % (file, keys)
        names, note = self.inspect(checkpoint)
        states = {n for n in names if n.startswith("optim.state.")}
        check(words in note and bool(words) == bool(note), "%s: note: %s" % (what, note))
        check(bool(states) == (not words), "%s: %s" % (what, sorted(states)[:3]))
        check(any(n.startswith("optimizer") for n in names) == bool(words), "%s: %s" % (what, sorted(names)[:3]))
        run(self.program, "diff", os.path.join(self.ranks, case), checkpoint, "--data", "-q", "--include", "model.*")
        restore()


def names_of_ranks(program, ranks, path):
    """Directories that are none of a rank are ignored; two of one rank, and links that lead elsewhere, are refused."""
    case, elsewhere = os.path.join(path, "ranks"), os.path.join(path, "elsewhere")
    step = os.path.join(case, "iter_0000010")
    shutil.copytree(os.path.join(ranks, GPT), case)
    want = json.loads(run(program, "inspect", case, "--json").stdout)["tensors"]
    for name in ("mp_rank_x", "mp_rank_02x", "mp_rank_70000", "mp_rank_00_000_000_000", "mp_rank_0_", "mp_rank_" + 50 * "0", "rank"):
        shutil.copytree(os.path.join(step, "mp_rank_00"), os.path.join(step, name))
    os.mkdir(os.path.join(step, "mp_rank_02"))
    tracker = os.path.join(case, "latest_checkpointed_iteration.txt")
    for text, good in (("10 \n", True), ("release", True), ("", False), ("x", False), ("10x", False), ("1" * 40, False)):
        with open(tracker, "w", encoding="utf-8") as f:
            f.write(text)
        folder = os.path.join(case, "release" if text == "release" else "iter_0000010")
        os.rename(step, folder)
        if good:
            check(json.loads(run(program, "inspect", case, "--json").stdout)["tensors"] == want, "tracker %r" % text)
        else:
            refused(program, case, "tracker %r" % text, "not a checkpoint", status=3)
        os.rename(folder, step)
    shutil.move(os.path.join(step, "mp_rank_01"), elsewhere)
    os.symlink(elsewhere, os.path.join(step, "mp_rank_01"))
    refused(program, step, "a link", "mp_rank_01", "symbolic link")
    shutil.copytree(os.path.join(step, "mp_rank_00"), os.path.join(step, "mp_rank_0"))
    refused(program, step, "one rank twice", "mp_rank_0 ", "are the same rank")


def main():
    program, ranks = sys.argv[1:3]
    path = tempfile.mkdtemp(prefix="fc-megatron-")
    try:
        home = Home(program, ranks, path)
        for case, rank, keys, new, status, words in REFUSED:
            checkpoint, restore = home.change(case, rank, "model_optim_rng.pt", keys, new)
            refused(program, checkpoint, "%s: %s: %s" % (case, rank, keys), words, status=status)
            restore()
        for keys, new, words in OPTIMIZERS:
            home.noted(GPT, ALL, "model_optim_rng.pt", keys, new, words)
        for keys, new in DISTRIBUTED:
            home.noted(FLAT, "mp_rank_01", "distrib_optim.pt", keys, new, LAYOUT)
        names_of_ranks(program, ranks, path)
    finally:
        shutil.rmtree(path)
    return finish("megatron, changed")


if __name__ == "__main__":
    sys.exit(main())
