#!/usr/bin/env python3
"""`export` of models with a LoRA adapter inside, as PEFT 0.21 trains them: refused, or merged as --adapter merges it.

The names are those of the state dict of a PeftModel (adapters_peft.py has PEFT itself, where it is installed). The values
are compared with the formula of LoRA in float64.

usage: adapters_inside.py FSDPCKPT        exit 77 without torch
"""
import json
import os
import sys
import tempfile

try:
    import torch
    from adapters import CONFIG, experts_product, must_be_near, product
    from safetensors.torch import load_file, save_file
except ImportError as e:
    print("skipped: %s" % e)
    sys.exit(77)

from checks import must, must_run, run_main
from torch_values import must_equal

AT = "base_model.model.model.layers.0."
Q, HEAD, EMBED, EXPERTS = AT + "self_attn.q_proj.", "base_model.model.lm_head.", "base_model.model.model.embed_tokens.", AT + "mlp.experts."


def write_config(path, **more):
    with open(path, "w") as f:
        json.dump({**CONFIG, **more}, f)
    return path


def model(dtype, adapter="default"):
    """(state of the PeftModel, {name on the hub: (exact value, sum of magnitudes, rank), or the value itself})"""
    torch.manual_seed(0)
    r = lambda *shape: (0.2 * torch.randn(shape)).to(dtype)
    state, want = {}, {}

    def linear(name, rows, columns):
        w, a, b = r(rows, columns), r(8, columns), r(rows, 8)
        state.update({name + "base_layer.weight": w, name + "base_layer.bias": r(rows),
                      "%slora_A.%s.weight" % (name, adapter): a, "%slora_B.%s.weight" % (name, adapter): b})
        x, size = product(a, b, w.shape)
        want[name[17:] + "weight"] = w.double() + 2 * x, w.double().abs() + 2 * size, 8
        want[name[17:] + "bias"] = state[name + "base_layer.bias"]

    linear(Q, 64, 48)
    linear(AT + "mlp.up_proj.", 96, 64)
    state[AT + "mlp.down_proj.weight"] = want["model.layers.0.mlp.down_proj.weight"] = r(64, 96)
    state[HEAD + "original_module.weight"] = r(30, 64)
    state["%smodules_to_save.%s.weight" % (HEAD, adapter)] = want["lm_head.weight"] = r(30, 64)
    w, a, b = r(30, 64), r(8, 30), r(64, 8)
    state.update({EMBED + "base_layer.weight": w, EMBED + "lora_embedding_A." + adapter: a,
                  EMBED + "lora_embedding_B." + adapter: b})
    x, size = product(a, b, (64, 30))
    want["model.embed_tokens.weight"] = w.double() + 2 * x.T, w.double().abs() + 2 * size.T, 8
    for nest, name, inside, outside in (("base_layer.", "gate_up_proj", 20, 24), ("", "down_proj", 12, 20)):
        w, a, b = r(3, outside, inside), r(24, inside), r(outside, 24)
        state[EXPERTS + "base_layer.base_layer." + name] = w
        state["%s%slora_A.%s.weight" % (EXPERTS, nest, adapter)], state["%s%slora_B.%s.weight" % (EXPERTS, nest, adapter)] = a, b
        x, size = experts_product(a, b, 3, False)
        want["model.layers.0.mlp.experts." + name] = w.double() + 2 * x, w.double().abs() + 2 * size, 8
    return state, want


TARGETS = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}


def check_merged(want, folder):
    got = load_file(os.path.join(folder, "model.safetensors"))
    must(sorted(got) == sorted(want), sorted(got), sorted(want))
    for name, value in want.items():
        if isinstance(value, tuple):
            must_be_near(*value, got[name], name)
        else:
            must_equal(value, got[name], name)


def check_values(tool, path, dtype, adapter, wrap):
    state, want = model(dtype, adapter)
    config = write_config(path("adapter_config.json"), **TARGETS)
    named = {wrap(name): t for name, t in state.items()}
    torch.save({"model": named, "optimizer": {"state": {}, "param_groups": []}, "step": 3}, path("run.pt"))
    must_run(tool, "reshard", path("run.pt"), "-o", path("run"), "--to", "dcp", "--dp", 3, "-q", "-f")
    for source in ("run.pt", "run"):
        for like in ((), ("--like", path("hub"))):
            for given in (config, path("")) if not like else (config,):
                must_run(tool, "export", path(source), "-o", path("out" if not like else source + "-like"), "-f", "-q", "--adapter-config", given, *like)
                check_merged(want, path("out" if not like else source + "-like"))
            if not like:
                os.makedirs(path("hub"), exist_ok=True)
                save_file(load_file(path("out/model.safetensors")), path("hub/model.safetensors"))
                with open(path("hub/config.json"), "w") as f:
                    f.write("{}")
        r = must_run(tool, "export", path(source), "-o", path("json"), "-f", "--json", "--adapter-config", config)
        must(json.loads(r.stdout)["model"]["merged"] == 6, r.stdout)


