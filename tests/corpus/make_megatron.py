#!/usr/bin/env python3
"""Makes megatron/torch_dist-*: a checkpoint by real megatron-core (dist_checkpointing.save, gloo, CPU), with expected.json.

    make_megatron.py CORPUS          a Python with torch and megatron-core

It has tensors cut along rows, a stack of layers with one layer per rank (a prepended axis), replicated tensors, sharded
objects, and values in common.pt. latest_checkpointed_iteration.txt is next to iter_0000007. Up to megatron-core 0.14 it also has
states of the optimizer that are flattened (fully_sharded_model_space).
"""
import hashlib
import json
import os
import shutil
import socket
import sys

import torch
import torch.multiprocessing as mp

WORLD = 2


def values():
    g = torch.Generator().manual_seed(3)
    return {"decoder.linear.weight": torch.randn(8, 6, generator=g),
            "decoder.layers.mlp.weight": torch.randn(WORLD, 3, 5, generator=g).bfloat16(),
            "norm.weight": torch.randn(5, generator=g),
            "optimizer.state.exp_avg.norm.weight": torch.randn(5, generator=g)}


def flattened_values():
    g = torch.Generator().manual_seed(4)
    shapes = {"rows": (8, 6), "columns": (8, 6), "layers": (WORLD, 3, 5), "deep": (3, 4, 5), "one": (7,), "lone": (4, 3),
              "grid": (2, 4, 6)}
    return {"optimizer.state.exp_avg." + name: torch.randn(shape, generator=g) for name, shape in shapes.items()}


def flattened(rank):
    """The first number of elements is rank 0's if the ranks divide a shard."""
    from megatron.core.dist_checkpointing import ShardedTensor
    full = flattened_values()

    def make(name, first=None, shard=None, offsets=(), axes=0):
        key = "optimizer.state.exp_avg." + name
        elements = (full[key] if shard is None else shard).reshape(-1)
        run = slice(0, len(elements))
        if first is not None:
            run = slice(0, first) if rank == 0 else slice(first, len(elements))
        shape = (full[key] if shard is None else shard).shape
        return ShardedTensor.from_rank_offsets_flat(key, elements[run].clone(), tuple(shape), *offsets,
                                                    flattened_range=run, prepend_axis_num=axes)
    columns = full["optimizer.state.exp_avg.columns"].chunk(WORLD, 1)[rank]
    layer = full["optimizer.state.exp_avg.layers"][rank]
    grid = full["optimizer.state.exp_avg.grid"].chunk(WORLD, 2)[rank]
    states = [make("rows", 20), make("columns", None, columns, [(1, rank, WORLD)]), make("deep", 7), make("one", 3),
              make("layers", None, layer, [(0, rank, WORLD)], 1), make("grid", None, grid, [(2, rank, WORLD)])]
    return states + [make("lone", 12)][:1 - rank]  # rank 1 has nothing of it


def run(rank, port, out):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(WORLD), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=str(port))
    torch.distributed.init_process_group("gloo")
    # megatron-core calls CUDA even if there is nothing to copy from a GPU.
    torch.cuda.synchronize = lambda *a, **k: None
    torch.cuda.current_device = lambda: "cpu"
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    full = values()
    rows = full["decoder.linear.weight"].chunk(WORLD)[rank].clone()
    state = {
        "linear": ShardedTensor.from_rank_offsets("decoder.linear.weight", rows, (0, rank, WORLD)),
        "layer": ShardedTensor.from_rank_offsets("decoder.layers.mlp.weight",
                                                 full["decoder.layers.mlp.weight"][rank].clone(), (0, rank, WORLD),
                                                 prepend_axis_num=1),
        "norm": ShardedTensor.from_rank_offsets("norm.weight", full["norm.weight"], replica_id=rank),
        "moment": ShardedTensor.from_rank_offsets("optimizer.state.exp_avg.norm.weight",
                                                  full["optimizer.state.exp_avg.norm.weight"], replica_id=rank),
        "extra": ShardedObject("norm._extra_state", {"rank": rank}, (WORLD,), (rank,), replica_id=0),
        "iteration": 7,
        "args": {"hidden_size": 6, "lr": 0.1},
        "opt_param_scheduler": {"num_steps": 14},
    }
    if hasattr(ShardedTensor, "from_rank_offsets_flat"):
        state["flattened"] = flattened(rank)
    dist_checkpointing.save(state, out)


def main():
    import megatron.core
    case = os.path.join(sys.argv[1], "megatron", "torch_dist-" + megatron.core.__version__)
    shutil.rmtree(case, ignore_errors=True)
    out = os.path.join(case, "iter_0000007")
    os.makedirs(out)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(run, args=(port, out), nprocs=WORLD)
    with open(os.path.join(case, "latest_checkpointed_iteration.txt"), "w") as f:
        f.write("7")
    tensors, full = {}, values()
    from megatron.core.dist_checkpointing import ShardedTensor
    if hasattr(ShardedTensor, "from_rank_offsets_flat"):
        full.update(flattened_values())
    for name, t in full.items():
        raw = t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        tensors[name] = {"dtype": str(t.dtype)[6:], "shape": list(t.shape), "sha256": hashlib.sha256(raw).hexdigest()}
    with open(os.path.join(case, "expected.json"), "w") as f:
        json.dump({"torch": torch.__version__.split("+")[0], "ranks": WORLD, "tensors": tensors,
                   "values": {"iteration": 7, "args.hidden_size": 6, "args.lr": 0.1,
                              "opt_param_scheduler.num_steps": 14}}, f, indent=1)
    print(case)


if __name__ == "__main__":
    main()
