"""Writing optimizer state in FSDP1's LOCAL_STATE_DICT. fsdpckpt makes shard files of a checkpoint that torch saved whole, real
FSDP on gloo resumes from them, and its optimizer state is byte for byte what it was before.

usage: flat_optim.py FSDPCKPT

Exit status 77 without torch.
"""

import json
import os
import pathlib
import sys
import tempfile

from flat_state import CASES, PROGRAM, command, make, on_ranks, wrap  # exits with 77 without torch

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType

from checks import check, finish, run
from torch_values import by_name, check_equal, kept

# The optimizer for each case of flat_state.
OPTIMIZERS = {"blocks": "adam", "tied": "adam", "tiny": "adam", "ignored": "adam", "double": "groups",
              "root": "sgd"}


def optimizer_of(kind, model):
    parameters = list(model.parameters())
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    if kind == "groups":
        return torch.optim.AdamW([{"params": parameters[1:], "lr": 0.3},
                                  {"params": parameters[:1], "weight_decay": 0.0}])
    return torch.optim.AdamW(parameters, lr=0.1, amsgrad=True)


def step(rank, model, optimizer, seed):
    """One step as in training: gradients of padding are 0."""
    torch.manual_seed(seed + rank)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
        if hasattr(p, "_shard_numel_padded"):  # a flat parameter
            p.grad = torch.randn_like(p)
            p.grad[p.numel() - p._shard_numel_padded:] = 0
    optimizer.step()


def whole(model):
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        return model.state_dict()


def train(rank, world, home, case):
    """Saves torch's state after one step, whole and per rank, and after another step."""
    model = wrap(case, make(case), world)
    optimizer = optimizer_of(OPTIMIZERS[case], model)
    step(rank, model, optimizer, 1)
    torch.save(optimizer.state_dict(), f"{home}/{case}.own{rank}.pt")
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        state = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}
    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        local = {"model": model.state_dict(), "optim": optimizer.state_dict(), "epoch": 7}
        torch.save(local, f"{home}/{case}.local/model_world_size_{world}_rank_{rank}.pt")
    if rank == 0:
        if case == "tied":  # FSDP's full state dict does not record ties
            state["model"]["head.weight"] = state["model"]["emb.weight"]
        torch.save({**state, "epoch": 7}, f"{home}/{case}.pt")
    step(rank, model, optimizer, 100)
    after = whole(model)
    if rank == 0:
        torch.save(after, f"{home}/{case}.after.pt")


def resume(rank, world, home, case, out, ordered):
    """Loads a rank's file into a new model and takes a step. FSDP.optim_state_dict sorts the state of a parameter, and
        safetensors sorts names, so the order of keys is the optimizer's only if the source kept it."""
    torch.manual_seed(rank + 50)
    fresh = make(case)
    with torch.no_grad():
        for p in fresh.parameters():
            p.fill_(0.5)
    model = wrap(case, fresh, world)
    optimizer = optimizer_of(OPTIMIZERS[case], model)
    given = torch.load(f"{out}/model_world_size_{world}_rank_{rank}.pt", weights_only=False)
    check(given["epoch"] == 7, f"{case}: other objects are lost")
    own = torch.load(f"{home}/{case}.own{rank}.pt")
    if ordered:
        check_equal(own, given["optim"], f"{case} rank {rank}")
    check_equal(by_name(own), by_name(given["optim"]), f"{case} rank {rank}")
    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        model.load_state_dict(given["model"])
    optimizer.load_state_dict(given["optim"])
    check_equal(by_name(own), by_name(optimizer.state_dict()), f"{case} rank {rank}: the optimizer's state")
    step(rank, model, optimizer, 100)
    after, expected = whole(model), torch.load(f"{home}/{case}.after.pt")
    check_equal(expected, after, f"{case} rank {rank}: after another step")


def numbered(state, case):
    """The state as the optimizer of the plain model has it, by number."""
    names = [name for name, _ in make(case).named_parameters()]
    groups = [{**g, "params": list(range(len(names)))} for g in state["optim"]["param_groups"]]
    model = {name: state["model"][name] for name in make(case).state_dict()}  # FSDP puts ignored parameters first
    return {**state, "model": model, "optim": {"state": {names.index(k): v for k, v in state["optim"]["state"].items()},
                                               "param_groups": groups}}


def flattened(state):
    """The state as flatten_optimizer_state_dict=True of torch's state dict API writes it."""
    flat = {f"state.{name}.{key}": value for name, values in state["optim"]["state"].items()
            for key, value in values.items()}
    for group in state["optim"]["param_groups"]:
        flat.update({f"param_groups.{name}.{key}": value for name in group["params"] for key, value in group.items()
                     if key != "params"})
    return {**state, "optim": flat}


def sources(home, case, schema):
    """The same checkpoint in all forms that programs write."""
    state = torch.load(f"{home}/{case}.pt")
    yield [f"{home}/{case}.pt"]
    if case == "tied":
        return
    dcp.save(state, checkpoint_id=f"{home}/{case}.dcp", no_dist=True)
    yield [f"{home}/{case}.dcp", *schema]
    yield [f"{home}/{case}.local", *schema]
    for extension in ("h5", "safetensors"):
        command("consolidate", f"{home}/{case}.pt", "-o", f"{home}/{case}.{extension}")
        yield [f"{home}/{case}.{extension}", *schema]
    if OPTIMIZERS[case] != "groups":
        torch.save(flattened(state), f"{home}/{case}.flattened.pt")
        yield [f"{home}/{case}.flattened.pt"]
        torch.save(numbered(state, case), f"{home}/{case}.numbered.pt")
        yield [f"{home}/{case}.numbered.pt"]


