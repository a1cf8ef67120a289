#!/usr/bin/env python3
"""Makes a Llama in bfloat16 as the hub has it, or a LoRA adapter for it as PEFT saves it.

make_llama.py DIR --size 2G             config.json, model.safetensors, and params.json as Meta writes it
make_llama.py DIR --model MODEL --rank 16
"""
import argparse
import json
import os

import torch
from safetensors.torch import save_file

HIDDEN, WIDE, HEADS, KV_HEADS, WORDS = 4096, 14336, 32, 8, 32000
LAYER = {"self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (HIDDEN // 4, HIDDEN),
         "self_attn.v_proj": (HIDDEN // 4, HIDDEN), "self_attn.o_proj": (HIDDEN, HIDDEN), "mlp.gate_proj": (WIDE, HIDDEN),
         "mlp.up_proj": (WIDE, HIDDEN), "mlp.down_proj": (HIDDEN, WIDE)}


def normal(*shape):
    return (torch.randn(shape) * 0.02).to(torch.bfloat16)


def write(path, value):
    with open(path, "w") as f:
        json.dump(value, f, indent=1)


def make_model(folder, wanted):
    state = {"model.embed_tokens.weight": normal(WORDS, HIDDEN), "lm_head.weight": normal(WORDS, HIDDEN),
             "model.norm.weight": normal(HIDDEN)}
    layers = 0
    while sum(2 * t.numel() for t in state.values()) < wanted:
        name = "model.layers.%d." % layers
        state.update((name + module + ".weight", normal(*shape)) for module, shape in LAYER.items())
        state.update((name + norm + ".weight", normal(HIDDEN)) for norm in ("input_layernorm", "post_attention_layernorm"))
        layers += 1
    save_file(state, os.path.join(folder, "model.safetensors"), {"format": "pt"})
    write(os.path.join(folder, "config.json"), {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": WIDE,
        "num_hidden_layers": layers, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "vocab_size": WORDS,
        "tie_word_embeddings": False, "rope_theta": 500000.0, "torch_dtype": "bfloat16"})
    write(os.path.join(folder, "params.json"), {
        "dim": HIDDEN, "n_layers": layers, "n_heads": HEADS, "n_kv_heads": KV_HEADS, "vocab_size": WORDS,
        "multiple_of": 1024, "ffn_dim_multiplier": 1.3, "norm_eps": 1e-5, "rope_theta": 500000.0})


def make_adapter(folder, model, rank):
    with open(os.path.join(model, "config.json")) as f:
        layers = json.load(f)["num_hidden_layers"]
    state = {}
    for module, (rows, columns) in LAYER.items():
        for i in range(layers):
            name = "base_model.model.model.layers.%d.%s.lora_" % (i, module)
            state[name + "A.weight"] = normal(rank, columns).float()
            state[name + "B.weight"] = normal(rows, rank).float()
    save_file(state, os.path.join(folder, "adapter_model.safetensors"))
    write(os.path.join(folder, "adapter_config.json"), {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": model, "r": rank, "lora_alpha": 2 * rank,
        "target_modules": [module.split(".")[1] for module in LAYER], "inference_mode": True})


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("folder")
    ap.add_argument("--size", default="1G")
    ap.add_argument("--model")
    ap.add_argument("--rank", type=int, default=16)
    args = ap.parse_args()
    torch.manual_seed(0)
    os.makedirs(args.folder)
    if args.model:
        make_adapter(args.folder, args.model, args.rank)
    else:
        make_model(args.folder, int(args.size[:-1]) << {"K": 10, "M": 20, "G": 30}[args.size[-1]])


if __name__ == "__main__":
    main()
