"""Mixed precision around the forward of modules, against PyTorch's FSDP on gloo: which dtypes and values modules see as
inputs and buffers, with batch norms and the like kept in float32, and the buffers that a checkpoint gets.

usage: fsdp_hooks.py PATH_OF_HOOKS_TOOL

Exit status 77 without torch.
"""

import itertools
import json
import random
import subprocess
import sys
import warnings

try:
    import torch
    from torch import nn
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision, StateDictType
    from torch.distributed.fsdp.wrap import CustomPolicy

    import gloo
    from fsdp_scenarios import DTYPES, raw, tensor_of
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)

NUMEL = 5
PRECISION = ("param_dtype", "buffer_dtype")
FLAGS = ("cast_forward_inputs", "cast_root_forward_inputs")


class Plain(nn.Module):
    def __init__(self, spec):
        super().__init__()
        self.p = nn.Parameter(tensor_of(spec["p"], torch.float32, [NUMEL]))
        self.register_buffer("b", tensor_of(spec["b"], torch.float32, [NUMEL]))
        self.register_buffer("n", tensor_of(spec["n"], torch.int64, []))

    def forward(self, x):
        self.seen.append([described(x), described(self.b), described(self.n)])
        return x + self.p


class Norm(Plain):
    pass


class Model(nn.Module):
    def __init__(self, modules):
        super().__init__()
        self.layers = nn.ModuleList({"Plain": Plain, "Norm": Norm}[m["class"]](m) for m in modules)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def described(tensor):
    return [str(tensor.dtype).removeprefix("torch."), raw(tensor)]


def precision(options):
    return MixedPrecision(**{k: DTYPES.get(options.get(k)) for k in PRECISION}, **{k: options[k] for k in FLAGS if k in options},
                          _module_classes_to_ignore=(Norm,))


def run_scenario(scenario):
    model, seen = Model(scenario["modules"]), []
    specs = {id(m): s for m, s in zip(model.layers, scenario["modules"])}

    def choose(module):
        spec = specs.get(id(module))
        if not spec or not spec["wrap"]:
            return False
        return {"mixed_precision": precision(spec["options"])} if "options" in spec else True

    for m in model.layers:
        m.seen = seen
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fsdp = FSDP(model, auto_wrap_policy=CustomPolicy(choose), mixed_precision=precision(scenario["root"]),
                    device_id=torch.device("cpu"))
        with torch.no_grad():
            for i in scenario["inputs"]:
                x = tensor_of(i["x"], DTYPES[i["dtype"]], [NUMEL])
                seen.append(described(fsdp(x)))
        with FSDP.state_dict_type(fsdp, StateDictType.FULL_STATE_DICT):
            state = fsdp.state_dict()
    saved = [described(state[f"layers.{i}.{n}"]) for i in range(len(specs)) for n in ("b", "n")]
    return {"seen": seen, "saved": saved}


def run_all(rank, world, scenarios):
    return [run_scenario(s) for s in scenarios]


def all_scenarios():
    rng = random.Random(17)
    value = lambda dtype=torch.float32: torch.tensor([rng.uniform(-2, 2) for _ in range(NUMEL)], dtype=torch.float64).to(dtype)

    def module(kind, wrap=True, **options):
        made = {"class": kind, "wrap": wrap, "p": raw(value()), "b": raw(value()), "n": raw(torch.tensor(rng.randint(1, 99)))}
        return {**made, "options": options} if options else made

    inputs = [{"dtype": d, "x": raw(value(DTYPES[d]))} for d in ("float32", "bfloat16", "float64", "float32", "float16")]
    roots = [dict(zip(PRECISION + FLAGS, choice)) for choice in itertools.product(
        ("bfloat16", "float16", None), ("float16", None), (False, True), (False, True))]
    made = []
    for root in roots:
        models = [
            [module("Plain"), module("Norm"), module("Plain"), module("Norm", wrap=False), module("Plain", wrap=False)],
            [module("Norm"), module("Plain", param_dtype="float16", cast_forward_inputs=True),
             module("Plain", param_dtype="bfloat16", buffer_dtype="bfloat16", cast_forward_inputs=True), module("Norm")],
            # A norm's own mixed precision is overridden too.
            [module("Norm", param_dtype="float16", buffer_dtype="float16", cast_forward_inputs=True),
             module("Plain", param_dtype="bfloat16"), module("Plain", wrap=False)],
        ]
        made += [{"root": root, "numel": NUMEL, "modules": m, "inputs": inputs} for m in models]
    return made


def main():
    scenarios = all_scenarios()
    wanted = gloo.run(2, run_all, scenarios)[0]
    answer = subprocess.run([sys.argv[1]], input=json.dumps(scenarios), capture_output=True, text=True, check=True)
    failures, casts = 0, set()
    for s, got, want in zip(scenarios, json.loads(answer.stdout), wanted):
        casts |= {x[0][0] for x in want["seen"] if isinstance(x[0], list)}
        if got["code"] or [got["seen"], got["saved"]] != [want["seen"], want["saved"]]:
            failures += 1
            print(f"{s['root']}, {[m['class'] for m in s['modules']]}: {got['error']}")
            for a, b in zip(got["seen"] + got["saved"], want["seen"] + want["saved"]):
                if a != b:
                    print(f"  {a}\n  is not torch's\n  {b}")
                    break
    print(f"{len(scenarios)} scenarios, {failures} differ; modules saw {sorted(casts)}")
    return 1 if failures or len(casts) < 4 else 0


if __name__ == "__main__":
    sys.exit(main())
