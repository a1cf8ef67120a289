#!/usr/bin/env python3
"""Objects whose readable form in the headers was changed: fsdpckpt always shows what torch.load and h5py find in the bytes, and
check and verify report the change. Every format that records a readable form.

usage: recorded_json.py FSDPCKPT       exit 77 without torch or h5py
"""
import io
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile

try:
    import h5py
    import torch
except ImportError as e:
    print("skipped: %s" % e)
    sys.exit(77)

from checks import check, finish

TOOL = os.path.abspath(sys.argv[1])
OBJECTS = {"step": 1234567, "betas": (0.9, 0.95), "note": "as saved", "empty": {}, "lr": float("inf")}
VALUES = {"step": 1234567, "betas": {"$tuple": [0.9, 0.95]}, "note": "as saved", "empty": {}, "lr": {"$float": "inf"}}
FORGED = {"step": "7", "betas": '{"$tuple": [0.9, 0.5]}', "note": '"another"', "empty": "null", "lr": '{"$float": "nan"}'}


def run(*args):
    p = subprocess.run([TOOL, *args], capture_output=True, text=True, check=False)
    return p.returncode, p.stdout, p.stderr


def decoded(path, name):
    status, out, err = run("extract", path, name, "--to", "json")
    return json.loads(out) if status == 0 else err


def listed(path):
    status, out, err = run("inspect", "--json", path)
    return {o["name"]: o["value"] for o in json.loads(out)["objects"]} if status == 0 else err


def bytes_say(path, name):
    """What PyTorch loads of the bytes."""
    p = subprocess.run([TOOL, "extract", path, name], capture_output=True, check=True)
    return torch.load(io.BytesIO(p.stdout))


def forge_h5(path, name, text):
    files = [os.path.join(path, f) for f in os.listdir(path)] if os.path.isdir(path) else [path]
    changed = 0
    for file in files:
        with h5py.File(file, "r+") as f:
            if name in f and "json" in f[name].attrs:
                f[name].attrs["json"] = text
                changed += 1
    assert changed


def forge_safetensors(path, name, text):
    with open(path, "rb") as f:
        data = f.read()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + size])
    key = next(k for k in header["__metadata__"] if k.endswith(name) and '"encoding"' in header["__metadata__"][k])
    header["__metadata__"][key] = json.dumps({**json.loads(header["__metadata__"][key]), "json": text})
    new = json.dumps(header).encode()
    new += b" " * (-len(new) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(new)) + new + data[8 + size:])


def make(home):
    torch.save({"w": torch.arange(4096.0).reshape(64, 64), **OBJECTS}, os.path.join(home, "a.pt"))
    for target, args in (("plain.h5", ["consolidate"]), ("small.h5", ["consolidate", "--compress", "1"]),
                         ("sharded", ["reshard", "--dp", "2"]), ("one.safetensors", ["consolidate"])):
        status, _, err = run(args[0], os.path.join(home, "a.pt"), "-o", os.path.join(home, target), *args[1:], "-q")
        assert status == 0, err


def forged_values(home, kind, forge):
    path = os.path.join(home, kind)
    shown = listed(path)
    check(shown == VALUES, f"{kind} as written: {shown}")
    check(run("check", path)[0] == 0 and run("verify", path)[0] == 0, f"{kind} as written")
    for name, text in FORGED.items():
        shutil.rmtree(os.path.join(home, "forged"), ignore_errors=True)
        os.mkdir(os.path.join(home, "forged"))
        bad = os.path.join(home, "forged", kind)
        (shutil.copytree if os.path.isdir(path) else shutil.copy)(path, bad)
        forge(bad, name, text)
        what = f"{kind}, {name}"
        check(repr(bytes_say(bad, name)) == repr(OBJECTS[name]), f"{what}: the bytes were changed")
        shown = decoded(bad, name)
        check(shown == VALUES[name], f"{what}: extract: {shown}")
        shown = listed(bad)
        check(shown == VALUES, f"{what}: inspect: {shown}")
        # Of a sharded checkpoint, check reads the tables of index.h5, and verify compares them with the files.
        for command in ("verify",) if kind == "sharded" else ("check", "verify"):
            status, out, err = run(command, bad)
            said = out + err
            check(status == 1 and name in said and ("its json says" in said or "its JSON" in said),
                  f"{what}: {command}: exit {status}: {said}")
        target = os.path.join(home, "forged", "again.h5")
        status, _, err = run("consolidate", bad, "-o", target, "-q")
        check(status == 0, f"{what}: {err}")
        with h5py.File(target) as f:
            shown = f[name].attrs["json"]
            check(json.loads(shown) == VALUES[name], f"{what}: h5py shows {shown}")
        check(run("check", target)[0] == 0, f"{what}: a conversion records the value")


def unknown_encodings(home):
    """What nothing can decode is shown as that."""
    path = os.path.join(home, "forged", "unknown.h5")
    shutil.copy(os.path.join(home, "plain.h5"), path)
    for encoding in ("mine", "hdf5.bytes"):
        with h5py.File(path, "r+") as f:
            data = f["step"][()]
            data.dtype = "u1"
            attrs = dict(f["step"].attrs)
            del f["step"]
            f.create_dataset("step", data=data[8:].view("V1"))  # no archive any more
            f["step"].attrs.update({**attrs, "encoding": encoding, "json": "7"})
        shown = decoded(path, "step")
        check(shown == {"$encoding": encoding}, f"encoding: {shown}")
        os.unlink(path)
        shutil.copy(os.path.join(home, "plain.h5"), path)


def older_forms(home):
    """A recorded form with fewer details is not a difference."""
    path = os.path.join(home, "forged", "older.h5")
    import datetime
    torch.save({"w": torch.ones(2), "when": {"day": datetime.date(2026, 1, 2)}}, path + ".pt")
    assert run("consolidate", path + ".pt", "-o", path, "-q")[0] == 0
    shown = decoded(path, "when.day")
    check(shown == {"$date": "2026-01-02"}, shown)
    with h5py.File(path, "r+") as f:
        f["when/day"].attrs["json"] = '{"$opaque": "datetime.date"}'
    answer = run("check", path)
    check(answer[0] == 0, f"an older form: {answer}")


with tempfile.TemporaryDirectory() as home:
    make(home)
    for kind, forge in (("plain.h5", forge_h5), ("small.h5", forge_h5), ("sharded", forge_h5), ("one.safetensors", forge_safetensors)):
        forged_values(home, kind, forge)
    unknown_encodings(home)
    older_forms(home)
sys.exit(finish("recorded_json"))
