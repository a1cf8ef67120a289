"""Files that h5py writes must open, and every dataset must have the bytes that h5py reads.

    h5_read.py H5_DUMP [SEED [FILES]]

Tests random files with every layout, filter, byte order and type that we claim to read, then special cases one by one. h5py
reads the expected bytes in the file's own type, so it converts nothing either.
"""
import json
import os
import random
import subprocess
import sys
import tempfile

try:
    import h5py
    import numpy as np
    from checks import check, finish
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)

DUMP = os.path.abspath(sys.argv[1])
SEED = int(sys.argv[2]) if len(sys.argv) > 2 else 20240
FILES = int(sys.argv[3]) if len(sys.argv) > 3 else 40


def unhex(s):
    return bytes.fromhex(s).decode()


def dump(path, *options):
    """-> (exit status, stderr, {name: (path, dtype, shape, nchunks, encoding, codec or error, bytes)})"""
    with tempfile.TemporaryDirectory() as out:
        p = subprocess.run([DUMP, *options, path, out], capture_output=True, text=True)
        values = {}
        for line in p.stdout.splitlines():
            i, name, where, dtype, shape, n, encoding, _, last = line.split("\t")
            elements = [(unhex(e.lstrip("#")), e.startswith("#")) for e in where.split("/")]
            at = os.path.join(out, i)
            raw = open(at, "rb").read() if os.path.exists(at) else None
            shape = tuple(int(x) for x in shape.split(",") if x)
            values[unhex(name)] = (elements, dtype, shape, int(n), encoding, last, raw)
        return p.returncode, p.stderr.strip(), values


# ---- types: (torch name, h5py low-level type, bytes swapped as one) ----

def custom(size, spos, epos, esize, mpos, msize, bias, big=False):
    t = h5py.h5t.IEEE_F32LE.copy()
    t.set_fields(spos, epos, esize, mpos, msize)
    t.set_precision(8 * size)
    t.set_size(size)
    t.set_ebias(bias)
    if big:
        t.set_order(h5py.h5t.ORDER_BE)
    return t


def pair(t, size):
    c = h5py.h5t.create(h5py.h5t.COMPOUND, 2 * size)
    c.insert(b"r", 0, t)
    c.insert(b"i", size, t)
    return c


def boolean():
    return h5py.h5t.py_create(np.dtype(bool), logical=True)


T = h5py.h5t
TYPES = [
    ("float64", T.IEEE_F64LE, 1), ("float64", T.IEEE_F64BE, 8), ("float32", T.IEEE_F32LE, 1),
    ("float32", T.IEEE_F32BE, 4), ("float16", T.IEEE_F16LE, 1), ("float16", T.IEEE_F16BE, 2),
    ("bfloat16", custom(2, 15, 7, 8, 0, 7, 127), 1), ("bfloat16", custom(2, 15, 7, 8, 0, 7, 127, True), 2),
    ("float8_e4m3fn", custom(1, 7, 3, 4, 0, 3, 7), 1), ("float8_e5m2", custom(1, 7, 2, 5, 0, 2, 15), 1),
    ("int8", T.STD_I8LE, 1), ("int16", T.STD_I16BE, 2), ("int32", T.STD_I32LE, 1), ("int32", T.STD_I32BE, 4),
    ("int64", T.STD_I64LE, 1), ("int64", T.STD_I64BE, 8), ("uint8", T.STD_U8BE, 1), ("uint16", T.STD_U16LE, 1),
    ("uint32", T.STD_U32BE, 4), ("uint64", T.STD_U64LE, 1), ("uint16", T.STD_B16LE, 1), ("bool", boolean(), 1),
    ("complex64", pair(T.IEEE_F32LE, 4), 1), ("complex64", pair(T.IEEE_F32BE, 4), 4),
    ("complex128", pair(T.IEEE_F64LE, 8), 1), ("complex32", pair(T.IEEE_F16LE, 2), 1),
]


def native(raw, unit):
    a = np.frombuffer(raw, np.uint8)
    return a.reshape(-1, unit)[:, ::-1].tobytes() if unit > 1 else raw


