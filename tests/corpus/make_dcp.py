#!/usr/bin/env python3
"""Makes the DCP corpus: small checkpoints written by the real torch.distributed.checkpoint.

Runs under every torch from 1.13 to 2.15, on the CPU, with gloo; the ranks are forked from this
process.  Each case becomes <out>/dcp-torch<version>-<case>/ with the checkpoint and, beside it,
expected.json: for every tensor its dtype, global shape, path and the sha256 of the row-major
little-endian bytes of the FULL tensor, gathered by torch BEFORE saving.  The result is then loaded
back by torch in one process and must agree, so a fixture that torch itself cannot read never
leaves here.  A case this torch cannot make is skipped with the reason on stdout.

    python make_dcp.py --out good                 # every case
    python make_dcp.py --out good --only tp,fsdp2 # some
    python make_dcp.py --list
"""
import argparse
import contextlib
import ctypes
import hashlib
import io
import json
import logging
import math
import os
import pickle
import shutil
import sys
import tempfile
import traceback
import warnings
from collections import OrderedDict

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist

try:
    import torch.distributed.checkpoint as dcp
except ImportError:  # 1.13 keeps it in another room, and that room's name is in its pickles
    import torch.distributed._shard.checkpoint as dcp
import torch.multiprocessing as mp
import torch.nn as nn

VERSION = torch.__version__.split("+")[0]
V = tuple(int(x) for x in VERSION.split(".")[:2])
CASES = OrderedDict()


class Skip(Exception):
    """This torch cannot make the case; the text says why."""


def case(name, world, why):
    def register(fn):
        CASES[name] = (fn, world, why)
        return fn

    return register


def need(ok, why):
    if not ok:
        raise Skip(why)


# ---------------------------------------------------------------- torch's moving names

def dtensor_class():
    """DTensor moved twice: spmd (1.13, a separate package), _tensor (2.0 to 2.4), tensor (2.5)."""
    for module in ("torch.distributed.tensor", "torch.distributed._tensor"):
        try:
            found = __import__(module, fromlist=["DTensor"])
            if hasattr(found, "DTensor"):
                return found
        except ImportError:
            pass
    return None


def need_dtensor(minimum=(2, 1)):
    """2.0 has a DTensor, but saving one ends in "aten.is_pinned.default does not have a rule"."""
    dt = dtensor_class()
    need(dt is not None and V >= minimum, "no DTensor of this kind that its DCP can save")
    return dt


def make_mesh(shape, names):
    need_dtensor((2, 1))
    ranks = torch.arange(math.prod(shape)).reshape(shape)
    try:
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh("cpu", tuple(shape), mesh_dim_names=tuple(names))
    except ImportError:
        from torch.distributed._tensor import DeviceMesh

        need(len(shape) == 1, "no named 2-D device mesh")
        return DeviceMesh("cpu", ranks)


def fully_shard_fn():
    try:
        from torch.distributed.fsdp import fully_shard

        return fully_shard
    except ImportError:
        pass
    try:
        from torch.distributed._composable.fsdp import fully_shard

        return fully_shard
    except ImportError:
        raise Skip("no per-parameter fully_shard (FSDP2)")


# ---------------------------------------------------------------- models

class Attention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=True)

    def forward(self, x):
        return self.wo(self.wq(x))


class FeedForward(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=True)
        self.w2 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        return self.w2(torch.relu(self.w1(x)))


