"""Scenarios of FSDP training, run by PyTorch's FSDP on gloo. fsdp_tool runs the same scenarios; see fsdp_step.py.

The forward of a unit sums its parameters times given coefficients, so the gradients are exactly those coefficients. This
compares FSDP, not the arithmetic of models.
"""

import contextlib
import warnings

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel as FSDP,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp import _flat_param, _runtime_utils
from torch.distributed.fsdp.wrap import CustomPolicy

warnings.filterwarnings("ignore")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}
PREFETCH = {"NONE": None, "PRE": BackwardPrefetch.BACKWARD_PRE, "POST": BackwardPrefetch.BACKWARD_POST}


def _decompress(state, grad):
    grad.data = grad.data.to(state.parameter_type)


default_hooks._decompress = _decompress  # torch's version calls record_stream, which the CPU does not support
torch.Tensor.pin_memory = lambda self, *args: self  # without a GPU, torch cannot pin memory
torch.cpu.Stream.synchronize = lambda self: None


def raw(tensor):
    return tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy().tobytes().hex()


def tensor_of(text, dtype, shape):
    return torch.frombuffer(bytearray.fromhex(text), dtype=dtype).reshape(shape).clone() if text else torch.empty(
        shape, dtype=dtype)


class Unit(nn.Module):
    """The parameters of a unit. The caller sets `coefficients` and `seen`."""

    def __init__(self, spec, rank):
        super().__init__()
        self.names = []
        for i, p in enumerate(spec["params"]):
            name = p["fqn"]
            if "shared_with" in p:
                self.register_parameter(name, getattr(self, self.names[p["shared_with"]]))
                continue
            text = p["bytes"][rank] if isinstance(p["bytes"], list) else p["bytes"]  # experts differ
            value = tensor_of(text, DTYPES[p.get("dtype", "float32")], p["shape"])
            if "strides" in p:
                value = value.reshape(-1).as_strided(p["shape"], p["strides"])
            self.register_parameter(name, nn.Parameter(value, requires_grad=not p.get("frozen", False)))
            self.names.append(name)

    def forward(self, x):
        self.seen = []
        for name, c in zip(self.names, self.coefficients):
            p = getattr(self, name)
            self.seen.append(raw(p))
            if c is not None:
                x = x + (p * c).sum()
        return x


class Model(nn.Module):
    def __init__(self, units, rank):
        super().__init__()
        self.own = Unit(units[0], rank)
        self.children_ = nn.ModuleList(Unit(u, rank) for u in units[1:])
        self.order = None

    def forward(self, x):
        x = self.own(x)
        for i in self.order:
            x = self.children_[i - 1](x)
        return x


def settings(scenario, unit, groups):
    """The arguments of FSDP for a unit: its own options, else those of the scenario."""
    s = {**scenario, **scenario["units"][unit].get("options", {})}
    group = s.get("group", "hybrid" if s.get("replicas", 1) > 1 else "world")
    dtype = lambda key: DTYPES.get(s.get(key))
    return dict(
        process_group=groups[s["world"] if group == "world" else group],
        sharding_strategy=ShardingStrategy[s.get("strategy", "FULL_SHARD")],
        mixed_precision=MixedPrecision(
            param_dtype=dtype("param_dtype"),
            reduce_dtype=dtype("reduce_dtype"),
            keep_low_precision_grads=s.get("keep_low_precision_grads", False),
        ),
        backward_prefetch=PREFETCH[s.get("backward_prefetch", "NONE")],
        forward_prefetch=s.get("forward_prefetch", False),
        use_orig_params=s.get("use_orig_params", False),
        cpu_offload=CPUOffload(s.get("offload", False)),
        device_id=torch.device("cpu"),
    )


def wrap(scenario, groups, rank):
    model = Model(scenario["units"], rank)
    options = settings(scenario, 0, groups)
    if scenario.get("planned"):
        units = {id(m): i for i, m in enumerate(model.children_, 1)}
        policy = CustomPolicy(lambda m: id(m) in units and settings(scenario, units[id(m)], groups))
        model = FSDP(model, auto_wrap_policy=policy, **options)
    else:
        for i in range(len(model.children_)):
            model.children_[i] = FSDP(model.children_[i], **settings(scenario, i + 1, groups))
        model = FSDP(model, **options)
    hook = scenario.get("hook")
    if hook:
        state = default_hooks.LowPrecisionState(options["process_group"])
        whole = scenario.get("strategy") == "NO_SHARD"
        function = {"float16": default_hooks.fp16_compress_hook, "bfloat16": default_hooks.bf16_compress_hook}.get(
            hook, default_hooks.allreduce_hook if whole else default_hooks.reduce_scatter_hook)
        model.register_comm_hook(state, function)
    return model


