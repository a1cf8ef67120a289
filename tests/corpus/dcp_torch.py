"""Functions that the corpus makers share: names that moved between torch versions, small models, FSDP1 without a GPU, and the
table of cases. Import it first, since it sets the environment for torch."""
import contextlib
import logging
import math
import os
import sys
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
except ImportError:  # 1.13 has it in another module, whose name is in its pickles
    import torch.distributed._shard.checkpoint as dcp
import torch.multiprocessing as mp
import torch.nn as nn

VERSION = torch.__version__.split("+")[0]
V = tuple(int(x) for x in VERSION.split(".")[:2])
CASES = OrderedDict()


class Skip(Exception):
    """This torch cannot make the case. The text is the reason."""


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
    """A model of a few kB with Llama's names. Its vocabulary has 11 rows, which no mesh divides."""

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
    """A model of six parameters for cases with optimizer state, where each parameter takes four items per rank."""

    def __init__(self, dim=6, hidden=10, vocab=11, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.tok_embeddings = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList([FeedForward(dim, hidden)])
        self.norm = nn.LayerNorm(dim)


def original(seed, prefix="model.", **kwargs):
    """The parameters and buffers before anything cuts them. These values depend neither on the code under test nor on
        torch's gathering."""
    return {prefix + k: v.detach().clone() for k, v in Llama(seed=seed, **kwargs).state_dict().items()}


def train_step(model, optimizer):
    """One step with known gradients. Without a forward pass it needs no streams and no collectives."""
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
    """FSDP1 up to 2.1 asks CUDA (2.1: torch.cpu) for devices and streams with arguments that a CPU does not have. Its state
        dict code only handles tensors, so these calls are answered with the CPU. Nothing that affects names, cuts or files is
        changed."""
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
        # Gloo of these versions can only gather lists. The bytes and their order are the same.
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, tensor.contiguous(), group=group)
        output.copy_(torch.cat([p.reshape(-1) for p in parts]).reshape(output.shape))

    gathers = {k: getattr(dist, k) for k in ("_all_gather_base", "all_gather_into_tensor") if hasattr(dist, k)}
    for k in gathers:
        setattr(dist, k, all_gather_base)
    torch.Tensor.record_stream = lambda *a: None  # hides that of TensorBase
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
    """The SHARDED_STATE_DICT of FSDP1, and of its optimizer if given."""
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
