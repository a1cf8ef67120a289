#!/usr/bin/env python3
"""Tiny models of each family of transformers, trained for one step with FSDP2 on two ranks and exported like a directory that save_pretrained
wrote, then like its configuration alone. from_pretrained of the results gives the logits of the trained model.

usage: export_transformers.py FSDPCKPT       exit 77 without torch and transformers
"""
import os
import sys
import tempfile

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", HF_HUB_DISABLE_PROGRESS_BARS="1")
try:
    import transformers
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.fsdp import fully_shard
except ImportError as e:
    print("skipped: %s" % e)
    sys.exit(77)

import gloo
from checks import must, must_run

SIZES = {"vocab_size": 160, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 1}
FAMILIES = {  # class, configuration, most bytes in one file of the reference
    "Llama": (dict(SIZES, tie_word_embeddings=False), "40KB"),
    "Qwen2": (dict(SIZES, tie_word_embeddings=True), "5GB"),
    "Qwen3": (dict(SIZES, head_dim=8), "5GB"),
    "Gemma": (dict(SIZES, head_dim=8), "20KB"),
    "GPT2": ({"vocab_size": 160, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 0,
              "eos_token_id": 1}, "5GB"),
}
MOE = dict(SIZES, moe_intermediate_size=24, num_experts_per_tok=2)
FAMILIES.update({
    "Qwen3Moe": (dict(MOE, head_dim=8, num_experts=4), "20KB"),
    "Mixtral": (dict(SIZES, num_local_experts=4, num_experts_per_tok=2), "5GB"),
    "DeepseekV3": (dict(MOE, n_routed_experts=4, n_shared_experts=1, n_group=2, topk_group=1, first_k_dense_replace=1, q_lora_rank=16,
                        kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, num_key_value_heads=4), "5GB"),
    "GptOss": (dict(SIZES, head_dim=8, num_local_experts=4, num_experts_per_tok=2), "5GB"),
})
IDS = torch.arange(32).reshape(2, 16) % 160


def make(family, dtype):
    config = getattr(transformers, family + "Config")(**FAMILIES[family][0])
    torch.manual_seed(5)
    name = "GPT2LMHeadModel" if family == "GPT2" else family + "ForCausalLM"
    return getattr(transformers, name)(config).to(dtype).eval()


def train(rank, world, family, home):
    """Trains and saves a model. Rank 0 writes the reference and returns the trained weights in bfloat16."""
    ref = os.path.join(home, "ref")
    if rank == 0:
        make(family, torch.bfloat16).save_pretrained(ref, max_shard_size=FAMILIES[family][1])
        with open(os.path.join(ref, "tokenizer.json"), "w", encoding="utf-8") as f:
            f.write("{}")
    model = make(family, torch.float32)
    for layer in model.transformer.h if family == "GPT2" else model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(input_ids=IDS, labels=IDS).loss.backward()
    adam.step()
    weights, state = get_state_dict(model, adam)
    dcp.save({"model": weights, "optimizer": state, "step": 1}, checkpoint_id=os.path.join(home, "dcp"))
    whole = lambda t: t.full_tensor() if hasattr(t, "full_tensor") else t  # a buffer
    full = {name: whole(t).bfloat16().float() for name, t in weights.items()}
    return full if rank == 0 else None


def logits(model, weights):
    """The logits of `model` with these weights. One model for all, because the place of weights in memory changes the last bits."""
    model.load_state_dict(weights)
    with torch.no_grad():
        return model(input_ids=IDS).logits


def case(program, family, home):
    trained = gloo.run(2, train, family, home)[0]
    out, ref = os.path.join(home, "out"), os.path.join(home, "ref")
    must_run(program, "export", os.path.join(home, "dcp"), "-o", out, "--like", ref)
    must(sorted(os.listdir(out)) == sorted(os.listdir(ref)), family, os.listdir(out))
    loaded, told = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, output_loading_info=True)
    must(not any(told.values()), family, told)
    model = make(family, torch.float32)
    before = logits(model, model.state_dict())
    want, got = logits(model, trained), logits(model, loaded.state_dict())
    must(torch.equal(got, want), family, "logits differ by", (got - want).abs().max().item())
    must(not torch.equal(before, want), family, "the step changed nothing")
    with torch.no_grad():
        must(torch.allclose(loaded.eval()(input_ids=IDS).logits, want, atol=1e-4), family, "logits of the loaded model")
    without_weights(program, family, home, loaded.state_dict())


def without_weights(program, family, home, want):
    """The same with a reference that has only its configuration and tokenizer."""
    bare, ref = os.path.join(home, "bare"), os.path.join(home, "ref")
    for name in os.listdir(ref):
        if ".safetensors" in name:
            os.remove(os.path.join(ref, name))
    argv = (program, "export", os.path.join(home, "dcp"), "-o", bare, "--like", ref, "--dtype", "bf16", "--max-shard-size",
            FAMILIES[family][1])
    if family == "GPT2":  # nanoGPT's has the same names, and its matrices are transposed
        must("transposed once too often" in must_run(*argv, ok=(2,)).stderr, "a transposed model was written")
        argv += ("--recipe", "none")
    must_run(*argv)
    loaded, told = transformers.AutoModelForCausalLM.from_pretrained(bare, dtype=torch.float32, output_loading_info=True)
    must(not any(told.values()), family, "without weights", told)
    got = loaded.state_dict()
    must(got.keys() == want.keys() and all(torch.equal(got[n], want[n]) for n in want), family, "without weights")


def main():
    torch.set_num_threads(1)
    for family in FAMILIES:
        with tempfile.TemporaryDirectory(prefix="fc-export-") as home:
            case(sys.argv[1], family, home)
    return 0


if __name__ == "__main__":
    sys.exit(main())
