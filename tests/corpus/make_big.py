#!/usr/bin/env python3
"""Makes checkpoints that are too large to commit: real DCP output of torch, made with little memory.

    make_big.py data DIR --size 2G                   8 FSDP shards of bf16 tensors, LLaMA's names
    make_big.py data DIR --size 8G --tp 2 --dp 4     2D FSDP+TP, 8 ranks
    make_big.py data DIR --size 2G --expected        also DIR/expected.json (a pass over all bytes)
    make_big.py metadata DIR                         a .metadata of 1.02 million chunks, about 147 MB

`data` forks one process per rank and runs torch.distributed.checkpoint.save in each. A rank holds one or two buffers of random
bits, each as large as its largest shard. Its tensors are windows of these, which torch's writer copies one at a time, so the
job needs a few hundred MB for any size. `metadata` builds the plan and results of every rank with torch's own classes, pickles
and unpickles them as the gather of a real save does (which determines the strings that the file repeats), and lets
FileSystemWriter.finish write it. There are no .distcp files, since it is for readers of headers.
"""
import argparse
import hashlib
import json
import logging
import os
import pickle
import sys
import tempfile
import time
import warnings

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp

COLWISE = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROWWISE = ("o_proj", "down_proj")


def parse_size(text):
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return int(float(text[:-1]) * units[text[-1].upper()]) if text[-1].upper() in units else int(text)


def llama(size, dims=None):
    """[(fqn, shape)] of a LLaMA in bf16 with about `size` bytes, at most one layer more."""
    if dims:
        dim, hidden, vocab = dims
    elif size >= 4 << 30:
        dim, hidden, vocab = 4096, 11008, 32000
    elif size >= 512 << 20:
        dim, hidden, vocab = 2048, 5632, 32000
    else:
        dim, hidden, vocab = 256, 704, 2048
    layer = 2 * (4 * dim * dim + 3 * dim * hidden + 2 * dim)
    layers = max(1, round((size - 2 * (2 * vocab * dim + dim)) / layer))
    shapes = [("model.embed_tokens.weight", (vocab, dim))]
    for i in range(layers):
        p = "model.layers.%d." % i
        shapes += [(p + "self_attn.%s.weight" % k, (dim, dim)) for k in ("q_proj", "k_proj", "v_proj", "o_proj")]
        shapes += [(p + "mlp.%s.weight" % k, (hidden, dim)) for k in ("gate_proj", "up_proj")]
        shapes += [(p + "mlp.down_proj.weight", (dim, hidden))]
        shapes += [(p + "%s.weight" % k, (dim,)) for k in ("input_layernorm", "post_attention_layernorm")]
    return shapes + [("model.norm.weight", (dim,)), ("lm_head.weight", (vocab, dim))]


def tp_dim(fqn):
    module = fqn.split(".")[-2]
    return 0 if module in COLWISE else 1 if module in ROWWISE else None


def box(fqn, shape, rank, dp, tp):
    """(offsets, sizes) of the rank's box: TP first, then FSDP on dim 0. All sizes divide evenly."""
    d, t = divmod(rank, tp)
    offsets, sizes = [0] * len(shape), list(shape)
    cut = tp_dim(fqn) if tp > 1 else None
    if cut is not None:
        sizes[cut] //= tp
        offsets[cut] = t * sizes[cut]
    sizes[0] //= dp
    offsets[0] += d * sizes[0]
    return offsets, sizes


def numel(sizes):
    n = 1
    for s in sizes:
        n *= s
    return n


def rank_buffer(shapes, rank, dp, tp):
    biggest = max(numel(box(f, s, rank, dp, tp)[1]) for f, s in shapes)
    g = torch.Generator().manual_seed(1000 + rank)
    words = (biggest * 2 + 8 * len(shapes)) // 8 + 1
    return torch.randint(-(2 ** 63), 2 ** 63 - 1, (words,), generator=g, dtype=torch.int64).view(torch.bfloat16)


