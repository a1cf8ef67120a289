#!/usr/bin/env python3
"""The transcript of docs/COOKBOOK.md: a Llama that FSDP2 trained and dcp.save saved, exported for transformers.

Each command of the page is run on a checkpoint that is made here, and must print what the page shows, except for times. The
exported model has the logits of the trained one. So has that of a Qwen3, whose head is tied.

usage: hub_run.py FSDPCKPT COOKBOOK.md      exit 77 without torch or transformers
"""
import os
import pathlib
import re
import subprocess
import sys
import tempfile

try:
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.fsdp import fully_shard
    from transformers import (AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM)
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)

import gloo
from checks import check, finish

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 256, "head_dim": 16}
WORDS = torch.arange(32).reshape(2, 16)


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=WORDS).logits


def train(rank, _world, home):
    """One step. Returns the logits after it."""
    model = AutoModelForCausalLM.from_pretrained(home / "Llama")
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(input_ids=WORDS + rank, labels=WORDS).loss.backward()
    adam.step()
    weights, moments = get_state_dict(model, adam)
    dcp.save({"model": weights, "optimizer": moments, "step": 1}, checkpoint_id=home / "ckpt")
    return logits(model)


def without_times(text):
    return re.sub(r"[0-9.]+ s, [0-9.]+ .?B/s", "TIME", text)


def main():
    program, page = os.path.abspath(sys.argv[1]), pathlib.Path(sys.argv[2]).read_text(encoding="utf-8")
    shown = re.search(r"^<!-- transcript: .*-->\n```text\n(.*?)^```", page, re.M | re.S).group(1)
    commands = re.findall(r"^\$ (.*)$", shown, re.M)
    check(len(commands) > 3, "the page has no transcript")
    for name, model in (("llama", LlamaForCausalLM(LlamaConfig(**SIZES))),
                        ("qwen3", Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True)))):
        with tempfile.TemporaryDirectory(prefix="fc-hub-") as folder:
            home = pathlib.Path(folder)
            (home / "bin").mkdir()
            (home / "bin/fsdpckpt").symlink_to(program)
            model.save_pretrained(home / "Llama")
            trained = gloo.run(2, train, home)[0]
            env = {**os.environ, "LC_ALL": "C.UTF-8", "PATH": f"{home}/bin{os.pathsep}{os.environ['PATH']}"}
            printed = ""
            for command in commands:
                r = subprocess.run(command, shell=True, cwd=home, env=env, text=True, stdin=subprocess.DEVNULL,
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
                printed += f"$ {command}\n{r.stdout}"
            if name == "llama":
                check(without_times(printed) == without_times(shown), f"the page shows\n{shown}\nbut they print\n{printed}")
            exported = AutoModelForCausalLM.from_pretrained(home / "hub")
            check(torch.equal(logits(exported), trained), f"{name}: other logits\n{printed}")
    return finish("hub_run")


if __name__ == "__main__":
    sys.exit(main())
