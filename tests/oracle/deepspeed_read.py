#!/usr/bin/env python3
"""ZeRO checkpoints that DeepSpeed wrote, against what its engine held before it saved (tests/corpus/make_deepspeed.py).

Consolidated (HDF5, read by h5py; safetensors, read by its library), resharded and consolidated back; objects; files
that are missing or of another run.

usage: deepspeed_read.py FSDPCKPT CORPUS       exit 77 without torch, safetensors or h5py
"""
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile

try:
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


def tensors_of(path):
    with open(path, "rb") as f:
        return {n: (t["dtype"], list(t["shape"]), hashlib.sha256(bytes(t["data"])).hexdigest())
                for n, t in safetensors.deserialize(f.read())}


NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "int64": "I64"}


def good_case(program, case, home):
    with open(os.path.join(case, "expected.json")) as f:
        expected = json.load(f)
    out = os.path.join(home, "full.safetensors")
    run(program, "consolidate", case, "-o", out, "-q", "--force")
    found = tensors_of(out)
    for name, want in expected["tensors"].items():
        check(found.get(name) == (NAMES[want["dtype"]], want["shape"], want["sha256"]),
              "%s: %s: %s" % (case, name, found.get(name)))
    zero = expected["stage"] > 0
    extra = [n for n in found if n not in expected["tensors"] and not n.endswith(".step")]
    check(not extra or not zero, "%s: more than there is: %s" % (case, extra))
    steps = [n for n in found if n.endswith(".step")]
    check(not zero or len(steps) == sum(n.endswith(".exp_avg") for n in found), case + ": a step for each parameter")
    # Another cut, and back.
    shards = os.path.join(home, "shards")
    run(program, "reshard", case, "-o", shards, "--dp", "3", "-q")
    again = os.path.join(home, "again.safetensors")
    run(program, "consolidate", shards, "-o", again, "-q", "--force")
    check(tensors_of(again) == found, case + ": resharded and back: not equal")
    shutil.rmtree(shards)
    # Objects, and what torch makes of the whole.
    pt = os.path.join(home, "model.pt")
    run(program, "consolidate", case, "-o", pt, "-q", "--force", "--exclude", "deepspeed.zero.*", "--exclude",
        "optim.loss_scaler")
    state = torch.load(pt, weights_only=True)
    check(state["deepspeed"]["global_steps"] == 2 and state["deepspeed"]["epoch"] == 3 and
          state["deepspeed"]["note"] == "hello", case + ": objects")
    check(all(torch.isfinite(t.float()).all() for t in state["model"].values()), case + ": torch.load")
    if zero:
        groups = state["optim"]["param_groups"]
        names = [n for g in groups for n in g["params"]]
        check(len(groups) == 2 and groups[0]["weight_decay"] == 0.1 and groups[1]["lr"] == 0.01 and
              sorted(names) == sorted(state["optim"]["state"]), case + ": param_groups")
    listed = json.loads(run(program, "inspect", case, "--json"))
    check({t["name"] for t in listed["tensors"]} == set(found), case + ": inspect")


def refused(program, case, what, status, *words):
    r = subprocess.run([program, "consolidate", case, "-o", case + ".h5", "-q"], capture_output=True, text=True)
    check(r.returncode == status and all(w in r.stderr for w in words) and r.stderr.count("\n") == 1,
          "%s: exit %d: %s" % (what, r.returncode, r.stderr.strip()))
    check(not os.path.exists(case + ".h5"), what + ": something was written")


def bad_cases(program, corpus, home):
    case, step = os.path.join(home, "bad"), os.path.join(home, "bad", "global_step2")

    def fresh(name):
        shutil.rmtree(case, True)
        shutil.copytree(os.path.join(corpus, "0.19.8-" + name), case)

    def optim(rank, prefix=""):
        return os.path.join(step, "%szero_pp_rank_%d_mp_rank_00_optim_states.pt" % (prefix, rank))

    fresh("zero3-subgroups")
    os.remove(optim(2))
    refused(program, case, "an optimizer file in the middle missing", 3, "rank 2 is missing")
    fresh("zero3-subgroups")
    os.remove(optim(3))
    refused(program, case, "the last optimizer file missing", 3, "cut over 4 ranks", "3 files")
    fresh("zero3-subgroups")
    os.remove(os.path.join(step, "zero_pp_rank_3_mp_rank_00_model_states.pt"))
    refused(program, case, "the last model file missing", 3, "4 files", "3 *_model_states.pt")
    fresh("zero2-bf16")
    os.remove(os.path.join(step, "mp_rank_00_model_states.pt"))
    refused(program, case, "the model file missing", 3, "_model_states.pt is missing")
    fresh("zero2-bf16")
    os.remove(optim(2, "bf16_"))
    refused(program, case, "ZeRO-2: the last file missing", 3, "cut over 3 ranks")
    fresh("zero2-bf16")
    other = os.path.join(corpus, "0.19.8-zero1-bf16", "global_step2")
    shutil.copy(os.path.join(other, "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"), optim(1, "bf16_"))
    refused(program, case, "a file of another run", 3, "rank_1_")
    fresh("zero2-bf16")
    with open(optim(1, "bf16_"), "r+b") as f:
        f.truncate(3000)
    refused(program, case, "a file cut off", 3, "rank_1_")
    fresh("zero2-bf16")
    with open(os.path.join(case, "latest"), "w") as f:
        f.write("global_step9")
    refused(program, case, "latest names nothing", 3, "global_step9")
    fresh("zero2-bf16")
    os.remove(os.path.join(case, "latest"))
    run(program, "inspect", case)
    shutil.copytree(step, step + "0")
    refused(program, case, "two steps and no latest", 2, "2 steps")
    run(program, "inspect", step)
    shutil.copy(os.path.join(step, "mp_rank_00_model_states.pt"), os.path.join(step, "mp_rank_01_model_states.pt"))
    refused(program, step, "tensor parallel", 5, "mp_rank_01", "ds_to_universal")


def main():
    program, corpus = sys.argv[1:3]
    home = tempfile.mkdtemp(prefix="fc-ds-")
    try:
        cases = [n for n in sorted(os.listdir(corpus)) if n[0].isdigit()]
        check(len(cases) >= 6, "cases: %s" % cases)
        for name in cases:
            good_case(program, os.path.join(corpus, name), home)
        bad_cases(program, corpus, home)
    finally:
        shutil.rmtree(home)
    print("deepspeed: %d failed" % len(failures))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
