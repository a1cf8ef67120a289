#!/usr/bin/env python3
"""Real ranks save a model with pipeline stages, and one with replicas (HSDP), with dcp.save. inspect tells them apart: a stage holds
only its own layers, and its ranks are not drawn as replicas of others.

usage: pipeline.py FSDPCKPT       exit 77 without torch
"""
import json
import os
import sys
import tempfile

try:
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
except ImportError as e:
    print("skipped: %s" % e)
    sys.exit(77)

import gloo
from checks import check, finish, must_run

LAYER = {"attn.weight": (8, 4), "mlp.weight": (16, 4), "norm.weight": (4,)}
LAYERS = 4


def save(rank, world, home):
    for stages, shards in ((2, 2), (2, 3), (3, 2)):
        if stages * shards != world:
            continue
        mesh = init_device_mesh("cpu", (stages, shards), mesh_dim_names=("pp", "dp"))
        stage, of_stage = mesh.get_local_rank("pp"), mesh["dp"]
        held = [n for n in range(stages * 2) if n // 2 == stage]
        state = {f"layers.{n}.{w}": distribute_tensor(torch.randn(*s), of_stage, [Shard(0)]) for n in held for w, s in LAYER.items()}
        name = {0: "embed.weight", stages - 1: "lm_head.weight"}.get(stage)
        if name:
            state[name] = distribute_tensor(torch.randn(32, 4), of_stage, [Shard(0)])
        dcp.save({"model": state}, checkpoint_id=os.path.join(home, f"pp{stages}dp{shards}"))
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "dp"))
    state = {f"layers.{n}.{w}": distribute_tensor(torch.ones(*s), mesh, [Replicate(), Shard(0)])
             for n in range(LAYERS) for w, s in LAYER.items()}
    dcp.save({"model": state}, checkpoint_id=os.path.join(home, f"hsdp{world}"))


def layout(program, path):
    text = must_run(program, "inspect", path).stdout
    listed = json.loads(must_run(program, "inspect", path, "--json").stdout)
    line = next(line for line in text.splitlines() if line.startswith("Layout"))
    return text, line.split(None, 1)[1], listed


def main():
    program = os.path.abspath(sys.argv[1])
    with tempfile.TemporaryDirectory() as home:
        for world in (4, 6):
            gloo.run(world, save, home)
            text, line, _ = layout(program, os.path.join(home, f"hsdp{world}"))
            check(line.startswith(f"{world} ranks, mesh replicate 2 × dp {world // 2}"), f"hsdp{world}: {line}")
            check("Held" in text, f"hsdp{world} holds replicas")
        for stages, shards in ((2, 2), (2, 3), (3, 2)):
            path = os.path.join(home, f"pp{stages}dp{shards}")
            text, line, listed = layout(program, path)
            check(line.startswith(f"{stages} pipeline stages, each of {shards} ranks, mesh dp {shards}"), f"{path}: {line}")
            check("Replicate" not in text and "Held" not in text, f"{path}: {text}")
            for stage in range(stages):
                one = must_run(program, "inspect", path, "-t", f"model.layers.{2 * stage}.mlp.weight").stdout
                ranks = range(stage * shards, (stage + 1) * shards)
                check(all(f"rank {rank} " in one for rank in ranks) and "held by" not in one and "ranks" not in one, one)
    return finish("pipeline")


if __name__ == "__main__":
    sys.exit(main())
