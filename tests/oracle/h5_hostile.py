"""Damaged HDF5 files must give success or one line of error, in limited time and memory, and never a crash.

    h5_hostile.py H5_DUMP H5_MAKE [SEED [ROUNDS]]

Small valid files of many kinds, single and sharded, are damaged at random: bytes, integers, truncation, parts of other files,
mostly in the metadata. libhdf5 crashes on some of them; only its reader process may die of that.
"""
import os
import random
import resource
import struct
import subprocess
import sys
import tempfile

try:
    import h5py
    import numpy as np
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)

DUMP = os.path.abspath(sys.argv[1])
MAKE = os.path.abspath(sys.argv[2])
SEED = int(sys.argv[3]) if len(sys.argv) > 3 else 1
ROUNDS = int(sys.argv[4]) if len(sys.argv) > 4 else 250
SECONDS = 600  # only a hang takes this long; libhdf5 hangs on some files and is stopped after 60 s without progress
MEMORY = 400 << 10  # KiB of the parent, including sanitizers and a few inline objects


def make(path, kind):
    options = [{}, {"libver": ("v110", "v110")}, {"libver": ("v108", "v108"), "userblock_size": 512}][kind % 3]
    with h5py.File(path, "w", track_order=kind >= 3, **options) as f:
        f["w"] = np.arange(12, dtype="f4").reshape(3, 4)
        f.create_dataset("gz", data=np.arange(300, dtype="i4").reshape(15, 20), chunks=(4, 7), compression=5,
                         shuffle=True, fletcher32=True)
        d = f.create_dataset("part", (50, 60), "f8", chunks=(8, 8), fillvalue=2, maxshape=(None, None))
        d[9:20, 17:30] = 1
        f.create_dataset("unlimited", data=np.arange(40, dtype="u2"), chunks=(5,), maxshape=(None,))
        f.create_dataset("so", data=np.arange(64), chunks=(16,), scaleoffset=0)
        g = f.create_group("model")
        for i in range(12):
            g[f"layer.{i}"] = np.full(3, i, "f2")
        g["soft"] = h5py.SoftLink("/w")
        g["loop"] = f["/"]
        f["text"] = ["a", "bb", "ccc"]
        f["fixed"] = np.array([b"ab", b"c"])
        f["compound"] = np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")])
        f["bool"] = np.array([True, False])
        f["complex"] = np.array([1 + 2j])
        f["ref"] = np.array([f["w"].ref], dtype=h5py.ref_dtype)
        f.attrs["config"] = "x" * 50
        g.attrs["numbers"] = np.arange(5)
        if kind % 3 == 2:
            return  # version 1.8 has no virtual datasets
        v = h5py.VirtualLayout((3, 4), "f4")
        v[:] = h5py.VirtualSource(".", "w", (3, 4))
        f.create_virtual_dataset("virtual", v)


def damage(rng, data, others):
    data = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 4, 16])):
        at = rng.randrange(len(data))
        if rng.random() < 0.4:
            at = rng.randrange(min(len(data), 2048))
        how = rng.randrange(6)
        if how == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif how == 1:
            data[at] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])
        elif how == 2:
            value = rng.choice([0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1, len(data), rng.getrandbits(64)])
            data[at:at + 8] = struct.pack("<Q", value)[:len(data[at:at + 8])]
        elif how == 3:
            size = rng.randrange(1, 64)
            to = rng.randrange(len(data))
            data[to:to + size] = data[at:at + size][:len(data[to:to + size])]
        elif how == 4:
            other = rng.choice(others)
            size = rng.randrange(1, 256)
            piece = other[at:at + size]
            data[at:at + len(piece)] = piece
        elif rng.random() < 0.3:
            del data[at:]
            data = data or bytearray(1)
    return bytes(data)


class Tally:
    def __init__(self):
        self.statuses, self.deaths, self.bad, self.largest = {}, {}, 0, 0

    def run(self, what, options, source, out, files):
        """Dumps `source` and checks the outcome. On failure it keeps `files`, a list of (path, bytes)."""
        try:
            p = subprocess.run([DUMP, *options, source, out], capture_output=True, timeout=SECONDS,
                               env={**os.environ, "H5_DUMP_MEMORY": "1"})
        except subprocess.TimeoutExpired:
            self.fail(f"{what}: hangs", files)
            return
        lines = p.stderr.decode(errors="replace").splitlines()
        memory = 0
        if p.returncode == 0 and lines and lines[-1].isdigit():
            memory = int(lines.pop())
            self.largest = max(self.largest, memory)
        self.statuses[p.returncode] = self.statuses.get(p.returncode, 0) + 1
        text = "\n".join(lines)
        if "killed by" in text:
            signal = text.split("killed by ")[1].split()[0]
            self.deaths[signal] = self.deaths.get(signal, 0) + 1
        ok = p.returncode in (0, 3, 5) and memory <= MEMORY
        ok = ok and (not lines if p.returncode == 0 else len(lines) == 1 and lines[0].startswith(source))
        if not ok:
            self.fail(f"{what}: status {p.returncode}, {memory} KiB: {text[:3000]}", files)

    def fail(self, text, files):
        print("FAILED:", text)
        self.bad += 1
        for path, data in files:
            with open(os.path.join(tempfile.gettempdir(), f"h5_hostile-{SEED}-{os.path.basename(path)}"), "wb") as f:
                f.write(data)


def damage_files(rng, tally, d, out):
    path = os.path.join(d, "x.h5")
    files = []
    for kind in range(6):
        make(path, kind)
        files.append(open(path, "rb").read())
    for n in range(ROUNDS):
        data = damage(rng, rng.choice(files), files)
        options = ["--follow-external"] if rng.random() < 0.1 else []
        with open(path, "wb") as f:
            f.write(data)
        tally.run(f"round {n} of seed {SEED}", options, path, out, [(path, data)])


def damage_shards(rng, tally, d, out):
    source = os.path.join(d, "sharded")
    os.mkdir(source)
    subprocess.run([MAKE, source, "dp=2", "tp=2"], check=True)
    names = [os.path.join(source, n) for n in sorted(os.listdir(source))]
    files = [open(n, "rb").read() for n in names]
    for n in range(ROUNDS // 5):
        i = rng.randrange(len(files))
        data = damage(rng, files[i], files)
        with open(names[i], "wb") as f:
            f.write(data)
        options = ["--headers-only"] if rng.random() < 0.2 else []
        tally.run(f"sharded round {n} of seed {SEED}, {names[i]}", options, source, out, [(names[i], data)])
        with open(names[i], "wb") as f:
            f.write(files[i])


def main():
    rng, tally = random.Random(SEED), Tally()
    with tempfile.TemporaryDirectory() as d:
        out = os.path.join(d, "out")
        os.mkdir(out)
        damage_files(rng, tally, d, out)
        damage_shards(rng, tally, d, out)
    print(f"statuses {tally.statuses}, reader processes killed {tally.deaths}, largest parent {tally.largest} KiB")
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{children.ru_utime + children.ru_stime:.0f} s of processor time, {tally.bad} failures")
    return 1 if tally.bad else 0


sys.exit(main())
