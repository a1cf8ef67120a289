"""FSDP1's LOCAL_STATE_DICT. Reading: real FSDP on gloo saves flat parameters with torch.save and dcp.save, fsdpckpt unflattens
them with --schema, and torch compares every byte with the model. Writing: fsdpckpt makes such files, and FSDP loads them.

usage: flat_state.py FSDPCKPT

Exit status 77 without torch.
"""

import json
import logging
import pathlib
import shutil
import subprocess
import sys
import tempfile
import warnings

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
try:
    import torch
    import torch.distributed.checkpoint as dcp
    from torch import nn
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import MixedPrecision, StateDictType
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    import gloo
    from checks import check, failures, finish, run
    from torch_values import by_name, check_equal, kept
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)

PROGRAM = sys.argv[1]


class Block(nn.Module):
    """Sizes that no number of ranks divides, and names that are not in alphabetical order."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(3, 5)
        self.act = nn.LayerNorm(5)
        self.deep = nn.Parameter(torch.randn(2, 3, 4, 3))
        self.register_buffer("mask", torch.tensor([1, 2, 3]))
        self.register_buffer("scale", torch.randn(2))


class Model(nn.Module):
    def __init__(self, layers=2):
        super().__init__()
        self.emb = nn.Embedding(7, 5)
        self.layers = nn.ModuleList([Block() for _ in range(layers)])
        self.norm = nn.BatchNorm1d(5)
        self.one = nn.Parameter(torch.randn(()).reshape(1))
        self.head = nn.Linear(5, 7, bias=False)


class Tied(Model):
    def __init__(self):
        super().__init__()
        self.head.weight = self.emb.weight


class Deep(Model):
    """Blocks with numbers of one and two digits, which sort differently as text."""

    def __init__(self):
        super().__init__(11)


class Tiny(nn.Module):
    """Fewer elements than ranks, so some ranks hold none."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(1, 1)
        self.inner = nn.Linear(2, 1)


# name: (model, ranks, arguments of FSDP)
CASES = {
    "blocks": (Deep, 3, {"wrap": True}),
    "root": (Model, 2, {}),
    "tied": (Tied, 2, {"wrap": True}),
    "tiny": (Tiny, 4, {}),
    "aligned": (Model, 3, {"wrap": True, "use_orig_params": True}),
    "aligned tied": (Tied, 2, {"use_orig_params": True}),
    "aligned to bfloat16": (Model, 2, {"wrap": True, "use_orig_params": True, "bf16": True}),
    "normed": (Model, 2, {"wrap": True, "bf16": True}),  # mixed precision makes the batch norm a unit
    "aligned in one": (Model, 2, {"use_orig_params": True, "bf16": True}),
    "aligned deep": (Deep, 2, {"use_orig_params": True}),
    "zeroed": (Deep, 2, {"use_orig_params": True, "zeroed": True}),
    "ignored": (Model, 2, {"wrap": True, "ignore": True}),
    "double": (Model, 3, {"double": True, "wrap": True}),
    "compiled": (Model, 2, {"wrap": True, "compile": True}),
}


THOROUGH = ("blocks", "tied", "tiny")  # these tested in all forms, the others in one


def command(*argv, ok=0):
    """Runs the command. Returns its stderr."""
    return run(PROGRAM, *map(str, argv), ok=ok).stderr


def counted(rank, world, function, *args):
    before = len(failures)
    result = function(rank, world, *args)
    return result, failures[before:]


def on_ranks(world, function, *args):
    """gloo.run, plus the failures that the ranks counted."""
    results = gloo.run(world, counted, function, *args)
    failures.extend(text for _, failed in results for text in failed)
    return [result for result, _ in results]


def make(case):
    cls, _, how = CASES[case]
    torch.manual_seed(3)
    model = cls()
    return model.double() if how.get("double") else model


def wrap(case, model, world):
    how = CASES[case][2]
    more = {"use_orig_params": how.get("use_orig_params", False)}
    if how.get("wrap"):
        more["auto_wrap_policy"] = ModuleWrapPolicy({Block})
    if how.get("bf16"):
        more["mixed_precision"] = MixedPrecision(param_dtype=torch.bfloat16)
    if how.get("ignore"):
        more["ignored_states"] = [model.norm.weight, model.layers[1].act.bias]
    model = FSDP(model, device_id=torch.device("cpu"), **more)
    return model


