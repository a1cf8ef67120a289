#!/usr/bin/env python3
"""Two checkpoints in one folder, every pair of the kinds below. The command must read exactly one of the two and say on stderr which
one it leaves, or refuse and name both; it must never merge them. torch, safetensors, transformers and accelerate write the kinds,
or the corpus has them from DeepSpeed and Megatron.

usage: two_checkpoints.py FSDPCKPT CORPUS        exit 77 without torch
"""
import itertools
import json
import logging
import os
import pathlib
import shutil
import subprocess
import sys

logging.disable(logging.WARNING)
from pt import run_tests  # exits with 77 without torch

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from checks import must, must_run

try:
    import transformers
except ImportError as e:
    print("skipped: %s" % e)
    sys.exit(77)


def tensors(name):
    """Each kind has a name of its own, so a merge of two kinds shows."""
    return {"%s.weight" % name: torch.ones(2, 2), "%s.bias" % name: torch.ones(2)}


def put(home, file, name, write):
    path = home / file
    path.parent.mkdir(parents=True, exist_ok=True)
    write(tensors(name), path)


def st(*files):
    return lambda home, name: [put(home, f, name if len(files) == 1 else "%s%d" % (name, i), lambda t, p: save_file(t, str(p)))
                               for i, f in enumerate(files)]


def pt(*files):
    return lambda home, name: [put(home, f, name, torch.save) for f in files]


def distributed(*folders):
    return lambda home, name: [dcp.save(tensors("%s%d" % (name, i)), checkpoint_id=str(home / f)) for i, f in enumerate(folders)]


def copy(*parts):
    def place(home, name):
        shutil.copytree(CORPUS.joinpath(*parts), home, dirs_exist_ok=True, ignore=shutil.ignore_patterns("expected.json"))
    return place


def pretrained(**how):
    def place(home, name):
        config = transformers.LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=16)
        transformers.LlamaForCausalLM(config).save_pretrained(home, **how)
    return place


def flax(home, name):
    """What flax wrote, under a name of its own."""
    data = (CORPUS / "flax" / "alone.msgpack").read_bytes()
    (home / "flax_model.msgpack").write_bytes(b"\x81" + bytes([0xa0 + len(name)]) + name.encode() + data)


def h5(home, name):
    torch.save(tensors(name), home / "x")
    must_run(PROGRAM, "reshard", home / "x", "-o", home / "out", "--to", "h5", "--dp", "2", "-q")
    os.remove(home / "x")
    for file in os.listdir(home / "out"):
        os.rename(home / "out" / file, home / file)
    os.rmdir(home / "out")


def h5_file(home, name):
    torch.save(tensors(name), home / "x")
    must_run(PROGRAM, "consolidate", home / "x", "-o", home / "model.h5", "-q")
    os.remove(home / "x")


def composer(home, name):
    pt("ep1-ba10-rank0.pt")(home, name)
    os.symlink("ep1-ba10-rank0.pt", home / "latest-rank0.pt")


def lightning(home, name):
    distributed(".")(home, name)
    torch.save({"epoch": 1}, home / "meta.pt")


