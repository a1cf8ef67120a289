#!/usr/bin/env python3
"""Directories whose files have only a number in their names: torch_checkpointing, torch's _experimental checkpointer, and loops
that save model_<rank>.pt. The corpus is compared with the tensors that torch gathered. Such a number may be that of a step, so
files that do not show that they are of ranks stay separate, and damaged or hostile metadata.pkl must be refused.

usage: numbered.py FSDPCKPT CORPUS        exit 77 without torch
"""
import json
import os
import pickle
import shutil
import struct
import sys

from pt import load, refused, run_tests, save  # exits with 77 without torch

import torch

from checks import must, must_run
from pt_ranks import flat, unreadable
from torch_values import must_equal

OTHER = {"dataloader", "misc_state"}  # each rank's own


def place(corpus, case, to, *files):
    """A copy of a case without the truth."""
    to.mkdir(parents=True)
    for path in (corpus / "pt" / case).rglob("*"):
        name = path.relative_to(corpus / "pt" / case)
        if path.is_file() and name.name != "full.pt" and (not files or name.name in files):
            (to / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, to / name)
    return to


def truth_of(corpus, case):
    value = torch.load(corpus / "pt" / case / "full.pt", weights_only=False)
    return flat(value)


def must_be(path, want, what):
    got = {k: v for k, v in flat(load(path)).items() if k[0] not in OTHER}
    must(set(want) == set(got), what, "differs in", set(want) ^ set(got))
    for key, value in want.items():
        must_equal(value, got[key], "%s %s" % (what, key))


def every_command_reads_the_corpus(program, home, corpus):
    for case in ("tc-default", "tc-2d", "tc-safetensors", "tc-boxes", "experimental", "loop"):
        source, want = place(corpus, case, home / case), truth_of(corpus, case)
        whole = home / (case + ".pt")
        must_run(program, "consolidate", source, "-o", whole, "-q")
        must_be(whole, want, case)
        must_run(program, "verify", source)
        must_run(program, "diff", source, whole)
        must_run(program, "check", source, ok=(0, 1))
        shown = json.loads(must_run(program, "inspect", source, "--json").stdout)
        names = {t["name"] for t in shown["tensors"]}
        must(names == {".".join(k) for k, v in want.items() if isinstance(v, torch.Tensor)}, case, names)
        for to in ("dcp", "h5"):
            made = home / ("%s-%s" % (case, to))
            must_run(program, "reshard", source, "-o", made, "--to", to, "--dp", "3", "-q")
            must_run(program, "consolidate", made, "-o", home / "again.pt", "-q", "--force")
            must_be(home / "again.pt", want, case + " through " + to)
        must_run(program, "convert", source, "-o", home / (case + ".ranks"), "--to", "pt", "-q")
        must_run(program, "diff", source, home / (case + ".ranks"))
        name = next(k for k, v in want.items() if isinstance(v, torch.Tensor) and v.dim() == 2)
        must_run(program, "extract", source, ".".join(name), "-o", home / (case + ".npy"))
    got = load(home / "tc-2d.pt")["dataloader"]
    must(got == {"rank_%d" % r: {"next": 100 + r} for r in range(4)}, got)
    got = load(home / "tc-safetensors.pt")["misc_state"]
    must(got == {"lr": 0.5, "epochs": [1, 2], "name": "run", "of": 0, "of.rank_1": 1, "of.rank_2": 2, "of.rank_3": 3}, got)
    must_run(program, "consolidate", home / "tc-2d" / "metadata.pkl", "-o", home / "named.pt", "-q")
    must_be(home / "named.pt", truth_of(corpus, "tc-2d"), "metadata.pkl")
    must_run(program, "consolidate", home / "tc-default" / "model_*.pt", "-o", home / "named.pt", "-q", "--force")
    must_be(home / "named.pt", {k[1:]: v for k, v in truth_of(corpus, "tc-default").items() if k[0] == "model"}, "model_*.pt")


