"""Files of formats that fsdpckpt does not read are named, with what to use instead, and the exit status is 5: foreign.py PATH

Each entry of the table in lib/io/foreign.c has a file here. Those of NumPy, Python and h5py are made by them, and others by hand as
their formats say, because the packages are large.
"""
import bz2
import gzip
import lzma
import os
import pickle
import re
import struct
import subprocess
import sys
import tarfile
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

FSDPCKPT = os.path.abspath(sys.argv[1])
TABLE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "lib", "io", "foreign.c")
told = []  # all messages
DIGITS = struct.pack("<3f", 1, 2, 3)


def gguf():
    name = b"blk.0.attn_q.weight"
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q", len(name)) + name + struct.pack("<IQIQ", 1, 3, 0, 0)
    return head + bytes(-len(head) % 32) + DIGITS


# Content, and words of the message. The name of the file says nothing.
CONTENTS = {
    "gguf": (gguf(), "GGUF"), "gzip": (gzip.compress(b"x"), "gzip"), "xz": (lzma.compress(b"x"), "xz"), "bz2": (bz2.compress(b"x"), "bzip2"),
    "zstd": (b"\x28\xb5\x2f\xfd\x04\x08\x01\x00\x00x", "zstd"), "tflite": (b"\x1c\0\0\0TFL3" + bytes(60), "TensorFlow Lite"),
    "list": (b'model_checkpoint_path: "ckpt-1"\nall_model_checkpoint_paths: "ckpt-1"\n', "TensorFlow"),
    "ocdbt": (b"\x0c\xdb\x3a\x2a" + bytes(80), "Orbax"), "parquet": (b"PAR1" + bytes(80) + b"PAR1", "Parquet"),
    "arrow": (b"ARROW1\0\0" + bytes(80), "Arrow"), "matlab": (b"MATLAB 5.0 MAT-file, Platform: GLNXA64" + bytes(90), "MATLAB"),
    "pickle": (pickle.dumps({"w": [1.0]}), "Python's own"),
}
# Paths in a directory that is a checkpoint, and words of the message. The content says nothing.
DIRECTORIES = {
    "metaseq": (["checkpoint_last-model_part-0-shard0.pt", "checkpoint_last-model_part-0-shard1.pt"], "fairscale's"),
    "colossalai": (["pytorch_optim.bin.index.json", "pytorch_optim-00001.bin", "pytorch_optim_group.bin"], "an optimizer of ColossalAI"),
    "orbax": (["_CHECKPOINT_METADATA", "default/manifest.ocdbt"], "Orbax"), "orbax-item": (["manifest.ocdbt", "d/1"], "Orbax"),
    "orbax-old": (["_METADATA", "params.kernel/.zarray"], "Orbax"),
    "tf": (["checkpoint", "ckpt-1.index", "ckpt-1.data-00000-of-00001"], "TensorFlow checkpoint"),
    "tf1": (["model.ckpt.index"], "TensorFlow checkpoint"),
    "saved_model": (["saved_model.pb", "variables/variables.index"], "SavedModel"),
    "onnx": (["config.json", "model.onnx"], "ONNX"),
    "llama": (["model-q4.gguf"], "llama.cpp"), "npy": (["w.npy"], "NumPy"), "npz": (["w.npz"], "NumPy"),
    "zarr": ([".zarray", "0.0"], "Zarr"), "zarr-group": ([".zgroup", "w/.zarray"], "Zarr"), "zarr3": (["zarr.json", "c/0"], "Zarr"),
}
# Files whose names say what they are.
NAMES = {"model.onnx": "ONNX", "saved_model.pb": "SavedModel", "ckpt-1.data-00000-of-00002": "TensorFlow", "ckpt-1.index": "TensorFlow"}


