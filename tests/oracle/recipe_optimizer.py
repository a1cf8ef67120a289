#!/usr/bin/env python3
"""Optimizer state follows its parameter through a recipe. AdamW has trained a model with torchtitan's names; the recipe gives the
checkpoint the names and layouts of the Hub, and torch's own set_optimizer_state_dict loads it into the optimizer of a model with
those names: from DCP with nested and with flattened state (FSDP2, two ranks, two groups), from HDF5, and from torch.save, where
parameters are numbers. The next step is that of the first model, and --reverse gives back the first checkpoint. FSDP1's own
loader, optim_state_dict_to_load, takes the result, too.

usage: recipe_optimizer.py FSDPCKPT       exit 77 without torch
"""
import json
import os
import sys
import tempfile

try:
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
    from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_model_state_dict, get_optimizer_state_dict,
                                                         set_model_state_dict, set_optimizer_state_dict)
    from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
    from torch.distributed.fsdp import (FullyShardedDataParallel as FSDP, FullOptimStateDictConfig, FullStateDictConfig,
                                        ShardedOptimStateDictConfig, ShardedStateDictConfig, StateDictType, fully_shard)
    from torch.distributed.tensor import DTensor, distribute_tensor
except ImportError as e:
    print("skipped: %s" % e)
    sys.exit(77)

import gloo
from checks import must, must_run
from torch_values import differences

HEADS, KV_HEADS, WIDTH, HIDDEN, ROWS, LAYERS = 4, 2, 16, 24, 37, 2
CONFIG = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "tie_word_embeddings": False}
KV = WIDTH // HEADS * KV_HEADS
LAYER = [("attention.qkv_linear.wq.weight", "self_attn.q_proj.weight", (WIDTH, WIDTH), HEADS),
         ("attention.qkv_linear.wk.weight", "self_attn.k_proj.weight", (KV, WIDTH), KV_HEADS),
         ("attention.qkv_linear.wv.weight", "self_attn.v_proj.weight", (KV, WIDTH), 0),
         ("attention.wo.weight", "self_attn.o_proj.weight", (WIDTH, WIDTH), 0),
         ("feed_forward.w1.weight", "mlp.gate_proj.weight", (HIDDEN, WIDTH), 0),
         ("feed_forward.w2.weight", "mlp.down_proj.weight", (WIDTH, HIDDEN), 0),
         ("feed_forward.w3.weight", "mlp.up_proj.weight", (HIDDEN, WIDTH), 0),
         ("attention_norm.weight", "input_layernorm.weight", (WIDTH,), 0),
         ("ffn_norm.weight", "post_attention_layernorm.weight", (WIDTH,), 0)]
# torchtitan's name, the Hub's, shape, heads that RoPE permutes
PARAMS = ([("tok_embeddings.weight", "model.embed_tokens.weight", (ROWS, WIDTH), 0)] +
          [("layers.%d.%s" % (n, a), "model.layers.%d.%s" % (n, b), shape, heads)
           for n in range(LAYERS) for a, b, shape, heads in LAYER] +
          [("norm.weight", "model.norm.weight", (WIDTH,), 0), ("lm_head.weight", "lm_head.weight", (ROWS, WIDTH), 0)])


def permuted(tensor, heads):
    """What the converter of Llama does with the rows of q and k."""
    if not heads:
        return tensor
    rows, columns = tensor.shape
    return tensor.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def for_hub(values):
    """{torchtitan's name: tensor} under the names and in the layouts of the Hub."""
    return {b: permuted(values[a], heads).clone() for a, b, _, heads in PARAMS if a in values}


def random(seed):
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=g) for name, _, shape, _ in PARAMS}


def build(values):
    """A module whose parameters have these names and values."""
    root = torch.nn.Module()
    for name, value in values.items():
        module, *path = root, *name.split(".")
        for part in path[:-1]:
            if not hasattr(module, part):
                module.add_module(part, torch.nn.Module())
            module = getattr(module, part)
        module.register_parameter(path[-1], torch.nn.Parameter(value.clone()))
    return root


def optimizer(model, groups, named=False):
    """One group, or one for norms and another one."""
    items = list(model.named_parameters())
    parts = [[p for p in items if "norm" not in p[0]], [p for p in items if "norm" in p[0]]] if groups == 2 else [items]
    return torch.optim.AdamW([{"params": part if named else [p for _, p in part], "weight_decay": decay}
                              for part, decay in zip(parts, (0.1, 0.0))], lr=1e-2)


def step(model, adam, grads):
    for name, p in model.named_parameters():
        p.grad = grads[name].clone()
        if isinstance(p.data, DTensor):
            p.grad = distribute_tensor(p.grad, p.device_mesh, p.placements)
    adam.step()
    adam.zero_grad()