class Block(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.attention = Attention(dim)
        self.feed_forward = FeedForward(dim, hidden)

    def forward(self, x):
        x = x + self.attention(x)
        return x + self.feed_forward(x)


class Llama(nn.Module):
    """A few KB with the names of the real thing; 11 rows in the vocabulary so that no mesh divides it."""

    def __init__(self, dim=8, hidden=24, layers=1, vocab=11, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.tok_embeddings = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList([Block(dim, hidden) for _ in range(layers)])
        self.norm = nn.LayerNorm(dim)
        self.output = nn.Linear(dim, vocab, bias=False)
        self.register_buffer("freqs", torch.arange(dim, dtype=torch.float32) / dim)

    def forward(self, ids):
        x = self.tok_embeddings(ids)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


class Mini(nn.Module):
    """Six parameters, for the cases with optimizer state, where each costs four items a rank."""

    def __init__(self, dim=6, hidden=10, vocab=11, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.tok_embeddings = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList([FeedForward(dim, hidden)])
        self.norm = nn.LayerNorm(dim)


def original(seed, prefix="model.", **kwargs):
    """The parameters and buffers as they were before anything cut them: the truth that owes nothing
    to the code under test, nor to torch's gathering."""
    return {prefix + k: v.detach().clone() for k, v in Llama(seed=seed, **kwargs).state_dict().items()}


def train_step(model, optimizer):
    """One step with known gradients; no forward pass, so it needs no stream and no collective."""
    torch.manual_seed(7)
    for p in model.parameters():
        if p.requires_grad:
            p.grad = p.detach() * 0.5 + 0.25
    optimizer.step()


def tp_plan(layers=1):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    plan = {}
    for i in range(layers):
        plan.update({
            "layers.%d.attention.wq" % i: ColwiseParallel(),
            "layers.%d.attention.wo" % i: RowwiseParallel(),
            "layers.%d.feed_forward.w1" % i: ColwiseParallel(),
            "layers.%d.feed_forward.w2" % i: RowwiseParallel(),
        })
    return plan


def parallelize(model, mesh, layers=1):
    try:
        from torch.distributed.tensor.parallel import parallelize_module
    except ImportError:
        raise Skip("no parallelize_module (tensor parallelism)")
    return parallelize_module(model, mesh, tp_plan(layers))


# ---------------------------------------------------------------- FSDP1

@contextlib.contextmanager
def cpu_as_current_device():
    """FSDP1 up to 2.1 asks CUDA (2.1: torch.cpu) for devices and streams with arguments that a CPU
    does not have.  The state dict path itself is pure tensor code, so those questions are answered
    with the CPU.  Nothing that decides names, cuts or files is touched."""
    if V >= (2, 2):
        synchronize, torch.cuda.synchronize = torch.cuda.synchronize, lambda *a: None  # 2.3 calls it always
        try:
            yield
        finally:
            torch.cuda.synchronize = synchronize
        return

    class Nothing:
        def __init__(self, *a, **k):
            pass

        def __getattr__(self, name):
            return lambda *a, **k: None

        def __enter__(self):
            return self

        def __exit__(self, *a):
            return False

    cpu = torch.device("cpu")
    room = torch.cpu if V >= (2, 1) else torch.cuda
    answers = {"Stream": Nothing, "Event": Nothing, "stream": lambda *a: Nothing(), "synchronize": lambda *a: None,
               "current_stream": lambda *a: Nothing(), "default_stream": lambda *a: Nothing()}
    if room is torch.cuda:
        answers.update(current_device=lambda: cpu, is_available=lambda: True, set_device=lambda *a: None,
                       is_current_stream_capturing=lambda: False,
                       device_count=lambda: 8)
    def all_gather_base(output, tensor, group=None, **kwargs):
        # Gloo of these versions gathers lists only; the same bytes in the same order.
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, tensor.contiguous(), group=group)
        output.copy_(torch.cat([p.reshape(-1) for p in parts]).reshape(output.shape))

    gathers = {k: getattr(dist, k) for k in ("_all_gather_base", "all_gather_into_tensor") if hasattr(dist, k)}
    for k in gathers:
        setattr(dist, k, all_gather_base)
    torch.Tensor.record_stream = lambda *a: None  # hides the one of TensorBase
    saved = {k: getattr(room, k) for k in answers if hasattr(room, k)}
    real_device = torch.device
    for k, v in answers.items():
        setattr(room, k, v)
    if room is torch.cuda:
        class DeviceMeta(type):
            def __instancecheck__(cls, x):
                return isinstance(x, real_device)

        class Device(metaclass=DeviceMeta):
            def __new__(cls, *a, **k):
                if a and isinstance(a[0], real_device):
                    return a[0]
                if a and isinstance(a[0], str) and a[0].startswith("cuda"):
                    return cpu
                return real_device(*a, **k)

        torch.device = Device
    try:
        yield
    finally:
        torch.device = real_device
        for k, v in gathers.items():
            setattr(dist, k, v)
        del torch.Tensor.record_stream
        for k in answers:
            if k in saved:
                setattr(room, k, saved[k])
            else:
                delattr(room, k)


def fsdp1_wrap(model, wrap_layers=True, **kwargs):
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    if V >= (2, 1):
        kwargs.setdefault("device_id", torch.device("cpu"))
    else:
        kwargs.pop("device_id", None)
    if wrap_layers:
        for i, layer in enumerate(model.layers):
            model.layers[i] = FSDP(layer, **kwargs)
    return FSDP(model, **kwargs)


def need_orig_params():
    need(V >= (2, 0), "no use_orig_params before 2.0")


def fsdp1_sharded(model, optimizer=None):
    """The SHARDED_STATE_DICT of FSDP1, and of its optimizer where asked for."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, StateDictType

    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        out = {"model": model.state_dict()}
        if optimizer is not None:
            if hasattr(FSDP, "optim_state_dict"):
                out["optim"] = FSDP.optim_state_dict(model, optimizer)
            else:
                out["optim"] = FSDP.sharded_optim_state_dict(model, optimizer)
    return out


def fsdp1_or_skip(build):
    try:
        with cpu_as_current_device():
            return build()
    except Skip:
        raise
    except Exception as e:
        if os.environ.get("MAKE_DCP_DEBUG"):
            traceback.print_exc()
            sys.stderr.flush()
        raise Skip("FSDP1 needs a GPU here: %s: %s" % (type(e).__name__, str(e).split("\n")[0][:160]))


@case("fsdp1", 2, "FSDP1, SHARDED_STATE_DICT: ShardedTensor, rows cut in ceil(n/k)")
def _(rank, world):
    return fsdp1_or_skip(lambda: fsdp1_sharded(fsdp1_wrap(Llama()))), {"truth": original(0)}


@case("fsdp1-origparams", 2, "FSDP1 with use_orig_params=True")
def _(rank, world):
    return fsdp1_or_skip(lambda: fsdp1_sharded(need_orig_params() or fsdp1_wrap(Llama(seed=1), use_orig_params=True))), {"truth": original(1)}


@case("fsdp1-optim", 2, "FSDP1 model and AdamW state after one step")
def _(rank, world):
    def build():
        model = fsdp1_wrap(Mini(seed=2), **({"use_orig_params": True} if V >= (2, 2) else {}))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        train_step(model, optimizer)
        return fsdp1_sharded(model, optimizer)

    return fsdp1_or_skip(build)


@case("fsdp1-dtensor", 2, "FSDP1 given a device mesh: DTensor instead of ShardedTensor")
def _(rank, world):
    need(V >= (2, 2), "FSDP1 takes a device_mesh since 2.2")
    mesh = make_mesh((2,), ("dp",))
    return fsdp1_or_skip(lambda: fsdp1_sharded(fsdp1_wrap(Llama(seed=3), device_mesh=mesh, use_orig_params=True))), {"truth": original(3)}


@case("fsdp1-hsdp", 4, "FSDP1 HYBRID_SHARD, replicate 2 x dp 2")
def _(rank, world):
    need(V >= (2, 0), "no HYBRID_SHARD")
    from torch.distributed.fsdp import ShardingStrategy

    def build():
        kwargs = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "use_orig_params": True}
        if V >= (2, 2):
            kwargs["device_mesh"] = make_mesh((2, 2), ("replicate", "dp"))
        else:
            shards = [dist.new_group([0, 1]), dist.new_group([2, 3])]
            replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])]
            kwargs["process_group"] = (shards[rank // 2], replicas[rank % 2])
        return fsdp1_sharded(fsdp1_wrap(Llama(seed=8), **kwargs))

    return fsdp1_or_skip(build), {"truth": original(8), "mesh": {"replicate": 2, "dp": 2}}


@case("fsdp1-tp", 4, "2D by FSDP1 over TP (dp 2 x tp 2)")
def _(rank, world):
    need(V >= (2, 1), "no FSDP1 over TP that saves on the CPU")

    def build():
        if V >= (2, 2):
            mesh = make_mesh((2, 2), ("dp", "tp"))
            model = parallelize(Llama(dim=8, hidden=16, seed=4), mesh["tp"])
            return fsdp1_sharded(fsdp1_wrap(model, device_mesh=mesh["dp"], use_orig_params=True))
        # 2.1: FSDP's shards of TP's DTensors are ShardedTensors that hold DTensors; the planner unpacks them.
        from torch.distributed._tensor import DeviceMesh
        from torch.distributed.tensor.parallel import parallelize_module
        from torch.distributed.tensor.parallel.fsdp import enable_2d_with_fsdp

        need(enable_2d_with_fsdp(), "2D needs a working FSDP extension")
        mesh = DeviceMesh("cpu", torch.arange(4).reshape(2, 2))
        model = parallelize_module(Llama(dim=8, hidden=16, seed=4), mesh, tp_plan(), tp_mesh_dim=1)
        return fsdp1_sharded(fsdp1_wrap(model, process_group=mesh.get_dim_groups()[0], use_orig_params=True))

    return fsdp1_or_skip(build), {"truth": original(4, dim=8, hidden=16)}


# ---------------------------------------------------------------- ShardedTensor by hand

def chunk_sharded(full, rank, world):
    """What FSDP1's own state dict hook calls for each parameter (fsdp/_shard_utils.py)."""
    from torch.distributed.fsdp import _shard_utils as u

    pg = dist.distributed_c10d._get_default_group()
    fn = getattr(u, "_create_chunk_sharded_tensor", None)
    need(fn is not None, "no _create_chunk_sharded_tensor")
    with cpu_as_current_device():
        try:
            return fn(full, rank, world, world, pg, torch.device("cpu"))
        except TypeError:
            return fn(full, rank, world, world, pg)


@case("sharded-tensor", 3, "ShardedTensor: 5 rows on 3 ranks, and 2 rows on 3 ranks")
def _(rank, world):
    torch.manual_seed(5)
    full = {"w": torch.randn(5, 4), "two": torch.randn(2, 3), "bias": torch.randn(7), "i": torch.arange(6).reshape(6, 1)}
    sd = {k: chunk_sharded(v, rank, world) for k, v in full.items()}
    return {"model": sd}, {"truth": {"model." + k: v for k, v in full.items()}}


@case("sharded-tensor-2d", 4, "EnumerableShardingSpec: a 2 x 2 grid of uneven blocks, and column cuts")
def _(rank, world):
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharding_spec import ShardMetadata

    torch.manual_seed(6)
    full = {"grid": torch.randn(5, 7), "cols": torch.randn(3, 9)}
    boxes = {
        "grid": [(0, 0, 3, 4), (0, 4, 3, 3), (3, 0, 2, 4), (3, 4, 2, 3)],
        "cols": [(0, 0, 3, 3), (0, 3, 3, 3), (0, 6, 3, 2), (0, 8, 3, 1)],
    }
    sd = {}
    for k, t in full.items():
        r, c, h, w = boxes[k][rank]
        md = ShardMetadata([r, c], [h, w], "rank:%d/cpu" % rank)
        local = t[r:r + h, c:c + w].contiguous()
        sd[k] = sharded_tensor.init_from_local_shards([sharded_tensor.Shard(local, md)], list(t.size()))
    return sd, {"truth": full}


# ---------------------------------------------------------------- DTensor

def shard(full, mesh, placements):
    """A DTensor over `full`, cut by torch.  from_local with the global shape: no collective, so it
    works for every dtype, uneven and empty shards included."""
    dt = need_dtensor()
    local = full
    coord = [(mesh.mesh == dist.get_rank()).nonzero()[0].tolist()][0]
    for dim, p in enumerate(placements):
        if type(p).__name__ == "Shard":
            parts, at = list(local.chunk(mesh.mesh.size(dim), p.dim)), coord[dim]
            if at < len(parts):
                local = parts[at]
            else:
                local = local.narrow(p.dim, 0, 0)
    if V >= (2, 2):
        return dt.DTensor.from_local(local, mesh, placements, run_check=False, shape=full.size(), stride=full.stride())
    try:
        return dt.distribute_tensor(full, mesh, placements)
    except Exception as e:
        raise Skip("DTensor of %s: %s" % (full.dtype, str(e).split("\n")[0][:100]))


@case("fsdp2", 4, "FSDP2 fully_shard, Shard(0), the vocabulary's 11 rows on 4 ranks")
def _(rank, world):
    fully_shard = fully_shard_fn()
    mesh = make_mesh((4,), ("dp",))
    model = Llama(seed=10)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return {"model": model.state_dict()}, {"truth": original(10), "mesh": {"dp": 4}}


@case("tp", 2, "tensor parallel: colwise, rowwise; the rest is replicated plain tensors")
def _(rank, world):
    mesh = make_mesh((2,), ("tp",))
    model = parallelize(Llama(seed=11), mesh)
    return {"model": model.state_dict()}, {"truth": original(11), "mesh": {"tp": 2}}


@case("tp-embed", 4, "tensor parallel embedding: rowwise, 11 rows on 4 ranks, colwise output, sequence parallel norm")
def _(rank, world):
    need(V >= (2, 4), "no parallel styles for Embedding and LayerNorm")
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

    mesh = make_mesh((4,), ("tp",))
    model = parallelize_module(Llama(seed=12), mesh, {
        "tok_embeddings": RowwiseParallel(),
        "output": ColwiseParallel(),
        "norm": SequenceParallel(),
        "layers.0.feed_forward.w2": RowwiseParallel(),
    })
    return {"model": model.state_dict()}, {"truth": original(12), "mesh": {"tp": 4}}


def two_d(shape, names, hidden, seed, dim=8):
    fully_shard = fully_shard_fn()
    mesh = make_mesh(shape, names)
    model = parallelize(Llama(dim=dim, hidden=hidden, seed=seed), mesh["tp"])
    dp = mesh["dp"] if "replicate" not in names else mesh["replicate", "dp"]
    for layer in model.layers:
        fully_shard(layer, mesh=dp)
    fully_shard(model, mesh=dp)
    return {"model": model.state_dict()}, {"truth": original(seed, dim=dim, hidden=hidden), "mesh": dict(zip(names, shape))}


@case("2d-dp2tp2", 4, "2D FSDP+TP, dp 2 x tp 2")
def _(rank, world):
    return two_d((2, 2), ("dp", "tp"), 24, 13)


@case("2d-dp4tp2", 8, "2D FSDP+TP, dp 4 x tp 2, a colwise weight of 64 rows (_StridedShard: 0,32,8,40,16,48,24,56)")
def _(rank, world):
    return two_d((4, 2), ("dp", "tp"), 64, 14)


@case("2d-uneven", 6, "2D FSDP+TP, dp 3 x tp 2, nothing divides: 10 colwise rows, 11 vocabulary rows")
def _(rank, world):
    return two_d((3, 2), ("dp", "tp"), 10, 15)


@case("hsdp", 4, "HSDP, replicate 2 x dp 2: each chunk held twice, stored once")
def _(rank, world):
    fully_shard = fully_shard_fn()
    mesh = make_mesh((2, 2), ("replicate", "dp"))
    model = Llama(seed=16)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return {"model": model.state_dict()}, {"truth": original(16), "mesh": {"replicate": 2, "dp": 2}}


@case("hsdp-tp", 8, "HSDP + TP, replicate 2 x dp 2 x tp 2")
def _(rank, world):
    need(V >= (2, 6), "no FSDP2 on a 3-D mesh slice")
    return two_d((2, 2, 2), ("replicate", "dp", "tp"), 16, 17)


@case("uneven", 3, "5 rows on 3 ranks (2, 2, 1), by rows and by columns, and a 3-D cut in the middle")
def _(rank, world):
    dt = need_dtensor()
    from_place = dt.Shard
    mesh = make_mesh((3,), ("dp",))
    torch.manual_seed(18)
    full = {"rows": torch.randn(5, 4), "cols": torch.randn(4, 5), "mid": torch.randn(2, 5, 3), "vec": torch.randn(5)}
    dims = {"rows": 0, "cols": 1, "mid": 1, "vec": 0}
    sd = {k: shard(v, mesh, [from_place(dims[k])]) for k, v in full.items()}
    return sd, {"truth": full, "mesh": {"dp": 3}}


@case("empty", 4, "2 rows on 4 ranks (1, 1, 0, 0), and a tensor that is empty everywhere")
def _(rank, world):
    dt = need_dtensor()
    mesh = make_mesh((4,), ("dp",))
    torch.manual_seed(19)
    full = {"rows": torch.randn(2, 3), "cols": torch.randn(3, 1), "one": torch.randn(1), "none": torch.zeros(0, 4)}
    dims = {"rows": 0, "cols": 1, "one": 0, "none": 0}
    sd = {k: shard(v, mesh, [dt.Shard(dims[k])]) for k, v in full.items()}
    return sd, {"truth": full, "mesh": {"dp": 4}}


@case("replicated", 4, "Replicate on one or both dims of a 2 x 2 mesh, and plain tensors held by every rank")
def _(rank, world):
    dt = need_dtensor((2, 2))
    mesh = make_mesh((2, 2), ("dp", "tp"))
    torch.manual_seed(20)
    full = {"rr": torch.randn(3, 4), "sr": torch.randn(5, 4), "rs": torch.randn(4, 6), "plain": torch.randn(9)}
    R, S = dt.Replicate(), dt.Shard
    sd = {
        "rr": shard(full["rr"], mesh, [R, R]),
        "sr": shard(full["sr"], mesh, [S(0), R]),
        "rs": shard(full["rs"], mesh, [R, S(1)]),
        "plain": full["plain"],
    }
    return {"m": sd}, {"truth": {"m." + k: v for k, v in full.items()}, "mesh": {"dp": 2, "tp": 2}}


@case("shard-shard", 4, "[Shard(0), Shard(1)] and [Shard(0), Shard(0)] (dp-major) on a 2 x 2 mesh, uneven")
def _(rank, world):
    dt = need_dtensor((2, 2))
    mesh = make_mesh((2, 2), ("a", "b"))
    torch.manual_seed(21)
    full = {"s0s1": torch.randn(5, 7), "s1s0": torch.randn(3, 6), "s0s0": torch.randn(7, 2)}
    S = dt.Shard
    plan = {"s0s1": [S(0), S(1)], "s1s0": [S(1), S(0)], "s0s0": [S(0), S(0)]}
    sd = {k: shard(v, mesh, plan[k]) for k, v in full.items()}
    return sd, {"truth": full, "mesh": {"a": 2, "b": 2}}


# ---------------------------------------------------------------- training state

def objects():
    return {
        "step": 1234,
        "epoch": 0,
        "loss": 0.1,
        "tiny": 5e-324,
        "negzero": -0.0,
        "inf": float("inf"),
        "nan": float("nan"),
        "big": 2 ** 63,
        "huge": 3 ** 200,
        "neghuge": -(2 ** 64) - 1,
        "min64": -(2 ** 63),
        "betas": (0.9, 0.999),
        "empty_tuple": (),
        "raw": bytes(range(256)),
        "nothing": None,
        "name": 'r\u00fcn "7" \\ \u65e5\u672c \U0001f642\n\x01',
        "amp": True,
        "off": False,
        "list": [1, 2.5, "three", None, True, [4, [5]]],
        "conf": {"lr": 3e-4, "sched": {"warmup": [1, 2], "kind": "cosine"}, "ids": {"7": "seven"}},
        "nested": {"tensors": [torch.arange(3), torch.arange(4.0)], "mixed": [1, torch.ones(2, 2), {"k": torch.zeros(1)}]},
    }


@case("train", 2, "FSDP2 model + AdamW through get_state_dict after one step, and every kind of object")
def _(rank, world):
    fully_shard = fully_shard_fn()
    try:
        from torch.distributed.checkpoint.state_dict import get_state_dict
    except ImportError:
        raise Skip("no get_state_dict")
    mesh = make_mesh((2,), ("dp",))
    model = Mini(seed=30)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    train_step(model, optimizer)
    model_sd, optim_sd = get_state_dict(model, optimizer)
    out = {"model": model_sd, "optim": optim_sd}
    out.update(objects())
    return out, {"mesh": {"dp": 2}}


@case("objects", 1, "every kind of object, no sharding")
def _(rank, world):
    return dict(objects(), w=torch.arange(6.0).reshape(2, 3))


@case("objects-torch", 1, "objects whose pickles name allowed torch and stdlib globals, and tensors inside containers")
def _(rank, world):
    return {
        "dtype": torch.bfloat16, "size": torch.Size([2, 3]), "device": torch.device("cpu"),
        "ordered": [OrderedDict([("b", 1), ("a", 2)])], "set": {1, 2, 3}, "complex": 1 - 2j,
        "bytearray": bytearray(b"ab\x00"), "pair": (torch.arange(4), "x"), "generator": torch.Generator().get_state(),
        "intkeys": [{1: "a", (2, 3): "b"}], "deep": [[[[[[[[1]]]]]]]],
        "shared": [[1, 2]] * 3,
    }


@case("objects-foreign", 1, "an object whose pickle names a class outside the allowlist (argparse.Namespace, as Megatron saves)")
def _(rank, world):
    return {"args": argparse.Namespace(lr=0.1, layers=2), "w": torch.ones(3)}


# ---------------------------------------------------------------- dtypes, names, strides

NO_COPY_KERNEL = ["float4_e2m1fn_x2"]  # before 2.9 torch saves it but cannot copy it while loading
DTYPES = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
          "float8_e5m2fnuz", "float8_e8m0fnu", "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16",
          "uint8", "bool", "complex32", "complex64", "complex128"]


def savable():
    """The dtypes this torch both has and can put through torch.save and back."""
    good, bad = [], []
    for name in DTYPES:
        try:
            f = io.BytesIO()
            torch.save(sample(name), f)
            f.seek(0)
            t = torch.load(f)
            torch.zeros_like(t).copy_(t)
            good.append(name)
        except Exception as e:
            bad.append("%s (%s)" % (name, "absent" if not hasattr(torch, name) else str(e).split("\n")[0][:80]))
    return good, "; ".join(bad)


def sample(name, n=12):
    """n elements of the dtype from raw bits, so that NaNs, infinities and denormals are in it."""
    dtype = getattr(torch, name)
    size = torch.empty(0, dtype=dtype).element_size()
    if name == "bool":
        return torch.tensor([i % 3 == 0 for i in range(n)])
    g = torch.Generator().manual_seed(len(name) * 131 + size)
    raw = torch.randint(0, 256, (n * size,), generator=g, dtype=torch.uint8)
    out = torch.zeros(n, dtype=torch.uint8).repeat_interleave(size)
    out.copy_(raw)
    out[:size] = 255  # the first element is all ones: a NaN in every float
    out[size:2 * size] = 0
    if size > 1:
        out[2 * size - 1] = 128  # -0.0, or the least integer
    try:
        return out.view(dtype)
    except RuntimeError:
        t = torch.zeros(n, dtype=dtype)
        ctypes.memmove(t.data_ptr(), out.data_ptr(), n * size)
        return t


@case("dtypes", 1, "every dtype this torch has, as plain tensors")
def _(rank, world):
    sd = {}
    names, missing = savable()
    for name in names:
        sd[name] = sample(name).reshape(3, 4)
        sd["scalar_" + name] = sample(name)[5].clone()
    return sd, {"truth": dict(sd), "note": missing}


@case("dtypes-sharded", 2, "every dtype this torch has, cut by rows on 2 ranks")
def _(rank, world):
    dt = need_dtensor((2, 2))
    mesh = make_mesh((2,), ("dp",))
    full = {name: sample(name).reshape(3, 4) for name in savable()[0]}
    return {k: shard(v, mesh, [dt.Shard(0)]) for k, v in full.items()}, {"truth": full, "mesh": {"dp": 2}}


@case("dtypes-packed", 1, "float4_e2m1fn_x2: two values a byte, a dtype with no place in HDF5")
def _(rank, world):
    need(hasattr(torch, "float4_e2m1fn_x2"), "no float4_e2m1fn_x2")
    t = torch.arange(12, dtype=torch.uint8).view(torch.float4_e2m1fn_x2).reshape(3, 4)
    return {"fp4": t, "w": torch.ones(2)}, {"truth": {"fp4": t, "w": torch.ones(2)}}


@case("shapes", 1, "0-dim, zero-element, one-element and 8-dim tensors")
def _(rank, world):
    return {
        "scalar": torch.tensor(3.5), "iscalar": torch.tensor(-7), "bscalar": torch.tensor(True),
        "empty": torch.zeros(0), "empty2": torch.zeros(0, 3), "empty3": torch.zeros(2, 0, 3),
        "one": torch.ones(1), "one8": torch.full((1,) * 8, 2.0), "d8": torch.arange(256.).reshape((2,) * 8),
        "d4": torch.arange(60, dtype=torch.int16).reshape(3, 4, 5, 1),
    }


@case("names", 1, "names that need escaping: / % . spaces Unicode, the empty name, 300 characters")
def _(rank, world):
    keys = ["plain", "a/b", "/abs", "trail/", "a//b", "100%", "%2F", "%", "with space", " lead", "trail ",
            "\u00fcn\u00ef-\u65e5\u672c-\U0001f642", "e\u0301 vs \u00e9", ".", "..", "", "x.y", ".hidden", "end.", "back\\slash",
            'quo"te', "tab\tnl\n", "L" * 300, "-dash", "*glob?[x]", "0", "CASE", "case"]
    group = {k: torch.full((2,), float(i)) for i, k in enumerate(keys)}
    sd = {"g": group, "a": {"b": torch.tensor([40.0])}, "a/b": torch.tensor([41.0]), "": {"": {"z": torch.tensor([42.0])}},
          ".": {".": torch.tensor([43.0])}, "top level": 7, "obj/ect": [1, 2], "li": [torch.tensor([44.0]), [torch.tensor([45.0])]]}
    return sd


@case("tied", 2, "tied parameters under FSDP2 or replicated, and two names on one storage")
def _(rank, world):
    base = torch.arange(24.0).reshape(6, 4)
    model = Llama(seed=40)
    model.output.weight = model.tok_embeddings.weight
    sd = {"model": model.state_dict(), "v": {"whole": base, "again": base, "row": base[2], "tail": base[3:]}}
    return sd


@case("strided", 1, "non-contiguous tensors: transposed, sliced, expanded, permuted, channels-last")
def _(rank, world):
    a = torch.arange(24.0).reshape(4, 6)
    b = torch.arange(120, dtype=torch.int32).reshape(2, 3, 4, 5)
    return {
        "t": a.t(), "cols": a[:, 1:3], "step": a[::2, ::3], "expand": torch.arange(3.0).expand(4, 3),
        "expand0": torch.tensor(2.0).expand(2, 3), "perm": b.permute(3, 1, 0, 2), "offset": a.reshape(-1)[5:11],
        "cl": b.contiguous(memory_format=torch.channels_last), "bf": a.to(torch.bfloat16).t(),
        "diag": torch.arange(16.0).reshape(4, 4).diagonal(), "window": torch.arange(6.0).as_strided((4, 3), (1, 1)),
        # torch's writer copies a view unless its storage has exactly its size; these three have
        "overlap": torch.arange(12.0).as_strided((4, 3), (1, 1), 3), "still": torch.arange(12.0).as_strided((4, 3), (0, 1), 5),
        "hole": torch.arange(6.0).as_strided((2, 3), (4, 0), 1),
        "sym1": a[:, :1].t(), "tbool": (a > 9).t(), "tempty": torch.zeros(3, 0).t(),
    }


@case("strided-sharded", 2, "transposed local shards: DTensor over views, Shard(0) and Shard(1)")
def _(rank, world):
    dt = need_dtensor((2, 2))
    mesh = make_mesh((2,), ("dp",))
    a = torch.arange(35.0).reshape(5, 7)
    full = {"t0": a.t(), "t1": a.t(), "c1": a}
    sd = {"t0": shard(full["t0"], mesh, [dt.Shard(0)]), "t1": shard(full["t1"], mesh, [dt.Shard(1)]),
          "c1": shard(full["c1"], mesh, [dt.Shard(1)])}
    return sd, {"truth": full, "mesh": {"dp": 2}}


@case("lazy-bits", 1, "conjugate and negative views: the bytes in the file are not the values")
def _(rank, world):
    c = torch.complex(torch.arange(4.0), torch.arange(4.0) + 1)
    return {"plain": c, "conj": c.conj(), "neg": torch._neg_view(torch.arange(4.0)),
            "imag": c.conj().imag}


# ---------------------------------------------------------------- ways of writing

@case("many-files", 2, "single_file_per_rank=False: one file for each item")
def _(rank, world):
    torch.manual_seed(50)
    full = {"w": torch.randn(5, 4), "b": torch.randn(6)}
    sd = {k: chunk_sharded(v, rank, world) for k, v in full.items()}
    sd["step"] = 3
    return sd, {"truth": full, "writer": {"single_file_per_rank": False}}


@case("threads", 2, "thread_count=2: several files for each rank")
def _(rank, world):
    torch.manual_seed(51)
    full = {"w%d" % i: torch.randn(4, 4 + i) for i in range(5)}
    sd = {k: chunk_sharded(v, rank, world) for k, v in full.items()}
    return sd, {"truth": full, "writer": {"thread_count": 2}}


@case("flat", 2, "no flattening (flatten_state_dict=False): no planner_data, names taken as they are")
def _(rank, world):
    torch.manual_seed(52)
    full = {"model.w": torch.randn(5, 4), "model.b": torch.randn(6)}
    sd = {k: chunk_sharded(v, rank, world) for k, v in full.items()}
    sd["conf"] = {"nested": [1, {"x": 2}]}
    return sd, {"truth": full, "planner": {"flatten_state_dict": False}}


# ---------------------------------------------------------------- truth

def raw_bytes(t):
    t = t.detach().cpu()
    for resolve in ("resolve_conj", "resolve_neg"):
        if hasattr(t, resolve):
            t = getattr(t, resolve)()
    t = t.contiguous()
    size = t.numel() * t.element_size()
    return ctypes.string_at(t.data_ptr(), size) if size else b""


def describe(t):
    data = raw_bytes(t)
    return {"dtype": str(t.dtype).replace("torch.", ""), "shape": list(t.shape), "sha256": hashlib.sha256(data).hexdigest()}


def flatten(state_dict, planner_options):
    try:
        from torch.distributed.checkpoint._nested_dict import flatten_state_dict
    except ImportError:
        return dict(state_dict)
    if not planner_options.get("flatten_state_dict", True):
        return dict(state_dict)
    return flatten_state_dict(state_dict)[0]


def holds_tensors(value):
    if isinstance(value, dict):
        return any(holds_tensors(v) for v in value.values())
    return isinstance(value, torch.Tensor) or type(value).__name__ == "ShardedTensor"


def flat_by_hand(state_dict, prefix=""):
    """1.13 flattens nothing: a nested dict would become one pickle.  So its users saved flat dicts."""
    out = {}
    for k, v in state_dict.items():
        if isinstance(v, dict) and holds_tensors(v):
            out.update(flat_by_hand(v, prefix + str(k) + "."))
        else:
            out[prefix + str(k)] = v
    return out


def gather(value):
    """The full tensor of a sharded value; a collective: every rank calls it in the same order."""
    dt = dtensor_class()
    if dt is not None and isinstance(value, dt.DTensor):
        value = value.detach()
        if hasattr(value, "full_tensor"):
            return value.full_tensor()
        mesh = value.device_mesh
        return value.redistribute(mesh, [dt.Replicate()] * mesh.mesh.ndim).to_local()
    if type(value).__name__ == "ShardedTensor":
        parts = [(list(s.metadata.shard_offsets), s.tensor.detach().clone()) for s in value.local_shards()]
        dt = dtensor_class()
        parts = [(o, gather(p) if dt is not None and isinstance(p, dt.DTensor) else p) for o, p in parts]
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, parts)
        full = torch.zeros(list(value.size()), dtype=value.dtype)
        for offsets, part in sum(every, []):
            window = full
            for d, (o, n) in enumerate(zip(offsets, part.shape)):
                window = window.narrow(d, o, n)
            window.copy_(part)
        return full
    return value


