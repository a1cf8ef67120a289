#!/usr/bin/env python3
"""safetensors files that fsdpckpt writes, read by the safetensors library and by torch's HuggingFaceStorageReader.

 - Every DCP checkpoint of the corpus, consolidated: each tensor has the bytes that torch had before it saved (expected.json),
   objects and nesting are kept, and a conversion to HDF5 restores everything.
 - Against save_file of the library: the same tensors give the same header entries and the same data.
 - --max-shard-size: each file loads, transformers finds its names in the index, sizes stay within the limit.
 - reshard: each file loads alone with the rank's local tensors, and dcp.load gives the full ones.
 - Missing, renamed, mixed and truncated files, which torch accepts silently, are refused with the name of the file.

usage: safetensors_write.py FSDPCKPT CORPUS       exit 77 without torch or safetensors
"""
import base64
import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile

try:
    import safetensors
    import torch
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file, save_file
    from torch.distributed.checkpoint import HuggingFaceStorageReader
    import compare
    from checks import check, finish, refused, run
    from torch_values import bits, by_name, check_equal
except ImportError as e:
    print("skipped: %s" % e)
    sys.exit(77)


def header(path):
    with open(path, "rb") as f:
        raw = f.read()
    n, = struct.unpack("<Q", raw[:8])
    check((n + 8) % 8 == 0, path + ": the data is not aligned to 8")
    return json.loads(raw[8:8 + n]), raw[8 + n:]


def corpus_case(program, case, home):
    with open(os.path.join(case, "expected.json")) as f:
        expected = json.load(f)
    out = os.path.join(home, "model.safetensors")
    r = subprocess.run([program, "consolidate", case, "-o", out, "-q"], capture_output=True, text=True)
    if r.returncode == 2 and "empty" in r.stderr:
        return
    check(r.returncode == 0, case + ": " + r.stderr)
    with open(out, "rb") as f:
        tensors = dict(safetensors.deserialize(f.read()))
    check(set(tensors) == set(expected["tensors"]), case + ": names")
    for name, want in expected["tensors"].items():
        got = hashlib.sha256(bytes(tensors[name]["data"])).hexdigest()
        check(got == want["sha256"], "%s: %s: bytes" % (case, name))
        if want["dtype"] not in ("complex32", "complex128", "float4_e2m1fn_x2"):
            check(list(tensors[name]["shape"]) == want["shape"], "%s: %s: shape" % (case, name))
    metadata = header(out)[0]["__metadata__"]
    check(metadata["format"] == "pt", case + ": format")
    kept = {k[len("fsdpckpt.object."):]: json.loads(v) for k, v in metadata.items() if k.startswith("fsdpckpt.object.")}
    objects = {n: o for n, o in expected["objects"].items() if n != "__metadata__"}
    check(set(kept) == set(objects), case + ": objects")
    for name, want in objects.items():
        data = base64.b64decode(kept[name]["data"], validate=True)
        check(hashlib.sha256(data).hexdigest() == want["sha256"], "%s: %s: object" % (case, name))
    h5 = os.path.join(home, "back.h5")
    run(program, "consolidate", out, "-o", h5, "-q")
    problems, _ = compare.compare(h5, os.path.join(case, "expected.json"))
    check(not problems, "%s: through safetensors: %s" % (case, problems[:3]))
    again = os.path.join(home, "again.safetensors")
    run(program, "consolidate", h5, "-o", again, "-q")
    with open(out, "rb") as a, open(again, "rb") as b:
        check(a.read() == b.read(), case + ": safetensors -> h5 -> safetensors is not identical")
    for path in (out, h5, again):
        os.remove(path)


def against_save_file(program, home):
    """All dtypes and shapes that the library can save, and ten thousand tensors."""
    tensors = {}
    g = torch.Generator().manual_seed(5)
    for dtype in "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 int64 int32 int16 int8 uint8".split():
        raw = torch.randint(0, 256, (3, 40), generator=g, dtype=torch.uint8)
        tensors["t." + dtype] = raw.view(getattr(torch, dtype))
        tensors["t0." + dtype] = raw[0, :8].clone().view(getattr(torch, dtype))[0].clone()
        tensors["te." + dtype] = torch.empty(0, 3, dtype=getattr(torch, dtype))
    tensors["mask"] = torch.randint(0, 2, (7,), generator=g).bool()
    tensors["c"] = torch.randn(2, 3, generator=g, dtype=torch.complex64)
    tensors['"quoted" \\ \u4e16\n'] = torch.ones(1)
    tensors.update(("many.%d" % i, torch.full((2, i % 3), i % 100, dtype=torch.int16)) for i in range(10000))
    theirs, ours = os.path.join(home, "theirs.safetensors"), os.path.join(home, "ours.safetensors")
    save_file(tensors, theirs, metadata={"format": "pt"})
    run(program, "consolidate", theirs, "-o", ours, "-q")
    (a, data_a), (b, data_b) = header(theirs), header(ours)
    a.pop("__metadata__"), b.pop("__metadata__")
    check(a == b and list(a) == list(b), "header entries are not those of save_file")
    check(data_a == data_b, "the data is not laid out as by save_file")
    loaded = load_file(ours)
    check(all(bits(loaded[n]) == bits(t) and loaded[n].dtype == t.dtype and loaded[n].shape == t.shape
              for n, t in tensors.items()), "load_file: not equal")
    os.remove(theirs), os.remove(ours)


