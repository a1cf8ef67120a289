#!/usr/bin/env python3
"""Converts every source format and layout to every target format, loads it with the format's own library, and compares all bytes.

The sources are checkpoints that torch saved (tests/corpus) and conversions of them. The expected values come from torch's own
loader, checked against the sums taken before saving. Also A -> B -> A gives the same content, and consolidate and reshard work
between all formats.

usage: matrix.py FSDPCKPT CORPUS [LAYOUT]      exit 77 without torch, h5py or safetensors
"""
import hashlib
import io
import json
import os
import shutil
import struct
import sys
import tempfile
import zipfile

try:
    import reference
except ImportError as e:
    print("skipped: %s" % e)
    sys.exit(77)

from checks import Failure, must_run
from matrix_table import FORMATS, LAYOUTS

NAMES = [name for name, _, _ in FORMATS]
EXTENSION = {"dcp": "", "h5": ".h5", "pt": ".pt", "safetensors": ".safetensors"}


def truth_of(case):
    found = reference.load_dcp(case)
    with open(os.path.join(case, "expected.json"), encoding="utf-8") as f:
        expected = json.load(f)
    for want in expected["tensors"].values():
        name = ".".join(map(str, want["path"]))
        if hashlib.sha256(found[name][3]).hexdigest() != want["sha256"]:
            raise Failure("%s: torch itself loads other bytes of %s than it saved" % (case, name))
    return found


def check_items(path):
    """Checks where each item of our DCP begins and the CRCs of its archive. torch checks neither."""
    for index, info in reference.dcp.FileSystemReader(path).read_metadata().storage_data.items():
        with open(os.path.join(path, info.relative_path), "rb") as f:
            f.seek(info.offset)
            item = f.read(info.length)
        with zipfile.ZipFile(io.BytesIO(item)) as z:
            bad = z.testzip()
            data = [i for i in z.infolist() if i.filename == "archive/data/0"]
        start = data[0].header_offset if data else 0
        start += 30 + sum(struct.unpack("<HH", item[start + 26:start + 30]))
        if bad or info.offset % 64 or (data and start % 64):
            raise Failure("%s: item at %d, data at %d in it, damaged: %s" % (index.fqn, info.offset, start, bad))


class Matrix:
    def __init__(self, program, home, layout, case):
        self.program, self.home = program, home
        self.full = layout == "full"
        self.truth = truth_of(case)
        self.count = 0
        self.sources = {"dcp": case}
        for form in NAMES:
            if form != "dcp":
                self.sources[form] = self.make("source", form, "convert", case)

    def path(self, name, form, full):
        return os.path.join(self.home, name + "-" + form + (EXTENSION[form] if full else ""))

    def make(self, name, form, command, source, *options, full=None):
        path = self.path(name, form, self.full if full is None else full)
        must_run(self.program, command, source, "-o", path, "--to", form, "-q", *options)
        return path

    def check(self, form, path, what):
        if form == "dcp":
            check_items(path)
        try:
            reference.compare_leaves(reference.load(form, path, self.truth), self.truth, form == "safetensors")
        except Exception as e: # any exception of the library is our failure
            raise Failure("%s: %s: %s" % (what, type(e).__name__, e))
        self.count += 1
        remove(path)

    def convert_all(self):
        for a in NAMES:
            for b in NAMES:
                target = self.make("b", b, "convert", self.sources[a])
                back = self.make("a", a, "convert", target)
                self.check(b, target, "%s -> %s" % (a, b))
                self.check(a, back, "%s -> %s -> %s" % (a, b, a))

    def recut_all(self, options, plan):
        """The other commands between all formats: consolidate, then reshard."""
        for a in NAMES:
            for b in NAMES:
                full = self.make("full", b, "consolidate", self.sources[a], full=True)
                if options:
                    cut = self.make("cut", a, "reshard", full, *options, *(plan if "--tp" in options else []),
                                    full=False)
                    self.check(a, cut, "%s -> full %s -> sharded %s" % (a, b, a))
                self.check(b, full, "%s -> full %s" % (a, b))


def remove(path):
    if os.path.isdir(path):
        shutil.rmtree(path)
    else:
        os.remove(path)


def can_fail():
    """The comparison finds a wrong bit, size or name."""
    good = {"a": ("tensor", "int8", (2,), b"\0\1"), "b": ("object", "1")}
    for bad in ({"a": ("tensor", "int8", (2,), b"\0\3")}, {"a": ("tensor", "int8", (2, 1), b"\0\1")},
                {"b": ("object", "1.0")}, {"c": ("object", "1")}):
        try:
            reference.compare_leaves(dict(good, **bad), good)
        except reference.Wrong:
            continue
        raise AssertionError("not found: %s" % bad)


def main():
    can_fail()
    program, corpus = sys.argv[1:3]
    failed = 0
    for layout, case, options in LAYOUTS:
        if len(sys.argv) > 3 and layout != sys.argv[3]:
            continue
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None # saves a thousand fsyncs, which are not tested here
        home = tempfile.mkdtemp(prefix="fc-matrix-", dir=memory)
        plan = os.path.join(home, "plan.json")
        with open(plan, "w", encoding="utf-8") as f:
            json.dump({"*": "colwise"}, f)
        try:
            matrix = Matrix(program, home, layout, os.path.join(corpus, case))
            matrix.convert_all()
            matrix.recut_all(options, ["--tp-plan", plan])
            print("%s: %d checkpoints loaded, all equal" % (layout, matrix.count))
        except Failure as e:
            failed += 1
            print("%s: FAILED: %s" % (layout, e))
        finally:
            shutil.rmtree(home)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
