#!/usr/bin/env python3
"""Megatron checkpoints: torch_dist as megatron-core wrote it (tests/corpus/make_megatron.py), and a file a
model-parallel rank, which torch writes here as Megatron's save_checkpoint lays it out.

usage: megatron_read.py FSDPCKPT CORPUS       exit 77 without torch or safetensors
"""
import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile

try:
    import numpy
    import safetensors
    import torch
except ImportError as e:
    print("skipped: %s" % e)
    sys.exit(77)

failures = []


def check(good, what):
    if not good:
        failures.append(what)
        print("FAILED: " + what)


def run(*argv):
    r = subprocess.run(argv, capture_output=True, text=True)
    check(r.returncode == 0, "%s: exit %d: %s" % (" ".join(argv[1:]), r.returncode, r.stderr.strip()))
    return r.stdout


def refused(program, case, what, status, *words):
    r = subprocess.run([program, "consolidate", case, "-o", case + ".h5", "-q"], capture_output=True, text=True)
    check(r.returncode == status and all(w in r.stderr for w in words), "%s: exit %d: %s" % (what, r.returncode, r.stderr))


def digests(path):
    with open(path, "rb") as f:
        return {n: (list(t["shape"]), hashlib.sha256(bytes(t["data"])).hexdigest())
                for n, t in safetensors.deserialize(f.read())}


def torch_dist(program, case, home):
    with open(os.path.join(case, "expected.json")) as f:
        expected = json.load(f)
    want = {n: (t["shape"], t["sha256"]) for n, t in expected["tensors"].items()}
    step = os.path.join(case, "iter_0000007")
    out, again, shards = (os.path.join(home, n) for n in ("a.safetensors", "b.safetensors", "shards"))
    for source in (case, step):
        run(program, "consolidate", source, "-o", out, "-q", "--force")
        check(digests(out) == want, "%s: %s" % (source, digests(out)))
    run(program, "reshard", case, "-o", shards, "--dp", "3", "-q")
    run(program, "consolidate", shards, "-o", again, "-q")
    check(digests(again) == want, "resharded and back")
    listed = json.loads(run(program, "inspect", case, "--json"))
    values = {o["name"]: o["value"] for o in listed["objects"]}
    check(all(values.get(n) == v for n, v in expected["values"].items()), "common.pt: %s" % values)
    check(values.get("norm._extra_state/shard_1_2") == [{"rank": 1}], "sharded objects: %s" % values)
    run(program, "verify", case)
    copy = os.path.join(home, "copy")
    shutil.copytree(step, copy)
    with open(os.path.join(copy, "common.pt"), "r+b") as f:
        f.truncate(100)
    refused(program, copy, "common.pt cut off", 3, "common.pt")


def rank_files(program, home):
    """One model-parallel rank: with the objects that Megatron puts there."""
    case = os.path.join(home, "legacy")
    rank = os.path.join(case, "iter_0000010", "mp_rank_00")
    os.makedirs(rank)
    with open(os.path.join(case, "latest_checkpointed_iteration.txt"), "w") as f:
        f.write("10")
    weight = torch.randn(4, 3).half()
    state = {"args": argparse.Namespace(hidden_size=3, tensor_model_parallel_size=1), "checkpoint_version": 3.0,
             "iteration": 10, "model": {"decoder.weight": weight, "decoder._extra_state": None},
             "optimizer": {"optimizer": {"state": {0: {"exp_avg": weight.float(), "step": 10}},
                                         "param_groups": [{"lr": 0.1, "params": [0]}]},
                           "fp32_from_fp16_params": [[weight.float()]]},
             "rng_state": [{"random_rng_state": (3, (1, 2, 3), None), "np_rng_state": numpy.random.get_state(),
                            "torch_rng_state": torch.get_rng_state()}]}
    torch.save(state, os.path.join(rank, "model_optim_rng.pt"))
    out = os.path.join(home, "m.safetensors")
    run(program, "consolidate", case, "-o", out, "-q", "--force", "--include", "model.*")
    found = digests(out)
    check(found == {"model.decoder.weight": ([4, 3], hashlib.sha256(weight.numpy().tobytes()).hexdigest())},
          "mp_rank_00: %s" % found)
    pt = os.path.join(home, "m.pt")
    run(program, "consolidate", case, "-o", pt, "-q")
    back = torch.load(pt, weights_only=False)
    check(back["args"].hidden_size == 3 and back["iteration"] == 10 and
          torch.equal(back["optimizer"]["fp32_from_fp16_params"][0][0], weight.float()) and
          (back["rng_state"][0]["np_rng_state"][1] == state["rng_state"][0]["np_rng_state"][1]).all(),
          "mp_rank_00 through .pt")
    shutil.copytree(rank, rank[:-1] + "1")
    refused(program, case, "two model-parallel ranks", 5, "2 model-parallel ranks", "torch_dist")


def main():
    program, corpus = sys.argv[1:3]
    home = tempfile.mkdtemp(prefix="fc-megatron-")
    try:
        cases = sorted(os.listdir(corpus))
        check(len(cases) > 0, "no cases")
        for name in cases:
            torch_dist(program, os.path.join(corpus, name), home)
        rank_files(program, home)
    finally:
        shutil.rmtree(home)
    print("megatron: %d failed" % len(failures))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