# {kind: (how it is made, what a message calls it)}. Loose files and folders are checkpoints by their own path only.
TRAINING = {
    "DeepSpeed": (copy("deepspeed", "0.19.8-zero2-bf16"), "global_step2"),
    "DeepSpeed step": (copy("deepspeed", "0.19.8-zero2-bf16", "global_step2"), "*_states.pt"),
    "accelerate": (distributed("pytorch_model_fsdp_0", "optimizer_0"), "pytorch_model_fsdp_*"),
    "DCP": (distributed("."), ".metadata"),
    "Lightning": (lightning, ".metadata"),
    "torch_dist": (copy("megatron", "torch_dist-0.14.0", "iter_0000007"), ".metadata"),
    "Megatron": (copy("megatron-ranks", "tp2-gpt", "iter_0000010"), "mp_rank_*"),
    "Megatron run": (copy("megatron-ranks", "tp2-gpt"), "iter_0000010"),
    "verl": (pt(*["%s_world_size_2_rank_%d.pt" % (s, r) for s in ("model", "optim", "extra_state") for r in (0, 1)]),
             "*_world_size_2_rank_*.pt"),
    "nanotron": (copy("nanotron", "tp2pp2"), "checkpoint_metadata.json"),
    "verl of 3": (pt(*["model_world_size_3_rank_%d.pt" % r for r in range(3)]), "*_world_size_3_rank_*.pt"),
}
MODEL = {
    "transformers": (pretrained(), "model.safetensors"),
    "index": (pretrained(max_shard_size="1KB"), "model.safetensors.index.json"),
    "numbered": (st("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"), "model-*-of-00002.safetensors"),
    "diffusers": (st("diffusion_pytorch_model.safetensors"), "diffusion_pytorch_model.safetensors"),
}
MODEL_PT = {
    "bin": (pt("pytorch_model.bin"), "pytorch_model.bin"),
    "accelerate's full": (pt("pytorch_model_fsdp.bin"), "pytorch_model_fsdp.bin"),
    "bin of diffusers": (pt("diffusion_pytorch_model.bin"), "diffusion_pytorch_model.bin"),
}
COPY = {
    "fp16": (st("model.fp16.safetensors"), "model.fp16.safetensors"),
    "Mistral": (st("consolidated.safetensors"), "consolidated.safetensors"),
    "Llama": (pt("consolidated.00.pth", "consolidated.01.pth"), "consolidated.*.pth"),
    "parts": (st("weights.00.safetensors", "weights.01.safetensors"), "weights.*.safetensors"),
    "Flax": (flax, "flax_model.msgpack"),
    "some": (st("some.safetensors"), "some.safetensors"),
    "other": (st("other.safetensors"), "other.safetensors"),
    "optimizer": (pt("optim_world_size_5_rank_0.pt", *["optim_world_size_5_rank_%d.pt" % r for r in range(1, 5)]),
                  "*_world_size_5_rank_*.pt"),
}
OTHER = {
    "adapter": (st("adapter_model.safetensors"), "adapter_model.safetensors"),
    "older adapter": (pt("adapter_model.bin"), "adapter_model.bin"),
    "LoRA": (st("pytorch_lora_weights.safetensors"), "pytorch_lora_weights.safetensors"),
    "HDF5": (h5, "index.h5"),
    "shards": (None, "shard-*-model-*-of-00001.safetensors"),
    "ranks": (pt("rank_0.pt", "rank_1.pt"), "rank_*.pt"),
    "model and optim": (pt("model_rank_0.pt", "optim_rank_0.pt"), "*_rank_*.pt"),
    "Composer": (composer, "ep1-ba10-rank*.pt"),
    "an older one": (pt("ep0-ba5-rank0.pt"), "ep0-ba5-rank*.pt"),
}
STATE = {"random numbers": (pt("rng_rank0.pt", "rng_rank1.pt"), "*_rank*.pt")}
LOOSE = {
    "torch.save": (pt("model.pt"), "model.pt"),
    "HDF5 file": (h5_file, "model.h5"),
    "Meta's folder": (pt("original/consolidated.00.pth"), "original"),
    "an earlier step": (st("checkpoint-5/model.safetensors"), "checkpoint-5"),
}
CLASSES = [TRAINING, MODEL, MODEL_PT, COPY, OTHER, STATE, LOOSE]


def shards(home, name):
    """As torch's HuggingFaceStorageWriter writes each rank's file, without the .metadata of newer versions."""
    writer = dcp.HuggingFaceStorageWriter(path=str(home), save_distributed=True)
    dcp.save(tensors(name), storage_writer=writer)
    (home / ".metadata").unlink(missing_ok=True)


OTHER["shards"] = (shards, OTHER["shards"][1])


def names_in(path, *argv):
    r = subprocess.run([PROGRAM, "inspect", path, "--json", *argv], capture_output=True, text=True)
    names = {t["name"] for key in ("tensors", "objects") for t in json.loads(r.stdout)[key]} if r.returncode == 0 else None
    return names, r


def make_kinds(home):
    """{kind: (class, folder, name, values)}"""
    kinds = {}
    for order, group in enumerate(CLASSES):
        for kind, (place, name) in group.items():
            folder = home / kind
            folder.mkdir()
            place(folder, "k%d" % len(kinds))
            values, r = names_in(folder)
            must(values, kind, r)
            if group is LOOSE:  # entered only where it is the only one
                must("%s: reads %s/" % (folder, folder) in r.stderr, kind, r.stderr)
                values = None
            must(values is None or kind == "Composer" or r.stderr == "", kind, "alone is not alone:", r.stderr)
            kinds[kind] = (order, folder, name, values)
    return kinds


def winner(a, b):
    """What docs/FOLDERS.md says: the first of the two in order is read, unless they are alike or one has no rule."""
    first, second = sorted((a, b), key=lambda k: k[0])
    orders = [CLASSES[k[0]] for k in (first, second)]
    alike = orders[0] is orders[1]
    ruled = orders[0] is TRAINING or orders[1] is not OTHER
    return None if alike or not ruled or orders[0] is LOOSE else first


# The files of a step go before the folders of other steps.
NESTED = {("DeepSpeed", "DeepSpeed step"): "DeepSpeed step", ("Megatron", "Megatron run"): "Megatron",
          ("torch_dist", "Megatron run"): "torch_dist",
          ("index", "numbered"): "index"}  # an earlier save left the files that the index does not have


def files_of(folder):
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if not p.is_dir()}


