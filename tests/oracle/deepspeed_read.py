#!/usr/bin/env python3
"""ZeRO checkpoints that DeepSpeed wrote, compared with its engine before it saved (tests/corpus/make_deepspeed.py).

They are consolidated (and read with the safetensors library), resharded and consolidated back. Also objects; missing, swapped
and foreign files; and the output of ds_to_universal.py.

usage: deepspeed_read.py FSDPCKPT CORPUS       exit 77 without torch or safetensors
"""
import hashlib
import json
import os
import shutil
import sys
import tempfile
import types

try:
    import safetensors
    import torch
    from checks import check, finish, refused, run
except ImportError as e:
    print("skipped: %s" % e)
    sys.exit(77)


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
    # To another layout and back.
    shards = os.path.join(home, "shards")
    run(program, "reshard", case, "-o", shards, "--dp", "3", "-q")
    again = os.path.join(home, "again.safetensors")
    run(program, "consolidate", shards, "-o", again, "-q", "--force")
    check(tensors_of(again) == found, case + ": resharded and back: not equal")
    shutil.rmtree(shards)
    # Objects, and the whole checkpoint loaded by torch.
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
        # An optimizer changes its steps in place.
        places = [s["step"].data_ptr() for s in state["optim"]["state"].values() if isinstance(s["step"], torch.Tensor)]
        check(len(set(places)) == len(places), case + ": steps share memory")
    listed = json.loads(run(program, "inspect", case, "--json").stdout)
    check({t["name"] for t in listed["tensors"]} == set(found), case + ": inspect")


def bad_cases(program, corpus, home):
    case, step = os.path.join(home, "bad"), os.path.join(home, "bad", "global_step2")

    def fresh(name):
        shutil.rmtree(case, True)
        shutil.copytree(os.path.join(corpus, "0.19.8-" + name), case)

    def optim(rank, prefix=""):
        return os.path.join(step, "%szero_pp_rank_%d_mp_rank_00_optim_states.pt" % (prefix, rank))

    fresh("zero3-subgroups")
    os.remove(optim(2))
    refused(program, case, "an optimizer file in the middle missing", "rank 2 is missing")
    fresh("zero3-subgroups")
    os.remove(optim(3))
    refused(program, case, "the last optimizer file missing", "4 ranks wrote", "3 files")
    fresh("zero3-subgroups")
    os.remove(os.path.join(step, "zero_pp_rank_3_mp_rank_00_model_states.pt"))
    refused(program, case, "the last model file missing", "4 files", "3 files *_model_states.pt")
    fresh("zero2-bf16")
    os.remove(os.path.join(step, "mp_rank_00_model_states.pt"))
    refused(program, case, "the model file missing", "_model_states.pt is missing")
    fresh("zero2-bf16")
    os.remove(optim(2, "bf16_"))
    refused(program, case, "ZeRO-2: the last file missing", "3 ranks wrote")
    fresh("zero2-bf16")
    other = os.path.join(corpus, "0.19.8-zero1-bf16", "global_step2")
    shutil.copy(os.path.join(other, "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"), optim(1, "bf16_"))
    refused(program, case, "a file of another run", "rank_1_")
    fresh("zero2-bf16")
    with open(optim(1, "bf16_"), "r+b") as f:
        f.truncate(3000)
    refused(program, case, "a file cut off", "rank_1_")
    fresh("zero2-bf16")
    with open(optim(1, "bf16_"), "r+b") as f:
        f.seek(f.read().rindex(b"byteorder"))
        f.write(b"\x1b\n\xff")
    refused(program, case, "a message that quotes what would move a terminal", "rank_1_", "??\\xffeorder")
    fresh("zero2-bf16")
    with open(os.path.join(case, "latest"), "w") as f:
        f.write("global_step9")
    refused(program, case, "latest names nothing", "global_step9")
    fresh("zero2-bf16")
    os.remove(os.path.join(case, "latest"))
    run(program, "inspect", case)
    shutil.copytree(step, step + "0")
    refused(program, case, "two steps and no latest", "2 steps", status=2)
    run(program, "inspect", step)
    shutil.copy(os.path.join(step, "mp_rank_00_model_states.pt"), os.path.join(step, "mp_rank_01_model_states.pt"))
    refused(program, step, "tensor parallel", "mp_rank_01", "ds_to_universal", status=5)


