#!/usr/bin/env python3
"""DCP checkpoints that fsdpckpt wrote, loaded by dcp.load into real models on other meshes.

A model and its AdamW state are saved with torch.save and converted to DCP in several layouts. Four processes load each into
FSDP2, TP, 2D FSDP+TP and HSDP models and their optimizers. Every element must be the one that was saved.

usage: dcp_load.py FSDPCKPT        exit 77 without torch or gloo
"""
import json
import os
import subprocess
import sys
import tempfile

try:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    import torch.multiprocessing as mp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
except ImportError as e:
    print("skipped: %s" % e)
    sys.exit(77)

from torch_values import differences, kept

RANKS = 4
LAYOUTS = {
    "full": ["consolidate"],
    "dp3": ["reshard", "--dp", "3"],
    "dp3tp2": ["reshard", "--dp", "3", "--tp", "2"],
    "hsdp": ["reshard", "--replicas", "2", "--dp", "2"],
}
PLAN = {"up": "colwise", "down": "rowwise"}
TARGETS = ["fsdp", "tp", "2d", "hsdp"]


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(6, 22)
        self.norm = torch.nn.LayerNorm(22)
        self.down = torch.nn.Linear(22, 7, bias=False)
        self.scale = torch.nn.Parameter(torch.rand(1))

    def forward(self, x):
        return self.down(self.norm(self.up(x))) * self.scale


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.8, 0.9))


def make(seed):
    torch.manual_seed(seed)
    model = Block()
    optimizer = optimizer_of(model)
    model(torch.rand(3, 6)).sum().backward()
    optimizer.step()
    return model, optimizer


def cut(kind):
    torch.manual_seed(99)
    model = Block()
    names = {"fsdp": ("dp",), "tp": ("tp",), "2d": ("dp", "tp"), "hsdp": ("replicate", "dp")}[kind]
    sizes = (RANKS,) if len(names) == 1 else (2, 2)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    if "tp" in names:
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if kind != "tp":
        fully_shard(model, mesh=mesh if kind == "hsdp" else mesh["dp"])
    optimizer = optimizer_of(model)
    for p in model.parameters(): # gives the optimizer a state to load into
        p.grad = torch.zeros_like(p)
    optimizer.step()
    return model, optimizer


def whole(value):
    """Gathers each tensor. All ranks do so in the same order."""
    if isinstance(value, dict):
        return {key: whole(of) for key, of in value.items()}
    if isinstance(value, list):
        return list(map(whole, value))
    return value.full_tensor() if isinstance(value, DTensor) else value


def load(rank, home, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(RANKS))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    truth = kept(torch.load(os.path.join(home, "truth.pt"), weights_only=True))
    problems = []
    for kind in TARGETS:
        for layout in LAYOUTS:
            model, optimizer = cut(kind)
            weights, states = get_state_dict(model, optimizer)
            state = {"model": weights, "optim": states, "epoch": 0}
            before = list(differences(truth, whole(state))) # everything, so a load that does nothing fails
            dcp.load(state, checkpoint_id=os.path.join(home, layout))
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
            weights, states = get_state_dict(model, optimizer)
            after = list(differences(truth, whole({"model": weights, "optim": states, "epoch": state["epoch"]})))
            if after or len(before) < len(truth["model"]):
                problems.append("%s into %s: %s" % (layout, kind, (after or ["nothing to load"])[:3]))
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        print("\n".join(problems) or "%d loads on %d ranks, all equal" % (len(TARGETS) * len(LAYOUTS), RANKS))
    if problems:
        sys.exit(1)


def main():
    program = os.path.abspath(sys.argv[1])
    with tempfile.TemporaryDirectory(prefix="fc-dcp-load-") as home:
        model, optimizer = make(1)
        weights, states = get_state_dict(model, optimizer)
        path, plan = os.path.join(home, "truth.pt"), os.path.join(home, "plan.json")
        torch.save({"model": weights, "optim": states, "epoch": 7}, path)
        with open(plan, "w", encoding="utf-8") as f:
            json.dump(PLAN, f)
        for layout, command in LAYOUTS.items():
            plans = ["--tp-plan", plan] if "--tp" in command else []
            subprocess.run([program, *command, path, "-o", os.path.join(home, layout), "--to", "dcp", "-q", *plans],
                           check=True)
        port = 20000 + os.getpid() % 20000
        try:
            mp.start_processes(load, args=(home, port), nprocs=RANKS, start_method="fork")
        except mp.ProcessExitedException as e:
            return e.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
