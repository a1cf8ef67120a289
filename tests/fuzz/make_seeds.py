#!/usr/bin/env python3
"""Makes seeds for the fuzzers from the corpus: pickles, torch.save archives, and whole small checkpoints.

    make_seeds.py CORPUS OUT
"""
import os
import struct
import sys


def write(out, kind, data):
    folder = os.path.join(out, kind)
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, f"{len(os.listdir(folder)):04d}"), "wb") as f:
        f.write(data)


def read(*path):
    with open(os.path.join(*path), "rb") as f:
        return f.read()


def archives(data):
    """The consecutive torch.save archives in a .distcp file."""
    at = 0
    while at < len(data):
        end = data.find(b"PK\5\6", at)
        if end < 0:
            return
        yield data[at:end + 22]
        at = end + 22


def main():
    corpus, out = sys.argv[1:]
    if os.path.isdir(out):
        return
    for kind in ("good", "bad", "unsupported"):
        folder = os.path.join(corpus, kind)
        for case in sorted(os.listdir(folder)) if os.path.isdir(folder) else []:
            path = os.path.join(folder, case)
            if case.startswith("st-"):
                for name in sorted(os.listdir(path)):
                    if name.endswith(".safetensors"):
                        write(out, "safetensors", read(path, name))
            if not case.startswith("dcp-") or not os.path.exists(os.path.join(path, ".metadata")):
                continue
            metadata = read(path, ".metadata")
            data = os.path.join(path, "__0_0.distcp")
            items = read(data) if os.path.isfile(data) and not os.path.islink(data) else b""
            if len(metadata) < 4096:
                write(out, "pickle", metadata)
            if len(metadata) + len(items) < 16384:
                write(out, "dcp", struct.pack("<I", len(metadata)) + metadata + items)
            for archive in list(archives(items))[:4]:
                write(out, "zip", archive)
                start = archive.find(b"\x80\x02")
                write(out, "pickle", archive[start:archive.find(b"PK\1\2", start)])
    torch_files(corpus, out)
    flax_files(corpus, out)
    filters(corpus, out)
    texts(corpus, out)


def torch_files(corpus, out):
    """Whole torch.save files and their pickles, including DTensors and ShardedTensors."""
    for folder, _, names in sorted(os.walk(os.path.join(corpus, "pt"))):
        for name in sorted(names):
            if name.endswith(".pt"):
                data = read(folder, name)
                write(out, "pt", data)
                if data[:2] == b"PK":
                    start = data.find(b"\x80\x02")
                    write(out, "pt", data[start:data.find(b"PK\7\x08", start)])


def flax_files(corpus, out):
    for folder, _, names in sorted(os.walk(os.path.join(corpus, "flax"))):
        for name in sorted(names):
            if name.endswith(".msgpack"):
                write(out, "flax", read(folder, name))


def filters(corpus, out):
    """The stored chunks of datasets with one compression, and what fuzz_filters.c needs to know of them."""
    try:
        import h5py
    except ImportError:
        return
    for name in ("good/h5-filters.h5", "good/h5-blosc2.h5", "unsupported/h5-blosc2.h5"):
        with h5py.File(os.path.join(corpus, name)) as f:
            for d in (d for group in f.values() for d in group.values() if d.chunks):
                plist, size = d.id.get_create_plist(), d.dtype.itemsize
                number, _, values, _ = plist.get_filter(plist.get_nfilters() - 1)
                for n in d.chunks:
                    size *= n
                inner = values[4] if number == 32008 and len(values) > 4 else 0
                if number == 3 or size >= 1 << 18:  # fletcher32 is no compression
                    continue
                head = struct.pack("<HBBI", number, inner, d.dtype.itemsize, size)
                write(out, "filters", head + d.id.read_direct_chunk((0,) * d.ndim)[1])


def texts(corpus, out):
    """Files that people write: plans, policies, classes, rules, schemas and recipes."""
    write(out, "tp_plan", b'{"layers.*.attention.wq": "colwise", "layers.*.mlp.down_proj": "rowwise", "norm": "replicate"}')
    write(out, "tp_plan", b'{"base_model_tp_plan": {"embed_tokens": "colwise_rep", "lm_head": "colwise_gather_output"}}')
    write(out, "policy", b'\0{"layers.*": true, "layers.0": false, "class:Embedding": true, "$root": {"mixed_precision": '
                         b'{"param_dtype": "bfloat16"}}, "lm_head": {"sharding_strategy": "SHARD_GRAD_OP"}, '
                         b'"$fp32_classes": ["LayerNorm"]}')
    write(out, "policy", b'\1{"layers.*": "LlamaDecoderLayer", "norm": ["BatchNorm2d", "_BatchNorm"], "$frozen": ["embed"], '
                         b'"$ignored": ["a"], "$buffers": ["b"], "$shared": [["lm_head.weight", "embed_tokens.weight"]]}')
    for rules in (b"s/^layers/h/\0layers.0.w", b"s/(.*)\\.weight$/\\1.w/gi\0s/a|b/x\\./\0a.b.weight", b"s#[0-9]+#n#g\0h.12"):
        write(out, "rename", rules)
    write(out, "schema", b'{"fsdpckpt": "schema", "schema": 1, "tensors": [{"name": "a.b", "dtype": "float32", "shape": [3, 4]},'
                         b' {"name": "c", "dtype": "bfloat16", "shape": [], "tied_to": "a.b"}], "objects": [{"name": "step"}]}')
    shipped = os.path.join(corpus, "..", "..", "lib", "recipe", "shipped")
    for name in sorted(os.listdir(shipped)):
        write(out, "recipe", read(shipped, name))
    for seed in range(8):
        for kind in ("layout", "view", "tables", "ranks"):
            write(out, kind, bytes([seed]) + bytes((seed * 37 + i * 11) % 251 for i in range(40)))
    journals(out)


def journals(out):
    """Records of a journal: the kind, the length, and the content."""
    def record(kind, content):
        return struct.pack("<BH", kind, len(content)) + content
    identity = record(1, b"v0.1.0\0p/m.pt\0s1 2 3 4\0")
    files = [record(2, struct.pack("<4Q", number, 40 + number, 4096, 7)) for number in range(2)]
    tiles = [record(3, struct.pack("<2Q8Q6Q", 1, 1, number, 0, 100, 50, 200, 1, 2, 3, 0, 1, 200, 4, 5, 1)) for number in range(2)]
    for records in ([identity], [identity, *files], [identity, files[0], tiles[0], files[1], tiles[1], files[0]], [files[0], identity]):
        write(out, "journal", b"\0" + b"".join(records))


if __name__ == "__main__":
    main()
