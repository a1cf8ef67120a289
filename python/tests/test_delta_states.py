"""delta with state dicts in memory: the bytes are those of the command for the same tensors in safetensors files, and the reader of
the tests (weight_sync.py) gets the new values."""

import os
import sys
import tempfile
import unittest
from pathlib import Path

import harness

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "cli"))
import weight_sync  # noqa: E402

import fsdpckpt  # noqa: E402


def states():
    """A state dict with every kind of tensor, and the next one."""
    import torch

    torch.manual_seed(0)
    bits = torch.randint(0, 256, (64, 96), dtype=torch.uint8)
    pairs = torch.randn(40, 30)
    old = {
        "bf16": torch.randn(900, 700).to(torch.bfloat16),
        "fp8": bits.clone().view(torch.float8_e4m3fn),
        "int4": bits.clone(),
        "bool": bits > 100,
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "none": torch.zeros(0, 5),
        "transposed": torch.randn(70, 90).t(),
        "strided": torch.randn(40, 60)[::2, 1::3],
        "tied": pairs,
        "tied again": pairs,
        "same": torch.arange(12).reshape(3, 4),
        "complex": torch.randn(5, 6, dtype=torch.complex64),
    }
    new = {name: value.clone() for name, value in old.items()}
    new["bf16"][torch.rand(900, 700) < 0.02] += 0.5
    for name, place in (("fp8", (5, 6)), ("int4", (0, 0))):
        new[name].view(torch.uint8)[place] ^= 7
    new["bool"][3] ^= True
    new["scalar"] += 1
    new["transposed"] = new["transposed"].t().contiguous().t()
    new["transposed"][4, 5:50] += 1
    wide = torch.zeros(40, 60)
    wide[::2, 1::3] = new["strided"]
    new["strided"] = wide[::2, 1::3]
    new["strided"][1] = 3
    new["tied"][2] += 1
    new["tied again"] = new["tied"]
    new["complex"] = new["complex"].conj()
    return old, new


def raw(state):
    return {name: harness.torch_bytes(value.resolve_conj()) for name, value in state.items()}


