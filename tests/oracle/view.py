#!/usr/bin/env python3
"""Views: stock h5py reads every tensor of the corpus through a view, with the values that torch had before it saved. Only objects
are copied into the view.

usage: view.py FSDPCKPT CORPUS        exit 77 without h5py
"""
import glob
import json
import os
import shutil
import subprocess
import sys
import tempfile

os.environ["HDF5_EXTFILE_PREFIX"] = "${ORIGIN}"  # set before libhdf5 is loaded, since newer versions read it only once
try:
    import h5py
    import numpy as np
    import compare
except ImportError as e:
    print("skipped: %s" % e)
    sys.exit(77)

PROGRAM, CORPUS = os.path.abspath(sys.argv[1]), sys.argv[2]
checked = 0


def run(*argv, ok=0, **kwargs):
    result = subprocess.run([PROGRAM, *argv], capture_output=True, text=True, **kwargs)
    assert result.returncode == ok, (argv, result.returncode, result.stderr)
    return result


def view(source, target, *args):
    return json.loads(run("view", source, "-o", target, "--json", *args).stdout)


def must_equal(target, expected):
    global checked
    problems, n = compare.compare(target, expected)
    assert not problems, (target, problems[:3])
    checked += n


def storage(dataset):
    """The external segments (name, offset, length) of a dataset."""
    plist = dataset.id.get_create_plist()
    return [plist.get_external(i) for i in range(plist.get_external_count())]


def corpus(home):
    for case in sorted(glob.glob(os.path.join(CORPUS, "*"))):
        expected = os.path.join(case, "expected.json")
        if not os.path.exists(expected) or os.path.basename(case).startswith("ds-"):
            continue
        target = os.path.join(home, os.path.basename(case) + ".h5")
        out = view(case, target)
        must_equal(target, expected)
        with open(expected) as f:
            want = json.load(f)
        assert out["external"] + out["assembled"] + out["copied"] <= len(want["tensors"])
        assert out["copied"] == 0 or "lazy" in case, (case, out)
        objects = sum(o.get("length", len(o.get("text", "").encode())) for o in want["objects"].values())
        assert out["copied_bytes"] >= objects and (out["copied"] or out["copied_bytes"] == objects), (case, out)


def deepspeed(home):
    """ZeRO: parameters that are spread over segments of the ranks' flat arrays."""
    global checked
    for case in sorted(glob.glob(os.path.join(CORPUS, "ds-*"))):
        with open(os.path.join(case, "expected.json")) as f:
            want = json.load(f)["tensors"]
        target = os.path.join(home, os.path.basename(case) + ".h5")
        view(case, target)
        with h5py.File(target, "r") as f:
            seen = {}
            for path, d in compare.walk(f):
                seen[compare.text(d.attrs.get("fqn", path[1:].replace("/", ".").replace("%2F", "/")))] = d
            for fqn, t in want.items():
                assert list(seen[fqn].shape) == t["shape"], (case, fqn)
                assert compare.hashlib.sha256(compare.raw_bits(seen[fqn])).hexdigest() == t["sha256"], (case, fqn)
                checked += 1


def two_dimensions(home):
    """Shard(0) gives one external dataset. A TP cut along dimension 1 gives a virtual dataset with one source per TP rank."""
    target = os.path.join(home, "2d.h5")
    out = view(os.path.join(CORPUS, "dcp-torch2.15.0-2d-dp4tp2"), target)
    assert (out["assembled"], out["pieces"]) == (2, 4), out
    with h5py.File(target, "r") as f:
        virtual = [p for p, d in compare.walk(f) if d.is_virtual]
        assert len(virtual) == 2, virtual
        for _, d in compare.walk(f):
            assert d.is_virtual or storage(d), d.name
        assert len(f["%pieces"]) == 4


def other_sources(home):
    """Checkpoints of fsdpckpt: sharded HDF5, compressed HDF5, a single file."""
    case = os.path.join(CORPUS, "dcp-torch2.15.0-2d-dp4tp2")
    expected = os.path.join(case, "expected.json")
    for mesh in (["--dp", "3", "--tp", "2"], ["--tp", "4"], ["--replicas", "2", "--dp", "5"]):
        source = os.path.join(home, "sharded")
        run("reshard", case, "-o", source, "--force", *mesh)
        target = os.path.join(home, "of-sharded.h5")
        view(source, target, "--force")
        must_equal(target, expected)
    full = os.path.join(home, "full.h5")
    run("consolidate", case, "-o", full)
    target = os.path.join(home, "of-full.h5")
    view(full, target)
    must_equal(target, expected)
    before = open(full, "rb").read()
    link = os.path.join(home, "link.h5")
    os.symlink(full, link)
    for name in (full, link):
        assert "name another target" in run("view", full, "-o", name, "--force", ok=2).stderr
    assert open(full, "rb").read() == before


def cannot_be_viewed(home):
    source, big = os.path.join(home, "source.h5"), os.path.join(home, "big.h5")
    with h5py.File(source, "w") as f:
        f["plain"] = np.arange(6, dtype="<f4")
        f["swapped"] = np.arange(6, dtype=">f4")
        f.create_dataset("packed", data=np.arange(6), compression="gzip")
    out = view(source, os.path.join(home, "small.h5"))
    assert (out["copied"], out["copied_bytes"]) == (2, 6 * 4 + 6 * 8), out
    with h5py.File(os.path.join(home, "small.h5"), "r") as f:
        assert f["plain"][:].tolist() == f["swapped"][:].tolist() == f["packed"][:].tolist() == list(range(6))
    with h5py.File(big, "w") as f:
        f["plain"] = np.arange(6, dtype="<f4")
        f["swapped"] = np.arange(20000, dtype=">f4")
        f.create_dataset("packed", data=np.arange(20000), compression="gzip")
    target = os.path.join(home, "none.h5")
    text = run("view", big, "-o", target, ok=5).stderr
    for words in ("'swapped' (stored in the other byte order)", "'packed' (compressed)", "--exclude"):
        assert words in text, text
    assert not os.path.exists(target)
    assert view(big, target, "--exclude", "swapped", "--exclude", "packed")["external"] == 1


