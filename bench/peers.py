#!/usr/bin/env python3
"""Runs a peer that is a library as a command: peers.py NAME SRC DST [MORE].

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


def isal_inflate(src, dst):
    from concurrent.futures import ThreadPoolExecutor

    import h5py
    from isal import isal_zlib

    chunks = []
    with h5py.File(src) as file:
        file.visititems(lambda _, x: chunks.extend(
            x.id.read_direct_chunk(x.id.get_chunk_info(i).chunk_offset)[1] for i in range(x.id.get_num_chunks())
        ) if isinstance(x, h5py.Dataset) and x.chunks else None)

    def inflate():
        with ThreadPoolExecutor(2) as pool:
            for _ in pool.map(lambda chunk: len(isal_zlib.decompress(chunk)), chunks):
                pass

    return inflate


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


def torchtitan_to_hf(src, dst, folder):
    """What torchtitan's scripts/checkpoint_conversion/convert_to_hf.py does, with the model of `folder`/config.json."""
    import json

    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import HuggingFaceStorageWriter
    from torchtitan.components.checkpointer import ModelWrapper
    from torchtitan.models import llama3
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear

    with open(os.path.join(folder, "config.json")) as f:
        c = json.load(f)
    init, dim, words = {"weight": torch.nn.init.zeros_}, c["hidden_size"], c["vocab_size"]
    rope = ComplexRoPE.Config(dim=dim // c["num_attention_heads"], max_seq_len=64, theta=500000, scaling="llama")
    layers = llama3._build_llama3_layers(
        n_layers=c["num_hidden_layers"], dim=dim, n_heads=c["num_attention_heads"], n_kv_heads=c["num_key_value_heads"],
        hidden_dim=c["intermediate_size"], rope=rope, attn_backend="flex")
    config = llama3.Llama3Model.Config(
        dim=dim, vocab_size=words, layers=layers, norm=layers[0].attention_norm,
        tok_embeddings=Embedding.Config(num_embeddings=words, embedding_dim=dim, param_init=init),
        lm_head=Linear.Config(in_features=dim, out_features=words, param_init=init))
    torch.set_default_dtype(torch.bfloat16)  # the checkpoint's; it would be twice as much in the script's float32

    @torch.inference_mode()
    def convert():
        with torch.device("cpu"):
            model = ModelWrapper(config.build())
        state = model._get_state_dict()
        dcp.load(state, checkpoint_id=src)
        adapter = llama3.Llama3StateDictAdapter(config, None)
        writer = HuggingFaceStorageWriter(path=dst, save_distributed=True, enable_consolidation=True,
                                          fqn_to_index_mapping=adapter.fqn_to_index_mapping, thread_count_consolidation=5)
        dcp.save(adapter.to_hf(state), storage_writer=writer)
    return convert


def transformers_from_meta(src, dst):
    """transformers' convert_llama_weights_to_hf.py, which transformers 5 no longer has."""
    import json

    from transformers.models.llama import convert_llama_weights_to_hf as script

    with open(os.path.join(src, "params.json")) as f:
        words = json.load(f)["vocab_size"]
    sys.stdout = sys.stderr
    return lambda: script.write_model(dst, src, "8B", llama_version="3", vocab_size=words)


def peft_merge(src, dst, model):
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    def merge():
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        PeftModel.from_pretrained(base, src).merge_and_unload().save_pretrained(dst)
    return merge


def torch_dequantize(src, dst):
    """Code × scale in float32, as the scripts of DeepSeek and others do, for blocks of 128 × 128."""
    import torch
    from safetensors.torch import load_file, save_file

    def weight(codes, scales):
        wide = scales.repeat_interleave(128, 0)[:codes.shape[0]].repeat_interleave(128, 1)[:, :codes.shape[1]]
        return (codes.float() * wide).to(torch.bfloat16)

    def convert():
        state = {}
        for name in os.listdir(src):
            state.update(load_file(os.path.join(src, name)) if name.endswith(".safetensors") else {})
        save_file({k: weight(v, state[k + "_scale_inv"]) if k + "_scale_inv" in state else v for k, v in state.items()
                   if not k.endswith("_scale_inv")}, dst)
    return convert


def torch_stats(src, dst):
    import torch
    from safetensors import safe_open

    def all_stats():
        with safe_open(os.path.join(src, "model.safetensors"), "pt") as f, open(dst, "w") as out:
            for key in f.keys():
                t = f.get_tensor(key).float()
                std, mean = torch.std_mean(t)
                low, high = t.aminmax()
                print(key, mean, std, low, high, (t == 0).sum(), t.isnan().sum(), t.isinf().sum(), file=out)
    return all_stats


def torch_products(src, dst, model):
    """The products of a LoRA adapter alone, in memory: the least that merging it adds to a copy."""
    import torch
    from safetensors.torch import load_file

    factors = {k: v.float() for k, v in load_file(os.path.join(src, "adapter_model.safetensors")).items()}
    return lambda: [torch.matmul(factors[k.replace("lora_A", "lora_B")], factors[k]) for k in factors if "lora_A" in k]


def torch_transposes(src, dst):
    """The transposes of large matrices alone, in memory: the least that transposing them adds to a copy."""
    import h5py
    import torch

    with h5py.File(src) as f:
        shapes = [f[k].shape for k in f if f[k].ndim == 2 and not k.endswith(("wk", "wv"))]
    matrices = [torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes]
    return lambda: [m.t().contiguous() for m in matrices]


PEERS = {f.__name__: f for f in (dcp_to_torch, torch_to_dcp, consolidate_hf, merge_fsdp_weights, zero_to_fp32, ds_to_universal,
                                 read_dcp_metadata, open_h5py, open_safetensors, load_rank_files, merge_rank_files,
                                 torchtitan_to_hf, transformers_from_meta, peft_merge, torch_dequantize, torch_stats,
                                 torch_products, torch_transposes, isal_inflate)}

if __name__ == "__main__":
    report = sys.stdout
    call = PEERS[sys.argv[1]](*sys.argv[2:])
    started, used = time.perf_counter(), time.process_time()
    call()
    print("seconds: %.6f" % (time.perf_counter() - started), file=report)
    print("processor: %.6f" % (time.process_time() - used), file=report)
