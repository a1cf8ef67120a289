#!/usr/bin/env python3
"""Checks that an HDF5 file holds exactly what a checkpoint's expected.json describes.

Only stock h5py and numpy read the file, so an error in fsdpckpt or torch cannot hide here. expected.json comes from
tests/corpus/make_dcp.py, which computes it from the model before it is sharded.

    compare.py OUT.h5 CASE/expected.json            a full file
    compare.py OUT_DIR CASE/expected.json           a sharded directory: its index.h5
    compare.py OUT.h5 CASE/expected.json --subset   tensors may be missing from the file (after --include)
    compare.py OUT_DIR CASE/expected.json --boxes   also compares the boxes in each shard file with index.h5

Compares the name, shape and dtype of each tensor, and the sha256 of its bits, read without conversion. An object is an opaque
dataset with its original bytes, and the attribute `json`. The file may hold nothing else. Prints one line per mismatch and
exits with 1.
"""
import argparse
import hashlib
import json
import os
import sys

import h5py
import numpy as np

# (size, spos, epos, esize, mpos, msize, ebias) of HDF5's floating types
FLOATS = {
    "float64": (8, 63, 52, 11, 0, 52, 1023),
    "float32": (4, 31, 23, 8, 0, 23, 127),
    "float16": (2, 15, 10, 5, 0, 10, 15),
    "bfloat16": (2, 15, 7, 8, 0, 7, 127),
    "float8_e5m2": (1, 7, 2, 5, 0, 2, 15),
}
# Types that no HDF5 float can express are stored as uint8.
BITS = ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"]
# For these the attribute has what the HDF5 type cannot express.
NEED_ATTRIBUTE = ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
                  "float8_e8m0fnu", "float4_e2m1fn_x2"]
INTEGERS = {"int64": (8, True), "int32": (4, True), "int16": (2, True), "int8": (1, True),
            "uint64": (8, False), "uint32": (4, False), "uint16": (2, False), "uint8": (1, False)}
COMPLEX = {"complex128": "float64", "complex64": "float32", "complex32": "float16"}
SIZES = dict([(k, v[0]) for k, v in FLOATS.items()] + [(k, v[0]) for k, v in INTEGERS.items()] +
             [("bool", 1), ("complex128", 16), ("complex64", 8), ("complex32", 4)] + [(k, 1) for k in BITS])


def encode(element):
    """One path element as a link name (see docs/HDF5_SCHEMA.md)."""
    element = str(element)
    if element == "":
        return "%"
    if element == ".":
        return "%2E"
    return element.replace("%", "%25").replace("/", "%2F").replace("\0", "%00")


def h5_path(elements):
    return "/" + "/".join(encode(e) for e in elements)



def text(value):
    return value.decode("utf-8") if isinstance(value, bytes) else str(value)


def is_float(t, name):
    """Returns None if t is the HDF5 float for the torch dtype, else a description of t."""
    if t.get_class() != h5py.h5t.FLOAT:
        return "class %d, not a float" % t.get_class()
    spos, epos, esize, mpos, msize = t.get_fields()
    got = (t.get_size(), spos, epos, esize, mpos, msize, t.get_ebias())
    if got != FLOATS[name]:
        return "float fields %s, not %s" % (got, FLOATS[name])
    if t.get_order() != h5py.h5t.ORDER_LE and t.get_size() > 1:
        return "not little-endian"
    return None


def ours(f):
    """Returns True if the file follows docs/HDF5_SCHEMA.md. Files of other programs may lack attributes."""
    return "fsdpckpt_schema" in f.attrs


def list_problem(f, elements):
    """A list in the state dict is a group with an attribute that marks it as a list."""
    for i, element in enumerate(elements):
        if isinstance(element, int) and i:
            group = f[h5_path(elements[:i])]
            if text(group.attrs.get("kind", "")) != "list":
                return "%s has members by index, and no attribute kind = list" % group.name
    return None


