#!/usr/bin/env python3
"""Makes recipes/megatron-dist-<case>: models that mbridge loaded into real GPTModels, saved by real megatron-core.

    make_megatron_models.py CORPUS [CASE...]     a Python with torch, transformers, megatron-core, mbridge and einops

Each case begins with a small model of transformers in which the elements differ. On gloo ranks with tensor, pipeline and
expert parallelism, mbridge's functions name the tensors of each parameter of a GPTModel, merge them (q, k and v, gate and
up, padding of the vocabulary) and cut them for the rank. `torch_dist` is what dist_checkpointing.save then writes, with the
state of the distributed optimizer where the case says so; `ranks` has one file per model-parallel rank. to.safetensors is
the model of transformers, from.safetensors has the merged tensors, and optimizer.json the digests of the optimizer's state as
torch's DCP reader loads it. Made with megatron-core 0.16.1, mbridge 0.15.1, transformers 5.23.0, torch 2.15.0.
"""
import hashlib
import importlib
import json
import os
import re
import shutil
import socket
import sys
import tempfile

import make_megatron_ranks as ranks
import make_recipes
import torch
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file

SMALL = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "head_dim": 8,
         "intermediate_size": 24, "vocab_size": 30, "padded_vocab_size": 32, "tie_word_embeddings": False}
