#!/usr/bin/env python3
"""Megatron's ranks that do not fit together: each inconsistency is refused with one line, and permitted differences give a note.
tests/corpus/make_megatron_ranks.py made the ranks that are changed here.

usage: megatron_refused.py FSDPCKPT RANKS       exit 77 without torch or safetensors
"""
import json
import os
import shutil
import sys
import tempfile

try:
    import torch
    from checks import check, finish, refused, run
    from megatron_files import digests, edited
except ImportError as e:
    print("skipped: %s" % e)
    sys.exit(77)

FC1, NORM = "decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.0.input_layernorm.weight"


def hostile_ranks(program, case, home):
    """tp 2, pipeline 2: inconsistent ranks are refused with one line, and permitted differences give a note."""
    def cut_short(rank, state):
        if rank == "mp_rank_01_000":
            state["model"][FC1] = state["model"][FC1][:, :-1].clone()

    def without(rank, state):
        if rank == "mp_rank_01_000":
            del state["model"][FC1]

    def no_args(rank, state):
        del state["args"]

    def strange(rank, state):
        state["model"]["adapter.weight"] = torch.full((3,), float(rank[9:10] == "1"))

    def drifted(rank, state):
        if rank == "mp_rank_01_000":
            state["model"][NORM] = state["model"][NORM] + 1

    def experts(rank, state):
        state["args"].expert_model_parallel_size = 2

    def layers(rank, state):
        state["args"].num_layers = 5

    def gate(rank, state):
        state["args"].swiglu = False

    def regrouped(rank, state):
        for group in state["optimizer"]["optimizer"]["param_groups"]:
            group["params"].reverse()

    def other_groups(rank, state):
        if rank == "mp_rank_01_001":
            state["optimizer"]["optimizer"]["param_groups"].pop()

    def sparse(rank, state):
        state["odd"] = torch.eye(3).to_sparse()
        state["model"]["bent.weight"] = torch.eye(3).to_sparse()

    def stray(rank, state):
        state["model"]["x"] = {1.5: torch.zeros(1)}

    def odd_key(rank, state):
        state["optimizer"]["optimizer"]["param_groups"][0][None] = 1

    def number(rank, state):
        state["optimizer"]["optimizer"]["param_groups"][0][7] = "seven"

    copy = edited(case, home, "number", number)
    objects = json.loads(run(program, "inspect", copy, "--json").stdout)["objects"]
    check([o["value"] for o in objects if o["name"] == "optim.param_groups.0.7"] == ["seven"], "a key that is a number")
    for change, status, words in ((odd_key, 5, ("model_optim_rng.pt", "a key that is neither a string")),
                                  (cut_short, 3, ("mp_rank_01_000", FC1, "shape")), (without, 3, (FC1, "missing")),
                                  (strange, 5, ("adapter.weight", "the dimension along which")),
                                  (experts, 3, ("2 expert-parallel ranks", "files of 1")),
                                  (layers, 5, ("layers", "5")), (gate, 5, (FC1, "SwiGLU")), (stray, 5, ("model.x",)),
                                  (sparse, 5, ("bent.weight", "sparse", "--exclude")),
                                  (other_groups, 3, ("mp_rank_01_001", "optimizer", "number of parameters differs"))):
        refused(program, edited(case, home, change.__name__, change), change.__name__, *words, status=status)
    for name, words in (("mp_rank_01_001", ("mp_rank_01_001", "missing")), ("mp_rank_00_000", ("mp_rank_00_000",))):
        copy = os.path.join(home, "gone-" + name)
        shutil.copytree(case, copy)
        shutil.rmtree(os.path.join(copy, "iter_0000010", name))
        refused(program, copy, "without " + name, *words)
    copy = os.path.join(home, "no-tp-1")
    shutil.copytree(case, copy)
    for name in ("mp_rank_01_000", "mp_rank_01_001"):
        shutil.rmtree(os.path.join(copy, "iter_0000010", name))
    refused(program, copy, "without a tensor-parallel rank", "2 tensor-parallel ranks")

    out, same = os.path.join(home, "n.safetensors"), os.path.join(home, "o.safetensors")
    run(program, "consolidate", case, "-o", same, "-q", "--include", "model.*")
    run(program, "consolidate", os.path.join(home, "sparse"), "-o", out, "-q", "--include", "model.*", "--exclude",
        "model.bent*")
    check(digests(out) == digests(same), "without unreadable values")
    for change, word in ((no_args, None), (drifted, NORM), (regrouped, "numbers")):
        copy = edited(case, home, change.__name__, change)
        run(program, "consolidate", copy, "-o", out, "-q", "--force", "--include", "model.*")
        check(digests(out) == digests(same), "%s: model" % change.__name__)
        note = json.loads(run(program, "inspect", copy, "--json").stdout).get("note")
        check((word is None and not note) or (note and word and word in note), "%s: note: %s" % (change.__name__, note))
    kept = {t["name"] for t in json.loads(run(program, "inspect", copy, "--json").stdout)["tensors"]}
    check("optimizer.optimizer.state.0.exp_avg.mp_rank_01_000" in kept and "optimizer.optimizer.state.0.exp_avg" in kept,
          "numbered states: %s" % sorted(n for n in kept if "optim" in n)[:4])


