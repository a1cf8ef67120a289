#!/usr/bin/env python3
"""Makes recipes/megatron-dist-<case>/fsdp_dtensor-<version>: the model of to.safetensors under real Megatron-FSDP on gloo ranks,
saved with its optimizer as Megatron-LM does for --ckpt-format fsdp_dtensor.

    make_fsdp_dtensor.py CORPUS [CASE...]     a Python with torch, transformers, megatron-core, mbridge and einops

Megatron-FSDP wants streams and events of CUDA, which do nothing here, and meshes of GPUs, which are of CPUs here. The package
makes the DTensors, the names of the optimizer's states, the halves of SwiGLU and the numbers of experts. Megatron-LM's training,
which puts these together, is not in it, and make_state takes its place. fsdp_dtensor-<version>.json has the digests of all tensors as
torch's DCP reader loads them. Made with megatron-core 0.16.1 and 0.15.3 (with TORCH_CUDA_ARCH_LIST=9.0 where there is no GPU),
mbridge 0.15.1, torch 2.15.0.
"""
import contextlib
import hashlib
import json
import os
import shutil
import socket
import sys

import make_megatron_models as models
import make_megatron_ranks as ranks
import torch
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from safetensors.torch import load_file

MESHES = {"llama": dict(tp=1, pp=1, ep=1, dp=2), "qwen3-moe": dict(tp=1, pp=1, ep=2, dp=2)}
# What is saved of the optimizer's groups: all of them would be 20 objects for each parameter.
GROUPS = ("wd_mult",)


class Nothing:
    """A stream or an event of CUDA."""
    def __init__(self, *args, **kwargs):
        pass

    def __getattr__(self, name):
        return lambda *a, **k: self


def pretend_gpu():
    from torch.distributed.device_mesh import DeviceMesh
    ranks.pretend_gpu()
    torch.cuda.Stream = torch.cuda.Event = Nothing
    torch.cuda.current_stream = lambda *a, **k: Nothing()
    torch.cuda.stream = lambda *a, **k: contextlib.nullcontext()
    torch.cuda.empty_cache = lambda: None
    torch.Tensor.record_stream = lambda *a: None
    from_group = DeviceMesh.from_group
    DeviceMesh.from_group = staticmethod(lambda group, device_type, *a, **k: from_group(group, "cpu", *a, **k))


def wrap(case, config, model):
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
    from megatron.core.transformer.module import Float16Module
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, use_megatron_fsdp=True, grad_reduce_in_fp32=True,
                                        data_parallel_sharding_strategy="optim_grads_params")
    torch.cuda.current_device = lambda: 0  # it is only compared
    made = FullyShardedDataParallel(config, ddp, Float16Module(config, model), device=torch.device("cpu"))
    torch.cuda.current_device = lambda: "cpu"
    return made


def make_optimizer(wrapped, steps=1):
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=0.01, weight_decay=0.1, bf16=True,
                                                       use_distributed_optimizer=True), [wrapped])
    for one in getattr(optimizer, "chained_optimizers", [optimizer]) if steps else []:
        for group in one.optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.distributed.tensor.DTensor.from_local(
                    p.to_local().detach().sin(), p.device_mesh, p.placements, shape=p.shape, stride=p.stride(), run_check=False)
        one.optimizer.step()
    return optimizer


def make_state(case, wrapped, optimizer, loading=False):
    """The state dict that Megatron-LM saves."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import preprocess_state_dict_for_uneven_dtensor
    from megatron.core.transformer import fsdp_dtensor_checkpoint as names
    state = {"model": wrapped.state_dict_for_save_checkpoint(), "iteration": 10, "checkpoint_version": 3.0,
             "optimizer": optimizer.sharded_state_dict({}, is_loading=loading,
                                                       metadata={"distrib_optim_sharding_type": "fsdp_dtensor"})}
    names.handle_fp8_extra_state_case(state["model"])
    # It takes the names as they are below the outer class. That of 0.15 changes the dicts themselves.
    made = names.handle_swiglu_in_state_dict(wrapped.module, state["model"], state["optimizer"])
    state["model"], state["optimizer"] = made or (state["model"], state["optimizer"])
    if "experts" in case:
        state["model"] = names.handle_experts_in_state_dict(state["model"], case["experts"])
    preprocess_state_dict_for_uneven_dtensor(state)
    return state


def begin(rank, port, case):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks.ranks_of(case)), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=str(port))
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    pretend_gpu()
    from megatron.core import parallel_state as ps
    ps.initialize_model_parallel(case["tp"], case["pp"], expert_model_parallel_size=case["ep"],
                                 expert_tensor_parallel_size=case["tp"])


def run(rank, port, name, home, out):
    case = {"vp": None, **models.CASES[name], **MESHES[name]}
    begin(rank, port, case)
    config, model = models.build(case)
    models.fill(case, models.hub_config(case), config, model, load_file(os.path.join(home, "to.safetensors")))
    wrapped = wrap(case, config, model)
    optimizer = make_optimizer(wrapped, steps=0)
    state = make_state(case, wrapped, optimizer)
    weights = {k: v.to_local().clone() if hasattr(v, "to_local") else v for k, v in state["model"].items()}
    optimizer = make_optimizer(wrapped)
    state = make_state(case, wrapped, optimizer)
    for k, v in state["model"].items():  # which the step has changed
        if hasattr(v, "to_local") and weights[k].numel():
            v.to_local().copy_(weights[k])
    groups = state["optimizer"]["param_to_group_meta"]
    state["optimizer"]["param_to_group_meta"] = {p: {k: g[k] for k in GROUPS if k in g} for p, g in groups.items()}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(out))


def record(home, out):
    found = {}
    full = {k: torch.empty(v.size, dtype=v.properties.dtype)
            for k, v in dcp.FileSystemReader(out).read_metadata().state_dict_metadata.items() if hasattr(v, "size")}
    dcp.load(full, storage_reader=dcp.FileSystemReader(out), no_dist=True)
    for name, t in full.items():
        raw = t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        found[name] = [str(t.dtype)[6:], list(t.shape), hashlib.sha256(raw).hexdigest()]
    with open(out + ".json", "w", encoding="utf-8") as f:
        json.dump(found, f, indent=1, sort_keys=True)
        f.write("\n")


def make(corpus, name):
    import megatron.core
    home = os.path.join(corpus, "recipes", "megatron-dist-" + name)
    out = os.path.join(home, "fsdp_dtensor-" + megatron.core.__version__)
    shutil.rmtree(out, ignore_errors=True)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(run, args=(port, name, home, out), nprocs=ranks.ranks_of({**models.CASES[name], **MESHES[name]}))
    record(home, out)
    print(out)


if __name__ == "__main__":
    for chosen in sys.argv[2:] or MESHES:
        make(sys.argv[1], chosen)
