#!/usr/bin/env python3
"""Training that megatron-core (gloo, CPU) resumes from torch_dist that we write, with tensor and pipeline parallelism and with
experts. A run makes one step, saves in both of Megatron's formats, and makes another step. From its own torch_dist
megatron-core makes that step again, bit for bit: losses, weights, optimizer. So it must from what we make of Megatron's rank
files, and of a checkpoint that torch's DCP wrote of the same model with transformers' names and torch's AdamW.

usage: torch_dist_resume.py FSDPCKPT CORPUS       exit 77 without megatron-core
"""
import contextlib
import json
import os
import socket
import sys
import tempfile
import traceback

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "corpus"))
try:
    import megatron.core  # noqa: F401
    import torch
    import torch.distributed.checkpoint as dcp
    import torch.multiprocessing as mp
    import make_megatron_ranks as ranks
    import torch_dist_load as load
    from checks import check, finish, run
except ImportError as e:
    print("skipped: %s" % e)
    sys.exit(77)

SIZES = {"hidden_size": ranks.HIDDEN, "num_attention_heads": ranks.HEADS, "num_key_value_heads": 2,
         "vocab_size": ranks.VOCAB, "tie_word_embeddings": False}
CASES = {
    "tp2pp2": (dict(ranks.LLAMA, tp=2, pp=2, vp=None, ep=1, layers=2, distributed=True), "megatron-llama",
               {"model_type": "llama", "num_hidden_layers": 2, "intermediate_size": 24, **SIZES}),
    "ep2": (dict(ranks.MOE, dp=2, layers=2, distributed=True), "megatron-mixtral",
            {"model_type": "mixtral", "num_hidden_layers": 2, "intermediate_size": 8, "num_local_experts": 4, **SIZES}),
}


def pretend_gpu():
    """What training calls on a GPU, besides what the corpus' models need."""
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils

    def without_device(make):
        return lambda *a, **k: make(*a, **{n: v for n, v in k.items() if n != "device"})

    ranks.pretend_gpu()
    for name in ("zeros", "ones", "empty", "full", "arange", "zeros_like", "empty_like"):
        setattr(torch, name, without_device(getattr(torch, name)))
    random.CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()
    moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)
    load.keep_step()


def build(case):
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    config, chunks = ranks.build(case)
    config.finalize_model_grads_func = finalize_model_grads
    ranks.fill(chunks)
    for module in chunks[0].modules():
        module.hidden_dropout = 0.0
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    for p in chunks[0].parameters():
        p.data.mul_(0.2)
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    model = DistributedDataParallel(config, ddp, chunks[0])
    how = OptimizerConfig(optimizer="adam", lr=0.01, weight_decay=0.1, bf16=True, clip_grad=0.0, use_distributed_optimizer=True)
    optimizer = get_megatron_optimizer(how, [model])
    for group in optimizer.param_groups:
        group["weight_decay"] *= group["wd_mult"]  # as Megatron's scheduler does
    return config, model, optimizer


def train(model, optimizer, number):
    """Makes a step. Returns its losses, and digests of what it changes."""
    from megatron.core import parallel_state as ps
    from megatron.core.pipeline_parallel import get_forward_backward_func
    g = torch.Generator().manual_seed(1000 * number + ps.get_data_parallel_rank())
    tokens = [torch.randint(0, ranks.VOCAB, (2, ranks.POSITIONS + 1), generator=g) for _ in range(2)]
    mask = torch.triu(torch.ones(ranks.POSITIONS, ranks.POSITIONS, dtype=torch.bool), 1)[None, None]
    positions = torch.arange(ranks.POSITIONS)[None].expand(2, -1)

    def forward(iterator, wrapped):
        t = next(iterator)
        out = wrapped(t[:, :-1], positions, mask, labels=t[:, 1:])
        return out, lambda o: (o.float().mean(), {"loss": o.detach().float().mean()})

    model.zero_grad_buffer()
    optimizer.zero_grad()
    losses = get_forward_backward_func()(
        forward_step_func=forward, data_iterator=iter(tokens), model=[model], num_microbatches=2,
        seq_length=ranks.POSITIONS, micro_batch_size=2, forward_only=False)
    optimizer.step()
    got = {name: load.digest(p) for name, p in model.named_parameters()}
    for n, one in enumerate(optimizer.chained_optimizers):
        got.update({"optimizer %d, state %d, %s" % (n, i, k): load.digest(v)
                    for i, s in enumerate(one.optimizer.state.values()) for k, v in s.items()})
    return {"losses": [x["loss"].item() for x in losses], **got}


def sharded_state(model, optimizer, loading):
    metadata = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True,
                "distrib_optim_sharding_type": "fully_reshardable", "distrib_optim_fully_reshardable_mem_efficient": False}
    state = {"model": model.module.sharded_state_dict(metadata=metadata)}
    state["optimizer"] = optimizer.sharded_state_dict(state["model"], is_loading=loading, metadata=metadata)
    return state


def save(case, home):
    from megatron.core import dist_checkpointing
    from megatron.core import parallel_state as ps
    config, model, optimizer = build(case)
    train(model, optimizer, 1)
    dist_checkpointing.save(sharded_state(model, optimizer, False), os.path.join(home, "own"))
    folder = os.path.join(home, "ranks", "mp_rank_%02d" % ps.get_tensor_model_parallel_rank())
    folder += "_%03d" % ps.get_pipeline_model_parallel_rank() if case["pp"] > 1 else ""
    folder += "_%03d" % ps.get_expert_model_parallel_rank() if case["ep"] > 1 else ""
    if ps.get_data_parallel_rank() == 0 or ps.get_expert_data_parallel_rank() == 0:
        os.makedirs(folder)
        torch.save(ranks.rank_state(case, config, [model.module], optimizer), os.path.join(folder, "model_optim_rng.pt"))
    torch.distributed.barrier()
    optimizer.save_parameter_state(os.path.join(folder, "distrib_optim.pt"))
    return train(model, optimizer, 2)


