#!/usr/bin/env python3
"""--force onto the own input: every command that converts, with every option that it takes. Either the command refuses and no byte
changes, or it succeeds and h5py, safetensors or PyTorch find the same values as before.

usage: force_input.py FSDPCKPT       exit 77 without torch, h5py or safetensors
"""
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

try:
    import h5py
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
except ImportError as e:
    print("skipped: %s" % e)
    sys.exit(77)

from adapters import write_adapter
from checks import check, finish, must_run

LOSES = re.compile(r"(that|which) is read: name another target")
# What each option gets. LOSSY ones make a target that is not the source, KEEPING ones do not; the others depend on the command
# or cannot be used here.
LOSSY = {"dtype": ["bf16"], "dtype-for": ["m.w.weight=bf16"], "model-only": [], "include": ["m.*"], "exclude": ["m.b"], "strip-prefix": ["m"],
         "rename": ["s/^m/n/"], "dequantize": ["bf16"], "quantize": ["m.w.weight"], "adapter": ["../adapter"], "delta": ["../updates"], "recipe": ["../drop.json"]}
KEEPING = {"jobs": ["2"], "memory": ["8M"], "progress": ["never"], "color": ["never"], "comm": ["none"], "follow-external": [], "hdf5-plugins": ["."],
           "resume": [], "trust-objects": [], "json": [], "quiet": [], "verbose": []}
OTHERS = {"output": None, "force": None, "help": None, "version": None, "to": ["h5"], "dp": ["3"], "tp": ["2"], "replicas": ["2"],
          "compress": ["1"], "max-shard-size": ["1MB"], "dry-run": [], "rank": ["0"], "tp-plan": ["../plan.json"], "policy": ["always"],
          "classes": ["../classes.json"], "ignore": ["m"], "reverse": [], "config": ["../adapter"], "adapter-config": ["../adapter/adapter_config.json"],
          "schema": ["../schema.json"],
          "local": [], "like": ["../hub"], "weights": ["1,0"], "take-first": [], "up-to": ["1"]}
# command, its input, the options that name the same layout again
CASES = [("consolidate", "a.h5", []), ("consolidate", "a.safetensors", []), ("consolidate", "a.pt", []),
         ("reshard", "a.sharded", ["--dp", "2"]), ("reshard", "a.dcp", ["--to", "dcp", "--dp", "2"]),
         ("reshard", "a.accelerate", ["--to", "accelerate", "--dp", "2"]), ("reshard", "a.ranks", ["--to", "pt", "--dp", "2"]),
         ("convert", "a.dcp", ["--to", "dcp"]), ("convert", "a.sharded", []), ("convert", "a.safetensors", []),
         ("export", "hub", []), ("average", "a.h5", [])]


def write(path, content):
    with open(path, "w") as f:
        json.dump(content, f)


def prepare(program, home):
    at = lambda name: os.path.join(home, name)
    torch.manual_seed(0)
    code = torch.randn(128, 128).to(torch.float8_e4m3fn)
    tensors = {"m.w.weight": torch.randn(128, 128), "m.b": torch.randn(8)}
    torch.save({**tensors, "s": {"step": 3, "t": torch.arange(9)}}, at("a.pt"))
    must_run(program, "consolidate", at("a.pt"), "-o", at("a.h5"))
    must_run(program, "reshard", at("a.pt"), "-o", at("a.sharded"), "--dp", "2")
    must_run(program, "reshard", at("a.pt"), "-o", at("a.dcp"), "--to", "dcp", "--dp", "2")
    must_run(program, "reshard", at("a.pt"), "-o", at("a.accelerate"), "--to", "accelerate", "--dp", "2", "--include", "m.*", "--rename",
             "s/^/model./")
    must_run(program, "reshard", at("a.pt"), "-o", at("a.ranks"), "--to", "pt", "--dp", "2")
    save_file({**tensors, "m.q.weight": code, "m.q.weight_scale_inv": torch.ones(1, 1)}, at("a.safetensors"), {"note": "mine"})
    must_run(program, "export", at("a.pt"), "-o", at("hub"), "--include", "m.*")
    save_file({**tensors, "m.b": tensors["m.b"] + 1}, at("next.safetensors"))
    os.mkdir(at("updates"))
    must_run(program, "delta", at("hub"), at("next.safetensors"), "-o", at("updates/weight_v000001"))
    write_adapter(at("adapter"), {"m.w.lora_A.weight": torch.ones(2, 128), "m.w.lora_B.weight": torch.ones(128, 2)}, r=2, lora_alpha=2)
    write(at("adapter/config.json"), {})
    write(at("drop.json"), {"fsdpckpt": "recipe", "schema": 1, "rules": [{"drop": "m.b"}], "others": "keep"})
    write(at("plan.json"), {"m.w": "colwise"})
    write(at("classes.json"), {})
    must_run(program, "schema", at("a.pt"), "-o", at("schema.json"))


def options_of(program, command):
    text = must_run(program, command, "--help").stdout
    return re.findall(r"^  (?:-\w, |    )--([a-z0-9-]+)", text, re.MULTILINE)


def same(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape and \
            torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))
    if isinstance(a, dict):
        return isinstance(b, dict) and set(a) == set(b) and all(same(a[k], b[k]) for k in a)
    return type(a) is type(b) and a == b


