#!/usr/bin/env python3
"""Resuming in Hugging Face accelerate. Its save functions run on two ranks, one `reshard` converts the checkpoint, and its load
functions read the result on three ranks. The next training step must give the same values.

usage: accelerate_resume.py FSDPCKPT      exit 77 without torch or accelerate
"""
import os
import subprocess
import sys
import tempfile
from types import SimpleNamespace

try:
    import torch
    import torch.distributed as dist
    import accelerate
    from accelerate import FullyShardedDataParallelPlugin, PartialState
    from accelerate.utils import fsdp_utils
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
except ImportError as e:
    print("skipped: %s" % e)
    sys.exit(77)

from checks import must_run as run


def build():
    """accelerate enables FSDP only with a GPU, but the functions behind save_state and load_state work on any device."""
    PartialState(cpu=True)  # makes the process group
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3, bias=False))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    accelerator = SimpleNamespace(wait_for_everyone=dist.barrier, process_index=dist.get_rank(),
                                  num_processes=dist.get_world_size(), is_main_process=dist.get_rank() == 0,
                                  is_fsdp2=True, device=torch.device("cpu"), mixed_precision="no", parallelism_config=None)
    return accelerator, plugin, model, torch.optim.AdamW(model.parameters(), lr=0.05)


def step(model, adam, number):
    torch.manual_seed(number)
    model(torch.randn(4, 5)).square().sum().backward()  # the same data on every rank, for any number of ranks
    adam.step()
    adam.zero_grad()


def worker(action, folder, out):
    accelerator, plugin, model, adam = build()
    if action == "save":
        for number in range(2):
            step(model, adam, number)
        fsdp_utils.save_fsdp_model(plugin, accelerator, model, folder)
        fsdp_utils.save_fsdp_optimizer(plugin, accelerator, adam, model, folder)
    else:
        fsdp_utils.load_fsdp_model(plugin, accelerator, model, folder)
        fsdp_utils.load_fsdp_optimizer(plugin, accelerator, adam, model, folder)
    step(model, adam, 7)  # without the moments of the earlier steps the result would differ
    state = {name: p.full_tensor().clone() for name, p in model.state_dict().items()}
    if accelerator.is_main_process:
        torch.save(state, out)
    dist.barrier()
    dist.destroy_process_group()


def launch(ranks, *args):
    env = {**os.environ, "ACCELERATE_USE_CPU": "true", "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "OMP_NUM_THREADS": "1",
           "PYTHONPATH": os.path.dirname(os.path.abspath(__file__))}
    r = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
                        os.path.abspath(__file__), "--worker", *args], capture_output=True, text=True, env=env)
    if r.returncode != 0:
        print(r.stdout[-3000:], r.stderr[:6000])
        sys.exit("%s ranks, %s: exit %d" % (ranks, args[0], r.returncode))


def main():
    program = os.path.abspath(sys.argv[1])
    with tempfile.TemporaryDirectory(prefix="fc-accelerate-") as home:
        os.chdir(home)
        launch(2, "save", "checkpoint-1", "wanted.pt")
        # One DCP checkpoint holds model and optimizer; accelerate finds it under both names.
        os.mkdir("resume")
        run(program, "reshard", "checkpoint-1", "-o", "resume/pytorch_model_fsdp_0", "--to", "dcp", "--dp", "3", "-q")
        os.symlink("pytorch_model_fsdp_0", "resume/optimizer_0")
        launch(3, "load", "resume", "got.pt")
        wanted, got = torch.load("wanted.pt"), torch.load("got.pt")
        assert wanted.keys() == got.keys(), (wanted.keys(), got.keys())
        for name, tensor in wanted.items():
            assert torch.allclose(tensor, got[name], rtol=1e-6, atol=1e-7), (name, tensor, got[name])
    print("accelerate %s resumed" % accelerate.__version__)
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(*sys.argv[2:])
    else:
        sys.exit(main())