def policy_of(case, home):
    how = CASES[case][2]
    policy = ["--policy", "blocks" if how.get("wrap") else "size:1T", "--classes", f"{home}/classes.json"]
    return policy + (["--ignore", "norm.weight", "--ignore", "layers.1.act.bias"] if how.get("ignore") else [])


def case_out(home, case):
    world = CASES[case][1]
    os.mkdir(f"{home}/{case}.local")
    on_ranks(world, train, home, case)
    torch.save(make(case).state_dict(), f"{home}/{case}.model.pt")
    told = run(PROGRAM, "schema", f"{home}/{case}.model.pt").stdout
    with open(f"{home}/{case}.json", "w") as f:
        f.write(told)
    tried, schema = [], ["--schema", f"{home}/{case}.json"]
    for source in sources(home, case, schema):
        if source[0].endswith(".local") and (CASES[case][2].get("ignore") or OPTIMIZERS[case] == "groups"):
            text = command("consolidate", *source, "-o", f"{home}/{case}.never.h5", ok=5)
            check("numbered together with other parameters or in several groups" in text, text)
            continue
        out = f"{home}/{case}.out"
        command("reshard", *source, "-o", out, "--to", "pt", "--dp", world, *policy_of(case, home), "--force")
        files = [pathlib.Path(f"{out}/model_world_size_{world}_rank_{r}.pt").read_bytes() for r in range(world)]
        ordered = source[0].endswith(".local")
        if files not in tried or ordered:  # the order of the objects differs between the forms, so the files do too
            on_ranks(world, resume, home, case, out, ordered)
        tried.append(files)
    # fsdpckpt reads its own files.
    if not CASES[case][2].get("ignore") and OPTIMIZERS[case] != "groups":
        command("consolidate", f"{home}/{case}.out", "-o", f"{home}/back.pt", *schema, "--force")
        back, given = torch.load(f"{home}/back.pt"), torch.load(f"{home}/{case}.pt")
        for name, values in given["optim"]["state"].items():
            check_equal(by_name(values), by_name(back["optim"]["state"][name]), f"{case}: {name} read back")
        check_equal(kept(given["model"]), back["model"], f"{case}: the model read back")


def refusals(home):
    """State that FSDP1's optimizer cannot have is refused with one line."""
    state, schema = torch.load(f"{home}/blocks.pt"), ["--schema", f"{home}/blocks.json"]
    names = list(state["optim"]["state"])

    def refused(what, *words):
        torch.save(what, f"{home}/what.pt")
        text = command("reshard", f"{home}/what.pt", "-o", f"{home}/no", "--to", "pt", "--dp", 2, "--policy", "blocks",
                       ok=2)
        check(text.count("\n") == 1 and all(w in text for w in words) and "--exclude" in text, f"{words}: {text}")
        check(not os.path.exists(f"{home}/no"), f"{words}: was written")

    def changed(name, **values):
        of = {key: value for key, value in {**state["optim"]["state"][name], **values}.items() if value is not None}
        return {**state, "optim": {**state["optim"], "state": {**state["optim"]["state"], name: of}}}

    def grouped(groups):
        return {**state, "optim": {**state["optim"], "param_groups": groups}}

    group = state["optim"]["param_groups"][0]
    refused(changed(names[2], step=torch.tensor(9.0)), "step", "differs")
    refused(changed(names[2], step=None), "step", "missing for some parameters")
    refused(changed(names[2], exp_avg=None), "exp_avg", "missing for other parameters")
    refused(changed(names[2], exp_avg=torch.zeros(3)), names[2], "another shape")
    refused(changed(names[2], exp_avg=state["optim"]["state"][names[2]]["exp_avg"].half()), names[2], "another dtype")
    more = {**state["optim"]["state"], "no.such": {"exp_avg": torch.ones(2)}}
    refused({**state, "optim": {**state["optim"], "state": more}}, "no.such", "an unknown parameter")
    refused(grouped([{**group, "params": group["params"] + ["no.such"]}]), "'no.such'", "not a parameter")
    refused({**state, "optim": {"state": state["optim"]["state"]}}, "no param_groups")
    refused(grouped([{**group, "params": group["params"][:3]}, {**group, "params": group["params"][3:]}]),
            "another param group")
    plain = numbered(state, "blocks")
    plain["optim"]["param_groups"] = [{**group, "params": [0, 1, 2]}]
    refused(plain, "numbers 3 parameters")
    # Parameters without any state get zeros, as from FSDP.optim_state_dict_to_load, except for the step.
    refused({**state, "optim": {**state["optim"], "state": {names[2]: state["optim"]["state"][names[2]]}}}, "step")
    only = {names[2]: {"exp_avg": state["optim"]["state"][names[2]]["exp_avg"]}}
    torch.save({**state, "optim": {**state["optim"], "state": only}}, f"{home}/what.pt")
    command("reshard", f"{home}/what.pt", "-o", f"{home}/zeros", "--to", "pt", "--dp", 2, "--policy", "blocks")
    command("consolidate", f"{home}/zeros", "-o", f"{home}/back.pt", *schema, "--force")
    for name, values in torch.load(f"{home}/back.pt")["optim"]["state"].items():
        expected = only[names[2]]["exp_avg"] if name == names[2] else torch.zeros_like(values["exp_avg"])
        check(torch.equal(values["exp_avg"], expected), f"zeros: {name}")


def main():
    optimizer = torch.optim.AdamW([torch.ones(1, requires_grad=True)])  # imports modules once, before ranks are forked
    optimizer.zero_grad()
    with tempfile.TemporaryDirectory() as home:
        with open(f"{home}/classes.json", "w") as f:
            json.dump({"$buffers": ["scale"]}, f)
        for case in OPTIMIZERS:
            case_out(home, case)
        refusals(home)
    return finish("flat_optim")


if __name__ == "__main__":
    sys.exit(main())