def judge(folder, kinds, a, b):
    values, r = names_in(folder)
    x, y = kinds[a], kinds[b]
    first = kinds[NESTED[a, b]] if (a, b) in NESTED else winner(x, y)
    must(x[2] in r.stderr and y[2] in r.stderr and r.stderr.count("\n") == 1, "both are not named:", r.stderr)
    if first:
        must(values == first[3] and "reads %s, and not " % first[2] in r.stderr, "something else was read:", r.stderr)
    else:
        must(r.returncode == (3 if CLASSES[x[0]] is LOOSE else 2), "one was chosen:", r.stderr)
    for kind in (x, y):  # what the message says to type
        named, r = names_in(folder / kind[2])
        must(named == kind[3] or (kind[3] is None and named), "the path does not select it:", kind[2], r.stderr)
        must(kind[3] is None or r.stderr == "", kind[2], r.stderr)


def every_pair(program, home, corpus):
    kinds = make_kinds(home)
    pairs, wrong = 0, []
    for a, b in itertools.combinations(kinds, 2):
        x, y = kinds[a], kinds[b]
        if files_of(x[1]) & files_of(y[1]) - {"config.json", "generation_config.json"}:
            continue  # they cannot be in one folder
        folder = home / "pair"
        for kind in (x, y):
            shutil.copytree(kind[1], folder, dirs_exist_ok=True, symlinks=True)
        try:
            judge(folder, kinds, a, b)
        except Exception as e:
            wrong.append("%s, %s: %s" % (a, b, e))
        shutil.rmtree(folder)
        pairs += 1
    must(not wrong, *wrong)
    must(pairs > 600, "only", pairs, "pairs")


def every_command(program, home, corpus):
    """The note does not depend on the command, nor on the side."""
    folder, alone = home / "run", home / "alone"
    for f in (folder, alone):
        f.mkdir()
        st("model.safetensors")(f, "m")
    pt("pytorch_model.bin")(folder, "m")
    note = "%s: reads model.safetensors, and not pytorch_model.bin (pt); to read another, give its path, such as '%s/pytorch_model.bin'" % (
        folder, folder)
    out = home / "out"
    commands = [["inspect", folder], ["inspect", folder, "--json"], ["inspect", folder, "--html", out.with_suffix(".html")], ["check", folder],
                ["check", folder, "--json"], ["check", alone, "--against", folder], ["check", folder, "--against", alone],
                ["schema", folder], ["diff", folder, alone], ["diff", alone, folder], ["diff", alone, folder, "--data"],
                ["average", folder, alone, "-o", out.with_suffix(".h5")], ["average", alone, folder, "-o", out.with_suffix(".h5")],
                ["consolidate", folder, "-o", out.with_suffix(".h5")], ["consolidate", folder, "--dry-run"],
                ["reshard", folder, "-o", out, "--to", "h5", "--dp", "2"], ["convert", folder, "-o", out, "--to", "dcp"],
                ["verify", folder], ["view", folder, "-o", out.with_suffix(".h5")], ["units", folder],
                ["extract", folder, "m.weight", "-o", out.with_suffix(".npy")]]
    for command in commands:
        for path in (out, out.with_suffix(".h5"), out.with_suffix(".npy"), out.with_suffix(".html")):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        r = must_run(program, *command)
        must(r.stderr.count(note) == 1, command, r.stderr)
        if "--json" not in command and command[0] != "extract" and "--html" not in command:
            r = must_run(program, *command, "-q", "--force") if "-o" in command else must_run(program, *command)
            must(("-o" in command) == (note not in r.stderr), command, "-q:", r.stderr)


def one_of_two_in_place(program, home, corpus):
    """--force must not replace a folder that holds another checkpoint."""
    folder = home / "run"
    folder.mkdir()
    st("model.safetensors")(folder, "m")
    st("model.fp16.safetensors")(folder, "n")
    r = must_run(program, "convert", folder, "-o", folder, "--to", "dcp", "--force", ok=(2, 4))
    must(sorted(os.listdir(folder)) == ["model.fp16.safetensors", "model.safetensors"], os.listdir(folder), r.stderr)


def left_over_files(program, home, corpus):
    """A save of fewer files over one of more leaves files that the index does not have; a damaged index is an error of its own."""
    folder = home / "run"
    folder.mkdir()
    pretrained(max_shard_size="1KB")(folder, "m")
    values, r = names_in(folder)
    st("model-00099-of-00099.safetensors")(folder, "old")
    got, r = names_in(folder)
    must(got == values and "model-*-of-00099.safetensors" in r.stderr, r.stderr)
    (folder / "model.safetensors.index.json").write_text("{")
    got, r = names_in(folder)
    must(r.returncode == 3 and "model.safetensors.index.json" in r.stderr, r)


if __name__ == "__main__":
    PROGRAM, CORPUS = sys.argv[1], pathlib.Path(sys.argv[2])
    sys.exit(run_tests([every_pair, every_command, one_of_two_in_place, left_over_files]))
