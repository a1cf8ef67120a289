#!/usr/bin/env python3
"""Unusual values that training programs save, written here by torch. A module that is pickled whole is read as its state_dict().
Tensors that are not supported (quantized, nested, subclasses, custom types) are listed with the reason, and the other
values can still be converted.

usage: odd_values.py FSDPCKPT       exit 77 without torch
"""
import logging
import json
import pathlib
import pickle
import sys
import tempfile
import warnings

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
try:
    import torch
    import torch.distributed.checkpoint as dcp
    import torch.distributed.checkpoint.format_utils
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.two_tensor import TwoTensor
except ImportError as e:
    print("skipped: %s" % e)
    sys.exit(77)

import gloo
from checks import must_run as run
from checks import record_damage_is_found
from torch_values import must_equal

nn = torch.nn
GOOD = {"w": torch.arange(6.0).reshape(2, 3), "step": 7}


class Net(nn.Module):
    """Tied, frozen and absent parameters, both kinds of buffers, modules in lists and dicts, modules with hooks."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.BatchNorm1d(4)) for _ in range(2)])
        self.heads = nn.ModuleDict({"a": nn.Linear(4, 5, bias=False), "b": nn.utils.weight_norm(nn.Linear(4, 2))})
        self.heads["a"].weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(2.0), requires_grad=False)
        self.extra = nn.ParameterList([nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(0, 3))])
        self.register_parameter("nothing", None)
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("cache", torch.ones(3), persistent=False)
        self.plain = torch.ones(9)
        self.dropout = None


def modules(program, home):
    torch.manual_seed(1)
    net = Net()
    want = dict(net.state_dict())
    for number, options in enumerate(({}, {"_use_new_zipfile_serialization": False}, {"pickle_protocol": 4})):
        source, target = home / ("net%d.pt" % number), home / ("state%d.pt" % number)
        torch.save(net, source, **options)
        told = run(program, "consolidate", source, "-o", target).stderr
        assert "pickled as a whole" in told and told.count("\n") == 1, told
        got = torch.load(target, weights_only=True)
        must_equal(want, got)
        assert got["embed.weight"].data_ptr() == got["heads.a.weight"].data_ptr()
    # A module as one of several values in a checkpoint.
    torch.save({"model": net, "ema": nn.DataParallel(net), "loss": nn.ReLU(), "epoch": 3}, home / "run.pt")
    told = run(program, "reshard", home / "run.pt", "-o", home / "shards", "--dp", "2", "--to", "dcp").stderr
    assert "2 modules were pickled as a whole" in told, told
    run(program, "consolidate", home / "shards", "-o", home / "back.pt", "-q")
    got = torch.load(home / "back.pt", weights_only=False)
    must_equal(want, got["model"])
    must_equal({"module." + k: v for k, v in want.items()}, got["ema"])
    assert got["epoch"] == 3 and isinstance(got["loss"], nn.ReLU)


def odd_tensors():
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    return {
        "quantized": (torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "a quantized tensor"),
        "nested": (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "a nested tensor"),
        "jagged": (jagged, "a nested tensor, which torch.load(weights_only=True) refuses"),
        "meta": (torch.empty(3, device="meta"), "no data"),
        "bits": (torch.zeros(4, dtype=torch.uint8).view(torch.bits8), "torch.bits8"),
        "two": (TwoTensor(torch.ones(3), torch.zeros(3)), "TwoTensor"),
        "deep": ({"inner": [TwoTensor(torch.ones(3), torch.zeros(3))]}, "TwoTensor"),
    }


def refused(program, source, name, reason, home):
    """Expects one line with the name, the reason and what to do, and no target."""
    for command in ("consolidate", "convert"):
        r = run(program, command, source, "-o", home / "never.h5", ok=(5,))
        assert name in r.stderr and reason in r.stderr and "--exclude '%s'" % name in r.stderr, r.stderr
        assert r.stderr.count("\n") == 1 and not (home / "never.h5").exists(), r.stderr
    assert reason in run(program, "extract", source, name, "-o", home / "never.bin", ok=(5,)).stderr
    assert reason in run(program, "diff", source, source, "--data", ok=(5,)).stderr


def the_rest_comes_through(program, source, name, home):
    full = home / "full.pt"
    run(program, "consolidate", source, "-o", full, "--exclude", name, "-q", "--force")
    got = torch.load(full, weights_only=True)
    must_equal(GOOD, got)
    run(program, "extract", source, "w", "-o", home / "w.bin", "--force")
    assert (home / "w.bin").read_bytes() == GOOD["w"].numpy().tobytes()
    run(program, "reshard", source, "-o", home / "h5", "--dp", "2", "--exclude", name, "-q", "--force")
    run(program, "check", source)
    run(program, "schema", source)
    if (home / source).is_file() or name == "quantized":  # for others in DCP, only the data shows what they are
        told = run(program, "verify", source).stdout
        assert "of 3 of 3" in told or name.startswith("deep"), told
    assert name in run(program, "inspect", source).stdout
    run(program, "inspect", source, "--json")


def odd_tensors_of_torch_save(program, home):
    for name, (value, reason) in odd_tensors().items():
        source = home / (name + ".pt")
        torch.save({**GOOD, name: value}, source)
        leaf = "deep.inner.0" if name == "deep" else name
        refused(program, source, leaf, reason, home)
        the_rest_comes_through(program, source, leaf, home)
    everything = {name: value for name, (value, _) in odd_tensors().items()}
    torch.save({**GOOD, **everything}, home / "all.pt")
    told = run(program, "consolidate", home / "all.pt", "-o", home / "never.h5", ok=(5,)).stderr
    assert " and 1 more; leave all of them out with --exclude " in told, told


class Int8(torch.Tensor):
    """A quantized weight as in torchao: it looks like a dense float tensor but stores bytes and a scale."""
    @staticmethod
    def __new__(cls, codes, _scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.is_pinned.default:
            return False
        if func is torch.ops.aten.view.default:
            return cls(args[0].codes, args[0].scale)
        assert func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default), func
        return cls(func(args[0].codes), func(args[0].scale))


def save_quantized(_rank, world, path):
    mesh = init_device_mesh("cpu", (world,))
    part = Int8(torch.ones(64, 64, dtype=torch.int8), torch.ones(64, 1))
    dcp.save({"q": DTensor.from_local(part, mesh, [Shard(0)], run_check=False), "w": torch.ones(4)}, checkpoint_id=path)


def quantized_shards(program, home):
    source = home / "shards"
    gloo.run(2, save_quantized, source)
    assert "q: only dense tensors" in run(program, "check", source).stdout
    assert "covered by digests: the data of 2 of 2" in run(program, "verify", source).stdout
    record_damage_is_found(program, source, "__1_0.distcp")
    assert "no defects" in run(program, "verify", source).stdout
    with open(source / ".metadata", "rb") as f:
        items = pickle.load(f).storage_data.items()
    end = next(i.offset + i.length for k, i in items if k.fqn == "q" and i.relative_path == "__1_0.distcp")
    with open(source / "__1_0.distcp", "r+b") as f:
        f.seek(end - 10)
        f.write(b"x" * 10)
    told = run(program, "verify", source, ok=(1,)).stdout
    assert "tensor q: " in told and "__1_0.distcp" in told and "1 defect" in told, told


def quantized_in_dcp(program, home):
    """.metadata shows no difference from other tensors, but their archives are too short."""
    source, out = home / "int8", home / "int8.pt"
    large, small = (Int8(torch.ones(n, n, dtype=torch.int8), torch.ones(n, 1)) for n in (64, 2))
    dcp.save({**GOOD, "large": large, "small": small}, checkpoint_id=source)
    listed = json.loads(run(program, "inspect", source, "--json").stdout)
    assert "w" in {t["name"] for t in listed["tensors"]} and {"large", "small"} <= {o["name"] for o in listed["objects"]}
    told = run(program, "check", source).stdout
    assert "large" in told and "small" in told and "Int8" in told and "2 warnings" in told, told
    told = run(program, "verify", source).stdout
    assert "no defects" in told, told
    told = run(program, "consolidate", source, "-o", out, ok=(5,)).stderr
    assert "large" in told and "Int8" in told and "--exclude 'large'" in told and "are unreadable, too: small" in told, told
    run(program, "consolidate", source, "-o", out, "-q", "--exclude", "large", "--exclude", "small")
    assert torch.equal(torch.load(out, weights_only=True)["w"], GOOD["w"])
    dcp.save({**GOOD, "small": small}, checkpoint_id=home / "alone")  # not too short, so found only when its bytes are read
    refused(program, home / "alone", "small", "Int8", home)


def odd_tensors_of_dcp(program, home):
    for name in ("quantized", "two"):
        value, reason = odd_tensors()[name]
        source = home / ("dcp-" + name)
        dcp.save({**GOOD, name: value}, checkpoint_id=source)
        refused(program, source, name, "torch.qint8" if name == "quantized" else reason, home)
        the_rest_comes_through(program, source, name, home)


def odd_containers(program, home):
    """A dict whose keys are not names is one value. A list of tensors becomes a DCP checkpoint that torch can load."""
    by = {(0, 1): torch.ones(2), (1, 2): torch.zeros(2), None: [torch.ones(1)]}
    torch.save({**GOOD, "by": by}, home / "keys.pt")
    run(program, "reshard", home / "keys.pt", "-o", home / "keys", "--dp", "2", "-q")
    run(program, "consolidate", home / "keys", "-o", home / "keys2.pt", "-q")
    got = torch.load(home / "keys2.pt", weights_only=False)
    must_equal({**GOOD, "by": by}, got)
    parameters = [torch.arange(3.0), torch.ones(2, 2)]
    torch.save(parameters, home / "list.pt")
    run(program, "convert", home / "list.pt", "-o", home / "list", "--to", "dcp", "-q")
    torch.distributed.checkpoint.format_utils.dcp_to_torch_save(home / "list", home / "back.pt")
    must_equal({str(i): of for i, of in enumerate(parameters)}, torch.load(home / "back.pt"))


def small_files(program, home):
    """A file may be smaller than the decoded form of one of its objects; it is not reported as truncated."""
    torch.save({"iter": 5}, home / "small.pt")
    run(program, "check", home / "small.pt")
    dcp.save({"model": {"w": torch.ones(3)}}, checkpoint_id=home / "lightning")
    torch.save({"iter": 5, "lr": {"a": 1}}, home / "lightning" / "meta.pt")
    run(program, "check", home / "lightning")


def main():
    program = sys.argv[1]
    for test in (quantized_shards, modules, odd_tensors_of_torch_save, odd_tensors_of_dcp, quantized_in_dcp, odd_containers, small_files):
        with tempfile.TemporaryDirectory(prefix="fc-odd-") as home:
            test(program, pathlib.Path(home))
            print("ok", test.__name__)
    return 0


if __name__ == "__main__":
    sys.exit(main())