def raw_of(ds):
    """The bytes of a dataset in the file's own type."""
    if ds.shape is None or 0 in ds.shape:
        return b""
    out = np.zeros(int(np.prod(ds.shape, dtype=np.int64)) * ds.id.get_type().get_size(), np.uint8)
    ds.id.read(h5py.h5s.ALL, h5py.h5s.ALL, out, ds.id.get_type())
    return out.tobytes()


NAMES = ["weight", "a b", "läyer.0", "%2F", "%", "x%41", "日本", "..a", "w:0", "-", "a\tb", "q" * 200, "'", '"', "\\"]


def random_shape(rng):
    n = rng.choice([0, 1, 1, 2, 2, 3, 4])
    return tuple(rng.choice([1, 2, 3, 5, 8, 17, 33]) for _ in range(n))


def pipeline(rng, dcpl, shape, is_integer):
    """Sets a random layout and filters. Returns the codecs that a chunk may then have."""
    kind = rng.choice(["contiguous", "compact", "chunked", "chunked", "chunked", "library"])
    if kind == "compact" and np.prod(shape) < 4000:
        dcpl.set_layout(h5py.h5d.COMPACT)
        return {"inline"}
    if kind in ("contiguous", "compact") or not shape:
        return {"raw", "inline"}
    dcpl.set_chunk(tuple(rng.randint(1, max(1, s)) for s in shape))
    if kind == "library":
        if is_integer and rng.random() < 0.7:
            dcpl.set_scaleoffset(h5py.h5z.SO_INT, 0)
        elif rng.random() < 0.5:
            dcpl.set_deflate(1)
            dcpl.set_shuffle()
            dcpl.set_deflate(2)
        else:
            for _ in range(5):
                dcpl.set_shuffle()
        return {"format", "inline"}
    filters = [dcpl.set_shuffle, lambda: dcpl.set_deflate(rng.randint(0, 9)), dcpl.set_fletcher32]
    rng.shuffle(filters)
    chosen = filters[: rng.randint(0, 3)]
    for f in chosen:
        f()
    return {"filtered", "inline"} if chosen else {"raw", "inline"}


def add_dataset(rng, group, name):
    torch_name, type_, unit = rng.choice(TYPES)
    shape = random_shape(rng)
    if shape and rng.random() < 0.1:
        shape = shape[:-1] + (0,)
    dcpl = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    codecs = pipeline(rng, dcpl, tuple(max(1, s) for s in shape), type_.get_class() == T.INTEGER)
    if rng.random() < 0.3 and torch_name in ("float32", "int64"):
        dcpl.set_fill_value(np.array(7, np.float32 if torch_name == "float32" else np.int64))
    if rng.random() < 0.3:
        dcpl.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    space = h5py.h5s.create_simple(shape) if shape else h5py.h5s.create(h5py.h5s.SCALAR)
    lcpl = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    lcpl.set_char_encoding(h5py.h5t.CSET_UTF8)
    dsid = h5py.h5d.create(group.id, None, type_, space, dcpl)
    h5py.h5o.link(dsid, group.id, name.encode(), lcpl=lcpl)
    ds = h5py.Dataset(dsid)
    size = type_.get_size()
    how = rng.random()
    if how < 0.75 and 0 not in shape:
        data = np.frombuffer(rng.randbytes(max(1, int(np.prod(shape))) * size), np.uint8)
        if torch_name == "bool":
            data = data & 1
        if rng.random() < 0.5 and torch_name != "bool":
            data = np.zeros_like(data)  # compressible: some chunks shrink, some do not
        dsid.write(h5py.h5s.ALL, h5py.h5s.ALL, data.copy(), type_)
    elif shape and 0 not in shape and "compact" not in codecs:
        # writes only a corner, so the other chunks stay unallocated
        part = tuple(rng.randint(1, s) for s in shape)
        start = tuple(rng.randint(0, s - p) for s, p in zip(shape, part))
        fspace = h5py.h5s.create_simple(shape)
        fspace.select_hyperslab(start, part)
        n = int(np.prod(part)) * size
        data = np.frombuffer(rng.randbytes(n), np.uint8) & (1 if torch_name == "bool" else 255)
        dsid.write(h5py.h5s.create_simple(part), fspace, data.copy(), type_)
    return torch_name, unit, codecs


