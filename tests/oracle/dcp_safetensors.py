#!/usr/bin/env python3
"""DCP written by FileSystemWriter(serialization_format=SerializationFormat.SAFETENSORS): each data file has its objects first and
then a safetensors file. torch 2.15 cannot load its own output in this form, but it can load our conversion of it.

usage: dcp_safetensors.py FSDPCKPT        exit 77 without torch, gloo or this writer
"""
import json
import os
import pickle
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import warnings

try:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file
    from torch.distributed._shard.sharded_tensor import Shard, init_from_local_shards
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed.checkpoint.filesystem import FileSystemWriter, SerializationFormat
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor
    from torch.distributed.tensor import Shard as ShardOf
    import gloo
    from checks import check, finish, refused, run
    from torch_values import bits, check_equal
except ImportError as e:
    print("skipped: %s" % e)
    sys.exit(77)

warnings.filterwarnings("ignore")
RANKS = 3


def save(state, path, alone=True, **options):
    writer = FileSystemWriter(path, sync_files=False, serialization_format=SerializationFormat.SAFETENSORS, **options)
    dcp.save(state, storage_writer=writer, no_dist=alone)


def values():
    """Values that torch can save in this form: not complex128, shared memory, or tensors that are not contiguous."""
    g = torch.Generator().manual_seed(5)
    state = {"a": torch.rand(6, 5, generator=g), "b": torch.rand(6, 5, generator=g), # the same size, but not tied
             "scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4), "one": torch.rand(1, generator=g),
             "slice": torch.rand(40, generator=g)[7:19], "narrow": torch.rand(8, 9, generator=g)[:, 2:6],
             "complex": torch.randn(4, 2, dtype=torch.complex64, generator=g),
             "odd name/\u00e9 \"quoted\"": torch.rand(3, generator=g)}
    for name in ("bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "bfloat16",
                 "float64", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"):
        raw = torch.randint(0, 2 if name == "bool" else 100, (4 * 56,), dtype=torch.uint8, generator=g)
        dtype = getattr(torch, name)
        state["t." + name] = raw.view(dtype)[:28].reshape(7, 4)
    return {"model": state, "step": 12, "betas": (0.9, 0.95), "names": ["x", {"y": None}]}


def every_way(program, home):
    truth = values()
    ways = {"plain": {}, "threads": {"thread_count": 3}, "files": {"single_file_per_rank": False}}
    reference = os.path.join(home, "reference.pt")
    torch.save(truth, reference)
    for way, options in ways.items():
        source = os.path.join(home, way)
        save(truth, source, **options)
        for command in ("check", "verify"):
            run(program, command, source)
        run(program, "diff", "--data", source, reference)
        out = source + ".pt"
        run(program, "consolidate", source, "-o", out, "-q")
        check_equal(truth, torch.load(out, weights_only=True), way)
    source = os.path.join(home, "plain")
    listed = json.loads(run(program, "inspect", source, "--json").stdout)
    check({t["name"] for t in listed["tensors"]} == {"model." + n for n in truth["model"]}, "inspect: tensors")
    one = subprocess.run([program, "extract", source, "model.t.bfloat16"], capture_output=True).stdout
    check(one == bits(truth["model"]["t.bfloat16"]), "extract")
    shards, again = os.path.join(home, "shards"), os.path.join(home, "again.pt")
    run(program, "reshard", source, "-o", shards, "--dp", "3", "--to", "h5", "-q")
    run(program, "consolidate", shards, "-o", again, "-q")
    check_equal(truth, torch.load(again, weights_only=True), "h5 shards")
    loadable = os.path.join(home, "loadable")
    run(program, "convert", source, "-o", loadable, "--to", "dcp", "-q")
    target = {"model": {n: torch.zeros_like(t) for n, t in truth["model"].items()}, "step": 0}
    dcp.load(target, checkpoint_id=loadable, no_dist=True)
    check_equal({"model": truth["model"], "step": 12}, target, "dcp.load of what was converted")
    try:
        dcp.load({"model": dict(target["model"])}, checkpoint_id=source, no_dist=True)
        print("note: this torch loads such checkpoints")
    except dcp.CheckpointException:
        pass


def save_shards(rank, world, path):
    truth = {"rows": torch.arange(35.).reshape(7, 5), "columns": torch.arange(44).reshape(4, 11).bfloat16(),
             "few": torch.arange(2).bool(), "replicated": torch.arange(6.), "scalar": torch.tensor(4)}
    mesh = init_device_mesh("cpu", (world,))
    cuts = {"rows": ShardOf(0), "columns": ShardOf(1), "few": ShardOf(0), "replicated": Replicate()}
    state = {n: distribute_tensor(t, mesh, [cuts[n]]) if n in cuts else t for n, t in truth.items()}
    save({**state, "epoch": 3}, path, alone=False)
    return truth if rank == 0 else None


def sharded(program, home):
    source = os.path.join(home, "sharded")
    truth = gloo.run(RANKS, save_shards, source)[0]
    out = source + ".safetensors"
    run(program, "consolidate", source, "-o", out, "-q")
    found = load_file(out)
    check_equal(truth, {name: found.get(name) for name in truth}, "sharded")
    run(program, "verify", source)
    run(program, "check", source)


def two_chunks(_rank, _world, path):
    """torch collects the tensors of a rank by name, so of two chunks of a tensor it writes only the last."""
    shards = [Shard(torch.full((2, 3), float(i)), ShardMetadata([2 * i, 0], [2, 3], "rank:0/cpu")) for i in range(2)]
    save({"lost": init_from_local_shards(shards, 4, 3), "kept": torch.arange(5.)}, path, alone=False)


def lost(program, home):
    source, out = os.path.join(home, "lost"), os.path.join(home, "kept.pt")
    gloo.run(1, two_chunks, source)
    with open(os.path.join(source, "__0_0.distcp"), "rb") as f:
        if f.read().count(struct.pack("<6f", *[0.] * 6)) > 0:
            print("note: this torch loses no chunk")
            return
    refused(program, source, "a lost piece", "lost:", "a chunk of it was lost when it was saved", "__0_0.distcp",
            "--exclude 'lost'", status=5)
    check("cannot be" in run(program, "inspect", source).stdout, "inspect of a lost chunk")
    check("lost" in run(program, "check", source).stdout, "check of a lost chunk")
    run(program, "consolidate", source, "-o", out, "-q", "--exclude", "lost")
    check_equal({"kept": torch.arange(5.)}, torch.load(out, weights_only=True), "the tensor next to a lost chunk")


def many(program, home):
    truth = {"layers.%d.weight" % i: torch.full((2, 3), float(i)) for i in range(10000)}
    source, out = os.path.join(home, "many"), os.path.join(home, "many.safetensors")
    save(truth, source)
    run(program, "consolidate", source, "-o", out, "-q")
    check_equal(dict(sorted(truth.items())), dict(sorted(load_file(out).items())), "10,000 tensors")


class Damaged:
    """A copy of a checkpoint whose data file is split into its parts, to be changed and written."""
    def __init__(self, source, home, name):
        self.folder = os.path.join(home, name)
        shutil.copytree(source, self.folder)
        self.path = os.path.join(self.folder, "__0_0.distcp")
        with open(os.path.join(self.folder, ".metadata"), "rb") as f:
            self.metadata = pickle.load(f)
        self.at = next(i.offset for k, i in self.metadata.storage_data.items() if k.fqn == "w")
        with open(self.path, "rb") as f:
            all_bytes = f.read()
        size, = struct.unpack_from("<Q", all_bytes, self.at)
        self.start = all_bytes[:self.at]
        self.header = all_bytes[self.at + 8:self.at + 8 + size].decode()
        self.data = all_bytes[self.at + 8 + size:]
        self.length = None

    def write(self):
        header = self.header.encode()
        with open(self.path, "wb") as f:
            f.write(self.start + struct.pack("<Q", len(header) if self.length is None else self.length) + header +
                    self.data)
        with open(os.path.join(self.folder, ".metadata"), "wb") as f:
            pickle.dump(self.metadata, f, 4)


def replaced(pattern, text):
    def change(d):
        changed, n = re.subn(pattern, text, d.header)
        check(n == 1, "%s is there %d times" % (pattern, n))
        d.header = changed
    return change


def field(**fields):
    def change(d):
        for name, value in fields.items():
            setattr(d, name, value(d))
    return change


def info(**fields):
    """Changes what .metadata records about tensor v."""
    def change(d):
        for k, i in d.metadata.storage_data.items():
            if k.fqn == "v":
                for name, value in fields.items():
                    setattr(i, name, value(i))
    return change


HOSTILE = {
    "length-huge": (field(length=lambda d: 2 ** 63), ["offset", "the header has 9223372036854775808 bytes"]),
    "length-beyond": (field(length=lambda d: len(d.header) + len(d.data) + 1), ["truncated", "but the header ends at"]),
    "length-short": (field(length=lambda d: 20), ["offset"]),
    "no-json": (replaced("^{", "["), ["offset", "a JSON object should start here"]),
    "cut-in-header": (field(header=lambda d: d.header[:50], data=lambda d: b"", length=lambda d: 400), ["truncated"]),
    "cut-in-data": (field(data=lambda d: d.data[:-1]), ["truncated"]),
    "longer": (field(data=lambda d: d.data + b"x"), ["1 bytes follow"]),
    "offsets-hole": (replaced(r'("w":{"dtype":"F32","shape":\[2,3\],"data_offsets":)\[\d+,\d+\]', r"\1[9000,9024]"),
                     ["neither overlap nor leave gaps"]),
    "offsets-overlap": (replaced(r'("[vw]":{"dtype":"...","shape":[^:]*,"data_offsets":)\[24,48\]', r"\1[0,24]"),
                        ["neither overlap nor leave gaps"]),
    "offsets-outside": (replaced(r'"shape":[^:]*,"data_offsets":\[24,48\]',
                                 '"shape":[2250],"data_offsets":[24,9024]'), ["truncated"]),
    "offsets-negative": (replaced(r'("w":{"dtype":"F32","shape":\[2,3\],"data_offsets":)\[\d+,\d+\]', r"\1[-4,20]"),
                         ["data_offsets"]),
    "dtype": (replaced('"w":{"dtype":"F32"', '"w":{"dtype":"I32"'), ["says int32, but .metadata says float32"]),
    "dtype-unknown": (replaced('"w":{"dtype":"F32"', '"w":{"dtype":"F31"'), ["the dtype F31 is unknown"]),
    "dtype-size": (replaced('"w":{"dtype":"F32"', '"w":{"dtype":"F64"'), ["require 48 bytes, but its data_offsets span 24"]),
    "shape": (replaced(r'("w":{"dtype":"F32","shape":)\[2,3\]', r"\1[3,2]"), ["other sizes for it than .metadata"]),
    "shape-huge": (replaced(r'("w":{"dtype":"F32","shape":)\[2,3\]', r"\1[4611686018427387904,4]"), ["overflows"]),
    "name": (replaced(r'(,|})"w":', r'\1"x":'), ["DCP_SHARDING_INFO"]),
    "no-info": (replaced("DCP_SHARDING_INFO", "DCP_SHARDING_OTHER"), ["lacks the offsets of this chunk"]),
    "name-everywhere": (lambda d: (replaced(r'(,|})"w":', r'\1"x":')(d), replaced(r'\\"w\\"', r'\\"x\\"')(d)),
                        ["has no tensor of that name"]),
    "elsewhere": (info(offset=lambda i: i.offset + 1), ["v", "a file has only one such part"]),
    "beyond": (info(offset=lambda i: 2 ** 40), ["truncated"]),
}


def hostile(program, home):
    source = os.path.join(home, "sound")
    save({"w": torch.arange(6.).reshape(2, 3), "v": torch.arange(6).int(), "step": 3}, source)
    run(program, "verify", source)
    for name, (change, words) in HOSTILE.items():
        d = Damaged(source, home, "bad-" + name)
        change(d)
        d.write()
        status = 5 if name == "dtype-unknown" else 3
        words = words + ["__0_0.distcp", "tensor"]
        if name not in ("beyond", "elsewhere"):
            words.append(str(d.at))
        refused(program, d.folder, name, *words, status=status)
        r = subprocess.run([program, "check", d.folder], capture_output=True, text=True)
        check(r.returncode != 0, "check of %s: exit %d: %s" % (name, r.returncode, r.stdout))
    shutil.copytree(source, os.path.join(home, "missing"))
    os.remove(os.path.join(home, "missing", "__0_0.distcp"))
    refused(program, os.path.join(home, "missing"), "a missing file", "__0_0.distcp", "missing")
    r = run(program, "check", os.path.join(home, "missing"), ok=1)
    check("the file is missing" in r.stdout, "check of a missing file: %s" % r.stdout)
    run(program, "inspect", "--headers-only", os.path.join(home, "missing"))


def main():
    program = os.path.abspath(sys.argv[1])
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="fc-dcp-st-") as home:
        sharded(program, home) # forks, so it must run before torch starts threads
        lost(program, home)
        every_way(program, home)
        many(program, home)
        hostile(program, home)
    return finish("dcp_safetensors")


if __name__ == "__main__":
    sys.exit(main())
