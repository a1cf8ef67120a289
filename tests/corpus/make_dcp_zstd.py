"""Makes dcp-zstd-torch<version>/: DCP whose items FileSystemWriter compressed with its extension ZStandard, and full.pt with the
tensors that torch gathered.

FSDP2 on tensor parallelism (2 × 2) with AdamW, objects, an empty tensor, and one of 8 MiB that compresses to a few hundred bytes, because
every file is small. Needs pip install zstandard.

    python tests/corpus/make_dcp_zstd.py
"""

import logging
import pathlib
import random
import shutil

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.state_dict import get_state_dict

from make_pt_ranks import model, shard, whole

OUT = pathlib.Path(__file__).parent / ("dcp-zstd-torch" + torch.__version__.split("+")[0])
WORLD = 4


def work(rank, port):
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:%d" % port, rank=rank, world_size=WORLD)
    m = shard("2d", model(), WORLD)
    optimizer = torch.optim.AdamW(m.parameters(), lr=0.01)
    m(torch.randn(4, 6, generator=torch.Generator().manual_seed(rank % 2))).sum().backward()
    optimizer.step()
    weights, state = get_state_dict(m, optimizer)
    value = {"model": weights, "optim": state, "step": 7, "words": ["a", "b"] * 40, "none": torch.zeros(0, 3),
             "many": (torch.arange(1 << 21, dtype=torch.int32) // 4096).view(2048, 1024), "turned": torch.arange(12.0).view(3, 4).t()}
    full = whole(value)
    dcp.save(value, storage_writer=dcp.FileSystemWriter(OUT, _extensions=[ZStandard()]))
    if rank == 0:
        full["many"] = None  # 8 MiB
        torch.save(full, OUT / "full.pt")
        back = {"many": torch.zeros_like(value["many"]), "turned": torch.zeros(4, 3)}
        dcp.load(back, checkpoint_id=OUT, no_dist=True)
        assert torch.equal(back["many"], value["many"]) and torch.equal(back["turned"], value["turned"])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    shutil.rmtree(OUT, ignore_errors=True)
    mp.spawn(work, (random.randint(20000, 40000),), nprocs=WORLD)