def other_names_are_read(program, home, corpus):
    """Separators, leading zeros, and names with the number of ranks, which shows that the last file is missing."""
    for i, name in enumerate(("model-%d.pt", "ckpt.%02d.pth", "model_%d_of_3.pt", "model-%05d-of-00003.bin", "rank_%d_of_3.pt",
                              "run_rank-%08d-of-00000003.pth")):
        loose = home / ("loose%d" % i)
        loose.mkdir()
        for rank in range(3):
            shutil.copyfile(corpus / "pt" / "loop" / ("model_%d.pt" % rank), loose / (name % rank))
        must_run(program, "consolidate", loose, "-o", home / "loose.pt", "-q", "--force")
        must_be(home / "loose.pt", truth_of(corpus, "loop"), name)
        (loose / (name % 2)).unlink()
        if "of" in name:
            refused(program, loose, 3, name % 2, "missing")
        else:
            must_run(program, "consolidate", loose, "-o", home / "loose.pt", "-q", "--force", ok=(3,))


def steps_are_not_ranks(program, home, corpus):
    """Plain tensors do not show what the number is. A pattern says that it is a rank."""
    for name, other in (("same", 0.0), ("differ", 1.0)):
        (home / name).mkdir()
        for number in range(2):
            save({"w": torch.full((4, 2), number * other), "step": 3}, home / name / ("checkpoint_%d.pt" % number))
        refused(program, home / name, 3, "checkpoint_0.pt, checkpoint_1.pt; name one of them")
    must_run(program, "consolidate", home / "same" / "checkpoint_*.pt", "-o", home / "same.pt", "-q")
    must_equal({"w": torch.zeros(4, 2), "step": 3}, load(home / "same.pt"), "same")
    unreadable(program, home / "differ" / "checkpoint_*.pt", "w", "differs", "--tp-plan")
    (home / "plan.json").write_text('{"q_proj": "colwise"}')
    for rank in range(2):
        save({"q_proj.weight": torch.full((2, 3), float(rank))}, home / "differ" / ("checkpoint_%d.pt" % rank))
    must_run(program, "consolidate", home / "differ" / "checkpoint_*.pt", "-o", home / "tp.pt", "--tp-plan", home / "plan.json", "-q")
    must_equal({"q_proj.weight": torch.tensor([[0.0] * 3] * 2 + [[1.0] * 3] * 2)}, load(home / "tp.pt"), "tp")
    steps = home / "steps"
    steps.mkdir()
    for step in range(3):  # those of rank 0 at three steps
        shutil.copyfile(corpus / "pt" / "loop" / "model_0.pt", steps / ("model_%d.pt" % step))
    refused(program, steps, 3, "model_1.pt", "not those of rank 1")
    (steps / "model_1.pt").unlink()
    (steps / "model_2.pt").rename(steps / "model_500.pt")
    refused(program, steps, 3, "name one of them")


def missing_files_are_named(program, home, corpus):
    loop = place(corpus, "loop", home / "loop")
    (loop / "model_1.pt").unlink()
    refused(program, loop, 3, "model_1.pt", "missing")
    both = place(corpus, "tc-default", home / "both")
    shutil.copyfile(both / "optimizer_1.pt", both / "optimizer_2.pt")
    refused(program, both, 3, "optimizer_<rank>.pt", "model_<rank>.pt")
    for name in ("optimizer_0.pt", "optimizer_1.pt", "optimizer_2.pt"):
        (both / name).unlink()
    must_run(program, "consolidate", both, "-o", home / "model.pt", "-q")
    listed = place(corpus, "tc-2d", home / "listed")
    (listed / "model_3.pt").unlink()
    refused(program, listed, 3, "model_3.pt", "missing")


def change(folder, edit):
    path = folder / "metadata.pkl"
    value = pickle.loads(path.read_bytes())
    value = edit(value) or value
    path.write_bytes(pickle.dumps(value))
    return folder


def first(value, item="model"):
    return next(iter(value["metadata"][item]["nested_path_to_metadata"].values()))[0]["sharding_metadata"]


class Runs:
    def __reduce__(self):
        return os.system, ("touch /tmp/never",)


