#!/usr/bin/env python3
"""Flax's msgpack files (tests/corpus/flax) become torch.save, DCP, HDF5 and safetensors with every bit and every value that flax reads.

usage: flax_read.py FSDPCKPT CORPUS       exit 77 without torch
"""
import json
import os
import pathlib
import sys
import tempfile

try:
    import torch
except ImportError as e:
    print("skipped: %s" % e)
    sys.exit(77)

import reference
from checks import check, finish, must_run


def same(found, wanted):
    """`found` is a leaf of reference.py, `wanted` what flax reads."""
    if "repr" in wanted:
        return found == ("object", wanted["repr"])
    return found == ("tensor", wanted["dtype"], tuple(wanted["shape"]), bytes.fromhex(wanted["bytes"]))


def compare(what, found, wanted, tensors_only):
    kept = {n: v for n, v in wanted.items() if not (tensors_only and "repr" in v) and v.get("repr") not in ("{}", "[]")}
    found = {n: v for n, v in found.items() if v[0] == "tensor" or (not tensors_only and v[1] not in ("{}", "[]"))}
    # A list is one leaf of flax, and several here.
    names = {n for n in found if not any(n.startswith(k + ".") for k in kept)}
    check(names | {n for n in kept if "repr" in kept[n] and kept[n]["repr"][0] == "["} == set(kept), "%s: %s, not %s" % (what, sorted(found), sorted(kept)))
    for name in names & set(kept):
        reals = tensors_only and kept[name].get("dtype") == "complex128" and found[name][1] == "float64"  # as safetensors stores it
        check(same(found[name], kept[name]) or (reals and found[name][3].hex() == kept[name]["bytes"]), "%s: %s: %s, not %s" % (what, name, found[name], kept[name]))


def convert_file(program, source, wanted, home):
    for form, extension in {"pt": ".pt", "dcp": "", "safetensors": ".safetensors", "h5": ".h5"}.items():
        for command in ("convert", "consolidate"):
            what = "%s %s to %s" % (command, source.name, form)
            path = home / (command + form + extension)
            must_run(program, command, source, "-o", path, "--to", form, "-q")
            must_run(program, "diff", source, path, "--data")
            found = reference.load(form, str(path), {n: None for n in wanted})
            compare(what, found, wanted, form in ("safetensors", "h5"))  # their objects are not Python's


def values_are_python_s(program, corpus, home, wanted):
    must_run(program, "convert", corpus / "training", "-o", home / "t.pt", "-q")
    found = torch.load(home / "t.pt", weights_only=True)
    for name, value in wanted.items():
        if "repr" in value and "." not in name:
            check(repr(found[name]) == value["repr"], "%s: %r, not %s" % (name, found[name], value["repr"]))
    must_run(program, "convert", corpus / "lists.msgpack", "-o", home / "l.pt", "-q")
    found = torch.load(home / "l.pt", weights_only=True)
    check(found["sizes"] == [1, [2, None], "x"] and found["none"] == [] and list(found["by number"]) == [3] and
          isinstance(found["layers"], list) and found["layers"][1][1] == 5, "lists: %s" % found)


def main():
    program, corpus = os.path.abspath(sys.argv[1]), pathlib.Path(sys.argv[2]) / "flax"
    expected = json.loads((corpus / "expected.json").read_text())
    wrong = {"a": {"dtype": "int8", "shape": [1], "bytes": "00"}}
    check(not same(("tensor", "int8", (1,), b"\1"), wrong["a"]) and not same(("object", "1"), {"repr": "2"}), "the comparison cannot fail")
    for name, wanted in expected.items():
        with tempfile.TemporaryDirectory() as folder:
            home = pathlib.Path(folder)
            if name == "unreadable.msgpack":
                said = must_run(program, "convert", corpus / name, "-o", home / "never.pt", ok=(5,)).stderr
                check("the element type int4 is not supported" in said and "--exclude 'when'" in said, said)
                must_run(program, "convert", corpus / name, "-o", home / "some.pt", "-q", "--exclude", "int4", "--exclude", "when")
            else:
                convert_file(program, corpus / name, wanted, home)
            if name == "training/flax_model.msgpack":
                values_are_python_s(program, corpus, home, wanted)
    check(len(expected) == 8, "%d files" % len(expected))
    return finish("flax_read")


if __name__ == "__main__":
    sys.exit(main())