EXPERTS = {**SMALL, "moe_intermediate_size": 8, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
MIXTRAL = {**EXPERTS, "head_dim": 4, "intermediate_size": 8}
SHARED = {**EXPERTS, "head_dim": 4, "shared_expert_intermediate_size": 12}
DEEPSEEK = {**EXPERTS, "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4,
            "qk_rope_head_dim": 4, "v_head_dim": 4, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1,
            "topk_group": 1, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1, "head_dim": 4}
GLM = {**EXPERTS, "model_type": "glm4_moe", "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
       "first_k_dense_replace": 1, "num_nextn_predict_layers": 1, "attention_bias": True, "use_qk_norm": True}
# "metadata" goes to sharded_state_dict; Megatron's training sets it from its options.
CASES = {
    "llama": dict(model="Llama", bridge=("llama", "LLaMABridge"), sizes={**SMALL, "head_dim": 4}, tp=2, pp=2,
                  distributed=True, metadata={"distrib_optim_sharding_type": "fully_reshardable"}),
    # The folders and names of NeMo 2, whose MegatronCheckpointIO calls dist_checkpointing.save.
    "nemo": dict(model="Llama", bridge=("llama", "LLaMABridge"), sizes={**SMALL, "head_dim": 4}, tp=2, nemo=True,
                 metadata={}),
    "qwen3-moe": dict(model="Qwen3Moe", bridge=("qwen3moe", "Qwen3MoEBridge"), sizes=EXPERTS, tp=2, ep=2, dp=2,
                      experts=4, qk_norm=True, metadata={}),
    "qwen2-moe": dict(model="Qwen2Moe", bridge=("qwen2moe", "Qwen2MoEBridge"), sizes=SHARED, ep=2, dp=2, pp=2, experts=4,
                      shared=12, qkv_bias=True, metadata={}),
    "mixtral": dict(model="Mixtral", bridge=("mixtral", "MixtralBridge"), sizes=MIXTRAL, ep=2, dp=2, experts=4,
                    grouped=True, metadata={}),
    "mixtral-single": dict(model="Mixtral", bridge=("mixtral", "MixtralBridge"), sizes=MIXTRAL, pp=2, experts=4,
                           distributed=True, metadata={"singleton_local_shards": True,
                                                       "distrib_optim_sharding_type": "dp_reshardable"}),
    "deepseek": dict(model="DeepseekV3", bridge=("deepseek_v3", "DeepseekV3Bridge"), sizes=DEEPSEEK, tp=2, ep=2, dp=2,
                     experts=4, shared=8, qk_norm=True, latent=True, freq=[0, 1], metadata={}),
    "glm4-5": dict(model="Glm4Moe", bridge=("glm4moe", "GLM4MoEBridge"), sizes=GLM, pp=2, ep=2, dp=2, experts=4, shared=8,
                   qk_norm=True, qkv_bias=True, freq=[0, 1], metadata={}),
}
FILES = ("llama", "qwen3-moe", "mixtral")  # cases that are also saved as one file per rank
# Modules of Megatron's own layers, and the names of the same parameters in Transformer Engine's, which mbridge knows.
ENGINE = [(r"^(decoder\.layers\.\d+|mtp\.layers\.\d+\.transformer_layer)\.input_layernorm\.",
           r"\1.self_attention.linear_qkv.layer_norm_"),
          (r"\.local_experts\.(\d+)\.(linear_fc\d\.(?:weight|bias))", r".\2\1")]
LATENT = [(r"self_attention\.(q|kv)_layernorm\.weight", r"self_attention.linear_\1_up_proj.layer_norm_weight"),
          ENGINE[1]]


def hub_config(case, more=0):
    import transformers
    sizes = {k: v for k, v in case["sizes"].items() if k != "padded_vocab_size"}
    sizes["num_hidden_layers"] += more
    return getattr(transformers, case["model"] + "Config")(**sizes)


def hub_model(case):
    """The model as transformers stores it, and DeepSeek's layer for multi-token prediction as its authors published it."""
    import transformers
    sizes = case["sizes"]
    layers = sizes["num_hidden_layers"]
    config = hub_config(case, sizes.get("num_nextn_predict_layers", 0))
    made = getattr(transformers, case["model"] + "ForCausalLM")(config).bfloat16()
    made.load_state_dict(make_recipes.distinct(made.state_dict()))
    with tempfile.TemporaryDirectory() as tmp:
        made.save_pretrained(tmp)
        state = load_file(os.path.join(tmp, "model.safetensors"))
    state = {k: v.float() if k.endswith("correction_bias") else v for k, v in state.items()}  # as DeepSeek stores it
    if "num_nextn_predict_layers" in sizes:
        at, size = "model.layers.%d." % layers, sizes["hidden_size"]
        extra = {"enorm.weight": (size,), "hnorm.weight": (size,), "eh_proj.weight": (size, 2 * size),
                 "shared_head.norm.weight": (size,)}
        state.update(make_recipes.distinct({at + k: torch.empty(v) for k, v in extra.items()}))
        state[at + "embed_tokens.weight"] = state["model.embed_tokens.weight"]
        state[at + "shared_head.head.weight"] = state["lm_head.weight"]
    return state


def build(case):
    from megatron.core import parallel_state as ps
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class Attention(DotProductAttention):
        """Latent attention gives sizes that only Transformer Engine's class takes. It has no parameters."""
        def __init__(self, *args, k_channels=None, v_channels=None, **kwargs):
            super().__init__(*args, **kwargs)

    LocalSpecProvider.core_attention = lambda self: Attention
    from megatron.core.transformer import multi_latent_attention
    multi_latent_attention.TELinear = multi_latent_attention.TEColumnParallelLinear = type("Absent", (), {})
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig
    s = case["sizes"]
    moe = {"num_moe_experts": case["experts"], "moe_ffn_hidden_size": s["moe_intermediate_size"], "moe_router_topk": 2,
           "expert_model_parallel_size": case.get("ep", 1), "expert_tensor_parallel_size": case.get("tp", 1),
           "moe_router_load_balancing_type": "none", "moe_grouped_gemm": case.get("grouped", False),
           "moe_use_legacy_grouped_gemm": case.get("grouped", False), "moe_token_dispatcher_type": "allgather",
           "moe_shared_expert_intermediate_size": case.get("shared")} if "experts" in case else {}
    if case["model"] == "Qwen2Moe":
        moe["moe_shared_expert_gate"] = True
    latent = {}
    if "freq" in case:
        moe.update(moe_layer_freq=case["freq"], mtp_num_layers=s["num_nextn_predict_layers"], moe_router_enable_expert_bias=True,
                   moe_router_score_function="sigmoid")
    if case.get("latent"):
        latent = {"multi_latent_attention": True, "q_lora_rank": s["q_lora_rank"], "kv_lora_rank": s["kv_lora_rank"],
                  "qk_head_dim": s["qk_nope_head_dim"], "qk_pos_emb_head_dim": s["qk_rope_head_dim"],
                  "v_head_dim": s["v_head_dim"], "rope_type": "rope", "apply_rope_fusion": False}
    config = (MLATransformerConfig if latent else TransformerConfig)(
        num_layers=s["num_hidden_layers"], hidden_size=s["hidden_size"], num_attention_heads=s["num_attention_heads"],
        num_query_groups=s["num_key_value_heads"], kv_channels=s["head_dim"], ffn_hidden_size=s["intermediate_size"],
        add_bias_linear=False, add_qkv_bias=case.get("qkv_bias", False), normalization="RMSNorm", gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, use_cpu_initialization=True, qk_layernorm=case.get("qk_norm", False),
        tensor_model_parallel_size=case.get("tp", 1), pipeline_model_parallel_size=case.get("pp", 1),
        pipeline_dtype=torch.bfloat16, params_dtype=torch.bfloat16, bf16=True,
        sequence_parallel=case.get("tp", 1) > 1 and case.get("ep", 1) > 1, **moe, **latent)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    last = {"mtp_block_spec": get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)} if "freq" in case else {}
    return config, GPTModel(
        config, spec, s["padded_vocab_size"], 8, pre_process=ps.is_pipeline_first_stage(),
        post_process=ps.is_pipeline_last_stage(), position_embedding_type="rope", parallel_output=True,
        share_embeddings_and_output_weights=False, **last).bfloat16()