def full(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


def states(model, adam):
    """{key: {parameter: value}} of the optimizer, whole."""
    names = {p: name for name, p in model.named_parameters()}
    return {key: {names[p]: full(s[key]) for p, s in adam.state.items()} for key in ("exp_avg", "exp_avg_sq", "step")}


def must_match(hub, adam, titan, first):
    """The state and the weights of the Hub's model are those of torchtitan's."""
    got, want = states(hub, adam), states(titan, first)
    for key in want:
        for name, value in for_hub(want[key]).items() if key != "step" else ((b, want[key][a]) for a, b, _, _ in PARAMS):
            must(torch.equal(got[key][name], value), key, name)
    weights = {name: full(p.data) for name, p in hub.named_parameters()}
    for name, value in for_hub({name: full(p.data) for name, p in titan.named_parameters()}).items():
        must(torch.equal(weights[name], value), name)
    must([g["weight_decay"] for g in adam.param_groups] == [g["weight_decay"] for g in first.param_groups], "weight decay")
    must(all(g["lr"] == 1e-2 and tuple(g["betas"]) == (0.9, 0.999) for g in adam.param_groups), "groups")


def must_continue(hub, adam, titan, first):
    step(titan, first, random(9))
    step(hub, adam, for_hub(random(9)))
    weights = {name: full(p.data) for name, p in hub.named_parameters()}
    for name, value in for_hub({name: full(p.data) for name, p in titan.named_parameters()}).items():
        must(torch.allclose(weights[name], value, rtol=1e-6, atol=0), "after the next step", name)


def trained(groups, shards=False, named=False):
    model = build(random(1))
    if shards:
        for layer in model.layers.children():
            fully_shard(layer)
        fully_shard(model)
    adam = optimizer(model, groups, named)
    for seed in (2, 3):
        step(model, adam, random(seed))
    return model, adam


# ---- DCP, on two ranks ----

def convert(rank, *command):
    if rank == 0:
        must_run(*command)
    torch.distributed.barrier()


def shards(rank, world, program, home, flat):
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, adam = trained(2, shards=True)
    weights, state = get_model_state_dict(model), get_optimizer_state_dict(model, adam, options=options)
    at = lambda name: os.path.join(home, name)
    dcp.save({**({"model": weights} if not flat else weights), "optimizer": state, "step": 2}, checkpoint_id=at("titan"))
    recipe = ("--recipe", "torchtitan-llama3", "--config", at("config.json"))
    convert(rank, program, "reshard", at("titan"), "-o", at("hub"), "--to", "dcp", "--dp", "3", *recipe,
            *(() if flat else ("--strip-prefix", "model.")))
    convert(rank, program, "consolidate", at("hub"), "-o", at("hub.h5"))
    convert(rank, program, "reshard", at("hub.h5"), "-o", at("hub-h5"), "--to", "dcp", "--dp", "2")
    convert(rank, program, "reshard", at("hub"), "-o", at("back"), "--to", "dcp", "--dp", "2", "--reverse", *recipe)
    for source in ("hub", "hub-h5"):
        hub = build(for_hub(random(7)))
        fully_shard(hub)
        second = optimizer(hub, 2)
        weights = get_model_state_dict(hub)
        loaded = {**weights, "optimizer": get_optimizer_state_dict(hub, second, options=options)}
        dcp.load(loaded, checkpoint_id=at(source))
        set_model_state_dict(hub, {name: loaded[name] for name in weights})
        set_optimizer_state_dict(hub, second, loaded["optimizer"], options=options)
        must_match(hub, second, model, adam)
    must_continue(hub, second, model, adam)


def leaves(value, path=""):
    """{path: leaf}: the order of keys in a file of DCP means nothing, that of a list does."""
    if isinstance(value, (dict, list)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {k: v for key, inner in items for k, v in leaves(inner, "%s.%s" % (path, key)).items()}
    return {path: value}


def must_be_back(home):
    for name in ("titan", "back"):
        dcp_to_torch_save(os.path.join(home, name), os.path.join(home, name + ".pt"))
    titan, back = (torch.load(os.path.join(home, name + ".pt"), weights_only=False) for name in ("titan", "back"))
    titan.update(titan.pop("model", {}))
    titan, back = leaves(titan), leaves(back)
    must(sorted(titan) == sorted(back), "keys", sorted(set(titan) ^ set(back)))
    must(len(titan) > 100, "too few values")
    for key, value in titan.items():
        must(not list(differences(value, back[key])), key, value, back[key])


# ---- FSDP1, on two ranks ----

def fsdp1(values):
    """A model whose loss has the gradients that its argument names."""
    model = build(values)
    model.forward = lambda grads: sum((p * grads[name]).sum() for name, p in model.named_parameters())
    return FSDP(model, use_orig_params=True, device_id=torch.device("cpu"))


def fsdp1_step(model, adam, grads):
    model(grads).backward()
    adam.step()
    adam.zero_grad()


def whole(model, adam):
    """The weights and the optimizer's state by name, on every rank."""
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=False),
                              FullOptimStateDictConfig(rank0_only=False)):
        state = FSDP.optim_state_dict(model, adam)
        weights = {name: t.clone() for name, t in model.state_dict().items()}
    return weights, {key: {n: s[key].clone() for n, s in state["state"].items()} for key in ("exp_avg", "exp_avg_sq", "step")}


