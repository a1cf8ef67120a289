#!/usr/bin/env python3
"""Sparse tensors of torch become their parts, and torch.load gets the same sparse tensors back after any conversion, bit for bit.

torch 2.15 saves them with torch.save. dcp.save refuses them on a processor; its writer for GPUs saves torch.sparse_coo, so the part of
that writer that differs (_OverlappingCpuLoader does not ask a tensor of another device for its storage) is put in its place here.

usage: sparse_tensors.py FSDPCKPT      exit 77 without torch
"""
import os
import pathlib
import sys
import tempfile
import warnings

try:
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import filesystem
except ImportError as e:
    print("skipped: %s" % e)
    sys.exit(77)

from checks import check, finish, must_run
from torch_values import bits

warnings.simplefilter("ignore")  # torch calls the compressed layouts a beta, and says that it validates


def tensors():
    eye, rows = torch.eye(4), torch.arange(24.).reshape(3, 4, 2)
    coo = torch.sparse_coo_tensor
    return {
        "coo": torch.tensor([[0, 1.5], [-2, 0]]).to_sparse(),
        "uncoalesced": coo([[0, 0, 2], [1, 1, 3]], [1., float("nan"), -0.0], (3, 4)),
        "hybrid": coo([[0, 2]], torch.ones(2, 3, dtype=torch.bfloat16), (4, 3)),
        "empty": coo(size=(3, 4)),
        "empty dense": coo(torch.zeros(1, 0, dtype=torch.int64), torch.zeros(0, 5, dtype=torch.int16), (3, 5)),
        "no rows": coo(torch.zeros(2, 0, dtype=torch.int64), torch.zeros(0), (0, 7)),
        "scalar": torch.tensor(3.0).to_sparse(),
        "bool": torch.tensor([[True, False], [True, True]]).to_sparse(),
        "complex": torch.tensor([[1 + 2j, 0]]).to_sparse(),
        "parameter": torch.nn.Parameter(eye.to_sparse()),
        "csr": torch.tensor([[0, 1.5], [-2, 0]]).to_sparse_csr(),
        "csr int32": torch.sparse_csr_tensor(torch.tensor([0, 1, 1], dtype=torch.int32), torch.tensor([1], dtype=torch.int32), [7], (2, 3)),
        "csr hybrid": rows.to_sparse_csr(dense_dim=1),
        "csr batch": (rows + 1).to_sparse_csr(),
        "csr empty": torch.zeros(3, 4).to_sparse_csr(),
        "csc": eye.to_sparse_csc(),
        "bsr": eye.to_sparse_bsr((2, 2)),
        "bsc": eye.to(torch.float16).to_sparse_bsc((2, 1)),
    }


def parts(t):
    t = t.detach()
    if t.layout == torch.sparse_coo:
        return [t._indices(), t._values()]
    rows = t.layout in (torch.sparse_csr, torch.sparse_bsr)
    return [t.crow_indices() if rows else t.ccol_indices(), t.col_indices() if rows else t.row_indices(), t.values()]


def same(a, b):
    return (a.layout == b.layout and a.size() == b.size() and a.dtype == b.dtype and
            (a.layout != torch.sparse_coo or a.is_coalesced() == b.is_coalesced()) and
            all(x.dtype == y.dtype and x.shape == y.shape and bits(x) == bits(y) for x, y in zip(parts(a), parts(b))))


def compare(what, path, wanted):
    found = torch.load(path, weights_only=True)
    check(found["m"].keys() == wanted.keys() and torch.equal(found["w"], torch.arange(6.)) and found["step"] == 3, "%s: %s" % (what, found))
    for name, tensor in wanted.items():
        check(same(found["m"][name], tensor), "%s: %s: %s, not %s" % (what, name, found["m"][name], tensor))


