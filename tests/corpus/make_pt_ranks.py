"""Makes pt/<case>-torch<version>/: one file per rank as trainers write them, and full.pt with the expected values.

Each case is a model and its optimizer after one step, on gloo and the CPU. Every rank saves with torch.save as verl does:
model_world_size_<N>_rank_<r>.pt, optim_world_size_…, extra_state_world_size_…. full.pt holds the full tensors, gathered by
torch, under the names that fsdpckpt gives them (model.…, optim.…).

    python tests/corpus/make_pt_ranks.py [CASE ...]
"""

import os
import pathlib
import random
import sys
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

warnings.filterwarnings("ignore")
OUT = pathlib.Path(__file__).parent / "pt"
CASES = {"fsdp2": 3, "hsdp": 4, "2d": 4, "tp": 2, "fsdp1-sharded": 2, "fsdp1-local": 2}


def model():
    torch.manual_seed(0)
    m = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Linear(10, 7), torch.nn.LayerNorm(7))
    m.register_buffer("steps", torch.tensor([1, 2, 3]))
    return m


def shard(case, m, world):
    """Shards the model for the case."""
    from torch.distributed.device_mesh import init_device_mesh

    if case.startswith("fsdp1"):
        from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
        from torch.distributed.fsdp.api import LocalStateDictConfig, ShardedStateDictConfig

        m = FullyShardedDataParallel(m, device_id=torch.device("cpu"), use_orig_params=False)
        kind, config = {
            "fsdp1-sharded": (StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig()),
            "fsdp1-local": (StateDictType.LOCAL_STATE_DICT, LocalStateDictConfig()),
        }[case]
        FullyShardedDataParallel.set_state_dict_type(m, kind, config)
        return m
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    if case == "tp":
        return parallelize_module(m, init_device_mesh("cpu", (world,), mesh_dim_names=("tp",)), plan)
    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:
        from torch.distributed._composable.fsdp import fully_shard
    if case == "fsdp2":
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    elif case == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("ddp", "fsdp"))
    else:
        two = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(m, two["tp"], plan)
        mesh = two["dp"]
    fully_shard(m, mesh=mesh)
    return m


def whole(value):
    """The value with all tensors gathered."""
    if hasattr(value, "full_tensor"):
        return value.full_tensor()
    if type(value).__name__ == "ShardedTensor":
        out = torch.empty(value.size(), dtype=value.dtype) if dist.get_rank() == 0 else None
        value.gather(0, out)
        return out
    if isinstance(value, dict):
        return {str(k): whole(v) for k, v in value.items()}
    if isinstance(value, list):
        return [whole(v) for v in value]
    return value


def work(rank, world, case, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    out = OUT / f"{case}-torch{torch.__version__.split('+')[0]}"
    out.mkdir(parents=True, exist_ok=True)
    m = shard(case, model(), world)
    optimizer = torch.optim.AdamW(m.parameters(), lr=0.01)
    m(torch.randn(4, 6, generator=torch.Generator().manual_seed(rank % 2))).sum().backward()
    optimizer.step()
    sets = {"model": m.state_dict()}
    if not case.startswith("fsdp1"):
        sets["optim"] = optimizer.state_dict()
        sets["extra_state"] = {"lr_scheduler": None, "rng": {"cpu": torch.get_rng_state()[:16] + rank, "random": rank}}
    for name, value in sets.items():
        torch.save(value, out / f"{name}_world_size_{world}_rank_{rank}.pt")
    full = {name: whole(value) for name, value in sets.items() if name != "extra_state"}
    if rank == 0:
        torch.save(full, out / "full.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    for case in sys.argv[1:] or CASES:
        mp.spawn(work, (CASES[case], case, random.randint(20000, 40000)), nprocs=CASES[case])
        print(case)
