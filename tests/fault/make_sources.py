#!/usr/bin/env python3
"""Writes the sources of the fault tests that the corpus lacks: quantized weights, a LoRA adapter, a model's reference,
recipes (the pieces of one are so small that they are gathered), a TP plan, a wrap policy, and HDF5 shards with and without valid
tables, compressed and sealed.

usage: make_sources.py DIRECTORY FSDPCKPT CORPUS
"""
import json
import os
import shutil
import struct
import subprocess
import sys

SIZES = {"F32": 4, "F8_E4M3": 1}
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "rank_pattern": {}, "alpha_pattern": {}, "use_rslora": False,
          "fan_in_fan_out": False, "use_dora": False, "init_lora_weights": True, "lora_bias": False}


FILES = {
    "transpose": {"fsdpckpt": "recipe", "schema": 1, "others": "keep",
                  "rules": [{"from": "a.weight", "to": "b.weight", "operations": {"transpose": [0, 1]}}]},
    # Reversed, it renames and splits, and cannot restore the two last.
    "reversed": {"fsdpckpt": "recipe", "schema": 1, "description": "test", "models": ["llama"], "others": "keep",
                 "sizes": {"rows": ["none", "vocab_size / 2"]}, "dtypes": {"x.*": "bf16"},
                 "rules": [{"from": ["x.{n+rows}.a", "x.{n+rows}.b"], "to": "model.layers.{n}.mlp.up_proj.weight",
                            "operations": [{"rearrange": "a b -> a b"}, {"concatenate": 1, "sizes": ["vocab_size / 3", "2"]}]},
                           {"from": "x.norm", "to": "model.norm.weight", "when": "rows == 3"},
                           {"from": "x.embed", "to": "model.embed_tokens.weight", "operations": {"resize": 0, "from": "7", "to": "6"}},
                           {"drop": "rope"}]},
    "plan": {"w1": "colwise", "layers.*.w2": "rowwise", "embed": "embedding_rowwise"},
    "rules": {"$root": {"mixed_precision": {"param_dtype": "bfloat16", "cast_forward_inputs": True}}, "$fp32_classes": ["Norm"],
               "layers.*": {"sharding_strategy": "SHARD_GRAD_OP"}, "class:Embedding": True},
    "terms": {"$policy": "size:100+class:Embedding,Norm+leaf:Block"},
    "classes": {"tok_embeddings": "Embedding", "norm": ["Norm", "LayerNorm"], "layers.*": "Block", "$frozen": ["norm.bias"],
                "$ignored": ["layers.0.w2"], "$buffers": ["layers.0.w1.bias"], "$shared": [["norm.bias", "norm.weight"]]},
}


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


def make_shards(out, tool, corpus):
    source = os.path.join(corpus, "good", "dcp-torch2.15.0-objects")
    listed, walked = os.path.join(out, "shards"), os.path.join(out, "walked")
    subprocess.run([tool, "reshard", source, "-o", listed, "--dp", "2", "--compress", "1", "-q"], check=True)
    shutil.copytree(listed, walked)
    with open(os.path.join(walked, "index.h5"), "ab") as f:
        f.write(b"x")  # changed, so its tables are not used
    subprocess.run([tool, "verify", "--seal", listed], check=True, stdout=subprocess.DEVNULL)


def main():
    out, tool, corpus = sys.argv[1:]
    shutil.rmtree(out, ignore_errors=True)
    os.makedirs(out)
    make_shards(out, tool, corpus)
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
    for name, text in FILES.items():
        with open(os.path.join(out, name + ".json"), "w", encoding="utf-8") as f:
            json.dump(text, f)


if __name__ == "__main__":
    main()
