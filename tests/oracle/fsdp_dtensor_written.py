#!/usr/bin/env python3
"""fsdp_dtensor that we write, read by torch's DCP: the names and bytes of the model have to be those of the checkpoints that
megatron-core's own Megatron-FSDP wrote of the same model (tests/corpus/make_fsdp_dtensor.py, whose JSON has the digests).

usage: fsdp_dtensor_written.py FSDPCKPT CORPUS
"""
import hashlib
import json
import os
import re
import sys
import tempfile

import torch
import torch.distributed.checkpoint as dcp
from checks import check, finish, run
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

CASES = (("llama", "megatron-llama"), ("qwen3-moe", "megatron-qwen-moe"))
# Recipes make the names of Transformer Engine, and the checkpoints are of Megatron's own layers, with sequential experts.
ENGINE = ((r"\.self_attention\.linear_qkv\.layer_norm_", ".input_layernorm."), (r"\.mlp\.linear_fc1\.layer_norm_", ".pre_mlp_layernorm."),
          (r"\.experts\.linear_(fc\d)\.weight(\d+)", r".experts.local_experts.\2.linear_\1.weight"))


def read(folder):
    """All values, by torch's reader: tensors by their digests."""
    return {k: digest(v) if isinstance(v, torch.Tensor) else v for k, v in read_tensors(folder).items()}


def read_tensors(folder, objects=True):
    reader = dcp.FileSystemReader(folder)
    known = reader.read_metadata().state_dict_metadata
    state = {k: "" if isinstance(v, BytesStorageMetadata) else torch.empty(v.size, dtype=v.properties.dtype)
             for k, v in known.items() if objects or not isinstance(v, BytesStorageMetadata)}
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def digest(t):
    raw = t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return [str(t.dtype)[6:], list(t.shape), hashlib.sha256(raw).hexdigest()]


def model_of(values):
    return {k: v for k, v in values.items() if k.startswith("model.")}


def compare(what, own, made):
    wrong = sorted(k for k in own.keys() | made.keys() if own.get(k) != made.get(k))
    check(not wrong and len(own) > 9, "%s: differ: %s" % (what, wrong))


def without_engine(name):
    for pattern, local in ENGINE:
        name = re.sub(pattern, local, name)
    return name


def check_model(program, home, case, recipe):
    """From the hub, and from Megatron's names, which need no recipe."""
    with open(os.path.join(case, "fsdp_dtensor-0.16.1.json")) as f:
        own = model_of(json.load(f))
    hub, name = os.path.join(case, "to.safetensors"), os.path.basename(case)
    how = ["--recipe", recipe, "--reverse", "--config", case, "--dtype", "fp32", "-q"]
    for kind, command in (("full", ["convert"]), ("3 files", ["reshard", "--dp", "3"])):
        made = os.path.join(home, name + kind[0])
        run(program, command[0], hub, "-o", made, "--to", "fsdp_dtensor", *command[1:], *how)
        run(program, "verify", made, "-q")
        values = read(made)
        compare(name + ", " + kind, own, {without_engine(k): v for k, v in model_of(values).items()})
        check(values["iteration"] == 0 and values["checkpoint_version"] == 3.0 and len(values) == len(own) + 2,
              "%s: %s" % (kind, sorted(values)))
    named, made = os.path.join(home, name + ".safetensors"), os.path.join(home, name + "-named")
    run(program, "convert", hub, "-o", named, *how)
    run(program, "convert", named, "-o", made, "--to", "fsdp_dtensor", "-q", "--rename",
        r"s/self_attention\.linear_qkv\.layer_norm_/input_layernorm./", *(
            ["--rename", r"s/mlp\.linear_fc1\.layer_norm_/pre_mlp_layernorm./"] if "moe" not in name else
            ["--rename", r"s/experts\.linear_(fc[12])\.weight([0-9]+)/experts.local_experts.\2.linear_\1.weight/"]))
    compare(name + ", renamed", own, model_of(read(made)))
    ranks, made = os.path.join(case, "ranks"), os.path.join(home, name + "-ranks")
    run(program, "reshard", ranks, "-o", made, "--to", "fsdp_dtensor", "--dp", "2", "--dtype", "fp32", "-q")
    values = read(made)
    compare(name + ", from ranks", own, model_of(values))
    check(values["iteration"] == 10 and type(values["args"]).__name__ == "Namespace", "from ranks: %s" % sorted(values))


