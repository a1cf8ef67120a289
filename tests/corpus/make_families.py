#!/usr/bin/env python3
"""Makes more of tests/corpus/recipes: families of models that torchtitan and Megatron-Bridge convert.

usage: make_families.py OUT [CASE...]

Folders are those of make_recipes.py, which has what is used here. What made them: the adapters of torchtitan 0.3.0, and the
mappings of megatron-bridge 0.3.1 with megatron-core 0.16.1; the models are those of transformers 5.23.0. Kernels that need a GPU
(flash-linear-attention) are not needed to convert.
"""
import importlib
import os
import re
import socket
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
    cls = getattr(transformers, name)
    made = cls(cls.config_class(**{k: v for k, v in config.items() if k != "model_type"})).bfloat16()
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
    like = hub_model(name + "ForConditionalGeneration", {"text_config": dict(t), "vision_config": dict(VISION)}, memory=True)
    assert {k: v.shape for k, v in like.items()} == {k: v.shape for k, v in hf.items()}
    write(folder, state, hf, {"architectures": [name + "ForConditionalGeneration"], "model_type": name.lower().replace(
        "moe", "_moe"), "text_config": t, "vision_config": VISION, "tie_word_embeddings": False})


def titan_kimi(folder, vision):
    """Kimi K2.5, which is DeepSeek-V3 with a vision encoder; without one it is Kimi K2."""
    from torchtitan.models import kimi_k2_7
    from torchtitan.models.common import ComplexRoPE
    rope = ComplexRoPE.Config(dim=4, max_seq_len=64, theta=10000.0)
    layers = kimi_k2_7._build_kimi_layers(
        n_layers=2, n_dense_layers=1, dim=16, n_heads=4, q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4,
        v_head_dim=4, mscale=0.7, dense_hidden_dim=24, moe_hidden_dim=12, num_experts=4, num_shared_experts=1, router_top_k=2,
        router_score_func="sigmoid", attn_backend="flex", moe_comm_backend="standard", non_blocking_capacity_factor=None, rope=rope)
    encoder = kimi_k2_7._vision_encoder_config(dim=8, ffn_dim=12, num_layers=1, num_heads=2, patch_size=2, init_pos_emb_height=2,
                                               init_pos_emb_width=2, text_hidden_size=16) if vision else None
    config = make_recipes.titan_model(kimi_k2_7.KimiK25Model.Config, layers, rope, False, vision_encoder=encoder)
    state, hf = make_recipes.titan_pair(kimi_k2_7.KimiK25StateDictAdapter, config)
    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "vocab_size": 32}
    write(folder, state, hf, {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": {
        **sizes, "model_type": "kimi_k2"}, "vision_config": {"patch_size": 2}} if vision else {
            "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", **sizes})


ATTENTION = ["self_attention.linear_qkv.layer_norm_weight", "self_attention.linear_qkv.weight", "self_attention.linear_proj.weight"]
LATENT = ["input_layernorm.weight", *["self_attention.linear_%s.weight" % n for n in (
    "q_down_proj", "q_up_proj", "kv_down_proj", "kv_up_proj", "proj")],
          "self_attention.linear_q_up_proj.layer_norm_weight", "self_attention.linear_kv_up_proj.layer_norm_weight"]
HEAD_NORMS = ["self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight"]
DENSE = ["mlp.linear_fc1.layer_norm_weight", "mlp.linear_fc1.weight", "mlp.linear_fc2.weight"]
ROUTED = ["pre_mlp_layernorm.weight", "mlp.router.weight", *["mlp.experts.linear_fc%d.weight%d" % (f, e)
                                                            for f in (1, 2) for e in range(4)]]
