#!/usr/bin/env python3
"""Makes megatron-ranks/<case>: GPTModels of real megatron-core (gloo, CPU) saved in Megatron's `torch` format: one file per
model-parallel rank, with the dict that training.checkpointing writes. expected.json has the expected values.

    make_megatron_ranks.py CORPUS [CASE...]      a Python with torch and megatron-core

The expected values are megatron-core's own. The same model and optimizer are also saved by dist_checkpointing, whose sharded
state dicts record the box of each rank, and torch's DCP reader assembles them.
"""
import argparse
import hashlib
import json
import os
import shutil
import socket
import sys
import tempfile

import torch
import torch.multiprocessing as mp

VOCAB, HIDDEN, HEADS, POSITIONS = 32, 16, 4, 8
GPT = dict(swiglu=False, bias=True, groups=None, norm="LayerNorm", position="learned_absolute", untied=False)
LLAMA = dict(swiglu=True, bias=False, groups=2, norm="RMSNorm", position="rope", untied=True)
MOE = dict(LLAMA, experts=4, ep=2, layers=1, tp=1, pp=1, vp=None)
CASES = {
    "tp2-gpt": dict(GPT, tp=2, pp=1, vp=None, layers=2),
    "tp2-llama-fp32": dict(LLAMA, tp=2, pp=1, vp=None, layers=1, fp32=True),
    "tp2pp2-llama": dict(LLAMA, tp=2, pp=2, vp=None, layers=2),
    "tp2dp2-distributed": dict(LLAMA, tp=2, pp=1, vp=None, layers=1, dp=2, distributed=True),
    "pp2vp2-gpt": dict(GPT, tp=1, pp=2, vp=2, layers=4),
    "one-grouped": dict(MOE, ep=1, grouped=True),
    "ep2-moe": dict(MOE, expert_bias=True, bias=True),
    "tp2ep2-grouped": dict(MOE, tp=2, dp=2, grouped=True),
    "pp2ep2-moe": dict(MOE, pp=2, layers=2, shared=True),
    "tp2ep4-etp1": dict(MOE, tp=2, dp=2, ep=4, etp=1, fp32=True),
    "tp4ep2-etp1": dict(MOE, tp=4, etp=1, fp32=True, swiglu=False),
    "tp4-etp2": dict(MOE, tp=4, ep=1, etp=2, fp32=True),
    "tp2ep2-distributed": dict(MOE, tp=2, dp=2, distributed=True),
}
# The norms of the local layer spec get the names of Transformer Engine's fused layers.
FUSED = {"self_attention.linear_qkv.layer_norm_": "input_layernorm.",
         "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm."}


def pretend_gpu():
    """megatron-core calls CUDA where the CPU would be enough."""
    torch.cuda.synchronize = lambda *a, **k: None
    torch.cuda.current_device = lambda: "cpu"
    torch.Tensor.cuda = lambda t, *a, **k: t
    tensor, kind = torch.tensor, torch.Tensor.type
    torch.tensor = lambda *a, **k: tensor(*a, **{n: v for n, v in k.items() if n != "device"})
    from megatron.core.transformer.moe import experts
    experts.gg.assert_grouped_gemm_is_available = lambda: None
    torch.Tensor.type = lambda t, *a, **k: (kind(t, *a, **k) if a or k else kind(t).replace("torch.", "torch.cuda."))


def build(case):
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig
    gated = {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu} if case["swiglu"] else {}
    dtype = torch.float32 if case.get("fp32") else torch.bfloat16
    moe = {"num_moe_experts": case["experts"], "moe_ffn_hidden_size": 8, "moe_router_topk": 2,
           "expert_model_parallel_size": case["ep"], "expert_tensor_parallel_size": case.get("etp", case["tp"]),
           "moe_router_enable_expert_bias": case.get("expert_bias", False),
           "moe_router_score_function": "sigmoid", "moe_router_load_balancing_type": "none",
           "moe_grouped_gemm": case.get("grouped", False), "moe_token_dispatcher_type": "allgather",
           "moe_shared_expert_intermediate_size": 12 if case.get("shared") else None} if "experts" in case else {}
    spec = get_gpt_layer_local_spec(case.get("experts"), case.get("grouped", False), normalization=case["norm"],
                                    moe_use_legacy_grouped_gemm=case.get("grouped", False))
    config = TransformerConfig(
        num_layers=case["layers"], hidden_size=HIDDEN, num_attention_heads=HEADS, num_query_groups=case["groups"],
        ffn_hidden_size=24, add_bias_linear=case["bias"], normalization=case["norm"], use_cpu_initialization=True,
        tensor_model_parallel_size=case["tp"], pipeline_model_parallel_size=case["pp"], pipeline_dtype=dtype,
        virtual_pipeline_model_parallel_size=case["vp"], params_dtype=dtype, bf16=dtype == torch.bfloat16, **gated, **moe)
    chunks = []
    for i in range(case["vp"] or 1):
        vp = {"vp_stage": i} if case["vp"] else {}
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, **vp)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, **vp)
        chunks.append(GPTModel(
            config, spec, VOCAB, POSITIONS, pre_process=first, post_process=last, position_embedding_type=case["position"],
            parallel_output=True, share_embeddings_and_output_weights=not case["untied"], **vp).to(dtype))
    return config, chunks