def worker(rank, name, world, target, port, answers):
    """One rank: build, gather the truth, save."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world),
                      LOCAL_RANK=str(rank))
    try:
        dist.init_process_group("gloo", rank=rank, world_size=world, init_method="file://" + port)
        made = CASES[name][0](rank, world)
        state_dict, extra = made if isinstance(made, tuple) else (made, {})
        if V < (2, 0):
            state_dict = flat_by_hand(state_dict)
        flat = flatten(state_dict, extra.get("planner", {}))
        truth, tensors, objs = extra.get("truth", {}), {}, {}
        for fqn, value in flat.items():
            if isinstance(value, torch.Tensor) or type(value).__name__ == "ShardedTensor":
                tensors[fqn] = describe(truth[fqn] if fqn in truth else gather(value))
            else:
                objs[fqn] = {"repr": repr(value), "type": type(value).__name__}
                if plain_json(value):
                    objs[fqn]["json"] = value
        save(state_dict, target, extra.get("planner", {}), extra.get("writer", {}))
        dist.barrier()
        if rank == 0:
            boxes = {k: v for k, v in extra.items() if k in ("mesh", "note")}
            answers.put(("ok", tensors, objs, boxes))
    except Skip as e:
        answers.put(("skip", str(e)))
    except BaseException as e:
        answers.put(("fail", "rank %d: %s: %s" % (rank, type(e).__name__, str(e).strip().split("\n")[0 if str(e).count("\n") < 3 else -1][:200]), traceback.format_exc()))
    finally:
        sys.stdout.flush()
        answers.close()
        answers.join_thread()
        os._exit(0)  # a rank whose peer skipped must not wait in gloo's destructor


def plain_json(x):
    """True where JSON has exactly one spelling of the value, so that the checker may insist on it."""
    if x is None or isinstance(x, (bool, str)):
        return not isinstance(x, str) or x.isascii()
    if isinstance(x, int):
        return -(2 ** 63) <= x < 2 ** 63
    if isinstance(x, float):
        return math.isfinite(x)
    if type(x) is list:
        return all(plain_json(v) for v in x)
    if type(x) is dict:
        return all(isinstance(k, str) and plain_json(v) for k, v in x.items())
    return False


def save(state_dict, target, planner_options, writer_options):
    planner = None
    if planner_options:
        need(V >= (2, 0), "its planner never flattens: every 1.13 checkpoint is flat")
        from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

        planner = DefaultSavePlanner(**planner_options)
    need(V >= (2, 0) or "thread_count" not in writer_options, "its writer has no threads")
    writer = dcp.FileSystemWriter(target, **dict({"single_file_per_rank": True}, **writer_options))
    if hasattr(dcp, "save"):
        dcp.save(state_dict, storage_writer=writer, planner=planner)
    elif planner is not None:
        dcp.save_state_dict(state_dict, writer, planner=planner)
    else:
        dcp.save_state_dict(state_dict, writer)


def load_again(target, metadata):
    """The same checkpoint through torch's own reader, in this one process."""
    try:
        from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    except ImportError:
        from torch.distributed._shard.checkpoint.default_planner import DefaultLoadPlanner

    flat = {}
    for fqn, md in metadata.state_dict_metadata.items():
        if hasattr(md, "chunks"):
            flat[fqn] = torch.zeros(list(md.size), dtype=md.properties.dtype)
    for fqn in list(flat):
        reader = dcp.FileSystemReader(target)
        planner = DefaultLoadPlanner(**({"flatten_state_dict": False, "flatten_sharded_tensors": False} if V >= (2, 0) else {}))
        one = {fqn: flat[fqn]}
        try:
            if V >= (2, 3):
                dcp.load(one, storage_reader=reader, planner=planner)
            else:
                dcp.load_state_dict(one, reader, planner=planner, no_dist=True)
            flat[fqn] = describe(one[fqn])
        except BaseException as e:  # CheckpointException is not an Exception
            flat[fqn] = "torch cannot load it: %s" % str(e).strip().split("\n")[-1][:200]
    return flat