class States(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        from safetensors.torch import save_file

        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.root = Path(folder.name)
        cls.old, cls.new = states()
        cls.files = [cls.root / "old.safetensors", cls.root / "new.safetensors"]
        for file, state in zip(cls.files, (cls.old, cls.new)):
            save_file({name: value.resolve_conj().clone().contiguous() for name, value in state.items()}, file)

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def content(self, path):
        return {name: (path / name).read_bytes() for name in sorted(os.listdir(path))}

    def delta(self, old, new, name="weight_v000001", **options):
        return fsdpckpt.delta(old, new, self.folder / name, progress=None, **options)

    def test_the_bytes_are_those_of_the_command(self):
        for options in ({}, {"encoding": "overwrite"}, {"encoding": "auto", "checksum": "adler32", "level": 3}):
            os.makedirs(self.folder / "one", exist_ok=True)
            asked = self.delta(*self.files, "one/weight_v000001", force=True, **options)
            wanted = self.content(self.folder / "one" / "weight_v000001")
            with fsdpckpt.open(self.files[0]) as opened:
                for old, new in (
                    (self.old, self.new),
                    (self.old, self.files[1]),
                    (self.files[0], self.new),
                    (opened, self.new),
                ):
                    found = self.delta(old, new, force=True, jobs=2, memory="32M", **options)
                    self.assertEqual(self.content(self.folder / "weight_v000001"), wanted)
                    told = {key: value for key, value in asked.items() if key not in ("target", "seconds")}
                    self.assertEqual({key: found[key] for key in told}, told)
            model = raw(self.old)
            weight_sync.apply(model, self.folder / "weight_v000001")
            self.assertEqual(model, raw(self.new))

    def test_arrays_of_numpy(self):
        import ml_dtypes
        import numpy

        rng = numpy.random.default_rng(0)
        old = {"a": rng.random((50, 60)).astype(ml_dtypes.bfloat16), "b": rng.random((8, 9)).astype(">f4"), "c": numpy.float32(3)}
        new = {name: value.copy() for name, value in old.items()}
        new["a"][7:9] *= ml_dtypes.bfloat16(2)
        new["b"] = new["b"][::-1]
        new["c"] = numpy.float32(4)
        report = self.delta(old, new, "any", number=12, base=10)
        self.assertEqual((report.version, report.base_version, report.changed), (12, 10, 3))
        little = [{name: value.astype(value.dtype.newbyteorder("<")).tobytes() for name, value in state.items()} for state in (old, new)]
        weight_sync.apply(little[0], self.folder / "any")
        self.assertEqual(*little)

    def test_names_and_dtypes_of_the_new_one(self):
        import torch

        master = torch.randn(30, 40)
        old = {"layers.0.w": master.to(torch.bfloat16)}
        trained = master + 1
        state = {"model": {"_orig_mod.layers.0.w": trained}, "optim": {"state": {"m": trained}}, "step": 3}
        report = self.delta(old, state, include="model.*", strip_prefix="model", rename="s/_orig_mod[.]//", dtype="bf16")
        self.assertEqual((report.tensors, report.changed, report.objects), (1, 1, 1))
        model = raw(old)
        weight_sync.apply(model, self.folder / "weight_v000001")
        self.assertEqual(model, raw({"layers.0.w": trained.to(torch.bfloat16)}))

    def test_a_tied_tensor_that_the_old_one_lacks_is_left_out(self):
        import torch

        old = {"embed": torch.randn(5, 4)}
        weight = old["embed"] + 1
        for state in ({"head": weight, "embed": weight}, {"embed": torch.nn.Parameter(weight), "head": weight}):
            self.assertEqual(self.delta(old, state, force=True).tensors, 1)
            self.assertEqual(sorted(weight_sync.read_version(self.folder / "weight_v000001")[1]), ["embed"])
        with self.assertRaisesRegex(fsdpckpt.UsageError, r"the old state dict: it has no tensor head, .*exclude=\['head'\]"):
            self.delta(old, {"embed": weight, "head": weight.clone()}, "weight_v000002")

    def test_refusals_are_those_of_the_command(self):
        import torch

        def refusal(old, new, **options):
            with self.assertRaises(fsdpckpt.Error) as caught:
                self.delta(old, new, **options)
            return type(caught.exception), str(caught.exception)

        for options in (
            {"encoding": "zip"},
            {"checksum": "md5"},
            {"checksum": "blake3"},
            {"level": 10},
            {"level": 0},
            {"jobs": 5000},
            {"memory": "much"},
            {"number": 3},
            {"base": 1},
            {"include": "nothing*"},
            {"dtype": "i32"},
        ):
            found, wanted = refusal(self.old, self.new, **options), refusal(*self.files, **options)
            self.assertEqual(found[0], wanted[0], options)
            if "include" not in options and "dtype" not in options:
                self.assertEqual(found, wanted)
        self.assertRegex(refusal(self.old, {"bf16": self.new["bf16"].float()})[1], "bf16: it is bfloat16 in the old state dict and float32 in")
        self.assertRegex(refusal(self.old, {"bf16": self.new["bf16"][1:]})[1], "bf16: it has another shape in the old state dict")
        self.assertRegex(refusal(self.old, self.new, quantize="*")[1], "^quantize=: needs both sides on disk")
        self.assertRegex(refusal(self.old, self.new, schema="x")[1], "^schema=: is about a checkpoint on disk")
        self.assertRegex(refusal(self.old, {"sparse": torch.eye(3).to_sparse()})[1], "^sparse: a sparse")
        self.assertRegex(refusal([1], {})[1], "old= must be a str or os.PathLike")
        self.assertEqual(os.listdir(self.folder), [])
        self.delta(self.old, self.new)
        self.assertRegex(refusal(self.old, self.new)[1], "exists; force=True replaces it")


if __name__ == "__main__":
    harness.main("torch", "safetensors", "ml_dtypes")
