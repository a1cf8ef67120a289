"""The FSDP step against PyTorch's FSDP on gloo. The parameters that the forward sees, the gradient shards and their dtype, and
the order of gathers, reductions and frees must all be equal, bit for bit.

usage: fsdp_step.py PATH_OF_FSDP_TOOL

Exit status 77 without torch.
"""

import json
import random
import subprocess
import sys

try:
    import torch

    import fsdp_scenarios
    import gloo
    from fsdp_scenarios import DTYPES, raw
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)

WORLD = 4
UNITS = [[(3, 5), (7,)], [(4, 4), (4,)], [(5, 3), (1,), (2, 2, 2)], [(9,)]]


def values(rng, shape, dtype, exact):
    """Random values. With `exact`, their sums over ranks are exact in any order and dtype."""
    count = torch.Size(shape).numel()
    if exact:
        return torch.tensor([rng.randint(-16, 16) / 4 for _ in range(count)]).to(dtype).reshape(shape)
    return torch.tensor([rng.uniform(-2, 2) for _ in range(count)], dtype=torch.float64).to(dtype).reshape(shape)


def scenario(name, world, rng, *, steps="z", root_params=True, frozen=(), order=None, skip=(), unit_options=None,
             experts=(), shared=(), **options):
    """In `steps`, z clears the gradients first, a accumulates on them, and n runs without synchronisation.

    `unit_options` are those of single units. In `experts`, even and odd ranks have different parameters. In `shared`, the
    first parameter has a second name."""
    shapes = UNITS if root_params else [[]] + UNITS[1:]
    unit_options = unit_options or {}
    compute = [DTYPES.get({**options, **unit_options.get(u, {})}.get("param_dtype"), torch.float32)
               for u in range(len(shapes))]
    units = [{
        "name": f"unit{u}",
        "params": [{
            "fqn": f"p{i}",
            "shape": list(shape),
            "bytes": ([raw(values(rng, shape, torch.float32, False)) for _ in range(2)] * 2 if u in experts
                      else raw(values(rng, shape, torch.float32, False))),
            "frozen": u in frozen,
        } for i, shape in enumerate(params)]
        + ([{"fqn": "again", "shape": list(params[0]), "shared_with": 0}] if u in shared else []),
        "options": unit_options.get(u, {}),
    } for u, params in enumerate(shapes)]
    exact = world > 2
    made = [{
        "sync": kind != "n",
        "zero": kind == "z",
        "order": (order or {}).get(i, [1, 2, 3]),
        "grads": [[[raw(values(rng, s, compute[u], exact)) for s in params] if u not in skip and u not in frozen else []
                   for u, params in enumerate(shapes)] for _ in range(world)],
    } for i, kind in enumerate(steps)]
    return {"name": name, "world": world, "units": units, "steps": made, **options}


