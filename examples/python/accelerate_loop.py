"""A training loop with Accelerate that saves and resumes HDF5 checkpoints, and at the end exports the model.

    accelerate launch examples/python/accelerate_loop.py RUN [STEPS]

The calls are those of PyTorch, so this also works with Accelerate's FSDP plugin. Folders that `accelerator.save_state` wrote are
read by every command (docs/TRAINERS.md).
"""

import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import fsdpckpt
from fsdpckpt.torch import HDF5Reader, HDF5Writer


def main():
    run, steps = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 4
    run.mkdir(parents=True, exist_ok=True)
    accelerator = Accelerator()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(101, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 101))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))

    def state(step):
        weights, moments = get_state_dict(model, optimizer.optimizer)
        return {"model": weights, "optim": moments, "step": step}

    step = 0
    saved = sorted(run.glob("step-*"), key=lambda path: int(path.name[5:]))
    if saved:
        found = state(0)
        dcp.load(found, storage_reader=HDF5Reader(saved[-1]))
        set_state_dict(model, optimizer.optimizer, model_state_dict=found["model"], optim_state_dict=found["optim"])
        step = found["step"]

    while step < steps:
        torch.manual_seed(step)  # in a real loop: the data of this step
        words = torch.randint(101, (8, 16), device=accelerator.device)
        loss = nn.functional.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        accelerator.print(f"step {step} loss {loss.item():.9f}", flush=True)
        if step % 2 == 0:
            dcp.save(state(step), storage_writer=HDF5Writer(run / f"step-{step}"))

    if accelerator.is_main_process:
        fsdpckpt.export(run / f"step-{step}", run / "hub", force=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