def metadata_is_not_trusted(program, home, corpus):
    def edited(name, edit, case="tc-2d"):
        return change(place(corpus, case, home / name), edit)

    def layout(value, rank, path):
        value["metadata"]["model"]["rank_to_layout_info"][rank] = {"file_path": path, "serialization_format": {}}

    refused(program, edited("up", lambda v: layout(v, 1, "../model_1.pt")), 3, "../model_1.pt", "outside of the directory")
    refused(program, edited("twice", lambda v: layout(v, 1, "model_0.pt")), 3, "model_0.pt", "the same file")
    refused(program, edited("world", lambda v: {**v, "world_size": 1 << 40}), 3, "number of ranks")
    refused(program, edited("fewer", lambda v: {**v, "world_size": 3}), 3, "a rank that the job did not have")
    refused(program, edited("version", lambda v: {**v, "version": "3.0"}), 5, "newer torch_checkpointing")
    refused(program, edited("runs", lambda v: {**v, "more": Runs()}), 3, "system", "hostile")
    must(not os.path.exists("/tmp/never"), "it ran")
    edited("shape", lambda v: first(v)["data"].update(global_shape=[12, 6]))
    refused(program, home / "shape", 3, "metadata.pkl", "another part of the tensor")
    edited("size", lambda v: first(v)["data"].update(global_shape=[1 << 62, 1 << 62]))
    refused(program, home / "size", 3, "metadata.pkl")
    edited("local", lambda v: first(v)["data"].update(global_shape=[64, 6]), "tc-safetensors")
    refused(program, home / "local", 3, "0.weight", "shape that its placements give")
    edited("mesh", lambda v: first(v)["data"]["mesh_spec"].update(mesh_shape=(2, 3)))
    refused(program, home / "mesh", 3, "the mesh of a tensor is invalid")
    edited("boxes", lambda v: first(v)["data"].update(local_offsets=((0, 0), (4, 0))), "tc-boxes")
    refused(program, home / "boxes", 3, "model_0.pt")
    unreadable(program, edited("class", lambda v: first(v).update(type="Mine"), "tc-safetensors"), "class of the training program")
    cut = place(corpus, "tc-2d", home / "cut")
    (cut / "metadata.pkl").write_bytes((cut / "metadata.pkl").read_bytes()[:-200])
    refused(program, cut, 3, "metadata.pkl")
    foreign = place(corpus, "loop", home / "foreign")  # somebody else's metadata.pkl
    (foreign / "metadata.pkl").write_bytes(pickle.dumps({"vocabulary": 7}))
    must_run(program, "consolidate", foreign, "-o", home / "foreign.pt", "-q")


def other_kinds_of_files_are_not_trusted(program, home, corpus):
    source = place(corpus, "tc-safetensors", home / "json")
    (source / "misc_state_1.json").write_text('{"lr": NaN}')
    refused(program, source, 3, "misc_state_1.json", "not JSON")
    source = place(corpus, "tc-safetensors", home / "long")
    path = source / "weights" / "model_2.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    refused(program, source, 3, "model_2.safetensors")
    path.write_bytes(struct.pack("<Q", 20) + b'{"a": {"dtype": 1}} ' + b"\0" * 8)
    refused(program, source, 3, "model_2.safetensors")


def older_metadata_is_read(program, home, corpus):
    """Version 1.0 lists all tensors in one dict."""
    def older(value):
        new = {"metadata": {}, "rank_to_layout_info_mappings": {r: {} for r in range(value["world_size"])},
               "world_size": value["world_size"]}
        for item, content in value["metadata"].items():
            for rank, layout in content["rank_to_layout_info"].items():
                new["rank_to_layout_info_mappings"][rank][item] = layout
            for path, groups in content["nested_path_to_metadata"].items():
                new["metadata"][json.dumps([item] + json.loads(path))] = groups
        return new

    for case in ("tc-2d", "tc-safetensors"):
        source = change(place(corpus, case, home / case), older)
        must_run(program, "consolidate", source, "-o", home / (case + ".pt"), "-q")
        must_be(home / (case + ".pt"), truth_of(corpus, case), case)


if __name__ == "__main__":
    sys.exit(run_tests([every_command_reads_the_corpus, other_names_are_read, steps_are_not_ranks, missing_files_are_named, metadata_is_not_trusted,
                        other_kinds_of_files_are_not_trusted, older_metadata_is_read]))