EXPERT = "decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight"


def hostile_experts(program, ranks, home):
    """Expert-parallel ranks that do not fit together."""
    def one_less(rank, state):
        if rank == "mp_rank_00_001":
            state["model"] = {k: v for k, v in state["model"].items() if ".local_experts.1." not in k}

    def without(rank, state):
        if rank == "mp_rank_00_001":
            del state["model"][EXPERT]

    def no_number(rank, state):
        state["model"]["decoder.layers.0.mlp.experts.linear_fc1.weight"] = state["model"].pop(EXPERT)

    def more(rank, state):
        state["args"].num_experts = 8

    def four(rank, state):
        state["args"].expert_model_parallel_size = 4

    def older(rank, state):
        state["iteration"] -= int(rank[-1])

    def other_run(rank, state):
        state["args"].num_experts = 4 + 4 * int(rank[-1])

    def wide(rank, state):
        state["args"].expert_tensor_parallel_size = 2

    def no_args(rank, state):
        del state["args"]

    def drifted(rank, state):
        if rank == "mp_rank_00_001":
            state["model"]["decoder.layers.0.mlp.router.weight"] += 1

    def bias(rank, state):
        state["model"]["decoder.layers.0.mlp.router.expert_bias"] += int(rank[-1])

    def huge(rank, state):
        for key in [k for k in state["model"] if ".local_experts.1." in k]:
            state["model"][key.replace("experts.1.", "experts.99999999999999999999.")] = state["model"].pop(key)

    def no_router(rank, state):
        for key in [k for k in state["model"] if "router" in k]:
            del state["model"][key]

    def odd(rank, state):
        key = "decoder.layers.0.mlp.experts.weight2"
        state["model"][key] = state["model"][key][:-1].clone()

    for change, status, words in (
            (one_less, 3, ("mp_rank_00_001", "has 1 experts", "mp_rank_00_000")), (without, 3, ("mp_rank_00_001", "linear_fc1")),
            (no_number, 5, ("experts.linear_fc1.weight", "it is unknown which experts")),
            (more, 3, ("according to args there are 8",)),
            (four, 3, ("4 expert-parallel ranks", "files of 2")), (wide, 5, ("sharded over 2",)),
            (older, 3, ("mp_rank_00_001", "iteration is 9 here and 10 there")),
            (other_run, 3, ("num_experts is 8 here and 4 there",)), (no_args, 5, ("args",)), (bias, 5, ("expert_bias",)), (huge, 5, ("99999999999999999999",))):
        refused(program, edited(os.path.join(ranks, "ep2-moe"), home, "e-" + change.__name__, change), change.__name__,
                *words, status=status)
    for change, status, words in ((no_router, 5, ("weight1", "how many")), (odd, 5, ("weight1", "weight2"))):
        refused(program, edited(os.path.join(ranks, "tp2ep2-grouped"), home, "e-" + change.__name__, change),
                change.__name__, *words, status=status)
    copy = edited(os.path.join(ranks, "ep2-moe"), home, "e-drifted", drifted)
    note = json.loads(run(program, "inspect", copy, "--json").stdout).get("note") or ""
    check("router.weight" in note and "first rank" in note, "drifted: %s" % note)

    def moved(case, name, *moves):
        copy = os.path.join(home, "%s-%s" % (case, name))
        shutil.copytree(os.path.join(ranks, case), copy)
        for a, b in moves:
            shutil.move(os.path.join(copy, "iter_0000010", a), b if b == home else os.path.join(copy, "iter_0000010", b))
        return copy

    for case, gone in (("ep2-moe", "mp_rank_00_000"), ("pp2ep2-moe", "mp_rank_00_001_001"),
                       ("tp2ep4-etp1", "mp_rank_01_001"), ("tp4ep2-etp1", "mp_rank_02_000")):
        copy = moved(case, "gone-" + gone, (gone, "away"))
        refused(program, copy, "without " + gone, gone, "missing")
    refused(program, moved("ep2-moe", "last", ("mp_rank_00_001", "away")), "the last rank", "2 expert-parallel ranks")
    for case, a, b in (("ep2-moe", "mp_rank_00_000", "mp_rank_00_001"), ("pp2ep2-moe", "mp_rank_00_000_001", "mp_rank_00_001_000"),
                       ("tp2ep2-grouped", "mp_rank_01_000", "mp_rank_00_001"), ("tp2pp2-llama", "mp_rank_00_000", "mp_rank_01_000")):
        copy = moved(case, "swapped", (a, "away"), (b, a), ("away", b))
        refused(program, copy, "swapped", "swapped", "mp_rank_")


def main():
    program, ranks = sys.argv[1:3]
    home = tempfile.mkdtemp(prefix="fc-megatron-")
    try:
        hostile_experts(program, ranks, home)
        hostile_ranks(program, os.path.join(ranks, "tp2pp2-llama"), home)
    finally:
        shutil.rmtree(home)
    return finish("megatron")


if __name__ == "__main__":
    sys.exit(main())
