#!/usr/bin/env python3
"""Makes deepspeed/*: ZeRO checkpoints by real DeepSpeed (gloo, CPU), with expected.json.

    make_deepspeed.py CORPUS [CASE...]          a Python with torch and deepspeed

A case called *-universal is the output of ds_to_universal.py for the case before it, with the same expected values.

The expected values are taken from the running engine before it saves (safe_get_full_fp32_param,
safe_get_full_optimizer_state). DeepSpeed's own zero_to_fp32 must agree; values that it loses or changes are printed.
"""
import argparse
import hashlib
import json
import os
import shutil
import socket
import sys

os.environ.update(DS_ACCELERATOR="cpu", DS_BUILD_OPS="0")

import torch
import torch.multiprocessing as mp
from torch import nn

# ranks, stage, dtype, further configuration
CASES = {
    "zero0-bf16": (2, 0, "bf16", {}),
    "zero1-bf16": (2, 1, "bf16", {}),
    "zero2-bf16": (3, 2, "bf16", {}),
    "zero2-fp16": (2, 2, "fp16", {}),
    "zero3-bf16": (2, 3, "bf16", {}),
    "zero3-subgroups": (4, 3, "fp32", {"sub_group_size": 40}),
}


UNIVERSAL = ("zero1-bf16-universal", "zero3-bf16-universal")


class Model(nn.Module):
    """Sizes that do not divide evenly, a scalar, three dimensions, buffers, frozen and tied parameters."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.cube = nn.Parameter(torch.randn(3, 2, 5))
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.l1 = nn.Linear(6, 7)
        self.norm = nn.LayerNorm(7)
        self.l2 = nn.Linear(7, 6)
        self.frozen = nn.Linear(6, 5)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("freqs", torch.arange(4.))
        self.frozen.requires_grad_(False)

    def forward(self, x):
        h = self.l2(self.norm(self.l1(self.embed(x)))) * self.scale + self.cube.sum()
        return self.head(h).float().square().mean() + self.frozen(h).float().sum() * 0.01


def record(tensors, name, t):
    raw = t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    tensors[name] = {"dtype": str(t.dtype)[6:], "shape": list(t.shape), "sha256": hashlib.sha256(raw).hexdigest()}


def truth(engine, stage):
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
    tensors = {}
    if stage in (1, 2):  # torch's AdamW makes its state in the first step, too late for DeepSpeed
        for group, flat in zip(engine.optimizer.bit16_groups, engine.optimizer.single_partition_of_fp32_groups):
            for p in group:
                if p._hp_mapping is not None:
                    p._hp_mapping.set_optim_state_fragment(flat, engine.optimizer.optimizer.state[flat])
    for name, p in engine.module.named_parameters(remove_duplicate=False):
        if p.requires_grad and stage > 0:
            record(tensors, "model." + name, safe_get_full_fp32_param(p).view(shapes[name]))
            if name != "head.weight":
                for key in ("exp_avg", "exp_avg_sq"):
                    record(tensors, "optim.state.%s.%s" % (name, key),
                           safe_get_full_optimizer_state(p, key).view(shapes[name]))
        else:
            import deepspeed
            with deepspeed.zero.GatheredParameters([p], enabled=stage == 3):
                record(tensors, "model." + name, p.data)
    for name, b in engine.module.named_buffers():
        record(tensors, "model." + name, b)
    return tensors


def run(rank, world, port, case, out):
    global shapes
    _, stage, dtype, more = CASES[case]
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=str(port))
    import deepspeed
    deepspeed.init_distributed("gloo")
    torch.manual_seed(1)
    model = Model()
    shapes = {n: p.shape for n, p in model.named_parameters(remove_duplicate=False)}
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
              {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0}]
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage, **more},
              "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    if dtype != "fp32":
        config[dtype] = {"enabled": True, **({"loss_scale": 8} if dtype == "fp16" else {})}
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups, lr=1e-2), config=config)
    for i in range(2):
        engine.backward(engine(torch.tensor([[1 + rank, 2, 3 + i]])))
        engine.step()
    tensors = truth(engine, stage)
    engine.save_checkpoint(out, client_state={"epoch": 3, "note": "hello"})
    if rank == 0:
        with open(os.path.join(out, "expected.json"), "w") as f:
            json.dump({"deepspeed": deepspeed.__version__, "torch": torch.__version__.split("+")[0], "ranks": world,
                       "stage": stage, "case": case, "tensors": tensors}, f, indent=1)


def check(out):
    """Compares zero_to_fp32 with the expected values. It also converts buffers to float32."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    with open(os.path.join(out, "expected.json")) as f:
        expected = json.load(f)["tensors"]
    found = {}
    for name, t in get_fp32_state_dict_from_zero_checkpoint(out).items():
        record(found, "model." + name, t)
    for name, want in expected.items():
        if name.startswith("model.") and name != "model.freqs":
            if name not in found:
                print("%s: zero_to_fp32 loses %s" % (out, name))
            elif found[name] != want:
                print("%s: zero_to_fp32 has other values for %s" % (out, name))


def make_universal(of, out):
    from deepspeed.checkpoint import ds_to_universal
    args = argparse.Namespace(input_folder=os.path.join(of, "global_step2"), strict=True, inject_missing_state=True,
                              output_folder=os.path.join(out, "global_step2_universal"), num_extract_workers=1,
                              num_merge_workers=1, keep_temp_folder=False)
    ds_to_universal.main(args)
    shutil.copy(os.path.join(of, "expected.json"), out)


def main():
    import deepspeed
    corpus, wanted = sys.argv[1], sys.argv[2:] or [*CASES, *UNIVERSAL]
    for case in wanted:
        out = os.path.join(corpus, "deepspeed", "%s-%s" % (deepspeed.__version__, case))
        shutil.rmtree(out, ignore_errors=True)
        os.makedirs(out)
        if case in UNIVERSAL:
            make_universal(out[:-len("-universal")], out)
            continue
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        world = CASES[case][0]
        mp.spawn(run, args=(world, port, case, out), nprocs=world)
        if CASES[case][1] > 0:
            check(out)
        for name in ("zero_to_fp32.py", "zero_to_torch.py"):
            if os.path.exists(os.path.join(out, name)):
                os.remove(os.path.join(out, name))
        print(out)


if __name__ == "__main__":
    main()
