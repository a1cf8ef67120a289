#!/usr/bin/env python3
"""Runs a peer that is a library as a command: peers.py NAME SRC DST.

Prints the seconds of the call without the start of Python and the import of torch.
"""
import argparse
import logging
import os
import sys
import time
import warnings

warnings.filterwarnings("ignore")
os.environ.update(DS_ACCELERATOR="cpu", TQDM_DISABLE="1")
logging.disable(logging.WARNING)


def dcp_to_torch(src, dst):
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    return lambda: dcp_to_torch_save(src, dst)


def consolidate_hf(src, dst):
    from torch.distributed.checkpoint import HuggingFaceStorageReader
    from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

    names = HuggingFaceStorageReader(src).read_metadata().state_dict_metadata
    os.makedirs(dst)
    return lambda: consolidate_safetensors_files(src, dst, {name: 1 for name in names}, num_threads=2)


def torch_to_dcp(src, dst):
    from torch.distributed.checkpoint.format_utils import torch_save_to_dcp

    return lambda: torch_save_to_dcp(src, dst)


def merge_fsdp_weights(src, dst):
    from accelerate.utils import merge_fsdp_weights as merge

    return lambda: merge(src, dst)


def zero_to_fp32(src, dst):
    from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict as convert

    return lambda: convert(src, dst, max_shard_size=None)


def ds_to_universal(src, dst):
    import glob

    from deepspeed.checkpoint.ds_to_universal import main

    step, = glob.glob(os.path.join(src, "global_step*"))
    args = argparse.Namespace(input_folder=step, output_folder=dst, num_extract_workers=4, num_merge_workers=2,
                              keep_temp_folder=False, strict=True, inject_missing_state=True)
    return lambda: main(args)


PEERS = {f.__name__: f for f in (dcp_to_torch, torch_to_dcp, consolidate_hf, merge_fsdp_weights, zero_to_fp32,
                                 ds_to_universal)}

if __name__ == "__main__":
    call = PEERS[sys.argv[1]](sys.argv[2], sys.argv[3])
    started = time.perf_counter()
    call()
    print("seconds: %.6f" % (time.perf_counter() - started))
