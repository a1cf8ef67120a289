"""A training loop with FSDP2 that saves and resumes HDF5 checkpoints, and at the end exports the model.

    torchrun --nproc-per-node 2 examples/python/fsdp2.py RUN [STEPS]

Run it again with more steps, or on another number of ranks, and it goes on from the last checkpoint.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fsdpckpt
from fsdpckpt.torch import HDF5Reader, HDF5Writer


def main():
    run, steps = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 4
    run.mkdir(parents=True, exist_ok=True)
    gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpu else "gloo")
    mesh = init_device_mesh("cuda" if gpu else "cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(101, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 101)).to(mesh.device_type)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def state(step):
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optim": moments, "step": step}

    step = 0
    saved = sorted(run.glob("step-*"), key=lambda path: int(path.name[5:]))
    if saved:
        found = state(0)
        dcp.load(found, storage_reader=HDF5Reader(saved[-1]))
        set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optim"])
        step = found["step"]

    while step < steps:
        torch.manual_seed(step)  # in a real loop: the data of this step
        words = torch.randint(101, (8, 16), device=mesh.device_type)
        loss = nn.functional.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.9f}", flush=True)
        if step % 2 == 0:
            dcp.save(state(step), storage_writer=HDF5Writer(run / f"step-{step}"))

    if dist.get_rank() == 0:
        fsdpckpt.export(run / f"step-{step}", run / "hub", force=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
