"""Other programs keep the HDF5 files that fsdpckpt writes: h5_keep.py PATH_OF_fsdpckpt FOLDER_OF_corpus/good PART

Each kind of file (full, compressed, shards, index.h5, views; with objects, with 1 to 20,000 tensors) is

edits   changed by h5py (h5_edits.py), with every version of libhdf5 that there is;
others  repacked by h5repack, which uses yet another version, and read by pyfive, which uses none;

and libhdf5's own files fulfil the rules by which tests/cli/h5_walk.py checks ours.

Other versions of h5py are in PREFIX/h5py/VERSION, where scripts/setup.sh puts them, or in $FSDPCKPT_H5PY/VERSION.
"""
import glob
import json
import os
import shutil
import subprocess
import sys
import tempfile

try:
    import h5py
    import numpy as np
    import safetensors.torch
    import torch
    from checks import check, finish, run
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "cli"))
import h5_parts  # noqa: E402
import h5_spec  # noqa: E402

FSDPCKPT, GOOD, PART = (os.path.abspath(sys.argv[1]), os.path.abspath(sys.argv[2]), sys.argv[3])
OTHERS = sorted(glob.glob(os.path.join(os.environ.get("FSDPCKPT_H5PY") or os.path.join(sys.prefix, "h5py"), "*")))
COUNTS = {"edits": (1, 9, 600, 1700, 20000), "others": (9, 600)}


UNKNOWN_TO_PYFIVE = ("complex32", "float8_e5m2")  # numpy has no such types


def tool(*argv):
    run(FSDPCKPT, *argv, "-q")


def make_files():
    """One file of each kind. Returns {kind: path}."""
    objects = os.path.join(GOOD, "dcp-torch2.15.0-train")
    dtypes = os.path.join(GOOD, "dcp-torch2.15.0-dtypes")
    tool("consolidate", objects, "-o", "full.h5")
    tool("consolidate", dtypes, "-o", "dtypes.h5")
    safetensors.torch.save_file({f"layers.{i}.weight": torch.rand(300, 170) for i in range(40)}, "c.safetensors")
    tool("consolidate", "c.safetensors", "-o", "compressed.h5", "--compress", "1")
    tool("reshard", objects, "-o", "sharded", "--to", "h5", "--dp", "2", "--tp", "2")
    tool("reshard", "c.safetensors", "-o", "compressed", "--to", "h5", "--replicas", "2", "--dp", "2", "--compress", "1")
    tool("view", "c.safetensors", "-o", "external.h5")
    tool("view", os.path.join(GOOD, "dcp-torch2.15.0-2d-uneven"), "-o", "virtual.h5")
    torch.save([torch.rand(3), {"a": torch.rand(2), "n": 5}], "list.pt")
    tool("reshard", "list.pt", "-o", "list", "--to", "h5", "--dp", "2")
    kinds = {name: name + ".h5" for name in ("full", "dtypes", "compressed", "external", "virtual")}
    for folder in ("sharded", "compressed", "list"):
        kinds[folder + ": index"] = f"{folder}/index.h5"
        kinds[folder + ": last shard"] = sorted(glob.glob(f"{folder}/shard-*"))[-1]
    for count in COUNTS[PART]:
        name = f"tensors-{count}"
        tensors = {f"model.layers.{i}.self_attn.weight": torch.tensor([i]) for i in range(count)}
        safetensors.torch.save_file(tensors, "n.safetensors")
        tool("consolidate", "n.safetensors", "-o", name + ".h5")
        kinds[name] = name + ".h5"
    return kinds


def version_of(path):
    code = "import h5py; print(h5py.version.hdf5_version)"
    return subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True,
                          text=True, check=True).stdout.strip()


def edits(kinds):
    versions = {version_of(path): path for path in ["", *OTHERS]}
    print("edited by libhdf5", *versions)
    for version, path in versions.items():
        copies = []
        for kind, file in kinds.items():
            if path and kind == "tensors-20000":  # takes long
                continue
            copies.append(os.path.join(os.path.dirname(file), f"edited-{os.path.basename(file)}"))
            shutil.copy(file, copies[-1])
        r = subprocess.run([sys.executable, os.path.join(HERE, "h5_edits.py"), *copies], capture_output=True, text=True,
                           env={**os.environ, "PYTHONPATH": path})
        check(r.returncode == 0, f"libhdf5 {version}: {r.stdout}{r.stderr}"[:4000])
        for copy in copies:
            os.remove(copy)
    # What is left after a change by another program is still read.
    with h5py.File("full.h5", "r+") as f:
        f.attrs["note"] = "mine"
        f["model/mine"] = np.arange(3)
    names = [t["name"] for t in json.loads(run(FSDPCKPT, "inspect", "full.h5", "--json").stdout)["tensors"]]
    check("model.mine" in names and len(names) > 10, f"after a change: {names}")


