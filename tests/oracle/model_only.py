"""--model-only takes exactly the state dict of a Hugging Face model out of every form in which people save it."""
import functools
import json
import os
import pathlib
import sys
import tempfile

try:
    import torch
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file, save_file
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)

import checks
from checks import check, finish

PROGRAM = os.path.abspath(sys.argv[1])
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 96, "head_dim": 8}
MODELS = {"llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
          "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True))}
run = functools.partial(checks.run, PROGRAM)


class App:
    """A stateful object, as torchtitan gives to dcp.save."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        return {"model": self.model.state_dict(), "optim": self.optimizer.state_dict()}

    def load_state_dict(self, state):
        raise NotImplementedError


def trained(make):
    torch.manual_seed(7)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(input_ids=torch.arange(8).reshape(1, 8), labels=torch.arange(8).reshape(1, 8)).loss.backward()
    optimizer.step()
    return model, optimizer


def under(prefix, state):
    return {prefix + name: tensor for name, tensor in state.items()}


def forms(home, model, optimizer):
    """Yields (path, what besides the optimizer is left out)."""
    state, optim = model.state_dict(), optimizer.state_dict()
    scheduler = {"last_epoch": 1, "_step_count": 2}

    def pt(name, value):
        torch.save(value, home / f"{name}.pt")
        return home / f"{name}.pt"

    def saved(name, value):
        dcp.save(value, checkpoint_id=str(home / name))
        return home / name

    yield pt("plain", state), ""
    yield pt("nested", {"model": state, "optimizer": optim, "scheduler": scheduler, "step": 3}), "scheduler, step"
    yield pt("lightning", {"state_dict": under("model.", state), "optimizer_states": [optim], "epoch": 1,
                           "global_step": 2, "lr_schedulers": [scheduler]}), "epoch, global_step, lr_schedulers"
    yield pt("ddp", {"model": under("module.", state), "optimizer": optim}), ""
    yield pt("compiled", {"model_state_dict": under("_orig_mod.", state), "optimizer_state_dict": optim}), ""
    yield pt("ddp_compiled", {"state_dict": under("module._orig_mod.", state)}), ""
    yield pt("fsdp1", {"model": under("_fsdp_wrapped_module.", state), "optim": optim}), ""
    yield saved("dcp_plain", state), ""
    yield saved("dcp_nested", {"model": state, "optim": optim, "step": torch.tensor(3)}), "step"
    yield saved("dcp_app", {"app": App(model, optimizer)}), ""
    model.save_pretrained(home / "hub")
    yield home / "hub", ""


def compare(name, made, expected):
    check(made.keys() == expected.keys(), f"{name}: {sorted(made.keys() ^ expected.keys())}")
    for key in made.keys() & expected.keys():
        check(made[key].dtype == expected[key].dtype and torch.equal(made[key], expected[key]), f"{name}: {key}")


def one_form(name, path, besides, expected, reference, home):
    hub = path.name == "hub"
    if hub:  # ties are stored once
        expected = load_file(path / "model.safetensors")
    out = home / f"{path.stem}.out.safetensors"
    done = run("consolidate", path, "-o", out, "--model-only")
    compare(f"{name}: {path.name}", load_file(out), expected)
    notes = [line for line in done.stderr.splitlines() if "--model-only left out" in line]
    check([line.split("optimizer: ")[1] for line in notes] == ([besides] if besides else []), f"{name}: {path.name}: {notes}")
    listed = json.loads(run("inspect", path, "--model-only", "--json").stdout)
    check({tensor["name"] for tensor in listed["tensors"]} == set(expected), f"{name}: inspect {path.name}")
    if not hub:
        run("diff", path, reference, "--model-only", "-q")
        run("diff", reference, path, "--model-only", "-q")
        run("check", path, "--against", reference, "--model-only")
        run("check", reference, "--against", path, "--model-only")
    run("extract", path, "model.norm.weight", "--model-only", "--to", "npy", "-o", home / f"{path.stem}.npy", "--force")


def one_model(name, make, home):
    model, optimizer = trained(make)
    expected = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    reference = home / "reference.safetensors"
    save_file(expected, reference)
    for path, besides in forms(home, model, optimizer):
        one_form(name, path, besides, expected, reference, home)
    # A head next to the trunk, as h5py or a nested state dict has it, is part of the model.
    torch.save({"model": {"norm": torch.ones(2)}, "lm_head": {"weight": torch.ones(3)}}, home / "tree.pt")
    run("consolidate", home / "tree.pt", "-o", home / "tree.safetensors", "--model-only")
    check(sorted(load_file(home / "tree.safetensors")) == ["lm_head.weight", "model.norm"], "a head next to its trunk")
    # The layout stays, and so does the error of a checkpoint without a model.
    run("reshard", home / "nested.pt", "-o", home / "ranks", "--dp", 2, "--model-only", "--to", "dcp")
    run("convert", home / "ranks", "-o", home / "ranks_h5", "--model-only", "--to", "h5")
    torch.save({"optimizer": optimizer.state_dict()}, home / "only_optim.pt")
    check("it has no model" in run("inspect", home / "only_optim.pt", "--model-only", ok=2).stderr, "no model")


def globs(home):
    """A glob that matches nothing is named, with the nearest name, and a note lists what a selection leaves out."""
    nested = home / "nested.pt"
    text = run("consolidate", nested, "-o", home / "g1.h5", "--include", "model.model.layer.*", ok=2).stderr
    check("'model.model.layer.*'" in text and "nearest is 'model.model.layers." in text, text)
    text = run("consolidate", nested, "-o", home / "g2.h5", "--exclude", "optim.*").stderr
    check("the glob 'optim.*' to exclude matches none" in text and "optimizer." in text, text)
    text = run("consolidate", nested, "-o", home / "g3.h5", "--include", "model.model.*").stderr
    check("left out, besides the optimizer: scheduler, step, model.lm_head" in text, text)
    text = run("diff", nested, nested, "--exclude", "optim.*").stderr
    check("the glob 'optim.*' to exclude matches none" in text, text)
    text = run("diff", nested, nested, "--include", "modle.*", ok=2).stderr
    check("the glob 'modle.*' to include matches none" in text, text)
    text = run("check", nested, "--exclude", "optim.*").stderr
    check("the glob 'optim.*' to exclude matches none" in text, text)


def main():
    for name, make in MODELS.items():
        with tempfile.TemporaryDirectory() as home:
            one_model(name, make, pathlib.Path(home))
            if name == "llama":
                globs(pathlib.Path(home))
    return finish("model_only")


if __name__ == "__main__":
    sys.exit(main())