def refused(path, words):
    """One line, exit status 5, and no target, for a command that reads and one that writes."""
    for argv in (["inspect", path], ["consolidate", path, "-o", "out.h5", "-q"]):
        r = subprocess.run([FSDPCKPT, *argv], capture_output=True, text=True)
        told.append(r.stderr)
        check(r.returncode == 5 and r.stderr.count("\n") == 1 and path in r.stderr and words in r.stderr,
              f"{argv}: exit {r.returncode}: {r.stderr.strip()}, without {words}")
    check(not os.path.exists("out.h5"), f"{path}: a target was written")


def write(path, content=b"\x08\x09x"):
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "wb") as f:
        f.write(content)


def contents():
    for name, (content, words) in CONTENTS.items():
        write(name, content)
        refused(name, words)
    np.save("a.npy", np.arange(3.0))
    os.rename("a.npy", "numpy")
    refused("numpy", "NumPy")
    np.savez("a.npz", w=np.arange(3.0))
    refused("a.npz", "NumPy")
    with tarfile.open("tar", "w") as archive:
        archive.add("numpy")
    refused("tar", "tar")


def names():
    for name, words in NAMES.items():
        write(name)
        refused(name, words)
        os.remove(name)
    for name, (files, words) in DIRECTORIES.items():
        for file in files:
            write(f"directory {name}/{file}")
        refused(f"directory {name}", words)


def nanotron():
    """nanotron counts ranks from 0, so its safetensors look like a set of which the last is missing."""
    for rank in range(2):
        os.makedirs("attn", exist_ok=True)
        safetensors.torch.save_file({"data": torch.rand(4)}, f"attn/model_weight_pp-rank-0-of-1_tp-rank-{rank}-of-2.safetensors")
    refused("attn", "nanotron")
    run(FSDPCKPT, "inspect", "attn/model_weight_pp-rank-0-of-1_tp-rank-1-of-2.safetensors")


def every_entry_was_named():
    with open(TABLE) as f:
        text = re.sub(r'"\s+"', "", f.read())
    whats = [t for t in re.findall(r'"((?:[^"\\]|\\.)*)"', text) if ": " in t and "%s" not in t]
    check(len(whats) > 25, f"{len(whats)} entries")
    for what in whats:
        check(any(what in line for line in told), f"no file here has the entry {what}")


def newer_hdf5():
    """What HDF5 2.0 writes that libhdf5 1.10 cannot read (h5_newer.py has what is read nevertheless)."""
    if h5py.version.hdf5_version_tuple < (2, 0, 0):
        print("note: this h5py writes no files of HDF5 2.0")
        return
    pair = np.zeros(90, [("a", "i4"), ("b", "f8")])
    makers = {"compressed": lambda f: f.create_dataset("x", data=pair, chunks=(10,), compression=1),
              "attributes": lambda f: f.create_dataset("x", data=np.zeros(3)).attrs.update({f"c{i}": 1j for i in range(20)})}
    for name, make in makers.items():
        with h5py.File(name + ".h5", "w", libver="latest") as f:
            make(f)
        r = subprocess.run([FSDPCKPT, "consolidate", name + ".h5", "-o", "out.h5", "-q"], capture_output=True, text=True)
        readable = r.returncode == 0  # with a libhdf5 of version 2
        check(readable or (r.returncode == 5 and "libver" in r.stderr
                           and r.stderr.count("\n") == 1), f"{name}: exit {r.returncode}: {r.stderr}")
        with h5py.File(name + ".h5", "w", libver=("earliest", "v110")) as f:  # what the message advises
            make(f)
        r = subprocess.run([FSDPCKPT, "consolidate", name + ".h5", "-o", "out.h5", "-q", "--force"], capture_output=True, text=True)
        check(r.returncode == 0, f"{name} with the older version: {r.stderr}")
        os.remove("out.h5")


def main():
    with tempfile.TemporaryDirectory(prefix="fsdpckpt-") as folder:
        os.chdir(folder)
        for part in (contents, names, nanotron, every_entry_was_named, newer_hdf5):
            part()
        os.chdir("/")
    sys.exit(finish("foreign"))


main()
