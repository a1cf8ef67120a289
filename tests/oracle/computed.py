#!/usr/bin/env python3
"""Values that are computed or made while they are read: every pair and triple of the options that compute (--dequantize,
--adapter, --recipe, --quantize, --dtype, `average`) x every format of the source x every format of the target, against the same
steps in PyTorch. All weights have one size and one type, and their data begins at 4096 in the files of ours, so that any two of
them that were taken for the same bytes would be exchanged. Every number is exact in bfloat16.

Also HDF5 datasets that have no bytes of their own: compact ones, fill values, and those that only libhdf5 decodes.

usage: computed.py FSDPCKPT        exit 77 without torch
"""
import itertools
import json
import os
import shutil
import sys
import tempfile
import warnings

warnings.filterwarnings("ignore")
try:
    import h5py
    import numpy
    import torch
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file, save_file
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
except ImportError as e:
    print("skipped: %s" % e)
    sys.exit(77)

from adapters import write_adapter
from checks import must, must_run, run_main
from dequantize import quantized
from torch_values import must_equal

N, SIDE = 8, 128
FORMATS = {"safetensors": ".safetensors", "pt": ".pt", "h5": ".h5", "dcp": "-dcp"}
OPTIONS = ("dequantize", "adapter", "recipe", "quantize", "dtype", "average")
RECIPE = {"fsdpckpt": "recipe", "schema": 1, "description": "test", "others": "keep",
          "rules": [{"from": "w.{n}.weight", "to": "t.{n}.weight", "operations": {"transpose": [0, 1]}},
                    {"from": "e.{n}.weight", "to": "experts", "operations": {"stack": 0}},
                    {"from": "fused.weight", "to": ["q.weight", "k.weight"], "operations": {"chunk": 0}},
                    {"add": "again.weight", "same_as": "q.weight"}]}


def numbers(seed, *shape):
    """Small even integers: sums, halves and products with scales are exact in bfloat16."""
    return torch.randint(0, 16, shape, generator=torch.Generator().manual_seed(seed)) * 2.0


def model(seed):
    """(tensors as they are stored with codes, without codes)"""
    plain = {"%s.%d.weight" % (kind, i): numbers(seed + 10 * i + len(kind), SIDE, SIDE) for kind in ("w", "e")
             for i in range(N)}
    plain.update({"u.%d.weight" % i: numbers(seed + 100 + i, SIDE, SIDE) for i in range(N)})
    plain["fused.weight"] = numbers(seed + 200, 2 * SIDE, SIDE)
    codes = {}
    for name, t in plain.items():
        if name.startswith("w."):
            codes[name], codes[name + "_scale_inv"] = (t / 2).to(torch.float8_e4m3fn), torch.full((1, 1), 2.0)
        else:
            codes[name] = t.bfloat16()
    return codes, {name: t.bfloat16() for name, t in plain.items()}


def adapter(folder):
    """An adapter of rank 1 of two kinds of weights, and the product that it adds to each."""
    factors, products = {}, {}
    for i in range(N):
        for kind in ("w", "u"):
            name = "%s.%d" % (kind, i)
            a, b = numbers(i, 1, SIDE) / 2 % 3, numbers(i + len(kind), SIDE, 1) / 2 % 4
            factors[name + ".lora_A.weight"], factors[name + ".lora_B.weight"] = a, b
            products[name + ".weight"] = 2 * b @ a
    write_adapter(folder, factors, r=1, lora_alpha=2)
    return products


def steps(models, used, products):
    """What PyTorch makes of the models, in the order of docs/WEIGHTS.md."""
    values = [dict(m) for m in models]
    if "adapter" in used:
        values = [{n: (t.float() + products[n]).bfloat16() if n in products else t for n, t in v.items()} for v in values]
    value = values[0]
    if "average" in used:
        value = {n: ((t.float() + values[1][n].float()) / 2).bfloat16() for n, t in value.items()}
    if "recipe" in used:
        made = {n.replace("w.", "t."): t.T.contiguous() for n, t in value.items() if n.startswith("w.")}
        made["experts"] = torch.stack([value["e.%d.weight" % i] for i in range(N)])
        made["q.weight"], made["k.weight"] = (t.clone() for t in value["fused.weight"].chunk(2))
        made["again.weight"] = made["q.weight"].clone()
        made.update({n: t for n, t in value.items() if n.startswith("u.")})
        value = made
    codes = {}
    if "quantize" in used:
        for name in [n for n in value if n.startswith("u.")]:
            codes[name], codes[name + "_scale_inv"] = quantized(value.pop(name))
    if "dtype" in used:
        value = {n: t.float() for n, t in value.items()}
    return {**value, **codes}


def arguments(used, path):
    return [word for option, words in (("dequantize", ("--dequantize", "bf16")), ("adapter", ("--adapter", path("lora"))),
                                       ("recipe", ("--recipe", path("recipe.json"))), ("quantize", ("--quantize", "u.*")),
                                       ("dtype", ("--dtype", "f32"))) if option in used for word in words]