def h5_values(path):
    values = {}

    def visit(name, item):
        if isinstance(item, h5py.Dataset):
            values[name] = (str(item.dtype), item.shape, item[()].tobytes())
    with h5py.File(path, "r") as f:
        f.visititems(visit)
    return values


def safetensors_values(path):
    with safe_open(path, "pt") as f:
        ours = {k: v for k, v in (f.metadata() or {}).items() if not k.startswith("fsdpckpt.")}
        return {"metadata": {**ours, "format": "pt"}, **{name: f.get_tensor(name) for name in f.keys()}}


def values_of(path):
    """What the package of the format finds."""
    if os.path.isfile(path):
        return h5_values(path) if path.endswith(".h5") else safetensors_values(path) if path.endswith(".safetensors") else \
            torch.load(path, weights_only=False)
    names = os.listdir(path)
    if "index.h5" in names:
        return h5_values(os.path.join(path, "index.h5"))
    if ".metadata" in names:
        with tempfile.NamedTemporaryFile() as f:
            dcp_to_torch_save(path, f.name)
            return torch.load(f.name, weights_only=False)
    return {n: values_of(os.path.join(path, n)) for n in names if not n.endswith(".json")}


def snapshot(path):
    """{name: bytes} of every file of a file or directory."""
    paths = [path] if os.path.isfile(path) else [os.path.join(d, n) for d, _, names in os.walk(path) for n in names]
    return {p: open(p, "rb").read() for p in paths}


def attempt(program, home, number, case, option, argument, edit=None):
    """@return (what, exit status, stderr, whether no byte has changed, the path)"""
    command, source, more = case
    folder = os.path.join(home, "run%s" % number)
    os.mkdir(folder)
    path = os.path.join(folder, source)
    (shutil.copytree if os.path.isdir(os.path.join(home, source)) else shutil.copy)(os.path.join(home, source), path)
    if edit:
        edit(folder)
    before = snapshot(path)
    if option == "dp" and "--dp" in more:
        more = more[:-2]
    argv = [program, command, *([source, source] if command == "average" else [source]), "-o", source, "--force", *more]
    argv += ["--" + option, *argument] if option else []
    r = subprocess.run(argv, cwd=folder, capture_output=True, text=True)
    return " ".join(argv[1:]), r.returncode, r.stderr, snapshot(path) == before, path


def note_in(dataset):
    """Adds an attribute, as other programs do."""
    def edit(folder):
        with h5py.File(os.path.join(folder, dataset.split("|")[0]), "r+") as f:
            f[dataset.split("|")[1]].attrs["unit"] = "m"
    return edit


def more_than_values(program, home):
    """Inputs with content that is not a value of the checkpoint, or of another one: no target holds it."""
    def put(source, target):
        return lambda folder: shutil.copy(os.path.join(home, source), os.path.join(folder, target))
    cases = [(CASES[0], note_in("a.h5|m.w.weight")), (CASES[3], note_in("a.sharded/index.h5|m.w.weight")),
             (CASES[3], note_in("a.sharded/shard-00001-of-00002.h5|m.w.weight")),
             (CASES[4], put("a.dcp/__1_0.distcp", "a.dcp/__7_0.distcp")), (CASES[4], put("a.sharded/index.h5", "a.dcp/index.h5")),
             (CASES[10], put("a.safetensors", "hub/model-00001-of-00002.safetensors"))]
    for number, (case, edit) in enumerate(cases):
        what, status, said, untouched, _ = attempt(program, home, "-odd%d" % number, case, None, [], edit)
        check(status in (2, 3) and untouched, "%s, input %d: exit %d: %s" % (what, number, status, said))


def attempts(program):
    for case in CASES:
        options = options_of(program, case[0])
        check(len(options) > 20, "the options of %s are not found" % case[0])
        yield case, None, []
        for option in options:
            known = {**LOSSY, **KEEPING, **OTHERS}
            check(option in known, "--%s: this test does not know what the option does: say whether it is lossy" % option)
            if known.get(option) is not None:
                yield case, option, known[option]


def main():
    program = sys.argv[1]
    refusals, successes = set(), set()
    with tempfile.TemporaryDirectory() as home, ThreadPoolExecutor(2) as pool:
        prepare(program, home)
        expected = {source: values_of(os.path.join(home, source)) for _, source, _ in CASES}
        todo = list(attempts(program))
        done = pool.map(lambda it: attempt(program, home, it[0], *it[1]), enumerate(todo))
        for (case, option, _), (what, status, said, untouched, path) in zip(todo, done):
            if status == 0:
                successes.add((option, case[1]))
                check(untouched or same(values_of(path), expected[case[1]]), "%s: the input is not what it was" % what)
                check(option not in LOSSY or untouched, "%s: is not refused" % what)
            else:
                check(untouched, "%s: exit %d, but the input was changed" % (what, status))
                if status == 2 and LOSES.search(said):
                    refusals.add(option)
        more_than_values(program, home)
    for option in LOSSY:
        check(option in refusals, "--%s: no case reaches the refusal" % option)
    for option in [None, *KEEPING]:
        for source in ("a.h5", "a.safetensors", "a.sharded", "a.dcp", "a.accelerate"):
            check((option, source) in successes, "--%s: %s is not replaced by its equal" % (option, source))
    print("%d commands, %d of them replaced their input" % (len(todo), len(successes)))
    sys.exit(finish("force_input"))


main()
