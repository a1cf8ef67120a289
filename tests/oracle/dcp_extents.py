#!/usr/bin/env python3
"""The DCP reader against torch: every checkpoint of tests/corpus/good, bit by bit.

dcp_tool prints the manifest and the extents. This script reads the bytes at those extents, assembles the full tensors, and
compares name, path, dtype, shape, boxes and SHA-256 with expected.json, which torch made before it saved. For objects it
compares the original bytes and, where the value has a plain form, the decoded JSON with Python's value.

    dcp_extents.py DCP_TOOL CORPUS [CASE...]
"""
import hashlib
import json
import os
import subprocess
import sys

try:
    import numpy as np
except ImportError:
    sys.exit(77)

SIZES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e4m3fnuz": 1,
         "float8_e5m2": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1, "int64": 8, "int32": 4, "int16": 2, "int8": 1,
         "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1, "bool": 1, "complex32": 4, "complex64": 8,
         "complex128": 16, "float4_e2m1fn_x2": 1}


def plain(value):
    """The Python value of the decoded JSON. Raises ValueError if it has no plain form."""
    if isinstance(value, list):
        return [plain(v) for v in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1 or not next(iter(value)).startswith("$"):
        return {k: plain(v) for k, v in value.items()}
    (tag, inner), = value.items()
    if tag == "$int":
        return int(inner, 0)
    if tag == "$float":
        return float(inner)
    if tag == "$tuple":
        return tuple(plain(inner))
    if tag == "$set":
        return set(plain(inner))
    if tag == "$frozenset":
        return frozenset(plain(inner))
    if tag == "$dict":
        return {plain(k): plain(v) for k, v in inner}
    if tag == "$complex":
        return complex(*plain(inner))
    if tag in ("$bytes", "$bytearray", "$surrogates"):
        import base64
        raw = base64.b64decode(inner)
        return {"$bytes": raw, "$bytearray": bytearray(raw)}.get(tag) if tag != "$surrogates" else \
            raw.decode("utf-8", "surrogatepass")
    raise ValueError(tag)


def element(chunk, dtype, data):
    """The elements of a chunk as an array of raw bytes; the last axis is one element."""
    size = SIZES[dtype]
    raw = np.frombuffer(data, np.uint8)[chunk["first"]:]
    view = np.lib.stride_tricks.as_strided(raw, chunk["sizes"] + [size], [s * size for s in chunk["strides"]] + [1])
    if chunk["swap"]:
        half = size // 2 if dtype.startswith("complex") else size
        view = view.reshape(chunk["sizes"] + [size // half, half])[..., ::-1].reshape(chunk["sizes"] + [size])
    if chunk["negate"] or chunk["conjugate"]:
        view = view.copy()
        half = size // 2 if dtype.startswith("complex") else size
        signs = view.reshape(chunk["sizes"] + [size // half, half])[..., half - 1]
        signs[..., 0] ^= 0x80 if chunk["negate"] else 0
        if size != half:
            signs[..., 1] ^= 0x80 if chunk["negate"] != chunk["conjugate"] else 0
    return view


def read_at(directory, chunk):
    with open(os.path.join(directory, chunk["file"]), "rb") as f:
        f.seek(chunk["offset"])
        data = f.read(chunk["length"])
    assert len(data) == chunk["length"], "the extent runs past the end of the file"
    return data


def full_bytes(directory, tensor):
    full = np.zeros(tensor["shape"] + [SIZES[tensor["dtype"]]], np.uint8)
    seen = np.zeros(tensor["shape"], bool)
    for chunk in tensor["chunks"]:
        where = tuple(slice(o, o + s) for o, s in zip(chunk["offsets"], chunk["sizes"]))
        full[where] = element(chunk, tensor["dtype"], read_at(directory, chunk))
        seen[where] = True
    assert seen.all(), "not every element is covered"
    return full.tobytes()


def boxes(chunks):
    return sorted((c["offsets"], c["sizes"], c["file"]) for c in chunks if 0 not in c["sizes"])


def check_tensor(directory, tensor, want):
    for key in ("dtype", "shape", "path"):
        assert tensor[key] == want[key], f"{key}: {tensor[key]} instead of {want[key]}"
    got, wanted = boxes(tensor["chunks"]), boxes(want["chunks"])
    # expected.json may name the file of each replica.
    assert [b[:2] for b in got] == [b[:2] for b in wanted], f"boxes: {got} instead of {wanted}"
    for chunk in tensor["chunks"]:
        assert chunk["file"].startswith(f"__{chunk['rank']}_"), "rank"
    digest = hashlib.sha256(full_bytes(directory, tensor)).hexdigest()
    assert digest == want["sha256"], "the bytes differ"


def check_object(directory, obj, want):
    chunk, = obj["chunks"]
    assert obj["path"] == want["path"], f"path: {obj['path']} instead of {want['path']}"
    data = read_at(directory, chunk)
    assert (chunk["offset"], chunk["length"]) == (want["offset"], want["length"]), "its place"
    assert hashlib.sha256(data).hexdigest() == want["sha256"], "the bytes differ"
    try:
        value = plain(obj["json"])
    except ValueError:
        return
    if want["type"] in ("int", "float", "str", "bool", "NoneType", "tuple", "list", "dict", "bytes", "bytearray",
                        "complex") and "torch" not in want["repr"] and "$" not in json.dumps(obj["json"]).replace(
                            '"$int"', "").replace('"$tuple"', "").replace('"$float"', "").replace('"$bytes"', ""):
        assert repr(value) == want["repr"], f"json: {value!r} instead of {want['repr']}"


def check(tool, directory):
    with open(os.path.join(directory, "expected.json")) as f:
        expected = json.load(f)
    run = subprocess.run([tool, directory], capture_output=True, text=True)
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    assert lines, run.stderr
    found = {line["name"]: line for line in lines[1:]}
    assert found.keys() == expected["tensors"].keys() | expected["objects"].keys(), \
        f"names: {found.keys() ^ (expected['tensors'].keys() | expected['objects'].keys())}"
    for name, line in found.items():
        try:
            assert "error" not in line, line["error"]
            if name in expected["tensors"]:
                check_tensor(directory, line, expected["tensors"][name])
            else:
                check_object(directory, line, expected["objects"][name])
        except (AssertionError, KeyError, ValueError) as e:
            raise AssertionError(f"{name}: {e!r}") from e
    return len(expected["tensors"]), len(expected["objects"])


def check_protocols(tool, directory):
    """The same metadata, pickled again in each protocol, gives the same manifest."""
    import pickle
    import shutil
    import tempfile
    try:
        import torch.distributed.checkpoint  # noqa: F401: imports the classes that the pickle names
    except ImportError:
        return
    with open(os.path.join(directory, ".metadata"), "rb") as f:
        metadata = pickle.load(f)
    want = subprocess.run([tool, directory], capture_output=True, check=True).stdout
    for protocol in (2, 3, 4, 5):
        with tempfile.TemporaryDirectory() as copy:
            shutil.copytree(directory, copy, dirs_exist_ok=True)
            with open(os.path.join(copy, ".metadata"), "wb") as f:
                pickle.dump(metadata, f, protocol)
            got = subprocess.run([tool, copy], capture_output=True, check=True).stdout
            assert got == want, f"protocol {protocol} gives another manifest"


def main():
    tool, corpus, *only = sys.argv[1:]
    cases = [c for c in sorted(os.listdir(corpus)) if c.startswith("dcp-") and (not only or c in only)]
    failed, tensors, objects = 0, 0, 0
    for case in cases:
        try:
            if case.endswith(("-train", "-objects", "-names")) and "torch1" not in case:
                check_protocols(tool, os.path.join(corpus, case))
            t, o = check(tool, os.path.join(corpus, case))
            tensors, objects = tensors + t, objects + o
        except Exception as e:  # report every case that fails, not only the first
            failed += 1
            print(f"FAIL {case}: {e!r}"[:600])
    print(f"{len(cases)} checkpoints, {tensors} tensors, {objects} objects, {failed} failed")
    return 1 if failed or not cases else 0


if __name__ == "__main__":
    sys.exit(main())
