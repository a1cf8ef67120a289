#!/usr/bin/env python3
"""The peers that are libraries, as commands: peers.py NAME SRC DST.

Prints the seconds of the call alone, so that a peer is not charged for starting Python and importing torch.
"""
import logging
import sys
import time
import warnings

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)


def dcp_to_torch(src, dst):
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    return lambda: dcp_to_torch_save(src, dst)


def consolidate_hf(src, dst):
    import os

    from torch.distributed.checkpoint import HuggingFaceStorageReader
    from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

    names = HuggingFaceStorageReader(src).read_metadata().state_dict_metadata
    os.makedirs(dst)
    return lambda: consolidate_safetensors_files(src, dst, {name: 1 for name in names}, num_threads=2)


def torch_to_dcp(src, dst):
    from torch.distributed.checkpoint.format_utils import torch_save_to_dcp

    return lambda: torch_save_to_dcp(src, dst)


PEERS = {"dcp_to_torch": dcp_to_torch, "torch_to_dcp": torch_to_dcp, "consolidate_hf": consolidate_hf}

if __name__ == "__main__":
    call = PEERS[sys.argv[1]](sys.argv[2], sys.argv[3])
    started = time.perf_counter()
    call()
    print("seconds: %.6f" % (time.perf_counter() - started))
