#!/usr/bin/env python3
"""HDF5 files of ours that another program changed, and files of other programs. A table says what each change makes of a
conversion: the exit status and the words of the one line, and nothing is written; or the value that becomes of it.

usage: h5_refused.py FSDPCKPT CORPUS       exit 77 without h5py
"""
import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile

try:
    import h5py
    import numpy as np
    from h5py import h5t
except ImportError as e:
    print("skipped: %s" % e)
    sys.exit(77)

TOOL, CORPUS = os.path.abspath(sys.argv[1]), os.path.abspath(sys.argv[2])
MESH = "the attributes mesh_shape, mesh_names and world_size are missing or disagree"
BOX = "the attributes global_shape and offsets are missing or disagree with index.h5"
INDEX, SHARD = "index.h5", "shard-00001-of-00002.h5"
W = "model/norm.weight"  # (6,) in two shards
STEP = "big"  # an object


def attribute(name, value, at="/"):
    """A change that sets an attribute, or deletes it if the value is None."""
    def change(f):
        if name in f[at].attrs:
            del f[at].attrs[name]
        if value is not None:
            f[at].attrs[name] = value
    return change


def dataset(name, value, dtype=None, shape=None):
    """A change that replaces the elements of a dataset and keeps its attributes."""
    def change(f):
        kept = dict(f[name].attrs)
        del f[name]
        f.create_dataset(name, data=value, dtype=dtype) if shape is None else f.create_dataset(name, shape, dtype)
        f[name].attrs.update(kept)
    return change


def added(name, value):
    def change(f):
        f[name] = value
    return change


text = h5py.string_dtype()
SHARDED = [
    (INDEX, attribute("mesh_shape", None), 3, MESH),
    (INDEX, attribute("mesh_shape", np.float32([2])), 3, MESH),
    (INDEX, attribute("mesh_shape", np.int64([0])), 3, MESH),
    (INDEX, attribute("mesh_shape", np.int64([3])), 3, MESH),
    (INDEX, attribute("mesh_shape", np.int64([2**40])), 3, MESH),
    (INDEX, attribute("mesh_shape", np.arange(99)), 3, MESH),
    (INDEX, attribute("mesh_names", None), 3, MESH),
    (INDEX, attribute("mesh_names", np.array([b"dp"])), 3, MESH),
    (INDEX, attribute("mesh_names", np.array([""], dtype=text)), 3, MESH),
    (INDEX, attribute("mesh_names", np.array(["dp", "tp"], dtype=text)), 3, MESH),
    (INDEX, attribute("mesh_names", np.array(["x" * 99], dtype=text)), 3, MESH),
    (INDEX, attribute("mesh_names", np.array(["dp"] * 99, dtype=text)), 3, MESH),
    (INDEX, attribute("world_size", 3), 3, MESH),
    (INDEX, attribute("fsdpckpt_schema", None), 3, "index.h5: not written by fsdpckpt (no attribute fsdpckpt_schema)"),
    (INDEX, attribute("fsdpckpt_schema", 1.5), 3, "index.h5: not written by fsdpckpt"),
    (INDEX, attribute("fsdpckpt_schema", 9), 5, "index.h5: written with schema 9; this fsdpckpt reads schemas 1 to 2"),
    (INDEX, attribute("fsdpckpt_schema", -9), 3, "index.h5: not written by fsdpckpt"),
    (INDEX, attribute("fsdpckpt_schema", 2**40), 5, "index.h5: written with schema 2147483647"),
    (INDEX, attribute("mesh_shape", np.int64([-2])), 3, MESH),
    (INDEX, attribute("world_size", -2), 3, MESH),
    (SHARD, attribute("offsets", np.int64([-3]), W), 3, BOX),
    (SHARD, attribute("rank", -2), 3, SHARD + ": it contains the shard of rank -1"),
    (INDEX, attribute("placements", None, W), 3, "index.h5: dataset /%s: the attribute placements is missing or damaged" % W),
    (INDEX, attribute("placements", "[Shard(0)", W), 3, "the attribute placements is missing or damaged"),
    (INDEX, attribute("placements", 7, W), 3, "the attribute placements is missing or damaged"),
    (INDEX, attribute("placements", ["[Shard(0)]"] * 2, W), 3, "the attribute placements is missing or damaged"),
    (INDEX, attribute("placements", np.bytes_(b"\xff"), W), 3, "the attribute placements is missing or damaged"),
    (INDEX, attribute("placements", np.bytes_(b"[Shard(0)]"), W), 0, ""),
    (INDEX, attribute("dtype", "int32", W), 3, "dataset /%s: the attribute dtype says int32, but the HDF5 type is float32" % W),
    (INDEX, attribute("made by", "another program"), 0, ""),
    (INDEX, dataset(W, None, h5py.vlen_dtype("f4"), (6,)), 5, "dataset /%s: variable-length" % W),
    (INDEX, added("a%41", np.ones(3)), 3, 'the link name "a%41" is not encoded by fsdpckpt'),
    (SHARD, attribute("rank", 0), 3, SHARD + ": it contains the shard of rank 0: the file was renamed or replaced"),
    (SHARD, attribute("mesh_names", np.array(["tp"], dtype=text)), 3, SHARD + ": its mesh differs from that of index.h5"),
    (SHARD, attribute("fsdpckpt_schema", None), 3, SHARD + ": not written by fsdpckpt"),
    (SHARD, attribute("world_size", 4), 3, SHARD + ": " + MESH),
    (SHARD, attribute("global_shape", None, W), 3, "dataset /%s: %s" % (W, BOX)),
    (SHARD, attribute("global_shape", np.int64([7]), W), 3, BOX),
    (SHARD, attribute("offsets", None, W), 3, BOX),
    (SHARD, attribute("offsets", np.int64([1]), W), 3, "its shape and offsets are not those that the placements give rank 1"),
    (SHARD, attribute("owner", 0, W), 3, "dataset /%s: the attribute owner does not match its storage" % W),
    (SHARD, dataset(W, np.ones(3, "f8")), 3, "is float64 with 1 dimensions, but in index.h5 it is float32 with 1"),
    (SHARD, dataset(W, np.ones((3, 1), "f4")), 3, "is float32 with 2 dimensions, but in index.h5 it is float32 with 1"),
    (SHARD, dataset(W, np.ones(2, "f4")), 3, "its shape and offsets are not those that the placements give rank 1"),
    (SHARD, dataset(W, np.array([b"one", b"two", b"end"])), 3, "dataset /%s and index.h5 disagree about the object" % W),
    (SHARD, dataset(W, None, h5py.ref_dtype, (3,)), 5, "dataset /%s: reference" % W),
    (SHARD, added("extra", np.ones(3)), 3, SHARD + ": dataset /extra is not in index.h5"),
    ("shard-00000-of-00002.h5", dataset(STEP, np.zeros(9, "V1")), 3, "dataset /%s and index.h5 disagree about the object" % STEP),
]
STRAY = {"shard-1-of-2.h5": 3, "shard--0001-of-00002.h5": 3, "shard-00002-of-00002.h5": 3, "shard-00001-of-00003.h5": 3,
         "shard-00001-of-00002.h5.part": 0, "shard-00001-of-00002": 0}


