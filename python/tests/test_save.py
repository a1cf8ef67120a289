"""fsdpckpt.save against the readers of each format: PyTorch, h5py, safetensors."""

import math
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import harness

import fsdpckpt

TORCH_DTYPES = """float64 float32 float16 bfloat16 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu
int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool complex32 complex64 complex128""".split()


def every_dtype():
    """Tensors of all dtypes, of random bits, also 0-dim, empty, transposed, sliced and conjugated."""
    import torch

    torch.manual_seed(7)
    made = {}
    for name in TORCH_DTYPES:
        dtype = getattr(torch, name)
        bits = torch.randint(0, 2 if name == "bool" else 256, (16 * 4 * 6,), dtype=torch.uint8)
        value = bits.view(dtype).reshape(-1)[:24].reshape(4, 6)
        made[name] = {"plain": value, "transposed": value.t(), "scalar": value[0, 0], "empty": value[:0]}
        made[name]["part"] = value[1:3, ::2]
    made["complex64"]["conjugated"] = made["complex64"]["plain"].conj()
    return made


def bytes_of(tensor):
    return harness.torch_bytes(tensor.resolve_conj())


class Save(unittest.TestCase):
    def setUp(self):
        self.folder = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.folder)

    def check(self, path, state):
        """What fsdpckpt.open reads is what was saved."""
        with fsdpckpt.open(path) as checkpoint:
            seen = 0
            for kind, tensors in state.items():
                for name, value in tensors.items():
                    got = checkpoint[f"{kind}.{name}"].torch()
                    self.assertEqual((got.dtype, got.shape), (value.dtype, value.shape))
                    self.assertEqual(harness.torch_bytes(got), bytes_of(value), (path, kind, name))
                    seen += 1
        self.assertGreater(seen, 100)
        self.assertTrue(fsdpckpt.verify(path, progress=None).ok)

    def test_every_dtype_in_every_format(self):
        import torch
        from safetensors.torch import load_file

        state = every_dtype()
        for to in ("h5", "pt", "dcp"):
            target = self.folder / f"every.{to}"
            report = fsdpckpt.save(state, target, to=to, progress=None)
            self.assertEqual((report.tensors, report.format), (sum(map(len, state.values())), to))
            self.check(target, state)
        loaded = {"pt": torch.load(self.folder / "every.pt"), "dcp": harness.load_dcp(self.folder / "every.dcp")}
        # safetensors has no name for these.
        for name in ("complex32", "complex128", "float8_e4m3fnuz", "float8_e5m2fnuz"):
            state.pop(name)
        fsdpckpt.save(state, self.folder / "every.safetensors", progress=None)
        flat = load_file(self.folder / "every.safetensors")
        for kind, tensors in state.items():
            for name, value in tensors.items():
                for got in (flat[f"{kind}.{name}"], loaded["pt"][kind][name], loaded["dcp"][kind][name]):
                    self.assertEqual((got.dtype, got.shape), (value.dtype, value.shape))
                    self.assertEqual(harness.torch_bytes(got), bytes_of(value), (kind, name))

    def test_numpy_arrays(self):
        import h5py
        import ml_dtypes
        import numpy as np

        arrays = {
            "a": np.arange(24, dtype=">i4").reshape(2, 3, 4),
            "b": np.arange(24, dtype="f4").reshape(4, 6)[::-1, ::2],
            "c": np.asfortranarray(np.arange(6, dtype="c16").reshape(2, 3)),
            "bf": np.arange(6).astype(ml_dtypes.bfloat16),
            "flags": np.array([True, False]),
            "number": np.float32(2.5),
            "none": np.empty((0, 3), "u2"),
        }
        fsdpckpt.save({"x": arrays}, self.folder / "x.h5", progress=None)
        with fsdpckpt.open(self.folder / "x.h5") as checkpoint, h5py.File(self.folder / "x.h5") as file:
            for name, array in arrays.items():
                self.assertTrue(np.array_equal(checkpoint["x." + name].numpy(), array), name)
                if name != "bf":
                    self.assertTrue(np.array_equal(file["x"][name][...], array), name)
        with self.assertRaisesRegex(TypeError, "float128|longdouble"):
            fsdpckpt.save({"x": np.zeros(2, "g")}, self.folder / "y.h5", progress=None)
        self.assertFalse((self.folder / "y.h5").exists())

    def test_a_tensor_of_an_open_checkpoint(self):
        with fsdpckpt.open(harness.GOOD / "dcp-torch2.15.0-2d-dp2tp2") as checkpoint:
            fsdpckpt.save(dict(checkpoint), self.folder / "copy.pt", progress=None)
            with fsdpckpt.open(self.folder / "copy.pt") as copy:
                self.assertEqual(sorted(copy), sorted(checkpoint))
                for name, tensor in checkpoint.items():
                    self.assertEqual(copy[name].numpy().tobytes(), tensor.numpy().tobytes())

    def test_objects_and_nesting(self):
        import collections

        import torch

        state = {
            "model": {"layers.0": {"w": torch.ones(3)}, "none": {}},
            "list": [torch.zeros(2), 5, {"deep": torch.ones(1)}],
            "tuple": (torch.zeros(1), "text"),
            "step": 7,
            "big": 1 << 100,
            "numbers": [1, 2.5, None, True],
            "nan": math.nan,
            "betas": (0.9, 0.95),
            "keys": {1: "a", "b": (2,)},
            "dtype": torch.bfloat16,
            "size": torch.Size([2, 3]),
            "ordered": collections.OrderedDict(a=1),
            "ünicode": "ß\U0001f600",
        }
        for to in ("h5", "dcp", "pt"):
            target = self.folder / f"objects.{to}"
            fsdpckpt.save(state, target, to=to, progress=None)
            with fsdpckpt.open(target) as checkpoint:
                self.assertEqual(
                    sorted(checkpoint), ["list.0", "list.2.deep", "model.layers.0.w", "tuple.0"], checkpoint.objects
                )
                self.assertEqual(checkpoint.objects["step"], 7)
                self.assertEqual(checkpoint.objects["big"], 1 << 100)
                self.assertEqual(checkpoint.objects["numbers"], [1, 2.5, None, True])
                self.assertEqual(checkpoint.objects["betas"], (0.9, 0.95))
                self.assertEqual(checkpoint.objects["tuple.1"], "text")
                self.assertEqual(checkpoint.objects["size"], (2, 3))
                self.assertEqual(checkpoint.objects["ünicode"], "ß\U0001f600")
                self.assertEqual(checkpoint.objects["model.none"], {})
                self.assertTrue(math.isnan(checkpoint.objects["nan"]))
        back = torch.load(self.folder / "objects.pt")
        self.assertEqual(back["step"], 7)
        self.assertEqual(back["big"], 1 << 100)
        self.assertEqual((back["dtype"], back["size"]), (torch.bfloat16, torch.Size([2, 3])))
        self.assertEqual(back["list"][1], 5)
        self.assertTrue(torch.equal(back["list"][2]["deep"], torch.ones(1)))
        self.assertIsInstance(back["tuple"], tuple)
        dcp = harness.load_dcp(self.folder / "objects.dcp")
        self.assertEqual((dcp["betas"], dcp["dtype"]), ((0.9, 0.95), torch.bfloat16))
        # The objects are those that a conversion writes, down to their readable form.
        fsdpckpt.consolidate(self.folder / "objects.pt", self.folder / "again.h5", progress=None)
        self.assertTrue(fsdpckpt.diff(self.folder / "objects.h5", self.folder / "again.h5", progress=None).ok)

    def test_what_runs_code_is_refused(self):
        class Runs:
            def __reduce__(self):
                return os.system, ("true",)

        import torch  # noqa: F401  (pickles it)

        with self.assertRaises(fsdpckpt.Error) as caught:
            fsdpckpt.save({"bad": Runs()}, self.folder / "bad.pt", progress=None)
        self.assertIn("trust_objects=True", str(caught.exception))
        self.assertEqual(os.listdir(self.folder), [])

    def test_usage(self):
        import torch

        one = {"w": torch.ones(2)}
        with self.assertRaisesRegex(fsdpckpt.UsageError, "to="):
            fsdpckpt.save(one, self.folder / "file", progress=None)
        with self.assertRaisesRegex(ValueError, "no format is called 'x'"):
            fsdpckpt.save(one, self.folder / "file", to="x", progress=None)
        fsdpckpt.save(one, self.folder / "a.h5", progress=None)
        with self.assertRaisesRegex(fsdpckpt.UsageError, "force=True"):
            fsdpckpt.save(one, self.folder / "a.h5", progress=None)
        fsdpckpt.save({"w": torch.zeros(2)}, self.folder / "a.h5", force=True, compress=1, progress=None)
        with fsdpckpt.open(self.folder / "a.h5") as checkpoint:
            self.assertEqual(checkpoint["w"][0], 0)
        with self.assertRaisesRegex(fsdpckpt.UnsupportedError, "sparse"):
            fsdpckpt.save({"w": torch.ones(2).to_sparse()}, self.folder / "s.h5", progress=None)
        with self.assertRaisesRegex(fsdpckpt.UsageError, "a.b.*twice"):
            fsdpckpt.save({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, self.folder / "s.h5", progress=None)
        self.assertEqual(os.listdir(self.folder), ["a.h5"])

    def test_torch_dist_gets_the_keys_of_megatron_core(self):
        import torch
        from torch.distributed.checkpoint import FileSystemReader

        layers = {f"decoder.layers.{n}.mlp.linear_fc2.weight": torch.full((2, 3), float(n)) for n in range(2)}
        fsdpckpt.save(layers, self.folder / "dist", to="torch_dist", progress=None)
        saved = FileSystemReader(self.folder / "dist").read_metadata().state_dict_metadata
        self.assertEqual(tuple(saved["decoder.layers.mlp.linear_fc2.weight"].size), (2, 2, 3))
        with fsdpckpt.open(self.folder / "dist") as checkpoint:
            value = checkpoint["decoder.layers.mlp.linear_fc2.weight"][:]
            self.assertEqual(value.tolist(), torch.stack(list(layers.values())).tolist())

    def test_progress_and_what_it_raises(self):
        import numpy as np

        seen = []
        data = {"w": np.zeros(64 << 20, "u1")}
        fsdpckpt.save(data, self.folder / "a.h5", progress=seen.append)
        self.assertEqual(seen[-1].done, seen[-1].total)

        def stop(update):
            raise ZeroDivisionError

        with self.assertRaises(ZeroDivisionError):
            fsdpckpt.save(data, self.folder / "b.h5", progress=stop)

    def test_ctrl_c_leaves_nothing(self):
        script = (
            "import fsdpckpt, numpy, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
            "def told(update):\n  print(flush=True)\n"
            "fsdpckpt.save({'w': numpy.random.default_rng(0).integers(0, 9, 1 << 27)}, sys.argv[1], compress=9, progress=told)"
        )
        target = self.folder / "stopped.h5"
        child = subprocess.Popen([sys.executable, "-c", script, target], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        child.stdout.readline()
        status, error = harness.interrupt(child)
        self.assertNotEqual(status, 0)
        self.assertIn("KeyboardInterrupt", error)
        self.assertEqual(os.listdir(self.folder), [])



class Masked(unittest.TestCase):
    def test_a_masked_array_is_refused(self):
        import numpy as np

        import fsdpckpt

        masked = np.ma.masked_array([1.0, 2.0], [False, True])
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder, "masked.h5")
            for state in ({"a": {"b": masked}}, {"a": {"b": np.ma.masked_array([1.0])}}, {"a": {"b": np.ma.masked}}):
                with self.assertRaises(fsdpckpt.UsageError) as caught:
                    fsdpckpt.save(state, target, progress=None)
                self.assertEqual(caught.exception.tensor, "a.b")
            self.assertFalse(target.exists())
            fsdpckpt.save({"data": masked.data, "mask": masked.mask}, target, progress=None)
            with fsdpckpt.open(target) as checkpoint:
                self.assertEqual(checkpoint["mask"].numpy().tolist(), [False, True])


if __name__ == "__main__":
    harness.main("numpy", "ml_dtypes", "torch", "h5py", "safetensors")