def check_own(program, home, own):
    """From fsdp_dtensor of another mesh: every value stays, with the optimizer."""
    made = os.path.join(home, "own")
    run(program, "reshard", own, "-o", made, "--dp", "3", "--to", "fsdp_dtensor", "-q", "--force")
    compare(own, read(own), read(made))
    check(sorted(os.listdir(made)) == [".metadata", "__0_0.distcp", "__1_0.distcp", "__2_0.distcp"], str(os.listdir(made)))


def torch_optimizer(own, experts):
    """The values of a checkpoint of Megatron-FSDP under the names of Megatron's rank files: torch's AdamW."""
    tensors = read_tensors(own, objects=False)
    for name in [k for k in tensors if re.search(r"_w(\.|$)", k)]:
        first = tensors.pop(name)
        second = tensors.pop(re.sub(r"_w(\.|$)", r"_v\1", name))
        tensors[re.sub(r"_w(\.|$)", r"\1", name)] = torch.cat([first, second]) if first.ndim else first
    model = {k[len("model.module."):]: v for k, v in tensors.items() if k.startswith("model.")}
    state = {name: {key: tensors["optimizer.state.module.module.module.%s.%s" % (name, key)]
                    for key in ("step", "exp_avg", "exp_avg_sq")} for name in model}
    kinds = sorted({(experts and ".mlp.experts." in name, t.ndim == 1) for name, t in model.items()})
    groups = [{"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1 * (not flat),
               "params": [n for n, t in model.items() if (experts and ".mlp.experts." in n, t.ndim == 1) == (expert, flat)]}
              for expert, flat in kinds]
    if experts:
        groups = [dict(g, wd_mult=1.0 - flat, lr_mult=1.0, is_expert_parallel=expert, step=1) for g, (expert, flat) in zip(groups, kinds)]
    return {"model": model, "optim": {"state": state, "param_groups": groups}}


def groups_of(values):
    """The values of the groups by parameter."""
    found = {}
    for name, value in values.items():
        if name.startswith("optimizer.param_to_group_meta."):
            parameter, key = name[len("optimizer.param_to_group_meta."):].rsplit(".", 1)
            found.setdefault(parameter, {})[key] = value
    return found


def check_optimizer(program, home, own, experts):
    """From torch's names, with torch's groups or Megatron's: the states are Megatron-FSDP's own, with the groups of each parameter."""
    saved, made, masters = (os.path.join(home, "optimizer" + end) for end in (".pt", "", "-masters"))
    state, want = torch_optimizer(own, experts), read(own)
    torch.save(state, saved)
    run(program, "convert", saved, "-o", made, "--to", "fsdp_dtensor", "-q", "--force")
    got = read(made)
    tensors = {k: v for k, v in want.items() if isinstance(v, list)}
    compare("optimizer of " + own, tensors, {k: v for k, v in got.items() if isinstance(v, list)})
    groups = groups_of(got)
    check(groups.keys() == groups_of(want).keys(), "groups of %s: %s" % (own, sorted(groups)))
    for name, group in groups.items():
        flat = state["model"][name[len("module.module.module."):]].ndim == 1
        kept = {k: group.get(k) for k in ("lr", "betas", "eps", "weight_decay", "wd_mult", "lr_mult", "step", "is_expert_parallel")}
        check(kept == {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1 * (not flat), "wd_mult": 1.0 - flat,
                       "lr_mult": 1.0, "step": 1, "is_expert_parallel": experts and ".mlp.experts." in name} and
              group["wd_mult"] == groups_of(want)[name]["wd_mult"], "group of %s: %s" % (name, group))
        check("params" not in group, "group of %s: %s" % (name, group))
    check(got["iteration"] == 1, "iteration: %s" % got["iteration"])
    # The masters in fp32 are the model's weights.
    for name, values in state["optim"]["state"].items():
        values["fp32_param"] = state["model"][name]
        state["model"][name] = torch.zeros_like(state["model"][name], dtype=torch.bfloat16)
    torch.save(state, saved)
    run(program, "reshard", saved, "-o", masters, "--dp", "2", "--to", "fsdp_dtensor", "-q", "--force")
    compare("masters of " + own, tensors, {k: v for k, v in read(masters).items() if isinstance(v, list)})
    return saved