def load(path, form):
    """Reads a target with the package of its format."""
    if form == "safetensors":
        return load_file(path)
    if form == "dcp":
        dcp_to_torch_save(path, path + ".loaded.pt")
        return torch.load(path + ".loaded.pt", weights_only=True)
    if form == "pt":
        return torch.load(path, weights_only=True)
    return load_h5(path)


def load_h5(path):
    """The bits of each dataset, viewed as the torch type that its attribute names."""
    out = {}

    def visit(name, dataset):
        if isinstance(dataset, h5py.Dataset):
            raw = numpy.empty(dataset.shape + (dataset.id.get_type().get_size(),), "u1")
            dataset.id.read(h5py.h5s.ALL, h5py.h5s.ALL, raw, dataset.id.get_type())
            dtype = dataset.attrs.get("dtype", str(dataset.dtype))
            out[name] = torch.from_numpy(raw).view(getattr(torch, dtype)).reshape(dataset.shape)

    with h5py.File(path) as f:
        f.visititems(visit)
    return out


def write_sources(tool, path, name, stored):
    """The same values in every format, by its own package; in HDF5, and aligned in safetensors, by us."""
    save_file(stored, path(name + ".safetensors"))
    torch.save(stored, path(name + ".pt"))
    dcp.save(stored, checkpoint_id=path(name + "-dcp"), no_dist=True)
    must_run(tool, "consolidate", path(name + ".pt"), "-o", path(name + ".h5"), "-q")
    must_run(tool, "consolidate", path(name + ".pt"), "-o", path(name + "-aligned.safetensors"), "-q")
    return [path(name + end) for end in (*FORMATS.values(), "-aligned.safetensors")]


def check_pairs(tool, path):
    products = adapter(path("lora"))
    with open(path("recipe.json"), "w") as f:
        json.dump(RECIPE, f)
    (codes, plain), (codes2, plain2) = model(1), model(5000)
    files = {"codes": write_sources(tool, path, "codes", codes), "plain": write_sources(tool, path, "plain", plain),
             "codes2": write_sources(tool, path, "codes2", codes2), "plain2": write_sources(tool, path, "plain2", plain2)}
    combinations = [c for n in (1, 2, 3) for c in itertools.combinations(OPTIONS, n)]
    targets = list(FORMATS.items())
    for number, used in enumerate(combinations):
        want = steps((plain, plain2), used, products)
        kind = "codes" if "dequantize" in used else "plain"
        for place, source in enumerate(files[kind]):
            # Every combination meets every source, and every target one more time than there are sources.
            for form, end in (targets if place == number % 5 else [("pt", ".pt")]):
                out = path("out" + end)
                shutil.rmtree(out, ignore_errors=True)
                command = ["average", source, files[kind + "2"][place]] if "average" in used else ["consolidate", source]
                must_run(tool, *command, "-o", out, "--to", form, "-q", "-f", *arguments(used, path))
                got = load(out, form)
                if form == "h5":
                    got = {n.replace("/", "."): t for n, t in got.items()}
                must(sorted(got) == sorted(want), used, source, form, sorted(set(got) ^ set(want)))
                must_equal(want, {n: got[n].contiguous() for n in want}, "%s of %s to %s" % (used, source, form))
    return len(combinations)


def check_no_bytes(tool, path):
    """Datasets whose elements are in the header, were never written, or are decoded by libhdf5."""
    want = {}
    with h5py.File(path("foreign.h5"), "w") as f:
        for i in range(3):
            compact = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            compact.set_layout(h5py.h5d.COMPACT)
            values = numpy.full(64, i + 1, "f4")
            dataset = h5py.h5d.create(f.id, b"compact%d" % i, h5py.h5t.IEEE_F32LE, h5py.h5s.create_simple((64,)), compact)
            dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, values)
            f.create_dataset("fill%d" % i, (64,), "f4", fillvalue=i + 10)
            f.create_dataset("chunks%d" % i, (64,), "f4", fillvalue=i + 20, chunks=(16,))[:16] = 7
            f.create_dataset("scaled%d" % i, data=numpy.arange(64, dtype="i4") * (i + 1), chunks=(64,), scaleoffset=0)
        for name in f:
            want[name] = torch.from_numpy(f[name][()])
    for name in want:
        told = must_run(tool, "inspect", path("foreign.h5"), "--tensor", name, "--headers-only").stdout
        must("foreign.h5" in told and " 0 bytes stored" not in told, "a made-up place: " + told)
    for form, end in FORMATS.items():
        must_run(tool, "consolidate", path("foreign.h5"), "-o", path("from_foreign" + end), "--to", form, "-q", "-f")
        must_equal(want, {n: load(path("from_foreign" + end), form)[n] for n in want}, "HDF5 without bytes to " + form)


def main():
    with tempfile.TemporaryDirectory(prefix="fsdpckpt-computed-") as home:
        def path(name):
            return os.path.join(home, name)

        count = check_pairs(sys.argv[1], path)
        check_no_bytes(sys.argv[1], path)
    print("%d combinations of options give the values of PyTorch" % count)
    return 0


if __name__ == "__main__":
    run_main(main)
