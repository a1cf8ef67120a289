"""Runs a function on forked processes that form a gloo process group, for the FSDP oracles.

Importing torch takes longer than a whole test, so it is imported once, before the fork.
"""

import os
import pickle
import sys
import tempfile
import traceback

import torch
import torch.distributed as dist


def _rank(function, rank, world, directory, args):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=world)
    result = function(rank, world, *args)
    dist.barrier()
    dist.destroy_process_group()
    return result


def run(world, function, *args):
    """Returns [function(rank, world, *args) for every rank]. Raises an exception if a rank failed."""
    children, results = [], []
    with tempfile.TemporaryDirectory() as directory:
        for rank in range(world):
            pid = os.fork()
            if pid:
                children.append(pid)
                continue
            status = 1
            try:
                result = _rank(function, rank, world, directory, args)
                with open(f"{directory}/{rank}", "wb") as f:
                    pickle.dump(result, f)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        failed = [rank for rank, pid in enumerate(children) if os.waitpid(pid, 0)[1]]
        if failed:
            raise RuntimeError(f"ranks {failed} failed")
        for rank in range(world):
            with open(f"{directory}/{rank}", "rb") as f:
                results.append(pickle.load(f))
    return results
