"""State dicts of the FSDP step. What it saves is read by torch.distributed.checkpoint, h5py and the command, and loaded into
PyTorch's FSDP1 and FSDP2; it loads what they save. Everything is equal bit for bit.

usage: state_dict.py STATE_TOOL FSDPCKPT

Exit status 77 without torch or h5py.
"""

import itertools
import os
import subprocess
import sys
import tempfile
import time
import warnings

try:
    import h5py
    import torch
    import torch.distributed.checkpoint as dcp
    from torch import nn
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import LocalStateDictConfig, ShardedStateDictConfig, StateDictType, fully_shard

    import gloo
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)

warnings.filterwarnings("ignore")
TOOL, COMMAND = sys.argv[1:3]
F32, BF16, CPU = torch.float32, torch.bfloat16, torch.device("cpu")
# flat parameter, shape, dtype, whether it is transposed; those that share data have the same number
PARAMS = {
    "embed.weight": (0, (7, 3), F32, False),
    "norm.weight": (0, (5,), F32, False),
    "layers.0.w": (1, (4, 4, 3), F32, False),
    "layers.0.b": (1, (1,), F32, False),
    "layers.1.w": (2, (6, 9), F32, True),
    "layers.1.tied": (2, (6, 9), F32, True),
    "layers.1.row": (2, (4, 7), F32, False),
    "head.weight": (3, (11, 2), BF16, False),
    "head.bias": (4, (2,), F32, False),
}
MESHES = [(1, 1, 1), (1, 2, 1), (1, 3, 1), (1, 4, 1), (1, 8, 1), (2, 2, 1), (1, 3, 2), (2, 2, 2)]
failures = 0


def check(condition, *what):
    global failures
    if not condition:
        failures += 1
        print("FAILED", *what)


def numbers(tensor, shape, dtype, transposed=False):
    """support/state_model.c: element i, in the order of memory, is tensor × 100 + i / 4."""
    values = tensor % 16 * 100 + torch.arange(torch.Size(shape).numel(), dtype=torch.float64) / 4
    values = values.reshape(shape[::-1]).t().contiguous() if transposed else values.reshape(shape)
    return values.to(F32).to(dtype)


def expected_model(one=False):
    result, number = {}, {}
    for i, (name, (_, shape, dtype, transposed)) in enumerate(PARAMS.items()):
        number[name] = i
        result[name] = numbers(number["layers.1.w"] if name == "layers.1.tied" else i, shape, dtype, transposed)
    if one:
        del result["head.bias"]
    return result


def expected(one=False):
    result = {f"model.{name}": value for name, value in expected_model(one).items()}
    place = {}
    for name, (handle, shape, dtype, transposed) in PARAMS.items():
        if name == "layers.1.tied" or f"model.{name}" not in result:
            continue
        place[handle] = place.get(handle, -1) + 1
        for k, state in enumerate(["exp_avg", "exp_avg_sq"]):
            result[f"optim.state.{name}.{state}"] = numbers(3 * handle + 5 * k + 1 + place[handle], shape, dtype, transposed)
    result["optim.state.norm.weight.step"] = numbers(7, (), F32)
    result["model.layers.0.freq"] = numbers(11, (3,), F32)
    result["model.norm.running"] = numbers(8, (3, 2), torch.float16)
    result["empty"] = numbers(9, (0,), F32)
    return result


def run(*args, status=0, gpus=False):
    emulated = os.path.join(os.path.dirname(TOOL), "../gpu/emulated")
    env = {**os.environ, "FSDPCKPT_MODULE_PATH": emulated, "FSDPCKPT_EMULATED_GPUS": "8"} if gpus else None
    done = subprocess.run([str(a) for a in args], capture_output=True, text=True, env=env)
    check(done.returncode == status, *args, done.stdout, done.stderr)
    return done.stdout + done.stderr


