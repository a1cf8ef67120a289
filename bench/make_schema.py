#!/usr/bin/env python3
"""Writes the schema of a large model for planning: names, dtypes and shapes without data.

    make_schema.py dense > dense.json           # Llama names, 1.0 trillion parameters, 2,163 tensors
    make_schema.py moe > moe.json               # mixture of experts, 1.0 trillion parameters, 100,000 tensors
    make_schema.py dense --optimizer > o.json   # with AdamW's state: exp_avg, exp_avg_sq, step

Then: fsdpckpt reshard dense.json --dp 2048 --tp 8 --dry-run --rank 12345
"""

import argparse
import json
import math
import sys


def attention(prefix, hidden, kv):
    yield f"{prefix}.self_attn.q_proj.weight", (hidden, hidden)
    yield f"{prefix}.self_attn.k_proj.weight", (kv, hidden)
    yield f"{prefix}.self_attn.v_proj.weight", (kv, hidden)
    yield f"{prefix}.self_attn.o_proj.weight", (hidden, hidden)
    yield f"{prefix}.input_layernorm.weight", (hidden,)
    yield f"{prefix}.post_attention_layernorm.weight", (hidden,)


def gated(prefix, hidden, inner):
    yield f"{prefix}.gate_proj.weight", (inner, hidden)
    yield f"{prefix}.up_proj.weight", (inner, hidden)
    yield f"{prefix}.down_proj.weight", (hidden, inner)


def ends(vocabulary, hidden):
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocabulary, hidden)


def dense(layers=240, hidden=18432, inner=63488, kv=2048, vocabulary=128256):
    yield from ends(vocabulary, hidden)
    for i in range(layers):
        yield from attention(f"model.layers.{i}", hidden, kv)
        yield from gated(f"model.layers.{i}.mlp", hidden, inner)


def moe(layers=87, experts=381, hidden=6144, inner=1600, kv=1024, vocabulary=163840):
    yield from ends(vocabulary, hidden)
    for i in range(layers):
        prefix = f"model.layers.{i}"
        yield from attention(prefix, hidden, kv)
        yield f"{prefix}.mlp.gate.weight", (experts, hidden)
        for e in range(experts):
            yield from gated(f"{prefix}.mlp.experts.{e}", hidden, inner)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=("dense", "moe"))
    parser.add_argument("--optimizer", action="store_true", help="add AdamW's state in float32")
    args = parser.parse_args()
    tensors, parameters = [], 0
    for name, shape in {"dense": dense, "moe": moe}[args.model]():
        parameters += math.prod(shape)
        tensors.append({"name": name, "dtype": "bfloat16", "shape": shape})
        if args.optimizer:
            state = f"optim.state.{name}"
            tensors += [{"name": f"{state}.{key}", "dtype": "float32", "shape": s}
                        for key, s in (("step", ()), ("exp_avg", shape), ("exp_avg_sq", shape))]
    lines = ",\n    ".join(map(json.dumps, tensors))
    sys.stdout.write('{\n  "fsdpckpt": "schema",\n  "schema": 1,\n  "tensors": [\n    ' + lines + '],\n  "objects": []}\n')
    print(f"{len(tensors):,} tensors, {parameters / 1e12:.3f} trillion parameters", file=sys.stderr)


if __name__ == "__main__":
    main()
