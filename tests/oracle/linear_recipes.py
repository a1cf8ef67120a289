"""Small inputs have small costs: every shipped recipe on huge counts and empty dimensions, sparse files, adapters with as
many patterns as modules.

    linear_recipes.py FSDPCKPT

A few hundred bytes can ask for a list of any length. Each such run must end within seconds and some hundred MiB, with success or
with one line.
"""
from linear_cost import TOOL, cost, failures, finish, grows

import json
import os
import re
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cli"))
import safetensors_file  # noqa: E402

MOST_SECONDS, MOST_KIB = 5, 500 << 10
HUGE = 1 << 40
MILLION = 1_000_000
SHAPES = [(MILLION, 0), (MILLION, 0, 2)]


def write_zeros(path, shapes):
    """{name: shape}"""
    safetensors_file.write_zeros(path, {name: ("F32", shape) for name, shape in shapes.items()})


def bounded(folder, what, *args):
    """Runs the tool; any exit status that is an answer is allowed, but not its cost."""
    before = len(failures)
    seconds, peak = cost(folder, *args)
    failures[before:] = [f for f in failures[before:] if "exit 2:" not in f and "exit 4: " not in f]
    if seconds > MOST_SECONDS or peak > MOST_KIB:
        failures.append(f"{what}: {seconds:.1f} s, {peak >> 10} MiB: {args}")
    return seconds


def as_list(value):
    return value if isinstance(value, list) else [value]


def sides(recipe, reverse):
    """The names that each rule takes that makes several tensors, or larger ones, with 0 for every variable."""
    seen = set()
    for rule in recipe["rules"]:
        patterns, operations = rule.get("to" if reverse else "from"), json.dumps(rule.get("operations"))
        if patterns and re.search("resize|stack" if reverse else "resize|unstack", operations) and (
                operations, len(as_list(patterns))) not in seen:
            seen.add((operations, len(as_list(patterns))))
            yield [re.sub(r"\{[^}]*\}", "0", p) for p in as_list(patterns)]


def config_of(recipe):
    """A model's configuration with a number for everything that the recipe computes with."""
    words = set(re.findall(r"[a-z_]{2,}", json.dumps(recipe.get("sizes", {})) + json.dumps(recipe["rules"])))
    return {**dict.fromkeys(words, 2), "model_type": as_list(recipe.get("models", ["llama"]))[0]}


def shipped_recipes():
    runs = 0
    for line in subprocess.run([TOOL, "recipes"], capture_output=True, text=True, check=True).stdout.splitlines():
        name = line.split()[0]
        recipe = json.loads(subprocess.run([TOOL, "recipes", name], capture_output=True, text=True, check=True).stdout)
        with tempfile.TemporaryDirectory() as d:
            with open(os.path.join(d, "config.json"), "w") as f:
                json.dump(config_of(recipe), f)
            for reverse in (False, True):
                for names in sides(recipe, reverse):
                    for shape in SHAPES:
                        write_zeros(os.path.join(d, "x.safetensors"), dict.fromkeys(names, shape))
                        bounded(d, name, "consolidate", "x.safetensors", "-o", "out.pt", "--dry-run", "--recipe", name,
                                *(["--reverse"] if reverse else []))
                        runs += 1
                if not reverse:  # the recipe is found by itself
                    for names in sides(recipe, reverse):
                        write_zeros(os.path.join(d, "x.safetensors"), dict.fromkeys(names, (MILLION, 0)))
                        bounded(d, name, "export", "x.safetensors", "-o", "out", "--dry-run")
    print(runs, "runs of shipped recipes")


def own_recipes():
    """Every operation that makes a list."""
    lists = {"unstack": [{"unstack": 0}], "unstack twice": [{"unstack": 0}, {"unstack": 0}],
             "resize": [{"resize": 0, "from": "0", "to": str(HUGE)}, {"unstack": 0}],
             "split": [{"rearrange": "(a b) c -> a b c"}, {"unstack": 0}]}
    for what, operations in lists.items():
        with tempfile.TemporaryDirectory() as d:
            with open(os.path.join(d, "r.json"), "w") as f:
                json.dump({"fsdpckpt": "recipe", "schema": 1, "sizes": {"b": "1"}, "rules": [
                    {"from": "x", "to": "y.{n}" + (".{m}" if "twice" in what else ""), "operations": operations}]}, f)
            for shape in SHAPES + [(HUGE, 0), (MILLION, 2, 2, 0), (3000, 3000, 0)]:
                write_zeros(os.path.join(d, "x.safetensors"), {"x": shape})
                bounded(d, what, "consolidate", "x.safetensors", "-o", "out.pt", "--dry-run", "--recipe", "r.json")