def fill(chunks):
    """Replicas of a parameter are equal on all ranks. All other values differ."""
    from megatron.core import parallel_state as ps
    stage = ps.get_pipeline_model_parallel_rank()
    g = torch.Generator().manual_seed(100 + ps.get_tensor_model_parallel_rank() +
                                      ps.get_tensor_model_parallel_world_size() * stage)
    for c in chunks:
        for name, p in c.named_parameters():
            same = torch.Generator().manual_seed(sum(map(ord, name)) + 1000 * stage)
            cut = getattr(p, "tensor_model_parallel", False)
            if ".experts." in name:
                seed = 10000 * (1 + ps.get_expert_model_parallel_rank())
                seed += 100000 * ps.get_expert_tensor_parallel_rank() if cut or ".experts.weight" in name else 0
                p.data.copy_(torch.randn(p.shape, generator=same.manual_seed(same.initial_seed() + seed)))
                continue
            p.data.copy_(torch.randn(p.shape, generator=g if cut else same))
            if name == "output_layer.weight" and c.share_embeddings_and_output_weights or "word_embeddings" in name:
                tied = torch.Generator().manual_seed(7 + ps.get_tensor_model_parallel_rank())
                p.data.copy_(torch.randn(p.shape, generator=tied))
        for name, b in c.named_buffers():
            if name.endswith("expert_bias"):
                b.copy_(torch.arange(len(b)) / 8)


def make_optimizer(case, chunks):
    """The optimizer of get_megatron_optimizer without a distributed optimizer, after one step."""
    from megatron.core.optimizer import OptimizerConfig, _get_param_groups
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
    config = OptimizerConfig(optimizer="adam", lr=0.01, weight_decay=0.1, bf16=not case.get("fp32"))
    groups = _get_param_groups(chunks, config, None)
    inner = torch.optim.AdamW(groups, lr=config.lr, weight_decay=config.weight_decay)
    init = lambda opt, config=None: None
    if case.get("fp32"):
        optimizer = FP32Optimizer(inner, config, init)
    else:
        optimizer = Float16OptimizerWithFloat16Params(inner, config, None, init)
    for group in inner.param_groups:
        for p in group["params"]:
            p.grad = p.detach().float().sin().to(p.dtype) # depends only on the value, so replicas stay equal
    inner.step()
    if not case.get("fp32"):
        optimizer._copy_main_params_to_model_params()
    return optimizer