def source(fqn, rank, tp):
    """The rank whose buffer gives the data. Tensors that TP replicates must be equal on all its ranks."""
    return rank - rank % tp if tp_dim(fqn) is None else rank


def window(buffer, number, sizes):
    """The window for tensor `number`. Each starts four elements later, so no two tensors are equal."""
    return buffer[4 * number:4 * number + numel(sizes)].view(sizes)


def placements(fqn, tp):
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    if tp == 1:
        return [Shard(0)]
    cut = tp_dim(fqn)
    if cut == 0:
        return [_StridedShard(0, split_factor=tp), Shard(0)]
    return [Shard(0), Replicate() if cut is None else Shard(cut)]


def contiguous_strides(shape):
    strides, n = [], 1
    for s in reversed(shape):
        strides.insert(0, n)
        n *= s
    return tuple(strides)


def save_rank(rank, args, shapes, store):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(args.dp * args.tp))
    dist.init_process_group("gloo", rank=rank, world_size=args.dp * args.tp, init_method="file://" + store)
    mesh = init_device_mesh("cpu", (args.dp, args.tp), mesh_dim_names=("dp", "tp"))
    mesh = mesh if args.tp > 1 else mesh["dp"]
    buffers = {r: rank_buffer(shapes, r, args.dp, args.tp) for r in {rank, rank - rank % args.tp}}
    state = {}
    for number, (fqn, shape) in enumerate(shapes):
        part = window(buffers[source(fqn, rank, args.tp)], number, box(fqn, shape, rank, args.dp, args.tp)[1])
        state[fqn] = DTensor.from_local(part, mesh, placements(fqn, args.tp), run_check=False,
                                        shape=torch.Size(shape), stride=contiguous_strides(shape))
    writer = dcp.FileSystemWriter(args.dir, sync_files=False)
    dcp.save({"model": state, "step": 1000}, storage_writer=writer)
    dist.barrier()
    os._exit(0)


def write_expected(args, shapes):
    ranks = range(args.dp * args.tp)
    buffers = [rank_buffer(shapes, r, args.dp, args.tp) for r in ranks]
    with open(os.path.join(args.dir, ".metadata"), "rb") as f:
        metadata = pickle.load(f)
    lines = []
    for number, (fqn, shape) in enumerate(shapes):
        full = torch.empty(shape, dtype=torch.bfloat16)
        for r in ranks:
            offsets, sizes = box(fqn, shape, r, args.dp, args.tp)
            full[tuple(slice(o, o + n) for o, n in zip(offsets, sizes))] = window(buffers[source(fqn, r, args.tp)], number, sizes)
        key = "model." + fqn
        recorded = sorted(list(c.offsets) for c in metadata.state_dict_metadata[key].chunks)
        ours = sorted({tuple(box(fqn, shape, r, args.dp, args.tp)[0]) for r in ranks})
        if recorded != [list(o) for o in ours]:
            raise SystemExit("make_big.py: %s: torch cut it at %s, this script at %s" % (key, recorded, ours))
        digest = hashlib.sha256(full.view(torch.uint8).numpy()).hexdigest()
        lines.append("  %s: %s" % (json.dumps(key), json.dumps(
            {"dtype": "bfloat16", "shape": list(shape), "sha256": digest, "path": ["model", fqn]})))
    step = next(i for k, i in metadata.storage_data.items() if k.fqn == "step")
    with open(os.path.join(args.dir, step.relative_path), "rb") as f:
        f.seek(step.offset)
        item = hashlib.sha256(f.read(step.length)).hexdigest()
    objects = {"step": {"repr": "1000", "type": "int", "json": 1000, "path": ["step"], "file": step.relative_path,
                        "offset": step.offset, "length": step.length, "sha256": item}}
    with open(os.path.join(args.dir, "expected.json"), "w") as f:
        f.write("{\n \"tensors\": {\n%s\n },\n \"objects\": %s\n}\n" % (",\n".join(lines), json.dumps(objects)))