def sparse_files():
    """Data that was never written: the lists of what would be computed from it are bounded, too."""
    try:
        import h5py
    except ImportError:
        return
    with tempfile.TemporaryDirectory() as d:
        with h5py.File(os.path.join(d, "x.h5"), "w") as f:
            f.create_dataset("w.weight", (1 << 20, 1 << 28), "f4")
        with h5py.File(os.path.join(d, "q.h5"), "w") as f:
            f.create_dataset("w.weight", (1 << 20, 1 << 28), "i1")
            f.create_dataset("w.weight_scale", (1, 1), "f4")
        for run in (["average", "x.h5", "x.h5"], ["consolidate", "x.h5", "--quantize", "w.*"],
                    ["consolidate", "q.h5", "--dequantize", "f32"]):
            bounded(d, "sparse", *run, "-o", "out.pt", "--dry-run")


def write_adapter(folder, n, pattern):
    names = [f"layers.{i}.q_proj" for i in range(n)]
    os.makedirs(folder)
    write_zeros(os.path.join(folder, "adapter_model.safetensors"),
                {f"base_model.model.{name}.lora_{x}.weight": (1, 1) for name in names for x in "AB"})
    write_zeros(os.path.join(folder, "base.safetensors"), {name + ".weight": (1, 1) for name in names})
    with open(os.path.join(folder, "adapter_config.json"), "w") as f:
        json.dump({"peft_type": "LORA", "r": 1, "lora_alpha": 1, "rank_pattern": {pattern(n): 1 for n in names},
                   "alpha_pattern": {pattern(n): 2 for n in reversed(names)}}, f)


def plain_patterns(path, n):
    folder = os.path.join(os.path.dirname(path), "adapter")
    write_adapter(folder, 2 * n, lambda name: name)
    os.rename(os.path.join(folder, "base.safetensors"), path)


def write_targets(path, base, tensors, targets):
    folder = os.path.join(os.path.dirname(path), "adapter")
    os.makedirs(folder)
    write_zeros(path, base)
    write_zeros(os.path.join(folder, "adapter_model.safetensors"), tensors)
    with open(os.path.join(folder, "adapter_config.json"), "w") as f:
        json.dump({"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_parameters": targets}, f)


def factors_of(modules):
    """Factors for two experts of each module."""
    return {f"base_model.model.{module}.lora_{x}.weight": shape for module in modules for x, shape in (("A", (2, 1)), ("B", (2, 2)))}


def experts(path, n):
    """The factors of a layer's experts, whose parameter is known by a target."""
    modules = [f"layers.{i}.experts" for i in range(4 * n)]
    write_targets(path, {f"model.{m}.w": (2, 2, 1) for m in modules}, factors_of(modules), ["experts.w"])


def many_targets(path, n):
    modules = [f"layers.{i}.experts" for i in range(4 * n)]
    write_targets(path, {f"model.{m}.w": (2, 2, 1) for m in modules}, factors_of(modules), [m + ".w" for m in modules])


def added_values(path, n):
    """Values that the source lacks."""
    write_targets(path, {"w": (1, 1)}, {f"base_model.model.v{i}.modules_to_save.default": (1,) for i in range(4 * n)}, [])


def one_long_name(path, n):
    write_targets(path, {"w": (1, 1)}, {"base_model.model.v" + ".base_layer" * 20 * n: (1,)}, [])


def adapters():
    for make in (plain_patterns, experts, many_targets, added_values, one_long_name):
        grows("x.safetensors", make, [["consolidate", "-o", "out.pt", "--dry-run", "--adapter", "adapter"]])


def expressions():
    """Regular expressions must be compared with every module: too many are refused."""
    for pattern in (lambda n: n.replace(".", r"\.") + "$|never", lambda n: ".*" + n + ".*x"):
        with tempfile.TemporaryDirectory() as d:
            write_adapter(os.path.join(d, "x"), 6000, pattern)
            bounded(d, "expressions", "consolidate", "x/base.safetensors", "-o", "out.pt", "--adapter", "x")


def main():
    for check in (shipped_recipes, own_recipes, sparse_files, adapters, expressions):
        check()
    return finish()


if __name__ == "__main__":
    sys.exit(main())
