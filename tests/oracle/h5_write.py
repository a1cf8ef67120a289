"""The output of the HDF5 writer, read by stock h5py and h5dump: h5_write.py PATH_OF_h5_make

Every value of the synthetic checkpoint (tests/support/h5_make.h) is read from the full file, from every shard file and from
index.h5, on several meshes, and compared bit for bit with bytes computed here.
"""
import ctypes
import glob
import math
import os
import shutil
import subprocess
import sys
import tempfile

try:
    import h5py
    import ml_dtypes
    import numpy as np
    from checks import check, failures
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)

MAKE = os.path.abspath(sys.argv[1])
WIDTH = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "uint64": 8,
         "uint32": 4, "uint16": 2, "complex32": 4, "complex64": 8, "complex128": 16}
# The numpy dtype that h5py shows, for types that it knows.
NUMPY = {"float64": "<f8", "float32": "<f4", "float16": "<f2", "int64": "<i8", "int32": "<i4", "int16": "<i2",
         "int8": "i1", "uint64": "<u8", "uint32": "<u4", "uint16": "<u2", "uint8": "u1", "bool": "bool",
         "complex64": "<c8", "complex128": "<c16", "float8_e4m3fn": "u1", "float8_e4m3fnuz": "u1", "float8_e5m2fnuz": "u1",
         "float8_e8m0fnu": "u1", "float4_e2m1fn_x2": "u1", "object": "V1"}
# h5py widens custom floats. For these two that is exact, since every value is also a float32.
WIDENED = {"bfloat16": ml_dtypes.bfloat16, "float8_e5m2": ml_dtypes.float8_e5m2}