def make_data(args):
    os.makedirs(args.dir, exist_ok=True)
    shapes = llama(parse_size(args.size))
    store = tempfile.mktemp(prefix="make_big_")
    started = time.time()
    procs = [mp.get_context("fork").Process(target=save_rank, args=(r, args, shapes, store)) for r in range(args.dp * args.tp)]
    for p in procs:
        p.start()
    for p in procs:
        p.join()
    if os.path.exists(store):
        os.unlink(store)
    if any(p.exitcode for p in procs):
        print("make_big.py: a rank failed, see above", file=sys.stderr)
        return 1
    if args.expected:
        write_expected(args, shapes)
    total = sum(os.path.getsize(os.path.join(args.dir, f)) for f in os.listdir(args.dir))
    print("%s: %d tensors, %.2f GB, dp %d x tp %d, %.0f s" % (args.dir, len(shapes), total / 1e9, args.dp, args.tp, time.time() - started))
    return 0


def metadata_names(count):
    """Short names, because the file repeats each name for each rank and must stay at 147 MB."""
    kinds = ["attn.wq", "attn.wk", "attn.wv", "attn.wo", "mlp.w1", "mlp.w2", "mlp.w3", "ln_1", "ln_2"]
    return ["layer.%d.%s" % (i // len(kinds), kinds[i % len(kinds)]) for i in range(count)]


def make_metadata(args):
    from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
    from torch.distributed.checkpoint.storage import WriteResult

    rows, cols = 8, 4096
    names = metadata_names(args.tensors)
    item_bytes = rows * cols * 2 + 1024

    def plan_of(rank):
        items = []
        for fqn in names:
            dims = 1 if ".ln_" in fqn else 2
            full = torch.Size([rows * args.ranks, cols][:dims])
            at, part = torch.Size([rows * rank, 0][:dims]), torch.Size([rows, cols][:dims])
            data = TensorWriteData(chunk=ChunkStorageMetadata(offsets=at, sizes=part),
                                   properties=TensorProperties(dtype=torch.bfloat16), size=full)
            items.append(WriteItem(index=MetadataIndex(fqn, at), type=WriteItemType.SHARD, tensor_data=data))
        return SavePlan(items, planner_data={n: tuple(n.split(".", 1)) for n in names})

    def through_pickle(x):
        return pickle.loads(pickle.dumps(x))

    started = time.time()
    plans = [through_pickle(plan_of(r)) for r in range(args.ranks)]
    plans, metadata = create_default_global_save_plan(plans)
    metadata.planner_data = plans[0].planner_data
    results = []
    for rank in range(args.ranks):
        file, items = "__%d_0.distcp" % rank, plans[rank].items
        results.append(through_pickle([
            WriteResult(index=item.index, size_in_bytes=item_bytes, storage_data=_StorageInfo(file, n * item_bytes, item_bytes))
            for n, item in enumerate(items)]))
        plans[rank] = None
    os.makedirs(args.dir, exist_ok=True)
    here = os.getcwd()
    os.chdir(args.dir)
    dcp.FileSystemWriter(".").finish(metadata, results)
    os.chdir(here)
    size = os.path.getsize(os.path.join(args.dir, ".metadata"))
    print("%s: %d chunks, %.1f MB, %.0f s" % (args.dir, args.tensors * args.ranks, size / 1e6, time.time() - started))
    return 0


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    sub = ap.add_subparsers(dest="what", required=True)
    data = sub.add_parser("data", help="a whole checkpoint")
    data.add_argument("dir")
    data.add_argument("--size", default="2G", help="about how many bytes: 2G, 8G, 64M")
    data.add_argument("--dp", type=int, default=8)
    data.add_argument("--tp", type=int, default=1)
    data.add_argument("--expected", action="store_true", help="write expected.json too")
    meta = sub.add_parser("metadata", help="a .metadata alone")
    meta.add_argument("dir")
    meta.add_argument("--tensors", type=int, default=1000)
    meta.add_argument("--ranks", type=int, default=1024)
    args = ap.parse_args()
    return make_data(args) if args.what == "data" else make_metadata(args)


if __name__ == "__main__":
    sys.exit(main())