def split(program, home):
    g = torch.Generator().manual_seed(6)
    tensors = {"w.%02d" % i: torch.randn(10, i + 1, generator=g) for i in range(20)}
    source, out = os.path.join(home, "s.safetensors"), os.path.join(home, "split")
    save_file(tensors, source, metadata={"format": "pt", "who": "me"})
    run(program, "consolidate", source, "-o", out, "--to", "safetensors", "--max-shard-size", "2KB", "-q")
    with open(os.path.join(out, "model.safetensors.index.json")) as f:
        index = json.load(f)
    files = sorted(n for n in os.listdir(out) if n.endswith(".safetensors"))
    check(files == ["model-%05d-of-%05d.safetensors" % (i + 1, len(files)) for i in range(len(files))], "file names")
    check(len(files) > 3 and sorted(set(index["weight_map"].values())) == files, "weight_map's files")
    check(index["metadata"] == {"total_size": sum(t.numel() * 4 for t in tensors.values())}, "total_size")
    seen = {}
    for name in files:
        loaded = load_file(os.path.join(out, name))
        size = sum(t.numel() * 4 for t in loaded.values())
        check(size <= 2000 or len(loaded) == 1, name + ": larger than asked for")
        check(all(index["weight_map"][n] == name for n in loaded), name + ": weight_map")
        seen.update(loaded)
    check_equal(by_name(tensors), by_name(seen), "split")
    back = os.path.join(home, "b.safetensors")
    for path in (out, os.path.join(out, "model.safetensors.index.json")):
        run(program, "consolidate", path, "-o", back, "-q", "--force")
        check_equal(by_name(tensors), by_name(load_file(back)), "the index read back")
        check(header(back)[0]["__metadata__"]["who"] == "me", "metadata is lost")
    run(program, "consolidate", source, "-o", out, "--to", "safetensors", "--max-shard-size", "1GB", "-q", "--force")
    check(os.listdir(out) == ["model.safetensors"], "one file that fits has no index")
    shutil.rmtree(out)


def sharded(program, case, mesh, home):
    """Loads the file of each rank alone, and all of them through torch."""
    with open(os.path.join(case, "expected.json")) as f:
        expected = json.load(f)
    out = os.path.join(home, "sharded")
    r = run(program, "reshard", case, "-o", out, "--to", "safetensors", "-q", *mesh)
    if r.returncode:
        return
    state = {}
    for name, want in expected["tensors"].items():
        state[name] = torch.empty(want["shape"], dtype=getattr(torch, want["dtype"]))
    dcp.load(state, storage_reader=HuggingFaceStorageReader(out), no_dist=True)
    for name, want in expected["tensors"].items():
        got = hashlib.sha256(bits(state[name])).hexdigest()
        check(got == want["sha256"], "%s %s: dcp.load: %s" % (case, mesh, name))
    for file in sorted(os.listdir(out)):
        info = json.loads(header(os.path.join(out, file))[0]["__metadata__"]["DCP_SHARDING_INFO"])
        local = load_file(os.path.join(out, file))
        check(set(local) == set(expected["tensors"]) == set(info), file + ": a rank's file holds every tensor")
        for name, t in local.items():
            where = tuple(slice(o, o + n) for o, n in zip(info[name]["saved_offsets"], t.shape))
            check(bits(state[name][where]) == bits(t), "%s: %s: local tensor" % (file, name))
    h5 = os.path.join(home, "whole.h5")
    run(program, "consolidate", out, "-o", h5, "-q")
    problems, _ = compare.compare(h5, os.path.join(case, "expected.json"))
    check(not problems, "%s %s: read back: %s" % (case, mesh, problems[:3]))
    os.remove(h5)
    return out