def save(rank, world, home, case):
    """Runs on each rank: makes the same model and saves its flat parameters."""
    model = wrap(case, make(case), world)
    out = pathlib.Path(home) / case
    out.mkdir(exist_ok=True)
    if CASES[case][2].get("zeroed"):  # no longer FSDP's own padding
        for module in FSDP.fsdp_modules(model):
            flat = module._handle.flat_param.data
            flat[flat == 42] = 0
    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        state = model.state_dict()
        if CASES[case][2].get("compile"):  # the prefix that torch.compile adds to all names
            state = {f"_orig_mod.{key}": value for key, value in state.items()}
        torch.save(state, out / f"model_world_size_{world}_rank_{rank}.pt")
        dcp.save({"model": state}, checkpoint_id=f"{home}/{case}.dcp")
    if not CASES[case][2].get("use_orig_params"):
        save_optimizer(rank, world, pathlib.Path(f"{home}/{case}.opt"), model)


def save_optimizer(rank, world, out, model):
    """Saves the flat parameters and the state_dict() of their optimizer after a step, and the expected values."""
    out.mkdir(exist_ok=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    torch.manual_seed(rank)
    for p in model.parameters():
        p.grad = torch.randn_like(p) if hasattr(p, "_shard_numel_padded") else torch.ones_like(p)
    optimizer.step()
    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        torch.save(model.state_dict(), out / f"model_world_size_{world}_rank_{rank}.pt")
    torch.save(optimizer.state_dict(), out / f"optim_world_size_{world}_rank_{rank}.pt")
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        truth = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}
    if rank == 0:
        torch.save(truth, f"{out}.pt")


def equal(path, wanted, prefix=""):
    got = torch.load(path)
    got = got[prefix] if prefix else got
    check_equal(kept(wanted), got, path)
    return got


def resharded(home, case, wanted):
    schema = f"{home}/{case}.json"
    command("reshard", f"{home}/{case}", "-o", f"{home}/out.dcp", "--to", "dcp", "--dp", 3, "--schema", schema,
            "--force")
    whole = {k: torch.zeros_like(v) for k, v in wanted.items()}
    dcp.load(whole, checkpoint_id=f"{home}/out.dcp", no_dist=True)
    check_equal(kept(wanted), whole, f"{case} resharded")


def case_in(home, case):
    world = CASES[case][1]
    gloo.run(world, save, home, case)
    wanted = make(case).state_dict()
    torch.save(wanted, f"{home}/{case}.whole.pt")
    schema = f"{home}/{case}.json"
    with open(schema, "w") as f:
        subprocess.run([PROGRAM, "schema", f"{home}/{case}.whole.pt"], stdout=f, check=True)
    check(json.load(open(schema))["order"] == "model", "the order is not told")
    for told in (schema, f"{home}/{case}.whole.pt")[: 2 if case in THOROUGH else 1]:
        command("consolidate", f"{home}/{case}", "-o", f"{home}/out.pt", "--schema", told, "--force")
        got = equal(f"{home}/out.pt", wanted)
        if "Tied" in CASES[case][0].__name__:
            check(got["head.weight"].data_ptr() == got["emb.weight"].data_ptr(), f"{case} no longer tied")
    command("check", f"{home}/{case}", "--schema", schema)
    if case in THOROUGH:
        resharded(home, case, wanted)
    if CASES[case][2].get("use_orig_params"):
        # torch also stores some rank's part of each parameter, which may have the size of a buffer.
        ok = 5 if CASES[case][2].get("zeroed") else 0
        text = command("consolidate", f"{home}/{case}.dcp", "-o", f"{home}/{case}.out.pt", "--schema", schema, ok=ok)
        if ok == 0:
            equal(f"{home}/{case}.out.pt", wanted, "model")
        else:
            check("flat_param'" in text and "several layouts fit" in text and text.count("\n") == 1, text)
    else:
        command("consolidate", f"{home}/{case}.dcp", "-o", f"{home}/out.pt", "--schema", schema, "--force")
        equal(f"{home}/out.pt", wanted, "model")
        if case in THOROUGH:
            command("consolidate", f"{home}/{case}.dcp", "-o", f"{home}/out.h5", "--schema", schema, "--force")
            command("diff", f"{home}/{case}.dcp", f"{home}/out.h5", "--schema", schema)


