#!/usr/bin/env python3
"""recipes --infer with models of transformers: what a model has in memory, and what save_pretrained writes. A recipe that is found with
a small model converts a larger one. Fresh norms are all equal; a cast is torch's own; other weights are refused.

usage: infer.py FSDPCKPT       exit 77 without torch and transformers
"""
import json
import os
import subprocess
import sys
import tempfile

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", HF_HUB_DISABLE_PROGRESS_BARS="1")
try:
    import torch
    import transformers
    from safetensors.torch import load_file, save_file
except ImportError as e:
    print("skipped: %s" % e)
    sys.exit(77)

from checks import must

TOOL = os.path.abspath(sys.argv[1])
SMALL = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "tie_word_embeddings": False}
LARGE = dict(SMALL, hidden_size=48, intermediate_size=40, num_hidden_layers=5, num_attention_heads=6, num_key_value_heads=3)
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_intermediate_size": 24, "num_experts_per_tok": 2}
DEEPSEEK = {"n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
            "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
FAMILIES = [("Mixtral", EXPERTS), ("Qwen3Moe", EXPERTS), ("DeepseekV3", {**EXPERTS, **DEEPSEEK})]


def run(*args):
    return subprocess.run([TOOL, *args], capture_output=True, text=True, check=False)


def save(family, sizes, more, folder, seed=3):
    """What is in memory as memory.safetensors, and what save_pretrained writes in the folder `hub`."""
    torch.manual_seed(seed)
    config = getattr(transformers, family + "Config")(**{**sizes, **more})
    model = getattr(transformers, family + "ForCausalLM")(config)
    os.makedirs(folder)
    save_file({k: v.clone().contiguous() for k, v in model.state_dict().items()}, os.path.join(folder, "memory.safetensors"))
    model.save_pretrained(os.path.join(folder, "hub"))
    return os.path.join(folder, "memory.safetensors"), os.path.join(folder, "hub")


def same(made, folder):
    got, want = load_file(made), load_file(os.path.join(folder, "model.safetensors"))
    return set(got) == set(want) and all(got[k].dtype == want[k].dtype and torch.equal(got[k], want[k]) for k in want)


def larger_model(tmp, family, more):
    here = os.path.join(tmp, family)
    recipe, out = os.path.join(tmp, family + ".json"), os.path.join(tmp, family + ".safetensors")
    memory, hub = save(family, SMALL, more, os.path.join(here, "small"))
    p = run("recipes", "--infer", memory, hub, "-o", recipe)
    must(p.returncode == 0 and "proven: " in p.stderr, f"{family}: {p.stderr}")
    memory, hub = save(family, LARGE, {k: 8 if v == 4 else v for k, v in more.items()}, os.path.join(here, "large"))
    p = run("consolidate", memory, "-o", out, "--recipe", recipe, "--config", hub, "-q")
    must(p.returncode == 0 and same(out, hub), f"{family}: a larger model: {p.stderr}")


def casts_and_guesses(tmp):
    """Both sides have the same names but for a prefix, so the guess for the norms, which are all ones, must be right."""
    memory, hub = save("Llama", SMALL, {}, os.path.join(tmp, "llama"))
    base, bf16 = os.path.join(tmp, "base.safetensors"), os.path.join(tmp, "bf16")
    model = transformers.LlamaForCausalLM.from_pretrained(hub)
    save_file({k: v.clone().double() for k, v in model.model.state_dict().items()}, base)  # LlamaModel has no prefix, and no head
    model.to(torch.bfloat16).save_pretrained(bf16)
    p = run("recipes", "--infer", memory, bf16)
    recipe = json.loads(p.stdout)
    must(p.returncode == 0 and recipe["dtypes"] == {"*": "bf16"}, f"a cast: {p.stderr}")
    must(all(r["from"] == r["to"] for r in recipe["rules"]), "the names are the same")
    p = run("recipes", "--infer", hub, base)
    recipe = json.loads(p.stdout)
    must(p.returncode == 0 and "left out: lm_head.weight" in p.stderr, f"without a head: {p.stderr}")
    must(all("drop" in r or r["from"] == "model." + r["to"] for r in recipe["rules"]), f"norms are exchanged: {recipe['rules']}")
    must(any("a guess" in r.get("note", "") for r in recipe["rules"]), "guesses are marked")
    must(recipe["dtypes"] == {"*": "f64"}, "a cast to float64")


def other_weights(tmp):
    memory, _ = save("Llama", SMALL, {}, os.path.join(tmp, "one"), seed=1)
    _, hub = save("Llama", SMALL, {}, os.path.join(tmp, "two"), seed=2)
    target = os.path.join(tmp, "none.json")
    p = run("recipes", "--infer", memory, hub, "-o", target)
    must(p.returncode == 1 and "these are not the same weights" in p.stderr and not os.path.exists(target), f"other weights: {p.stderr}")


def main():
    with tempfile.TemporaryDirectory() as tmp:
        for family, more in FAMILIES:
            larger_model(tmp, family, more)
        casts_and_guesses(tmp)
        other_weights(tmp)
    print("ok")


main()