def damaged(program, home):
    """Damage for which torch's own tools write zeros or less and exit with 0."""
    out = sharded(program, os.path.join(CORPUS, "dcp-torch2.15.0-fsdp2"), ["--dp", "4"], home)
    name = "shard-%05d-model-00001-of-00001.safetensors"
    for rank in range(4):
        path = os.path.join(out, name % (rank + 1))
        os.rename(path, path + ".away")
        refused(program, out, "shard %d missing" % rank, "missing")
        os.rename(path + ".away", path)
    a, b = os.path.join(out, name % 1), os.path.join(out, name % 2)
    shutil.copy(a, b + ".copy")
    os.replace(b, b + ".kept"), os.replace(b + ".copy", b)
    refused(program, out, "a copy instead of shard 2", "shard-00002", "rank 0")
    os.replace(b + ".kept", b)
    with open(b, "r+b") as f:
        f.truncate(os.path.getsize(b) - 3)
    refused(program, out, "shard 2 cut", "shard-00002", "truncated")
    shutil.rmtree(out)
    # torch's files record neither the number of ranks nor the shapes, but a missing box is detected.
    case = os.path.join(home, "hole")
    for source, lost in (("st-torch2.15.0-1d", 2), ("st-torch2.15.0-2d", 3), ("st-torch2.15.0-2d", 4)):
        shutil.copytree(os.path.join(CORPUS, source), case)
        os.remove(os.path.join(case, name % lost))
        refused(program, case, "%s without shard %d" % (source, lost), "" if lost == 4 else "missing")
        shutil.rmtree(case)
    shutil.copytree(os.path.join(CORPUS, "st-torch2.15.0-index"), case)
    os.remove(os.path.join(case, "model-00002-of-00003.safetensors"))
    refused(program, case, "a file of the index missing", "model-00002-of-00003.safetensors", "b.weight")
    os.remove(os.path.join(case, "model.safetensors.index.json"))
    refused(program, case, "a numbered file missing", "00002-of-00003")
    shutil.rmtree(case)
    # A changed byte of data is detected when it is read and compared with the digest.
    path = os.path.join(home, "flip.safetensors")
    run(program, "consolidate", os.path.join(CORPUS, "dcp-torch2.15.0-fsdp2"), "-o", path, "-q")
    with open(path, "r+b") as f:
        f.seek(-5, 2)
        byte = f.read(1)
        f.seek(-5, 2)
        f.write(bytes([byte[0] ^ 4]))
    refused(program, path, "a flipped bit", "digest")


def links_and_metadata(program, home):
    """huggingface_hub's cache, where files are links out of the directory; and files whose __metadata__ differs."""
    hub = os.path.join(home, "models--a--b")
    snapshot, blobs = os.path.join(hub, "snapshots", "0123"), os.path.join(hub, "blobs")
    os.makedirs(snapshot), os.makedirs(blobs)
    source = os.path.join(CORPUS, "st-torch2.15.0-index")
    for i, name in enumerate(sorted(n for n in os.listdir(source) if n.startswith("model"))):
        shutil.copy(os.path.join(source, name), os.path.join(blobs, "%040d" % i))
        os.symlink("../../blobs/%040d" % i, os.path.join(snapshot, name))
    out = os.path.join(home, "hub.safetensors")
    run(program, "consolidate", snapshot, "-o", out, "-q")
    check(len(load_file(out)) == 4, "the cache of huggingface_hub")
    shutil.copytree(blobs, os.path.join(hub, "elsewhere"))
    name = os.path.join(snapshot, "model-00001-of-00003.safetensors")
    os.remove(name)
    os.symlink(os.path.join(hub, "elsewhere", "%040d" % 0), name)
    refused(program, snapshot, "a link that leads elsewhere", "symbolic link")
    many = os.path.join(home, "many")
    os.mkdir(many)
    for i in (1, 2):
        save_file({"t%d" % i: torch.ones(i)}, os.path.join(many, "part%d.safetensors" % i),
                  metadata={"format": "pt", "part": str(i), "who": "me"})
    run(program, "consolidate", many, "-o", out, "-q", "--force")
    metadata = header(out)[0]["__metadata__"]
    check(metadata["who"] == "me" and
          json.loads(metadata["part"]) == {"part1.safetensors": "1", "part2.safetensors": "2"}, "differing members")


def main():
    global CORPUS
    program, CORPUS = sys.argv[1:3]
    home = tempfile.mkdtemp(prefix="fc-st-")
    try:
        for name in sorted(os.listdir(CORPUS)):
            if name.startswith(("dcp-torch2.15", "st-")):
                corpus_case(program, os.path.join(CORPUS, name), home)
        against_save_file(program, home)
        split(program, home)
        for name, mesh in (("dcp-torch2.15.0-fsdp2", ["--dp", "8"]), ("dcp-torch2.15.0-uneven", ["--dp", "3"]),
                           ("dcp-torch2.15.0-2d-dp4tp2", ["--dp", "4", "--tp", "2"]),
                           ("dcp-torch2.15.0-hsdp-tp", ["--dp", "2", "--tp", "2", "--replicas", "2"]),
                           ("dcp-torch2.15.0-shapes", ["--dp", "2"])):
            out = sharded(program, os.path.join(CORPUS, name), mesh, home)
            if out:
                shutil.rmtree(out)
        damaged(program, home)
        links_and_metadata(program, home)
    finally:
        shutil.rmtree(home)
    return finish("safetensors")


if __name__ == "__main__":
    sys.exit(main())
