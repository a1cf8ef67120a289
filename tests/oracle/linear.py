"""Time and memory are linear in the bytes read: the worst inputs known for each reader and writer, at n and 4 n.

    linear.py FSDPCKPT [CASE...]

A cost that is linear grows by 4, a quadratic one by 16. Every case also must not grow by more than 8 plus the cost of
an empty run, in processor time and in peak memory. A refusal (exit 3 or 5, one line) is an answer like any other.
"""
from linear_cost import SMALL, TOOL, failures, finish, grows

import argparse
import io
import json
import os
import pickle
import struct
import subprocess
import sys
import tempfile
import zipfile

try:
    import h5py
    import numpy as np
    import torch
    from torch.distributed.checkpoint import metadata as dcp
    from torch.distributed.checkpoint.filesystem import _StorageInfo
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)


# ---- torch.save: pickles whose values share their parts

def save(path, data):
    data = data if isinstance(data, bytes) else pickle.dumps(data, 4)
    with zipfile.ZipFile(path, "w") as z:
        z.writestr("archive/data.pkl", data)
        z.writestr("archive/version", "3\n")


def instances_of_one_state(n):
    state = {f"k{i}": i for i in range(n)}
    out = {}
    for i in range(n):
        out[f"n{i}"] = argparse.Namespace()
        out[f"n{i}"].__dict__ = state
    return out


def one_long_key(n):
    return {"k" * (n * 16): {str(i): i for i in range(n)}}