def run(home, *argv):
    return subprocess.run([TOOL, *argv], cwd=home, capture_output=True, text=True, errors="replace")


def refused(home, source, status, words, *options):
    """Converts a checkpoint. @return what is wrong with the outcome, or None."""
    p = run(home, "consolidate", source, "-o", "out.h5", "-q", *options)
    written = os.path.exists(os.path.join(home, "out.h5"))
    if written:
        os.unlink(os.path.join(home, "out.h5"))
    lines = 0 if status == 0 else 1
    good = p.returncode == status and p.stderr.count("\n") == lines and words in p.stderr and written == (status == 0)
    return None if good else "%d expected with %r: %s" % (status, words, p)


def sharded(home):
    """Changes one file; a byte more in index.h5 makes its tables invalid, so that all files are read."""
    bad = []
    made, tried = os.path.join(home, "made"), os.path.join(home, "tried")
    run(home, "reshard", os.path.join(CORPUS, "good/dcp-torch2.15.0-train"), "-o", "made", "--dp", "2", "-q").check_returncode()
    for n, (name, change, status, words) in enumerate(SHARDED):
        shutil.copytree(made, tried)
        with h5py.File(os.path.join(tried, name), "r+") as f:
            change(f)
        with open(os.path.join(tried, INDEX), "ab") as f:
            f.write(b"x")
        bad.append((wrong := refused(home, "tried", status, words)) and "change %d of %s: %s" % (n, name, wrong))
        shutil.rmtree(tried)
    for name, status in STRAY.items():
        shutil.copytree(made, tried)
        shutil.copy(os.path.join(made, SHARD), os.path.join(tried, name))
        bad.append(refused(home, "tried", status, "" if status == 0 else "%s does not belong here" % name))
        shutil.rmtree(tried)
    return bad


# ---- types of other programs ----

F4, F4B, F8, I4 = h5t.IEEE_F32LE, h5t.IEEE_F32BE, h5t.IEEE_F64LE, h5t.STD_I32LE


