"""What the ranks of test_torch.py run: forked processes that form a gloo group and save and load checkpoints."""

import copy
import gc
import os
import pickle
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from pathlib import Path

import harness

RANKS = 4


def run_ranks(function, *args, ranks=RANKS):
    """Runs a function in forked processes that form a gloo group. Returns their results, pickled through files."""
    import torch.distributed as dist

    import torch.distributed.tensor.parallel  # noqa: F401  once, not in each rank
    from torch.distributed.checkpoint.state_dict import get_state_dict  # noqa: F401

    import fsdpckpt.torch  # noqa: F401

    folder = Path(tempfile.mkdtemp())
    children = []
    for rank in range(ranks):
        pid = os.fork()
        if pid:
            children.append(pid)
            continue
        try:
            warnings.simplefilter("ignore")
            dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
            result = function(*args)
            (folder / str(rank)).write_bytes(pickle.dumps(result))
            dist.barrier()
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)
    failed = [rank for rank, pid in enumerate(children) if os.waitpid(pid, 0)[1]]
    results = [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(ranks) if rank not in failed]
    shutil.rmtree(folder)
    assert not failed, f"ranks {failed} failed"
    return results


def same(a, b):
    """Whether two state dicts are equal, bit for bit."""
    import torch

    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor):
        a, b = (t.to_local() if hasattr(t, "to_local") else t for t in (a, b))
        a, b = a.resolve_conj(), b.resolve_conj()
        return (a.dtype, a.shape) == (b.dtype, b.shape) and harness.torch_bytes(a) == harness.torch_bytes(b)
    return type(a) is type(b) and a == b


