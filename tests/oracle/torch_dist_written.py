#!/usr/bin/env python3
"""torch_dist that we write, against what megatron-core itself saved of the same models (tests/corpus/make_megatron_models.py):
keys, shapes, types and bytes, as torch's reader loads both. oracle.torch_dist_load gives them to megatron-core.

usage: torch_dist_written.py FSDPCKPT CORPUS       exit 77 without torch or safetensors
"""
import hashlib
import io
import json
import os
import re
import shutil
import sys
import tempfile

try:
    import torch
    import torch.distributed.checkpoint as dcp
    from checks import check, finish, run
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
except ImportError as e:
    print("skipped: %s" % e)
    sys.exit(77)

# The corpus is of Megatron's own layers, which need no GPU, and recipes make the names of Transformer Engine's.
EXPERTS = [("layers.pre_mlp_layernorm.", "layers.mlp.linear_fc1.layer_norm_")]
LATENT = [("linear_q_up_proj.layer_norm_", "q_layernorm."), ("linear_kv_up_proj.layer_norm_", "kv_layernorm."),
          ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")]
CASES = (("llama", "megatron-llama", []), ("qwen3-moe", "megatron-qwen-moe", EXPERTS),
         ("qwen2-moe", "megatron-qwen-moe", EXPERTS), ("mixtral", "megatron-mixtral", EXPERTS),
         ("deepseek", "megatron-deepseek-v3", LATENT))


def read(folder):
    """All values of a directory: tensors, and the lists that stand for sharded objects."""
    reader = dcp.FileSystemReader(folder)
    metadata = reader.read_metadata()
    state = {k: torch.empty(v.size, dtype=v.properties.dtype) for k, v in metadata.state_dict_metadata.items()
             if isinstance(v, TensorStorageMetadata)}
    _load_state_dict(state, reader, planner=dcp.DefaultLoadPlanner(flatten_state_dict=False), no_dist=True)
    for index, place in metadata.storage_data.items():
        if index.fqn not in state:
            with open(os.path.join(folder, place.relative_path), "rb") as f:
                f.seek(place.offset)
                state[index.fqn] = torch.load(io.BytesIO(f.read(place.length)), weights_only=False)
    return state


def same(a, b):
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(a.contiguous().view(torch.uint8),
                                                                        b.contiguous().view(torch.uint8))
    return isinstance(a, list) and isinstance(b, list) and str(a) == str(b)


def compare(what, own, made, names=(), exact=False, trimmed=None):
    """Compares the model, and with `exact` all values; of the vocabulary the first rows."""
    want, got = read(own), {}
    for key, value in read(made).items():
        for ours, theirs in names:
            key = key.replace(ours, theirs)
        got[key] = value
    for state in (want, got):
        state.update({k: v[:trimmed] for k, v in state.items() if k.endswith(("word_embeddings.weight", "output_layer.weight"))})
    model = {k for k in want if exact or not k.startswith("optimizer.")}
    extra = {k for k in got if k not in model and ".core_attention._extra_state/" not in k}
    # Transformer Engine's classes have this object. The corpus was made with Megatron's own, which do not.
    extra = {k for k in extra if exact or not k.split("._extra_state/")[0].endswith("eh_proj")}
    check(not model - set(got), "%s: missing %s" % (what, sorted(model - set(got))))
    check(not extra, "%s: not megatron-core's: %s" % (what, sorted(extra)))
    wrong = [k for k in model & set(got) if not same(want[k], got[k])]
    check(not wrong and len(model) > 9, "%s: differ: %s" % (what, wrong))


def common(folder):
    return torch.load(os.path.join(folder, "common.pt"), weights_only=False)


def check_files(what, own, made):
    description = [json.load(open(os.path.join(f, "metadata.json"))) for f in (own, made)]
    check(description[0] == description[1], "%s: metadata.json: %s" % (what, description))
    values = common(made)
    content = values["content_metadata"]
    layered = any(".layers.0." in k for k in read(own) if k.startswith("decoder."))
    check(content.get("non_homogeneous_layers", False) == layered and content["singleton_local_shards"] is False,
          "%s: content_metadata: %s" % (what, content))
    check(values["checkpoint_version"] == 3.0 and "iteration" in values, "%s: common.pt: %s" % (what, values))


def check_case(program, home, folder, name, recipe, names):
    case = os.path.join(folder, "megatron-dist-" + name)
    own, hub = os.path.join(case, "torch_dist"), os.path.join(case, "to.safetensors")
    how = ["--to", "torch_dist", "--recipe", recipe, "--reverse", "--config", case, "-q"]
    for kind, command in (("full", ["convert"]), ("3 files", ["reshard", "--dp", "3"]),
                          ("dp 2, tp 2", ["reshard", "--dp", "2", "--tp", "2"])):
        made = os.path.join(home, name + kind.replace(", ", "-").replace(" ", ""))
        what = "%s, %s" % (name, kind)
        if "--tp" in command:  # a plan for Megatron's names
            plan = os.path.join(home, "plan.json")
            with open(plan, "w") as f:
                json.dump({"output_layer": "colwise"}, f)
            command = command + ["--tp-plan", plan]
        run(program, command[0], hub, "-o", made, *command[1:], *how)
        run(program, "verify", made, "-q")
        compare(what, own, made, names)
        check_files(what, own, made)
        shutil.rmtree(made)
    if os.path.isdir(os.path.join(case, "ranks")):
        made = os.path.join(home, name + "-ranks")
        run(program, "consolidate", os.path.join(case, "ranks"), "-o", made, "--to", "torch_dist", "-q")
        compare(name + ", from ranks", own, made)
        values = common(made)
        check(values["iteration"] == 10 and type(values["args"]).__name__ == "Namespace", "%s: %s" % (name, values))


def check_nemo(program, home, case):
    """NeMo 2 has `module.` before the names, which a recipe with other names makes (docs/TRAINERS.md)."""
    recipe, made = os.path.join(home, "nemo.json"), os.path.join(home, "nemo", "weights")
    with open(recipe, "w") as f:
        f.write(re.sub(r'"(embedding|decoder|output_layer)\.', r'"module.\1.', run(program, "recipes", "megatron-llama").stdout))
    os.mkdir(os.path.dirname(made))
    run(program, "reshard", os.path.join(case, "to.safetensors"), "-o", made, "--dp", "2", "--to", "torch_dist", "--recipe", recipe,
        "--reverse", "--config", case, "-q")
    compare("NeMo", os.path.join(case, "weights"), made)
    check(all(k.startswith("module.") for k in read(made)), "NeMo: %s" % sorted(read(made)))
    check_files("NeMo", os.path.join(case, "weights"), made)


def check_another(program, home, own):
    """From a torch_dist of another mesh: every value stays."""
    made = os.path.join(home, "another")
    run(program, "reshard", own, "-o", made, "--dp", "2", "--to", "torch_dist", "-q")
    compare("another mesh", own, made, exact=True)
    before, after = common(own), common(made)
    check(all(str(after[k]) == str(v) for k, v in before.items()), "common.pt: %s and %s" % (before, after))
    run(program, "reshard", own, "-o", made, "--dp", "3", "--to", "torch_dist", "--force", "-q")
    check(sorted(os.listdir(made)) == [".metadata", "__0_0.distcp", "__1_0.distcp", "__2_0.distcp", "common.pt",
                                       "metadata.json"], "--force: %s" % sorted(os.listdir(made)))
    with open(os.path.join(made, "metadata.json"), "w") as f:
        f.write('{"of": "another program"}')
    run(program, "reshard", own, "-o", made, "--dp", "3", "--to", "torch_dist", "--force", "-q", ok=2)


def check_optimizer(program, home, case):
    """The optimizer's state goes through a recipe like its parameters, and back."""
    own, hub, back = os.path.join(case, "torch_dist"), os.path.join(home, "hub"), os.path.join(home, "back")
    how = ["--recipe", "megatron-llama", "--config", case, "-q"]
    run(program, "consolidate", own, "-o", hub, "--to", "dcp", *how)
    want, got = read(own), read(hub)
    for key in ("param", "exp_avg", "exp_avg_sq"):
        stacked, made = "optimizer.state.%s.decoder.layers." % key, "optimizer.state.%s.model." % key
        heads, groups, d = 4, 2, 4
        qkv = want[stacked + "self_attention.linear_qkv.weight"].view(2, groups, heads // groups + 2, d, 16)
        parts = {"self_attn.q_proj": qkv[:, :, :-2].reshape(2, -1, 16), "self_attn.k_proj": qkv[:, :, -2].reshape(2, -1, 16),
                 "self_attn.v_proj": qkv[:, :, -1].reshape(2, -1, 16),
                 "self_attn.o_proj": want[stacked + "self_attention.linear_proj.weight"],
                 "mlp.down_proj": want[stacked + "mlp.linear_fc2.weight"],
                 "post_attention_layernorm": want[stacked + "mlp.linear_fc1.layer_norm_weight"]}
        parts["mlp.gate_proj"], parts["mlp.up_proj"] = want[stacked + "mlp.linear_fc1.weight"].chunk(2, 1)
        for name, both in parts.items():
            for layer in (0, 1):
                found = got.get("%slayers.%d.%s.weight" % (made, layer, name))
                check(found is not None and torch.equal(found, both[layer]), "%s of %s, layer %d" % (key, name, layer))
        rows = want["optimizer.state.%s.embedding.word_embeddings.weight" % key][:30]
        check(torch.equal(got[made + "embed_tokens.weight"], rows), "%s of the embedding" % key)
    run(program, "reshard", hub, "-o", back, "--dp", "2", "--to", "torch_dist", "--reverse", *how)
    for folder in (own, back):  # the padding of the vocabulary, which the recipe trims
        values = read(folder)
        padded = [k for k in values if k.endswith(("word_embeddings.weight", "output_layer.weight"))]
        check(len(padded) == 8 and all(folder == own or not values[k][30:].any() for k in padded), "padding: %s" % padded)
    compare("the optimizer, back", own, back, exact=True, trimmed=30)
    check(str(common(own)["optimizer"]) == str(common(back)["optimizer"]), "common.pt: %s" % common(back))


def check_many_experts(program, home):
    """A shape cannot ask for any number of objects."""
    source = os.path.join(home, "many.pt")
    torch.save({"decoder.layers.0.mlp.experts.weight1": torch.empty(1 << 40, 0, 4)}, source)
    r = run(program, "convert", source, "-o", os.path.join(home, "many"), "--to", "torch_dist", "-q", ok=5)
    check("more than 4096 experts" in r.stderr, r.stderr)


def check_hub_names(program, home):
    """Without a recipe, the keys would be those of no model of Megatron."""
    source, made = os.path.join(home, "named.pt"), os.path.join(home, "named")
    torch.save({"model.layers.0.mlp.up_proj.weight": torch.zeros(4, 2)}, source)
    r = run(program, "convert", source, "-o", made, "--to", "torch_dist", "-q", ok=2)
    check("a name of the Hugging Face hub" in r.stderr and "--recipe" in r.stderr and not os.path.exists(made), r.stderr)


def dist_value(state, key, parameter):
    """What the keys of megatron-core hold of a parameter of one layer and expert."""
    for ours, theirs in (("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
                         ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")):
        parameter = parameter.replace(ours, theirs)
    numbers = [int(n) for n in re.findall(r"(?:layers|local_experts)\.(\d+)\.", parameter)]
    parameter = re.sub(r"local_experts\.\d+\.", "experts.", re.sub(r"layers\.\d+\.", "layers.", parameter))
    value = state.get("optimizer.state.%s.%s" % (key, parameter))
    for n in numbers if value is not None else []:
        value = value[n]
    return value


def check_rank_optimizer(program, home, ranks, chained):
    """The optimizer of Megatron's rank files, as megatron-core's own torch_dist of the same run has it."""
    made = os.path.join(home, "rank-optimizer")
    expected = json.load(open(os.path.join(ranks, "expected.json")))["tensors"]
    run(program, "reshard", ranks, "-o", made, "--to", "torch_dist", "--dp", "2", "-q", "--force")
    state, count = read(made), 0
    masters = any(name.endswith(".fp32_param") for name in expected)
    for name, want in expected.items():
        parameter, key = name.rsplit(".", 1)
        if name.startswith("optim.state."):
            got = dist_value(state, {"fp32_param": "param"}.get(key, key), parameter[len("optim.state."):])
        elif not masters and not name.endswith("expert_bias"):
            got = dist_value(state, "param", name[len("model."):])
        else:
            continue
        raw = b"" if got is None else got.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        check(hashlib.sha256(raw).hexdigest() == want["sha256"], "%s: %s" % (ranks, name))
        count += 1
    own = sum(n.startswith("optimizer.state.") for n in state)
    check(count > 9 and own > 9 and not any(n.startswith("optim.") for n in state), "%s: %s" % (ranks, sorted(state)))
    optimizer = common(made)["optimizer"]
    check(list(optimizer) == [0, 1] if chained else "optimizer" in optimizer, "%s: %s" % (ranks, optimizer))
    for number, one in enumerate([optimizer[0], optimizer[1]] if chained else [optimizer]):
        groups = one["optimizer"]["param_groups"]
        check(one["param_state_sharding_type"] == "fully_reshardable" and groups[0]["wd_mult"] == 1.0 and
              all(g["step"] == 1 and g["is_expert_parallel"] == (number > 0) and g["betas"] == (0.9, 0.999) and
                  "params" not in g for g in groups), "%s: %s" % (ranks, groups))
    shutil.rmtree(made)
    schema = os.path.join(home, "schema.json")
    with open(schema, "w") as f:
        f.write(run(program, "schema", ranks).stdout)
    run(program, "convert", schema, "--to", "torch_dist", "--dry-run", "-q")


def save_torch(folder, experts=False, **how):
    """Two layers with torch's AdamW after a step, as FSDP saves them. Returns the names and the state."""
    names = ["decoder.layers.%d.mlp.%s" % (n, m) for n in (0, 1) for m in ("linear_fc2.weight", "linear_fc1.layer_norm_weight")]
    names += ["decoder.layers.%d.mlp.experts.local_experts.%d.linear_fc2.weight" % (n, e) for n in (0, 1) for e in (0, 1)
              if experts]
    model = {n: torch.randn(3) if "norm" in n else torch.randn(2, 3) for n in names}
    parameters = [[torch.nn.Parameter(model[n]) for n in names if ("norm" in n) == norm] for norm in (False, True)]
    optimizer = torch.optim.AdamW([{"params": parameters[0]}, {"params": parameters[1], "weight_decay": 0.0}], lr=0.02, **how)
    for p in parameters[0] + parameters[1]:
        p.grad = torch.ones_like(p)
    optimizer.step()
    order = [n for norm in (False, True) for n in names if ("norm" in n) == norm]
    saved = optimizer.state_dict()
    state = {order[i]: s for i, s in saved["state"].items()}
    groups = [{**g, "params": [order[i] for i in g["params"]]} for g in saved["param_groups"]]
    return {"model": model, "optim": {"state": state, "param_groups": groups}}, folder


def flattened(optim):
    """As get_optimizer_state_dict with flatten_optimizer_state_dict, which torchtitan saves: settings for each parameter."""
    flat = {"state.%s.%s" % (n, k): v for n, values in optim["state"].items() for k, v in values.items()}
    for group in optim["param_groups"]:
        flat.update({"param_groups.%s.%s" % (n, k): v for n in group["params"] for k, v in group.items() if k != "params"})
    return flat


def check_torch_optimizer(program, home):
    """AdamW of torch, as FSDP and torchtitan save it, gets the groups that Megatron makes."""
    made, saved = os.path.join(home, "from-torch"), os.path.join(home, "by-torch")
    for experts, flat in ((False, False), (True, False), (False, True)):
        state, folder = save_torch(saved, experts)
        optim = flattened(state["optim"]) if flat else state["optim"]
        dcp.save({**state, "optim": optim}, checkpoint_id=folder, no_dist=True)
        run(program, "convert", folder, "-o", made, "--to", "torch_dist", "-q", "--force")
        got = read(made)
        for name, values in state["optim"]["state"].items():
            for key, want in (("param", state["model"][name]), ("exp_avg", values["exp_avg"]), ("exp_avg_sq", values["exp_avg_sq"])):
                found = dist_value(got, key, name)
                check(found is not None and torch.equal(found, want), "%s of %s" % (key, name))
        optimizer, iteration = common(made)["optimizer"], common(made)["iteration"]
        check(iteration == 1 and (list(optimizer) == [0, 1]) == experts, "common.pt: %s" % common(made))
        for number, one in enumerate([optimizer[0], optimizer[1]] if experts else [optimizer]):
            told = [(g["wd_mult"], g["weight_decay"], g["lr_mult"], g["lr"], g["betas"], g["step"], g["is_expert_parallel"],
                     g["is_decoupled_lr"]) for g in one["optimizer"]["param_groups"]]
            same = (1.0, 0.02, (0.9, 0.999), 1, number == 1, False)
            check(told == [(1.0, 0.01, *same), (0.0, 0.0, *same)], "groups: %s" % told)
        shutil.rmtree(folder)


def check_refused_optimizers(program, home):
    """What has no place in torch_dist is refused by name."""
    made, saved = os.path.join(home, "torch-optimizer"), os.path.join(home, "refused.pt")

    def refused(word, change=lambda state: None, **how):
        state, _ = save_torch(saved, **how)
        change(state["optim"])
        torch.save(state, saved)
        r = run(program, "convert", saved, "-o", made, "--to", "torch_dist", "-q", ok=5)
        check(word in r.stderr and "--exclude 'optim*'" in r.stderr and r.stderr.count("\n") == 1, r.stderr)
        check(not os.path.exists(made), "a target of an optimizer without a place")

    norms = ["decoder.layers.%d.mlp.linear_fc1.layer_norm_weight" % n for n in (0, 1)]
    refused("max_exp_avg_sq' has no place", amsgrad=True)
    refused("is true, which megatron-core", maximize=True)
    refused("'optim.param_groups.1.lr' differs between groups", lambda o: o["param_groups"][1].update(lr=0.5))
    refused("has one number for all", lambda o: [o["state"][n].update(step=torch.tensor(7.0)) for n in norms])
    refused("lack lr", lambda o: o.pop("param_groups"))
    refused("without a step", lambda o: [s.pop("step") for s in o["state"].values()])
    run(program, "convert", saved, "-o", made, "--to", "torch_dist", "-q", "--exclude", "optim*")
    check(os.path.isdir(made), "without the optimizer")


def main():
    program, corpus = sys.argv[1:3]
    folder = os.path.join(corpus, "recipes")
    with tempfile.TemporaryDirectory() as home:
        for name, recipe, names in CASES:
            check_case(program, home, folder, name, recipe, names)
        check_optimizer(program, home, os.path.join(folder, "megatron-dist-llama"))
        for name, chained in (("tp2pp2-llama", False), ("tp2-llama-fp32", False), ("tp2dp2-distributed", False),
                              ("tp2ep2-distributed", True), ("ep2-moe", True)):
            check_rank_optimizer(program, home, os.path.join(corpus, "megatron-ranks", name), chained)
        check_torch_optimizer(program, home)
        check_refused_optimizers(program, home)
        check_many_experts(program, home)
        check_hub_names(program, home)
        check_nemo(program, home, os.path.join(folder, "megatron-dist-nemo"))
        check_another(program, home, os.path.join(folder, "megatron-dist-llama", "torch_dist"))
    return finish("torch_dist_written")


if __name__ == "__main__":
    sys.exit(main())
