"""Loads a checkpoint of any format with the format's own library, never with fsdpckpt.

Each loader returns {name: leaf}, with the path to each leaf of the state dict joined by dots. A leaf is ("tensor", dtype,
shape, bytes) or ("object", repr). So a list gives the same result whether a format keeps it whole or not.
"""
import glob
import io
import json
import os
import zipfile

import h5py
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

import compare
from torch_values import bits


class Wrong(Exception):
    pass


def leaf(value):
    if isinstance(value, torch.Tensor):
        return ("tensor", str(value.dtype).replace("torch.", ""), tuple(value.shape), bits(value))
    return ("object", repr(value))


def flatten(value, name, out):
    items = None
    if isinstance(value, dict) and value:
        items = value.items()
    elif isinstance(value, (list, tuple)) and not isinstance(value, torch.Size) and value:
        items = enumerate(value)
    if items is None:
        out[name] = leaf(value)
        return out
    for key, inner in items:
        flatten(inner, "%s.%s" % (name, key) if name else str(key), out)
    return out


def load_dcp(path):
    metadata = dcp.FileSystemReader(path).read_metadata()
    state = {}
    for fqn, of in metadata.state_dict_metadata.items():
        tensor = isinstance(of, dcp.metadata.TensorStorageMetadata)
        state[fqn] = torch.empty(of.size, dtype=of.properties.dtype) if tensor else None
    dcp.load(state, storage_reader=dcp.FileSystemReader(path), no_dist=True,
             planner=dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False))
    out = {}
    for fqn, value in state.items():
        flatten(value, ".".join(map(str, (metadata.planner_data or {}).get(fqn, (fqn,)))), out)
    return out


def decode(link):
    return "" if link == "%" else link.replace("%2F", "/").replace("%2E", ".").replace("%00", "\0").replace("%25", "%")


def load_h5(path):
    path = os.path.join(path, "index.h5") if os.path.isdir(path) else path
    out = {}
    with h5py.File(path, "r") as f:
        for where, dataset in compare.walk(f):
            name = ".".join(decode(e) for e in where[1:].split("/"))
            raw = compare.raw_bits(dataset)
            if "encoding" in dataset.attrs:
                if compare.text(dataset.attrs["encoding"]) == "torch.save":
                    flatten(torch.load(io.BytesIO(raw), weights_only=False), name, out)
                continue
            dtype = compare.text(dataset.attrs["dtype"])
            bad = compare.dtype_problem(dataset, dtype)
            if bad:
                raise Wrong("%s: %s" % (name, bad))
            out[name] = ("tensor", dtype, tuple(dataset.shape), raw)
    return out


def box_of(whole, offsets, sizes):
    dtype = getattr(torch, whole[1])
    full = torch.frombuffer(bytearray(whole[3]), dtype=dtype) if whole[3] else torch.empty(0, dtype=dtype)
    full = full.reshape(whole[2])
    for d, (offset, size) in enumerate(zip(offsets, sizes)):
        full = full.narrow(d, min(offset, full.shape[d]) if size == 0 else offset, size)
    return bits(full)


def check_rank(local, boxes, truth, rank, covered):
    """Checks that every tensor in the file of a rank equals its box of the full tensor."""
    for name, whole in truth.items():
        if whole[0] != "tensor":
            continue
        if name not in local:
            raise Wrong("rank %d lacks %s" % (rank, name))
        _, dtype, sizes, raw = local[name]
        offsets = tuple(boxes[name])
        if dtype != whole[1] or raw != box_of(whole, offsets, sizes):
            raise Wrong("rank %d: %s differs from the full tensor at %s" % (rank, name, offsets))
        covered.setdefault(name, {})[(offsets, sizes)] = 1


def check_cover(truth, covered):
    for name, whole in truth.items():
        if whole[0] == "tensor":
            found = sum(torch.Size(sizes).numel() for _, sizes in covered[name])
            if found != torch.Size(whole[2]).numel():
                raise Wrong("%s: the ranks hold %d elements, the full tensor %d" %
                            (name, found, torch.Size(whole[2]).numel()))


def load_pt(path, truth):
    if os.path.isfile(path):
        return flatten(torch.load(path, weights_only=True), "", {})
    covered, out = {}, None
    files = sorted(glob.glob(os.path.join(path, "model_world_size_*_rank_*.pt")))
    for rank in range(len(files)):
        file = os.path.join(path, "model_world_size_%d_rank_%d.pt" % (len(files), rank))
        local = flatten(torch.load(file, weights_only=True, mmap=True), "", {})
        with zipfile.ZipFile(file) as z:
            bad = z.testzip() # checks every CRC
            layout = json.loads(z.read(next(n for n in z.namelist() if n.endswith("fsdpckpt_layout.json"))))
        if bad:
            raise Wrong("%s: the CRC of %s is wrong" % (file, bad))
        check_rank(local, {n: t["offsets"] for n, t in layout["tensors"].items()}, truth, rank, covered)
        out = out or {n: v for n, v in local.items() if v[0] == "object"}
    check_cover(truth, covered)
    return dict(out, **{n: v for n, v in truth.items() if v[0] == "tensor"})


def load_safetensors(path, truth):
    """Loads only tensors; other values are in __metadata__, which no library interprets."""
    if os.path.isfile(path):
        with safe_open(path, "pt") as f:
            return {name: leaf(f.get_tensor(name)) for name in f.keys()}
    covered = {}
    files = sorted(glob.glob(os.path.join(path, "shard-*.safetensors")))
    for rank, file in enumerate(files):
        with safe_open(file, "pt") as f:
            local = {name: leaf(f.get_tensor(name)) for name in f.keys()}
            info = json.loads(f.metadata()["DCP_SHARDING_INFO"])
        check_rank(local, {name: i["saved_offsets"] for name, i in info.items()}, truth, rank, covered)
    check_cover(truth, covered)
    state = {n: torch.empty(v[2], dtype=getattr(torch, v[1])) for n, v in truth.items() if v[0] == "tensor"}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(path), no_dist=True)
    return {name: leaf(tensor) for name, tensor in state.items()}


def load(form, path, truth):
    if form in ("dcp", "h5"):
        return {"dcp": load_dcp, "h5": load_h5}[form](path)
    return {"pt": load_pt, "safetensors": load_safetensors}[form](path, truth)


def compare_leaves(found, truth, tensors_only=False):
    """Raises at the first difference. Empty containers do not count, since a flattened state dict has none."""
    def kept(leaves):
        return {n: v for n, v in leaves.items()
                if v[0] == "tensor" or (not tensors_only and v[1] not in ("{}", "[]", "()", "OrderedDict()"))}
    found, truth = kept(found), kept(truth)
    if found.keys() != truth.keys():
        raise Wrong("missing %s, too many %s" % (sorted(truth.keys() - found.keys())[:3],
                                                 sorted(found.keys() - truth.keys())[:3]))
    for name, value in truth.items():
        if found[name] != value:
            raise Wrong("%s is %s, not %s" % (name, str(found[name])[:120], str(value)[:120]))
