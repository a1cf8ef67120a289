"""mmap=True against what safetensors, torch.load and h5py read."""

import json
import os
import random
import struct
import tempfile
import unittest
from pathlib import Path

import harness

import fsdpckpt


def values():
    """Tensors of every dtype and of unusual shapes."""
    import torch

    torch.manual_seed(0)
    made = {"bool": torch.rand(5, 3) > 0.5}
    for name in ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"):
        made[name] = torch.rand(7, 4).to(getattr(torch, name))
    for name in ("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"):
        made[name] = torch.randint(0, 100, (6, 5)).to(getattr(torch, name))
    made["complex64"] = torch.randn(4, 3, dtype=torch.complex64)
    made["scalar"] = torch.tensor(2.5)
    made["empty"] = torch.empty(0, 3)
    made["large"] = torch.randn(300, 400)
    return made


def is_mapped(path):
    return str(path) in Path("/proc/self/maps").read_text(encoding="utf-8")


class Mapped(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def same(self, got, want):
        self.assertEqual((got.dtype, tuple(got.shape)), (want.dtype, tuple(want.shape)))
        self.assertEqual(harness.torch_bytes(got), harness.torch_bytes(want.resolve_conj().resolve_neg()))

    def refused(self, tensor, why):
        for call in (tensor.torch, tensor.numpy):
            with self.assertRaises(fsdpckpt.UsageError) as caught:
                call(mmap=True)
            self.assertRegex(str(caught.exception), f"tensor {tensor.name}: cannot be mapped: .*{why}.*; mmap=False reads it$")
            self.assertEqual(caught.exception.tensor, tensor.name)
        tensor.torch()

    def test_safetensors(self):
        from safetensors import safe_open
        from safetensors.torch import save_file

        path = self.folder / "model.safetensors"
        save_file(values(), path)
        checkpoint = fsdpckpt.open(path)
        with safe_open(path, "pt") as file:
            for name in file.keys():
                with self.subTest(name=name):
                    self.same(checkpoint[name].torch(mmap=True), file.get_tensor(name))
                    array = checkpoint[name].numpy(mmap=True)
                    self.assertEqual((array.dtype, array.shape), (checkpoint[name].dtype, checkpoint[name].shape))
                    self.assertEqual(array.tobytes(), checkpoint[name].numpy().tobytes())

    def test_torch_save_with_views(self):
        import torch

        base = torch.arange(60.0).reshape(6, 10)
        state = {**values(), "transposed": base.t(), "every_other": base[::2, 1::3], "expanded": base[2:3].expand(4, 10),
                 "base": base, "column": base[:, 4], "complex128": torch.randn(3, 2, dtype=torch.complex128),
                 "complex32": torch.randn(3, 2).to(torch.complex32)}
        path = self.folder / "state.pt"
        torch.save(state, path)
        want = torch.load(path, mmap=True)
        checkpoint = fsdpckpt.open(path)
        self.assertEqual(set(checkpoint), set(want))
        for name, value in want.items():
            with self.subTest(name=name):
                self.same(checkpoint[name].torch(mmap=True), value)
        torch.save({"n": base.to(torch.complex64).conj(), "m": torch._neg_view(base)}, path)
        for name in ("n", "m"):
            self.refused(fsdpckpt.open(path)[name], "negated or conjugated")

    def test_hdf5(self):
        import h5py
        import numpy as np
        import torch

        rows = np.arange(48.0, dtype="<f4").reshape(8, 6)
        with h5py.File(self.folder / "foreign.h5", "w") as file:
            file["plain"] = rows
            file["scalar"] = np.float64(2)
            file["big"] = rows.astype(">f4")
            file.create_dataset("packed", data=rows, compression="gzip")
            file.create_dataset("chunked", data=rows, chunks=(4, 6))
        with fsdpckpt.open(self.folder / "foreign.h5") as checkpoint:
            plain = checkpoint["plain"].torch(mmap=True)
            self.same(checkpoint["scalar"].torch(mmap=True), torch.tensor(2.0, dtype=torch.float64))
            self.refused(checkpoint["big"], "byte order")
            self.refused(checkpoint["packed"], "compression")
            self.refused(checkpoint["chunked"], "2 chunks")
        self.same(plain, torch.from_numpy(rows))
        state = values()
        fsdpckpt.save(state, self.folder / "own.h5", progress=None)
        with fsdpckpt.open(self.folder / "own.h5") as checkpoint:
            for name, value in state.items():
                with self.subTest(name=name):
                    self.same(checkpoint[name].torch(mmap=True), value)
        fsdpckpt.reshard(self.folder / "own.h5", self.folder / "sharded", to="h5", dp=2, progress=None)
        with fsdpckpt.open(self.folder / "sharded") as checkpoint:
            self.refused(checkpoint["large"], "2 chunks")

    def test_every_checkpoint_of_the_corpus(self):
        mapped = refused = 0
        for path in sorted(harness.GOOD.glob("[!.]*")):
            with fsdpckpt.open(path) as checkpoint:
                for tensor in checkpoint.values():
                    with self.subTest(path=path.name, name=tensor.name):
                        try:
                            got = tensor.torch(mmap=True)
                        except fsdpckpt.UsageError as error:
                            self.assertRegex(str(error), "cannot be mapped: .*; mmap=False reads it$")
                            refused += 1
                        else:
                            self.same(got, tensor.torch())
                            mapped += 1
        self.assertGreater(mapped, 150)
        self.assertGreater(refused, 300)

    def test_a_recipe_maps_what_it_only_rearranges(self):
        there = harness.GOOD.parent / "recipes" / "nanogpt"
        mapped = 0
        with fsdpckpt.open(there / "from.safetensors", recipe="nanogpt") as checkpoint:
            for tensor in checkpoint.values():
                try:
                    self.same(tensor.torch(mmap=True), tensor.torch())
                    mapped += 1
                except fsdpckpt.UsageError as error:
                    self.assertIn("cannot be mapped", str(error))
        self.assertGreater(mapped, 0)

    def test_indexing_is_that_of_numpy(self):
        import numpy as np
        import torch

        path = self.folder / "state.pt"
        whole = torch.arange(7 * 6 * 5, dtype=torch.int32).reshape(7, 6, 5).transpose(0, 2)
        torch.save({"w": whole}, path)
        tensor, array = fsdpckpt.open(path)["w"], whole.numpy()
        for index in (0, -1, ..., None, (0, 1, 2), (..., 2), np.s_[1:4], np.s_[:, 2:6:3], np.s_[4:1], (None, 1, ..., None)):
            self.same(tensor.torch(index, mmap=True), torch.from_numpy(np.ascontiguousarray(array[index]).reshape(np.shape(array[index]))))
        chance = random.Random(1)
        for _ in range(300):
            index = tuple(slice(*sorted(chance.choices(range(-8, 9), k=2)), chance.choice((1, 1, 2, 3))) for _ in range(chance.randrange(4)))
            self.same(tensor.torch(index, mmap=True), torch.from_numpy(np.ascontiguousarray(array[index])))
        with self.assertRaises(fsdpckpt.UsageError):
            tensor.torch(np.s_[::-1], mmap=True)
        with self.assertRaises(IndexError):
            tensor.torch(9, mmap=True)

    def test_writing_does_not_reach_the_file(self):
        from safetensors.torch import save_file

        path = self.folder / "model.safetensors"
        save_file(values(), path)
        before = path.read_bytes()
        checkpoint = fsdpckpt.open(path)
        first, second = checkpoint["large"].torch(mmap=True), checkpoint["large"].torch(mmap=True)
        first.zero_()
        checkpoint["large"].numpy(mmap=True)[:] = 7
        self.assertEqual(float(first.abs().max()), 0)
        self.same(second, values()["large"])
        self.assertEqual(path.read_bytes(), before)

    def test_the_map_lives_as_long_as_its_tensors(self):
        from safetensors.torch import save_file

        path = self.folder / "model.safetensors"
        save_file(values(), path)
        descriptors = sorted(os.listdir("/proc/self/fd"))
        with fsdpckpt.open(path) as checkpoint:
            row = checkpoint["large"].torch(slice(3, 4), mmap=True)[0]
            array = checkpoint["large"].numpy(mmap=True)[5]
        self.assertEqual(sorted(os.listdir("/proc/self/fd")), descriptors)
        self.assertTrue(is_mapped(path))
        save_file({"large": values()["large"] + 1}, self.folder / "other")
        os.replace(self.folder / "other", path)
        self.same(row, values()["large"][3])
        path.unlink()
        self.assertEqual(array.tobytes(), harness.torch_bytes(values()["large"][5]))
        del row
        self.assertTrue(is_mapped(path))
        del array
        self.assertFalse(is_mapped(path))

    def test_a_changed_file_is_not_mapped(self):
        from safetensors.torch import save_file

        path = self.folder / "model.safetensors"
        save_file(values(), path)
        checkpoint = fsdpckpt.open(path)
        os.truncate(path, 1000)
        with self.assertRaises(fsdpckpt.CorruptError):
            checkpoint["large"].torch(mmap=True)

    def test_elements_that_are_not_aligned_are_refused(self):
        import numpy as np

        header = json.dumps({"bytes": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
                             "w": {"dtype": "F32", "shape": [2], "data_offsets": [3, 11]}})
        path = self.folder / "model.safetensors"
        header += " " * (-len(header) % 8)
        path.write_bytes(struct.pack("<Q", len(header)) + header.encode() + b"abc" + np.array([1, 2], "<f4").tobytes())
        with fsdpckpt.open(path) as checkpoint:
            self.assertEqual(checkpoint["bytes"].numpy(mmap=True).tobytes(), b"abc")
            self.refused(checkpoint["w"], "no multiple of the 4 bytes")

    def test_arguments(self):
        from safetensors.torch import save_file

        save_file(values(), self.folder / "model.safetensors")
        tensor = fsdpckpt.open(self.folder / "model.safetensors")["large"]
        for call in (tensor.torch, tensor.numpy):
            with self.assertRaises(fsdpckpt.UsageError):
                call(mmap="yes")
            self.assertFalse(is_mapped(self.folder))


if __name__ == "__main__":
    harness.main("numpy", "torch", "h5py", "ml_dtypes", "safetensors")