def random_file(rng, path):
    options = {}
    if rng.random() < 0.3:
        options["userblock_size"] = rng.choice([512, 1024, 8192])
    if rng.random() < 0.5:
        options["libver"] = rng.choice(["earliest", "v108", "v110"])
    if rng.random() < 0.5:
        options["track_order"] = True
    expected = {}
    with h5py.File(path, "w", **options) as f:
        groups = [("", f)]
        for i in range(rng.randint(0, 5)):
            base, parent = rng.choice(groups)
            name = f"{rng.choice(NAMES)}{i}"
            groups.append((f"{base}/{name}", parent.create_group(name)))
        for i in range(rng.randint(1, 14)):
            base, parent = rng.choice(groups)
            name = f"{rng.choice(NAMES)}_{i}"
            expected[f"{base}/{name}"[1:]] = add_dataset(rng, parent, name)
    return expected


def random_files():
    rng = random.Random(SEED)
    seen = set()
    with tempfile.TemporaryDirectory() as d:
        for n in range(FILES):
            path = os.path.join(d, "r.h5")
            expected = random_file(rng, path)
            rc, err, values = dump(path)
            check(rc == 0 and not err, f"file {n} of seed {SEED}: {rc} {err}")
            check(len(values) == len(expected), f"file {n}: {sorted(values)} instead of {sorted(expected)}")
            with h5py.File(path) as f:
                for where, (torch_name, unit, codecs) in expected.items():
                    ds, got = f[where], values.get(where.replace("/", "."))
                    what = f"file {n} of seed {SEED}: {where} {torch_name} {ds.shape} {ds.chunks} {codecs}"
                    check(got is not None, what + " is missing")
                    if got:
                        seen.add(got[5])
                        check(got[0] == [(e, False) for e in where.split("/")], what + f": path {got[0]}")
                        check(got[1:3] == (torch_name, ds.shape), what + f": {got[1:3]}")
                        check(got[5] in codecs | {"-"} or got[5] == "inline", what + f": {got[5]}")
                        check(got[6] == native(raw_of(ds), unit), what + ": wrong bytes")
    check(seen >= {"raw", "inline", "filtered", "format"}, f"the files do not reach every codec: {seen}")


# ---- special cases ----

