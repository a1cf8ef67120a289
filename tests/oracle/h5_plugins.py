#!/usr/bin/env python3
"""HDF5 filters of plugins: what h5py wrote with the plugin h5_test_filter.c, read with --hdf5-plugins and without.

usage: h5_plugins.py FSDPCKPT PLUGIN_FOLDER        exit 77 without h5py
"""
import os
import shutil
import subprocess
import sys
import tempfile

PROGRAM, PLUGINS = sys.argv[1:]
os.environ["HDF5_PLUGIN_PATH"] = PLUGINS  # before h5py; the program must not care
try:
    import h5py
    import numpy as np
except ImportError as e:
    print("skipped: %s" % e)
    sys.exit(77)

from checks import check, finish

DATA = {"w": np.arange(41 * 33, dtype="f4").reshape(41, 33), "b": np.arange(77, dtype="f2"), "empty": np.zeros((0, 4), "i8")}


def write(path):
    with h5py.File(path, "w", libver=("v110", "v110")) as f:
        for name, data in DATA.items():
            f.create_dataset(name, data=data, chunks=tuple(min(n, 16) or 1 for n in data.shape), maxshape=(None,) * data.ndim, compression=300)
        f.create_dataset("both", data=DATA["w"], chunks=(16, 33), shuffle=True, compression=300, fletcher32=True)
        f.create_dataset("text", data=np.array([b"word%d" % i for i in range(50)]), chunks=(20,), compression=300)
        f["plain"] = DATA["b"]


def run(*args):
    p = subprocess.run([PROGRAM, *args], capture_output=True, text=True)
    return p.returncode, p.stdout + p.stderr


def fails(status, *args, text):
    code, said = run(*args)
    check(code == status, "%s: status %d: %s" % (args, code, said))
    check(text in said, "%s: it does not say %r: %s" % (args, text, said))


def works(*args):
    code, said = run(*args)
    check(code == 0, "%s: status %d: %s" % (args, code, said))


def main(home):
    source, target = os.path.join(home, "x.h5"), os.path.join(home, "y.h5")
    write(source)
    # The variable of the environment alone loads nothing.
    fails(5, "consolidate", source, "-o", target, text="compressed with inverted (HDF5 filter 300), which cannot be decoded: rewrite it with gzip")
    fails(5, "consolidate", source, "-o", target, text="--hdf5-plugins DIR reads it with a plugin of libhdf5, --exclude")
    works("consolidate", source, "-o", target, "--include", "plain", "-q")
    os.remove(target)

    # With the option, h5py reads in the target what it wrote.
    with_plugins = ("--hdf5-plugins", PLUGINS, "-q")
    works("consolidate", source, "-o", target, *with_plugins)
    with h5py.File(target) as f:
        for name, data in {**DATA, "both": DATA["w"], "plain": DATA["b"]}.items():
            check(f[name].dtype == data.dtype and f[name].shape == data.shape and f[name][()].tobytes() == data.tobytes(), name)
    works("diff", source, target, *with_plugins)
    works("verify", source, *with_plugins)
    works("check", source, "--against", target, *with_plugins)
    works("reshard", source, "-o", os.path.join(home, "dp2"), "--to", "dcp", "--dp", "2", *with_plugins)
    works("diff", target, os.path.join(home, "dp2"), "-q")
    works("extract", source, "text", "--to", "json", "-o", os.path.join(home, "text.json"), *with_plugins)
    with open(os.path.join(home, "text.json")) as f:
        check("word49" in f.read(), "the text")

    # Folders without such a plugin; files that are no plugins.
    other = os.path.join(home, "plugins")
    os.mkdir(other)
    with open(os.path.join(other, "a.so"), "w") as f:
        f.write("no library")
    fails(5, "inspect", source, "--tensor", "w", "--stats", "--hdf5-plugins", other, text="for which no plugin could be loaded")
    fails(4, "inspect", source, "--hdf5-plugins", os.path.join(home, "nowhere"), text="nowhere: the folder of plugins cannot be opened: No such file or directory")
    for name in os.listdir(PLUGINS):
        shutil.copy(os.path.join(PLUGINS, name), os.path.join(other, "b.so"))
    works("diff", source, target, "--hdf5-plugins", other, "-q")
    # One that others can change.
    os.chmod(other, 0o777)
    fails(5, "diff", source, target, "--hdf5-plugins", other, text="can be written by every user")
    os.chmod(other, 0o755)
    os.chmod(os.path.join(other, "b.so"), 0o777)
    fails(5, "extract", source, "w", "-o", target + ".bin", "--to", "raw", "--hdf5-plugins", other, text="for which no plugin could be loaded")

    # What the plugin refuses is damage.
    with h5py.File(source) as f:
        at = f["w"].id.get_chunk_info(0).byte_offset
    with open(source, "r+b") as f:
        f.seek(at)
        f.write(b"\0")
    fails(3, "consolidate", source, "-o", target, "--force", *with_plugins, text="dataset /w cannot be read")
    return finish("h5_plugins")


with tempfile.TemporaryDirectory() as folder:
    sys.exit(main(folder))
