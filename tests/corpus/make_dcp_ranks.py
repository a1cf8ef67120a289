"""Makes dcp-ranks-torch<version>/: a DCP save with use_collectives=False, which writes metadata per rank and no .metadata; and
full.pt with the expected values.

    python tests/corpus/make_dcp_ranks.py
"""

import os
import pathlib
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp

warnings.filterwarnings("ignore")
OUT = pathlib.Path(__file__).parent / f"dcp-ranks-torch{torch.__version__.split('+')[0]}"


def work(rank, world):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29817", RANK=str(rank), WORLD_SIZE=str(world))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Linear(6, 10)
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    common = {"plain": torch.arange(5), "step": 3, "names": ["a", "b"]}
    dcp.save({"model": model.state_dict(), **common, "rank": rank}, checkpoint_id=OUT, use_collectives=False)
    full = {name: value.full_tensor() for name, value in model.state_dict().items()}
    if rank == 0:
        ranks = {"rank": 0, **{f"rank.rank_{r}": r for r in range(1, world)}}
        torch.save({"model": full, **common, **ranks}, OUT / "full.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(work, (3,), nprocs=3)