def swap(a, b):
    os.rename(a, a + ".x")
    os.rename(b, a)
    os.rename(a + ".x", b)


class StandIn:
    """Stands for DeepSpeed's classes. Objects are loaded and saved again unchanged."""

    def __new__(cls, *arguments):
        made = object.__new__(cls)
        made.arguments = arguments
        return made

    def __init__(self, *arguments):
        pass

    def __reduce__(self):
        return type(self), self.arguments, self.__dict__


def stand_in_for_deepspeed():
    for module, name in (("runtime.zero.config", "ZeroStageEnum"), ("runtime.fp16.loss_scaler", "LossScaler"),
                         ("utils.tensor_fragment", "fragment_address")):
        full = "deepspeed." + module
        for i in range(full.count(".") + 1):
            part = full.rsplit(".", i)[0]
            sys.modules.setdefault(part, types.ModuleType(part))
        setattr(sys.modules[full], name, type(name, (StandIn,), {"__module__": full}))


def from_device(path, device):
    """Rewrites a file as a run on GPUs would: only the device of the storages changes."""
    state = torch.load(path, weights_only=False)
    tag, torch.serialization.location_tag = torch.serialization.location_tag, lambda storage: device
    torch.save(state, path)
    torch.serialization.location_tag = tag


def swapped_ranks(program, corpus, home):
    case, step = os.path.join(home, "swapped"), os.path.join(home, "swapped", "global_step2")

    def fresh(name, prefix):
        shutil.rmtree(case, True)
        shutil.copytree(os.path.join(corpus, "0.19.8-" + name), case)
        ranks = json.load(open(os.path.join(case, "expected.json")))["ranks"]
        return [os.path.join(step, "%szero_pp_rank_%d_mp_rank_00_optim_states.pt" % (prefix, r)) for r in range(ranks)]

    for name, prefix in (("zero1-bf16", "bf16_"), ("zero2-bf16", "bf16_"), ("zero2-fp16", "")):
        files = fresh(name, prefix)
        swap(files[0], files[-1])
        refused(program, case, name + ": ranks swapped", "rank_0_", "swapped")
    files = fresh("zero2-bf16", "bf16_")
    swap(files[1], files[2])
    refused(program, case, "ZeRO-2: two other ranks swapped", "rank_1_", "swapped")
    stand_in_for_deepspeed()
    out = os.path.join(home, "out.h5")
    for devices, wrong in (([0, 1, 2, 3], None), ([0, 1, 0, 1], None), ([0, 0, 0, 0], None), ([0, 0, 1, 1], None),
                           ([4, 6, 4, 6], None), ([1, 0, 2, 3], 0), ([0, 2, 1, 3], 1), ([0, 1, 1, 0], 2)):
        for rank, path in enumerate(fresh("zero3-subgroups", "")):
            from_device(path, "cuda:%d" % devices[rank])
        said = run(program, "consolidate", case, "-o", out, "--force").stderr
        check("renamed or swapped" in said if wrong is not None else "renamed" not in said,
              "ZeRO-3 on devices %s: %s" % (devices, said))
        check(wrong is None or "zero_pp_rank_%d_" % wrong in said, "ZeRO-3 on devices %s: %s" % (devices, said))