def resume(case, folder, engine):
    from megatron.core import dist_checkpointing
    _, model, optimizer = build(case)
    train(model, optimizer, 0)  # torch's AdamW, which needs no GPU, has no state before
    for layer in model.module.decoder.layers if engine else []:
        layer.submodules_config.sharded_state_dict_keys_map = load.ENGINE_KEYS
    for p in model.parameters():
        p.data.fill_(7)
    state = dist_checkpointing.load(sharded_state(model, optimizer, True), folder)
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    for one in optimizer.chained_optimizers:  # megatron-core gives them one tensor, which torch's AdamW changes in place
        for s in one.optimizer.state.values():
            s["step"] = s["step"].clone()
    return train(model, optimizer, 2)


def on_rank(rank, port, case, home, folders, results):
    try:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks.ranks_of(case)), LOCAL_RANK=str(rank),
                          MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        torch.set_num_threads(1)
        torch.distributed.init_process_group("gloo")
        pretend_gpu()
        from megatron.core import parallel_state as ps
        ps.initialize_model_parallel(case["tp"], case["pp"], expert_model_parallel_size=case["ep"],
                                     expert_tensor_parallel_size=case["tp"])
        for name, engine in folders:
            got = save(case, home) if name == "run" else resume(case, os.path.join(home, name), engine)
            with open(os.path.join(results, "%s.%d" % (name, rank)), "w") as f:
                json.dump(got, f)
    except Exception:  # noqa: BLE001
        with open(os.path.join(results, "failed.%d" % rank), "w") as f:
            f.write(traceback.format_exc())


def on_ranks(case, home, folders):
    """Runs or resumes on all ranks. Returns what each of `folders` gave, a list of ranks each."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with tempfile.TemporaryDirectory() as results:
        mp.spawn(on_rank, args=(port, case, home, folders, results), nprocs=ranks.ranks_of(case))
        for name in os.listdir(results):
            check(not name.startswith("failed"), open(os.path.join(results, name)).read())
        return [[json.load(open(os.path.join(results, "%s.%d" % (name, rank)))) for rank in range(ranks.ranks_of(case))]
                if os.path.exists(os.path.join(results, "%s.0" % name)) else None for name, _ in folders]


def save_torch(full, folder):
    """Saves the same model and optimizer as FSDP does: weights in fp32, and the groups of torch's AdamW."""
    state = full["optim"]["state"]
    model = {name: state[name].pop("fp32_param") for name in state}
    names = [[n for n, t in model.items() if (t.ndim > 1) == matrix] for matrix in (False, True)]
    groups = [{"params": [torch.nn.Parameter(model[n]) for n in some], "weight_decay": 0.1 * matrix}
              for matrix, some in enumerate(names)]
    groups = [{**g, "params": some} for g, some in zip(torch.optim.AdamW(groups, lr=0.01).state_dict()["param_groups"], names)]
    for one in state.values():
        one["step"] = torch.tensor(1.0)
    dcp.save({"model": model, "optim": {"state": state, "param_groups": groups}}, checkpoint_id=folder, no_dist=True)


def check_case(program, home, name):
    case, recipe, config = CASES[name]
    home = os.path.join(home, name)
    os.makedirs(os.path.join(home, "own"))
    (want,) = on_ranks(case, home, [("run", False)])
    if not want:
        return
    with open(os.path.join(home, "config.json"), "w") as f:
        json.dump(config, f)
    how = ["--recipe", recipe, "--config", os.path.join(home, "config.json"), "-q"]
    path = {n: os.path.join(home, n) for n in ("own", "ranks", "from-ranks", "hub.pt", "torch", "from-torch")}
    run(program, "reshard", path["ranks"], "-o", path["from-ranks"], "--to", "torch_dist", "--dp", "2", "-q")
    run(program, "consolidate", path["ranks"], "-o", path["hub.pt"], "--include", "model.*", "--include", "optim.*",
        "--strip-prefix", "model.", *how)
    save_torch(torch.load(path["hub.pt"], weights_only=False), path["torch"])
    run(program, "reshard", path["torch"], "-o", path["from-torch"], "--to", "torch_dist", "--dp", "3", "--reverse",
        "--strip-prefix", "model.", *how)
    engine = "experts" in case
    folders = [("own", False), ("from-ranks", False), ("from-torch", engine)]
    for (folder, _), got in zip(folders, on_ranks(case, home, folders)):
        for rank, (a, b) in enumerate(zip(want, got or [])):
            check(a == b, "%s from %s, rank %d: %s" % (name, folder, rank, sorted(n for n in a if a[n] != b.get(n))))
        check(got is not None, "%s from %s" % (name, folder))
    check(any(len(r["losses"]) == 2 for r in want), "no loss: %s" % want)


def main():
    program = sys.argv[1]
    if not load.can_resume():
        print("skipped: this megatron-core does not store the optimizer by parameter")
        return 77
    with tempfile.TemporaryDirectory() as home:
        for name in sys.argv[3:] or CASES:
            check_case(program, home, name)
    return finish("torch_dist_resume, megatron-core " + megatron.core.__version__)


if __name__ == "__main__":
    sys.exit(main())
