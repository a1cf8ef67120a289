#!/usr/bin/env python3
"""Measures `delta` and `apply` next to the Python that training frameworks use for the same files: numpy, zstandard and xxhash, with as
many threads as processors. deltas.py FSDPCKPT [--dir DIR] [--size 2G] [--rounds 5]

A model of bf16 tensors, in files of 1 GiB, and a version of it in which 2 % of the elements differ. Every round runs every command once, on
files in the page cache, and prints nothing; the table has the medians. Our times include the journal and all fsyncs. Python changes a
memory map, and syncs nothing. Each result is compared with the new version.
"""
import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time

ELEMENTS, SHARE, FILE = 16 << 20, 0.02, 1 << 30


def write_header(f, tensors, metadata=None):
    """@return the offset of the data. Each tensor is (name, dtype, shape, bytes)."""
    header, at = {"__metadata__": metadata or {"format": "pt"}}, 0
    for name, dtype, shape, size in tensors:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    f.write(len(text).to_bytes(8, "little") + text)


def read_header(path):
    """@return __metadata__, and {name: (begin, end)} in the file."""
    with open(path, "rb") as f:
        size = int.from_bytes(f.read(8), "little")
        header = json.loads(f.read(size))
    metadata = header.pop("__metadata__", {})
    return metadata, {name: tuple(8 + size + at for at in entry["data_offsets"]) for name, entry in header.items()}


