"""A file that h5py has changed opens as h5py shows it, even where its size is the same: h5_changed.py FSDPCKPT.

Changes a full, a compressed, a nested and a sharded checkpoint in each of these ways, and compares the names that
`fsdpckpt inspect --json` lists with those that h5py lists, and each value with h5py's. A sharded checkpoint whose index
no longer describes its shards may be refused.
"""
import json
import os
import shutil
import subprocess
import sys
import tempfile

import h5py
import torch
from checks import check, finish, must_run, run_main

KEY, OTHER = "layers.3.weight", "layers.4.weight"


def delete(f, group):
    del group[KEY]


def rename(f, group):
    group.move(KEY, KEY[:-1] + "u")


def swap(f, group):
    group.move(KEY, "x")
    group.move(OTHER, KEY)
    group.move("x", OTHER)


def add_name(f, group):
    group["a second name"] = group[KEY]


def replace(f, group):
    shape = group[KEY].shape
    del group[KEY]
    group.create_dataset(KEY, data=torch.full(shape, 2.0).numpy())


def add_attribute(f, group):
    group[KEY].attrs["note"] = "by hand"


def delete_attribute(f, group):
    del group[KEY].attrs["dtype"]


def change_attribute(f, group):
    group[KEY].attrs.modify("crc64", 1)


def change_root(f, group):
    f.attrs.modify("producer", "somebody else")


def link(f, group):
    group["elsewhere"] = h5py.SoftLink(group.name + "/" + KEY)


CHANGES = (delete, rename, swap, add_name, replace, add_attribute, delete_attribute, change_attribute, change_root, link)


def names(program, path):
    r = subprocess.run([program, "inspect", "--json", path], capture_output=True, text=True)
    return r.returncode, {t["name"] for t in json.loads(r.stdout)["tensors"]} if r.returncode == 0 else r.stderr




def listed(path, prefix):
    with h5py.File(path) as f:
        return {prefix + name for name in f[prefix.rstrip(".") or "/"]}


def changed(program, checkpoint, place, prefix, change, scratch):
    file = "index.h5" if os.path.isdir(checkpoint) else ""
    copy = os.path.join(scratch, "copy" if file else "copy.h5")
    (shutil.copytree if file else shutil.copy)(checkpoint, copy)
    target = os.path.join(copy, file) if file else copy
    size = os.path.getsize(target)
    with h5py.File(target, "r+") as f:
        change(f, f[prefix.rstrip(".") or "/"])
    same = os.path.getsize(target) == size
    where = "%s, %s%s" % (place, change.__name__, ", same size" if same else "")
    status, found = names(program, copy)
    if status != 0:
        check(status == 3 and (file or change is change_attribute) and found.count("\n") == 1, where + ": " + str(found))
    else:
        expected = listed(target, prefix)
        found = {n for n in found if n.startswith(prefix) and n not in ("@attributes", "step")}
        check(found == expected, "%s: it lists %s, not %s" % (where, sorted(found - expected), sorted(expected - found)))
    if not file and change is swap:
        with h5py.File(target) as f:
            must_run(program, "convert", target, "-o", target + ".pt", "-q")
            state = torch.load(target + ".pt")
            for part in prefix.rstrip(".").split(".") if prefix else ():
                state = state[part]
            for key in (KEY, OTHER):
                check(torch.equal(state[key], torch.from_numpy(f[prefix.rstrip(".") or "/"][key][()])), where + ": " + key)
        os.remove(target + ".pt")
    (shutil.rmtree if file else os.remove)(copy)
    return same


def main():
    program = sys.argv[1]
    scratch = tempfile.mkdtemp()
    try:
        tensors = {"layers.%d.weight" % i: torch.randn(16, 512) for i in range(30)}
        torch.save(tensors, scratch + "/flat.pt")
        torch.save({"model": tensors, "step": 3}, scratch + "/nested.pt")
        kinds = {"full": ("flat.pt", "full.h5", "", ["convert"]),
                 "compressed": ("flat.pt", "small.h5", "", ["convert", "--compress", "1"]),
                 "nested": ("nested.pt", "nested.h5", "model.", ["convert"]),
                 "sharded": ("flat.pt", "shards", "", ["reshard", "--dp", "4"])}
        for kind, (source, target, prefix, argv) in kinds.items():
            checkpoint = os.path.join(scratch, target)
            must_run(program, argv[0], os.path.join(scratch, source), "-o", checkpoint, "-q", *argv[1:])
            status, found = names(program, checkpoint)
            check(status == 0 and {prefix + n for n in tensors} <= found, kind + ": " + str(found))
            same = [changed(program, checkpoint, kind, prefix, change, scratch) for change in CHANGES]
            check(any(same), kind + ": no change kept the size of the file")
    finally:
        shutil.rmtree(scratch)
    return finish("h5_changed")


run_main(main)
