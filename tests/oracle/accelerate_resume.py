#!/usr/bin/env python3
"""Resuming in Hugging Face accelerate: what Accelerator.save_state wrote of two FSDP models with two ranks becomes folders
for other numbers of ranks, with one command each. Accelerator.load_state takes them with two and with four ranks. Every
value must be what the first run held, and the next step the same, with FSDP2 and with FSDP1.

usage: accelerate_resume.py FSDPCKPT      exit 77 without torch or accelerate
"""
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
try:
    import torch
    import torch.distributed as dist
    import accelerate
    from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils import DistributedType
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
except ImportError as e:
    print("skipped: %s" % e)
    sys.exit(77)

from checks import leave, must
from checks import must_run as run
from torch_values import must_equal

SIDE_FILES = re.compile(r"(scheduler|random_states|custom_checkpoint)")


class Counter:
    """An object that is registered for checkpointing."""

    def __init__(self):
        self.count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def build(version):
    """accelerate turns FSDP on only with a GPU. What save_state and load_state do then works on any device."""
    accelerator = Accelerator(cpu=True)  # joins the ranks
    PartialState().distributed_type = accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=version, state_dict_type="SHARDED_STATE_DICT")
    torch.manual_seed(3 + dist.get_rank() * (version == 2))  # what is not loaded differs
    models = [torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3, bias=False)),
              torch.nn.Sequential(torch.nn.Linear(3, 2))]
    if version == 2:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        models = [fully_shard(m, mesh=mesh) for m in models]
    else:
        models = [FullyShardedDataParallel(m, device_id=torch.device("cpu"), use_orig_params=True) for m in models]
    accelerator._models = models
    accelerator._optimizers = [AcceleratedOptimizer(torch.optim.AdamW(m.parameters(), lr=0.05), device_placement=False)
                               for m in models]
    accelerator._schedulers = [torch.optim.lr_scheduler.StepLR(accelerator._optimizers[0].optimizer, 2)]
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    return accelerator, counter


def step(accelerator, number):
    torch.manual_seed(number)
    value = torch.randn(4, 5)  # the same data on each rank, however many there are
    for model in accelerator._models:
        value = model(value)
    value.square().sum().backward()
    for adam in accelerator._optimizers:
        adam.step()
        adam.zero_grad()
    accelerator._schedulers[0].step()


def state(accelerator, counter):
    """All that the run holds, whole, on rank 0."""
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    pairs = [get_state_dict(m, o.optimizer, options=whole) for m, o in zip(accelerator._models, accelerator._optimizers)]
    return {"models": [dict(m) for m, _ in pairs], "optimizers": [o for _, o in pairs], "count": counter.count,
            "scheduler": accelerator._schedulers[0].state_dict()}


def worker(action, version, folder, out):
    accelerator, counter = build(int(version))
    if action == "save":
        for number in range(3):
            step(accelerator, number)
        counter.count = 17
        accelerator.save_state(folder)
    else:
        if version == "1":  # accelerate asks DCP only for states that the optimizer has already, also of its own folders
            step(accelerator, 99)
        accelerator.load_state(folder)
    values = [state(accelerator, counter)]
    step(accelerator, 7)
    values.append(state(accelerator, counter))
    if accelerator.is_main_process:
        torch.save(values, out)
    dist.barrier()
    dist.destroy_process_group()
    leave()


def launch(ranks, *args):
    env = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1",
           "PYTHONPATH": os.path.dirname(os.path.abspath(__file__))}
    r = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
                        os.path.abspath(__file__), "--worker", *args], capture_output=True, text=True, env=env)
    if r.returncode != 0:
        print(r.stdout[-3000:], r.stderr[:6000])
        sys.exit("%s ranks, %s: exit %d" % (ranks, args[0], r.returncode))


def close(want, got, where):
    """The step after: sums over other numbers of ranks may round differently."""
    if isinstance(want, torch.Tensor):
        must(torch.allclose(want, got, rtol=1e-5, atol=1e-6), where, want, got)
    elif isinstance(want, dict):
        must(want.keys() == got.keys(), where, want.keys(), got.keys())
        for key in want:
            close(want[key], got[key], "%s.%s" % (where, key))
    elif isinstance(want, list):
        for i, pair in enumerate(zip(want, got)):
            close(*pair, "%s.%d" % (where, i))


def resume(program, version, source, ranks, *cut):
    """One command, and the files that are not of FSDP."""
    folder = "resume-%s-%d" % (version, ranks)
    run(program, "reshard", source, "-o", folder, "--to", "accelerate", "-q", *cut)
    must(not any(SIDE_FILES.match(n) for n in os.listdir(folder)), os.listdir(folder))
    for name in os.listdir(source):
        if SIDE_FILES.match(name):
            shutil.copy(os.path.join(source, name), folder)
    launch(ranks, "load", version, folder, "got.pt")
    (want, after), (got, then) = torch.load("wanted.pt"), torch.load("got.pt")
    must_equal(want, got)
    close(after, then, "after")


def main():
    program = os.path.abspath(sys.argv[1])
    with tempfile.TemporaryDirectory(prefix="fc-accelerate-") as home:
        os.chdir(home)
        with open("plan.json", "w") as f:
            json.dump({"0": "colwise", "2": "rowwise"}, f)
        launch(2, "save", "1", "checkpoint-1", "wanted.pt")
        resume(program, "1", "checkpoint-1", 2, "--dp", "3")
        launch(2, "save", "2", "checkpoint-2", "wanted.pt")
        resume(program, "2", "checkpoint-2", 4, "--dp", "4")
        resume(program, "2", "checkpoint-2", 2, "--dp", "2", "--tp", "2", "--tp-plan", "plan.json")
    print("accelerate %s resumed" % accelerate.__version__)
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(*sys.argv[2:])
    else:
        sys.exit(main())