def one_line_each(doc):
    """JSON with a line for each tensor and object: small, and a diff names what changed."""
    lines = []
    for key, value in doc.items():
        if key in ("tensors", "objects"):
            rows = ["  %s: %s" % (json.dumps(k), json.dumps(v)) for k, v in value.items()]
            lines.append(" %s: {%s}" % (json.dumps(key), "\n" + ",\n".join(rows) + "\n " if rows else ""))
        else:
            lines.append(" %s: %s" % (json.dumps(key), json.dumps(value)))
    return "{\n" + ",\n".join(lines) + "\n}\n"


def finish(target, name, tensors, objs, extra):
    with open(os.path.join(target, ".metadata"), "rb") as f:
        metadata = pickle.load(f)
    paths = metadata.planner_data or {}
    again = load_again(target, metadata)
    problems = []
    for fqn, t in tensors.items():
        if again.get(fqn) != t and t["dtype"] not in NO_COPY_KERNEL:
            problems.append("%s: had %s, loaded %s" % (fqn, t, again.get(fqn)))
    for fqn in again:
        if fqn not in tensors:
            problems.append("%s: in the file, not in the state dict" % fqn)
    out_t, out_o = OrderedDict(), OrderedDict()
    storage = {}
    for index, info in metadata.storage_data.items():
        storage.setdefault(index.fqn, []).append((index, info))
    for fqn in sorted(tensors):
        md = metadata.state_dict_metadata[fqn]
        chunks = []
        for c in md.chunks:
            where = [i.relative_path for ix, i in storage.get(fqn, []) if list(ix.offset or []) == list(c.offsets)]
            chunks.append({"offsets": list(c.offsets), "sizes": list(c.sizes), "file": where[0] if where else None})
        out_t[fqn] = dict(tensors[fqn], path=list(paths.get(fqn, (fqn,))), chunks=chunks)
    for fqn in sorted(objs):
        info = storage[fqn][0][1]
        with open(os.path.join(target, info.relative_path), "rb") as f:
            f.seek(info.offset)
            item = f.read(info.length)
        torch.load(io.BytesIO(item), **({"weights_only": False} if V >= (1, 13) else {}))
        out_o[fqn] = dict(objs[fqn], path=list(paths.get(fqn, (fqn,))), file=info.relative_path, offset=info.offset,
                          length=info.length, sha256=hashlib.sha256(item).hexdigest())
    doc = OrderedDict([("torch", VERSION), ("case", name), ("why", CASES[name][2]), ("ranks", CASES[name][1])])
    doc.update({k: v for k, v in extra.items() if v})
    doc["tensors"], doc["objects"] = out_t, out_o
    with open(os.path.join(target, "expected.json"), "w", encoding="utf-8") as f:
        f.write(one_line_each(doc))
    return problems