def make_bridge(case, hub, config):
    from mbridge.core.parallel_states import ParallelStates
    module, name = case["bridge"]
    cls = getattr(importlib.import_module("mbridge.models." + module), name)
    made = cls.__new__(cls)
    made.hf_config, made.config, made.dtype, made.mpu = hub, config, None, ParallelStates.get_parallel_state()
    made.make_vocab_size_divisible_by = 16
    made.vocab_size, made.padded_vocab_size = case["sizes"]["vocab_size"], case["sizes"]["padded_vocab_size"]
    return made


def converted(bridge, state, name, param, tp, merged):
    """The shard of a parameter, called by the name of Transformer Engine's layers, that mbridge gives to this rank."""
    layers = bridge.config.num_layers
    if name.startswith("mtp."):
        bridge.config.num_layers = 61  # the only number for which mbridge converts this layer
    names = [n.replace("layers.61.", "layers.%d." % layers) for n in bridge._weight_name_mapping_mcore_to_hf(name)]
    bridge.config.num_layers = layers
    merged[name] = bridge._weight_to_mcore_format(name, [state[n] for n in names])
    return bridge._weight_split_across_tp(name, merged[name], param, tp)[bridge.mpu.tp_rank if tp > 1 else 0]


def fill(case, hub, config, model, state):
    """Sets every parameter, and every buffer that the model of transformers has. @return the merged tensors by name."""
    from megatron.core import parallel_state as ps
    bridge, tp = make_bridge(case, hub, config), case.get("tp", 1)
    each = case.get("experts", 1) // case.get("ep", 1)
    merged = {}
    first = each * ps.get_expert_model_parallel_rank() if "experts" in case else 0
    layers = model.decoder.layers
    for name, param in [*model.named_parameters(), *[b for b in model.named_buffers() if b[0].endswith("expert_bias")]]:
        name = re.sub(r"^decoder\.layers\.(\d+)", lambda m: "decoder.layers.%d" % (layers[int(m[1])].layer_number - 1), name)
        for local, engine in LATENT if case.get("latent") else ENGINE:
            name = re.sub(local, engine, name)
        if ".pre_mlp_layernorm." in name and ("experts" not in case or case.get("freq", [1])[0] == 0 and "layers.0." in name
                                              and "mtp" not in name):
            name = name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
        grouped = re.fullmatch(r"(.*experts\.)weight([12])", name)
        if grouped:  # all experts of the rank, for x @ weight
            matrices = param.data.view((each, config.hidden_size, -1) if grouped[2] == "1" else (each, -1, config.hidden_size))
            for i in range(each):
                one = "%slinear_fc%s.weight%d" % (grouped[1], grouped[2], first + i)
                matrices[i].copy_(converted(bridge, state, one, matrices[i].T, tp, merged).T)
            continue
        name = re.sub(r"(experts\.linear_fc\d\.weight)(\d+)$", lambda m: m[1] + str(int(m[2]) + first), name)
        param.data.copy_(converted(bridge, state, name, param, tp, merged))
    return merged