def refused(tool, path, state, status, words, *options):
    torch.save(state, path("bad.pt"))
    r = must_run(tool, "export", path("bad.pt"), "-o", path("no"), *options, ok=(status,))
    must(words in r.stderr and r.stderr.count("\n") == 1 and not os.path.exists(path("no")), words, r.stderr)


def check_refusals(tool, path):
    """No name of an adapter reaches a directory for the hub."""
    state, _ = model(torch.float32)
    config = write_config(path("config.json"), **TARGETS)
    plain = {"model.layers.0.q_proj.weight": torch.ones(4, 4)}
    for name in state:
        alone = name.replace("base_model.model.", "")
        if any(part in name for part in ("lora_", "base_layer", "modules_to_save")):
            for recipe in ((), ("--recipe", "none")):
                refused(tool, path, {**plain, alone: state[name]}, 2, "--adapter-config FILE", *recipe)
    for name in ("q_proj.ia3_l.default", "q_proj.hada_w1_a.default", "token_adapter.trainable_tokens_delta.default"):
        module = AT + name.split(".")[0] + "."
        other = {module + "base_layer.weight": torch.ones(4, 4), AT + name: torch.ones(4)}
        refused(tool, path, {**plain, **other}, 2, "--adapter-config FILE")
        refused(tool, path, {**state, **other}, 5, "belongs to an adapter that is not LoRA", "--adapter-config", config)
    for name in ("lora_magnitude_vector.default.weight", "lora_B.default.bias", "lora_a.weight"):
        refused(tool, path, {**state, Q + name: torch.ones(64)}, 5, "only lora_A and lora_B are known",
                "--adapter-config", config)
    refused(tool, path, state, 5, "DoRA", "--adapter-config", write_config(path("dora.json"), use_dora=True))
    refused(tool, path, state, 2, "the rank of", "--adapter-config", write_config(path("rank.json"), r=4, **TARGETS))
    refused(tool, path, plain, 2, "has no LoRA adapter inside", "--adapter-config", config)
    refused(tool, path, {k: v for k, v in state.items() if k != Q + "lora_B.default.weight"}, 2, "but not lora_B", "--adapter-config", config)
    refused(tool, path, {**state, EXPERTS + "extra": torch.ones(2)}, 5, "that is not LoRA", "--adapter-config", config)


def check_several(tool, path):
    state, want = model(torch.float32)
    config = write_config(path("config.json"), **TARGETS)
    more = {k.replace("default", "other"): v for k, v in state.items() if "default" in k}
    refused(tool, path, {**state, **more}, 2, "leave out all but one, as with --exclude '*.other' --exclude '*.other.*'",
            "--adapter-config", config)
    must_run(tool, "export", path("bad.pt"), "-o", path("one"), "-q", "--adapter-config", config, "--exclude", "*.other",
             "--exclude", "*.other.*")
    check_merged(want, path("one"))


def check_reference(tool, path):
    """Models on the hub that have an adapter themselves, as Phi-4-multimodal: names stay."""
    state = {"model.q_proj.base_layer.weight": torch.ones(4, 4), "model.q_proj.lora_A.speech.weight": torch.ones(2, 4)}
    os.makedirs(path("phi"))
    save_file(state, path("phi/model.safetensors"))
    with open(path("phi/config.json"), "w") as f:
        f.write("{}")
    torch.save(state, path("phi.pt"))
    must_run(tool, "export", path("phi.pt"), "-o", path("phi-out"), "-q", "--like", path("phi"))
    must_equal(state, load_file(path("phi-out/model.safetensors")))


def check_damage(tool, path):
    """A flipped bit in any of the values is found."""
    state, _ = model(torch.float32)
    config = write_config(path("config.json"), **TARGETS)
    torch.save(state, path("damaged.pt"))
    with open(path("damaged.pt"), "rb") as f:
        whole = f.read()
    for name, t in state.items():
        if "original_module" in name:
            continue
        at = whole.find(t.flatten().view(torch.uint8).numpy().tobytes())
        must(at > 0, name)
        with open(path("damaged.pt"), "wb") as f:
            f.write(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1:])
        r = must_run(tool, "export", path("damaged.pt"), "-o", path("no"), "--adapter-config", config, ok=(3,))
        must(not os.path.exists(path("no")), name, r.stderr)


def main():
    tool = sys.argv[1]
    for dtype, adapter, wrap in (
            (torch.float32, "default", lambda n: n),
            (torch.bfloat16, "my_lora", lambda n: n.replace("layers.0.", "layers.0._fsdp_wrapped_module.")),
            (torch.float16, "default", lambda n: "_orig_mod." + n)):
        with tempfile.TemporaryDirectory(prefix="fsdpckpt-inside-") as home:
            check_values(tool, lambda name: os.path.join(home, name), dtype, adapter, wrap)
    for check in (check_refusals, check_several, check_reference, check_damage):
        with tempfile.TemporaryDirectory(prefix="fsdpckpt-inside-") as home:
            check(tool, lambda name: os.path.join(home, name))
    print("adapters inside models are merged as the formula says, or refused")
    return 0


if __name__ == "__main__":
    run_main(main)