def resumed(case, values, states, path):
    """A plain AdamW that loads the state steps twice, as one that has copies of every value."""
    steps = []
    for copies in (False, True):
        model = CASES[case][0]()
        model.load_state_dict(values)
        named = dict(model.named_parameters())
        optimizer = torch.optim.AdamW(named.values(), lr=0.1, foreach=False)
        state = {i: {key: value.clone() if copies else value for key, value in states[name].items()}
                 for i, name in enumerate(named)}
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
        for _ in range(2):
            for p in named.values():
                p.grad = torch.ones_like(p)
            optimizer.step()
        steps.append([optimizer.state[p]["step"].item() for p in named.values()])
        values, states = torch.load(path)["model"], torch.load(path)["optim"]["state"]
    check(steps[0] == steps[1] == [3.0] * len(steps[0]), f"{case} steps {steps}")


def optimizer_in(home, case):
    schema = f"{home}/{case}.json"
    if CASES[case][2].get("ignore"):
        text = command("consolidate", f"{home}/{case}.opt", "-o", f"{home}/never.pt", "--schema", schema, ok=5)
        check("numbered together with other parameters" in text, text)
        return
    command("consolidate", f"{home}/{case}.opt", "-o", f"{home}/out.pt", "--schema", schema, "--force")
    truth, got = torch.load(f"{home}/{case}.opt.pt"), torch.load(f"{home}/out.pt")
    check(set(truth["optim"]["state"]) == set(got["optim"]["state"]), f"{case} {set(got['optim']['state'])}")
    for name, values in truth["optim"]["state"].items():
        check(set(values) == {"step", "exp_avg", "exp_avg_sq"}, f"{case} {name} {set(values)}")
        # torch's optim_state_dict sorts the keys; the shard files keep the optimizer's order
        check_equal(values, by_name(got["optim"]["state"][name]), f"{case} {name}")
    check_equal(kept(truth["model"]), got["model"], case)
    if case in THOROUGH:
        resumed(case, got["model"], got["optim"]["state"], f"{home}/out.pt")
    # Without a schema the parameters stay flat, each in one tensor.
    command("consolidate", f"{home}/{case}.opt", "-o", f"{home}/out.pt", "--force")
    flat = torch.load(f"{home}/out.pt")
    check(flat["optim"]["state"][0]["exp_avg"].shape == flat["model"]["_flat_param"].shape, f"{case} flat state")
    # The optimizer's files come from a run with more ranks.
    mixed = pathlib.Path(f"{home}/{case}.mixed")
    shutil.copytree(f"{home}/{case}.opt", mixed)
    own = sorted(mixed.glob("optim_*"))
    for rank in range(2 * len(own)):
        shutil.copy(own[rank % len(own)], mixed / f"optim_world_size_{2 * len(own)}_rank_{rank}.pt")
    for path in own:
        path.unlink()
    text = command("inspect", mixed)
    check(f"reads *_world_size_{len(own)}_rank_*.pt, and not *_world_size_{2 * len(own)}_rank_*.pt" in text, text)


def load(rank, world, home, case, out):
    """Runs on each rank: loads its file into a model with other values. Returns the full model's values."""
    torch.manual_seed(rank + 100)
    cls, _, how = CASES[case]
    fresh = cls().double() if how.get("double") else cls()
    model = wrap(case, fresh, world)
    path = f"{out}/model_world_size_{world}_rank_{rank}.pt"
    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        model.load_state_dict(torch.load(path, weights_only=False))
        # torch saves the same keys, types and shards again.
        again, given = model.state_dict(), torch.load(path, weights_only=False)
        check(sorted(again) == sorted(given), f"{case} {sorted(again)} {sorted(given)}")
        for name, value in again.items():
            check(type(value) is type(given[name]), f"{case} {name} {type(given[name])}")
            if name.endswith("_flat_param"):
                mine, theirs = given[name], value
                a, b = mine.metadata(), theirs.metadata()
                check(a.shards_metadata == b.shards_metadata and a.size == b.size, f"{case} {name}")
                check(a.tensor_properties.dtype == b.tensor_properties.dtype, f"{case} {name} dtype")
                check([s.metadata for s in mine.local_shards()] == [s.metadata for s in theirs.local_shards()],
                      f"{case} {name} shards")
                for a, b in zip(mine.local_shards(), theirs.local_shards()):
                    check_equal(b.tensor, a.tensor, f"{case} {name}")
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        return {name: value.numpy() for name, value in model.state_dict().items()}