def zeroed(state):
    """A state dict of the same structure without its values."""
    import torch

    if isinstance(state, dict):
        return {key: zeroed(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(map(zeroed, state))
    return torch.zeros_like(state) if isinstance(state, torch.Tensor) else None


def save(state, path, **options):
    import torch.distributed.checkpoint as dcp

    from fsdpckpt.torch import HDF5Writer

    return dcp.save(state, storage_writer=HDF5Writer(path, **options))


def load(state, path, **options):
    import torch.distributed.checkpoint as dcp

    from fsdpckpt.torch import HDF5Reader

    dcp.load(state, storage_reader=HDF5Reader(path, **options))
    return state


# ---- what the ranks run ----


def plain_state():
    """Whole, cut, empty, tied and 0-dim tensors of several dtypes, lists, and objects."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    weight, bias = torch.randn(10, 6), torch.randn(3)

    def cut(tensor, placement=Shard(0)):
        """distribute_tensor, which needs collectives that gloo lacks for some dtypes."""
        local = tensor
        if placement.is_shard():
            parts = tensor.chunk(ranks, placement.dim)
            local = parts[rank] if rank < len(parts) else tensor.narrow(placement.dim, 0, 0)
        whole = {"shape": tensor.shape, "stride": tensor.stride()}
        return DTensor.from_local(local.clone(), mesh, [placement], run_check=False, **whole)

    bits = torch.randint(0, 256, (12, 16), dtype=torch.uint8)
    return {
        "model": {
            "weight": cut(weight),
            "tied": cut(weight),
            "bias": cut(bias),
            "none": cut(torch.zeros(0, 5)),
            "columns": cut(torch.randn(5, 8).to(torch.bfloat16), Shard(1)),
            "copy": cut(torch.randn(7), Replicate()),
            "bool": cut(bits > 99),
            "complex": cut(bits.view(torch.complex64).clone()),
            "fp8": cut(bits[:, :4].clone().view(torch.float8_e4m3fn)),
        },
        "transposed": weight.t(),
        "conjugated": torch.randn(4, dtype=torch.complex64).conj(),
        "scalar": torch.tensor(7.5, dtype=torch.float64),
        "list": [weight.clone(), {"inner": bias.clone()}],
        "step": 100,
        "betas": (0.9, 0.95),
        "text": "é\n",
    }


def save_plain(folder):
    import torch.distributed.checkpoint as dcp

    state = plain_state()
    save(state, folder / "ours")
    dcp.save(state, checkpoint_id=folder / "theirs")
    loaded = load(zeroed(state), folder / "ours")
    assert same(loaded, state), loaded
    return True


def two_d_model(module=False):
    """A small model under FSDP2 and tensor parallelism, with the state of its optimizer after a step. With `module`, the
    model and the optimizer themselves."""
    import torch
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:
        from torch.distributed._composable.fsdp import fully_shard
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(16, 24), torch.nn.ReLU(), torch.nn.Linear(24, 10), torch.nn.LayerNorm(10))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.randn(4, 16)).sum().backward()
    optimizer.step()
    if module:
        return model, optimizer
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optim": optimizer_state}


def save_two_d(folder):
    import torch.distributed.checkpoint as dcp

    try:
        state = two_d_model()
    except AttributeError:
        return False  # FSDP2 of this PyTorch needs a GPU
    save(state, folder / "ours")
    dcp.save(state, checkpoint_id=folder / "theirs")
    again = two_d_model()
    for group in (again["model"], *again["optim"]["state"].values()):
        for tensor in group.values():
            (tensor.to_local() if hasattr(tensor, "to_local") else tensor).zero_()
    load(again, folder / "ours")
    assert same(again, state)
    return True


def save_replicated(folder):
    """HSDP: each box is held by two ranks, and stored once."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "dp"))
    torch.manual_seed(2)
    state = {f"w{i}": distribute_tensor(torch.randn(6, 3 + i), mesh, [Replicate(), Shard(0)]) for i in range(8)}
    save(state, folder / "ours")
    assert same(load(zeroed(state), folder / "ours"), state)
    return {name: value.full_tensor().numpy() for name, value in state.items()}


def uneven_state(value=True):
    """Parameters of FSDP2 on dp 3 × tp 2 whose rows do not divide. PyTorch 2.10 and later compute wrong boxes for them."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
    model = torch.nn.Module()
    layers = {str(rows): torch.nn.ModuleDict({"q_proj": torch.nn.Linear(3, rows, bias=False)}) for rows in UNEVEN_ROWS}
    model.layers = torch.nn.ModuleDict(layers)
    for rows in UNEVEN_ROWS:
        with torch.no_grad():
            layers[str(rows)]["q_proj"].weight.copy_(uneven_weight(rows) if value else torch.zeros(rows, 3))
    parallelize_module(model, mesh["tp"], {"layers.*.q_proj": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    return model.state_dict()


UNEVEN_ROWS = (7, 8, 13)  # of 7 rows the ranks hold others than PyTorch says, of 13 its boxes also overlap


def uneven_weight(rows):
    import torch

    return torch.arange(rows * 3.0).reshape(rows, 3) + 1


def save_uneven(folder):
    """Saves with our planner in every way, and loads. Returns the error of HDF5Writer with PyTorch's planner."""
    import torch.distributed.checkpoint as dcp

    import fsdpckpt
    from fsdpckpt.torch import HDF5Reader, HDF5Writer, LoadPlanner, SavePlanner

    state = uneven_state()
    for kind in ("h5", "dcp", "pt", "safetensors"):
        fsdpckpt.save(state, folder / f"saved-{kind}", to=kind)
    dcp.save(state, checkpoint_id=folder / "theirs", planner=SavePlanner())
    dcp.save(state, storage_writer=HDF5Writer(folder / "ours"), planner=SavePlanner(enable_plan_caching=True))
    for path in ("saved-dcp", "theirs"):
        again = uneven_state(False)
        dcp.load(again, checkpoint_id=folder / path, planner=LoadPlanner())
        assert same(again, state), path
    assert same(load(uneven_state(False), folder / "ours"), state)
    assert same(load(uneven_state(False), folder / "theirs"), state)
    again = uneven_state(False)
    dcp.load(again, storage_reader=HDF5Reader(folder / "ours"), planner=LoadPlanner())
    assert same(again, state)
    try:
        save({"weight": state["layers.7.q_proj.weight"]}, folder / "refused")
    except dcp.api.CheckpointException as error:
        return [str(failure[0]) for failure in error.failures.values()]
    return []


def load_uneven(path):
    """Ranks load what the command resharded for them."""
    import torch.distributed.checkpoint as dcp

    from fsdpckpt.torch import LoadPlanner

    again = uneven_state(False)
    dcp.load(again, checkpoint_id=path, planner=LoadPlanner())
    assert same(again, uneven_state())
    return True


def save_stages(folder):
    """Pipeline parallelism: ranks 0 and 1 hold other tensors and objects than ranks 2 and 3."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stage = dist.get_rank() // 2
    torch.manual_seed(3)
    state = {}
    for layer in range(4):
        weight = torch.randn(8, 3)
        if layer // 2 == stage:
            state[f"layers.{layer}"] = distribute_tensor(weight, mesh["dp"], [Shard(0)])
            state[f"steps.{layer}"] = layer
            state[f"counts.{layer}"] = torch.tensor(layer)
    save(state, folder / "ours")
    loaded = load(zeroed(state), folder / "ours")
    assert same(loaded, state), (loaded, state)
    return sorted(state)


def load_elsewhere(folder):
    """Loads what save_plain wrote on two ranks with a 2-D mesh of other placements, partially."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    weight = torch.randn(10, 6)
    state = {"model": {"weight": distribute_tensor(torch.zeros(10, 6), mesh, [Shard(1)])}, "step": 0}
    load(state, folder / "ours")
    assert torch.equal(state["model"]["weight"].full_tensor(), weight) and state["step"] == 100
    state = {"weight": torch.zeros(10, 6, dtype=torch.float64).t().contiguous().t()}
    load(state, folder / "ours", strip_prefix="model.", include="model.*")
    assert torch.equal(state["weight"], weight.double())
    return True


def save_async(folder):
    import torch.distributed.checkpoint as dcp

    from fsdpckpt.torch import HDF5Writer

    state = {key: value for key, value in plain_state().items() if key in ("model", "step", "list")}
    future = dcp.async_save(state, storage_writer=HDF5Writer(folder / "ours"))
    future.result()
    assert same(load(zeroed(state), folder / "ours"), state)
    return True


def save_in_process(folder):
    """async_save in a process of its own, if PyTorch has it: the writer is pickled. The state may change meanwhile."""
    import torch.distributed.checkpoint as dcp

    from fsdpckpt.torch import HDF5Writer

    try:
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
    except ImportError:
        return False
    kind = {"async_checkpointer_type": AsyncCheckpointerType.PROCESS}
    state = {key: value for key, value in plain_state().items() if key in ("model", "scalar", "step", "list", "text")}
    want = {key: value.clone() if key == "scalar" else value for key, value in state.items()}
    ours = dcp.async_save(state, storage_writer=HDF5Writer(folder / "ours"), **kind)
    result = getattr(ours, "upload_completion", ours)
    getattr(ours, "staging_completion", result).result()
    state["scalar"].zero_()
    result.result()
    theirs = dcp.async_save(want, checkpoint_id=folder / "theirs", **kind)
    getattr(theirs, "upload_completion", theirs).result()
    assert same(load(zeroed(want), folder / "ours"), want)
    try:  # the error of the other process
        again = dcp.async_save(want, storage_writer=HDF5Writer(folder / "ours"), **kind)
        getattr(again, "upload_completion", again).result()
        return "no error"
    except BaseException as error:
        return str(error)


def save_sharded_tensors(folder):
    """ShardedTensors, as FSDP1 has them: uneven, with a rank that has no shard, and in two dimensions."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed._shard.sharded_tensor import Shard, init_from_local_shards

    rank = dist.get_rank()
    torch.manual_seed(6)

    def sharded(whole, boxes):
        """`boxes`: the rank, offsets and sizes of each."""
        shards = []
        for owner, offsets, sizes in boxes:
            part = whole[tuple(slice(o, o + s) for o, s in zip(offsets, sizes))].clone()
            if owner == rank:
                shards.append(Shard.from_tensor_and_offsets(part, offsets, rank))
        return init_from_local_shards(shards, *whole.shape)

    rows = [(r, [3 * r, 0], [min(3, 10 - 3 * r), 6]) for r in range(RANKS)]
    some = [(r, [2 * r], [min(2, 5 - 2 * r)]) for r in range(3)]
    tiles = [(2 * i + j, [3 * i, 4 * j], [3 - i, 4 - j]) for i in range(2) for j in range(2)]
    state = {
        "rows": sharded(torch.randn(10, 6), rows),
        "bf16": sharded(torch.randn(10, 6).to(torch.bfloat16), rows),
        "some": sharded(torch.randn(5, dtype=torch.float64), some),
        "whole": torch.randn(3),
        "step": 7,
    }
    save(state, folder / "ours")
    dcp.save(state, checkpoint_id=folder / "theirs")

    def shards(state):
        return {name: [s.tensor for s in value.local_shards()] if hasattr(value, "local_shards") else value
                for name, value in state.items()}

    want = copy.deepcopy(shards(state))
    for path in (folder / "ours", folder / "theirs"):
        for value in shards(state).values():
            for tensor in value if isinstance(value, list) else [value]:
                if isinstance(tensor, torch.Tensor):
                    tensor.zero_()
        state["step"] = 0
        load(state, path)
        assert same(shards(state), want), (shards(state), want)
    grid = {"tiles": sharded(torch.arange(35).reshape(5, 7), tiles)}
    save(grid, folder / "tiles")
    tile = grid["tiles"].local_shards()[0].tensor
    wanted = tile.clone()
    tile.zero_()
    assert torch.equal(load(grid, folder / "tiles")["tiles"].local_shards()[0].tensor, wanted)


def save_cached(folder):
    """Plan caching, if PyTorch has it: the second save has no plans."""
    import inspect

    import torch.distributed.checkpoint as dcp

    from fsdpckpt.torch import HDF5Writer

    state = plain_state()
    for step in range(3):
        state["step"] = step
        state["scalar"] += 1
        if step == 2:
            state["more"] = state["list"][0] + 1
        known = "enable_plan_caching" in inspect.signature(dcp.DefaultSavePlanner).parameters
        planner = dcp.DefaultSavePlanner(**({"enable_plan_caching": True} if known else {}))
        dcp.save(state, storage_writer=HDF5Writer(folder / f"step-{step}"), planner=planner)
        want = {key: state[key] for key in state if key in ("step", "scalar", "more", "list")}
        assert same(load(zeroed(want), folder / f"step-{step}"), want)
    return True


def save_shards(folder):
    """fsdpckpt.save of DTensors, NumPy arrays and objects; then with a rank whose value cannot be saved."""
    import numpy as np
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    import fsdpckpt

    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",))
    torch.manual_seed(5)
    weight = distribute_tensor(torch.randn(10, 3), mesh, [Shard(0)])
    state = {
        "weight": weight,
        "pair": (weight, np.arange(3.0)),
        "scalar": np.float32(2.5),
        "bf16": torch.ones(2, dtype=torch.bfloat16),
        "inner": {"step": 3, "text": "x"},
    }
    for name in ("saved.h5", "saved.PT", "saved.safetensors"):
        try:
            fsdpckpt.save(state, folder / name, progress=None)
            raise AssertionError(f"{name} is a directory")
        except fsdpckpt.UsageError as error:
            assert f"{name}: names a file, but one file for each rank makes a directory" in str(error), error
    report = fsdpckpt.save(state, folder / "saved", progress=None)
    fsdpckpt.save(state, folder / "dcp", to="dcp", progress=None)
    if torch.distributed.get_rank() == 2:
        state["b"] = Unsaveable()
    try:
        fsdpckpt.save(state, folder / "failed", progress=None)
        failure = "no error"
    except fsdpckpt.Error as error:
        failure = str(error)
    return report.tensors, report.objects, report.format, (Path(report.target).name, failure)


class Unsaveable:
    def __reduce__(self):
        import fsdpckpt

        raise fsdpckpt.UsageError("b: no such data")


def save_failing(folder, failing):
    """A rank whose planner fails: every rank gets the error."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    from fsdpckpt.torch import HDF5Writer

    class Planner(dcp.DefaultSavePlanner):
        def resolve_data(self, item):
            if dist.get_rank() == failing:
                raise RuntimeError("no such data")
            return super().resolve_data(item)

    try:
        dcp.save(plain_state(), storage_writer=HDF5Writer(folder / "ours"), planner=Planner())
    except BaseException as error:  # CheckpointException is none of Exception
        text = str(error)
    else:
        text = "no error"
    gc.collect()  # the exception refers to the writer
    dist.barrier()
    return text, sorted(os.listdir(folder))


def save_killed(folder, killed):
    """A rank that is killed while it writes."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    from fsdpckpt.torch import HDF5Writer

    class Planner(dcp.DefaultSavePlanner):
        def resolve_data(self, item):
            if dist.get_rank() == killed:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().resolve_data(item)

    dcp.save(plain_state(), storage_writer=HDF5Writer(folder / "ours"), planner=Planner())


def save_all(folder):
    """Everything that four ranks do, in one group, because forking and importing takes most of the time."""
    scenes = {
        "plain": save_plain,
        "two_d": save_two_d,
        "replicated": save_replicated,
        "stages": save_stages,
        "async": save_async,
        "sharded": save_sharded_tensors,
        "cached": save_cached,
        "failing0": lambda folder: save_failing(folder, 0),
        "failing2": lambda folder: save_failing(folder, 2),
        "shards": save_shards,
    }
    results = {}
    for name, scene in scenes.items():
        (folder / name).mkdir(exist_ok=True)
        results[name] = scene(folder / name)
    return results