class Trace:
    """The order in which FSDP gathers, reduces and frees, in the tool's notation."""

    def __init__(self, handles):
        self.names = {id(h): n for h, n in handles.items()}
        self.events, self.calls = [], []
        self.current = None

    @contextlib.contextmanager
    def __call__(self):
        trace, H = self, _flat_param.FlatParamHandle
        saved = (H._all_gather_flat_param, H._free_unsharded_flat_param, _runtime_utils._reduce_grad,
                 _runtime_utils._reduce_grad_no_shard, dist.reduce_scatter_single, dist.all_reduce)
        hooks = (_runtime_utils._pre_backward_hook, _runtime_utils._post_backward_hook)

        def pre(state, module, handle, *args):
            trace.calls.append(["pre", trace.names[id(handle)] if handle else "unit0"])
            return hooks[0](state, module, handle, *args)

        def post(state, handle, *args):
            trace.calls.append(["post", trace.names[id(handle)]])
            return hooks[1](state, handle, *args)

        def gather(handle, *args):
            trace.events.append(f"ALL_GATHER {trace.names[id(handle)]}")
            return saved[0](handle, *args)

        def free(handle):
            if handle._get_padded_unsharded_flat_param().untyped_storage().size() > 0:
                trace.events.append(f"FREE {trace.names[id(handle)]}")
            return saved[1](handle)

        def reduce(state, handle, which):
            trace.current = trace.names[id(handle)]
            return saved[which](state, handle)

        def reduce_scatter(*args, **kwargs):
            trace.events.append(f"REDUCE_SCATTER {trace.current}")
            return saved[4](*args, **kwargs)

        def all_reduce(*args, **kwargs):
            trace.events.append(f"ALL_REDUCE {trace.current}")
            return saved[5](*args, **kwargs)

        H._all_gather_flat_param, H._free_unsharded_flat_param = gather, free
        _runtime_utils._reduce_grad = lambda s, h: reduce(s, h, 2)
        _runtime_utils._reduce_grad_no_shard = lambda s, h: reduce(s, h, 3)
        dist.reduce_scatter_single, dist.all_reduce = reduce_scatter, all_reduce
        _runtime_utils._pre_backward_hook, _runtime_utils._post_backward_hook = pre, post
        try:
            yield
        finally:
            (H._all_gather_flat_param, H._free_unsharded_flat_param, _runtime_utils._reduce_grad,
             _runtime_utils._reduce_grad_no_shard, dist.reduce_scatter_single, dist.all_reduce) = saved
            _runtime_utils._pre_backward_hook, _runtime_utils._post_backward_hook = hooks


def handle_of(unit):
    return unit._handle


def describe(handle):
    p = handle.flat_param
    infos = [
        [i.offset_in_shard, i.numel_in_shard, i.intra_param_start_idx, i.intra_param_end_idx] if i.in_shard else None
        for i in p._shard_param_infos
    ]
    return {
        "numels": list(p._numels_with_padding),
        "is_padding": list(p._is_padding_mask),
        "infos": infos,
        "shared": [[s.param_name, s.prim_param_name] for s in p._shared_param_infos],
        "shard_numel": p.numel(),
        "padding": p._shard_numel_padded,
        "shard": raw(p),
    }


def set_coefficients(units, scenario, step, rank):
    for unit, spec, grads in zip(units, scenario["units"], step["grads"][rank]):
        dtype = DTYPES.get({**scenario, **spec.get("options", {})}.get("param_dtype"))
        params = [p for p in spec["params"] if "shared_with" not in p]
        unit.coefficients = [
            tensor_of(g, dtype or DTYPES[p.get("dtype", "float32")], p["shape"]) if g is not None else None
            for g, p in zip(grads, params)
        ] if grads else [None] * len(params)


def run_scenario(scenario, groups, rank):
    model = wrap(scenario, groups, rank)
    inner = model.module
    fsdp_units = [model, *inner.children_]
    units = [inner.own] + [c.module for c in inner.children_]
    handles = [u._handle for u in fsdp_units]
    result = {"units": [describe(h) if h else None for h in handles], "params": [], "grads": []}
    if "clip" in scenario:
        result |= {"unclipped": [], "norms": []}
    calls = []
    trace = Trace({h: s["name"] for h, s in zip(handles, scenario["units"]) if h})
    with trace():
        for step in scenario["steps"]:
            if step["zero"]:
                model.zero_grad(set_to_none=True)
            inner.order = step["order"]
            set_coefficients(units, scenario, step, rank)
            with contextlib.nullcontext() if step["sync"] else model.no_sync():
                x = torch.zeros((), dtype=DTYPES.get(scenario.get("param_dtype"), torch.float32))
                trace.calls = []
                model(x).backward()
            calls.append(trace.calls)
            result["params"].append([s for i in [0, *step["order"]] for s in units[i].seen])
            if "clip" in scenario:
                most, kind = scenario["clip"]
                result["unclipped"].append([None if not h or h.flat_param.grad is None else h.flat_param.grad.clone()
                                            for h in handles])
                norm = model.clip_grad_norm_(most, kind or torch.inf)
                result["norms"].append(norm)
            grads = [h.flat_param.grad if h else None for h in handles]
            result["grads"].append([None if g is None else [str(g.dtype)[6:], raw(g)] for g in grads]
                                   if step["sync"] else [])
    result["trace"] = trace.events
    return result, calls


def run_all(rank, world, scenarios):
    groups = {n: dist.new_group(list(range(n))) for n in range(1, world)}
    groups[world] = dist.group.WORLD
    if world == 4:
        pairs = [dist.new_group(list(r)) for r in ((0, 1), (2, 3), (0, 2), (1, 3))]
        groups["neighbours"], groups["across"] = pairs[rank // 2], pairs[2 + rank % 2]
        groups["hybrid"] = (groups["neighbours"], groups["across"])
    return [run_scenario(s, groups, rank) if rank < s["world"] else None for s in scenarios]