def changed(base, **fields):
    made = base.copy()
    for name, value in fields.items():
        getattr(made, "set_" + name)(*(value if isinstance(value, tuple) else (value,)))
    return made


def compound(size, **members):
    made = h5t.create(h5t.COMPOUND, size)
    for name, (at, member) in members.items():
        made.insert(name.encode(), at, member)
    return made


def enum(base, **members):
    made = h5t.enum_create(base)
    for name, value in members.items():
        made.enum_insert(name.encode(), value)
    return made


def string(pad):
    return changed(h5t.C_S1, size=4, strpad=pad)


VARIABLE = h5t.py_create(h5py.string_dtype(), logical=True)
# Two elements of each type become a tensor of this dtype, or an object.
TENSORS = {
    "bitfield": (h5t.STD_B8LE, "uint8"), "bool": (enum(h5t.STD_I8LE, FALSE=0, TRUE=1), "bool"),
    "complex": (compound(8, r=(0, F4), i=(4, F4)), "complex64"), "big complex": (compound(8, r=(0, F4B), i=(4, F4B)), "complex64"),
    "real and imag": (compound(16, real=(0, F8), imag=(8, F8)), "complex128"), "half": (h5t.IEEE_F16LE, "float16"),
    "big": (h5t.IEEE_F64BE, "float64"), "big unsigned": (h5t.STD_U64BE, "uint64"), "byte": (h5t.STD_I8LE, "int8"),
}
OBJECTS = {
    "24 bits": changed(I4, precision=24, size=3), "12 of 16 bits": changed(h5t.STD_I16LE, precision=12),
    "shifted": changed(h5t.STD_I16LE, precision=8, offset=4), "long double": h5t.NATIVE_LDOUBLE,
    "without norm": changed(F4, norm=h5t.NORM_NONE), "other bias": changed(F4, ebias=120),
    "other exponent": changed(F4, fields=(31, 22, 9, 0, 22)), "other sign": changed(F4, fields=(0, 24, 8, 1, 23)),
    "opaque": h5t.create(h5t.OPAQUE, 3), "not a bool": enum(h5t.STD_I8LE, FALSE=1, TRUE=0), "time": h5t.UNIX_D32LE,
    "three": enum(h5t.STD_I8LE, FALSE=0, TRUE=1, MAYBE=2), "names": enum(h5t.STD_I8LE, NO=0, YES=1),
    "wide bool": enum(h5t.STD_I16LE, FALSE=0, TRUE=1), "mixed": compound(12, r=(0, F4), i=(4, F8)),
    "integers": compound(8, r=(0, I4), i=(4, I4)), "one integer": compound(8, r=(0, F4), i=(4, I4)),
    "two orders": compound(8, r=(0, F4), i=(4, F4B)), "x and y": compound(8, x=(0, F4), y=(4, F4)),
    "r and x": compound(8, r=(0, F4), x=(4, F4)), "gap": compound(12, r=(0, F4), i=(8, F4)),
    "other real": compound(8, r=(0, changed(F4, ebias=120)), i=(4, F4)), "three parts": compound(12, r=(0, F4), i=(4, F4), j=(8, F4)),
    "other imag": compound(8, r=(0, F4), i=(4, changed(F4, ebias=120))), "array": h5t.array_create(F4, (2,)),
}
TEXTS = {"ends in NUL": (string(h5t.STR_NULLTERM), ["ab  ", ""]), "padded": (string(h5t.STR_NULLPAD), ["ab  ", ""]),
         "blanks": (string(h5t.STR_SPACEPAD), ["ab", "\0" * 4])}
POINTERS = {"reference": h5t.STD_REF_OBJ, "text in a compound": compound(8, t=(0, VARIABLE)), "lists": h5t.vlen_create(F4),
            "text in an array": h5t.array_create(VARIABLE, (2,))}
ATTRIBUTES = {"none": (h5py.Empty("f4"), None), "text": ("a\u00e9", "a\u00e9"), "texts": (np.array(["x", ""], dtype=text), ["x", ""]),
              "f8": (np.float64([1e300, 0.1, 3]), [1e300, 0.1, 3.0]), "f4": (np.float32([0.5, 7]), [0.5, 7.0]),
              "odd": (np.float64([np.nan, np.inf, -np.inf]), [{"$float": "nan"}, {"$float": "inf"}, {"$float": "-inf"}]),
              "i4": (np.int32([[1, -2], [3, 4]]), [[1, -2], [3, 4]]), "no elements": (np.zeros((2, 0)), [[], []]),
              "17 dimensions": (np.ones((1,) * 17, "i1"), json.loads("[" * 17 + "1" + "]" * 17))}
