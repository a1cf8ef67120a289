#!/usr/bin/env python3
"""One command reads the headers of all its HDF5 files in one confined process, and each error is that of the file alone.

usage: h5_processes.py FSDPCKPT COUNT_PROCESSES       exit 77 without h5py

COUNT_PROCESSES is a library to preload, see count_processes.c.
"""
import os
import shutil
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

TOOL, LIBRARY = os.path.abspath(sys.argv[1]), os.path.abspath(sys.argv[2])
FILES = 8


def make(path, value):
    with h5py.File(path, "w") as f:
        for i in range(10):
            f[f"model/w{i}"] = np.full((4, 5), value + i, "f4")
        f.create_dataset("model/wz", data=np.full(40, value, "f4"), chunks=(7,), compression="gzip")
        f.attrs["step"] = 3


def make_large(path):
    make(path, 2)
    with h5py.File(path, "a") as f:
        for i in range(8000):
            f.create_dataset(f"many/{i}", shape=(), dtype="f4")


def truncate(path):
    os.truncate(path, os.path.getsize(path) // 2)


def cut_superblock(path):
    with open(path, "r+b") as f:
        f.seek(8)
        f.write(b"\xff" * 40)


def damage_root(path):
    """The heap and the tree of a group, so that libhdf5 has read something before it fails."""
    data = bytearray(open(path, "rb").read())
    for sign in (b"HEAP", b"TREE"):
        at = data.rfind(sign)
        data[at:at + 4] = b"XXXX"
    open(path, "wb").write(data)


def multiply_links(path):
    """Groups that each contain the next one several times: the names are too many for the size of the file."""
    with h5py.File(path, "a") as f:
        groups = [f.create_group(f"g{i}") for i in range(30)]
        for a, b in zip(groups, groups[1:]):
            for k in range(3):
                a[f"l{k}"] = b
        groups[-1]["w"] = np.zeros(1, "f4")


def cut_values(path):
    """A contiguous dataset that ends past the end of the file."""
    with h5py.File(path, "a") as f:
        at = f["model/w9"].id.get_offset()
    os.truncate(path, at + 8)


def run(home, *args, kill=0, ms=20):
    """Runs the command. Returns its exit status, its stdout and stderr, and the number of processes that it forked."""
    log = os.path.join(home, "log")
    open(log, "w").close()
    env = dict(os.environ, LC_ALL="C.UTF-8", LD_PRELOAD=LIBRARY, PROCESSES_LOG=log, PROCESSES_KILL=str(kill), PROCESSES_MS=str(ms))
    p = subprocess.run([TOOL, *args], cwd=home, env=env, capture_output=True, text=True)
    return p.returncode, p.stdout, p.stderr, os.path.getsize(log)


def average(home, files, *more, **how):
    return run(home, "average", *files, "-o", "mean.safetensors", "--include", "model.w*", "-q", *more, **how)


home = tempfile.mkdtemp(prefix="fsdpckpt-processes-")
names = [f"model-{i}.h5" for i in range(FILES)]
for i, name in enumerate(names):
    make(os.path.join(home, name), i)

# One process for all files.
code, _, told, processes = average(home, names)
check((code, told, processes) == (0, "", 1), f"average of {FILES} files: exit {code}, {processes} processes: {told}")
for command in (["inspect", names[0]], ["diff", names[0], names[0]], ["diff", "--data", names[0], names[1]],
                ["check", names[0], "--against", names[1]], ["schema", names[0]],
                ["convert", names[0], "-o", "again.safetensors"]):
    code, _, told, processes = run(home, *command)
    check(code in (0, 1) and processes == 1, f"{command[0]}: exit {code}, {processes} processes: {told}")

# What is listed does not depend on the files before it: the same pair, in one process or in two.
for name in names[:2]:
    alone = run(home, "inspect", name, "--json")[1]
    check("model.w9" in alone, f"inspect of {name}: {alone[:200]}")

# A process does not read more than 64 files.
many = [names[i % FILES] for i in range(70)]
code, _, told, processes = average(home, many, "--force")
check((code, told, processes) == (0, "", 2), f"average of 70 files: exit {code}, {processes} processes: {told}")

# A bad file has the error that it has alone, wherever it is among the others.
for damage in (truncate, cut_superblock, damage_root, multiply_links, cut_values):
    bad = os.path.join(home, "bad.h5")
    shutil.copy(os.path.join(home, names[0]), bad)
    damage(bad)
    expected = run(home, "inspect", "bad.h5")
    for at in (0, 4, 7):
        files = names[:at] + ["bad.h5"] + names[at + 1:]
        code, _, told, processes = average(home, files, "--force")
        if expected[0] == 0:  # one dataset is unreadable, but the file can be opened
            check(code != 0 and "bad.h5" in told, f"{damage.__name__} at {at}: exit {code}: {told}")
        else:
            check((code, told) == (expected[0], expected[2]), f"{damage.__name__} at {at}: exit {code}: {told}, alone: {expected[2]}")
        check(not any(name in told for name in names), f"{damage.__name__} at {at}: names another file: {told}")

# A process that is killed while it reads the fifth file: that file is read again, or is the one that is named.
make_large(os.path.join(home, "large.h5"))
files = names[:4] + ["large.h5"] + names[5:]
code, _, told, processes = average(home, files, "--force", kill=1)
check((code, told, processes) == (0, "", 2), f"one process was killed: exit {code}, {processes} processes: {told}")
code, _, told, processes = average(home, files, "--force", kill=9)
check(code == 3 and processes == 2, f"all processes are killed: exit {code}, {processes} processes: {told}")
check(told.startswith("fsdpckpt: large.h5: corrupt HDF5 file (the reader process was killed by a signal while reading "),
      f"all processes are killed: {told}")

# Files that may lead to others are read by a process that may open them.
with h5py.File(os.path.join(home, "links.h5"), "w") as f:
    for i in range(10):
        f[f"model/w{i}"] = h5py.ExternalLink(names[1], f"/model/w{i}")
    f["model/wz"] = h5py.ExternalLink(names[1], "/model/wz")
code, _, told, processes = average(home, names[:3] + ["links.h5"], "--force", "--follow-external")
check(code == 0 and told == "", f"external links: exit {code}: {told}")

shutil.rmtree(home)
sys.exit(finish("h5_processes"))