class Value:
    def __init__(self, number, record):
        self.name, self.dtype, shape, *keys, self.json = record.split("\x1f")
        self.shape = tuple(int(s) for s in shape.split(",")) if shape else ()
        self.keys = [k[1:] for k in keys]
        self.lists = [k[0] == "#" for k in keys]
        self.path = "/" + "/".join(encode(k) for k in self.keys)
        self.is_object = self.dtype == "object"
        width = WIDTH.get(self.dtype, 1)
        i = np.arange(math.prod(self.shape) * width, dtype=np.int64)
        raw = ((i * 131 + i // 256 * 7 + number * 29) % 256).astype("u1")
        if self.dtype == "bool":
            raw &= 1
        self.bits = raw.view(f"V{width}").reshape(self.shape)


def encode(key):
    if key in ("", "."):
        return {"": "%", ".": "%2E"}[key]
    return key.replace("%", "%25").replace("/", "%2F")


def listing():
    text = subprocess.run([MAKE, "--list"], check=True, capture_output=True).stdout.decode()
    return [Value(n, r) for n, r in enumerate(text.split("\x1e")[:-1])]


def make(out, mesh):
    subprocess.run([MAKE, out] + [f"{n}={s}" for n, s in mesh], check=True)


def bits(ds):
    """The stored bits, without conversion by HDF5 (as described in docs/HDF5_SCHEMA.md)."""
    raw = np.empty(ds.shape, np.dtype(f"V{ds.id.get_type().get_size()}"))
    if raw.size:
        ds.id.read(h5py.h5s.ALL, h5py.h5s.ALL, raw, ds.id.get_type())
    return raw


def check_native(ds, expected, where, dtype):
    """Checks what a user gets from plain ds[()]."""
    if dtype in NUMPY:
        check(ds.dtype == np.dtype(NUMPY[dtype]), f"{where}: h5py calls it {ds.dtype}")
        check(ds[()].tobytes() == expected.tobytes(), f"{where}: ds[()]")
    elif dtype in WIDENED and ds.shape != ():
        want = np.ascontiguousarray(expected).view(WIDENED[dtype]).astype("f4")
        got = np.asarray(ds[()], dtype="f4")
        same = (got == want) | (np.isnan(got) & np.isnan(want))
        check(bool(same.all()), f"{where}: widened to {ds.dtype}")
    else:
        check(ds[()] is not None, f"{where}: ds[()]")


def check_value(ds, v, expected, where):
    check(ds.shape == expected.shape, f"{where}: shape {ds.shape}, not {expected.shape}")
    check(ds.attrs["dtype"] == v.dtype and isinstance(ds.attrs["dtype"], str), f"{where}: attribute dtype")
    check(not ds.id.get_create_plist().get_obj_track_times(), f"{where}: has timestamps")
    check(bits(ds).tobytes() == expected.tobytes(), f"{where}: bits")
    if v.dtype != "complex32":  # numpy has no such type; h5py shows a compound or refuses
        check_native(ds, expected, where, v.dtype)
    check(ds.attrs.get("fqn", ".".join(v.keys)) == v.name, f"{where}: FQN")
    if v.is_object:
        check(ds.attrs["encoding"] == "torch.save", f"{where}: encoding")
        check(ds.attrs["json"] == v.json, f"{where}: json")
        check(ds[:].tobytes() == v.bits.tobytes(), f"{where}: object bytes")


def check_groups(f, values):
    """Lists are marked and in index order. Dict keys come back in the order of the source."""
    wanted = {}
    for v in values:
        for depth in range(len(v.keys)):
            group = "/" + "/".join(encode(k) for k in v.keys[:depth])
            members = wanted.setdefault(group, (v.lists[depth], []))[1]
            if encode(v.keys[depth]) not in members:
                members.append(encode(v.keys[depth]))
    for group, (is_list, members) in wanted.items():
        check((f[group].attrs.get("kind") == "list") == is_list, f"{group}: kind")
        check(not f[group].id.get_create_plist().get_obj_track_times(), f"{group}: has timestamps")
        check(list(f[group]) == members, f"{group}: order {list(f[group])}")


def check_full(path, values):
    with h5py.File(path) as f:
        check(f.attrs["fsdpckpt_schema"] == 2 and f.attrs["layout"] == "full", "root attributes of a full file")
        check(f.attrs["producer"].startswith("fsdpckpt "), "producer")
        check("mesh_shape" not in f.attrs and "rank" not in f.attrs, "a full file has no mesh")
        check_groups(f, values)
        for v in values:
            ds = f[v.path]
            check_value(ds, v, v.bits, f"full: {v.path}")
            check(not ds.is_virtual, f"full: {v.path}: stored")
            offset = ds.id.get_offset()
            if v.bits.size:
                check(offset % (4096 if v.bits.nbytes >= 65536 else 64) == 0, f"full: {v.path}: alignment")
                with open(path, "rb") as raw:
                    raw.seek(offset)
                    check(raw.read(v.bits.nbytes) == v.bits.tobytes(), f"full: {v.path}: bytes at the offset")
    check_predefined_types(path)


def predefined(names):
    """The ids of predefined types, and H5Tencode, from the libhdf5 that h5py uses."""
    for path in glob.glob(os.path.join(os.path.dirname(h5py.__file__), "..", "h5py.libs", "libhdf5-*.so*")):
        lib = ctypes.CDLL(path)
        try:
            ids = [ctypes.c_int64.in_dll(lib, f"H5T_{n}_g").value for n in names]
        except ValueError:
            return None, None

        def encode_type(i):
            size = ctypes.c_size_t(0)
            lib.H5Tencode(ctypes.c_int64(i), None, ctypes.byref(size))
            buf = ctypes.create_string_buffer(size.value)
            lib.H5Tencode(ctypes.c_int64(i), buf, ctypes.byref(size))
            return buf.raw

        return ids, encode_type
    return None, None


def check_predefined_types(path):
    """Our float types equal those of HDF5 2.0 bit for bit, if the library of this h5py has them."""
    floats = {"float16": "IEEE_F16LE", "bfloat16": "FLOAT_BFLOAT16LE", "float8_e5m2": "FLOAT_F8E5M2"}
    ids, encode_type = predefined(floats.values())
    if ids is None:
        print("note: h5py's libhdf5 is older than 2.0: its predefined small floats are not compared")
    with h5py.File(path) as f:
        for dtype, theirs in zip(floats, ids or []):
            ours = f[f"model/dtypes.{dtype}"].id.get_type()
            check(encode_type(ours.id) == encode_type(theirs), f"{dtype} is HDF5's {floats[dtype]}")
        t = f["model/dtypes.bool"].id.get_type()
        check(t.equal(h5py.h5t.py_create(np.dtype(bool), logical=True)), "bool is h5py's")
        for c in ("complex64", "complex128"):
            t = f[f"model/dtypes.{c}"].id.get_type()
            check(t.equal(h5py.h5t.py_create(np.dtype(c))), f"{c} is h5py's")


def layout_name(mesh):
    names = [n for n, _ in mesh]
    if "replicate" in names:
        return ("hsdp" if "dp" in names else "ddp") + ("+tp" if "tp" in names else "")
    return "+".join({"dp": "fsdp", "tp": "tp"}[n] for n in names)


def check_shard(f, rank, values, mesh, held):
    world = math.prod(s for _, s in mesh)
    check(f.attrs["rank"] == rank and f.attrs["world_size"] == world, "rank and world size")
    check(list(f.attrs["mesh_shape"]) == [s for _, s in mesh], "mesh_shape")
    check(list(f.attrs["mesh_names"]) == [n for n, _ in mesh], "mesh_names")
    check(f.attrs["layout"] == layout_name(mesh), "layout")
    for v in values:
        where = f"{mesh} rank {rank}: {v.path}"
        if v.is_object:
            check((v.path in f) == (rank == 0), f"{where}: objects are with rank 0")
            if rank == 0:
                check_value(f[v.path], v, v.bits, where)
            continue
        ds = f[v.path]
        offsets = tuple(int(o) for o in ds.attrs["offsets"])
        check(tuple(ds.attrs["global_shape"]) == v.shape, f"{where}: global_shape")
        check(ds.attrs["placements"].startswith("[") and ds.attrs["placements"].count(",") >= len(mesh) - 1,
              f"{where}: placements")
        box = tuple(slice(o, o + n) for o, n in zip(offsets, ds.shape))
        check_value(ds, v, v.bits[box], where)
        check(ds.is_virtual == ("owner" in ds.attrs), f"{where}: a copy names its owner")
        if ds.size and not ds.is_virtual:
            held.setdefault(v.path, []).append((offsets, ds.shape))


def check_coverage(values, held, mesh):
    """The stored boxes of all files cover every element of every tensor exactly once."""
    for v in values:
        if v.is_object:
            continue
        count = np.zeros(v.shape, "u1")
        for offsets, sizes in held.get(v.path, []):
            count[tuple(slice(o, o + n) for o, n in zip(offsets, sizes))] += 1
        check(bool((count == 1).all()), f"{mesh}: {v.path}: stored once")


def check_index(directory, values, mesh):
    with h5py.File(os.path.join(directory, "index.h5")) as f:
        check("rank" not in f.attrs and f.attrs["layout"] == layout_name(mesh), f"{mesh}: index root")
        check_groups(f, values)
        for v in values:
            ds = f[v.path]
            check_value(ds, v, v.bits, f"{mesh} index: {v.path}")
            check(ds.is_virtual == (v.bits.size > 0), f"{mesh} index: {v.path}: virtual")
            if ds.is_virtual:
                names = [s.file_name for s in ds.virtual_sources()]
                check(len(set(names)) == len(names), f"{mesh}: {v.path}: a file twice")
                check(all("/" not in n for n in names), f"{mesh}: {v.path}: relative names")
                for name in names:
                    with h5py.File(os.path.join(directory, name)) as shard:
                        check("owner" not in shard[v.path].attrs, f"{mesh} index: {v.path}: maps a copy")


def check_sharded(directory, values, mesh):
    world, held = math.prod(s for _, s in mesh), {}
    names = [f"shard-{r:05d}-of-{world:05d}.h5" for r in range(world)]
    check(sorted(os.listdir(directory)) == ["index.h5"] + names, f"{mesh}: files")
    for rank, name in enumerate(names):
        with h5py.File(os.path.join(directory, name)) as f:
            check_shard(f, rank, values, mesh, held)
    check_coverage(values, held, mesh)
    check_index(directory, values, mesh)


def absent(dtype):
    """The fill value that marks a missing shard file. No weight has these bits."""
    fixed = {"bool": b"\xff", "object": b"\xff", "float4_e2m1fn_x2": b"\xff", "float8_e4m3fnuz": b"\x80",
             "float8_e5m2fnuz": b"\x80"}
    if dtype in fixed:
        return fixed[dtype]
    if dtype.startswith(("int", "uint")):
        limits = np.iinfo(dtype)
        return np.array(limits.min if dtype.startswith("int") else limits.max, dtype).tobytes()
    return b"\xff" * WIDTH.get(dtype, 1)


def is_nan(bits, dtype):
    if dtype.startswith("complex"):
        part = {"complex32": "f2", "complex64": "f4", "complex128": "f8"}[dtype]
        return np.isnan(np.ascontiguousarray(bits).view(part)).all()
    known = np.dtype(getattr(ml_dtypes, dtype, dtype))
    return np.isnan(np.ascontiguousarray(bits).view(known).astype("f4")).all()


def check_missing_shard(directory, values, mesh):
    """A program that knows only HDF5 reads the fill value where a shard file is missing."""
    world = math.prod(s for _, s in mesh)
    seen = set()
    os.remove(os.path.join(directory, f"shard-00000-of-{world:05d}.h5"))
    with h5py.File(os.path.join(directory, "index.h5")) as f:
        check("NaN" in f.attrs["missing_shards_read_as"], f"{mesh}: the index says how a lost shard reads")
        for v in values:
            if v.bits.size == 0:
                continue
            got, want, lost = bits(f[v.path]).reshape(-1), v.bits.reshape(-1), absent(v.dtype)
            wrong = np.flatnonzero(got != want)
            check(all(got[i].tobytes() == lost for i in wrong), f"{mesh}: {v.path}: what is lost reads as {got[wrong]}")
            if len(wrong):
                seen.add(v.dtype)
                if v.dtype.startswith(("float", "bfloat", "complex")) and v.dtype != "float4_e2m1fn_x2":
                    check(is_nan(got[wrong], v.dtype), f"{mesh}: {v.path}: what is lost is NaN")
    check(seen >= {v.dtype for v in values}, f"{mesh}: nothing is lost of {({v.dtype for v in values} - seen)}")


def check_part_missing(directory, v):
    """Only the rows of the missing rank are lost."""
    os.remove(os.path.join(directory, "shard-00001-of-00003.h5"))
    with h5py.File(os.path.join(directory, "index.h5")) as f:
        got, want = bits(f[v.path]), v.bits
        rows = [i for i in range(len(want)) if (got[i] != want[i]).any()]
        each = -(-len(want) // 3)
        check(rows == list(range(each, min(2 * each, len(want)))), f"{v.path}: rows {rows[:1]}…{rows[-1:]} are lost")
        check(np.isnan(f[v.path][each:2 * each]).all(), f"{v.path}: h5py reads NaN")


def check_strided(directory):
    """dp 4 × tp 2, both cutting dimension 0 of 16 rows. The expected order is what PyTorch 2.15 records."""
    got = []
    for r in range(8):
        with h5py.File(os.path.join(directory, f"shard-{r:05d}-of-00008.h5")) as f:
            got.append(int(f["model/dtypes.float32"].attrs["offsets"][0]))
            check(f["model/dtypes.float32"].attrs["placements"] == "[_StridedShard(0, 2), Shard(0)]", "placements text")
    check(got == [0, 8, 2, 10, 4, 12, 6, 14], f"2D offsets {got}")


def check_h5dump(path, v):
    """h5dump reads the same (a float32 dataset, as raw binary)."""
    if not shutil.which("h5dump"):
        print("note: h5dump is not installed")
        return
    out = path + ".bin"
    done = subprocess.run(["h5dump", "-d", v.path, "-b", "LE", "-o", out, path], capture_output=True, text=True)
    with open(out, "rb") as f:
        check(done.returncode == 0 and f.read() == v.bits.tobytes(), f"h5dump {v.path}: {done.stderr}")
    os.remove(out)
    done = subprocess.run(["h5dump", path], capture_output=True, text=True, errors="replace")
    check(done.returncode == 0 and "error" not in done.stderr.lower(), f"h5dump {path}: {done.stderr[:200]}")


def same_bytes(a, b):
    for name in os.listdir(a) if os.path.isdir(a) else [""]:
        with open(os.path.join(a, name) if name else a, "rb") as x, open(os.path.join(b, name) if name else b, "rb") as y:
            check(x.read() == y.read(), f"two runs differ: {name or a}")


def main():
    values = listing()
    large = next(v for v in values if v.name == "model.large")
    meshes = [[("dp", 1)], [("dp", 3)], [("dp", 8)], [("tp", 4)], [("dp", 4), ("tp", 2)],
              [("replicate", 2), ("dp", 2)], [("replicate", 2), ("dp", 2), ("tp", 2)], [("replicate", 3)]]
    with tempfile.TemporaryDirectory() as tmp:
        os.chdir("/")
        full = [os.path.join(tmp, n) for n in ("full.h5", "again.h5")]
        for path in full:
            make(path, [])
        check_full(full[0], values)
        same_bytes(*full)
        check_h5dump(full[0], large)
        for mesh in meshes:
            made = [os.path.join(tmp, d) for d in ("a", "b")]
            for d in made:
                os.mkdir(d)
                make(d, mesh)
            same_bytes(*made)
            moved = os.path.join(tmp, "moved")
            os.rename(made[0], moved)
            check_sharded(moved, values, mesh)
            check_h5dump(os.path.join(moved, "index.h5"), large)
            if mesh == [("dp", 4), ("tp", 2)]:
                check_strided(moved)
            if mesh == [("dp", 1)]:
                check_missing_shard(moved, values, mesh)
            elif mesh == [("dp", 3)]:
                check_part_missing(moved, large)
            shutil.rmtree(moved)
            shutil.rmtree(made[1])
    print(f"{len(values)} values on {len(meshes)} meshes and in a full file: {len(failures)} failures")
    sys.exit(1 if failures else 0)


main()
