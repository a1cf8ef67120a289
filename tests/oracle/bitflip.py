#!/usr/bin/env python3
"""verify notices every flipped bit of our checkpoints, or the flip changes nothing that is read: bitflip.py FSDPCKPT FLIP_TOOL

Small checkpoints: full, 2D, compressed, and safetensors. An unnoticed bit must be harmless: h5py still reads the same data. By
default this tries a sample of bits, at varying places in the byte; FSDPCKPT_ALL_BITS=1 tries all.
"""
import json
import os
import subprocess
import sys
import tempfile

try:
    import h5py
    import numpy as np
    import torch
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import save_file
except ImportError:
    sys.exit(77)

fsdpckpt, flip_tool = sys.argv[1:3]
ALL = os.environ.get("FSDPCKPT_ALL_BITS") == "1"
SAMPLE = 80  # bits per file


def run(*args):
    return subprocess.run(args, check=True, capture_output=True, text=True).stdout


def contents(path):
    """Everything that h5py reads: names, attributes, types, raw bytes."""
    seen = []

    def visit(name, o):
        attributes = sorted((k, str(v)) for k, v in o.attrs.items())
        if isinstance(o, h5py.Dataset):
            raw = np.empty(o.shape, np.dtype(f"V{o.id.get_type().get_size()}"))
            if o.size:
                o.id.read(h5py.h5s.ALL, h5py.h5s.ALL, raw, o.id.get_type())
            seen.append((name, o.shape, o.id.get_type().encode(), raw.tobytes(), attributes))
        else:
            seen.append((name, attributes))
    with h5py.File(path, "r") as f:
        seen.append(sorted((k, str(v)) for k, v in f.attrs.items()))
        f.visititems(visit)
    return seen


def flipped(path, bit):
    data = bytearray(open(path, "rb").read())
    data[bit // 8] ^= 1 << bit % 8
    return data


def is_harmless(path, bit, before):
    good = open(path, "rb").read()
    open(path, "r+b").write(flipped(path, bit))
    try:
        return contents(path) == before
    except Exception:
        return False
    finally:
        open(path, "r+b").write(good)


def try_file(checkpoint, path):
    bits = 8 * os.path.getsize(path)
    step = 1 if ALL else max(1, bits // SAMPLE) | 1  # odd, so that it tries every bit of the byte in turn
    out = run(flip_tool, checkpoint, path, "0", str(step)).split("\n")
    missed = [int(x) for x in out if x.isdigit()]
    before = contents(path)
    bad = [b for b in missed if not is_harmless(path, b, before)]
    name = os.path.basename(path)
    print(f"{os.path.basename(checkpoint)}/{name}: {out[-2]} bits of {bits}, {len(missed)} unnoticed and harmless"
          if not bad else f"{name}: UNNOTICED: bits {bad[:20]} of {len(bad)}, bytes {[b // 8 for b in bad[:20]]}")
    if missed:
        print("  harmless, in bytes", sorted({b // 8 for b in missed})[:40])
    return not bad


def try_safetensors(checkpoint, path):
    """Every flipped bit must be noticed."""
    out = run(flip_tool, checkpoint, path, "0", "1" if ALL else "29").split()
    print(f"{os.path.basename(path)}: {out[-1]} bits, {len(out) - 2} UNNOTICED")
    return len(out) == 2 and int(out[-1]) > 300


def try_index(checkpoint):
    """Hugging Face's index has no digest, but verify compares it with the headers. This tries every bit. An unnoticed flip must
        leave the same JSON, such as a hexadecimal digit of an escape in upper case."""
    path = f"{checkpoint}/model.safetensors.index.json"
    before = json.load(open(path))
    out = run(flip_tool, checkpoint, path, "0", "1").split("\n")
    missed = [int(x) for x in out if x.isdigit()]
    bad = []
    for bit in missed:
        try:
            same = json.loads(flipped(path, bit).decode()) == before
        except ValueError:
            same = False
        bad += [] if same else [bit]
    print(f"{os.path.basename(checkpoint)}: {out[-2]} bits of the index, {len(missed)} unnoticed, {len(bad)} of them NOT THE SAME JSON")
    return not bad and out[-2] == f"tried {8 * os.path.getsize(path)}" and len(missed) < 10


def try_indexes(d):
    """An index with only sizes, and one with further members that another program wrote."""
    source = f"{d}/foreign"
    os.mkdir(source)
    state = {"layers.0.weight": torch.randn(3, 4), "layers.1\x1f.weight": torch.randn(3, 4), "bias": torch.ones(3).bool()}
    names = {name: f"model-{i + 1:05}-of-00003.safetensors" for i, name in enumerate(state)}
    for name, file in names.items():
        save_file({name: state[name]}, f"{source}/{file}", {"format": "pt"})
    ok = True
    for kept in ({}, {"made_by": "a program", "steps": [1, 2.5, None], "deep": {"x": True}}):
        with open(f"{source}/model.safetensors.index.json", "w") as f:
            json.dump({"metadata": {"total_size": 123456, **kept}, "weight_map": names}, f)
        out = f"{d}/index-{len(kept)}"
        run(fsdpckpt, "consolidate", source, "-o", out, "--to", "safetensors", "--max-shard-size", "60B", "-q")
        with open(f"{out}/model.safetensors.index.json") as f:
            assert json.load(f)["metadata"] == {"total_size": 99, **kept}
        ok &= try_index(out)
    run(fsdpckpt, "consolidate", out, "-o", f"{d}/again", "--to", "safetensors", "--max-shard-size", "60B", "-q")
    for name in os.listdir(out):
        assert open(f"{out}/{name}", "rb").read() == open(f"{d}/again/{name}", "rb").read(), name
    return ok


def main():
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as d:
        state = {"model": {"layers.0.attention.wq.weight": torch.randn(6, 4).bfloat16(), "bias": torch.randn(5),
                           "big": torch.randint(0, 20, (100, 90)).to(torch.int16), "empty": torch.empty(0, 3)},
                 "step": 7, "name": "run"}
        dcp.save(state, checkpoint_id=f"{d}/src")
        plan = f"{d}/plan.json"
        open(plan, "w").write('{"*wq*": "colwise"}')
        run(fsdpckpt, "consolidate", f"{d}/src", "-o", f"{d}/full.h5", "--exclude", "model.big", "-q")
        run(fsdpckpt, "reshard", f"{d}/src", "-o", f"{d}/2d", "--dp", "2", "--tp", "2", "--tp-plan", plan, "--exclude",
            "model.big", "-q")
        run(fsdpckpt, "consolidate", f"{d}/src", "-o", f"{d}/compressed.h5", "--compress", "1", "-q")
        ok = try_indexes(d)
        ok &= try_file(f"{d}/full.h5", f"{d}/full.h5")
        ok &= try_file(f"{d}/compressed.h5", f"{d}/compressed.h5")
        run(fsdpckpt, "consolidate", f"{d}/src", "-o", f"{d}/full.safetensors", "--exclude", "model.big", "-q")
        ok &= try_safetensors(f"{d}/full.safetensors", f"{d}/full.safetensors")
        run(fsdpckpt, "reshard", f"{d}/src", "-o", f"{d}/st", "--to", "safetensors", "--dp", "2", "--tp", "2",
            "--tp-plan", plan, "--exclude", "model.big", "-q")
        ok &= try_safetensors(f"{d}/st", f"{d}/st/shard-00003-model-00001-of-00001.safetensors")
        for name in sorted(os.listdir(f"{d}/2d")):
            if name != "shard-00002-of-00004.h5" or ALL:
                ok &= try_file(f"{d}/2d", f"{d}/2d/{name}")
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