def run_case(name, out, broken=None):
    fn, world, why = CASES[name]
    target = os.path.join(out, "dcp-torch%s-%s" % (VERSION, name))
    shutil.rmtree(target, ignore_errors=True)
    os.makedirs(target)
    ctx = mp.get_context("fork")
    answers = ctx.Queue()
    store = tempfile.mktemp(prefix="make_dcp_")
    procs = [ctx.Process(target=worker, args=(r, name, world, target, store, answers), daemon=True) for r in range(world)]
    for p in procs:
        p.start()
    try:
        answer = answers.get(timeout=120)
    except Exception:
        answer = ("fail", "no answer in 120 s", "")
    if answer[0] != "ok":
        for p in procs:
            p.terminate()
    for p in procs:
        p.join(20)
    if os.path.exists(store):
        os.unlink(store)
    if answer[0] == "ok":
        try:
            problems = finish(target, name, *answer[1:])
        except BaseException as e:
            problems = ["%s: %s" % (type(e).__name__, e)]
            if os.environ.get("MAKE_DCP_DEBUG"):
                traceback.print_exc()
        if not problems:
            size = sum(os.path.getsize(os.path.join(target, f)) for f in os.listdir(target))
            print("made  %-18s %4d KB  %s" % (name, (size + 1023) // 1024, answer[3].get("note", "")), flush=True)
            return "made"
        if broken:
            kept = os.path.join(broken, os.path.basename(target))
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(target, kept)
            os.unlink(os.path.join(kept, "expected.json"))
        answer = ("fail", "torch does not read back what the model had: " + "; ".join(problems[:3])[:600], "")
    shutil.rmtree(target, ignore_errors=True)
    print("%-5s %-18s %s" % (answer[0], name, answer[1]), flush=True)
    if answer[0] == "fail" and os.environ.get("MAKE_DCP_DEBUG"):
        print(answer[2])
    return answer[0]


def main():
    ap = argparse.ArgumentParser(description="make the DCP corpus with the torch of this interpreter")
    ap.add_argument("--out", default=os.path.join(os.path.dirname(os.path.abspath(__file__)), "good"))
    ap.add_argument("--only", default="", help="comma-separated case names")
    ap.add_argument("--list", action="store_true")
    ap.add_argument("--broken", help="keep here, without expected.json, what torch wrote but does not read back")
    ap.add_argument("--strict", action="store_true", help="exit 1 unless every case was made")
    args = ap.parse_args()
    if args.list:
        for name, (fn, world, why) in CASES.items():
            print("%-18s %d ranks  %s" % (name, world, why))
        return 0
    wanted = [n for n in args.only.split(",") if n] or list(CASES)
    unknown = [n for n in wanted if n not in CASES]
    if unknown:
        print("make_dcp.py: unknown case %s; --list names them" % ", ".join(unknown), file=sys.stderr)
        return 2
    os.makedirs(args.out, exist_ok=True)
    print("torch %s" % VERSION, flush=True)
    if args.broken:
        args.broken = os.path.abspath(args.broken)
    os.chdir(args.out)  # torch writes the target's name into .metadata; a relative one names no machine
    results = [run_case(n, "", args.broken) for n in wanted]
    return 1 if args.strict and set(results) != {"made"} else 0


if __name__ == "__main__":
    sys.exit(main())