def must_be_equal(hub, second, titan, first):
    (weights, state), (want, wanted) = whole(hub, second), whole(titan, first)
    for name, value in for_hub(want).items():
        must(torch.equal(weights[name], value), "FSDP1", name)
    for key in wanted:
        values = for_hub(wanted[key]) if key != "step" else {b: wanted[key][a] for a, b, _, _ in PARAMS}
        must(len(values) == len(PARAMS) == len(state[key]), "FSDP1", key, sorted(state[key]))
        must(all(torch.equal(state[key][name], value) for name, value in values.items()), "FSDP1", key)


def old_shards(rank, world, program, home, full):
    """State that FSDP1 gives, full in a torch.save file or sharded in DCP, through the recipe into FSDP1's loader."""
    at = lambda name: os.path.join(home, name)
    titan = fsdp1(random(1))
    first = optimizer(titan, 2)
    for seed in (2, 3):
        fsdp1_step(titan, first, random(seed))
    kind = StateDictType.FULL_STATE_DICT if full else StateDictType.SHARDED_STATE_DICT
    configs = ((FullStateDictConfig(rank0_only=False), FullOptimStateDictConfig(rank0_only=False)) if full else
               (ShardedStateDictConfig(), ShardedOptimStateDictConfig()))
    with FSDP.state_dict_type(titan, kind, *configs):
        saved = {"model": titan.state_dict(), "optimizer": FSDP.optim_state_dict(titan, first)}
    recipe = ("--recipe", "torchtitan-llama3", "--strip-prefix", "model.", "--config", at("config.json"))
    hub = fsdp1(for_hub(random(7)))
    second = optimizer(hub, 2)
    with FSDP.state_dict_type(hub, kind, *configs):
        if full:
            if rank == 0:
                torch.save(saved, at("titan.pt"))
            convert(rank, program, "consolidate", at("titan.pt"), "-o", at("hub.pt"), "--force", *recipe)
            loaded = torch.load(at("hub.pt"), weights_only=True)
            state = loaded.pop("optimizer")
        else:
            dcp.save(saved, checkpoint_id=at("titan"))
            convert(rank, program, "reshard", at("titan"), "-o", at("hub"), "--to", "dcp", "--dp", "3", *recipe)
            loaded = hub.state_dict()
            dcp.load(loaded, checkpoint_id=at("hub"))
            state = load_sharded_optimizer_state_dict(loaded, "optimizer", dcp.FileSystemReader(at("hub")))["optimizer"]
        hub.load_state_dict(loaded)
        second.load_state_dict(FSDP.optim_state_dict_to_load(hub, second, state))
    must_be_equal(hub, second, titan, first)
    must([g["weight_decay"] for g in second.param_groups] == [0.1, 0.0], "FSDP1: groups")
    if full:
        return  # the next step after a full state dict gives other weights, also with torch's own file
    fsdp1_step(titan, first, random(9))
    fsdp1_step(hub, second, for_hub(random(9)))
    (weights, _), (want, _) = whole(hub, second), whole(titan, first)
    for name, value in for_hub(want).items():
        must(torch.allclose(weights[name], value, rtol=1e-6, atol=1e-7), "FSDP1 after the next step", name)


# ---- torch.save, one process ----

def numbers(program, home, groups, named):
    at = lambda name: os.path.join(home, name)
    model, adam = trained(groups, named=named)
    torch.save({"model": model.state_dict(), "optimizer": adam.state_dict(), "step": 2}, at("titan.pt"))
    must_run(program, "consolidate", at("titan.pt"), "-o", at("hub.pt"), "--recipe", "torchtitan-llama3", "--strip-prefix",
             "model.", "--config", at("config.json"), "--force")
    loaded = torch.load(at("hub.pt"), weights_only=True)
    hub = build(for_hub(random(7)))
    second = optimizer(hub, groups, named)
    hub.load_state_dict({name: t for name, t in loaded.items() if torch.is_tensor(t)})
    # torch's loader changes the numbers in this dict in place, so that each needs memory of its own
    steps = [s["step"] for s in loaded["optimizer"]["state"].values()]
    must(len({s.data_ptr() for s in steps}) == len(steps), "steps share memory")
    set_optimizer_state_dict(hub, second, loaded["optimizer"])
    must_match(hub, second, model, adam)
    must_continue(hub, second, model, adam)


def main():
    torch.set_num_threads(1)
    program = sys.argv[1]
    for flat in (False, True):
        with tempfile.TemporaryDirectory(prefix="fc-recipe-") as home:
            with open(os.path.join(home, "config.json"), "w", encoding="utf-8") as f:
                json.dump(CONFIG, f)
            gloo.run(2, shards, program, home, flat)
            must_be_back(home)
    with tempfile.TemporaryDirectory(prefix="fc-recipe-") as home:
        with open(os.path.join(home, "config.json"), "w", encoding="utf-8") as f:
            json.dump(CONFIG, f)
        numbers(program, home, 1, False)
        numbers(program, home, 2, True)
        for full in (True, False):
            gloo.run(2, old_shards, program, home, full)
    return 0


if __name__ == "__main__":
    sys.exit(main())
