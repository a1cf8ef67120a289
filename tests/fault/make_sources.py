#!/usr/bin/env python3
"""Writes the sources of the fault tests that the corpus lacks: quantized weights, a LoRA adapter, a model's reference,
and a recipe whose pieces are so small that they are gathered.

usage: make_sources.py DIRECTORY
"""
import json
import os
import shutil
import struct
import sys

SIZES = {"F32": 4, "F8_E4M3": 1}
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "rank_pattern": {}, "alpha_pattern": {}, "use_rslora": False,
          "fan_in_fan_out": False, "use_dora": False, "init_lora_weights": True, "lora_bias": False}


def write(path, tensors):
    """tensors: {name: (dtype, shape)}. Every float is 1, every code 8."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    header, data = {}, b""
    for name, (dtype, shape) in tensors.items():
        count = 1
        for n in shape:
            count *= n
        more = struct.pack("<f", 1) * count if SIZES[dtype] == 4 else b"\x08" * count
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(more)]}
        data += more
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + data)


def main():
    out = sys.argv[1]
    shutil.rmtree(out, ignore_errors=True)
    model = {"model.embed_tokens.weight": ("F32", [6, 4]), "model.layers.0.mlp.up_proj.weight": ("F32", [3, 4]),
             "model.norm.weight": ("F32", [4])}
    write(os.path.join(out, "fp8", "model.safetensors"),
          {"a.weight": ("F8_E4M3", [130, 140]), "a.weight_scale_inv": ("F32", [2, 2]), "norm.weight": ("F32", [4])})
    write(os.path.join(out, "model", "model.safetensors"), model)
    write(os.path.join(out, "adapter", "adapter_model.safetensors"),
          {"base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": ("F32", [2, 4]),
           "base_model.model.model.layers.0.mlp.up_proj.lora_B.weight": ("F32", [3, 2])})
    with open(os.path.join(out, "adapter", "adapter_config.json"), "w", encoding="utf-8") as f:
        json.dump(CONFIG, f)
    write(os.path.join(out, "reference", "model.safetensors"), model)
    for name, text in {"config.json": '{"vocab_size": 6}', "tokenizer.json": "{}"}.items():
        with open(os.path.join(out, "reference", name), "w", encoding="utf-8") as f:
            f.write(text)
    with open(os.path.join(out, "transpose.json"), "w", encoding="utf-8") as f:
        json.dump({"fsdpckpt": "recipe", "schema": 1, "others": "keep",
                   "rules": [{"from": "a.weight", "to": "b.weight", "operations": {"transpose": [0, 1]}}]}, f)


if __name__ == "__main__":
    main()
