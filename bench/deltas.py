#!/usr/bin/env python3
"""Measures `delta`, `apply` and `fold` next to the Python that training frameworks use for the same files: numpy, zstandard and xxhash, with
as many threads as processors. deltas.py FSDPCKPT [--dir DIR] [--size 2G] [--rounds 5] [--deltas 10]

A model of bf16 tensors, in files of 1 GiB, and a version of it in which 2 % of the elements differ. `fold` makes one delta of ten; in each
of them 2 % differ, too. Every round runs every command once, on files in the page cache, and prints nothing; the table has the medians.
Our times include the journal and all fsyncs. Python changes a memory map and syncs nothing, except in a row of its own. Each result is
compared with the new version, or with the other one's.

The last lines have what no program for these files can avoid: to read and to write the model through the page cache, to sync it, its
checksum, and to decode the frames of the deltas with libzstd, each alone.
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
                step(rng, values)
                values.tofile(new)


def step(rng, values):
    """A training step, which changes the last bits."""
    import numpy as np
    at = rng.integers(0, len(values), int(len(values) * SHARE))
    values[at] += rng.choice(np.array([1, 2, 0xffff], "<u2"), len(at))


def change(model, seed):
    """Makes the next version of a model, in place."""
    import numpy as np
    rng = np.random.default_rng(int(seed))
    for path, begin, end in spans(model).values():
        step(rng, mapped(path, "r+")[begin:end].view("<u2"))


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


def write_version(out, frames, number, base):
    """@param frames (name, frame, checksum) of each tensor that changed."""
    os.makedirs(out)
    with open(os.path.join(out, "model-00000-of-00001.safetensors"), "wb") as f:
        write_header(f, [(name, "U8", [len(data)], len(data)) for name, data, _ in frames], {name: sum_ for name, _, sum_ in frames})
        for _, data, _ in frames:
            f.write(data)
    with open(os.path.join(out, "model.safetensors.index.json"), "w") as f:
        json.dump({"metadata": {"version": f"{number:06d}", "base_version": f"{base:06d}", "delta_encoding": "xor",
                                "compression_format": "zstd", "checksum_format": "xxh3-128"},
                   "weight_map": {name: "model-00000-of-00001.safetensors" for name, _, _ in frames}}, f)


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
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        frames = [frame for frame in pool.map(encode, spans(new).items()) if frame[1]]
    write_version(out, frames, 1, 0)


def peer_fold(out, *folders):
    """Decodes all frames of a tensor, as the model is patched, and compresses what they make together. All versions change all tensors."""
    from concurrent.futures import ThreadPoolExecutor

    import numpy as np
    import zstandard
    files = [os.path.join(folder, file) for folder in folders for file in os.listdir(folder) if file.endswith(".safetensors")]
    headers = [(*read_header(file), mapped(file)) for file in files]

    def fold(name):
        total = None
        for _, frames, data in headers:
            begin, end = frames[name]
            difference = np.frombuffer(zstandard.ZstdDecompressor().decompress(data[begin:end]), np.uint8)
            total = difference.copy() if total is None else np.bitwise_xor(total, difference, out=total)
        return name, zstandard.ZstdCompressor(level=1).compress(total), headers[-1][0][name]

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        write_version(out, list(pool.map(fold, headers[0][1])), len(folders), 0)


def peer_apply(updates, model, sync=""):
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
    for path in maps if sync else ():
        with open(path, "rb") as f:
            os.fsync(f.fileno())


def compare(a, b):
    """Two models must have the same bytes."""
    left, right = spans(a), spans(b)
    assert left.keys() == right.keys()
    for name, (path, begin, end) in left.items():
        other, first, last = right[name]
        assert (mapped(path)[begin:end] == mapped(other)[first:last]).all(), name


def compare_deltas(a, b):
    """Two deltas must have frames of the same bytes, and the same checksums."""
    import numpy as np
    import zstandard
    sides = []
    for folder in (a, b):
        path = next(os.path.join(folder, file) for file in os.listdir(folder) if file.endswith(".safetensors"))
        sides.append((*read_header(path), mapped(path)))
    (sums, left, data), (other_sums, right, other) = sides
    assert sums == other_sums and left.keys() == right.keys()
    for name, (begin, end) in left.items():
        first, last = right[name]
        whole = zstandard.ZstdDecompressor().decompressobj().decompress
        assert np.array_equal(np.frombuffer(whole(bytes(data[begin:end])), np.uint8),
                              np.frombuffer(zstandard.ZstdDecompressor().decompress(other[first:last]), np.uint8)), name


def floors(model, folder):
    """Prints what the parts of the work cost alone, in one thread: seconds of the processor and of the clock."""
    import xxhash
    import zstandard
    paths = sorted({path for path, _, _ in spans(model).values()})
    buffer = memoryview(bytearray(1 << 20))

    def blocks(f):
        while got := f.readinto(buffer):
            yield buffer[:got]

    def read():
        for path in paths:
            with open(path, "rb", buffering=0) as f:
                for _ in blocks(f):
                    pass

    def write():
        for path in paths:
            with open(path, "r+b", buffering=0) as f:
                for _ in range(os.path.getsize(path) // len(buffer)):
                    f.write(buffer)

    def sync():
        for path in paths:
            with open(path, "rb") as f:
                os.fsync(f.fileno())

    def sum_():
        one = xxhash.xxh3_128()
        for _ in range(sum(map(os.path.getsize, paths)) // len(buffer)):
            one.update(buffer)

    def decode():
        for file in os.listdir(folder):
            if file.endswith(".safetensors"):
                data = mapped(os.path.join(folder, file))
                for begin, end in read_header(os.path.join(folder, file))[1].values():
                    with zstandard.ZstdDecompressor().stream_reader(data[begin:end]) as frame:
                        while frame.readinto(buffer):  # into memory that is there already
                            pass

    print("\n| alone, in one thread | processor | clock |\n|---|---|---|")
    for what, part in (("read the model from the page cache", read), ("write it to the page cache", write), ("sync it", sync),
                       ("XXH3 of as many bytes", sum_), ("decode one delta with libzstd", decode)):
        clock, processor = time.perf_counter(), time.process_time()
        part()
        print(f"| {what} | {time.process_time() - processor:.2f} s | {time.perf_counter() - clock:.2f} s |")


def measure(argv, rss):
    start = time.perf_counter()
    p = subprocess.Popen(argv)
    _, status, usage = os.wait4(p.pid, 0)
    p.returncode = os.waitstatus_to_exitcode(status)
    assert p.returncode == 0, argv
    rss.append(usage.ru_maxrss / 1024)
    return time.perf_counter() - start


def make_chain(o, me, home, chain):
    """Versions 1 to --deltas, made by `delta`. @return their folders."""
    sides = [os.path.join(home, side) for side in ("before", "after")]
    folders = [os.path.join(chain, f"weight_v{number:06d}") for number in range(1, o.deltas + 1)]
    os.mkdir(chain)
    shutil.copytree(os.path.join(home, "old"), sides[0])
    for number, folder in enumerate(folders, 1):
        shutil.copytree(sides[0], sides[1])
        subprocess.run([*me, "change", sides[1], str(number)], check=True)
        subprocess.run([o.fsdpckpt, "delta", *sides, "-o", folder, "-q"], check=True)
        shutil.rmtree(sides[0])
        os.rename(sides[1], sides[0])
    shutil.rmtree(sides[0])
    return folders


def main():
    if sys.argv[1] in ("make", "change", "compare", "compare_deltas", "floors", "peer_delta", "peer_apply", "peer_fold"):
        return globals()[sys.argv[1]](*sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("fsdpckpt")
    parser.add_argument("--dir", default=".")
    parser.add_argument("--size", default="2G")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--deltas", type=int, default=10)
    o = parser.parse_args()
    home = os.path.join(o.dir, "deltas")
    shutil.rmtree(home, True)
    old, new, updates, model, chain, folded = (os.path.join(home, name) for name in ("old", "new", "updates", "model", "chain", "folded"))
    version = os.path.join(updates, "weight_v000001")
    ours, theirs = (os.path.join(folded, who, f"weight_v{o.deltas:06d}") for who in ("ours", "theirs"))
    me = [sys.executable, os.path.abspath(__file__)]  # the peak memory of a command starts at that of its parent, which stays small
    subprocess.run([*me, "make", home, str(int(o.size[:-1]) << {"M": 20, "G": 30}[o.size[-1]])], check=True)
    folders = make_chain(o, me, home, chain)
    jobs = {"delta, fsdpckpt": [o.fsdpckpt, "delta", old, new, "-o", version, "-q"], "delta, Python": [*me, "peer_delta", old, new, version],
            "apply, fsdpckpt": [o.fsdpckpt, "apply", updates, model, "-q"], "apply, Python": [*me, "peer_apply", updates, model],
            "apply, Python, with fsync": [*me, "peer_apply", updates, model, "sync"],
            "fold, fsdpckpt": [o.fsdpckpt, "fold", *folders, "-o", ours, "-q"], "fold, Python": [*me, "peer_fold", theirs, *folders]}
    times, rss = {name: [] for name in jobs}, {name: [] for name in jobs}
    for _ in range(o.rounds):
        shutil.rmtree(folded, True)
        for path in (ours, theirs):
            os.makedirs(os.path.dirname(path))
        for name, argv in jobs.items():
            if name.startswith("delta"):
                shutil.rmtree(updates, True)
                os.mkdir(updates)
            elif name.startswith("apply"):
                shutil.rmtree(model, True)
                shutil.copytree(old, model)
            subprocess.run(["sync", "-f", home], check=True)
            times[name].append(measure(argv, rss[name]))
            if name.startswith("apply"):
                subprocess.run([*me, "compare", model, new], check=True)
        subprocess.run([*me, "compare_deltas", ours, theirs], check=True)
    print("| command | best | median | memory, MiB |\n|---|---|---|---|")
    for name in jobs:
        print(f"| {name} | {min(times[name]):.2f} s | {statistics.median(times[name]):.2f} s | {max(rss[name]):.0f} |")
    median = {name: statistics.median(times[name]) for name in jobs}
    for name in jobs:
        job = name.split(",")[0]
        if "Python" in name:
            print(f"{name}: {median[name] / median[f'{job}, fsdpckpt']:.2f} × the time of fsdpckpt")
    print(f"fold of {o.deltas}, fsdpckpt: {median['fold, fsdpckpt'] / median['apply, fsdpckpt']:.2f} × the time of one apply")
    subprocess.run([*me, "floors", model, version], check=True)
    shutil.rmtree(home)
    return 0


if __name__ == "__main__":
    sys.exit(main())
