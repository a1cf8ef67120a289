"""fsdpckpt.open against the packages that wrote the checkpoints, and indexing against NumPy."""

import json
import multiprocessing
import os
import pickle
import random
import shutil
import tempfile
import threading
import unittest
from pathlib import Path

import harness

import fsdpckpt


def same_bytes(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


class Corpus(unittest.TestCase):
    def test_dcp_tensors_are_what_pytorch_loads(self):
        import torch

        seen = 0
        for path in sorted(harness.GOOD.glob("dcp-torch2.*")):
            state = harness.load_dcp(path)
            if state is None:  # needs the classes of another version
                continue
            with fsdpckpt.open(path) as checkpoint:
                for name, tensor in checkpoint.items():
                    value = harness.find(state, name)
                    with self.subTest(path=path.name, name=name):
                        got = tensor.torch()
                        self.assertEqual((got.dtype, got.shape), (value.dtype, value.shape))
                        as_bytes = [t.contiguous().reshape(-1).view(torch.uint8) for t in (got, value) if t.numel()]
                        self.assertTrue(not as_bytes or torch.equal(*as_bytes))
                        self.assertEqual(tensor.numpy().tobytes(), b"".join(bytes(t.numpy()) for t in as_bytes[:1]))
                        seen += 1
        self.assertGreater(seen, 300)

    def test_safetensors_are_what_the_library_loads(self):
        from safetensors import safe_open

        seen = 0
        whole = [path for kind in ("dtypes", "shapes", "index") for path in harness.GOOD.glob(f"st-*-{kind}/*.safetensors")]
        for path in sorted(whole):
            with fsdpckpt.open(path.parent) as checkpoint, safe_open(path, "pt") as file:
                for name in file.keys():
                    with self.subTest(path=path, name=name):
                        value, got = file.get_tensor(name), checkpoint[name].torch()
                        self.assertEqual((value.dtype, value.shape), (got.dtype, got.shape))
                        self.assertEqual(harness.torch_bytes(value), harness.torch_bytes(got))
                        seen += 1
        self.assertGreater(seen, 25)

    def test_hdf5_of_every_layout_is_what_h5py_reads(self):
        import h5py
        import numpy as np

        seen = 0
        with tempfile.TemporaryDirectory() as folder:
            for name in ("dcp-torch2.15.0-2d-dp4tp2", "dcp-torch2.15.0-hsdp-tp", "dcp-torch2.15.0-dtypes-sharded"):
                target = Path(folder, name)
                fsdpckpt.convert(harness.GOOD / name, target, to="h5", progress=None)
                with h5py.File(target / "index.h5") as file, fsdpckpt.open(target) as checkpoint:
                    for tensor in checkpoint.values():
                        value = harness.find(file, tensor.name)
                        stored = np.empty(value.shape, f"V{value.id.get_type().get_size()}")  # h5py would convert
                        value.id.read(h5py.h5s.ALL, h5py.h5s.ALL, stored, mtype=value.id.get_type())
                        self.assertEqual(stored.tobytes(), tensor.numpy().tobytes(), tensor)
                        seen += 1
        self.assertGreater(seen, 40)


class Recipes(unittest.TestCase):
    """tests/corpus/recipes: the same model before and after the converter of its own package."""

    CASES = (("torchtitan-llama3", "torchtitan-llama3"), ("torchtitan-qwen3-moe", "torchtitan-qwen3"), ("meta-llama", "meta-llama"),
             ("nanogpt", "nanogpt"))

    def same(self, checkpoint, path):
        from safetensors import safe_open

        with safe_open(path, "pt") as file:
            self.assertEqual(set(checkpoint), set(file.keys()))
            for name in file.keys():
                value = file.get_tensor(name)
                with self.subTest(path=path, name=name):
                    self.assertEqual(harness.torch_bytes(checkpoint[name].torch()), harness.torch_bytes(value))
                    half = slice(value.shape[0] // 2, None), ...
                    self.assertEqual(checkpoint[name][half].tobytes(), harness.torch_bytes(value[half].contiguous()))

    def test_tensors_are_what_the_converter_makes(self):
        for folder, recipe in self.CASES:
            there = harness.GOOD.parent / "recipes" / folder
            with fsdpckpt.open(there / "from.safetensors", recipe=recipe) as checkpoint:
                self.same(checkpoint, there / "to.safetensors")
                again = pickle.loads(pickle.dumps(checkpoint))
                self.assertEqual(set(again), set(checkpoint))
        for folder in ("meta-llama", "torchtitan-llama3"):  # config.json tells the second from Qwen3
            there = harness.GOOD.parent / "recipes" / folder
            with fsdpckpt.open(there / "from.safetensors", recipe="auto") as checkpoint:
                self.same(checkpoint, there / "to.safetensors")
        there = harness.GOOD.parent / "recipes" / "torchtitan-llama3"
        with fsdpckpt.open(there / "to.safetensors", recipe="torchtitan-llama3", reverse=True, config=there) as checkpoint:
            self.same(checkpoint, there / "from.safetensors")

    def test_list(self):
        shipped = fsdpckpt.recipes()
        self.assertLessEqual({recipe for _, recipe in self.CASES}, set(shipped))
        for name, recipe in shipped.items():
            self.assertTrue(recipe["fsdpckpt"] == "recipe" and recipe["description"] and recipe["rules"], name)
        there = harness.GOOD.parent / "recipes" / "nanogpt"
        with tempfile.TemporaryDirectory() as folder:
            mine = Path(folder, "mine.json")
            mine.write_text(json.dumps(shipped["nanogpt"]), encoding="utf-8")
            with fsdpckpt.open(there / "from.safetensors", recipe=mine) as checkpoint:
                self.same(checkpoint, there / "to.safetensors")

    def test_shards(self):
        there = harness.GOOD.parent / "recipes" / "torchtitan-llama3"
        with tempfile.TemporaryDirectory() as folder:
            fsdpckpt.reshard(there / "from.safetensors", Path(folder, "shards"), to="dcp", dp=3, tp=2, progress=None)
            with fsdpckpt.open(Path(folder, "shards"), recipe="torchtitan-llama3", config=there / "config.json") as checkpoint:
                self.same(checkpoint, there / "to.safetensors")

    def test_refusals(self):
        there = harness.GOOD.parent / "recipes" / "torchtitan-llama3" / "from.safetensors"
        with self.assertRaisesRegex(fsdpckpt.UsageError, "reverse= needs recipe="):
            fsdpckpt.open(there, reverse=True)
        with self.assertRaisesRegex(fsdpckpt.UsageError, "config= needs recipe="):
            fsdpckpt.open(there, config=".")
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(there, folder)  # without config.json, which would tell
            with self.assertRaisesRegex(fsdpckpt.UsageError, "several recipes fit .*'torchtitan-llama3', 'torchtitan-qwen3'"):
                fsdpckpt.open(Path(folder, there.name), recipe="auto")
        with self.assertRaises(fsdpckpt.UsageError):
            fsdpckpt.open(there, recipe="nanogpt")
        with self.assertRaisesRegex(fsdpckpt.UsageError, "nothing is selected: all [0-9]+ names are excluded"):
            fsdpckpt.open(there, exclude="*")


class Reading(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        import numpy as np

        cls.folder = Path(tempfile.mkdtemp())
        cls.arrays = {
            "cube": np.arange(11 * 6 * 10, dtype="<i4").reshape(11, 6, 10),
            "row": np.arange(1 << 20, dtype="<f4"),
            "wide": np.arange(40 << 16, dtype="<f4").reshape(40, 1 << 16),
            "scalar": np.float64(3.5),
            "empty": np.empty((0, 4), "<f2"),
            "flags": np.arange(40).reshape(8, 5) % 3 == 0,
        }
        full = cls.folder / "full.h5"
        fsdpckpt.save({name: np.asarray(array) for name, array in cls.arrays.items()}, full, progress=None)
        fsdpckpt.reshard(full, cls.folder / "sharded", to="dcp", dp=3, progress=None)
        fsdpckpt.consolidate(full, cls.folder / "small.h5", compress=1, progress=None)
        cls.paths = [full, cls.folder / "sharded", cls.folder / "small.h5"]

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.folder)

    def check(self, checkpoint, name, index):
        expected = self.arrays[name][index]
        got = checkpoint[name][index]
        self.assertTrue(same_bytes(expected, got), (name, index, expected, got))

    def test_indexing_is_that_of_numpy(self):
        choose = random.Random(5)

        def part(size):
            numbers = [None, *range(-size - 2, size + 3)]
            step = choose.choice([None, 1, 2, 3, 7, -1, -2, -5])
            return choose.choice(
                [choose.randrange(-size, size), slice(choose.choice(numbers), choose.choice(numbers), step), ..., None]
            )

        for path in self.paths:
            with fsdpckpt.open(path) as checkpoint:
                for _ in range(400):
                    index = [part(size) for size in (11, 6, 10)[: choose.randrange(4)]]
                    dots = [i for i, item in enumerate(index) if item is ...]
                    for i in dots[1:]:
                        index[i] = slice(None)
                    # A part may stand for another dimension when there is a None or an ellipsis: NumPy decides.
                    try:
                        self.arrays["cube"][tuple(index)]
                    except IndexError:
                        with self.assertRaises(IndexError):
                            checkpoint["cube"][tuple(index)]
                    else:
                        self.check(checkpoint, "cube", tuple(index))
                for name, index in (
                    ("row", slice(5, None, 70000)),
                    ("row", slice(None, None, -3)),
                    ("wide", (slice(1, 39, 5), slice(3, None, 2))),
                    ("wide", (slice(None, None, -7), 17)),
                    ("wide", (slice(None), slice(None, None, 1000))),
                    ("scalar", ()),
                    ("scalar", ...),
                    ("empty", slice(0, 0)),
                    ("empty", (..., slice(1, 3))),
                    ("flags", (slice(None, None, 2), -1)),
                ):
                    self.check(checkpoint, name, index)

    def test_wrong_indices_are_refused(self):
        with fsdpckpt.open(self.paths[0]) as checkpoint:
            for index in (11, -12, (0, 0, 0, 0), (..., ...), [1, 2], "a", 1.5, True):
                with self.assertRaises(IndexError, msg=index):
                    checkpoint["cube"][index]
            with self.assertRaisesRegex(KeyError, "did you mean 'scalar'"):
                checkpoint["scaler"]

    def test_a_part_reads_its_bytes_only(self):
        def read_so_far():
            return int(Path("/proc/self/io").read_text().split("\n")[0].split()[1])

        with fsdpckpt.open(self.paths[0]) as checkpoint:
            wide = checkpoint["wide"]
            wide[0:1, 0:1]
            before = read_so_far()
            wide[3:5, 100:200]
            wide[::20, 7]
            self.assertLess(read_so_far() - before, 100_000)  # of 10 MB

    def test_conversions(self):
        import numpy as np
        import torch

        with fsdpckpt.open(self.paths[1]) as checkpoint:
            cube = checkpoint["cube"]
            self.assertTrue(same_bytes(np.asarray(cube), self.arrays["cube"]))
            self.assertEqual(np.asarray(cube, dtype="f8").dtype, np.float64)
            self.assertTrue(torch.equal(cube.torch(), torch.from_numpy(self.arrays["cube"])))
            self.assertTrue(torch.equal(cube.torch((slice(2, 5), 1)), torch.from_numpy(self.arrays["cube"][2:5, 1])))
            self.assertEqual(checkpoint["empty"].torch().shape, (0, 4))
            self.assertEqual(checkpoint["scalar"].torch().item(), 3.5)
            array = np.asarray(checkpoint["scalar"])
            self.assertEqual((array.shape, array.dtype, array[()]), ((), np.float64, 3.5))
            self.assertEqual(np.asarray(checkpoint["scalar"], dtype="f4").dtype, np.float32)
            plain = np.asarray(self.arrays["scalar"])
            for index in (..., (), (..., None), (None, ...)):
                self.assertIs(type(checkpoint["scalar"][index]), type(plain[index]), index)
            for index in ((0, 0, 0), (0, 0, 0, ...), (..., 0, 0, 0), (0, ..., 0, 0)):
                self.assertIs(type(cube[index]), type(self.arrays["cube"][index]), index)
            self.assertEqual((len(cube), cube.ndim, cube.size, cube.nbytes), (11, 3, 660, 2640))

    def test_local_parts_are_those_of_dtensor(self):
        from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
        from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

        with fsdpckpt.open(self.paths[0]) as full, fsdpckpt.open(self.paths[1]) as sharded:
            self.assertIsNone(full.mesh)
            self.assertEqual(sharded.mesh, fsdpckpt.Mesh(("dp",), (3,)))
            self.assertEqual(sharded["cube"].placements, (fsdpckpt.Shard(0),))
            for rank in range(3):
                self.assertTrue(same_bytes(sharded["cube"].local(rank), self.arrays["cube"][rank * 4 : rank * 4 + 4]))
            for placements in ([Shard(0), Shard(1)], [Replicate(), Shard(2)], [_StridedShard(0, split_factor=2), Shard(0)]):
                for rank in range(6):
                    coordinate = [rank // 2, rank % 2]
                    shape, offset = _compute_local_shape_and_global_offset(
                        (12, 6, 10), (3, 2), lambda d: coordinate[d], placements
                    )
                    box = fsdpckpt._native.local_box(
                        (12, 6, 10),
                        (("dp", 3), ("tp", 2)),
                        tuple(fsdpckpt._placements.parts_of(p) for p in placements),
                        rank,
                    )
                    self.assertEqual(box, (tuple(offset), tuple(shape)))
            self.assertEqual(full["cube"].local(5, {"dp": 6}).shape, (1, 6, 10))
            with self.assertRaisesRegex(fsdpckpt.UsageError, "rank 6: the mesh has 6 ranks"):
                full["cube"].local(6, {"dp": 6})

    def test_a_device_mesh_of_pytorch(self):
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor
        from torch.testing._internal.distributed.fake_pg import FakeStore

        with fsdpckpt.open(self.paths[1]) as checkpoint:
            cube = checkpoint["cube"]
            whole = cube.torch()
            for rank in (0, 5):
                dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=6)
                try:
                    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
                    for placements in ((Shard(0), Shard(2)), (Shard(1), Replicate())):
                        local = distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()
                        self.assertTrue(same_bytes(cube.local(rank, mesh, placements), local.numpy()))
                finally:
                    dist.destroy_process_group()

    def test_threads_read_at_once(self):
        failed = []

        def work(checkpoint):
            for _ in range(20):
                for name, array in self.arrays.items():
                    if checkpoint[name].numpy().tobytes() != array.tobytes():
                        failed.append(name)

        for path in self.paths:
            with fsdpckpt.open(path) as checkpoint:
                threads = [threading.Thread(target=work, args=(checkpoint,)) for _ in range(4)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
        self.assertEqual(failed, [])

    def test_closing_while_threads_read(self):
        for _ in range(20):
            checkpoint = fsdpckpt.open(self.paths[0])
            ended = []

            def work(wide=checkpoint["wide"], ended=ended):
                try:
                    while True:
                        wide[::3]
                except ValueError:
                    ended.append(True)

            threads = [threading.Thread(target=work) for _ in range(2)]
            for thread in threads:
                thread.start()
            checkpoint.close()
            for thread in threads:
                thread.join()
            self.assertEqual(len(ended), 2)

    def test_workers_reopen_it(self):
        for path in self.paths:
            with fsdpckpt.open(path, include=["cube", "row"]) as checkpoint:
                copy = pickle.loads(pickle.dumps(checkpoint))
                self.assertEqual(list(copy), ["cube", "row"])
                for method in ("fork", "spawn"):
                    with multiprocessing.get_context(method).Pool(2) as pool:
                        sums = pool.map(total, [checkpoint["cube"], checkpoint["row"]])
                    self.assertEqual(sums, [self.arrays["cube"].sum(), self.arrays["row"].sum(dtype="f8")])

    def test_selection(self):
        with fsdpckpt.open(self.paths[0], include="*e*", exclude=["cube"], rename="s/^/model./") as checkpoint:
            self.assertEqual(sorted(checkpoint), ["model.empty", "model.wide"])

    def test_errors_say_where(self):
        with self.assertRaises(fsdpckpt.NotFoundError) as caught:
            fsdpckpt.open(self.folder / "nothing.h5")
        self.assertEqual(caught.exception.path, str(self.folder / "nothing.h5"))
        self.assertIsInstance(caught.exception, FileNotFoundError)
        bad = harness.CORPUS / "bad"
        for name, tensor, offset in (
            ("dcp-item-crc", "w", 46),
            ("dcp-truncated-file", "w", None),
            ("dcp-hostile-global", None, 14),
        ):
            with self.assertRaises(fsdpckpt.CorruptError) as caught:
                fsdpckpt.open(bad / name)["w"].numpy()
            error = caught.exception
            self.assertEqual((error.tensor, error.offset), (tensor, offset))
            self.assertTrue(error.path.startswith(str(bad / name)) and os.path.isfile(error.path), error.path)
        with self.assertRaises(fsdpckpt.UnsupportedError) as caught:
            fsdpckpt.open(harness.CORPUS / "unsupported" / "dcp-quantized").objects["w"]
        self.assertIn("exclude=['w']", str(caught.exception))
        with self.assertRaises(fsdpckpt.UsageError):
            fsdpckpt.open(self.paths[0], include=["nothing.*"])

    def test_a_closed_checkpoint(self):
        checkpoint = fsdpckpt.open(self.paths[0])
        cube = checkpoint["cube"]
        checkpoint.close()
        checkpoint.close()
        self.assertEqual(cube.shape, (11, 6, 10))
        with self.assertRaises(ValueError):
            cube[0]


def total(tensor):
    return tensor.numpy().sum(dtype="f8")


class Objects(unittest.TestCase):
    def test_objects_are_what_pytorch_loads(self):
        state = harness.load_dcp(harness.GOOD / "dcp-torch2.15.0-train")
        with fsdpckpt.open(harness.GOOD / "dcp-torch2.15.0-train") as checkpoint:
            self.assertGreater(len(checkpoint.objects), 20)
            for name, value in checkpoint.objects.items():
                self.assertEqual(repr(value), repr(harness.find(state, name)), name)  # NaN is not equal to itself

    def test_the_original_bytes(self):
        import io

        import torch

        with fsdpckpt.open(harness.GOOD / "dcp-torch2.15.0-train") as checkpoint:
            raw = checkpoint.objects.raw("optim.param_groups.0.betas")
        self.assertEqual(torch.load(io.BytesIO(raw)), (0.9, 0.95))


if __name__ == "__main__":
    harness.main("numpy", "ml_dtypes", "torch", "h5py", "safetensors")