def run(rank, port, name, home):
    case = {**{"tp": 1, "pp": 1, "vp": None, "ep": 1}, **CASES[name]}
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks.ranks_of(case)), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=str(port))
    torch.distributed.init_process_group("gloo")
    ranks.pretend_gpu()
    from megatron.core import dist_checkpointing
    from megatron.core import parallel_state as ps
    ps.initialize_model_parallel(case["tp"], case["pp"], expert_model_parallel_size=case["ep"],
                                 expert_tensor_parallel_size=case["tp"])
    hub, state = hub_config(case), load_file(os.path.join(home, "to.safetensors"))
    config, model = build(case)
    merged = fill(case, hub, config, model, state)
    gathered = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, merged)
    if rank == 0:
        save_file({k: v.clone().contiguous() for one in gathered for k, v in one.items()},
                  os.path.join(home, "from.safetensors"))
    metadata = {"non_homogeneous_layers": False, "chained_optim_avoid_prefix": True,
                "distrib_optim_fully_reshardable_mem_efficient": False, **case["metadata"]}
    whole = model.sharded_state_dict(prefix="module." if case.get("nemo") else "", metadata=metadata)
    if case.get("distributed"):
        optimizer = ranks.make_chained(case, config, [model])
        fill(case, hub, config, model, state)  # which its step has changed; the masters keep the step's values
        whole = {**whole, "optimizer": optimizer.sharded_state_dict(whole, metadata=metadata)}
    if case.get("nemo"):
        whole = {"sharded_state_dict": whole, "state_dict": {}, "epoch": 0, "global_step": 10, "lr_schedulers": [],
                 "pytorch-lightning_version": "2.6.6", "loops": {"fit_loop": {"state_dict": {}}}}
    else:
        whole.update(iteration=10, args={"num_layers": config.num_layers, "hidden_size": config.hidden_size})
    dist_checkpointing.save(whole, os.path.join(home, data_folder(case)))
    folder = "mp_rank_%02d" % ps.get_tensor_model_parallel_rank()
    folder += "_%03d" % ps.get_pipeline_model_parallel_rank() if case["pp"] > 1 else ""
    folder += "_%03d" % ps.get_expert_model_parallel_rank() if case["ep"] > 1 else ""
    if name in FILES and (ps.get_data_parallel_rank() == 0 or ps.get_expert_data_parallel_rank() == 0):
        os.makedirs(os.path.join(home, "ranks", folder))
        torch.save({"args": arguments(case, config), "checkpoint_version": 3.0, "iteration": 10,
                    "model": model.state_dict_for_save_checkpoint()},
                   os.path.join(home, "ranks", folder, "model_optim_rng.pt"))
    torch.distributed.barrier()


def data_folder(case):
    return "weights" if case.get("nemo") else "torch_dist"


def arguments(case, config):
    import argparse
    return argparse.Namespace(
        num_layers=config.num_layers, hidden_size=config.hidden_size, num_attention_heads=config.num_attention_heads,
        ffn_hidden_size=config.ffn_hidden_size, num_query_groups=config.num_query_groups, group_query_attention=True,
        swiglu=True, tensor_model_parallel_size=case["tp"], pipeline_model_parallel_size=case["pp"],
        num_experts=case.get("experts"), expert_model_parallel_size=case["ep"], expert_tensor_parallel_size=case["tp"],
        virtual_pipeline_model_parallel_size=None, padded_vocab_size=case["sizes"]["padded_vocab_size"],
        kv_channels=config.kv_channels, untie_embeddings_and_output_weights=True, rank=torch.distributed.get_rank())


def record_optimizer(home):
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
    with tempfile.TemporaryDirectory() as tmp:
        dcp_to_torch_save(os.path.join(home, "torch_dist"), os.path.join(tmp, "full.pt"))
        full = torch.load(os.path.join(tmp, "full.pt"), weights_only=False)
    found = {}
    for name, t in full.items():
        if isinstance(t, torch.Tensor) and "optimizer" in name:
            raw = t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            found[name] = [list(t.shape), hashlib.sha256(raw).hexdigest()]
    with open(os.path.join(home, "optimizer.json"), "w", encoding="utf-8") as f:
        json.dump(found, f, indent=1, sort_keys=True)
        f.write("\n")


def make(corpus, name):
    case, home = CASES[name], os.path.join(corpus, "recipes", "megatron-dist-" + name)
    shutil.rmtree(home, ignore_errors=True)
    os.makedirs(os.path.join(home, data_folder(case)))
    save_file({k: v.clone().contiguous() for k, v in hub_model(case).items()}, os.path.join(home, "to.safetensors"))
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(run, args=(port, name, home), nprocs=ranks.ranks_of({"tp": 1, "pp": 1, **case}))
    if case.get("distributed"):
        record_optimizer(home)
    with open(os.path.join(home, "config.json"), "w", encoding="utf-8") as f:
        json.dump(case["sizes"], f, indent=1)
        f.write("\n")
    print(home)


if __name__ == "__main__":
    for chosen in sys.argv[2:] or CASES:
        make(sys.argv[1], chosen)
