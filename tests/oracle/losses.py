#!/usr/bin/env python3
"""Data that other tools lose silently is kept here, or refused with one line.

torch's HF consolidation exits with 0 but writes zeros for a missing shard file, shortens a tensor whose last chunk is missing,
turns 0-dimensional tensors into 0.0 and crashes on bool. Other tools write tied weights twice or drop one, drop nested
optimizer state, or read a replicated tensor as chunks.

usage: losses.py FSDPCKPT CORPUS      exit 77 without torch, h5py or safetensors
"""
import os
import shutil
import subprocess
import sys
import tempfile

try:
    import h5py
    import numpy
    import reference
    from checks import check, finish
    from torch_values import check_equal
    import torch
    from safetensors.torch import save_file
except ImportError as e:
    print("skipped: %s" % e)
    sys.exit(77)

TARGETS = ["dcp", "h5", "pt", "safetensors"]


class Losses:
    def __init__(self, program, corpus, home):
        self.program, self.corpus, self.home, self.n = program, corpus, home, 0

    def run(self, *argv):
        return subprocess.run([self.program, *argv], capture_output=True, text=True)

    def new(self, name):
        self.n += 1
        return os.path.join(self.home, "%d-%s" % (self.n, name))

    def converted(self, source, form, command="convert"):
        out = self.new(form)
        result = self.run(command, source, "-o", out, "--to", form, "-q")
        check(result.returncode == 0, "%s %s --to %s: %s" % (command, os.path.basename(source), form, result.stderr))
        return out

    def refused(self, source, what, names):
        """Expects exit status 3, one line that names the file or the tensor, and no target."""
        for form in TARGETS:
            out = self.new("x")
            result = self.run("consolidate", source, "-o", out, "--to", form)
            line = result.stderr.splitlines()[-1] if result.stderr else ""
            check(result.returncode == 3 and any(n in line for n in names) and not os.path.exists(out), "%s is refused for %s: %s" % (what, form, line.strip()[-160:]))

    def warned(self, source):
        said = self.run("consolidate", source, "-o", self.new("x.h5")).stderr
        check("do not record their number" in said, "a last shard that may be missing is spoken of: %s" % said)

    def missing_files(self):
        for case in ("dcp-torch2.15.0-fsdp2", "st-torch2.15.0-1d", "st-torch2.15.0-2d"):
            files = sorted(f for f in os.listdir(os.path.join(self.corpus, case)) if f.endswith((".distcp", "tensors")))
            for gone in (files[1], files[-1]): # one in the middle, and the last one
                copy = self.new(case)
                shutil.copytree(os.path.join(self.corpus, case), copy)
                os.remove(os.path.join(copy, gone))
                if case == "st-torch2.15.0-1d" and gone == files[-1]:
                    self.warned(copy) # these files record neither the number of files nor the size of the tensors
                else:
                    self.refused(copy, "%s without %s" % (case, gone), [gone, "tensor"])
        for form in ("h5", "pt", "safetensors"):
            made = self.converted(os.path.join(self.corpus, "dcp-torch2.15.0-2d-dp2tp2"), form)
            gone = sorted(os.listdir(made))[-1]
            os.remove(os.path.join(made, gone))
            self.refused(made, "%s shards without %s" % (form, gone), [gone, "rank 3", "tensor"])

    def odd_values(self):
        state = {
            "zero": torch.tensor(3.5),
            "count": torch.tensor(2**40 + 1),
            "flag": torch.tensor(True),
            "mask": torch.tensor([True, False, True, True, False]),
            "bytes": torch.arange(7, dtype=torch.uint8),
            "ids": torch.arange(-5, 6, dtype=torch.int16).reshape(11, 1),
            "none": torch.empty(0, 3),
            "w": torch.rand(5, 3),
            "optim": {"state": {"w": {"step": torch.tensor(9.0), "exp_avg": torch.rand(5, 3)}},
                      "param_groups": [{"lr": 1e-4, "betas": (0.9, 0.95), "params": ["w"]}, {"lr": 2e-4, "params": []}]},
        }
        truth = reference.flatten(state, "", {})
        source = self.new("odd.pt")
        torch.save(state, source)
        for form in TARGETS:
            made = self.converted(source, form)
            cut = self.new(form)
            ok = self.run("reshard", made, "-o", cut, "--to", form, "--dp", "3", "-q").returncode == 0
            back = self.converted(cut, "pt", "consolidate")
            for what, kind, path in (("full", form, made), ("over 3 ranks", form, cut), ("and back", "pt", back)):
                try:
                    reference.compare_leaves(reference.load(kind, path, truth), truth,
                                             kind == "safetensors")
                except Exception as e:
                    check(False, "0-dim, integer, bool and nested values as %s, %s: %s" % (form, what, e))
                    ok = False
            check(ok, "0-dim, integer, bool and nested values as %s" % form)

    def replicated(self):
        source = os.path.join(self.corpus, "dcp-torch2.15.0-replicated")
        truth = reference.load_dcp(source)
        for form in TARGETS:
            made = self.converted(source, form)
            again = self.converted(made, "dcp", "consolidate")
            try:
                reference.compare_leaves(reference.load(form, made, truth), truth)
                reference.compare_leaves(reference.load_dcp(again), truth)
                check(True, "replicated tensors as %s" % form)
            except Exception as e:
                check(False, "replicated tensors as %s: %s" % (form, e))

    def foreign_objects(self):
        """dcp.load gets a value that torch cannot express as a dict of its type name, decoded value and bytes."""
        plain, described = self.new("plain.h5"), self.new("described.safetensors")
        with h5py.File(plain, "w") as f:
            f["w"] = numpy.arange(6.0)
            f.attrs["keras_version"] = "3.4.1"
            f["vocabulary"] = numpy.array([b"a", b"bc"], dtype="S2")
        save_file({"w": torch.rand(3)}, described, metadata={"format": "pt", "license": "MIT"})
        for source, name, text in ((plain, "@attributes", "3.4.1"), (described, "__metadata__", "MIT")):
            made = self.converted(source, "dcp")
            loaded = reference.load_dcp(made)
            values = {n: v[1] for n, v in loaded.items() if v[0] == "object"}
            check(loaded["w"][0] == "tensor" and any(text in v for v in values.values()) and
                  any(n.endswith(".encoding") for n in values) and any(n.endswith(".data") for n in values),
                  "objects of %s in DCP: %s" % (os.path.basename(source), sorted(values)))
            back = self.converted(made, "h5")
            again = self.run("extract", back, name, "--to", "json")
            check(text in again.stdout, "and back: %s" % again.stderr)

    def tied(self):
        weight = torch.rand(6, 4)
        source = self.new("tied.pt")
        torch.save({"embed": weight, "head": weight, "row": weight[2]}, source)
        for form in TARGETS:
            made = self.converted(source, form)
            state = torch.load(self.converted(made, "pt"), weights_only=True)
            check_equal({"embed": weight, "head": weight, "row": weight[2]}, state, "tied weights through %s" % form)
        state = torch.load(self.converted(source, "pt"), weights_only=True)
        check(state["embed"].data_ptr() == state["head"].data_ptr() and
              os.path.getsize(source) * 2 > os.path.getsize(self.converted(source, "pt")),
              "tied weights stay one storage in torch.save")


def main():
    program, corpus = os.path.abspath(sys.argv[1]), sys.argv[2]
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="fc-losses-", dir=memory) as home:
        losses = Losses(program, corpus, home)
        losses.missing_files()
        losses.odd_values()
        losses.replicated()
        losses.tied()
        losses.foreign_objects()
    return finish("losses")


if __name__ == "__main__":
    sys.exit(main())
