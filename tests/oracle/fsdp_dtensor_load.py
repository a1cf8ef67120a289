#!/usr/bin/env python3
"""Checkpoints of Megatron-FSDP (--ckpt-format fsdp_dtensor) that we resharded, or made of a model of the hub, loaded by real
megatron-core (gloo, CPU) into its FullyShardedDataParallel and distributed optimizer. Each rank must have what it has after it
loaded the original. So it must from AdamW under torch's names, whose groups its optimizer has to take.

usage: fsdp_dtensor_load.py FSDPCKPT CORPUS       exit 77 without megatron-core
"""
import glob
import hashlib
import os
import re
import socket
import sys
import tempfile
import traceback

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "corpus"))
try:
    import megatron.core
    import torch
    import torch.distributed.checkpoint as dcp
    import torch.multiprocessing as mp
    import fsdp_dtensor_written as written
    import make_fsdp_dtensor as maker
    import make_megatron_models as models
    import make_megatron_ranks as ranks
    from checks import check, finish, run
except ImportError as e:
    print("skipped: %s" % e)
    sys.exit(77)


def flatten(value, name=""):
    if isinstance(value, dict):
        for k, v in value.items():
            yield from flatten(v, name + "/" + str(k))
    else:
        yield name, value


def digest(value):
    if not isinstance(value, torch.Tensor):
        return value
    t = value.to_local() if hasattr(value, "to_local") else value
    return hashlib.sha256(t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def with_engine(state, experts):
    """The model's values under the names of Transformer Engine's layers, which recipes make."""
    names = {}
    for name, value in state.items():
        new = re.sub(r"\.local_experts\.(\d+)\.linear_(fc\d)\.weight", r".linear_\2.weight\1", name)
        new = new.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_")
        names[new if experts else new.replace(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_")] = value
    return names


def loaded(case, wrapped, optimizer, folder, engine=False):
    """What a rank has after the load. @param engine only of the model, under Transformer Engine's names"""
    state = maker.make_state(case, wrapped, optimizer)
    for name, value in flatten(state):
        if hasattr(value, "to_local"):
            value.to_local().fill_(7)
    groups = state["optimizer"]["param_to_group_meta"]
    state["optimizer"]["param_to_group_meta"] = {p: {k: None for k in maker.GROUPS} for p in groups}
    asked = {"model": with_engine(state["model"], "experts" in case)} if engine else state
    dcp.load(asked, storage_reader=dcp.FileSystemReader(folder))
    found = {"model": state["model"]} if engine else state
    untouched = [name for name, v in flatten(found) if hasattr(v, "to_local") and v.to_local().numel() and (v.to_local() == 7).all()]
    assert not untouched, untouched
    return {name: digest(value) for name, value in flatten(found)}


def resumed(case, wrapped, optimizer, folder):
    """What the optimizer has after it loaded states and groups, as Megatron-LM does it: values that a checkpoint lacks stay."""
    state = maker.make_state(case, wrapped, optimizer, loading=True)
    for name, value in flatten(state["optimizer"]["state"]):
        value = value.to_local() if hasattr(value, "to_local") else value
        value.fill_(7)
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder), planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    own = optimizer.sharded_state_dict({}, metadata={"distrib_optim_sharding_type": "fsdp_dtensor"})
    optimizer.load_state_dict({**own, "param_to_group_meta": state["optimizer"]["param_to_group_meta"]})
    ones = getattr(optimizer, "chained_optimizers", [optimizer])
    groups = [(g["lr"], g["weight_decay"], g["wd_mult"]) for one in ones for g in one.optimizer.param_groups if g["params"]]
    state = maker.make_state(case, wrapped, optimizer)
    return groups, {"/optimizer" + name: digest(value) for name, value in flatten({"state": state["optimizer"]["state"]})}


def on_rank(rank, port, name, own, ours, torchs, failures):
    try:
        case = {"vp": None, **models.CASES[name], **maker.MESHES[name]}
        maker.begin(rank, port, case)
        config, model = models.build(case)
        wrapped = maker.wrap(case, config, model)
        optimizer = maker.make_optimizer(wrapped)
        want = loaded(case, wrapped, optimizer, own)
        for folder, engine in ours:
            got = loaded(case, wrapped, optimizer, folder, engine)
            asked = {n: v for n, v in want.items() if not engine or n.startswith("/model/")}
            if got != asked or not asked:
                failures.put("rank %d: %s: %s" % (rank, folder, sorted(n for n in asked if got.get(n) != asked[n])))
        groups, states = resumed(case, wrapped, optimizer, torchs)
        wrong = sorted(n for n in states if states[n] != want.get(n))
        if wrong or not states or set(groups) - {(0.02, 0.1, 1.0), (0.02, 0.0, 0.0)} or not groups:
            failures.put("rank %d: the optimizer: %s, %s" % (rank, groups, wrong))
    except Exception:  # noqa: BLE001
        failures.put("rank %d: %s" % (rank, traceback.format_exc()))


def can_hold_experts():
    """Whether Megatron-FSDP of this version has meshes for experts, as in 0.16."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp import FSDPDistributedIndex
    return hasattr(FSDPDistributedIndex, "get_expert_dp_group")


def main():
    program, corpus = sys.argv[1:3]
    for own in sorted(glob.glob(os.path.join(corpus, "recipes", "megatron-dist-*", "fsdp_dtensor-*", ""))):
        name = os.path.basename(os.path.dirname(own[:-1]))[len("megatron-dist-"):]
        if "experts" in models.CASES[name] and not can_hold_experts():
            continue
        with tempfile.TemporaryDirectory() as home, socket.socket() as s:
            ours = [(os.path.join(home, n), n == "hub") for n in ("one", "three", "hub")]
            case = os.path.dirname(own[:-1])
            run(program, "reshard", own, "-o", ours[0][0], "--to", "dcp", "--dp", "1", "-q")
            run(program, "reshard", own, "-o", ours[1][0], "--to", "fsdp_dtensor", "--dp", "3", "-q")
            run(program, "reshard", os.path.join(case, "to.safetensors"), "-o", ours[2][0], "--to", "fsdp_dtensor", "--dp", "3",
                "--recipe", "megatron-qwen-moe" if "experts" in models.CASES[name] else "megatron-llama", "--reverse", "--config",
                case, "-q")
            state = written.torch_optimizer(own, "experts" in models.CASES[name])
            for group in state["optim"]["param_groups"]:
                group["lr"] = 0.02
            saved, torchs = os.path.join(home, "torch.pt"), os.path.join(home, "torch")
            torch.save(state, saved)
            run(program, "reshard", saved, "-o", torchs, "--to", "fsdp_dtensor", "--dp", "2", "-q")
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
            s.close()
            failures = mp.get_context("spawn").SimpleQueue()
            count = ranks.ranks_of({**models.CASES[name], **maker.MESHES[name]})
            mp.spawn(on_rank, args=(port, name, own, ours, torchs, failures), nprocs=count)
            while not failures.empty():
                check(False, "%s: %s" % (name, failures.get()))
    return finish("fsdp_dtensor_load, megatron-core " + megatron.core.__version__)


if __name__ == "__main__":
    sys.exit(main())