def attributes(path):
    """All attributes of all values and groups."""
    with h5py.File(path) as f:
        found = {"/": {n: np.asarray(v).tolist() for n, v in f.attrs.items() if not isinstance(v, h5py.Reference)}}
        f.visititems(lambda name, item: found.update({name: {n: np.asarray(v).tolist() for n, v in item.attrs.items()}}))
    return found


def listed(path):
    """Names, dtypes and shapes."""
    out = json.loads(run(FSDPCKPT, "inspect", path, "--follow-external", "--json").stdout or "{}")
    return {t["name"]: (t["dtype"], t["shape"]) for t in out.get("tensors", ())}


def repacked(kind, file):
    out = os.path.join(os.path.dirname(file), "repacked.h5")
    run("h5repack", file, out)
    check(attributes(out) == attributes(file), f"{kind}: attributes after h5repack")
    if "shard" not in kind and "index" not in kind:
        ours, theirs = (listed(path) for path in (file, out))
        check(theirs == ours, f"{kind}: names, dtypes and shapes after h5repack")
    os.remove(out)


def read_by_pyfive(pyfive, kind, file):
    """Names, attributes and, of what is stored in the file, values."""
    with h5py.File(file) as theirs, pyfive.File(file) as ours:
        for group in ("/", *(["model"] if "model" in theirs else [])):
            check(sorted(ours[group]) == sorted(theirs[group]), f"{kind}: pyfive's names in {group}")
        check(set(ours.attrs) == set(theirs.attrs), f"{kind}: pyfive's attributes of the root")
        paths = []
        theirs.visititems(lambda name, item: paths.append(name) if isinstance(item, h5py.Dataset) else None)
        for path in [p for p in paths if theirs[p].attrs.get("dtype") not in UNKNOWN_TO_PYFIVE][:50]:
            found = ours[path].attrs
            check(all(found[n] == v.encode() if isinstance(v, str) else np.array_equal(found[n], v)
                      for n, v in theirs[path].attrs.items()), f"{kind}: pyfive's attributes of {path}")
            plain = theirs[path].dtype.kind in "iuf" and theirs[path].attrs.get("dtype") not in ("bfloat16", "float8_e5m2")
            if plain and not theirs[path].is_virtual and not theirs[path].external and theirs[path].size:
                check(ours[path][()].tobytes() == theirs[path][()].tobytes(), f"{kind}: pyfive's values of {path}")


def heaps_of_libhdf5():
    """libhdf5 counts the space in its own heaps as h5_spec says. The members of a group are in one block, in two, in four."""
    for count in (9, 24, 40):
        links = [f"layers.{i}.mlp.weight" for i in range(count)]
        with h5py.File("theirs.h5", "w", libver=("v110", "v110"), track_order=True) as f:
            for link in links:
                f.create_group(link)
        with open("theirs.h5", "rb") as f:
            data = f.read()
        heap = h5_spec.read(h5_parts.Part(data, data.index(b"FRHP\0"), 142), "fractal heap")
        check(heap["Current # of Rows in Root Indirect Block"] == (count > 9), f"rows of libhdf5's heap of {count}")
        h5_spec.check_managed_space(heap, data.count(b"FHDB\0"), sum(19 + len(link) for link in links), count)


def others(kinds):
    heaps_of_libhdf5()
    for kind, file in kinds.items():
        repacked(kind, file)
    try:
        import pyfive
    except ImportError:
        print("note: pyfive is not installed, so it does not read the files")
        return
    for kind, file in kinds.items():
        read_by_pyfive(pyfive, kind, file)


def main():
    os.environ["HDF5_EXTFILE_PREFIX"] = "${ORIGIN}"
    if PART == "others" and not shutil.which("h5repack"):
        print("skipped: there is no h5repack")
        sys.exit(77)
    with tempfile.TemporaryDirectory(prefix="fsdpckpt-") as folder:
        os.chdir(folder)
        {"edits": edits, "others": others}[PART](make_files())
        os.chdir("/")
    sys.exit(finish("h5_keep " + PART))


main()
