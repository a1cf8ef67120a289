"""Makes torchtune/lora/: an output folder that torchtune's own FullModelHFCheckpointer wrote, with a model in two files, the merged
weights of LoRA, the adapter and the state of the recipe; and expected.safetensors with the weights.

Only the checkpointer runs. What torchtune imports besides, of other packages, is replaced with empty modules.

    pip download --no-deps torchtune==0.2.1; unzip torchtune-0.2.1-*.whl -d WHEEL; PYTHONPATH=WHEEL python tests/corpus/make_torchtune.py
"""
import importlib.abc
import importlib.machinery
import importlib.metadata
import json
import pathlib
import shutil
import sys
import tempfile
from unittest import mock

OUT = pathlib.Path(__file__).parent / "torchtune"
UNUSED = ("torchao", "datasets", "omegaconf", "sentencepiece", "tiktoken", "blobfile", "PIL", "torchvision")
HIDDEN, HEADS, ROWS, INNER = 8, 2, 6, 4


class Empty(mock.MagicMock):
    __path__ = []
    __file__ = ""


class Unused(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname, path, target=None):
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if fullname.split(".")[0] in UNUSED else None

    def create_module(self, spec):
        return Empty(name=spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, Unused())
real_version = importlib.metadata.version
importlib.metadata.version = lambda name: "2024.8.1" if name.startswith("torchao") else real_version(name)

import torch
from safetensors.torch import save_file
from torchtune.utils import FullModelHFCheckpointer


def hub_files():
    """The model of the Hub that the training begins with."""
    torch.manual_seed(5)
    r = lambda *shape: torch.randn(shape).to(torch.bfloat16)
    layer = "model.layers.0."
    first = {"model.embed_tokens.weight": r(ROWS, HIDDEN), **{layer + f"self_attn.{p}_proj.weight": r(HIDDEN, HIDDEN) for p in "qkvo"}}
    second = {layer + "mlp.gate_proj.weight": r(INNER, HIDDEN), layer + "mlp.up_proj.weight": r(INNER, HIDDEN),
              layer + "mlp.down_proj.weight": r(HIDDEN, INNER), layer + "input_layernorm.weight": r(HIDDEN),
              layer + "post_attention_layernorm.weight": r(HIDDEN), "model.norm.weight": r(HIDDEN), "lm_head.weight": r(ROWS, HIDDEN)}
    return {f"pytorch_model-0000{i}-of-00002.bin": tensors for i, tensors in ((1, first), (2, second))}


def main():
    shutil.rmtree(OUT, ignore_errors=True)
    out = OUT / "lora"
    out.mkdir(parents=True)
    files = hub_files()
    with tempfile.TemporaryDirectory() as hub:
        for name, tensors in files.items():
            torch.save(tensors, pathlib.Path(hub, name))
        config = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS, "hidden_size": HIDDEN}
        pathlib.Path(hub, "config.json").write_text(json.dumps(config))
        checkpointer = FullModelHFCheckpointer(hub, list(files), "LLAMA2", str(out))
        state = checkpointer.load_checkpoint()
        state["model"] = {name: 2 * t for name, t in state["model"].items()}
        adapter = {"layers.0.attn.q_proj.lora_a.weight": torch.ones(2, HIDDEN), "layers.0.attn.q_proj.lora_b.weight": torch.ones(HIDDEN, 2)}
        state.update(adapter=adapter, adapter_config={"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}, epochs_run=1, seed=5)
        checkpointer.save_checkpoint(state, epoch=0, intermediate_checkpoint=True)
    save_file({name: 2 * t for tensors in files.values() for name, t in tensors.items()}, str(OUT / "expected.safetensors"))
    (OUT / "expected.safetensors").chmod(0o644)


main()
