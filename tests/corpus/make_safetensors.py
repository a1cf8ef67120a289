#!/usr/bin/env python3
"""Makes good/st-*: safetensors checkpoints as torch and the safetensors library write them, with expected.json.

    make_safetensors.py CORPUS [CASE...]

The ranks are processes with gloo on the CPU. expected.json is as in make_dcp.py: its values come from the full tensors before
anything cuts them. Every run gives equal tensors.
"""
import hashlib
import json
import os
import shutil
import socket
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from safetensors.torch import save_file
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard


def values(seed, shape, dtype=torch.float32):
    """Random bit patterns, so all values of the dtype are equally likely."""
    g = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=g, dtype=torch.uint8).bool()
    size = torch.empty((), dtype=dtype).element_size()
    raw = torch.randint(0, 256, [*shape, size], generator=g, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape) if raw.numel() else torch.empty(shape, dtype=dtype)


FSDP, TP = [Shard(0)], [Replicate()]


def case_1d():
    """FSDP over 4 ranks: even, uneven, fewer rows than ranks. One rank stores each uncut tensor."""
    return {"dp": 4}, {
        "model.embed.weight": (values(1, (11, 6), torch.bfloat16), [Shard(0)]),
        "model.w1.weight": (values(2, (8, 4)), [Shard(0)]),
        "model.w1.bias": (values(3, (8,)), [Shard(0)]),
        "model.small": (values(4, (3, 2)), [Shard(0)]),
        "model.mask": (values(5, (9,), torch.bool), [Shard(0)]),
        "model.steps": (values(6, (5, 2), torch.int64), [Shard(0)]),
        "model.columns": (values(7, (3, 10), torch.float16), [Shard(1)]),
        "model.norm": (values(8, (4,)), [Replicate()]),
        "model.scale": (values(9, ()), None),
        "model.fp8": (values(10, (6, 5), torch.float8_e4m3fn), [Shard(0)]),
    }, {}


def case_2d():
    """2D FSDP+TP, dp 2 x tp 2: colwise (_StridedShard), rowwise, replicated over TP."""
    return {"dp": 2, "tp": 2}, {
        "layers.0.wq.weight": (values(11, (16, 4)), [_StridedShard(0, split_factor=2), Shard(0)]),
        "layers.0.wo.weight": (values(12, (4, 16), torch.bfloat16), [Shard(0), Shard(1)]),
        "layers.0.norm.weight": (values(13, (8,)), [Shard(0), Replicate()]),
    }, {}


def case_parts():
    """Two files per rank, through fqn_to_index_mapping."""
    mapping = {"a.weight": 1, "b.weight": 2, "c.weight": 2}
    return {"dp": 2}, {
        "a.weight": (values(21, (6, 3)), [Shard(0)]),
        "b.weight": (values(22, (4, 5), torch.float16), [Shard(0)]),
        "c.weight": (values(23, (7,)), [Shard(0)]),
    }, {"fqn_to_index_mapping": mapping}


def case_index():
    """Three files with Hugging Face's index, all written by rank 0."""
    mapping = {"a.weight": 1, "b.weight": 2, "c.weight": 3, "d.weight": 3}
    return {}, {
        "a.weight": (values(31, (6, 3)), None),
        "b.weight": (values(32, (4, 5), torch.bfloat16), None),
        "c.weight": (values(33, (7,), torch.int8), None),
        "d.weight": (values(34, ()), None),
    }, {"fqn_to_index_mapping": mapping}


DTYPES = """float64 float32 float16 bfloat16 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu
float4_e2m1fn_x2 int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool complex64""".split()


def case_dtypes():
    """Every dtype that the library supports, written by safetensors.torch.save_file."""
    return None, {n: (values(40 + i, (3, 5), getattr(torch, n)), None) for i, n in enumerate(DTYPES)}, {}