def case_out(home, case):
    """fsdpckpt makes shard files of the full model, and FSDP loads them on every rank."""
    wanted = make(case).state_dict()
    world, how = CASES[case][1:]
    out = f"{home}/{case}.out"
    with open(f"{home}/classes.json", "w") as f:
        json.dump({"$buffers": ["scale"], "layers.*": "Block"}, f)
    with open(f"{home}/policy.json", "w") as f:
        json.dump({"$policy": "name:layers.*", "$root": {"mixed_precision": {"param_dtype": "bfloat16"}}}, f)
    blocks = f"{home}/policy.json" if how.get("bf16") else "class:Block+name:layers.*"
    policy = ["--policy", blocks if how.get("wrap") else "size:1T", "--classes", f"{home}/classes.json"]
    if how.get("ignore"):
        policy += ["--ignore", "norm.weight", "--ignore", "layers.1.act.bias"]
    command("consolidate", f"{home}/{case}.whole.pt", "-o", f"{home}/{case}.safetensors", "--force")
    schema = ["--schema", f"{home}/{case}.json"]
    sources = [[f"{home}/{case}.whole.pt"], [f"{home}/{case}.dcp", "--strip-prefix", "model.", *schema],
               [f"{home}/{case}.safetensors", *schema]]
    if "Tied" in CASES[case][0].__name__:
        text = command("reshard", *sources[2], "-o", out, "--to", "pt", "--dp", world, *policy, ok=2)
        check("'emb.weight' and 'head.weight' are one tied parameter" in text, text)
        sources[2] += ["--exclude", "emb.weight"]
    files = []
    for source in sources if case in THOROUGH else sources[:1]:
        command("reshard", *source, "-o", out, "--to", "pt", "--dp", world, *policy, "--force")
        files.append([pathlib.Path(f"{out}/model_world_size_{world}_rank_{r}.pt").read_bytes() for r in range(world)])
    check(all(f == files[0] for f in files), f"{case} depends on the source")
    for rank, got in enumerate(gloo.run(world, load, home, case, out)):
        for name, value in wanted.items():
            check(got[name].tobytes() == value.numpy().tobytes(), f"{case} {rank} {name}")


def replicas(home):
    """HYBRID_SHARD: the second half of the ranks holds the same as the first. Only torch 2.0 could save this."""
    case = pathlib.Path(__file__).parent.parent / "corpus" / "pt" / "fsdp1-hybrid-local-torch2.0.1"
    truth = torch.load(case / "full.pt")
    torch.save(truth["model"], f"{home}/hybrid.pt")
    command("consolidate", case, "-o", f"{home}/out.pt", "--schema", f"{home}/hybrid.pt", "--force")
    equal(f"{home}/out.pt", truth["model"], "model")
    got = torch.load(f"{home}/out.pt")["optim"]["state"]
    check_equal(truth["optim"]["state"], got, "hybrid")


