"""Flat parameters against torch's FlatParamHandle: order, alignment, shared and strided parameters, and which elements of
which parameter each rank's shard holds, with their bytes.

usage: flat_param.py PATH_OF_FSDP_TOOL

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
    from fsdp_step import differences
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)

WORLD = 4
# Each parameter is (shape, strides or None), or the index of an earlier parameter that it is tied to.
CASES = {
    "one": [((7,), None)],
    "less than ranks": [((1,), None)],
    "two of three": [((2,), None), ((1,), None)],
    "empty": [((4,), None), ((0, 3), None), ((2,), None), ((0,), None)],
    "aligned by chance": [((4, 4), None), ((8,), None), ((16,), None)],
    "odd": [((3, 5), None), ((7,), None), ((1,), None), ((2, 3, 2), None)],
    "shared": [((3, 5), None), ((2,), None), 0, ((5,), None), 1],
    "transposed": [((3, 5), (1, 3)), ((4,), None), ((2, 3, 4), (1, 2, 6)), ((1, 6), (9, 1))],
}


def case(name, params, world, rng, **options):
    dtype = options.get("dtype", "float32")
    made = []
    for i, p in enumerate(params):
        if isinstance(p, int):
            made.append({"fqn": f"p{i}", "shape": list(params[p][0]), "shared_with": p, "dtype": dtype})
            continue
        shape, strides = p
        count = torch.Size(shape).numel()
        value = torch.tensor([rng.uniform(-2, 2) for _ in range(count)], dtype=torch.float64).to(DTYPES[dtype])
        made.append({"fqn": f"p{i}", "shape": list(shape), "dtype": dtype, "bytes": raw(value)})
        if strides:
            made[-1]["strides"] = list(strides)
    units = [{"name": "unit0", "params": []}, {"name": "unit1", "params": made}]
    return {"name": f"{name} {options}", "world": world, "units": units, "steps": [], **options}


def main():
    rng = random.Random(3)
    scenarios = []
    for name, params in CASES.items():
        for orig in (False, True):
            for world in (2, 3, 4):
                scenarios.append(case(name, params, world, rng, use_orig_params=orig))
            scenarios.append(case(name, params, 2, rng, use_orig_params=orig, dtype="bfloat16"))
            scenarios.append(case(name, params, 3, rng, use_orig_params=orig, dtype="float64"))
            scenarios.append(case(name, params, 4, rng, use_orig_params=orig, param_dtype="bfloat16"))
            scenarios.append(case(name, params, 3, rng, use_orig_params=orig, strategy="NO_SHARD"))
    wanted = gloo.run(WORLD, fsdp_scenarios.run_all, scenarios)
    answer = subprocess.run([sys.argv[1]], input=json.dumps(scenarios), capture_output=True, text=True, check=True)
    failures = 0
    for i, (s, got) in enumerate(zip(scenarios, json.loads(answer.stdout))):
        found = [got["error"]] if got["code"] else [
            f"rank {rank}{text}" for rank in range(s["world"])
            for text in differences(got["ranks"][rank]["units"], wanted[rank][i][0]["units"])
        ]
        failures += bool(found)
        if found:
            print(f"{s['name']} on {s['world']}: {found[0]}")
    print(f"{len(scenarios)} layouts, {failures} differences")
    return 1 if failures or len(scenarios) < 100 else 0


if __name__ == "__main__":
    sys.exit(main())