def dtype_problem(dataset, name):
    t = dataset.id.get_type()
    said = dataset.attrs.get("dtype")
    if said is not None and text(said).replace("torch.", "") != name:
        return "attribute dtype is %r" % text(said)
    if said is None and (name in NEED_ATTRIBUTE or ours(dataset.file)):
        return "no attribute dtype"
    if t.get_size() != SIZES[name]:
        return "elements of %d bytes, not %d" % (t.get_size(), SIZES[name])
    if name in FLOATS:
        return is_float(t, name)
    if name in INTEGERS or name in BITS:
        size, signed = INTEGERS.get(name, (1, False))
        if t.get_class() != h5py.h5t.INTEGER:
            return "class %d, not an integer" % t.get_class()
        if (t.get_sign() == h5py.h5t.SGN_2) != signed:
            return "wrong signedness"
        if size > 1 and t.get_order() != h5py.h5t.ORDER_LE:
            return "not little-endian"
        return None
    if name == "bool":
        if dataset.dtype != np.dtype(bool):
            return "h5py reads it as %s, not bool" % dataset.dtype
        return None
    if name in COMPLEX:
        if t.get_class() != h5py.h5t.COMPOUND or t.get_nmembers() != 2:
            return "not a compound of two"
        for i, (member, offset) in enumerate([(b"r", 0), (b"i", t.get_size() // 2)]):
            if t.get_member_name(i) != member or t.get_member_offset(i) != offset:
                return "member %d is %r at %d" % (i, t.get_member_name(i), t.get_member_offset(i))
            bad = is_float(t.get_member_type(i), COMPLEX[name])
            if bad:
                return "member %r: %s" % (member, bad)
    return None


def raw_bits(dataset):
    """The bytes of the elements in row-major order. The memory type is the file's own, so nothing is converted."""
    if dataset.shape is None:
        return b""
    size = dataset.id.get_type().get_size()
    count = int(np.prod(dataset.shape, dtype=np.int64)) if dataset.shape else 1
    raw = np.zeros(count * size, dtype=np.uint8)
    if count:
        space = h5py.h5s.create_simple((count,)) if dataset.shape else h5py.h5s.ALL
        dataset.id.read(space, h5py.h5s.ALL, raw, dataset.id.get_type())
    return raw.tobytes()


def describe_problem(dataset, want):
    if dataset.shape is None or list(dataset.shape) != want["shape"]:
        return "shape %s, not %s" % (dataset.shape, want["shape"])
    bad = dtype_problem(dataset, want["dtype"])
    if bad:
        return "dtype: %s; it should be %s" % (bad, want["dtype"])
    got = hashlib.sha256(raw_bits(dataset)).hexdigest()
    if got != want["sha256"]:
        return "sha256 %s, not %s" % (got[:16], want["sha256"][:16])
    return None


def object_problem(dataset, want, original):
    t = dataset.id.get_type()
    if t.get_class() != h5py.h5t.OPAQUE:
        return "not an opaque dataset (class %d)" % t.get_class()
    data = raw_bits(dataset)
    if hashlib.sha256(data).hexdigest() != want["sha256"]:
        if original is not None and data == original:
            return "expected.json and the checkpoint disagree: the corpus is damaged"
        return "%d bytes with sha256 %s, not the item's %d with %s" % (
            len(data), hashlib.sha256(data).hexdigest()[:16], want["length"], want["sha256"][:16])
    if original is not None and data != original:
        return "not the bytes at offset %d of %s" % (want["offset"], want["file"])
    if "json" not in dataset.attrs:
        return "no attribute json"
    spelled = text(dataset.attrs["json"])
    try:
        decoded = json.loads(spelled)
    except ValueError as e:
        return "attribute json is not JSON: %s" % e
    if "json" in want and not same(decoded, want["json"]):
        return "attribute json %s, not %s" % (spelled[:120], json.dumps(want["json"])[:120])
    return None


def same(a, b):
    """Equal values of equal types: 1, 1.0 and True differ."""
    if type(a) is not type(b):
        return False
    if isinstance(a, list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, float):
        return repr(a) == repr(b)  # -0.0 is not 0.0
    return a == b


def walk(group, prefix=""):
    """Every dataset below a group with its literal link path. (h5py's visititems would decode the names.)"""
    for name in group:
        link = group.get(name, getlink=True)
        path = prefix + "/" + name
        if isinstance(link, (h5py.SoftLink, h5py.ExternalLink)):
            yield path, None
            continue
        item = group[name]
        if isinstance(item, h5py.Group):
            for found in walk(item, path):
                yield found
        else:
            yield path, item


def original_bytes(case_dir, want):
    if "text" in want:
        return want["text"].encode()
    path = os.path.join(case_dir, want["file"])
    if not os.path.exists(path):
        return None
    with open(path, "rb") as f:
        f.seek(want["offset"])
        return f.read(want["length"])


def check_boxes(directory, expected, complain):
    """Compares the boxes in each shard file with their place in the full tensor, which the attributes give."""
    shards = sorted(f for f in os.listdir(directory) if f.startswith("shard-") and f.endswith(".h5"))
    if not shards:
        complain("no shard-*.h5 next to index.h5")
    by_path = {h5_path(w["path"]): (fqn, w) for fqn, w in expected["tensors"].items()}
    with h5py.File(os.path.join(directory, "index.h5"), "r") as index:
        for shard in shards:
            with h5py.File(os.path.join(directory, shard), "r") as f:
                for path, dataset in walk(f):
                    if path not in by_path or dataset is None:
                        continue
                    fqn, want = by_path[path]
                    missing = [a for a in ("global_shape", "offsets") if a not in dataset.attrs]
                    if missing:
                        complain("%s: %s: no attribute %s" % (shard, fqn, ", ".join(missing)))
                        continue
                    offsets = [int(x) for x in np.ravel(as_list(dataset.attrs["offsets"]))]
                    if [int(x) for x in np.ravel(as_list(dataset.attrs["global_shape"]))] != want["shape"]:
                        complain("%s: %s: global_shape %s" % (shard, fqn, dataset.attrs["global_shape"]))
                        continue
                    sizes = list(dataset.shape)
                    if len(offsets) != len(sizes) or any(o + n > g for o, n, g in zip(offsets, sizes, want["shape"])):
                        complain("%s: %s: %s at %s leaves %s" % (shard, fqn, sizes, offsets, want["shape"]))
                        continue
                    if path not in index:
                        continue  # the caller reports this
                    if raw_bits(dataset) != window(index[path], offsets, sizes):
                        complain("%s: %s: not the bytes of the box %s + %s" % (shard, fqn, offsets, sizes))


def as_list(value):
    return [] if isinstance(value, h5py.Empty) else value


def window(dataset, offsets, sizes):
    size = dataset.id.get_type().get_size()
    full = np.frombuffer(raw_bits(dataset), dtype="V%d" % size).reshape(dataset.shape)
    return full[tuple(slice(o, o + n) for o, n in zip(offsets, sizes))].tobytes()


def compare(target, expected_path, subset=False, boxes=False):
    """Returns all mismatches, one line each."""
    problems = []
    with open(expected_path, encoding="utf-8") as f:
        expected = json.load(f)
    case_dir = os.path.dirname(os.path.abspath(expected_path))
    path = os.path.join(target, "index.h5") if os.path.isdir(target) else target

    def complain(line):
        problems.append("%s: %s" % (path, line))

    wanted = {}
    for kind in ("tensors", "objects"):
        for fqn, want in expected[kind].items():
            where = h5_path(want["path"])
            if where in wanted:
                complain("%s and %s are both %s: the name encoding is not one to one" % (fqn, wanted[where][1], where))
            wanted[where] = (kind, fqn, want)
    try:
        f = h5py.File(path, "r")
    except OSError as e:
        complain("h5py cannot open it: %s" % e)
        return problems, 0
    checked = 0
    with f:
        seen = set()
        view = text(f.attrs.get("layout", "")) == "view"
        for where, dataset in walk(f):
            if view and where.startswith("/%pieces/"):
                continue  # source datasets of virtual ones
            seen.add(where)
            if where not in wanted:
                complain("%r: in the file, not in the checkpoint" % where)
                continue
            kind, fqn, want = wanted[where]
            try:
                if dataset is None:
                    bad = "a soft or external link, not a dataset"
                elif kind == "tensors":
                    bad = describe_problem(dataset, want)
                else:
                    bad = object_problem(dataset, want, original_bytes(case_dir, want))
            except (OSError, ValueError, TypeError, RuntimeError) as e:
                bad = "h5py cannot read it: %s: %s" % (type(e).__name__, e)
            checked += 1
            if not bad and ours(f):
                bad = list_problem(f, want["path"])
            if bad:
                complain("%s %r (%s): %s" % (kind[:-1], fqn, where, bad))
        for where, (kind, fqn, want) in wanted.items():
            if where not in seen and not subset:
                complain("%s %r (%s): missing" % (kind[:-1], fqn, where))
    if not checked and wanted:
        complain("nothing of the checkpoint is in it")
    if boxes and os.path.isdir(target):
        check_boxes(target, expected, complain)
    return problems, checked


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("target", help="a .h5 file, or a sharded directory with index.h5")
    ap.add_argument("expected", help="expected.json of the case")
    ap.add_argument("--subset", action="store_true", help="allow tensors to be missing from the file")
    ap.add_argument("--boxes", action="store_true", help="also compare the boxes in each shard file with index.h5")
    ap.add_argument("-q", "--quiet", action="store_true", help="print nothing if everything is equal")
    args = ap.parse_args()
    problems, checked = compare(args.target, args.expected, args.subset, args.boxes)
    for line in problems:
        print(line)
    if not problems and not args.quiet:
        print("%s: %d datasets equal to %s" % (args.target, checked, args.expected))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