def special_cases(d):
    path = os.path.join(d, "s.h5")
    with h5py.File(path, "w") as f:
        f["w"] = np.arange(6, dtype="f4").reshape(2, 3)
        f["g/tied"] = f["w"]
        f["g/soft"] = h5py.SoftLink("/w")
        f["g/self"] = f["/"]
        f["g/up"] = h5py.SoftLink("/g")
        f["dangling"] = h5py.SoftLink("/nowhere")
        f["outside"] = h5py.ExternalLink("other.h5", "/x")
        f["text"] = "häl\"lo"
        f["texts"] = np.array([["a", "b"], ["", "ü"]], dtype=object)
        f["fixed"] = np.array([b"ab", b"c"])
        f["not_utf8"] = np.array(b"\xff\xfe")
        f["compound"] = np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")])
        f["enum"] = np.array([1, 0], dtype=h5py.enum_dtype({"RED": 0, "GREEN": 1}, "i4"))
        f["refs"] = np.array([f["w"].ref], dtype=h5py.ref_dtype)
        vl = f.create_dataset("ragged", (2,), dtype=h5py.vlen_dtype("i4"))
        vl[0] = [1, 2]
        f.create_dataset("lzf", data=np.arange(9), compression="lzf", chunks=(3,))
        f["empty"] = h5py.Empty("f8")
        f["long_double"] = np.array([1.0], dtype=np.longdouble)
        f["keras"] = np.array([b"\x80\x3f", b"\x00\x40"], dtype="V2")
        f["keras"].attrs["dtype"] = "bfloat16"
        f["dim"] = np.void(b"raw bytes")
        v = h5py.VirtualLayout((2, 3), "f4")
        v[:] = h5py.VirtualSource(".", "w", (2, 3))
        f.create_virtual_dataset("virtual", v)
        f.attrs["config"] = json.dumps({"class_name": "Sequential"})
        f["w"].attrs["numbers"] = np.array([[1.5, np.inf]], dtype="f4")
        f["g"].attrs["flag"] = True
        f["g"].attrs["when"] = np.array([2 ** 63], dtype="u8")
    rc, err, v = dump(path)
    check(rc == 0 and not err, f"special: {rc} {err}")
    w = np.arange(6, dtype="<f4").tobytes()
    check(v["lzf"][1:3] == ("int64", (9,)) and v["lzf"][6] == np.arange(9).tobytes(), f"lzf: {v.get('lzf')}")
    for name in ("w", "g.tied", "g.soft"):
        check(v[name][1:3] == ("float32", (2, 3)) and v[name][6] == w, f"{name}: {v.get(name)}")
    check(not any(n.startswith(("g.self.", "g.up.")) for n in v), f"cycles were walked: {sorted(v)}")
    errors = {
        "dangling": (3, "a link whose target does not exist"),
        "outside": (5, "a link into another file, which is not followed; follow external or exclude"),
        "refs": (5, "reference of 8 bytes: references and variable-length data have no meaning outside this file"),
        "ragged": (5, "variable-length of 16 bytes: references and variable-length data have no meaning"),
        "virtual": (5, "a virtual dataset over other data, which is not followed; follow external or exclude"),
    }
    for name, (code, text) in errors.items():
        got = v[name][5]
        check(got.startswith(f"ERROR {code} {path}: dataset /{name}: {text}") and
              got.endswith(f" exclude {name}"), f"{name}: {got}")
    texts = {
        "text": 'häl"lo', "texts": [["a", "b"], ["", "ü"]], "fixed": ["ab", "c"], "not_utf8": {"$bytes": "//4="},
        "@attributes": {"/": {"config": '{"class_name": "Sequential"}'}, "/g": {"flag": True, "when": [2 ** 63]},
                        "/w": {"numbers": [[1.5, {"$float": "inf"}]]}, "/g/tied": {"numbers": [[1.5, {"$float": "inf"}]]},
                        "/g/soft": {"numbers": [[1.5, {"$float": "inf"}]]}, "/keras": {"dtype": "bfloat16"}},
    }
    for name, value in texts.items():
        check(name in v and json.loads(v[name][6]) == value, f"{name}: {v.get(name)}")
    with h5py.File(path) as f:
        for name in ("compound", "enum", "long_double", "dim"):
            check(v[name][4] == "hdf5.bytes" and v[name][6] == raw_of(f[name]), f"{name}: {v[name]}")
        check(v["keras"][1] == "bfloat16" and v["keras"][6] == raw_of(f["keras"]), f"keras: {v['keras']}")
    check(v["empty"][1:4] == ("float64", (0,), 0), f"empty: {v['empty']}")
    rc, err, v = dump(path, "--follow-external")
    check(v["virtual"][5] == "format" and v["virtual"][6] == w, f"followed virtual: {v['virtual']}")
    check(v["outside"][5].startswith("ERROR 3"), f"missing external file: {v['outside']}")


