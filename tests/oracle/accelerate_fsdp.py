#!/usr/bin/env python3
"""Folders that accelerate's own FSDP plugin writes: FSDP1 and FSDP2, sharded and full state dicts, of a Llama and a Qwen3 of
transformers after one step. The exported model has the logits of the trained one, and what is resharded resumes in accelerate.

accelerate runs FSDP on GPUs and the like only. The test sets the distributed_type of PartialState to MULTI_XPU, so that the model is
prepared as on these.

usage: accelerate_fsdp.py FSDPCKPT      exit 77 without torch, transformers or accelerate
"""
import os
import pathlib
import sys
import tempfile

try:
    import torch
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)

import gloo
from checks import check, finish, run

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 256, "head_dim": 16}
MODELS = {"llama": (lambda: LlamaForCausalLM(LlamaConfig(**SIZES)), "LlamaDecoderLayer"),
          "qwen3": (lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True)), "Qwen3DecoderLayer")}
WORDS = torch.arange(32).reshape(2, 16)
CASES = [("llama", 1, "SHARDED_STATE_DICT"), ("llama", 2, "SHARDED_STATE_DICT"), ("qwen3", 2, "SHARDED_STATE_DICT"),
         ("llama", 1, "FULL_STATE_DICT"), ("qwen3", 2, "FULL_STATE_DICT")]


def prepare(rank, world, home, name, version, kind):
    """The model and its optimizer as accelerate wraps them."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
                      MASTER_ADDR="localhost", MASTER_PORT="0")
    state = PartialState(cpu=True, backend="gloo")._shared_state
    state.update(distributed_type=DistributedType.MULTI_XPU, device=torch.device("cpu"))
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, state_dict_type=kind,
                                            auto_wrap_policy="transformer_based_wrap",
                                            transformer_cls_names_to_wrap=[MODELS[name][1]],
                                            use_orig_params=True if version == 1 else None)
    plugin.sync_module_states = False
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    assert accelerator.distributed_type == DistributedType.FSDP
    model = AutoModelForCausalLM.from_pretrained(home / "base")
    return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=WORDS).logits


def step(rank, accelerator, model, adam):
    accelerator.backward(model.train()(input_ids=WORDS + rank, labels=WORDS).loss)
    adam.step()
    adam.zero_grad()


def train(rank, world, home, *case):
    accelerator, model, adam = prepare(rank, world, home, *case)
    step(rank, accelerator, model, adam)
    accelerator.save_state(home / "run")
    return logits(model)


def resume(rank, world, home, folder, *case):
    """The logits after a second step from this folder."""
    accelerator, model, adam = prepare(rank, world, home, *case)
    accelerator.load_state(home / folder)
    step(rank, accelerator, model, adam)
    return logits(model)


def compare_heads(program, home):
    """A folder of transformers has a tied head once, the run has it twice. A head of its own is found."""
    run(program, "diff", home / "hub", home / "run", "--model-only")
    r = run(program, "check", home / "hub", "--against", home / "run", "--model-only")
    check("one side ties it to lm_head.weight" in r.stdout, f"tied head: {r}")
    state = load_file(home / "model.safetensors")
    state["lm_head.weight"] = state["lm_head.weight"] + 1
    save_file(state, home / "own.safetensors")
    for sides in (("own.safetensors", "hub"), ("hub", "own.safetensors")):
        r = run(program, "diff", *(home / side for side in sides), ok=1)
        check("lm_head.weight" in r.stdout and "1 differs" in r.stdout, f"own head: {r}")
    config = home / "hub/config.json"
    config.write_text(config.read_text().replace('"tie_word_embeddings": true', '"tie_word_embeddings": false'))
    run(program, "diff", home / "run", home / "hub", "--model-only", ok=1)
    config.write_text(config.read_text().replace('"tie_word_embeddings": false', '"tie_word_embeddings": true'))


def compare(program, home, name, version, kind):
    what = f"{name}, FSDP{version}, {kind}"
    MODELS[name][0]().save_pretrained(home / "base")
    trained = gloo.run(2, train, home, name, version, kind)[0]
    run(program, "check", home / "run", "--against", home / "base", "--model-only")
    run(program, "export", home / "run", "-o", home / "hub", "--like", home / "base")
    run(program, "consolidate", home / "run", "-o", home / "model.safetensors", "--model-only")
    run(program, "diff", home / "run", home / "model.safetensors", "--model-only")
    run(program, "diff", home / "run", home / "hub", "--model-only")
    if name == "qwen3":
        compare_heads(program, home)
    exported = logits(AutoModelForCausalLM.from_pretrained(home / "hub"))
    check(torch.equal(exported, trained), f"{what}: other logits")
    if kind == "SHARDED_STATE_DICT":
        run(program, "reshard", home / "run", "-o", home / "resume", "--to", "accelerate", "--dp", "3")
        for rest in (home / "run").iterdir():
            if rest.is_file():
                (home / "resume" / rest.name).write_bytes(rest.read_bytes())
        own, ours = (gloo.run(2, resume, home, folder, name, version, kind)[0] for folder in ("run", "resume"))
        check(torch.equal(own, ours) and not torch.equal(own, trained), f"{what}: another second step")


def main():
    program = os.path.abspath(sys.argv[1])
    for case in CASES:
        with tempfile.TemporaryDirectory(prefix="fc-accelerate-fsdp-") as folder:
            compare(program, pathlib.Path(folder), *case)
    return finish("accelerate_fsdp")


if __name__ == "__main__":
    sys.exit(main())