def long_path(n):
    values = {str(i): i for i in range(n)}
    for i in range(100):
        values = {f"p{i}" * (n // 100): values}
    return values


def one_dict_in_many_places(n):
    return {"l": [{"k" * (n * 8): 1}] * (n * 4)}


def many_calls(shared, function, n):
    """The function called n times with the one value that the opcodes `shared` push."""
    calls = b"h\x01h\x00\x85R" * n
    return b"\x80\x04}(X\x01\0\0\0b" + shared + b"\x94X\x01\0\0\0g" + function + b"\x94X\x01\0\0\0l](" + calls + b"eu."


def bytes_of_one_text(n):
    return many_calls(b"B" + struct.pack("<I", n * 4) + b"x" * (n * 4), b"cbuiltins\nbytearray\n", n)


def sizes_of_one_tuple(n):
    return many_calls(b"(" + b"K\x01" * (n * 4) + b"t", b"ctorch\nSize\n", n)


def sets_of_one_list(n):
    return many_calls(b"](" + b"K\x01" * (n * 4) + b"e", b"cbuiltins\nset\n", n)


def dicts_of_one_list(n):
    return many_calls(b"](" + b"K\x01K\x02\x86" * n + b"e", b"ccollections\nOrderedDict\n", n)


def objects_of_one_storage(n):
    """Every object has its own copy of the storage that its tensor is a part of."""
    storage = torch.zeros(n * 250)
    out = io.BytesIO()
    torch.save({f"o{i}": {1.5: storage[i:i + 1]} for i in range(n)}, out)
    return out.getvalue()


# ---- DCP

def write_dcp(folder, **parts):
    os.mkdir(folder)
    data = dcp.Metadata(**{"state_dict_metadata": {}, "planner_data": {}, "storage_data": {}, **parts})
    with open(os.path.join(folder, ".metadata"), "wb") as f:
        pickle.dump(data, f, 4)


def tensor(shape, boxes):
    chunks = [dcp.ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in boxes]
    return dcp.TensorStorageMetadata(dcp.TensorProperties(torch.float32), torch.Size(shape), chunks)


def places(name, t):
    return {dcp.MetadataIndex(name, c.offsets, i): _StorageInfo("__0_0.distcp", 1000 * i, 1000)
            for i, c in enumerate(t.chunks)}


def one_list_of_chunks(folder, n):
    t = tensor((n,), [((i,), (1,)) for i in range(n)])
    write_dcp(folder, state_dict_metadata={f"t{i}": t for i in range(n)}, storage_data=places("t0", t))


def one_state_of_chunks(folder, n):
    t = tensor((n,), [((0,), (1,))] * n)
    state = dict(vars(t.chunks[0]), **{f"x{i}": i for i in range(n)})
    for i in range(n):
        t.chunks[i] = dcp.ChunkStorageMetadata(torch.Size([i]), torch.Size([1]))
        t.chunks[i].__dict__ = state
    write_dcp(folder, state_dict_metadata={"t": t})


def long_paths(folder, n):
    t = tensor((1,), [((0,), (1,))])
    path = ("k" * n,) * n
    write_dcp(folder, state_dict_metadata={f"t{i}": t for i in range(n)}, planner_data={f"t{i}": path for i in range(n)})


def list_in_list(folder, n):
    """One name, whose path goes through 50 n lists."""
    t, name = tensor((1,), [((0,), (1,))]), "a" + ".0" * (50 * n)
    write_dcp(folder, state_dict_metadata={name: t}, planner_data={name: ("a",) + (0,) * (50 * n)}, storage_data=places(name, t))


def cut_along_many_dimensions(folder, n):
    """Each of n / 100 tensors is cut along 22 dimensions: one chunk for each, the next in the half that is left."""
    k = 22
    boxes = [([int(d < i) for d in range(k)], [1 if d <= i else 2 for d in range(k)]) for i in range(k + 1)]
    tensors = {f"t{i}": tensor((2,) * k, boxes) for i in range(n // 100)}
    stored = {}
    for name, t in tensors.items():
        stored.update(places(name, t))
    write_dcp(folder, state_dict_metadata=tensors, storage_data=stored)


def many_small_chunks(folder, n):
    t = tensor((n * 4, 2), [((i, j), (1, 1)) for i in range(n * 4) for j in range(2)])
    write_dcp(folder, state_dict_metadata={"t": t}, storage_data=places("t", t))


def many_names_of_one_item(folder, n):
    write_dcp(folder)
    item = io.BytesIO()
    torch.save([list(range(n * 20))], item)
    with open(os.path.join(folder, "__0_0.distcp"), "wb") as f:
        f.write(item.getvalue())
    place = _StorageInfo("__0_0.distcp", 0, len(item.getvalue()))
    data = dcp.Metadata({f"o{i}": dcp.BytesStorageMetadata() for i in range(n)}, None,
                        {dcp.MetadataIndex(f"o{i}"): place for i in range(n)})
    with open(os.path.join(folder, ".metadata"), "wb") as f:
        pickle.dump(data, f, 4)


def one_chunk_over_many(folder, n):
    """A chunk that spans all rows, next to one chunk per row."""
    t = tensor((n, 2), [((0, 0), (n, 1))] + [((i, 1), (1, 1)) for i in range(n)])
    write_dcp(folder, state_dict_metadata={"t": t}, storage_data=places("t", t))
    with open(os.path.join(folder, "__0_0.distcp"), "wb") as f:
        f.truncate(1000 * (n + 1))


# ---- HDF5

def groups_that_link_to_each_other(path, n):
    with h5py.File(path, "w") as f:
        groups = [f.create_group(f"g{i}") for i in range(n // 100)]
        for a in groups:
            for i, b in enumerate(groups):
                a[f"l{i}"] = b
        f["w"] = np.ones(1)


def many_names_of_one_group(path, n):
    with h5py.File(path, "w") as f:
        g = f.create_group("g")
        for i in range(n // 4):
            g[f"w{i}"] = i
        for i in range(n // 4):
            f[f"l{i}"] = h5py.SoftLink("/g")


def many_names_of_one_object(path, n):
    with h5py.File(path, "w") as f:
        f["w"] = np.ones(1)
        f["o"] = np.zeros(n * 10, dtype=[("a", "f4"), ("b", "i4")])
        for i in range(n):
            f[f"o{i}"] = f["o"]


def many_chunks(path, n, **how):
    with h5py.File(path, "w", libver=("earliest", "v110")) as f:
        f.create_dataset("w", data=np.ones((n * 2, 2), "f4"), chunks=(1, 2), **how)


def fixed_chunks(path, n):
    many_chunks(path, n)


def extensible_chunks(path, n):
    many_chunks(path, n, maxshape=(None, 2))


def tree_of_chunks(path, n):
    many_chunks(path, n, maxshape=(None, None), compression=1)


def never_written(path, n):
    with h5py.File(path, "w") as f:
        f.create_dataset("whole", (n << 30,), "f4")
        f.create_dataset("rows", (n, 1 << 30), "f4", chunks=(1, 1 << 28), fillvalue=2)


def many_datasets(path, n):
    with h5py.File(path, "w") as f:
        for i in range(n):
            f[f"layers.{i}.w"] = np.ones(1, "f4")


# ---- safetensors, schemas

def many_tensors(path, n):
    header = {f"layers.{i}.w": {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]} for i in range(n)}
    text = json.dumps(header).encode()
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + bytes(n))


def nested_metadata(path, n):
    text = json.dumps({"__metadata__": {"m": "[" * (n * 100)}, "w": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}})
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text.encode())


def legacy(path, n):
    torch.save({f"l{i}": torch.ones(1) for i in range(n)}, path, _use_new_zipfile_serialization=False)


def views_of_one_storage(path, n):
    storage = torch.ones(n)
    torch.save({f"l{i}": storage[i:i + 1] for i in range(n)}, path)


def optimizer(path, n):
    n //= 4
    torch.save({"model": {f"l{i}": torch.ones(2) for i in range(n)},
                "optimizer": {"state": {i: {"exp_avg": torch.ones(2), "step": 1} for i in range(n)},
                              "param_groups": [{"lr": 0.1, "params": list(range(n))}]}}, path)


def rank_files(folder, n):
    os.mkdir(folder)
    for rank in range(2):
        torch.save({f"l{i}": torch.ones(1) for i in range(n)}, os.path.join(folder, f"rank_{rank}.pt"))


def schema(path, n):
    values = [{"name": f"layers.{i}.w", "dtype": "float32", "shape": [4, 4]} for i in range(n)]
    with open(path, "w") as f:
        json.dump({"fsdpckpt": "schema", "schema": 1, "tensors": values}, f)


def regex(n):
    return f"s/{'(' * 8}a{{{min(n, 9000)}}}{'){200}' * 8}/b/"


def pickle_case(make):
    def write(path, n):
        save(path, make(n))
    write.__name__ = make.__name__
    return write


PT = (instances_of_one_state, one_long_key, long_path, one_dict_in_many_places, bytes_of_one_text, sizes_of_one_tuple,
      sets_of_one_list, dicts_of_one_list)
DCP = (one_list_of_chunks, one_state_of_chunks, long_paths, list_in_list, cut_along_many_dimensions,
       many_small_chunks)
H5 = (groups_that_link_to_each_other, many_names_of_one_group, many_datasets)
WRITTEN = [["inspect"], ["check"], ["verify"]] + [["convert", "-o", "out" + e] for e in (".h5", ".pt", ".safetensors")] + [
    ["convert", "-o", "out", "--to", "dcp"]]

# (case, name of the input, function that makes it, what is run)
CASES = [(f, "x.pt", pickle_case(f), run) for f in PT for run in (["inspect"], ["check"], ["convert", "-o", "out.h5"])]
CASES += [(f, "x", f, run) for f in DCP for run in (["inspect"], ["check"])]
CASES += [(list_in_list, "x", list_in_list, ["export", "-o", "out"])]
CASES += [(f, "x.h5", f, ["inspect"]) for f in H5]
CASES += [(never_written, "x.h5", never_written, run) for run in (["inspect"], ["verify"], ["verify", "--seal"])]
CASES += [(f, name, make, run) for f, name, make in (
    (objects_of_one_storage, "x.pt", pickle_case(objects_of_one_storage)), (many_names_of_one_item, "x", many_names_of_one_item),
    (many_names_of_one_object, "x.h5", many_names_of_one_object)) for run in WRITTEN]
CASES += [(one_chunk_over_many, "x", one_chunk_over_many, run) for run in (["check"], ["reshard", "--dp", "512", "--dry-run"])]
CASES += [(f, "x.h5", f, run) for f in (fixed_chunks, extensible_chunks, tree_of_chunks)
          for run in (["verify"], ["reshard", "-o", "out", "--dp", "2"])]
CASES += [(f, "x.pt", f, run) for f in (legacy, views_of_one_storage) for run in (["verify"], ["convert", "-o", "out.pt"])]
CASES += [(optimizer, "x.pt", optimizer, run) for run in (
    ["inspect", "--html", "out.html"], ["reshard", "-o", "out", "--dp", "2"], ["reshard", "-o", "out", "--to", "pt", "--dp", "2"],
    ["reshard", "-o", "out", "--to", "safetensors", "--dp", "2"], ["export", "-o", "out"], ["average", "x.pt", "-o", "out.pt"])]
CASES += [(rank_files, "x", rank_files, run) for run in (["check"], ["consolidate", "-o", "out.h5"])]
CASES += [(nested_metadata, "x.safetensors", nested_metadata, ["inspect"])]
CASES += [(schema, "x.json", schema, ["reshard", "--dp", "7", "--dry-run"])]
CASES += [(many_tensors, "x.safetensors", many_tensors, run) for run in (
    ["inspect"], ["check"], ["verify"], ["consolidate", "-o", "out.safetensors"], ["consolidate", "-o", "out.pt"],
    ["reshard", "-o", "out", "--to", "dcp", "--dp", "2"], ["diff", "x.safetensors"],
    ["check", "--rename", regex(SMALL)])]


def equal_digests():
    """The digest of what was never written is that of the same values written."""
    with tempfile.TemporaryDirectory() as d:
        digests = []
        for name, write in (("a.h5", False), ("b.h5", True)):
            with h5py.File(os.path.join(d, name), "w") as f:
                f.create_dataset("c", (7, 5, 3), "f4", fillvalue=2.5)
                f.create_dataset("p", (9, 11), "i2", chunks=(4, 5), fillvalue=-7)[0, 0] = 3
                f.create_dataset("q", (9, 11), "i2", chunks=(4, 5), fillvalue=-7)
                f.create_dataset("s", (), "f8", fillvalue=1)
                for key in f if write else ():
                    f[key][...] = f[key][...]
            subprocess.run([TOOL, "verify", "--seal", name], cwd=d, check=True, stdout=subprocess.DEVNULL)
            with open(os.path.join(d, name + ".fsdpckpt-seal.json")) as f:
                digests.append(json.load(f)["tensors"])
        if digests[0] != digests[1]:
            failures.append(f"digests of data that was never written: {digests}")


def main():
    wanted = sys.argv[2:]
    for case in CASES:
        if not wanted or case[0].__name__ in wanted:
            grows(case[1], case[2], [case[3]])
    equal_digests()
    return finish()


if __name__ == "__main__":
    sys.exit(main())
