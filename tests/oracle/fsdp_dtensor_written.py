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
    reader = dcp.FileSystemReader(folder)
    known = reader.read_metadata().state_dict_metadata
    state = {k: "" if isinstance(v, BytesStorageMetadata) else torch.empty(v.size, dtype=v.properties.dtype)
             for k, v in known.items()}
    dcp.load(state, storage_reader=reader, no_dist=True)
    return {k: digest(v) if isinstance(v, torch.Tensor) else v for k, v in state.items()}


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
    r = run(program, "convert", os.path.join(case, "torch_dist"), "-o", made, "--to", "fsdp_dtensor", "-q", ok=5)
    check("has the keys of torch_dist" in r.stderr and "--recipe" in r.stderr, r.stderr)
    plain = {mlp % (0, 1): torch.zeros(4, 2), mlp % (0, 2): torch.zeros(2, 4), "vision.mlp.linear_fc1.layer_norm_weight": torch.zeros(4)}
    torch.save(plain, source)
    run(program, "convert", source, "-o", made, "--to", "fsdp_dtensor", "-q")
    check(sorted(model_of(read(made))) == sorted("model.module." + k for k in plain), "an MLP without a gate: %s" % sorted(read(made)))


def main():
    program, corpus = sys.argv[1:3]
    with tempfile.TemporaryDirectory() as home:
        for name, recipe in CASES:
            case = os.path.join(corpus, "recipes", "megatron-dist-" + name)
            check_model(program, home, case, recipe)
            check_own(program, home, os.path.join(case, "fsdp_dtensor-0.16.1"))
        check_refused(program, home, os.path.join(corpus, "recipes", "megatron-dist-llama"))
    return finish("fsdp_dtensor_written")


if __name__ == "__main__":
    sys.exit(main())