FILTERS = {32013: "zfp", 32017: "sz", 32024: "sz3", 32999: "an unregistered filter", 305: "lzo"}


def raw(kind):
    """Two elements; strings as they are, other bytes with ones for bool."""
    size = kind.get_size()
    data = b"ab  \0\0\0\0" if kind.get_class() == h5t.STRING else bytes(i & 1 for i in range(2 * size))
    return np.frombuffer(data, "V%d" % size)


def write(f, name, kind, empty=False):
    space = h5py.h5s.create_simple((2,))
    made = [h5py.h5d.create(f.id, name.encode(), kind, space), h5py.h5a.create(f.id, name.encode(), kind, space)]
    if not empty:
        made[0].write(h5py.h5s.ALL, h5py.h5s.ALL, raw(kind), mtype=kind)
        made[1].write(raw(kind), mtype=kind)


def write_filtered(f, number):
    kind = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    kind.set_chunk((4,))
    kind.set_filter(number, h5py.h5z.FLAG_OPTIONAL, (1,))
    h5py.h5d.create(f.id, b"f%d" % number, F4, h5py.h5s.create_simple((4,)), kind).write(
        h5py.h5s.ALL, h5py.h5s.ALL, np.ones(4, "f4"))


def foreign(home):
    """Names the dtype or the encoding of every dataset, and reads every attribute as JSON."""
    with h5py.File(os.path.join(home, "foreign.h5"), "w") as f:
        kinds = {name: kind for name, (kind, _) in {**TENSORS, **TEXTS}.items()}
        for name, kind in {**kinds, **OBJECTS}.items():
            write(f, name, kind)
        for name, kind in POINTERS.items():
            write(f, name, kind, True)
        for name, (value, _) in ATTRIBUTES.items():
            f.attrs[name] = value
        h5py.h5a.create(f.id, b"\xff", I4, h5py.h5s.create(h5py.h5s.SCALAR)).write(np.array(5, "i4"))
        for number in FILTERS:
            write_filtered(f, number)
    listed = json.loads(run(home, "inspect", "foreign.h5", "--json").stdout)
    found = {t["name"]: t["dtype"] for t in listed["tensors"]}
    found.update({o["name"]: o["encoding"] for o in listed["objects"]})
    want = {**{n: d for n, (_, d) in TENSORS.items()}, **dict.fromkeys(OBJECTS, "hdf5.bytes"), **dict.fromkeys(TEXTS, "hdf5.string"),
            **dict.fromkeys(POINTERS, "hdf5"), **{"f%d" % n: "hdf5" for n in FILTERS}, "@attributes": "hdf5.attributes"}
    bad = ["%s is %s, not %s" % (n, found.get(n), want.get(n)) for n in {**found, **want} if found.get(n) != want.get(n)]
    for number, name in FILTERS.items():
        p = run(home, "extract", "foreign.h5", "f%d" % number)
        if p.returncode != 5 or "compressed with %s (HDF5 filter %d)" % (name, number) not in p.stderr:
            bad.append("filter %d: %s" % (number, p))
    bad += attributes(json.loads(run(home, "extract", "foreign.h5", "@attributes", "--to", "json").stdout)["/"])
    return bad


def attributes(found):
    bad = []
    for name, kind in OBJECTS.items():
        if found[name]["$hdf5"].get("bytes") != base64.b64encode(raw(kind).tobytes()).decode():
            bad.append("attribute %s: %s" % (name, found[name]))
    bad += ["attribute %s: %s" % (n, found[n]) for n in POINTERS if list(found[n]["$hdf5"]) != ["type"]]
    want = {**{n: v for n, (_, v) in {**TEXTS, **ATTRIBUTES}.items()}, "bool": [False, True], "byte": [0, 1],
            "big": raw(F8).view(">f8").tolist(), "half": raw(h5t.IEEE_F16LE).view("<f2").astype("f8").tolist(),
            "big unsigned": raw(F8).view(">u8").tolist()}
    bad += ["attribute %s: %s instead of %s" % (n, found[n], v) for n, v in want.items()
            if json.dumps(found[n]) != json.dumps(v) and not (n == "half" and np.allclose(found[n], v, rtol=1e-8, atol=0))]
    nameless = [v for n, v in found.items() if n.startswith("$attribute-")]
    return bad + ([] if nameless == [5] else ["an attribute whose name is not UTF-8: %s" % nameless])

def main():
    with tempfile.TemporaryDirectory() as home:
        bad = [*filter(None, sharded(home)), *foreign(home)]
    print("\n".join(bad) or "%d changes" % (len(SHARDED) + len(STRAY)))
    return len(bad) > 0


if __name__ == "__main__":
    sys.exit(main())
