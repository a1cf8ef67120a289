#!/usr/bin/env python3
"""Writes the sources of the fault tests that the corpus lacks: quantized weights, a LoRA adapter, a model's reference,
recipes (the pieces of one are so small that they are gathered), a TP plan, a wrap policy, HDF5 shards with and without valid
tables, compressed and sealed, a torch.save file with objects of many kinds, files of ranks that differ in an object, and
directories of deltas.

usage: make_sources.py DIRECTORY FSDPCKPT CORPUS
"""
import ctypes.util
import json
import os
import shutil
import struct
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cli"))
import pickles  # noqa: E402
from pickles import Call, Global, Persistent  # noqa: E402

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


def tensor(offset, *size):
    """A tensor of the one storage."""
    storage = Persistent(("storage", Global("torch", "FloatStorage"), "0", "cpu", 6))
    stride = (size[-1], 1)[-len(size):]
    return Call(Global("torch._utils", "_rebuild_tensor_v2"), (storage, offset, size, stride, False, Call(Global("collections", "OrderedDict"), ())))


def numpy(function, *args, **more):
    kind = Call(Global("numpy", "dtype"), ("i2", False, True), state=(3, "<", None, None, None, -1, -1, 0))
    args = [kind if a is numpy else a for a in args]
    state = tuple(kind if a is numpy else a for a in more["state"]) if more else None
    return Call(Global("numpy.core.multiarray", function), tuple(args), state=state)


def objects(path):
    """A file with tensors that share a storage, a module, and objects of many kinds."""
    ordered = Call(Global("collections", "OrderedDict"), (), state={"_metadata": {"version": 1}})
    ordered["k"] = (1, True)
    module = Call(Global("mine", "Layer"), (), True, {"_parameters": {"w": tensor(0, 6)}, "_buffers": {}, "_modules": {"x": None},
                                                      "_non_persistent_buffers_set": Call(Global("builtins", "set"), ([],))})
    node = Call(Global("omegaconf.nodes", "AnyNode"), (), True, {"_val": 3})
    counter = Call(Global("collections", "Counter"), ({"a": 1},))
    kinds = [1 << 70, 1 << 20000, 2.5, float("nan"), None, "text", b"bytes", bytearray(b"x"), {1, 2}, frozenset([3]), (4, 5), {6: [7]}, ordered, counter,
             Call(Global("torch", "Size"), ((2, 3),)), Call(Global("torch", "Size"), ([2],)), Global("torch", "float32"), node,
             Call(Global("torch", "device"), ("cuda", 1)), Call(Global("pathlib", "PosixPath"), ("/", "a")), Call(Global("builtins", "complex"), (1.0, 2.0)),
             Call(Global("torch.serialization", "_get_layout"), ("torch.strided",)), Call(Global("argparse", "Namespace"), (), True, {"a": 1}),
             Call(Global("datetime", "timedelta"), (1, 2, 3)), Call(Global("datetime", "date"), (b"\x07\xe8\2\x1d",)),
             numpy("scalar", numpy, b"\1\0"), numpy("_reconstruct", Global("numpy", "ndarray"), (0,), b"b", state=(1, (2,), numpy, False, b"abcd"))]
    value = {"module": module, "a": tensor(0, 2, 3), "b": tensor(0, 2, 3), "c": tensor(3, 3), "kinds": tuple(kinds)}
    pickles.write_pt(path, value, storages=[struct.pack("<6f", *range(6))])


def ranks(folder, corpus):
    """Files of two ranks with few values: a DTensor, a tensor, and an object that differs."""
    os.makedirs(folder)
    source = os.path.join(corpus, "pt", "tp-torch2.15.0")
    for rank in range(2):
        for name in ("model", "extra_state"):
            path = os.path.join(source, f"{name}_world_size_2_rank_{rank}.pt")
            value = pickles.read_pt(path)
            if name == "model":
                value.entries = {k: value[k] for k in ("steps", "0.weight")} | {"rank": {"of": rank}, "all": [1]}
            pickles.write_pt(os.path.join(folder, os.path.basename(path)), value, like=path)


def make_shards(out, tool, corpus):
    source = os.path.join(corpus, "good", "dcp-torch2.15.0-objects")
    listed, walked = os.path.join(out, "shards"), os.path.join(out, "walked")
    subprocess.run([tool, "reshard", source, "-o", listed, "--dp", "2", "--compress", "1", "-q"], check=True)
    shutil.copytree(listed, walked)
    with open(os.path.join(walked, "index.h5"), "ab") as f:
        f.write(b"x")  # changed, so its tables are not used
    subprocess.run([tool, "verify", "--seal", listed], check=True, stdout=subprocess.DEVNULL)


def make_versions(out):
    """Three deltas of each encoding, and the model that they change."""
    if not ctypes.util.find_library("zstd") or not ctypes.util.find_library("xxhash"):
        return
    import weight_sync
    models = [{"a.weight": bytes(300), "b.weight": bytes(80), "c.weight": bytes(40)}]
    for k in range(3):
        models.append({**models[-1], "a.weight": bytes([k]) * 300, "bc"[k % 2] + ".weight": bytes([7 + k]) * (40 if k % 2 else 80)})
    for encoding in ("xor", "overwrite"):
        os.makedirs(os.path.join(out, encoding))
        for k in range(3):
            weight_sync.write_version(os.path.join(out, encoding, f"weight_v{k + 1:06d}"), models[k], models[k + 1], k + 1,
                                      encoding=encoding)
    os.mkdir(os.path.join(out, "versioned"))
    weight_sync.write_file(os.path.join(out, "versioned", "model.safetensors"), None,
                           {name: ("U8", [len(data)], data) for name, data in models[0].items()})


def main():
    out, tool, corpus = sys.argv[1:]
    shutil.rmtree(out, ignore_errors=True)
    os.makedirs(out)
    make_shards(out, tool, corpus)
    make_versions(out)
    model = {"model.embed_tokens.weight": ("F32", [6, 4]), "model.layers.0.mlp.up_proj.weight": ("F32", [3, 4]),
             "model.norm.weight": ("F32", [4])}
    objects(os.path.join(out, "objects.pt"))
    ranks(os.path.join(out, "ranks"), corpus)
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