SHARED = ["mlp.shared_experts.linear_fc1.weight", "mlp.shared_experts.linear_fc2.weight"]
POST = ["self_attention.linear_proj.post_layernorm.weight", "mlp.linear_fc2.post_layernorm.weight"]  # Gemma
ENDS = ["embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "output_layer.weight"]


def layers(*kinds, prefix="decoder.layers."):
    """The names that a model of Megatron-Core with Transformer Engine has in its layers."""
    return [f"{prefix}{n}.{name}" for n, kind in enumerate(kinds) for name in kind]


class Module(torch.nn.Module):
    """Stands for a module of one rank, which mappings ask for its device and its sizes."""
    tensor_model_parallel = False

    def __init__(self, sizes):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(0))
        self.config = type("Sizes", (), sizes)


def bridge(folder, where, model, sizes, names, published=None, repeated=None):
    """What Megatron-Bridge makes of a model for the parameters of Megatron-Core that are called `names`."""
    package, name = where
    if not any(isinstance(f, make_recipes.Stubs) for f in sys.meta_path):
        sys.meta_path.insert(0, make_recipes.Stubs())
    made = getattr(importlib.import_module("megatron.bridge.models." + package), name)()
    made._hf_config = made.hf_config = type("Config", (), sizes)
    hf = distinct(published or hub_model(model, sizes))
    registry, text = made.mapping_registry(), sizes.get("text_config", sizes)
    module = Module({**text, "kv_channels": text["head_dim"], "num_query_groups": text["num_key_value_heads"]})
    state, used = {}, set()
    for at in names:
        mapping = registry.megatron_to_hf_lookup(at)
        if hasattr(made, "maybe_modify_loaded_hf_weight"):
            given = made.maybe_modify_loaded_hf_weight(mapping.hf_param, hf)
        else:
            given = {k: hf[v] for k, v in mapping.hf_param.items()} if isinstance(mapping.hf_param, dict) else hf[mapping.hf_param]
        used.update(mapping.hf_param.values() if isinstance(mapping.hf_param, dict) else [mapping.hf_param])
        state[at] = mapping.hf_to_megatron(given, module)
        if ".experts." not in at:
            back = mapping.megatron_to_hf(state[at], module)
            assert all(torch.equal(v, hf[k]) for k, v in back.items()), at
    assert used == set(hf), set(hf) - used
    hf.update({new: hf[old] for new, old in (repeated or {}).items()})
    write(folder, state, hf, {"architectures": [model], **sizes})


def distributed(folder, **arguments):
    """Saves the same as torch_dist: a GPTModel of Megatron-Core without Transformer Engine, on one rank."""
    import make_megatron_models
    import make_megatron_ranks
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(s.getsockname()[1]))
    torch.distributed.init_process_group("gloo")
    make_megatron_ranks.pretend_gpu()
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer import TransformerConfig
    parallel_state.initialize_model_parallel()
    config = TransformerConfig(
        num_layers=SMALL["num_hidden_layers"], hidden_size=SMALL["hidden_size"], num_attention_heads=SMALL["num_attention_heads"],
        num_query_groups=SMALL["num_key_value_heads"], kv_channels=SMALL["head_dim"], use_cpu_initialization=True,
        params_dtype=torch.bfloat16, bf16=True, **arguments)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=config.normalization)
    model = GPTModel(config, spec, 32, 8, position_embedding_type="rope", share_embeddings_and_output_weights=False).bfloat16()
    state, used = load_file(os.path.join(folder, "from.safetensors")), set()
    for name, param in model.named_parameters():
        for local, engine in make_megatron_models.ENGINE:
            name = re.sub(local, engine, name)
        if "num_moe_experts" not in arguments:
            name = name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
        param.data.copy_(state[name])
        used.add(name)
    assert used == set(state), set(state) - used
    os.makedirs(os.path.join(folder, "torch_dist"), exist_ok=True)
    dist_checkpointing.save(model.sharded_state_dict(metadata={"non_homogeneous_layers": False}),
                            os.path.join(folder, "torch_dist"))
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def gpt_oss(folder):
    sizes = {**make_recipes.EXPERTS, "model_type": "gpt_oss", "intermediate_size": 12}
    kind = [*ATTENTION, "self_attention.linear_qkv.bias", "self_attention.linear_proj.bias", *ROUTED, "mlp.router.bias",
            "self_attention.core_attention.softmax_offset", *[n.replace("weight", "bias") for n in ROUTED if ".experts." in n]]
    bridge(folder, ("gpt_oss.gpt_oss_bridge", "GPTOSSBridge"), "GptOssForCausalLM", sizes, [*ENDS, *layers(kind, kind)])
    distributed(folder, ffn_hidden_size=12, moe_ffn_hidden_size=12, num_moe_experts=4, moe_router_topk=2, normalization="RMSNorm",
                moe_router_load_balancing_type="none", moe_token_dispatcher_type="allgather", softmax_type="learnable",
                gated_linear_unit=True, activation_func=torch.nn.functional.silu, add_qkv_bias=True)