def check_ranks(program, home, ranks):
    """The optimizer of Megatron's rank files: states and masters as megatron-core has them, in Megatron's own groups."""
    made = os.path.join(home, "ranks")
    with open(os.path.join(ranks, "expected.json")) as f:
        expected = json.load(f)["tensors"]
    run(program, "reshard", ranks, "-o", made, "--to", "fsdp_dtensor", "--dp", "2", "-q", "--force")
    got, count = read_tensors(made), 0
    for name, want in expected.items():
        parameter, key = name.rsplit(".", 1)
        if not name.startswith("optim.state."):
            continue
        parameter = parameter[len("optim.state."):]
        place = "model.module.%s" if key == "fp32_param" else "optimizer.state.module.module.module.%s." + key
        both = [got.get(place % (parameter + half)) for half in ("", "_w", "_v")]
        raw = b"".join(t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for t in both if t is not None)
        check(hashlib.sha256(raw).hexdigest() == want["sha256"], "%s: %s" % (ranks, name))
        count += 1
    groups = groups_of(got)
    check(count > 9 and not any(n.startswith("optim.") for n in got), "%s: %s" % (ranks, sorted(got)))
    for name, group in groups.items():
        parameter = name[len("module.module.module."):]
        flat = got.get("model.module." + parameter, torch.zeros(1, 1)).ndim == 1 or parameter.endswith(".bias")
        check(group["wd_mult"] == 1.0 - flat and group["step"] == 1 and "params" not in group and
              group["is_expert_parallel"] == (".mlp.experts." in parameter), "%s: %s: %s" % (ranks, name, group))


def check_key_first(program, home, case):
    """The distributed optimizer of torch_dist goes through the names of the hub."""
    own, hub, made = os.path.join(case, "torch_dist"), os.path.join(home, "hub"), os.path.join(home, "from-dist")
    how = ["--recipe", "megatron-llama", "--config", case, "-q"]
    run(program, "consolidate", own, "-o", hub, "--to", "dcp", *how)
    run(program, "reshard", hub, "-o", made, "--dp", "2", "--to", "fsdp_dtensor", "--reverse", *how)
    got, want = read_tensors(made), read_tensors(own, objects=False)
    for key, place in (("param", "model.module.%s"), ("exp_avg", "optimizer.state.module.module.module.%s.exp_avg"),
                       ("exp_avg_sq", "optimizer.state.module.module.module.%s.exp_avg_sq")):
        for module in ("self_attention.linear_qkv", "mlp.linear_fc1", "mlp.linear_fc2"):
            both = want["optimizer.state.%s.decoder.layers.%s.weight" % (key, module)]
            for layer in (0, 1):
                name = place % ("decoder.layers.%d.%s.weight" % (layer, module))
                halves = [name.replace(".weight", ".weight_" + h) for h in "wv"] if "fc1" in module else [name]
                check(torch.equal(torch.cat([got[h] for h in halves]), both[layer]), "from torch_dist: %s" % name)
    groups = groups_of(got)
    check(len(groups) > 9 and not any(k.endswith("param_state_sharding_type") for k in got), "from torch_dist: %s" % sorted(got))