def through_formats(program, home, wanted):
    source = home / "source.pt"
    torch.save({"m": wanted, "w": torch.arange(6.), "step": 3}, source)
    listed = must_run(program, "inspect", source, "--all").stdout
    check("m.coo.indices" in listed and '"torch.sparse_bsc", "size": [4, 4]' in listed, listed)
    must_run(program, "verify", source)
    for form, extension in {"dcp": "", "h5": ".h5", "pt": ".pt", "safetensors": ".safetensors"}.items():
        for command, options, suffix in (("convert", [], extension), ("reshard", ["--dp", "2"], "")):
            path, back = home / (command + "-" + form + suffix), home / ("%s-%s-back.pt" % (command, form))
            must_run(program, command, source, "-o", path, "--to", form, "-q", *options)
            must_run(program, "verify", path)
            must_run(program, "consolidate", path, "-o", back, "-q")
            compare("%s --to %s" % (command, form), back, wanted)
        must_run(program, "diff", source, home / ("convert-" + form + extension), "--data")
    legacy = home / "legacy.pt"
    torch.save({"m": wanted, "w": torch.arange(6.), "step": 3}, legacy, _use_new_zipfile_serialization=False)
    must_run(program, "convert", legacy, "-o", home / "new.pt", "-q")
    compare("legacy", home / "new.pt", wanted)


def gpu_writer(self):
    for _, item in self.items:
        yield self.resolve_fun(item).detach(), item


def from_dcp(program, home, wanted):
    """The layout that a writer of torch saves with DCP."""
    coo = {name: t for name, t in wanted.items() if t.layout == torch.sparse_coo and name != "parameter"}
    original, filesystem._SerialCpuLoader.values = filesystem._SerialCpuLoader.values, gpu_writer
    try:
        dcp.save({"m": dict(coo), "w": torch.arange(6.), "step": 3}, checkpoint_id=home / "gpu", no_dist=True)
    finally:
        filesystem._SerialCpuLoader.values = original
    must_run(program, "verify", home / "gpu")
    for path in (home / "gpu.h5", home / "gpu-again", home / "gpu.pt"):
        must_run(program, "convert", home / "gpu", "-o", path, "--to", {".h5": "h5", ".pt": "pt", "": "dcp"}[path.suffix], "-q")
        must_run(program, "convert", path, "-o", home / "gpu-back.pt", "-q", "--force")
        compare("DCP -> %s" % path.name, home / "gpu-back.pt", coo)
    for file in (home / "gpu").glob("*.distcp"):  # an item that cannot be read is listed with the reason
        os.truncate(file, 0)
    listed = must_run(program, "inspect", home / "gpu", "--headers-only").stdout
    check("m.coo " in listed and "m.coo.values" not in listed, listed)


def odd_files(program, home):
    eye = torch.eye(3).to_sparse()
    torch.save(eye, home / "alone.pt")
    must_run(program, "convert", home / "alone.pt", "-o", home / "alone-back.pt", "-q")
    check(same(torch.load(home / "alone-back.pt", weights_only=True), eye), "a file that is one sparse tensor")
    torch.save({"a": eye}, home / "one.pt")
    must_run(program, "convert", home / "one.pt", "-o", home / "part.pt", "-q", "--exclude", "a.values")
    left = torch.load(home / "part.pt", weights_only=True)["a"]
    check(set(left) == {"indices", "layout"} and torch.equal(left["indices"], eye.indices()), "without values: %s" % left)
    must_run(program, "convert", home / "one.pt", "-o", home / "renamed.pt", "-q", "--rename", "s/^a\\./b.c./")
    check(same(torch.load(home / "renamed.pt", weights_only=True)["b.c"], eye), "renamed")
    must_run(program, "convert", home / "one.pt", "-o", home / "cast.pt", "-q", "--dtype", "bfloat16")
    check(same(torch.load(home / "cast.pt", weights_only=True)["a"], eye.to(torch.bfloat16).coalesce()), "cast")
    # Parts that do not fit together are not taken for a sparse tensor.
    class Bent:
        def __reduce__(self):
            return torch._utils._rebuild_sparse_tensor, (torch.sparse_coo, (eye.indices(), torch.ones(2), eye.size(), True))
    torch.save({"a": Bent(), "w": torch.ones(1)}, home / "bent.pt")
    said = must_run(program, "convert", home / "bent.pt", "-o", home / "never.pt", ok=(3, 5)).stderr
    check("a: " in said and "sparse tensor" in said and said.count("\n") == 1 and not (home / "never.pt").exists(), said)


def main():
    program = os.path.abspath(sys.argv[1])
    wanted = tensors()
    check(not same(wanted["coo"], wanted["csr"]) and not same(wanted["coo"], -wanted["coo"]), "the comparison cannot fail")
    with tempfile.TemporaryDirectory() as folder:
        home = pathlib.Path(folder)
        through_formats(program, home, wanted)
        from_dcp(program, home, wanted)
        odd_files(program, home)
    return finish("sparse_tensors")


if __name__ == "__main__":
    sys.exit(main())