def nemotron(folder):
    sizes = {**SMALL, "model_type": "nemotron"}
    kind = [*ATTENTION, *DENSE, "self_attention.linear_qkv.layer_norm_bias", "mlp.linear_fc1.layer_norm_bias"]
    bridge(folder, ("nemotron.nemotron_bridge", "NemotronBridge"), "NemotronForCausalLM", sizes,
           [*ENDS, "decoder.final_layernorm.bias", *layers(kind, kind)])
    distributed(folder, ffn_hidden_size=SMALL["intermediate_size"], add_bias_linear=False)


def glm(folder, use_qk_norm):
    """GLM-4.5, whose last layer on the hub is for multi-token prediction, and repeats the embedding and the head."""
    sizes = {**SMALL, **make_recipes.EXPERTS, "model_type": "glm4_moe", "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1,
             "topk_group": 1, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1, "attention_bias": True,
             "use_qk_norm": use_qk_norm}
    extra = {"enorm.weight": (16,), "hnorm.weight": (16,), "eh_proj.weight": (16, 32), "shared_head.norm.weight": (16,)}
    hub = hub_model("Glm4MoeForCausalLM", {**sizes, "num_hidden_layers": 3})
    attention = [*ATTENTION, "self_attention.linear_qkv.bias", *(HEAD_NORMS if use_qk_norm else [])]
    sparse = [*attention, *ROUTED, "mlp.router.expert_bias", *SHARED]
    names = [*ENDS, *layers([*attention, *DENSE], sparse), *layers(
        ["enorm.weight", "hnorm.weight", "eh_proj.weight", "final_layernorm.weight"], prefix="mtp.layers."), *layers(
            ["transformer_layer." + name for name in sparse], prefix="mtp.layers.")]
    bridge(folder, ("glm.glm45_bridge", "GLM45Bridge"), "Glm4MoeForCausalLM", sizes, names,
           {**hub, **{"model.layers.2." + k: torch.empty(v) for k, v in extra.items()}},
           {"model.layers.2.embed_tokens.weight": "model.embed_tokens.weight",
            "model.layers.2.shared_head.head.weight": "lm_head.weight"})


def qwen_vl(folder, where, name, model_type, vision, prefix, kind, **more):
    """Megatron-Bridge trains the vision encoder of transformers, under another prefix."""
    text = {**SMALL, "rope_scaling": {"type": "default", "mrope_section": [1, 1, 2]}, **more}
    sizes = {"model_type": model_type, "text_config": text, "vision_config": vision, "tie_word_embeddings": False}
    hub = hub_model(name + "ForConditionalGeneration", sizes)
    hub = {k: v.transpose(1, 2) if ".mlp.experts." in k else v for k, v in hub.items()}  # as Qwen3-VL was published
    names = ["language_model." + n for n in [*ENDS, *layers(kind, kind)]]
    names += [prefix + k.partition("visual.")[2] for k in hub if "visual." in k]
    bridge(folder, where, name + "ForConditionalGeneration", sizes, names, hub)