def all_scenarios():
    rng = random.Random(5)
    made = []

    def add(name, world, **options):
        made.append(scenario(name, world, rng, **options))

    for world in (2, 3, 4):
        for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
            # NO_SHARD accumulates on averaged gradients, so with 3 ranks the sums are no longer exact.
            add(strategy.lower(), world, strategy=strategy, steps="zz" if strategy == "NO_SHARD" and world > 2 else "zza")
    mixed = [("bfloat16", None), ("bfloat16", "float32"), (None, "bfloat16"), ("float16", "float16")]
    for param, reduce in mixed:
        for strategy in ("FULL_SHARD", "NO_SHARD"):
            for keep in (False, True):
                add(f"mixed {param} {reduce} keep={keep}", 2, strategy=strategy, param_dtype=param,
                    reduce_dtype=reduce, keep_low_precision_grads=keep, steps="zaz")
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):
        add("no_sync", 2, strategy=strategy, steps="znazna")
        add("no_sync bf16", 2, strategy=strategy, steps="znnaz", param_dtype="bfloat16", reduce_dtype="float32")
    for prefetch in ("PRE", "POST"):
        for strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):
            add(f"prefetch {prefetch}", 2, strategy=strategy, backward_prefetch=prefetch, steps="zzz")
        add(f"prefetch {prefetch} no_sync", 2, backward_prefetch=prefetch, forward_prefetch=True, steps="nza")
    add("forward prefetch", 2, forward_prefetch=True, steps="zzz")
    add("forward prefetch, another order", 2, forward_prefetch=True, backward_prefetch="PRE", steps="zzz",
        order={1: [3, 1, 2], 2: [1, 3]})
    for hook in ("default", "float16", "bfloat16"):
        add(f"hook {hook}", 2, hook=hook, steps="zaz")
        add(f"hook {hook} no_shard", 2, hook=hook, strategy="NO_SHARD", steps="zz")
        add(f"hook {hook} bf16", 2, hook=hook, param_dtype="bfloat16", steps="za")
    for strategy in ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"):
        add(strategy.lower(), 4, strategy=strategy, replicas=2, steps="zana")
        add(f"{strategy.lower()} mixed", 4, strategy=strategy, replicas=2, steps="za", param_dtype="bfloat16",
            reduce_dtype="float32", backward_prefetch="PRE")
    add("use_orig_params", 3, use_orig_params=True, steps="zaz")
    add("use_orig_params bf16", 4, use_orig_params=True, param_dtype="bfloat16", steps="za")
    add("offload", 2, offload=True, steps="zz")
    add("offload bf16", 2, offload=True, param_dtype="bfloat16", reduce_dtype="float32", steps="zz")
    add("no parameters of the root's own", 2, root_params=False, steps="zz")
    # Each unit with options of its own, added one by one and by a wrap policy.
    half = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
    hybrid = {"strategy": "HYBRID_SHARD", "group": "hybrid"}
    for planned in (False, True):
        def both(name, world, **options):
            add(f"{name}, {'planned' if planned else 'one by one'}", world, planned=planned, **options)

        both("strategies", 2, steps="zza", unit_options={1: {"strategy": "SHARD_GRAD_OP"}, 2: {"strategy": "NO_SHARD"}})
        both("dtypes", 2, steps="za", unit_options={1: half, 2: {"reduce_dtype": "bfloat16"}})
        both("prefetching", 2, steps="zz", backward_prefetch="PRE", forward_prefetch=True,
             unit_options={1: {"forward_prefetch": False}, 2: {"backward_prefetch": "POST"},
                           3: {"backward_prefetch": "NONE"}})
        both("prefetching in units only", 2, steps="zz",
             unit_options={2: {"backward_prefetch": "PRE", "forward_prefetch": True}, 3: {"backward_prefetch": "POST"}})
        both("offloading", 2, steps="zz", unit_options={2: {"offload": True}})
        both("experts", 4, steps="zan", experts=(2,), unit_options={2: {"group": "across"}})
        both("experts, mixed", 4, steps="zna", experts=(1, 3), backward_prefetch="PRE",
             unit_options={1: {"group": "across", "strategy": "SHARD_GRAD_OP"}, 3: {"group": "across", **half}})
        both("hybrid among others", 4, steps="za", unit_options={1: hybrid, 3: {"group": "neighbours"}})
        both("others among hybrid", 4, steps="za", replicas=2, strategy="HYBRID_SHARD",
             unit_options={1: {"group": "world", "strategy": "FULL_SHARD"}, 2: {"strategy": "_HYBRID_SHARD_ZERO2"},
                           3: {"group": "world", "strategy": "NO_SHARD"}})
        both("shared parameter", 2, steps="z", shared=(1,))
    add("unused unit", 2, steps="zz", skip=(2,), backward_prefetch="PRE")
    return made


def differences(mine, theirs, path=""):
    if isinstance(theirs, dict):
        for key in theirs:
            yield from differences(mine[key], theirs[key], f"{path}.{key}")
    elif isinstance(theirs, list) and isinstance(mine, list) and len(mine) == len(theirs) and path != ".trace":
        for i, (a, b) in enumerate(zip(mine, theirs)):
            yield from differences(a, b, f"{path}[{i}]")
    elif mine != theirs:
        yield f"{path}: {str(mine)[:4000]} is not torch's {str(theirs)[:4000]}"


def main():
    scenarios = all_scenarios()
    wanted = gloo.run(WORLD, fsdp_scenarios.run_all, scenarios)
    # The order of autograd's hooks depends on when views were made. The tool calls in the same order.
    for i, s in enumerate(scenarios):
        for step, calls in zip(s["steps"], wanted[0][i][1]):
            step["calls"] = calls
    answer = subprocess.run([sys.argv[1]], input=json.dumps(scenarios), capture_output=True, text=True, check=True)
    failures = 0
    for i, (s, got) in enumerate(zip(scenarios, json.loads(answer.stdout))):
        if got["code"]:
            print(f"{s['name']} on {s['world']}: {got['error']}")
            failures += 1
            continue
        for rank in range(s["world"]):
            for text in differences(got["ranks"][rank], wanted[rank][i][0]):
                print(f"{s['name']} on {s['world']}, rank {rank}{text}")
                failures += 1
                break
    print(f"{len(scenarios)} scenarios, {failures} differences")
    return 1 if failures or len(scenarios) < 40 else 0


if __name__ == "__main__":
    sys.exit(main())