def raw(tensor):
    return bytes(tensor.detach().clone(memory_format=torch.contiguous_format).untyped_storage())


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and raw(a) == raw(b)


def compare(got, wanted, *what):
    check(got.keys() == wanted.keys(), *what, "names", sorted(got.keys() ^ wanted.keys()))
    for name in got.keys() & wanted.keys():
        check(same(got[name], wanted[name]), *what, name, got[name], wanted[name])


def flatten(nested, prefix=""):
    for key, value in nested.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def read_dcp(path):
    state = {}
    _load_state_dict(state, storage_reader=dcp.FileSystemReader(path), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return dict(flatten(state))


def read_h5(path):
    result = {}

    def visit(name, item):
        if isinstance(item, h5py.Dataset):
            value = torch.from_numpy(item[()].copy()) if item.shape else torch.tensor(item[()])
            result[name.replace("/", ".")] = value.to(BF16) if item.attrs.get("dtype") == "bfloat16" else value

    with h5py.File(os.path.join(path, "index.h5") if os.path.isdir(path) else path) as f:
        f.visititems(visit)
    return result


def test_layouts(directory):
    """Full and sharded, at once and in the background, on the processor and on emulated GPUs."""
    wanted, first = expected(), None
    gpus = os.path.exists(os.path.join(os.path.dirname(TOOL), "../gpu/emulated"))
    for i, (mesh, kind, form) in enumerate(itertools.product(MESHES, ["full", "sharded"], ["dcp", "h5"])):
        path = os.path.join(directory, f"{i}" if (kind, form) != ("full", "h5") else f"{i}.h5")
        options = [["orig"], [], ["gpu"] if gpus else []][i // 4 % 3]
        run(TOOL, ["save", "async"][i // 2 % 2], kind, form, path, *mesh, *options, gpus="gpu" in options)
        compare(read_dcp(path) if form == "dcp" else read_h5(path), wanted, mesh, kind, form, options)
        run(COMMAND, "check", path)
        if i % 3 == 0:
            run(COMMAND, "verify", path)
            run(COMMAND, "diff", first or path, path)
        first = first or path
        run(TOOL, "load", kind, "-", path, *MESHES[(i + 3) % len(MESHES)], *options, gpus="gpu" in options)


class Block(nn.Module):
    def __init__(self, prefix, local):
        super().__init__()
        for name, (_, shape, dtype, transposed) in PARAMS.items():
            if name.startswith(prefix) and name not in ("layers.1.tied", "head.bias"):
                value = torch.zeros(shape[::-1], dtype=dtype).t() if transposed and local else torch.zeros(shape, dtype=dtype)
                setattr(self, name.removeprefix(prefix), nn.Parameter(value))


class Model(nn.Module):
    """A sharded state dict of torch has no room for a transposed parameter, a local one does."""

    def __init__(self, local):
        super().__init__()
        self.embed, self.norm = Block("embed.", local), Block("norm.", local)
        self.layers = nn.ModuleList([Block("layers.0.", local), Block("layers.1.", local)])
        self.layers[1].tied = self.layers[1].w
        self.layers[0].register_buffer("freq", torch.zeros(3))
        self.head = Block("head.", local)


def wrap(version, local):
    model = Model(local)
    if version == 1:
        model.layers[0], model.layers[1], model.head = (FSDP(m, device_id=CPU) for m in [*model.layers, model.head])
        return FSDP(model, device_id=CPU)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for module in [*model.layers, model.head, model]:
        fully_shard(module, mesh=mesh)
    return model


def whole_params(model):
    if isinstance(model, FSDP):
        with FSDP.summon_full_params(model, writeback=False):
            return {n.replace("_fsdp_wrapped_module.", ""): p.detach().clone()
                    for n, p in model.named_parameters(remove_duplicate=False)}
    return {n: p.full_tensor().detach() for n, p in model.named_parameters(remove_duplicate=False)}


def with_type(model, kind):
    configs = {StateDictType.SHARDED_STATE_DICT: ShardedStateDictConfig, StateDictType.LOCAL_STATE_DICT: LocalStateDictConfig}
    return FSDP.state_dict_type(model, kind, configs[kind]())


def model_state(model, kind):
    if not isinstance(model, FSDP):
        return get_model_state_dict(model)
    with with_type(model, kind):
        return model.state_dict()


def torch_rank(rank, world, path, version, kind, out):
    """Loads our checkpoint into torch's model and saves it with torch."""
    model = wrap(version, kind is StateDictType.LOCAL_STATE_DICT)
    state = {"model": model_state(model, kind)}
    dcp.load(state, checkpoint_id=path)
    if isinstance(model, FSDP):
        with with_type(model, kind):
            model.load_state_dict(state["model"])
    else:
        set_model_state_dict(model, state["model"])
    params = whole_params(model)
    dcp.save({"model": model_state(model, kind)}, checkpoint_id=out)
    return params


def chunks(path):
    """The boxes of each tensor that have elements."""
    tensors = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    return {name: sorted((tuple(c.offsets), tuple(c.sizes)) for c in t.chunks if 0 not in c.sizes)
            for name, t in tensors.items() if name.startswith("model.") and name != "model.norm.running"}


def test_torch(directory):
    wanted = expected_model(one=True)
    sharded, local = StateDictType.SHARDED_STATE_DICT, StateDictType.LOCAL_STATE_DICT
    for version, kind, name, world in [(1, sharded, "sharded", 3), (2, sharded, "sharded", 4), (1, local, "local", 3)]:
        path, out = (os.path.join(directory, f"{p}-{version}-{name}") for p in ("ours", "torch"))
        run(TOOL, "async", name, "dcp", path, 1, world, 1, "one")
        for params in gloo.run(world, torch_rank, path, version, kind, out):
            compare(params, wanted, "FSDP", version, name)
        check(chunks(path) == chunks(out), "chunks", version, name, chunks(path), chunks(out))
        run(COMMAND, "diff", "--include", "model.*", "--exclude", "model.norm.running", path, out)
        full = os.path.join(directory, f"merged-{version}-{name}")
        run(COMMAND, "consolidate", path, "-o", full, "--to", "dcp")
        # torch saved the model only, so a step without states and values loads it
        run(TOOL, "load-model", name, "-", out, 1, 2, 1, "one")


def test_mixed_units(directory):
    """Units with communicators of their own: hybrid next to fully sharded ones. torch reads and saves the same chunks as for
    units without; any instance loads them."""
    wanted = expected()
    gpus = os.path.exists(os.path.join(os.path.dirname(TOOL), "../gpu/emulated"))
    for i, (mesh, kind, form) in enumerate(itertools.product([(2, 2, 1), (3, 2, 1), (2, 4, 1), (2, 2, 2)], ["full", "sharded"],
                                                             ["dcp", "h5"])):
        path = os.path.join(directory, f"mixed-{i}" + (".h5" if (kind, form) == ("full", "h5") else ""))
        options = ["mixed", *[["orig"], [], ["gpu"] if gpus else []][i % 3]]
        run(TOOL, ["save", "async"][i // 2 % 2], kind, form, path, *mesh, *options, gpus="gpu" in options)
        compare(read_dcp(path) if form == "dcp" else read_h5(path), wanted, mesh, kind, form, options)
        run(COMMAND, "check", path)
        run(TOOL, "load", kind, "-", path, *mesh, *options, gpus="gpu" in options)
        run(TOOL, "load", kind, "-", path, *MESHES[i % len(MESHES)])
        if (kind, form) == ("sharded", "dcp"):
            plain = os.path.join(directory, f"plain-{i}")
            run(TOOL, "save", kind, form, plain, *mesh)
            check(chunks(path) == chunks(plain), "chunks", mesh, chunks(path), chunks(plain))
            run(TOOL, "load", kind, "-", plain, *mesh, "mixed")


def summon_rank(rank, world, path, flags):
    kind = StateDictType.LOCAL_STATE_DICT
    model = wrap(1, True)
    state = {"model": model_state(model, kind)}
    dcp.load(state, checkpoint_id=path)
    with with_type(model, kind):
        model.load_state_dict(state["model"])
    options = {"recurse": "r" not in flags, "writeback": "w" not in flags, "rank0_only": "0" in flags,
               "offload_to_cpu": "o" in flags}
    with FSDP.summon_full_params(model.layers[0] if "1" in flags else model, **options), torch.no_grad():
        for name, param in model.named_parameters():
            if "_flat_param" not in name:
                param.add_(64 * (rank + 1))
    return whole_params(model)


def test_summon(directory):
    """Each rank changes its own copy, so the result shows whose changes are written back."""
    start = os.path.join(directory, "start")
    run(TOOL, "save", "local", "dcp", start, 1, 3, 1)
    gpus = os.path.exists(os.path.join(os.path.dirname(TOOL), "../gpu/emulated"))
    for flags in ["", "w", "w0", "o", "r", "1", "ow0", "1r"]:
        path = os.path.join(directory, f"summon-{flags}")
        options = ["gpu"] if gpus and flags in ("", "ow0", "1") else []
        run(TOOL, f"summon:{flags}", "sharded", "dcp", path, 1, 3, 1, "one", *options, gpus=bool(options))
        got = {name[6:]: value for name, value in read_dcp(path).items() if name.startswith("model.")}
        for wanted in gloo.run(3, summon_rank, start, flags):
            compare({name: got[name] for name in wanted}, wanted, "summon", flags)
    check("rank0_only with writeback" in run(TOOL, "summon:0", "full", "dcp", start, 1, 2, 1, status=5), "rank0")
    check("offload_to_cpu with NO_SHARD" in run(TOOL, "summon:o", "full", "dcp", start, 1, 2, 1, "whole", status=5), "cpu")


def test_refusals(directory):
    path = os.path.join(directory, "refused")
    check("needs a strategy that shards" in run(TOOL, "save", "local", "dcp", path, 1, 2, 1, "whole", status=2), "whole")
    check("cannot have tensor parallelism" in run(TOOL, "save", "local", "dcp", path, 1, 2, 2, status=2), "tp")
    check("a local state dict needs those of the instance" in run(TOOL, "save", "local", "dcp", path, 2, 2, 1, "mixed", status=5), "own")
    text = run(TOOL, "async", "sharded", "dcp", path, 2, 2, 1, "mixed", "partial", status=5)
    check("unit 'layers.0': its communicators have 2 ranks, and those of the instance have 4" in text, text)
    check(not os.path.exists(path), "nothing is written")
    run(TOOL, "save", "full", "dcp", path, 1, 2, 1, "one")
    check("tensor model.head.bias is missing" in run(TOOL, "load", "full", "-", path, 1, 2, 1, status=3), "missing")


def test_kills(directory):
    """A save that is killed leaves the old target or a complete new one. The next save removes what it left behind."""
    path = os.path.join(directory, "killed")
    command = [TOOL, "async", "sharded", "h5", path, "1", "4", "1"]
    for i in range(12):
        process = subprocess.Popen([*command, "force"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(i * 0.008)
        process.kill()
        process.wait()
        if os.path.exists(path):
            run(COMMAND, "verify", "-q", path)
    run(*command, "force")
    check([n for n in os.listdir(directory) if n.startswith(".killed")] == [], os.listdir(directory))
    compare(read_h5(path), expected(), "killed")


with tempfile.TemporaryDirectory() as scratch:
    test_kills(scratch)
    test_layouts(scratch)
    test_torch(scratch)
    test_mixed_units(scratch)
    test_summon(scratch)
    test_refusals(scratch)
print("failures:", failures)
sys.exit(failures > 0)