def make(folder, size):
    """Two versions of a model, old and new."""
    import numpy as np
    size = int(size)
    rng = np.random.default_rng(1)
    for side in ("old", "new"):
        os.makedirs(os.path.join(folder, side))
    count = max(1, size // (2 * ELEMENTS))
    per_file = FILE // (2 * ELEMENTS)
    for k in range(0, count, per_file):
        names = [f"layers.{i}.weight" for i in range(k, min(k + per_file, count))]
        file = f"model-{k // per_file + 1:05d}-of-{-(-count // per_file):05d}.safetensors"
        with open(os.path.join(folder, "old", file), "wb") as old, open(os.path.join(folder, "new", file), "wb") as new:
            for f in (old, new):
                write_header(f, [(name, "BF16", [ELEMENTS], 2 * ELEMENTS) for name in names])
            for _ in names:
                bits = (rng.standard_normal(ELEMENTS, dtype=np.float32) * np.float32(0.02)).view(np.uint32)
                values = (bits >> 16).astype("<u2")
                values.tofile(old)
                at = rng.integers(0, ELEMENTS, int(ELEMENTS * SHARE))
                values[at] += rng.choice(np.array([1, 2, 0xffff], "<u2"), len(at))  # a step changes the last bits
                values.tofile(new)


def spans(folder):
    """{name: (path, begin, end)} of a model."""
    found = {}
    for file in sorted(os.listdir(folder)):
        if file.endswith(".safetensors"):
            path = os.path.join(folder, file)
            found.update({name: (path, *span) for name, span in read_header(path)[1].items()})
    return found


def mapped(path, mode="r"):
    import numpy as np
    return np.memmap(path, np.uint8, mode)


def peer_delta(old, new, out):
    from concurrent.futures import ThreadPoolExecutor

    import numpy as np
    import xxhash
    import zstandard
    maps = {path: mapped(path) for side in (old, new) for path, _, _ in spans(side).values()}

    def encode(item):
        name, (path, begin, end) = item
        before, after = (maps[p][a:b] for p, a, b in (spans_old[name], (path, begin, end)))
        difference = np.bitwise_xor(before, after)
        if not difference.any():
            return name, None, None
        return name, zstandard.ZstdCompressor(level=1).compress(difference), xxhash.xxh3_128(after).hexdigest()

    spans_old = spans(old)
    os.makedirs(out)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        frames = [frame for frame in pool.map(encode, spans(new).items()) if frame[1]]
    with open(os.path.join(out, "model-00000-of-00001.safetensors"), "wb") as f:
        write_header(f, [(name, "U8", [len(data)], len(data)) for name, data, _ in frames], {name: sum_ for name, _, sum_ in frames})
        for _, data, _ in frames:
            f.write(data)
    with open(os.path.join(out, "model.safetensors.index.json"), "w") as f:
        json.dump({"metadata": {"version": "000001", "base_version": "000000", "delta_encoding": "xor", "compression_format": "zstd",
                                "checksum_format": "xxh3-128"},
                   "weight_map": {name: "model-00000-of-00001.safetensors" for name, _, _ in frames}}, f)


def peer_apply(updates, model):
    from concurrent.futures import ThreadPoolExecutor

    import numpy as np
    import xxhash
    import zstandard
    folder = os.path.join(updates, "weight_v000001")
    where = spans(model)
    maps = {path: mapped(path, "r+") for path, _, _ in where.values()}

    def change(item):
        name, (begin, end), data, checksum = item
        path, first, last = where[name]
        tensor = maps[path][first:last]
        np.bitwise_xor(tensor, np.frombuffer(zstandard.ZstdDecompressor().decompress(data[begin:end]), np.uint8), out=tensor)
        assert xxhash.xxh3_128(tensor).hexdigest() == checksum, name

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for file in sorted(os.listdir(folder)):
            if file.endswith(".safetensors"):
                checksums, frames = read_header(os.path.join(folder, file))
                data = mapped(os.path.join(folder, file))
                list(pool.map(change, [(name, span, data, checksums[name]) for name, span in frames.items()]))


def compare(a, b):
    """Two models must have the same bytes."""
    left, right = spans(a), spans(b)
    assert left.keys() == right.keys()
    for name, (path, begin, end) in left.items():
        other, first, last = right[name]
        assert (mapped(path)[begin:end] == mapped(other)[first:last]).all(), name


def measure(argv, rss):
    start = time.perf_counter()
    p = subprocess.Popen(argv)
    _, status, usage = os.wait4(p.pid, 0)
    p.returncode = os.waitstatus_to_exitcode(status)
    assert p.returncode == 0, argv
    rss.append(usage.ru_maxrss / 1024)
    return time.perf_counter() - start


def main():
    if sys.argv[1] in ("make", "compare", "peer_delta", "peer_apply"):
        return globals()[sys.argv[1]](*sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("fsdpckpt")
    parser.add_argument("--dir", default=".")
    parser.add_argument("--size", default="2G")
    parser.add_argument("--rounds", type=int, default=5)
    o = parser.parse_args()
    home = os.path.join(o.dir, "deltas")
    shutil.rmtree(home, True)
    old, new, updates, model = (os.path.join(home, name) for name in ("old", "new", "updates", "model"))
    version = os.path.join(updates, "weight_v000001")
    me = [sys.executable, os.path.abspath(__file__)]  # the peak memory of a command starts at that of its parent, which stays small
    subprocess.run([*me, "make", home, str(int(o.size[:-1]) << {"M": 20, "G": 30}[o.size[-1]])], check=True)
    jobs = {"delta, fsdpckpt": [o.fsdpckpt, "delta", old, new, "-o", version, "-q"], "delta, Python": [*me, "peer_delta", old, new, version],
            "apply, fsdpckpt": [o.fsdpckpt, "apply", updates, model, "-q"], "apply, Python": [*me, "peer_apply", updates, model]}
    times, rss = {name: [] for name in jobs}, {name: [] for name in jobs}
    for _ in range(o.rounds):
        for name, argv in jobs.items():
            if name.startswith("delta"):
                shutil.rmtree(updates, True)
                os.mkdir(updates)
            else:
                shutil.rmtree(model, True)
                shutil.copytree(old, model)
            subprocess.run(["sync", "-f", home], check=True)
            times[name].append(measure(argv, rss[name]))
            if name.startswith("apply"):
                subprocess.run([*me, "compare", model, new], check=True)
    print("| command | best | median | memory, MiB |\n|---|---|---|---|")
    for name in jobs:
        print(f"| {name} | {min(times[name]):.2f} s | {statistics.median(times[name]):.2f} s | {max(rss[name]):.0f} |")
    for job in ("delta", "apply"):
        ours, theirs = (statistics.median(times[f"{job}, {who}"]) for who in ("fsdpckpt", "Python"))
        print(f"{job}: {theirs / ours:.2f} × as fast")
    shutil.rmtree(home)
    return 0


if __name__ == "__main__":
    sys.exit(main())