def odd_keys(program, corpus, home):
    """Keys of dicts that hold other values: integers are kept, others are refused with one line."""
    case = os.path.join(home, "keys")
    stand_in_for_deepspeed()
    for name, file, where in (("zero2-bf16", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
                               lambda s: s["optimizer_state_dict"]["base_optimizer_state"]["param_groups"][0]),
                              ("zero2-bf16", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", lambda s: s["optimizer_state_dict"]),
                              ("zero2-bf16", "mp_rank_00_model_states.pt", lambda s: s)):  # the caller's client_state
        for key, good in ((7, True), (None, False), ((1, 2), False), ("a\0b", False)):
            shutil.rmtree(case, True)
            shutil.copytree(os.path.join(corpus, "0.19.8-" + name), case)
            path = os.path.join(case, "global_step2", file)
            state = torch.load(path, weights_only=False)
            where(state)[key] = "seven"
            torch.save(state, path)
            if good:
                objects = json.loads(run(program, "inspect", case, "--json").stdout)["objects"]
                check([o["value"] for o in objects if o["name"].split(".")[-1] == "7"] == ["seven"], "%s: a number as a key" % name)
            else:
                refused(program, case, "%s: %r as a key" % (name, key), file, "a key that is neither a string", status=5)


def universal(program, corpus, home):
    """Missing and swapped files; and several model-parallel ranks, whose parameters are whole in this format."""
    case = os.path.join(home, "universal")
    step = os.path.join(case, "global_step2_universal")

    def fresh(name):
        shutil.rmtree(case, True)
        shutil.copytree(os.path.join(corpus, "0.19.8-%s-universal" % name), case)
        return os.path.join(step, "zero")

    for name in ("zero1-bf16", "zero3-bf16"):
        zero = fresh(name)
        os.remove(os.path.join(zero, "l1.weight", "fp32.pt"))
        refused(program, case, name + ": a master missing", "l1.weight/fp32.pt: the file is missing")
        zero = fresh(name)
        shutil.rmtree(os.path.join(zero, "l1.weight"))
        refused(program, case, name + ": a parameter missing", "l1.weight/fp32.pt: the file is missing")
        zero = fresh(name)
        shutil.copy(os.path.join(zero, "l1.weight", "fp32.pt"), os.path.join(zero, "cube", "fp32.pt"))
        refused(program, case, name + ": the master of another", "cube/fp32.pt", "cube")
        zero = fresh(name)
        os.remove(os.path.join(zero, "optimizer_state.pt"))
        refused(program, case, name + ": no optimizer_state.pt", "optimizer_state.pt: the file is missing")
        fresh(name)
        other = os.path.join(corpus, "0.19.8-zero1-bf16", "global_step2")
        shutil.copy(os.path.join(other, "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"), step)
        refused(program, case, name + ": mixed with an ordinary one", "two checkpoints are mixed")
    fresh("zero3-bf16")
    os.remove(os.path.join(step, "zero_pp_rank_1_mp_rank_00_model_states.pt"))
    refused(program, case, "a model file missing", "2 ranks, but 1 files *_model_states.pt")

    zero = fresh("zero1-bf16")
    with open(os.path.join(case, "expected.json")) as f:
        expected = json.load(f)["tensors"]
    shutil.copy(os.path.join(step, "mp_rank_00_model_states.pt"), os.path.join(step, "mp_rank_01_model_states.pt"))
    out = os.path.join(home, "mp.safetensors")
    run(program, "consolidate", case, "-o", out, "-q")
    found = tensors_of(out)
    check({n for n in found if not n.endswith(".step")} == set(expected), "model-parallel: names")
    for name, want in expected.items():
        if want["dtype"] == "float32":
            check(found.get(name) == ("F32", want["shape"], want["sha256"]), "model-parallel: " + name)
    shutil.rmtree(os.path.join(zero, "frozen.weight"))
    refused(program, case, "model-parallel: what no one has whole", "frozen.weight", "2 model-parallel ranks", status=5)


def links(program, corpus, home):
    case, step = os.path.join(home, "links"), os.path.join(home, "links", "global_step2")
    shutil.copytree(os.path.join(corpus, "0.19.8-zero1-bf16"), case)
    path = os.path.join(step, "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt")
    os.rename(path, os.path.join(home, "elsewhere.pt"))
    os.symlink(os.path.join(home, "elsewhere.pt"), path)
    refused(program, case, "a link that leads elsewhere", "symbolic link")
    run(program, "inspect", case, "--follow-external")


def main():
    program, corpus = sys.argv[1:3]
    home = tempfile.mkdtemp(prefix="fc-ds-")
    try:
        cases = [n for n in sorted(os.listdir(corpus)) if n[0].isdigit()]
        check(len(cases) >= 8, "cases: %s" % cases)
        for name in cases:
            good_case(program, os.path.join(corpus, name), home)
        bad_cases(program, corpus, home)
        swapped_ranks(program, corpus, home)
        odd_keys(program, corpus, home)
        universal(program, corpus, home)
        links(program, corpus, home)
    finally:
        shutil.rmtree(home)
    return finish("deepspeed")


if __name__ == "__main__":
    sys.exit(main())