def check_refused(program, home, case):
    made, source = os.path.join(home, "refused"), os.path.join(home, "refused.pt")
    mlp = "decoder.layers.%d.mlp.linear_fc%d.weight"

    def refused(status, word, state):
        torch.save(state, source)
        r = run(program, "convert", source, "-o", made, "--to", "fsdp_dtensor", "-q", ok=status)
        check(word in r.stderr and r.stderr.count("\n") == 1 and not os.path.exists(made), r.stderr)

    refused(2, "a name of the Hugging Face hub", {"model.layers.0.mlp.up_proj.weight": torch.zeros(4, 2)})
    refused(5, "has all experts of a layer", {"decoder.layers.0.mlp.experts.weight1": torch.zeros(2, 4, 4)})
    refused(5, "it is unclear whether it holds a gate", {mlp % (0, 1): torch.zeros(4, 2)})
    refused(5, "some hold a gate (SwiGLU), but not all", {
        mlp % (0, 1): torch.zeros(8, 2), mlp % (0, 2): torch.zeros(2, 4), mlp % (1, 1): torch.zeros(4, 2), mlp % (1, 2): torch.zeros(2, 4)})
    state = {"exp_avg": torch.ones(2, 4), "exp_avg_sq": torch.ones(2, 4), "step": torch.tensor(1.0)}
    second, group = mlp % (0, 2), {"lr": 0.1, "betas": (0.9, 0.9), "eps": 0.1, "weight_decay": 0.1}
    megatron = dict(group, wd_mult=1.0, is_expert_parallel=False)
    refused(5, "is state of a parameter that is missing", {"optim": {"state": {second: state}, "param_groups": [dict(group, params=[second])]}})
    refused(5, "may belong to group 0 of the optimizer, or to group 1", {
        second: torch.zeros(2, 4), "optim": {"state": {second: state}, "param_groups": [dict(megatron, params=[second])] * 2}})
    refused(5, "no group of the optimizer is for parameter " + second, {
        second: torch.zeros(2, 4), "optim": {"state": {second: state}, "param_groups": [dict(megatron, wd_mult=0.0, params=[second])]}})
    r = run(program, "convert", os.path.join(case, "torch_dist"), "-o", made, "--to", "fsdp_dtensor", "-q", ok=5)
    check("has the keys of torch_dist" in r.stderr and "--recipe" in r.stderr, r.stderr)
    plain = {mlp % (0, 1): torch.zeros(4, 2), mlp % (0, 2): torch.zeros(2, 4), "vision.mlp.linear_fc1.layer_norm_weight": torch.zeros(4)}
    torch.save(plain, source)
    run(program, "convert", source, "-o", made, "--to", "fsdp_dtensor", "-q")
    check(sorted(model_of(read(made))) == sorted("model.module." + k for k in plain), "an MLP without a gate: %s" % sorted(read(made)))


def check_without_objects(program, home, source):
    """The reader of nanotron has no objects, and the target has two of its own."""
    made = os.path.join(home, "from_nanotron")
    run(program, "convert", source, "-o", made, "--to", "fsdp_dtensor", "-q")
    values = read(made)
    check(len(model_of(values)) == 13 and values["iteration"] == 0 and values["checkpoint_version"] == 3.0, "from nanotron: %s" % sorted(values))


def main():
    program, corpus = sys.argv[1:3]
    with tempfile.TemporaryDirectory() as home:
        for name, recipe in CASES:
            case = os.path.join(corpus, "recipes", "megatron-dist-" + name)
            check_model(program, home, case, recipe)
            own = os.path.join(case, "fsdp_dtensor-0.16.1")
            check_own(program, home, own)
            check_optimizer(program, home, own, "moe" in name)
        for name in ("tp2ep2-distributed", "tp2-llama-fp32", "tp2pp2-llama"):
            check_ranks(program, home, os.path.join(corpus, "megatron-ranks", name))
        check_key_first(program, home, os.path.join(corpus, "recipes", "megatron-dist-llama"))
        check_without_objects(program, home, os.path.join(corpus, "nanotron", "tp2pp2"))
        check_refused(program, home, os.path.join(corpus, "recipes", "megatron-dist-llama"))
    return finish("fsdp_dtensor_written")


if __name__ == "__main__":
    sys.exit(main())