SMALL = {**make_recipes.SMALL, "vocab_size": 32}
CASES = {
    "torchtitan-qwen3-5": lambda f: titan_qwen35(f, False),
    "torchtitan-qwen3-5-moe": lambda f: titan_qwen35(f, True),
    "torchtitan-kimi-k2": lambda f: titan_kimi(f, False),
    "torchtitan-kimi-k2-5": lambda f: titan_kimi(f, True),
    "megatron-kimi-k2": lambda f: bridge(
        f, ("deepseek.deepseek_v3_bridge", "DeepSeekV3Bridge"), "DeepseekV3ForCausalLM",
        {**make_recipes.EXPERTS, **make_recipes.MLA, "model_type": "kimi_k2", "n_group": 1, "head_dim": 4, "num_nextn_predict_layers": 0},
        [*ENDS, *layers([*LATENT, *DENSE], [*LATENT, *ROUTED, "mlp.router.expert_bias", *SHARED])]),
    "megatron-glm4-5-air": lambda f: glm(f, use_qk_norm=False),
    "megatron-gpt-oss": gpt_oss,
    "megatron-gemma3": lambda f: bridge(
        f, ("gemma.gemma3_bridge", "Gemma3ModelBridge"), "Gemma3ForCausalLM",
        {**SMALL, "model_type": "gemma3_text", "query_pre_attn_scalar": 8, "tie_word_embeddings": True},
        [*ENDS[:2], *layers(*2 * [[*ATTENTION, *HEAD_NORMS, *DENSE, *POST]])]),
    "megatron-gemma2": lambda f: bridge(
        f, ("gemma.gemma2_bridge", "Gemma2Bridge"), "Gemma2ForCausalLM",
        {**SMALL, "model_type": "gemma2", "query_pre_attn_scalar": 8, "tie_word_embeddings": True},
        [*ENDS[:2], *layers(*2 * [[*ATTENTION, *DENSE, *POST]])]),
    "megatron-nemotron": nemotron,
    "megatron-qwen2-5-vl": lambda f: qwen_vl(
        f, ("qwen_vl.qwen25_vl_bridge", "Qwen25VLBridge"), "Qwen2_5_VL", "qwen2_5_vl",
        {"depth": 1, "hidden_size": 8, "intermediate_size": 12, "num_heads": 2, "patch_size": 2, "temporal_patch_size": 2,
         "spatial_merge_size": 2, "out_hidden_size": 16, "in_channels": 3}, "visual.",
        [*ATTENTION, "self_attention.linear_qkv.bias", *DENSE], head_dim=4),
    "megatron-qwen3-vl": lambda f: qwen_vl(
        f, ("qwen_vl.qwen3_vl_bridge", "Qwen3VLBridge"), "Qwen3VL", "qwen3_vl", {**VISION, "deepstack_visual_indexes": [0]},
        "vision_model.", [*ATTENTION, *HEAD_NORMS, *DENSE]),
    "megatron-qwen3-vl-moe": lambda f: qwen_vl(
        f, ("qwen_vl.qwen3_vl_bridge", "Qwen3VLMoEBridge"), "Qwen3VLMoe", "qwen3_vl_moe", {**VISION, "deepstack_visual_indexes": [0]},
        "vision_model.", [*ATTENTION, *HEAD_NORMS, *ROUTED], **make_recipes.EXPERTS),
    "transformers-glm4-moe": lambda f: make_recipes.fused_experts(f, "Glm4Moe", {
        **make_recipes.EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1, "use_qk_norm": True, "attention_bias": True}),
    "transformers-minimax-m2": lambda f: make_recipes.fused_experts(f, "MiniMaxM2", {
        k: v for k, v in make_recipes.EXPERTS.items() if k != "num_experts"}),
    "transformers-qwen3-next": lambda f: make_recipes.fused_experts(f, "Qwen3Next", DELTA_MOE),
}

if __name__ == "__main__":
    for case in sys.argv[2:] or CASES:
        CASES[case](os.path.join(sys.argv[1], case))
        print(case)