def external_files(d):
    path = os.path.join(d, "e.h5")
    data = np.arange(1000, dtype="<i4")
    data.tofile(os.path.join(d, "bytes.bin"))
    with h5py.File(os.path.join(d, "other.h5"), "w") as f:
        f["x"] = data[:10]
        f["deep/y"] = data.reshape(10, 100)
        f.create_dataset("gz", data=data, chunks=(128,), compression="gzip")
    with h5py.File(path, "w") as f:
        f.create_dataset("raw", (1000,), "i4", external=[("bytes.bin", 0, 4000)])
        f.create_dataset("short", (1001,), "i4", external=[("bytes.bin", 0, 4004)])
        f.create_dataset("gone", (10,), "i4", external=[("gone.bin", 0, 40)])
        f["link"] = h5py.ExternalLink("other.h5", "/x")
        f["tree"] = h5py.ExternalLink("other.h5", "/deep")
        f["gz"] = h5py.ExternalLink("other.h5", "/gz")
        v = h5py.VirtualLayout((20,), "i4")
        v[:10] = h5py.VirtualSource("other.h5", "x", (10,))
        v[10:] = h5py.VirtualSource("missing.h5", "x", (10,))
        f.create_virtual_dataset("hole", v)
        v = h5py.VirtualLayout((10,), "i4")
        v[:] = h5py.VirtualSource("other.h5", "x", (10,))
        f.create_virtual_dataset("whole", v)
    rc, err, v = dump(path)
    check(rc == 0 and all(x[5].startswith("ERROR 5") and "follow external" in x[5] for x in v.values()),
          f"external data must be refused: {v}")
    here = os.getcwd()
    for where in (here, d, "/"):
        os.chdir(where)
        rc, err, v = dump(os.path.relpath(path), "--follow-external")
        os.chdir(here)
        check(rc == 0 and not err, f"external: {rc} {err}")
        for name, value in (("raw", data), ("link", data[:10]), ("tree.y", data), ("gz", data), ("whole", data[:10])):
            check(name in v and v[name][6] == value.tobytes(), f"external {name} from {where}: {v.get(name)}")
        for name, text in (("short", "its external file bytes.bin is truncated"),
                           ("gone", "its external file gone.bin is missing"), ("hole", "missing.h5:x is missing")):
            check(v[name][5].startswith("ERROR 3") and text in v[name][5], f"external {name}: {v[name]}")


def names_and_sizes(d):
    path = os.path.join(d, "n.h5")
    with h5py.File(path, "w") as f:
        f["a.b/c"] = np.int8(1)
        f["a/b.c"] = np.int8(2)
    rc, err, v = dump(path)
    check(sorted(v) == ["a.b.c", "a/b.c"] or sorted(v) == ["a.b.c", "a.b/c"], f"names that collide: {sorted(v)}")
    with h5py.File(path, "w") as f:
        f.create_dataset("sparse", (1 << 40,), "f4", chunks=(1 << 20,))[5 << 30] = 1
        f.create_dataset("huge", (1 << 50,), "u1")
    rc, err, v = subprocess.run([DUMP, path], capture_output=True, text=True), "", None
    check(rc.returncode == 0 and not rc.stderr, f"sparse: {rc}")
    with h5py.File(path, "w") as f:
        g = f
        for _ in range(300):
            g = g.create_group("g")
    rc, err, v = dump(path)
    check(rc == 5 and "nested more than 256 deep" in err, f"deep: {rc} {err}")
    with h5py.File(path, "w") as f:
        g = f
        for i in range(40):  # 2^40 paths through empty groups
            n = g.create_group("a")
            g["b"] = n
            g = n
    rc, err, v = dump(path)
    check(rc == 5 and "too many paths lead to the same groups" in err, f"ways: {rc} {err}")
    with h5py.File(path, "w") as f:
        g = f
        for i in range(40):  # and to tensors
            n = g.create_group("a")
            g["w"] = i
            g["b"] = n
            g = n
    rc, err, v = dump(path)
    check(rc == 5 and "too many paths lead to the same groups" in err, f"many names: {rc} {err}")
    with h5py.File(path, "w") as f:
        f["x"] = 1
        f.attrs["fsdpckpt_schema"] = 3
    rc, err, v = dump(path)
    check(rc == 5 and err == f"{path}: written with schema 3; this fsdpckpt reads schemas 1 to 2: use a newer one", err)


def main():
    random_files()
    with tempfile.TemporaryDirectory() as d:
        special_cases(d)
        external_files(d)
        names_and_sizes(d)
    return finish("h5_read")


sys.exit(main())