def refusals(home):
    """Unknown and mismatching input is refused with one line."""
    source, whole = f"{home}/blocks", torch.load(f"{home}/blocks.whole.pt")

    def refused(told, *words, code=2):
        text = command("consolidate", source, "-o", f"{home}/no.pt", "--schema", told, ok=code)
        check(text.count("\n") == 1 and all(w in text for w in words), f"{told} {text}")
        check(not pathlib.Path(f"{home}/no.pt").exists(), f"{told} was written")

    def saved(state):
        torch.save(state, f"{home}/told.pt")
        return f"{home}/told.pt"

    command("consolidate", f"{home}/blocks.whole.pt", "-o", f"{home}/sorted.safetensors", "--force")
    refused(f"{home}/sorted.safetensors", "order", '"order": "model"')
    command("consolidate", f"{home}/sorted.safetensors", "-o", f"{home}/sorted.pt", "--force")
    refused(f"{home}/sorted.pt", "alphabetical")
    schema = json.loads(subprocess.run([PROGRAM, "schema", f"{home}/sorted.pt"], capture_output=True).stdout)
    check("order" not in schema, "the schema of a sorted file gives its order as the model's")
    pathlib.Path(f"{home}/told.json").write_text(json.dumps(schema))
    refused(f"{home}/told.json", "does not declare")
    refused(source, "flat parameters itself")
    without = {k: v for k, v in whole.items() if k != "layers.1.mix.bias"}
    refused(saved(without), "layers.1._flat_param", "the right model")
    refused(saved({**whole, "emb.more": torch.zeros(1)}), "_flat_param", "the right model")
    refused(saved({**whole, "layers.0.lost": torch.zeros(2, dtype=torch.int64)}), "layers.0.lost")
    refused(saved({"a": whole, "b": whole}), "several state dicts")
    text = command("consolidate", f"{home}/blocks.whole.pt", "-o", f"{home}/no.pt", "--schema", f"{home}/blocks.json",
                   ok=2)
    check("no flat parameters" in text, text)
    text = command("consolidate", source, "-o", f"{home}/flat.pt")
    check("schema" in text, text)
    check("_flat_param" in torch.load(f"{home}/flat.pt"), "without a schema they stay")
    # The schema restores a tie that the file has lost.
    source = f"{home}/tied"
    told = json.loads(pathlib.Path(f"{home}/tied.json").read_text())
    for entry in told["tensors"]:
        entry.pop("same_as", None)
    pathlib.Path(f"{home}/told.json").write_text(json.dumps(told))
    refused(f"{home}/told.json", "same_as")


def refusals_out(home):
    def refused(*argv, words=(), code=2):
        text = command("reshard", *argv, "-o", f"{home}/no", ok=code)
        check(text.count("\n") == 1 and all(w in text for w in words), f"{argv} {text}")
        check(not pathlib.Path(f"{home}/no").exists(), f"{argv} was written")

    whole, flat = f"{home}/blocks.whole.pt", ["--to", "pt", "--policy", "blocks"]
    refused(f"{home}/blocks.safetensors", "--dp", 2, *flat, words=("--schema",))
    refused(f"{home}/sorted.pt", "--dp", 2, *flat, words=("alphabetical",))
    refused(whole, "--dp", 2, "--tp", 2, *flat, words=("--policy",))
    refused(whole, "--dp", 2, "--policy", "blocks", words=("--to pt",))
    state = torch.load(whole)
    torch.save({**state, "layers.0.half": torch.zeros(3, dtype=torch.float16)}, f"{home}/mixed.pt")
    refused(f"{home}/mixed.pt", "--dp", 2, *flat, words=("uniform dtype",))
    told = json.loads(pathlib.Path(f"{home}/blocks.json").read_text())
    told["tensors"] = [t for t in told["tensors"] if t["name"] != "norm.bias"]
    pathlib.Path(f"{home}/told.json").write_text(json.dumps(told))
    refused(f"{home}/blocks.safetensors", "--dp", 2, *flat, "--schema", f"{home}/told.json", words=("norm.bias",))
    # Nesting, objects and integers are kept. There are more ranks than elements.
    torch.save({"model": state, "step": 7}, f"{home}/more.pt")
    command("reshard", f"{home}/more.pt", "-o", f"{home}/nested", "--dp", 5, *flat)
    command("consolidate", f"{home}/nested", "-o", f"{home}/out.pt", "--schema", f"{home}/blocks.json", "--force")
    check(torch.load(f"{home}/out.pt")["step"] == 7, "the object is lost")
    equal(f"{home}/out.pt", state, "model")


def main():
    # An optimizer's imports take seconds, so make them once before forking.
    p = nn.Parameter(torch.ones(1))
    p.grad = torch.ones(1)
    torch.optim.AdamW([p]).step()
    with tempfile.TemporaryDirectory() as home:
        for case in CASES:
            case_in(home, case)
            if not CASES[case][2].get("use_orig_params"):
                case_out(home, case)
                optimizer_in(home, case)
        replicas(home)
        refusals(home)
        refusals_out(home)
    return finish("flat_state")


if __name__ == "__main__":
    sys.exit(main())
