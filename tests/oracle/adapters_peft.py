#!/usr/bin/env python3
"""--adapter against PEFT's merge_and_unload: adapters that PEFT saved, merged into the same models.

In float32 both differ only by the order of sums. For bfloat16, PEFT rounds the product before it is added; the distance of
ours to PEFT's merge in float64 must not be larger.

usage: adapters_peft.py FSDPCKPT        exit 77 without peft and transformers
"""
import logging
import os
import sys
import tempfile
import warnings

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
try:
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model
    from safetensors.torch import load_file, save_file
    from transformers import (GPT2Config, GPT2LMHeadModel, GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM,
                              Qwen3MoeConfig, Qwen3MoeForCausalLM)
except ImportError as e:
    print("skipped: %s" % e)
    sys.exit(77)

from checks import must, must_run, run_main


def llama():
    return LlamaForCausalLM(LlamaConfig(vocab_size=200, hidden_size=64, intermediate_size=160, num_hidden_layers=3,
                                        num_attention_heads=4, num_key_value_heads=2))


def gpt2():
    return GPT2LMHeadModel(GPT2Config(vocab_size=128, n_embd=48, n_layer=2, n_head=4, n_positions=32))


def conv():
    return torch.nn.Sequential(torch.nn.Conv2d(4, 6, 3), torch.nn.Embedding(30, 16), torch.nn.Linear(16, 8))


MOE = {"vocab_size": 64, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
       "head_dim": 12, "num_experts_per_tok": 2}


def gpt_oss():
    """Its experts are (experts, in, out), and the second matrix is square, as in the published model."""
    return GptOssForCausalLM(GptOssConfig(intermediate_size=48, num_local_experts=5, **MOE))


def qwen_moe():
    """Its experts are (experts, out, in)."""
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(intermediate_size=64, moe_intermediate_size=1100, num_experts=3, **MOE))


BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
CASES = {
    "plain": (llama, [dict(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"])]),
    "patterns": (llama, [dict(r=4, lora_alpha=8, target_modules="all-linear", use_rslora=False, bias="all",
                              rank_pattern={"layers.1.self_attn.q_proj": 16, r".*\.layers\.[02]\.mlp\.up_proj": 2},
                              alpha_pattern={"o_proj": 3})]),
    "rslora": (llama, [dict(r=16, lora_alpha=4, target_modules=["k_proj"], use_rslora=True)]),
    "saved": (llama, [dict(r=8, lora_alpha=16, target_modules=["q_proj", "embed_tokens"], modules_to_save=["lm_head"])]),
    "several": (llama, [dict(r=8, lora_alpha=16, target_modules=["q_proj"]),
                        dict(r=4, lora_alpha=1, target_modules=["q_proj", "gate_proj"])]),
    "gpt2": (gpt2, [dict(r=8, lora_alpha=16, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)]),
    "gpt-oss": (gpt_oss, [dict(r=4, lora_alpha=8, target_modules=["q_proj"], target_parameters=BOTH)]),
    "qwen-moe": (qwen_moe, [dict(r=3, lora_alpha=8, target_modules=[], target_parameters=[*BOTH, "mlp.gate.weight"],
                                 rank_pattern={"down_proj": 7}, alpha_pattern={"gate.weight": 5})]),
    "one-parameter": (gpt_oss, [dict(r=4, lora_alpha=8, target_modules=[], target_parameters=["experts.down_proj"],
                                     use_rslora=True)]),
    "conv": (conv, [dict(r=4, lora_alpha=8, target_modules=["0", "1", "2"])]),
}


def train(model):
    """Other values than the zeros with which B begins."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                p.copy_(torch.randn_like(p) * 0.1)


def adapters(model, configs, path):
    for i, config in enumerate(configs):
        name = "default" if i == 0 else "a%d" % i
        if i == 0:
            model = get_peft_model(model, LoraConfig(**config))
        else:
            model.add_adapter(name, LoraConfig(**config))
    train(model)
    model.save_pretrained(path("adapters"))
    torch.save({"model": model.state_dict()}, path("inside.pt"))
    return [path("adapters") if i == 0 else path("adapters/a%d" % i) for i in range(len(configs))]


def merged(make, state, folders, dtype):
    """What PEFT makes of the same files, as {name: tensor}."""
    model = make()
    model.load_state_dict(state)
    model = model.to(dtype)
    peft = PeftModel.from_pretrained(model, folders[0], adapter_name="a0", autocast_adapter_dtype=True)
    for i, folder in enumerate(folders[1:], 1):
        peft.load_adapter(folder, "a%d" % i)
    if dtype == torch.float64:
        peft = peft.double()
    names = ["a%d" % i for i in range(len(folders))]
    peft.base_model.set_adapter(names)
    return {k: v.detach() for k, v in peft.merge_and_unload(adapter_names=names).state_dict().items()}


def without_ties(state):
    kept = {}
    for name, t in state.items():
        if not any(t.data_ptr() == o.data_ptr() and t.numel() for o in kept.values()):
            kept[name] = t
    return kept


def check(tool, name, make, configs, dtype, path):
    torch.manual_seed(sorted(CASES).index(name))
    model = make()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    stored = {k: v.to(dtype).contiguous() for k, v in without_ties(model.state_dict()).items()}
    save_file(stored, path("base.safetensors"))
    folders = adapters(model, configs, path)
    must_run(tool, "consolidate", path("base.safetensors"), "-o", path("ours.safetensors"), "-q",
             *(word for folder in folders for word in ("--adapter", folder)))
    got, rounded = load_file(path("ours.safetensors")), {k: v.to(dtype).to(v.dtype) for k, v in state.items()}
    exact, theirs = merged(make, rounded, folders, torch.float64), merged(make, rounded, folders, dtype)
    must(sorted(got) == sorted(stored), name, sorted(got), sorted(stored))
    changed = 0
    for key, t in got.items():
        ours, peft = (t.double() - exact[key]).abs(), (theirs[key].double() - exact[key]).abs()
        limit = exact[key].abs().max() * torch.finfo(dtype).eps * (8 if dtype == torch.float32 else 0.51)
        must(t.dtype == dtype and bool((ours <= limit).all()), name, key, ours.max().item(), limit.item())
        must(dtype == torch.float32 or ours.sum() <= peft.sum() * 1.0001, name, key, "PEFT is nearer")
        changed += not torch.equal(t, stored[key])
    must(changed > 0, name, "nothing was merged")
    if len(folders) == 1:
        must_run(tool, "export", path("inside.pt"), "-o", path("inside"), "-q", "--recipe", "none", "--adapter-config", folders[0])
        inside = load_file(path("inside/model.safetensors"))
        must(set(stored) <= set(inside) <= set(state), name, sorted(inside))
        for key, t in inside.items():
            peft = theirs[key].double() if dtype == torch.float32 else inside[key].double()
            must(bool(((t.double() - peft).abs() <= peft.abs().max() * 1e-6).all()), name, key)
    return changed


def main():
    tool, count = sys.argv[1], 0
    for name, (make, configs) in CASES.items():
        for dtype in (torch.float32, torch.bfloat16):
            with tempfile.TemporaryDirectory(prefix="fsdpckpt-peft-") as home:
                count += check(tool, name, make, configs, dtype, lambda f: os.path.join(home, f))
    print("%d merged weights are PEFT's" % count)
    return 0


if __name__ == "__main__":
    run_main(main)
