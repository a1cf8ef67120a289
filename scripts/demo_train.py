"""One rank of the demo: a small Llama-like model under FSDP2, a step of AdamW, saved with torch's own checkpoint code.

Usage: torchrun --nproc-per-node 4 demo_train.py DIRECTORY
"""

import logging
import os
import sys
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Block(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = nn.Linear(dim, dim, bias=False)
        self.v_proj = nn.Linear(dim, dim, bias=False)
        self.o_proj = nn.Linear(dim, dim, bias=False)
        self.gate_proj = nn.Linear(dim, hidden, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)
        self.norm = nn.RMSNorm(dim)

    def forward(self, x):
        x = x + self.o_proj(torch.sigmoid(self.q_proj(x) * self.k_proj(x)) * self.v_proj(x))
        h = self.norm(x)
        return x + self.down_proj(nn.functional.silu(self.gate_proj(h)) * self.up_proj(h))


class Model(nn.Module):
    def __init__(self, dim=64, hidden=172, layers=2, words=257):
        super().__init__()
        self.embed_tokens = nn.Embedding(words, dim)
        self.layers = nn.ModuleList(Block(dim, hidden) for _ in range(layers))
        self.lm_head = nn.Linear(dim, words, bias=False)

    def forward(self, ids):
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


def main():
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = Model()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    ids = torch.randint(0, 257, (4, 16))
    nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
    optimizer.step()
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": state, "step": 1}, checkpoint_id=sys.argv[1])
    dist.destroy_process_group()
    os._exit(0)  # while Python ends, a thread of torch that waits for the GIL can abort the process (seen with torch 2.15)


if __name__ == "__main__":
    main()