def case_shapes():
    """0-dim, zero-element and eight-dim tensors, odd names, members of __metadata__."""
    shapes = {"scalar": (), "empty": (0,), "empty.2": (3, 0, 2), "one": (1,), "eight": (1, 2, 1, 3, 1, 2, 1, 2),
              "name with / and % and \u00e9\u4e16 \"quotes\"": (2, 2)}
    return None, {n: (values(70 + i, s), None) for i, (n, s) in enumerate(shapes.items())}, {
        "metadata": {"format": "pt", "author": "someone \u00e9", "licence": "{\"a\": 1}"}}


CASES = {"1d": case_1d, "2d": case_2d, "parts": case_parts, "index": case_index, "dtypes": case_dtypes,
         "shapes": case_shapes}


def local_part(full, mesh, placements):
    """This rank's box. It is cut here because gloo cannot scatter bool and fp8. With _StridedShard, TP cuts first."""
    order = range(mesh.ndim) if not isinstance(placements[0], _StridedShard) else reversed(range(mesh.ndim))
    for i in order:
        if not isinstance(placements[i], Replicate):
            d = placements[i].dim
            pieces = full.chunk(mesh.size(i), dim=d)
            n = mesh.get_local_rank(i)
            full = pieces[n] if n < len(pieces) else full.narrow(d, 0, 0)
    return full.clone()


def run_rank(rank, case, directory, port):
    mesh_shape, tensors, how = CASES[case]()
    world = 1
    for n in mesh_shape.values():
        world *= n
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:%d" % port, rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", tuple(mesh_shape.values()) or (1,), mesh_dim_names=tuple(mesh_shape) or ("dp",))
    state = {}
    for name, (full, placements) in tensors.items():
        state[name] = DTensor.from_local(local_part(full, mesh, placements), mesh, placements, run_check=False,
                                         shape=full.shape, stride=full.stride()) if placements else full
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(directory, save_distributed=bool(mesh_shape), **how))
    dist.barrier()
    dist.destroy_process_group()


def expected(case, tensors, directory):
    chunks = {}
    if CASES[case]()[0] is not None:
        metadata = HuggingFaceStorageReader(directory).read_metadata()
        for name, t in metadata.state_dict_metadata.items():
            chunks[name] = [{"offsets": list(c.offsets), "sizes": list(c.sizes)} for c in t.chunks]
    out = {}
    for name, (full, _) in tensors.items():
        raw = full.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if full.numel() else b""
        out[name] = {"dtype": str(full.dtype)[6:], "shape": list(full.shape), "sha256": hashlib.sha256(raw).hexdigest(),
                     "path": [name]}
        if name in chunks:
            out[name]["chunks"] = chunks[name]
    return out


def main():
    corpus, wanted = sys.argv[1], sys.argv[2:] or list(CASES)
    for case in wanted:
        mesh, tensors, how = CASES[case]()
        directory = os.path.join(corpus, "good", "st-torch%s-%s" % (torch.__version__.split("+")[0], case))
        shutil.rmtree(directory, ignore_errors=True)
        os.makedirs(directory)
        objects = {}
        ranks = 1
        if mesh is None:
            save_file({n: t for n, (t, _) in tensors.items()}, os.path.join(directory, "model.safetensors"), **how)
            foreign = {k: v for k, v in how.get("metadata", {}).items() if (k, v) != ("format", "pt")}
            if foreign:
                text = json.dumps(foreign, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
                objects["__metadata__"] = {"path": ["__metadata__"], "repr": repr(foreign), "json": foreign, "text": text,
                                           "sha256": hashlib.sha256(text.encode()).hexdigest()}
        else:
            for n in mesh.values():
                ranks *= n
            with socket.socket() as s:
                s.bind(("127.0.0.1", 0))
                port = s.getsockname()[1]
            mp.spawn(run_rank, args=(case, directory, port), nprocs=ranks)
        with open(os.path.join(directory, "expected.json"), "w") as f:
            json.dump({"torch": torch.__version__.split("+")[0], "case": case, "why": CASES[case].__doc__, "ranks": ranks,
                       "mesh": mesh or {}, "tensors": expected(case, tensors, directory), "objects": objects}, f, indent=1)
        print(directory)


if __name__ == "__main__":
    main()
