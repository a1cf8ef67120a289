#!/usr/bin/env python3
"""Folders as trainers leave them: the only model inside is read, or one line has the reason and what to do.

The last cases are folders that LitGPT, OLMo-core, Composer and Ray Train saved themselves (make_trainers.py). Else torch writes all
files. The layouts of fairseq2 (checkpoint/manager.py), ColossalAI (checkpoint_io/utils.py), OLMo-core
(train/checkpoint.py), torchtune (_checkpointer.py) and Composer (checkpoint_saver.py) are those of their sources; those of OLMo, LitGPT,
metaseq, NeMo-RL, Ray Train and nanoGPT are as their users know them.

usage: trainer_folders.py FSDPCKPT CORPUS       exit 77 without torch and safetensors
"""
import json
import os
import pathlib
import shutil
import sys
import tempfile
import warnings

warnings.filterwarnings("ignore")
try:
    import torch
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file, save_file
except ImportError as e:
    print("skipped: %s" % e)
    sys.exit(77)

from checks import must, must_run

PROGRAM, CORPUS = sys.argv[1], pathlib.Path(sys.argv[2])
MODEL = {"layers.0.w.weight": torch.arange(12.0).reshape(3, 4), "norm.weight": torch.arange(4.0)}
ADAPTER = {"layers.0.w.lora_A": torch.ones(1, 4)}
OPTIM = {"state": {0: {"exp_avg": torch.ones(3, 4), "step": torch.tensor(1.0)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}


def pt(value):
    return lambda path: torch.save(value, path)


def st(value):
    return lambda path: save_file(value, str(path))


def dist(value):
    return lambda path: dcp.save(value, checkpoint_id=str(path))


def js(value):
    return lambda path: path.write_text(json.dumps(value))


def link(to):
    return lambda path: path.symlink_to(to)


def verl(part, rank):
    return lambda path: shutil.copy(CORPUS / "verl" / "fsdp2" / "actor" / ("%s_world_size_2_rank_%d.pt" % (part, rank)), path)


FAIRSEQ2 = {"step_5/%s/pp_00/tp_00/sdp_%02d.pt" % (folder, rank): verl(part, rank)
            for folder, part in (("model", "model"), ("optimizer", "optim")) for rank in range(2)}
TUNE = {"model-0000%d-of-00002.safetensors" % (i + 1): {name: t} for i, (name, t) in enumerate(MODEL.items())}
INDEX = {"metadata": {}, "weight_map": {name: file for file, part in TUNE.items() for name in part}}

# What is in the folder, and which checkpoint in it is read.
READ = {
    "OLMo-core": ({"step100/model_and_optim": dist({"model": MODEL, "optim": OPTIM}), "step100/train/rank0.pt": pt({"step": 1}),
                   "step100/config.json": js({}), "step100/.metadata.json": js({})}, "step100/model_and_optim"),
    "OLMo": ({"step5-unsharded/model.pt": pt(MODEL), "step5-unsharded/optim.pt": pt(OPTIM), "step5-unsharded/train.pt": pt({"step": 5})},
             "step5-unsharded/model.pt"),
    "fairseq2": ({**FAIRSEQ2, "step_5/trainer/rank_00.pt": pt({"step": 5}), "step_5/data_reader/dp_00.pt": pt({"x": 1})},
                 "step_5/model/pp_00/tp_00"),
    "torchtune": ({**{"epoch_0/" + file: st(part) for file, part in TUNE.items()}, "epoch_0/model.safetensors.index.json": js(INDEX),
                   "epoch_0/config.json": js({}), "recipe_state/recipe_state.pt": pt({"optimizer": OPTIM})}, "epoch_0"),
    "torchtune of Meta's files": ({"meta_model_0.pt": pt(MODEL), "recipe_state.pt": pt({"optimizer": OPTIM})}, "meta_model_0.pt"),
    "LitGPT": ({"final/lit_model.pth": pt({"model": MODEL}), "final/model_config.yaml": js({}), "final/tokenizer.json": js({})},
               "final/lit_model.pth"),
    "LitGPT, merged": ({"final/lit_model.pth": pt({"model": MODEL}),
                        **{"final/lit_model.pth." + kind: pt({"model": ADAPTER}) for kind in ("adapter", "adapter_v2", "lora")}},
                       "final/lit_model.pth, and not the adapter lit_model.pth.adapter"),
    "Composer, sharded": ({"ep1-ba10": dist({"state": {"model": MODEL}}), "latest-rank0.pt": link("ep1-ba10/__0_0.distcp")}, "ep1-ba10"),
    "Composer, a linked folder": ({"ep1-ba10": dist({"state": {"model": MODEL}}), "latest-rank0.pt": link("ep1-ba10")}, "ep1-ba10"),
    "ColossalAI": ({**{"model/" + file: st(part) for file, part in TUNE.items()}, "model/model.safetensors.index.json": js(INDEX),
                    "optimizer/pytorch_optim.bin.index.json": js({"metadata": {}, "weight_map": {"0": "pytorch_optim-00001.bin"}}),
                    "optimizer/pytorch_optim-00001.bin": pt({0: OPTIM["state"][0]}), "running_states.json": js({"epoch": 1})}, "model"),
    "NeMo-RL": ({"step_10/policy/weights": dist({"model": MODEL}), "step_10/config.yaml": js({})}, "step_10/policy/weights"),
    "Ray Train, torch": ({"checkpoint_000003/model.pt": pt(MODEL), "checkpoint_000003/.metadata.json": js({}), "result.json": js({})},
                         "checkpoint_000003/model.pt"),
    "Ray Train, Lightning": ({"checkpoint_000003/checkpoint.ckpt": pt({"state_dict": MODEL, "epoch": 1})}, "checkpoint_000003/checkpoint.ckpt"),
    "Ray Train, transformers": ({"checkpoint_000003/checkpoint/model.safetensors": st(MODEL)}, "checkpoint_000003/checkpoint"),
    "nanoGPT": ({"ckpt.pt": pt({"model": MODEL, "optimizer": OPTIM})}, "ckpt.pt"),
}
# What is in the folder, the exit status, and words of the line.
REFUSED = {
    "LitGPT steps": ({"step-%08d/lit_model.pth" % n: pt({"model": MODEL}) for n in (1, 2)}, 3,
                     "step-00000001/lit_model.pth, step-00000002/lit_model.pth; name one of them"),
    "LitGPT adapters": ({"final/lit_model.pth." + kind: pt({"model": ADAPTER}) for kind in ("adapter", "lora")}, 3,
                        "final/lit_model.pth.adapter, final/lit_model.pth.lora; name one of them"),
    "torchtitan": ({"step-%d" % n: dist({"model": MODEL}) for n in (1, 2)}, 3, "step-1, step-2; name one of them"),
    "Composer steps": ({"ep%d-ba5" % n: dist({"state": {"model": MODEL}}) for n in (0, 1)} | {"latest-rank0.pt": link("ep1-ba5/__0_0.distcp")},
                       3, "ep0-ba5, ep1-ba5; name one of them"),
    "one rank of several": ({"model_rank0_of_8.pt": pt(MODEL)}, 3, "model_rank1_of_8.pt: the file is missing; 7 files of 8 ranks are missing"),
    "a part of a model": ({"pytorch_model-00001-of-00002.bin": pt(MODEL)}, 3, "the file pytorch_model-00002-of-00002.bin is missing"),
    "a link out": ({"last": link(CORPUS.resolve() / "good" / "dcp-torch2.15.0-train")}, 3, "contains checkpoints: last; name one of them"),
    "only an optimizer": ({"optimizer.pt": pt(OPTIM), "scheduler.pt": pt({"a": 1})}, 3, "optimizer.pt, scheduler.pt; name one of them"),
    "DeepSpeed pipeline": ({**{"global_step5/layer_0%d-model_00-model_states.pt" % i: pt({"w": torch.ones(2)}) for i in range(2)},
                            "global_step5/mp_rank_00_model_states.pt": pt({"module": None, "num_layers": 2}),
                            "latest": lambda path: path.write_text("global_step5")}, 5, "ds_to_universal.py"),
    "vLLM, a rank is missing": ({"model-rank-1-part-0.safetensors": st(MODEL)}, 3, "a file is missing: there are ranks up to 1"),
    "metaseq": ({"checkpoint_last-model_part-0-shard%d.pt" % r: pt({"model": {"flat_param_0": torch.ones(3)}}) for r in range(2)}, 5,
                "consolidate_shard_weights"),
}


def build(root, content):
    root.mkdir()
    for name, write in content.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        write(root / name)


def weights(home, *argv):
    """The values of the model, without what is in front of their names."""
    out = home / "out.safetensors"
    run = must_run(PROGRAM, "consolidate", *argv, "-o", out, "--force")
    return {n.removeprefix("state.").removeprefix("model.").removeprefix("state_dict."): t for n, t in load_file(str(out)).items()
            if "optim" not in n}, run.stderr


def read(home, name, content, inner):
    root = home / name
    build(root, content)
    got, told = weights(home, root)
    want, _ = weights(home, root / inner.split(",")[0])
    must("%s: reads %s" % (root, root / inner) in told, name, told)
    must(got.keys() == want.keys() and all(torch.equal(got[n], want[n]) for n in want), name, "differs from", inner)
    if name != "fairseq2":
        must(all(torch.equal(got[n], t) for n, t in MODEL.items()), name, "the values")
    else:
        model = {n.removeprefix("model."): t for n, t in load_file(str(CORPUS / "verl" / "fsdp2" / "expected.safetensors")).items()}
        must(got.keys() == model.keys() and all(torch.equal(got[n], t) for n, t in model.items()), name, "the values")


def refused(home, name, content, status, words):
    root = home / name
    build(root, content)
    for argv in (["inspect", root], ["consolidate", root, "-o", home / "none.h5"]):
        run = must_run(PROGRAM, *argv, ok=(status,))
        must(words in run.stderr and run.stderr.count("\n") == 1, name, run.stderr)
    must(not (home / "none.h5").exists(), name, "a target was written")


def fairseq2_parallel(home):
    """Several tensor-parallel ranks or stages: their files do not say how they fit together."""
    for other in ("pp_00/tp_01", "pp_01/tp_00"):
        root = home / ("fairseq2 " + other.replace("/", " "))
        build(root, FAIRSEQ2)
        shutil.copytree(root / "step_5/model/pp_00/tp_00", root / "step_5/model" / other)
        run = must_run(PROGRAM, "inspect", root / "step_5/model/pp_00/tp_00", ok=(5,))
        must("save_hugging_face_model" in run.stderr, run.stderr)


def metaseq_parts(home):
    """Parts of tensor-parallel ranks without FSDP, with a plan."""
    root = home / "parts"
    whole = {"decoder.layers.0.fc1.weight": torch.arange(32.0).reshape(8, 4), "decoder.layers.0.fc2.weight": torch.arange(32.0).reshape(4, 8),
             "decoder.layer_norm.weight": torch.ones(4)}
    parts = [{"model": {"decoder.layers.0.fc1.weight": whole["decoder.layers.0.fc1.weight"][4 * r:4 * r + 4].clone(),
                        "decoder.layers.0.fc2.weight": whole["decoder.layers.0.fc2.weight"][:, 4 * r:4 * r + 4].clone(),
                        "decoder.layer_norm.weight": whole["decoder.layer_norm.weight"]}} for r in range(2)]
    build(root, {"reshard-model_part-%d.pt" % r: pt(part) for r, part in enumerate(parts)})
    got, _ = weights(home, root, "--tp-plan", "auto")
    must(got.keys() == whole.keys() and all(torch.equal(got[n], whole[n]) for n in whole), "the parts")
    must("--tp-plan" in must_run(PROGRAM, "consolidate", root, "-o", home / "none.h5", ok=(5,)).stderr, "no plan")


# Of the package: what it saved, and which checkpoint in it is read.
SAVED = {"litgpt": ("pretrain", "pretrain/step-00000002/lit_model.pth"), "olmo-core": ("run", "run/step2/model_and_optim"),
         "composer": ("run", "run/ep1-ba2-rank0.pt"), "ray": ("run/checkpoint_2*", "run/checkpoint_2*/model.pt")}


def saved(home, package, folder, inner):
    """A folder that the package itself saved: every command reads it, and the weights are those that it had in memory."""
    root = CORPUS / "trainers" / package
    (folder,), (inner,) = root.glob(folder), root.glob(inner)
    for argv in (["inspect", folder], ["verify", folder], ["diff", folder, inner, "--data"], ["check", folder]):
        must_run(PROGRAM, *argv)
    want = {n.removeprefix("module."): t for n, t in load_file(str(root / "expected.safetensors")).items()}  # of a wrapper, or Composer's
    must_run(PROGRAM, "consolidate", folder, "-o", home / "out.safetensors", "--force", "--model-only")
    got = load_file(str(home / "out.safetensors"))
    must(got.keys() == want.keys() and all(torch.equal(got[n], want[n]) for n in want), package, got.keys(), want.keys())
    must_run(PROGRAM, "reshard", folder, "-o", home / package, "--to", "dcp", "--dp", "3")
    must("equal: " in must_run(PROGRAM, "diff", home / package, folder, "--data").stdout, package)


def adapters_of_litgpt():
    final = CORPUS / "trainers" / "litgpt" / "finetune" / "final"
    for end, name in (("lora", ".attn.qkv.lora_A"), ("adapter", ".attn.gating_factor"), ("adapter_v2", ".adapter_scale")):
        must(name in must_run(PROGRAM, "inspect", final / ("lit_model.pth." + end)).stdout, end)
    must("name one of them" in must_run(PROGRAM, "inspect", final, ok=(3,)).stderr, final)


def rank_files(hub, tp, of_vllm):
    """The tensors of each rank, as vLLM's layers and TensorRT-LLM's convert_checkpoint.py divide those of a Llama."""
    def rows(t, multiple):
        return torch.cat([t, torch.zeros(-len(t) % multiple, t.shape[1], dtype=t.dtype)]).chunk(tp)

    def together(name, modules, rank):
        return torch.cat([hub[name.replace(modules[0], m)].chunk(tp)[rank] for m in modules])

    names = {} if of_vllm else {"model.embed_tokens": "transformer.vocab_embedding", "model.norm": "transformer.ln_f",
                                "model.layers": "transformer.layers", "self_attn.o_proj": "attention.dense", "self_attn.qkv_proj": "attention.qkv",
                                "mlp.gate_proj": "mlp.fc", "mlp.up_proj": "mlp.gate", "mlp.down_proj": "mlp.proj",
                                "post_attention_layernorm": "post_layernorm"}
    for rank in range(tp):
        own = {}
        for name, t in hub.items():
            if name == "lm_head.weight" or (of_vllm and "embed_tokens" in name):
                own[name] = rows(t, 64 if of_vllm else tp)[rank]
            elif ".q_proj." in name:
                own[name.replace("q_proj", "qkv_proj")] = together(name, ("q_proj", "k_proj", "v_proj"), rank)
            elif of_vllm and ".gate_proj." in name:
                own[name.replace("gate_proj", "gate_up_proj")] = together(name, ("gate_proj", "up_proj"), rank)
            elif ".o_proj." in name or ".down_proj." in name:
                own[name] = t.chunk(tp, 1)[rank]
            elif ".gate_proj." in name or (not of_vllm and ".up_proj." in name):
                own[name] = t.chunk(tp)[rank]
            elif not any(m in name for m in (".k_proj.", ".v_proj.", ".up_proj.")):
                own[name] = t
        for old, new in names.items():
            own = {name.replace(old, new): t for name, t in own.items()}
        yield {name: t.contiguous() for name, t in own.items()}


def inference_ranks(home):
    """The ranks of vLLM and TensorRT-LLM, joined by a recipe with the sizes of config.json."""
    case = CORPUS / "recipes" / "megatron-dist-llama"
    hub, config = load_file(str(case / "to.safetensors")), json.loads((case / "config.json").read_text())
    for name, tp, of_vllm in (("vLLM", 2, True), ("vLLM", 1, True), ("TensorRT-LLM", 2, False)):
        root = home / ("%s-%d" % (name, tp))
        files = {"config.json": js({**config, "mapping": {"tp_size": tp, "pp_size": 1}})}
        for rank, own in enumerate(rank_files(hub, tp, of_vllm)):
            half = sorted(own)[::2]
            parts = [{n: own[n] for n in half}, {n: t for n, t in own.items() if n not in half}] if of_vllm else [own]
            files.update({("model-rank-%d-part-%d" % (rank, i) if of_vllm else "rank%d" % rank) + ".safetensors": st(part)
                          for i, part in enumerate(parts)})
        build(root, files)
        recipe = "vllm-llama" if of_vllm else "tensorrt-llm-llama"
        got, told = weights(home, root, "--recipe", recipe, "--config", root)
        hub_names = {n.removeprefix("model."): t for n, t in hub.items()}
        must(got.keys() == hub_names.keys() and all(torch.equal(got[n], t) for n, t in hub_names.items()), name, sorted(got))
        must("a recipe (vllm-llama, tensorrt-llm-llama) joins them" in told, name, told)
        must_run(PROGRAM, "export", root, "-o", home / "hub", "--force")
        same = load_file(str(home / "hub" / "model.safetensors"))
        must(same.keys() == hub.keys() and all(torch.equal(same[n], t) for n, t in hub.items()), name, "export")
    (root / "config.json").write_text(json.dumps({**config, "mapping": {"tp_size": 1, "pp_size": 2}}))
    run = must_run(PROGRAM, "consolidate", root, "-o", home / "none.h5", "--recipe", recipe, "--config", root, ok=(2,))
    must("attention.qkv.weight" in run.stderr, "pipeline stages", run.stderr)
    (root / "config.json").write_text(json.dumps({**config, "num_key_value_heads": 1, "mapping": {"tp_size": 2, "pp_size": 1}}))
    must_run(PROGRAM, "consolidate", root, "-o", home / "none.h5", "--recipe", recipe, "--config", root, ok=(2,))


def main():
    with tempfile.TemporaryDirectory(prefix="fc-trainers-") as folder:
        home = pathlib.Path(folder)
        inference_ranks(home)
        for name, (content, inner) in READ.items():
            read(home, name, content, inner)
        for name, (content, status, words) in REFUSED.items():
            refused(home, name, content, status, words)
        for package, (folder, inner) in SAVED.items():
            saved(home, package, folder, inner)
        adapters_of_litgpt()
        fairseq2_parallel(home)
        metaseq_parts(home)
    return 0


if __name__ == "__main__":
    sys.exit(main())
