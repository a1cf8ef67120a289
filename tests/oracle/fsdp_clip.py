"""fc_fsdp_clip_grad_norm against FSDP.clip_grad_norm_ on gloo.

The norm is within 4 units in the last place of torch's, and within one of the exact norm. Given the norm, the clipped
gradients are those of torch's arithmetic, bit for bit.

usage: fsdp_clip.py PATH_OF_FSDP_TOOL

Exit status 77 without torch.
"""

import json
import math
import random
import struct
import subprocess
import sys

try:
    import torch

    import fsdp_scenarios
    import gloo
    from fsdp_scenarios import raw
    from fsdp_step import WORLD, scenario
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)


def all_scenarios():
    rng = random.Random(11)
    made = []

    def add(name, world, **options):
        made.append(scenario(name, world, rng, **options))

    for kind in (2, 0, 1, 3, 0.5):  # 0 is infinity
        for strategy in ("FULL_SHARD", "NO_SHARD"):
            add(f"{strategy} {kind}", 3, strategy=strategy, steps="zz", clip=[0.75, kind])
        add(f"whole among sharded {kind}", 2, steps="zz", clip=[1.5, kind], unit_options={1: {"strategy": "NO_SHARD"}})
        add(f"hybrid {kind}", 4, strategy="HYBRID_SHARD", replicas=2, steps="z", clip=[1.0, kind])
        add(f"experts {kind}", 4, steps="z", clip=[2.0, kind], experts=(2,), unit_options={2: {"group": "across"}})
        add(f"bf16 gradients {kind}", 2, steps="z", clip=[0.5, kind], param_dtype="bfloat16", keep_low_precision_grads=True)
        add(f"offloaded {kind}", 2, steps="zz", clip=[0.5, kind], unit_options={2: {"offload": True}})
    add("below the limit", 2, steps="zz", clip=[1e6, 2])
    add("original parameters", 3, steps="zz", clip=[0.5, 2], use_orig_params=True)
    add("unused unit", 2, steps="z", clip=[0.5, 2], skip=(2,))
    for text, value in (("nan", math.nan), ("infinity", math.inf)):
        for kind in (2, 0):
            add(f"{text} {kind}", 2, steps="z", clip=[0.5, kind])
            grads = made[-1]["steps"][0]["grads"][1][1]
            grads[0] = raw(torch.full((4, 4), value))
    # torch counts the replicas of unit 1 twice, and what the other node has of unit 3 not at all.
    add("hybrid among others", 4, steps="z", clip=[1.0, 2], unit_options={1: {"strategy": "HYBRID_SHARD", "group": "hybrid"}})
    add("others among hybrid", 4, steps="z", clip=[1.0, 2], replicas=2, strategy="HYBRID_SHARD",
        unit_options={3: {"strategy": "FULL_SHARD", "group": "world"}})
    return made


def copies(s, unit):
    o = {**s, **s["units"][unit]["options"]}
    group = o.get("group", "hybrid" if s.get("replicas") else "world")
    ranks = s["world"] if group == "world" else 2
    return ranks if o.get("strategy") == "NO_SHARD" else 2 if group == "hybrid" else 1


def exact_norm(s, unclipped, kind):
    """The norm of the gradients of all ranks; each element counts once."""
    total = [0.0]
    for rank in unclipped:
        for unit, grad in enumerate(rank):
            if grad is None:
                continue
            x = grad.to(torch.float64).abs()
            total.append(x.max().item() if kind == 0 else (x ** kind).sum().item() / copies(s, unit))
            if x.isnan().any():
                return math.nan
    return max(total) if kind == 0 else math.fsum(total) ** (1 / kind) if math.isfinite(sum(total)) else sum(total)


def ulps(a, b):
    a, b = (struct.unpack("<i", struct.pack("<f", x))[0] for x in (a, b))
    return abs(a - b)


def close(got, want, dtype, most):
    if not (math.isfinite(got) and math.isfinite(want)):
        return str(got) == str(want)
    step = 2 ** 16 if dtype == torch.bfloat16 else 1
    return ulps(got, want) <= most * step


def clipped(grad, most, norm):
    coefficient = torch.clamp(most / (torch.tensor(norm, dtype=torch.float32) + 1e-6), max=1.0)
    return grad.clone().mul_(coefficient.to(grad.dtype))


def problems(s, got, wanted):
    most, kind = s["clip"]
    for step in range(len(s["steps"])):
        norms = [struct.unpack("<d", bytes.fromhex(r["norms"][step])[::-1])[0] for r in got]
        if len({str(n) for n in norms}) != 1:
            yield f"the ranks have {norms}"
        unclipped = [w["unclipped"][step] for w in wanted]
        exact, torchs = exact_norm(s, unclipped, kind), wanted[0]["norms"][step]
        if not close(norms[0], float(torch.tensor(exact).to(torchs.dtype)), torchs.dtype, 1):
            yield f"norm {norms[0]}, exactly {exact}"
        if "others" not in s["name"] and not close(norms[0], torchs.item(), torchs.dtype, 4):
            yield f"norm {norms[0]}, torch's {torchs}"
        low = torchs.dtype != torch.float32
        for rank, r in enumerate(got):
            for unit, grad in enumerate(unclipped[rank]):
                mine = r["grads"][step][unit]
                # The norm in low precision does not tell the coefficient, which comes from the norm in float32.
                candidates = [exact] if low else norms[:1]
                want = None if grad is None else {raw(clipped(grad, most, n)) for n in candidates}
                if (mine is None) != (want is None) or mine and mine[1] not in want:
                    yield f"rank {rank}, unit {unit}: {mine} is not {want}"


def main():
    scenarios = all_scenarios()
    answers = gloo.run(WORLD, fsdp_scenarios.run_all, scenarios)
    for i, s in enumerate(scenarios):
        for step, calls in zip(s["steps"], answers[0][i][1]):
            step["calls"] = calls
    p = subprocess.run([sys.argv[1]], input=json.dumps(scenarios), capture_output=True, text=True, check=True)
    failures = 0
    for i, (s, got) in enumerate(zip(scenarios, json.loads(p.stdout))):
        found = [got["error"]] if got["code"] else problems(s, got["ranks"], [answers[r][i][0] for r in range(s["world"])])
        for text in found:
            print(f"{s['name']} on {s['world']}: {text}"[:600])
            failures += 1
    print(f"{len(scenarios)} scenarios, {failures} differences")
    return 1 if failures or len(scenarios) < 40 else 0


if __name__ == "__main__":
    sys.exit(main())