def torch_files(home):
    """torch.save files: views of one storage, strided, expanded and lazily conjugated tensors, every shape."""
    try:
        import torch
    except ImportError:
        return
    global checked
    base = torch.arange(240.0)
    tensors = {
        "plain": base.view(12, 20), "transposed": base.view(12, 20).t(), "slice": base.view(12, 20)[2:9, 3:11],
        "step": base[::3], "permuted": base.view(2, 3, 4, 10).permute(3, 1, 0, 2), "expanded": base[:5].expand(4, 5),
        "offset": base[17:40], "tied": base.view(12, 20), "empty": torch.zeros(0, 3), "scalar": torch.tensor(2.5),
        "bf16": torch.randn(5, 7).bfloat16(), "bool": torch.tensor([True, False]), "int": torch.arange(7),
        "channels_last": torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last),
        "conjugated": torch.randn(3, dtype=torch.cfloat).conj(), "negated": torch.randn(3, dtype=torch.cfloat).conj().imag,
        "large": torch.randn(300, 400).t()}
    source, target = os.path.join(home, "saved.pt"), os.path.join(home, "of-saved.h5")
    torch.save(tensors, source)
    out = view(source, target)
    assert out["copied"] == 2, out
    with h5py.File(target, "r") as f:
        for name, t in tensors.items():
            want = t.resolve_conj().resolve_neg().contiguous().view(torch.uint8 if t.dim() and t.numel() else t.dtype)
            assert compare.raw_bits(f[name]) == want.numpy().tobytes(), name
            assert f[name].shape == tuple(t.shape), name
            checked += 1


def moved(home):
    """View and checkpoint can be moved together. If one is missing, libhdf5 reports an error instead of reading zeros."""
    case = "dcp-torch2.15.0-2d-dp4tp2"
    there = os.path.join(home, "there")
    shutil.copytree(os.path.join(CORPUS, case), os.path.join(there, "data", "ckpt"))
    os.mkdir(os.path.join(there, "views"))
    run("view", "data/ckpt", "-o", "views/v.h5", cwd=there)
    moved_to = os.path.join(home, "elsewhere")
    os.rename(there, moved_to)
    must_equal(os.path.join(moved_to, "views", "v.h5"), os.path.join(CORPUS, case, "expected.json"))
    target = os.path.join(moved_to, "views", "v.h5")
    with h5py.File(target, "r") as f:
        for _, d in compare.walk(f):
            for name, _, _ in storage(d):
                assert name.startswith("../data/ckpt/") if isinstance(name, str) else name.startswith(b"../data/ckpt/")
    shutil.rmtree(os.path.join(moved_to, "data"))
    failures = 0
    with h5py.File(target, "r") as f:
        for path, d in compare.walk(f):
            try:
                compare.raw_bits(d)
            except (OSError, KeyError):
                failures += 1
        assert failures > 0


def tools(home):
    """The installed HDF5 command-line tools read a view."""
    if not shutil.which("h5dump"):
        return
    target = os.path.join(home, "2d.h5")
    for args in (["h5dump", "-H", target], ["h5ls", "-r", target]):
        subprocess.run(args, check=True, capture_output=True)
    raw = os.path.join(home, "raw")
    for case in ("dcp-torch2.15.0-2d-dp4tp2", "dcp-torch2.15.0-dtypes"):
        with open(os.path.join(CORPUS, case, "expected.json")) as f:
            want = json.load(f)["tensors"]
        for fqn, t in want.items():
            subprocess.run(["h5dump", "-d", compare.h5_path(t["path"]), "-b", "FILE", "-o", raw,
                            os.path.join(home, case + ".h5")], check=True, capture_output=True)
            with open(raw, "rb") as f:
                assert compare.hashlib.sha256(f.read()).hexdigest() == t["sha256"], fqn


def large(home):
    """A tensor of more than 2 GiB is split into segments that one read() can return. The file is sparse except for a mark."""
    source = os.path.join(home, "large.h5")
    count = 5 << 28
    with h5py.File(source, "w") as f:
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        plist.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        space = h5py.h5s.create_simple((count,))
        d = h5py.h5d.create(f.id, b"w", h5py.h5t.IEEE_F32LE, space, plist)
        offset = d.get_offset()
    marks = [0, (1 << 28) - 1, 1 << 28, (1 << 29) + 7, count - 1]
    with open(source, "r+b") as f:
        for i in marks:
            f.seek(offset + 4 * i)
            f.write(np.float32(i + 0.5).tobytes())
    target = os.path.join(home, "of-large.h5")
    view(source, target)
    with h5py.File(target, "r") as f:
        segments = storage(f["w"])
        assert sum(s[2] for s in segments) == 4 * count and max(s[2] for s in segments) <= 1 << 30, segments
        for i in marks:
            assert f["w"][i] == np.float32(i + 0.5), i
            assert f["w"][max(0, i - 2): i + 3].max() == np.float32(i + 0.5), i


home = tempfile.mkdtemp(prefix="fsdpckpt-view-")
try:
    for test in (corpus, deepspeed, two_dimensions, other_sources, cannot_be_viewed, torch_files, moved, tools, large):
        test(home)
finally:
    shutil.rmtree(home)
print("%d datasets" % checked)
