"""Time and memory are linear in the bytes read: the worst inputs known for the readers of DeepSpeed, Megatron, and DCP with
safetensors data, at n and 4 n. See linear.py.

    linear_trainers.py FSDPCKPT [CASE...]
"""
import linear_cost
from linear_cost import finish, grows

import argparse
import json
import os
import pickle
import struct
import sys
import types

try:
    import torch
    from torch.distributed.checkpoint import metadata as dcp
    from torch.distributed.checkpoint.filesystem import _StorageInfo
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)

READ = [["inspect"], ["check"], ["verify"], ["consolidate", "-o", "out.h5"]]


# ---- DeepSpeed

class fragment_address:
    def __init__(self, numel, start):
        self.numel, self.start = numel, start


fragment_address.__module__ = "deepspeed.utils.tensor_fragment"
for module in ("deepspeed", "deepspeed.utils", fragment_address.__module__):
    sys.modules[module] = types.ModuleType(module)
sys.modules[fragment_address.__module__].fragment_address = fragment_address


def write_zero(folder, stage, model, optimizer, ranks=1):
    """`model` and `optimizer` are members of the two kinds of files."""
    os.mkdir(folder)
    for rank in range(ranks):
        name = "mp_rank_00_model_states.pt" if stage < 3 else f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
        state = {"module": {}, "buffer_names": [], "param_shapes": [], "frozen_param_shapes": None,
                 "frozen_param_fragments": None, "shared_params": {}, **model}
        torch.save(state, os.path.join(folder, name))
        zero = {"zero_stage": stage, "partition_count": ranks, "ds_version": "0.17.0", **optimizer}
        torch.save({"optimizer_state_dict": zero, "ds_version": "0.17.0"},
                   os.path.join(folder, f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"))


def names_of(n):
    return [f"layers.{i}.w" for i in range(n)]


def base(states, groups):
    return {"state": states, "param_groups": [{"lr": 0.1, "params": [g]} for g in range(groups)]}


def deepspeed_mapping_in_reverse(folder, n):
    flat = torch.zeros(n)
    places = {name: fragment_address(1, i) for i, name in enumerate(names_of(n))}
    write_zero(folder, 1, {"param_shapes": [{name: torch.Size([1]) for name in names_of(n)}]},
               {"single_partition_of_fp32_groups": [flat], "base_optimizer_state": base({0: {"exp_avg": flat}}, 1),
                "param_slice_mappings": [dict(reversed(places.items()))]})


def deepspeed_many_groups(folder, n):
    one = torch.zeros(1)
    write_zero(folder, 1, {"param_shapes": [{name: torch.Size([1])} for name in names_of(n)]},
               {"single_partition_of_fp32_groups": [one] * n,
                "base_optimizer_state": base({i: {"exp_avg": one, "step": i} for i in reversed(range(n))}, n)})


def deepspeed_many_flat_groups(folder, n):
    one = torch.zeros(1)
    write_zero(folder, 3, {"param_shapes": [{name: torch.Size([1]) for name in names_of(n)}]},
               {"fp32_flat_groups": [one] * n,
                "optimizer_state_dict": base({i: {"exp_avg": one} for i in reversed(range(n))}, 1)})


def deepspeed_many_values(folder, n):
    """n / 2 parameters, and n / 2 keys in the state of the optimizer."""
    state = {f"k{i}": i for i in range(n // 2)}
    write_zero(folder, 1, {"param_shapes": [{name: torch.Size([1]) for name in names_of(n // 2)}]},
               {"single_partition_of_fp32_groups": [torch.zeros(n // 2)], "base_optimizer_state": base({0: state}, 1)})


def deepspeed_frozen_and_buffers(folder, n):
    one = torch.zeros(1)
    names = names_of(n // 2)
    buffers = [f"buffers.{i}" for i in range(n // 2)]
    write_zero(folder, 3,
               {"module": {name: one for name in buffers}, "buffer_names": buffers[::-1], "param_shapes": [{"p": torch.Size([1])}],
                "frozen_param_shapes": {name: torch.Size([1]) for name in names},
                "frozen_param_fragments": {name: one for name in reversed(names)}},
               {"fp32_flat_groups": [one], "optimizer_state_dict": base({0: {"exp_avg": one}}, 1)})


def deepspeed_one_long_name(folder, n):
    name = "b" * (n * 8)
    write_zero(folder, 1, {"module": {name: torch.zeros(1)}, "buffer_names": [name] * (n * 4), "param_shapes": [{}]},
               {"single_partition_of_fp32_groups": [torch.zeros(0)], "base_optimizer_state": base({}, 1)})


# ---- Megatron: the file of a single rank

def write_megatron(folder, model, optimizer=None, **more):
    rank = os.path.join(folder, "iter_0000010", "mp_rank_00")
    os.makedirs(rank)
    with open(os.path.join(folder, "latest_checkpointed_iteration.txt"), "w") as f:
        f.write("10")
    state = {"args": argparse.Namespace(tensor_model_parallel_size=1, **more), "checkpoint_version": 3.0, "iteration": 10}
    state.update(model)
    if optimizer:
        state["optimizer"] = optimizer
    torch.save(state, os.path.join(rank, "model_optim_rng.pt"))


def megatron_optimizer_in_reverse(folder, n):
    weight, master = torch.zeros(2, 2).half(), torch.zeros(2, 2)
    write_megatron(folder, {"model": {f"decoder.layers.{i}.mlp.linear_fc1.weight": weight for i in range(n)}},
                   {"optimizer": {"state": {i: {"exp_avg": master} for i in reversed(range(n))},
                                  "param_groups": [{"lr": 0.1, "params": list(range(n))}]},
                    "fp32_from_fp16_params": [[master] * n]})


def megatron_many_experts(folder, n):
    weight = torch.zeros(2, 2)
    names = [f"decoder.layers.{i % 5}.mlp.experts.local_experts.{i // 5}.linear_fc1.weight" for i in range(n)]
    write_megatron(folder, {"model": {name: weight for name in names}}, num_experts=n // 5)


def megatron_many_chunks(folder, n):
    """The most chunks of a model that names allow, with the layers of each in reverse."""
    weight = torch.zeros(2, 2)
    chunks = {f"model{c}": {f"decoder.layers.{i}.mlp.linear_fc1.weight": weight for i in reversed(range(n // 100))}
              for c in range(100)}
    write_megatron(folder, chunks, virtual_pipeline_model_parallel_size=100)


# ---- DCP with safetensors data

def write_dcp(folder, tensors, header, data):
    """Tensors by name: their metadata; `header`: what the one safetensors file says of each (name, sizes, bytes)."""
    os.mkdir(folder)
    places, at = {}, 0
    entries = {}
    for name, sizes, bytes_ in header:
        entries[name] = {"dtype": "F32", "shape": list(sizes), "data_offsets": [at, at + bytes_]}
        at += bytes_
    offsets = {name: {"saved_offsets": [0] * len(sizes)} for name, sizes, _ in header}
    entries["__metadata__"] = {"DCP_SHARDING_INFO": json.dumps(offsets)}
    text = json.dumps(entries).encode()
    with open(os.path.join(folder, "__0_0.distcp"), "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + bytes(data))
    for name, t in tensors.items():
        for i, c in enumerate(t.chunks):
            places[dcp.MetadataIndex(name, c.offsets, i)] = _StorageInfo("__0_0.distcp", 0, 4)
    with open(os.path.join(folder, ".metadata"), "wb") as f:
        pickle.dump(dcp.Metadata(tensors, {}, places), f, 4)


def chunked(shape, boxes):
    return dcp.TensorStorageMetadata(dcp.TensorProperties(torch.float32), torch.Size(shape),
                                     [dcp.ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in boxes])


def safetensors_many_tensors(folder, n):
    tensors = {name: chunked((1,), [((0,), (1,))]) for name in names_of(n)}
    write_dcp(folder, tensors, [(name, (1,), 4) for name in reversed(list(tensors))], 4 * n)


def safetensors_many_chunks(folder, n):
    """Pieces of one tensor have one name, so that the header holds only the last."""
    tensors = {"t": chunked((n, 2), [((i, 0), (1, 2)) for i in range(n)])}
    write_dcp(folder, tensors, [("t", (1, 2), 8)], 8)


CASES = [deepspeed_mapping_in_reverse, deepspeed_many_groups, deepspeed_many_flat_groups, deepspeed_many_values,
         deepspeed_frozen_and_buffers, deepspeed_one_long_name, megatron_optimizer_in_reverse, megatron_many_experts,
         megatron_many_chunks, safetensors_many_tensors, safetensors_many_chunks]


def main():
    wanted = sys.argv[2:]
    for make in CASES:
        if not wanted or make.__name__ in wanted:
            grows("x", make, READ)
    return finish()


if __name__ == "__main__":
    sys.exit(main())
