"""What the tests of the package share: they skip (77) where a package is missing."""

import os
import signal
import sys
import unittest
from pathlib import Path

CORPUS = Path(os.environ["FSDPCKPT_CORPUS"]).resolve()
GOOD = CORPUS / "good"
SKIPPED = 77


def skip(why):
    print(f"skipped: {why}")
    sys.exit(SKIPPED)


def main(*modules):
    """Runs the tests of the calling file if `modules` can be imported."""
    for module in modules:
        try:
            __import__(module)
        except ImportError as error:
            skip(error)
    unittest.main(verbosity=1)


def interrupt(child):
    """Sends Ctrl-C to a child process that still writes to its pipes. Returns its exit status and stderr."""
    child.send_signal(signal.SIGINT)
    error = child.communicate()[1]
    return child.returncode, error.decode()


def load_dcp(path):
    """The state dict that PyTorch loads, or None where it cannot."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state = {}
    try:
        _load_state_dict(
            state, storage_reader=FileSystemReader(path), planner=_EmptyStateDictLoadPlanner(), no_dist=True
        )
    except Exception:
        return None
    return state


def find(state, name):
    """The value called `name`, whose keys may contain dots; None if there is none."""
    if hasattr(state, "keys") and name in state:
        return state[name]
    for key, value in state.items() if hasattr(state, "items") else enumerate(state):
        if name == str(key):
            return value
        if name.startswith(f"{key}.") and (hasattr(value, "items") or isinstance(value, (list, tuple))):
            found = find(value, name[len(str(key)) + 1 :])
            if found is not None:
                return found
    return None


def torch_bytes(tensor):
    import torch

    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b""
