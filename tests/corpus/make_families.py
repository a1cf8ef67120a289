#!/usr/bin/env python3
"""Makes more of tests/corpus/recipes: families of models that torchtitan and Megatron-Bridge convert.

usage: make_families.py OUT [CASE...]

Folders are those of make_recipes.py, which has what is used here. What made them: the adapters of torchtitan 0.3.0, and the
mappings of megatron-bridge 0.3.1 with megatron-core 0.16.1; the models are those of transformers 5.23.0. Kernels that need a GPU
(flash-linear-attention) are not needed to convert.
"""
import os
import sys
import tempfile
import unittest.mock

import make_recipes
import torch
from make_recipes import distinct, write
from safetensors.torch import load_file


def hub_model(name, config, memory=False):
    """The names and shapes that transformers stores, or has in memory."""
    import transformers
    made = getattr(transformers, name)(getattr(transformers, config.pop("class"))(**config)).bfloat16()
    if memory:
        return made.state_dict()
    with tempfile.TemporaryDirectory() as tmp:
        made.save_pretrained(tmp)
        return load_file(os.path.join(tmp, "model.safetensors"))


VISION = {"depth": 1, "hidden_size": 8, "intermediate_size": 12, "num_heads": 2, "patch_size": 2, "temporal_patch_size": 2,
          "spatial_merge_size": 2, "out_hidden_size": 16, "num_position_embeddings": 4, "in_channels": 3}
DELTA = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "head_dim": 8,
         "intermediate_size": 24, "vocab_size": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
         "linear_key_head_dim": 4, "linear_value_head_dim": 6, "linear_conv_kernel_dim": 4, "full_attention_interval": 2}
DELTA_MOE = {**DELTA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
             "shared_expert_intermediate_size": 20}


def without_kernels():
    for name in ("fla", "fla.modules", "fla.modules.conv", "fla.modules.conv.causal_conv1d", "fla.modules.conv.triton",
                 "fla.modules.conv.triton.ops", "fla.ops", "fla.ops.gated_delta_rule", "fla.ops.gated_delta_rule.chunk",
                 "fla.ops.gated_delta_rule.fused_recurrent"):
        sys.modules.setdefault(name, unittest.mock.MagicMock())


def titan_qwen35(folder, moe):
    """torchtitan 0.3.0 exchanges the last dimensions of the fused experts, unlike the models of transformers and the hub."""
    without_kernels()
    from torchtitan.models import qwen3_5
    t = DELTA_MOE if moe else DELTA
    size = {"n_layers": t["num_hidden_layers"], "dim": t["hidden_size"], "n_heads": t["num_attention_heads"],
            "n_kv_heads": t["num_key_value_heads"], "head_dim": t["head_dim"], "rotary_dim": 8, "attn_backend": "flex",
            "rope": qwen3_5.MRoPE.Config(dim=8, max_seq_len=64, theta=1e7, mrope_section=[2, 1, 1]),
            "n_key_heads": t["linear_num_key_heads"], "n_value_heads": t["linear_num_value_heads"],
            "key_head_dim": t["linear_key_head_dim"], "value_head_dim": t["linear_value_head_dim"],
            "full_attention_interval": t["full_attention_interval"]}
    layers = (qwen3_5._build_qwen35_moe_layers(moe_hidden_dim=12, num_experts=4, top_k=2, shared_expert_hidden_dim=20, **size)
              if moe else qwen3_5._build_qwen35_layers(hidden_dim=t["intermediate_size"], **size))
    vision = qwen3_5._qwen35_vision_encoder_config(
        dim=8, ffn_dim=12, num_layers=1, num_heads=2, patch_size=2, temporal_patch_size=2, spatial_merge_size=2,
        out_hidden_size=16, num_position_embeddings=4)
    config = make_recipes.titan_model(qwen3_5.Qwen35Model.Config, layers, size["rope"], False, vision_encoder=vision)
    state, hf = make_recipes.titan_pair(qwen3_5.Qwen35StateDictAdapter, config)
    hf = {k: v.transpose(1, 2) if ".mlp.experts." in k else v for k, v in hf.items()}
    name = "Qwen3_5Moe" if moe else "Qwen3_5"
    like = hub_model(name + "ForConditionalGeneration", {"class": name + "Config", "text_config": dict(t),
                                                         "vision_config": dict(VISION)}, memory=True)
    assert {k: v.shape for k, v in like.items()} == {k: v.shape for k, v in hf.items()}
    write(folder, state, hf, {"architectures": [name + "ForConditionalGeneration"], "model_type": name.lower().replace(
        "moe", "_moe"), "text_config": t, "vision_config": VISION, "tie_word_embeddings": False})


CASES = {
    "torchtitan-qwen3-5": lambda f: titan_qwen35(f, False),
    "torchtitan-qwen3-5-moe": lambda f: titan_qwen35(f, True),
}

if __name__ == "__main__":
    for case in sys.argv[2:] or CASES:
        CASES[case](os.path.join(sys.argv[1], case))
        print(case)
