#!/usr/bin/env python3
"""Small models under torchtitan's names, sharded and exported: vLLM loads the directory, and its log probabilities are those of
Transformers for the original model.

usage: export_vllm.py FSDPCKPT [FAMILY HOME]       exit 77 without torch, transformers and a vLLM that runs on this machine's processor
"""
import os
import subprocess
import sys
import tempfile

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1",
                  VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR")
try:
    import torch
    import transformers
    import vllm
    from vllm.platforms import current_platform
except ImportError as e:
    print("skipped: %s" % e)
    sys.exit(77)

from checks import must, must_run

SIZES = {"vocab_size": 160, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 2,
         "num_key_value_heads": 1, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 1, "initializer_range": 0.3}
MOE = {"head_dim": 64, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
FAMILIES = {"Llama": ({}, "torchtitan-llama3"), "Qwen3": ({"head_dim": 64}, "torchtitan-qwen3"),
            "Qwen3Moe": (MOE, "torchtitan-qwen3")}
IDS = [(i * 37 + 5) % 160 for i in range(24)]


def reference(family, root):
    """Writes a model, and returns the log probabilities of each next token."""
    torch.manual_seed(1)
    config = getattr(transformers, family + "Config")(**SIZES, **FAMILIES[family][0], tie_word_embeddings=False)
    model = getattr(transformers, family + "ForCausalLM")(config).eval()
    model.save_pretrained(root)
    with torch.no_grad():
        return model(torch.tensor([IDS])).logits[0].log_softmax(-1)


def case(program, family, home):
    ref, titan, shards, out = (os.path.join(home, n) for n in ("ref", "titan.pt", "dcp", "out"))
    want = reference(family, ref)
    must_run(program, "consolidate", ref, "-o", titan, "--recipe", FAMILIES[family][1], "--reverse")
    must_run(program, "reshard", titan, "-o", shards, "--to", "dcp", "--dp", "2")
    must_run(program, "export", shards, "-o", out, "--like", ref)
    engine = vllm.LLM(model=out, skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=64, block_size=32,
                      max_logprobs=160)
    how = vllm.SamplingParams(max_tokens=1, prompt_logprobs=160, detokenize=False)
    rows = engine.generate([{"prompt_token_ids": IDS}], how, use_tqdm=False)[0].prompt_logprobs
    must(len(rows) == len(IDS) and all(len(row) == 160 for row in rows[1:]), family, "log probabilities are missing")
    off = max(abs(p.logprob - want[i, token].item()) for i, row in enumerate(rows[1:]) for token, p in row.items())
    must(off < 1e-3 and want.std() > 1, family, "log probabilities differ by", off)
    print(family, "log probabilities differ by at most", off)


def main():
    if not current_platform.is_cpu():
        print("skipped: this vLLM does not run on processors")
        return 77
    if len(sys.argv) > 2:
        case(*sys.argv[1:])
        return 0
    for family in FAMILIES:  # an engine keeps its memory until its process ends
        with tempfile.TemporaryDirectory(prefix="fc-export-") as home:
            subprocess.run([sys.executable, __file__, sys.argv[1], family, home], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