def make_chained(case, config, chunks):
    """The optimizer of get_megatron_optimizer with separate ones for the experts and the rest. The state of a distributed
        optimizer is cut over the data-parallel ranks and gathered into distrib_optim.pt."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    distributed = case.get("distributed", False)
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=distributed, grad_reduce_in_fp32=True)
    wrapped = [DistributedDataParallel(config, ddp, c) for c in chunks]
    optimizer = get_megatron_optimizer(OptimizerConfig(
        optimizer="adam", lr=0.01, weight_decay=0.1, bf16=not case.get("fp32"), use_distributed_optimizer=distributed),
        wrapped)
    for one in optimizer.chained_optimizers:
        for group in one.optimizer.param_groups:
            for p in group["params"]:
                p.grad = p.detach().sin()
        one.optimizer.step()
        if not case.get("fp32"):
            one._copy_main_params_to_model_params()
    for w in wrapped if distributed else []:
        w.start_param_sync(force_sync=True)
    return optimizer


def rank_state(case, config, chunks, optimizer):
    """The result of training.checkpointing.generate_state_dict for --ckpt-format torch."""
    from megatron.core import parallel_state as ps
    args = argparse.Namespace(
        num_layers=case["layers"], hidden_size=HIDDEN, num_attention_heads=HEADS, ffn_hidden_size=24,
        num_query_groups=case["groups"] or 1, group_query_attention=case["groups"] is not None, swiglu=case["swiglu"],
        tensor_model_parallel_size=case["tp"], pipeline_model_parallel_size=case["pp"], num_experts=case.get("experts"),
        expert_model_parallel_size=case.get("ep", 1), expert_tensor_parallel_size=case.get("etp", case["tp"]),
        virtual_pipeline_model_parallel_size=case["vp"], padded_vocab_size=VOCAB, kv_channels=config.kv_channels,
        untie_embeddings_and_output_weights=case["untied"], rank=torch.distributed.get_rank())
    state = {"args": args, "checkpoint_version": 3.0, "iteration": 10}
    if len(chunks) == 1:
        state["model"] = chunks[0].state_dict_for_save_checkpoint()
    else:
        for i, c in enumerate(chunks):
            state["model%d" % i] = c.state_dict_for_save_checkpoint()
    state["optimizer"] = optimizer.state_dict()
    state["opt_param_scheduler"] = {"max_lr": 0.01, "num_steps": 10}
    state["rng_state"] = [{"torch_rng_state": torch.full((8,), ps.get_tensor_model_parallel_rank(), dtype=torch.uint8)}]
    return state


def save_truth(chunks, optimizer, out):
    from megatron.core import dist_checkpointing
    metadata = {"non_homogeneous_layers": True, "singleton_local_shards": False, "chained_optim_avoid_prefix": True,
                "distrib_optim_sharding_type": "fully_reshardable", "distrib_optim_fully_reshardable_mem_efficient": False}
    state = {"chunk%d" % i: c.sharded_state_dict(metadata=metadata) for i, c in enumerate(chunks)}
    model = {k: v for c in list(state.values()) for k, v in c.items()} if len(chunks) == 1 else dict(state)
    state["optimizer"] = optimizer.sharded_state_dict(model, metadata=metadata)
    dist_checkpointing.save(state, out)


def ranks_of(case):
    """Expert ranks are data-parallel ranks, so there must be enough of these to hold all experts."""
    stage = max(case["tp"] * case.get("dp", 1), case.get("etp", case["tp"]) * case.get("ep", 1))
    return stage * case["pp"]


def run(rank, port, name, out, truth):
    case = CASES[name]
    world = ranks_of(case)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=str(port))
    torch.distributed.init_process_group("gloo")
    pretend_gpu()
    from megatron.core import parallel_state as ps
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    ps.initialize_model_parallel(case["tp"], case["pp"], virtual_pipeline_model_parallel_size=case["vp"],
                                 expert_model_parallel_size=case.get("ep", 1),
                                 expert_tensor_parallel_size=case.get("etp", case["tp"]))
    config, chunks = build(case)
    fill(chunks)
    distributed = case.get("distributed", False)
    chained = distributed or "experts" in case
    optimizer = make_chained(case, config, chunks) if chained else make_optimizer(case, chunks)
    folder = "mp_rank_%02d" % ps.get_tensor_model_parallel_rank()
    if case["pp"] > 1:
        folder += "_%03d" % ps.get_pipeline_model_parallel_rank()
    if case.get("ep", 1) > 1:
        folder += "_%03d" % ps.get_expert_model_parallel_rank()
    first = ps.get_data_parallel_rank() == 0 or ps.get_expert_data_parallel_rank() == 0
    state = rank_state(case, config, chunks, optimizer)
    if first:
        os.makedirs(os.path.join(out, folder))
        torch.save(state, os.path.join(out, folder, "model_optim_rng.pt"))
    torch.distributed.barrier()
    if distributed:
        optimizer.save_parameter_state(os.path.join(out, folder, "distrib_optim.pt"))
    save_truth(chunks, optimizer, truth)


def read_truth(truth, home, grouped):
    """Converts Megatron's names ("optimizer.state.exp_avg.<parameter>") to ours ("optim.state.<parameter>.exp_avg")."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
    dcp_to_torch_save(truth, os.path.join(home, "full.pt"))
    full = torch.load(os.path.join(home, "full.pt"), weights_only=False)
    found = {}

    def add(name, t):
        raw = t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        found[name] = {"dtype": str(t.dtype)[6:], "shape": list(t.shape), "sha256": hashlib.sha256(raw).hexdigest()}

    for name, t in full.items():
        if not isinstance(t, torch.Tensor):
            continue
        for fused, local in FUSED.items():
            name = name.replace(fused, local)
        if name.startswith("optimizer.state."):
            key, parameter = name[len("optimizer.state."):].split(".", 1)
            name = "optim.state.%s.%s" % (parameter, key if key != "param" else "fp32_param")
        else:
            name = "model." + name
        if ".experts.experts." not in name:
            add(name, t)
        elif grouped: # its matrices are stored for x @ weight
            add(name.replace(".experts.linear_fc1.weight", ".weight1").replace(".experts.linear_fc2.weight", ".weight2"),
                t.transpose(1, 2))
        else:
            for i, one in enumerate(t): # dist_checkpointing concatenates the experts
                add(name.replace(".experts.experts.", ".experts.local_experts.%d." % i), one)
    return found


def make(corpus, name):
    folder = os.path.join(corpus, "megatron-ranks", name)
    shutil.rmtree(folder, ignore_errors=True)
    out = os.path.join(folder, "iter_0000010")
    os.makedirs(out)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with tempfile.TemporaryDirectory() as home:
        truth = os.path.join(home, "truth")
        os.makedirs(truth)
        mp.spawn(run, args=(port, name, out, truth), nprocs=ranks_of(CASES[name]))
        tensors = read_truth(truth, home, CASES[name].get("grouped", False))
    with open(os.path.join(folder, "latest_checkpointed_iteration.txt"), "w") as f:
        f.write("10")
    with open(os.path.join(folder, "expected.json"), "w") as f:
        json.dump({"torch": torch.__version__.split("+")[0], "tp": CASES[name]["tp"], "tensors": tensors}, f, indent=1)
    print(folder, len(tensors))


def main():
    for name in sys.argv[2:] or CASES:
        make(sys.argv[1], name)


if __name__ == "__main__":
    main()
