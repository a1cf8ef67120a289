"""Makes pt/fsdp1-hybrid-local-torch<version>/: FSDP1's LOCAL_STATE_DICT with HYBRID_SHARD, two groups of two ranks that hold the
same, and full.pt with the expected values.

Only torch 2.0 can save this. Later versions (up to 2.15) fail on the ranks of the second group ("Global rank 0 does not exist in
input process group"). torch 2.0 runs FSDP only on GPUs, so its checks for one are answered here; nothing is computed.

    python3.11 -m venv V && V/bin/pip install torch==2.0.1 'numpy<2'
    V/bin/python tests/corpus/make_pt_hybrid.py
"""

import os
import random
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from make_pt_ranks import OUT, model
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, StateDictType, _init_utils

WORLD = 4


def without_gpu():
    _init_utils._get_compute_device = lambda *args: torch.device("cpu")
    torch.cuda.is_available = lambda: True
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.synchronize = lambda *args: None
    torch.cuda.Stream = torch.cuda.current_stream = object
    torch.cuda.stream = lambda stream: nullcontext()


def truth(parts, shapes):
    """The state of each parameter, cut out of the flat parameter's state in order."""
    state, offset = {name: {"step": parts[0]["step"]} for name, _ in shapes}, 0
    for name, shape in shapes:
        for key in ("exp_avg", "exp_avg_sq"):
            whole = torch.cat([part[key] for part in parts])
            state[name][key] = whole[offset : offset + shape.numel()].reshape(shape).clone()
        offset += shape.numel()
    return state


def work(rank, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    without_gpu()
    out = OUT / f"fsdp1-hybrid-local-torch{torch.__version__.split('+')[0]}"
    out.mkdir(parents=True, exist_ok=True)
    shards = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    m = model()
    full = {"model": m.state_dict()}
    shapes = [(name, p.shape) for name, p in m.named_parameters()]
    m = FullyShardedDataParallel(m, process_group=(shards[rank // 2], replicas[rank % 2]),
                                 sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    with FullyShardedDataParallel.state_dict_type(m, StateDictType.LOCAL_STATE_DICT):
        torch.save(m.state_dict(), out / f"model_world_size_{WORLD}_rank_{rank}.pt")
    optimizer = torch.optim.AdamW(m.parameters(), lr=0.0)  # makes state without changing the parameters
    torch.manual_seed(rank % 2)
    for p in m.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    state = optimizer.state_dict()
    torch.save(state, out / f"optim_world_size_{WORLD}_rank_{rank}.pt")
    parts = [None] * 2
    dist.all_gather_object(parts, state["state"][0], group=shards[rank // 2])
    if rank == 0:
        full["optim"] = {"state": truth(parts, shapes)}
        torch.save(full, out / "full.pt")
    dist.barrier()


if __name__ == "__main__":
    mp.spawn(work, (random.randint(20000, 40000),), nprocs=WORLD)
