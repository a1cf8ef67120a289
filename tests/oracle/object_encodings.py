#!/usr/bin/env python3
"""Objects with an encoding of their own come back as they were after a conversion to any format, to any two and to any three.

The encodings are those of files that h5py, the safetensors library and torch.save wrote: attributes, text and raw elements of HDF5,
members of __metadata__ and index files, what a sparse tensor is apart from its parts, and torch.save itself. Each chain of formats ends
with an HDF5 file, whose bytes and encodings h5py reads, and with the format's own library where it has the object.

usage: object_encodings.py FSDPCKPT [SOURCE]      exit 77 without torch, h5py or safetensors
"""
import io
import itertools
import json
import os
import pathlib
import sys
import tempfile

try:
    import h5py
    import numpy as np
    import torch
    import torch.distributed.checkpoint as dcp
    from safetensors import safe_open
    from safetensors.torch import save_file
except ImportError as e:
    print("skipped: %s" % e)
    sys.exit(77)

from checks import check, finish, must_run

EXTENSIONS = {"dcp": "", "h5": ".h5", "pt": ".pt", "safetensors": ".safetensors"}
MEMBERS = {"format": "pt", "modelspec.title": "a \u20ac \"quote\"", "torchao": json.dumps({"w": {"_type": "Int8Tensor", "n": [1, 2.5, None, True]}}),
           "big": "9" * 40, "empty": ""}


def hdf5(path):
    with h5py.File(path, "w") as f:
        f["w"] = np.arange(6, dtype="f4")
        f["model/text"] = ["one", "zw\u00f6lf"]
        f["model/compound"] = np.array([(1, 2.5), (3, -0.0)], dtype=[("a", "i4"), ("b", ">f8")])
        f["none"] = np.zeros(0, dtype=[("a", "i4"), ("b", "f8")])
        f.attrs.update(keras_version="3.1", numbers=np.array([1, 2**62, -5]), real=0.1, flag=True, huge=np.uint64(2**64 - 1))
        f["w"].attrs["units"] = "1/s"


def safetensors(path):
    save_file({"w": torch.ones(2, 3)}, path, MEMBERS)


def torch_save(path):
    torch.save({"w": torch.ones(2), "step": 3, "args": {"lr": (0.1, float("nan"))}, "empty": {}, "numbers": {3: "x"}, "set": {1, 2},
                "not an object": {"encoding": "utf-8", "value": 1, "data": b"x"}}, path)


def sparse(path):
    torch.save({"w": torch.ones(2), "m": {"s": torch.eye(3).to_sparse()}}, path)


SOURCES = {"hdf5": (hdf5, ".h5"), "safetensors": (safetensors, ".safetensors"), "torch.save": (torch_save, ".pt"), "sparse": (sparse, ".pt")}


def objects_of(path):
    """{name: (encoding, bytes)} of an HDF5 file of ours, and the JSON of raw elements, by h5py."""
    found = {}
    with h5py.File(path, "r") as f:
        def visit(name, item):
            if isinstance(item, h5py.Dataset) and "encoding" in item.attrs:
                encoding = item.attrs["encoding"]
                raw = np.zeros(item.shape, np.uint8) if item.size == 0 else item[()].view(np.uint8)
                found[name] = (encoding, raw.tobytes(), item.attrs["json"] if encoding == "hdf5.bytes" else None)
        f.visititems(visit)
    return found


def same(found, wanted):
    if found.keys() != wanted.keys():
        return False
    for name, value in wanted.items():
        if value[0] != found[name][0]:
            return False
        if value[0] == "torch.save":  # the archive is made anew
            loads = [repr(torch.load(io.BytesIO(raw), weights_only=False)) for raw in (found[name][1], value[1])]
            if loads[0] != loads[1]:
                return False
        elif value != found[name]:
            return False
    return True


def check_by_library(source, form, path):
    """What the library of the last format says."""
    if source == "safetensors" and form == "safetensors":
        with safe_open(path, "pt") as f:
            found = {k: v for k, v in f.metadata().items() if not k.startswith("fsdpckpt.")}
        check(found == MEMBERS, "%s: %s" % (path, found))
    if source == "safetensors" and form == "pt":
        value = torch.load(path, weights_only=True)["__metadata__"]
        check(value["value"] == json.loads(value["data"]) and value["value"]["empty"] == "", "%s: %s" % (path, value))
    if source == "sparse" and form == "pt":
        check(torch.equal(torch.load(path, weights_only=True)["m"]["s"].to_dense(), torch.eye(3)), path)
    if source == "hdf5" and form == "dcp":
        state = {"@attributes": None}
        dcp.load(state, checkpoint_id=path, no_dist=True, 
                 planner=dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False))
        found = json.loads(state["@attributes"]["data"])["/"]
        check(found["keras_version"] == "3.1" and found["huge"] == 2**64 - 1, "%s: %s" % (path, found))


def run_source(program, home, name):
    make, extension = SOURCES[name]
    source = home / ("source" + extension)
    make(source)
    first = home / "first.h5"
    must_run(program, "convert", source, "-o", first, "-q")
    wanted = objects_of(first)
    check(wanted and all(v[0] != "fsdpckpt.value" for v in wanted.values()), "%s: %s" % (name, wanted))
    made, count = {(): source}, 0
    for length in (1, 2, 3):
        for chain in itertools.product(EXTENSIONS, repeat=length):
            path = home / ("-".join(chain) + EXTENSIONS[chain[-1]])
            must_run(program, "convert", made[chain[:-1]], "-o", path, "--to", chain[-1], "-q")
            made[chain] = path
            last = path
            if chain[-1] != "h5":
                last = home / "last.h5"
                must_run(program, "convert", path, "-o", last, "-q", "--force")
            found = objects_of(last)
            check(same(found, wanted), "%s: %s: %s, not %s" % (name, " -> ".join(chain), found, wanted))
            check_by_library(name, chain[-1], path)
            count += 1
    check(count == 84, count)
    return made, wanted


def check_edited(program, home, made):
    """A value that a program changed is kept with its members: neither the change nor the bytes are lost."""
    state = torch.load(made["pt",], weights_only=True)
    state["__metadata__"]["value"]["added"] = "x"
    torch.save(state, home / "edited.pt")
    must_run(program, "convert", home / "edited.pt", "-o", home / "edited.h5", "-q")
    found = objects_of(home / "edited.h5")
    check("__metadata__/value/added" in found and "__metadata__/data" in found and
          {v[0] for v in found.values()} == {"torch.save"}, "edited: %s" % found)


def main():
    program = os.path.abspath(sys.argv[1])
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # saves hundreds of fsyncs, which are not tested here
    for name in SOURCES if len(sys.argv) < 3 else sys.argv[2:]:
        with tempfile.TemporaryDirectory(dir=memory) as folder:
            home = pathlib.Path(folder)
            made, wanted = run_source(program, home, name)
            check(not same({**wanted, "x": ("hdf5.string", b"1", None)}, wanted), "the comparison cannot fail")
            if name == "safetensors":
                check_edited(program, home, made)
    return finish("object_encodings")


if __name__ == "__main__":
    sys.exit(main())
