#!/usr/bin/env python3
"""Runs a peer that is a library as a command: peers.py NAME SRC DST.

Prints the seconds of the call, and its processor seconds, without the start of Python and the import of torch.
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


def read_dcp_metadata(src, dst):
    from torch.distributed.checkpoint import FileSystemReader

    return lambda: FileSystemReader(src).read_metadata()


def open_h5py(src, dst):
    import h5py

    def visit():
        with h5py.File(os.path.join(src, "index.h5")) as f:
            f.visititems(lambda name, value: None)
    return visit


def open_safetensors(src, dst):
    from safetensors import safe_open

    def open_all():
        for name in os.listdir(src):
            with safe_open(os.path.join(src, name), "numpy") as f:
                f.metadata()
                for key in f.keys():
                    f.get_slice(key).get_shape()
    return open_all


def rank_files(src):
    """The files of a directory of one file per rank, in the order of the ranks."""
    return [os.path.join(src, name) for name in sorted(os.listdir(src), key=lambda n: int(n.split("_rank_")[1][:-3]))]


def load_rank_files(src, dst):
    import torch

    return lambda: [torch.load(name, mmap=True, weights_only=True) and None for name in rank_files(src)]


def merge_rank_files(src, dst):
    """Merges files of plain tensors that are cut along their first dimension, as scripts of trainers do."""
    import torch

    def merge():
        whole = {}
        for name in rank_files(src):
            for key, value in torch.load(name, weights_only=True).items():
                whole.setdefault(key, []).append(value)
        torch.save({key: torch.cat(values) for key, values in whole.items()}, dst)
    return merge


PEERS = {f.__name__: f for f in (dcp_to_torch, torch_to_dcp, consolidate_hf, merge_fsdp_weights, zero_to_fp32, ds_to_universal,
                                 read_dcp_metadata, open_h5py, open_safetensors, load_rank_files, merge_rank_files)}

if __name__ == "__main__":
    call = PEERS[sys.argv[1]](sys.argv[2], sys.argv[3])
    started, used = time.perf_counter(), time.process_time()
    call()
    print("seconds: %.6f" % (time.perf_counter() - started))
    print("processor: %.6f" % (time.process_time() - used))
