"""fsdpckpt.torch against torch.distributed.checkpoint: four gloo ranks, forked from this process, save and load."""

import os
import shutil
import tempfile
import unittest
import warnings
from pathlib import Path

import harness
from torch_ranks import (
    RANKS,
    UNEVEN_ROWS,
    load,
    load_elsewhere,
    load_uneven,
    run_ranks,
    same,
    save,
    save_all,
    save_in_process,
    save_killed,
    save_uneven,
    uneven_weight,
    zeroed,
)


class Commands(unittest.TestCase):
    """What the commands and other packages say about checkpoints."""

    def check(self, path, layout):
        """The commands accept what was written, and it is the layout."""
        import fsdpckpt

        self.assertTrue(fsdpckpt.verify(path, progress=None).ok)
        self.assertTrue(fsdpckpt.check(path, progress=None).ok)
        self.assertEqual(dict(zip(*fsdpckpt.open(path).mesh)), layout)

    def compare(self, ours, theirs):
        """The tensors and objects are those of the DCP checkpoint; h5py reads the tensors from index.h5."""
        import h5py
        import torch

        import fsdpckpt

        report = fsdpckpt.diff(ours, theirs, data=True, progress=None)
        self.assertTrue(report.ok, report)
        loaded = harness.load_dcp(theirs)
        seen = 0
        with h5py.File(ours / "index.h5") as file, fsdpckpt.open(ours) as checkpoint:
            for name in checkpoint:
                want = harness.find(loaded, name)
                dataset = next(d for d in datasets(file) if name_of(d) == name)
                if want.dtype in (torch.float32, torch.float64, torch.complex64, torch.bool):
                    self.assertEqual(dataset[()].tobytes(), harness.torch_bytes(want), name)
                    seen += 1
        self.assertGreater(seen, 5)


class UnevenRanks(Commands):
    """FSDP2 over tensor parallelism with rows that do not divide."""

    def test_what_the_ranks_hold_is_saved_and_loaded(self):
        import fsdpckpt
        import torch

        warnings.simplefilter("ignore")  # that kernels need equal shards
        folder = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, folder)
        errors = run_ranks(save_uneven, folder, ranks=6)
        if errors[0]:  # PyTorch computed a wrong box
            self.assertRegex(errors[0][0], r"weight.*planner=fsdpckpt\.torch\.SavePlanner\(\)")
        names = ["ours", "theirs", *(f"saved-{kind}" for kind in ("h5", "dcp", "pt", "safetensors"))]
        for name in names:
            self.check(folder / name, {"dp": 3, "tp": 2})
            with fsdpckpt.open(folder / name) as checkpoint:
                for rows in UNEVEN_ROWS:
                    self.assertTrue(torch.equal(checkpoint[f"layers.{rows}.q_proj.weight"].torch(), uneven_weight(rows)), name)
        fsdpckpt.consolidate(folder / "ours", folder / "one.safetensors", progress=None)
        with self.assertWarnsRegex(fsdpckpt.FsdpckptWarning, r"layers\.13.* on dp 3 dcp\.load .* without fsdpckpt\.torch\.LoadPlanner"):
            fsdpckpt.reshard(folder / "one.safetensors", folder / "resharded", to="dcp", dp=3, tp=2, progress=None)
        run_ranks(load_uneven, folder / "resharded", ranks=6)


class FourRanks(Commands):
    @classmethod
    def setUpClass(cls):
        warnings.simplefilter("ignore")
        cls.root = Path(tempfile.mkdtemp())
        cls.addClassCleanup(shutil.rmtree, cls.root)
        cls.results = run_ranks(save_all, cls.root)

    def test_every_kind_of_value(self):
        import fsdpckpt

        folder = self.root / "plain"
        ours = folder / "ours"
        self.assertEqual(len(list(ours.iterdir())), RANKS + 1)
        self.check(ours, {"tp": RANKS})
        self.compare(ours, folder / "theirs")
        self.assertEqual(sorted(os.listdir(folder)), ["ours", "theirs"])
        run_ranks(load_elsewhere, folder, ranks=2)
        # The command gives the same bytes.
        fsdpckpt.convert(ours, folder / "again", to="h5", progress=None)
        for file in sorted(ours.iterdir()):
            self.assertEqual(file.read_bytes(), (folder / "again" / file.name).read_bytes(), file.name)
        fsdpckpt.reshard(ours, folder / "two", to="dcp", dp=2, progress=None)
        self.assertIsNotNone(harness.load_dcp(folder / "two"))

    def test_fsdp2_with_tensor_parallelism_and_an_optimizer(self):
        import fsdpckpt

        folder = self.root / "two_d"
        if not self.results[0]["two_d"]:
            self.skipTest("FSDP2 of this PyTorch needs a GPU")
        self.check(folder / "ours", {"dp": 2, "tp": 2})
        self.compare(folder / "ours", folder / "theirs")
        weight = fsdpckpt.open(folder / "ours")["model.0.weight"]
        self.assertEqual(weight.placements, (fsdpckpt.StridedShard(0, 2), fsdpckpt.Shard(0)))

    def test_replicas_are_stored_once(self):
        import fsdpckpt

        ours = self.root / "replicated" / "ours"
        self.check(ours, {"replicate": 2, "dp": 2})
        with fsdpckpt.open(ours) as checkpoint:
            for name, value in self.results[0]["replicated"].items():
                self.assertEqual(checkpoint[name].numpy().tobytes(), value.tobytes())
                self.assertEqual(len(checkpoint[name].chunks), 2)

    def test_pipeline_stages(self):
        import fsdpckpt

        ours = self.root / "stages" / "ours"
        names = {name for result in self.results for name in result["stages"]}
        self.check(ours, {"replicate": 2, "dp": 2})
        with fsdpckpt.open(ours) as checkpoint:
            self.assertEqual(sorted([*checkpoint, *checkpoint.objects]), sorted(names))
            self.assertEqual(checkpoint.objects["steps.3"], 3)
            self.assertEqual(sorted(chunk.rank for chunk in checkpoint["layers.3"].chunks), [2, 3])

    def test_asynchronous_saves(self):
        self.check(self.root / "async" / "ours", {"tp": RANKS})

    def test_sharded_tensors(self):
        import fsdpckpt

        folder = self.root / "sharded"
        self.assertEqual(sorted(os.listdir(folder)), ["ours", "theirs", "tiles"])
        self.check(folder / "tiles", {"dp": 2, "tp": 2})
        self.assertTrue(fsdpckpt.verify(folder / "ours", progress=None).ok)
        self.assertTrue(fsdpckpt.diff(folder / "ours", folder / "theirs", data=True, progress=None).ok)
        with fsdpckpt.open(folder / "ours") as ours, fsdpckpt.open(folder / "theirs") as theirs:
            self.assertEqual(sorted(ours), sorted(theirs))
            for name in ours:
                self.assertEqual(ours[name].numpy().tobytes(), theirs[name].numpy().tobytes(), name)

    def test_cached_plans(self):
        for step in range(3):
            self.check(self.root / "cached" / f"step-{step}", {"tp": RANKS})

    def test_a_rank_that_fails(self):
        for result in self.results:
            for failing in ("failing0", "failing2"):
                text, left = result[failing]
                self.assertIn("no such data", text)
                self.assertEqual(left, [])

    def test_shards_of_a_state_dict(self):
        import fsdpckpt

        folder = self.root / "shards"
        for report in (result["shards"] for result in self.results):
            self.assertEqual(report, (5, 2, "h5", ("saved", "rank 2: b: no such data")))
        self.check(folder / "saved", {"dp": RANKS})
        loaded = harness.load_dcp(folder / "dcp")
        self.assertTrue(fsdpckpt.diff(folder / "saved", folder / "dcp", data=True, progress=None).ok)
        with fsdpckpt.open(folder / "saved") as checkpoint:
            self.assertEqual(checkpoint["pair.1"].numpy().tolist(), [0.0, 1.0, 2.0])
            self.assertEqual(checkpoint["weight"].torch().tolist(), loaded["weight"].tolist())
            self.assertEqual(checkpoint.objects["inner.step"], 3)


class Torch(Commands):
    def setUp(self):
        self.folder = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.folder)
        warnings.simplefilter("ignore")

    def test_one_process(self):
        import torch

        state = {"a": torch.arange(12.0).reshape(3, 4), "b": {"n": 5}, "empty": torch.zeros(0, 3)}
        save(state, self.folder / "one")
        self.check(self.folder / "one", {"dp": 1})
        self.assertTrue(same(load(zeroed(state), self.folder / "one"), state))

    def test_asynchronous_saves_in_a_process(self):
        for error in run_ranks(save_in_process, self.folder, ranks=2):  # each starts a process that imports PyTorch
            if error is False:
                self.skipTest("this PyTorch saves asynchronously in threads only")
            self.assertIn("force=True", error)
        self.check(self.folder / "ours", {"tp": 2})
        self.compare(self.folder / "ours", self.folder / "theirs")
        self.assertEqual(sorted(os.listdir(self.folder)), ["ours", "theirs"])

    def test_more_than_is_fetched_at_once(self):
        import torch

        import fsdpckpt._shards as shards

        self.addCleanup(setattr, shards, "_FETCHED_AT_ONCE", shards._FETCHED_AT_ONCE)
        shards._FETCHED_AT_ONCE = 1000
        state = {f"w{i}": torch.randn(10, i, dtype=torch.complex64).conj() for i in range(30)}
        save(state, self.folder / "one")
        self.check(self.folder / "one", {"dp": 1})
        self.assertTrue(same(load(zeroed(state), self.folder / "one"), state))

    def test_a_rank_that_is_killed(self):
        for killed in (0, 1):
            with self.assertRaises(AssertionError):
                run_ranks(save_killed, self.folder, killed, ranks=2)
            self.assertNotIn("ours", os.listdir(self.folder))
        import torch

        save({"a": torch.ones(3)}, self.folder / "ours")
        self.assertEqual(os.listdir(self.folder), ["ours"])

    def test_replacing(self):
        import torch

        import fsdpckpt

        path = self.folder / "one"
        save({"a": torch.ones(3)}, path)
        with self.assertRaises(BaseException) as caught:
            save({"a": torch.zeros(3)}, path)
        self.assertIn("force=True", str(caught.exception))
        self.assertEqual(fsdpckpt.open(path)["a"].numpy().sum(), 3)
        save({"a": torch.zeros(3)}, path, force=True)
        self.assertEqual(fsdpckpt.open(path)["a"].numpy().sum(), 0)
        self.assertEqual(os.listdir(self.folder), ["one"])

    def test_damage_is_found(self):
        import torch

        import fsdpckpt

        path = self.folder / "one"
        save({"a": torch.ones(30000)}, path)
        with open(path / "shard-00000-of-00001.h5", "r+b") as file:
            file.seek(-4, os.SEEK_END)
            file.write(b"\x55")
        with self.assertRaises(BaseException) as caught:
            load({"a": torch.zeros(30000)}, path)
        self.assertIn("tensor a", str(caught.exception))
        self.assertFalse(fsdpckpt.verify(path, progress=None).ok)

    def test_other_formats_are_read(self):
        import torch
        from safetensors.torch import save_file

        value = torch.randn(5, 7)
        save_file({"w": value}, self.folder / "model.safetensors")
        torch.save({"w": value, "n": {"x": 3}}, self.folder / "model.pt")
        self.assertTrue(same(load({"w": torch.zeros(5, 7)}, self.folder / "model.safetensors"), {"w": value}))
        state = load({"w": torch.zeros(5, 7), "n": {"x": 0}}, self.folder / "model.pt")
        self.assertTrue(same(state, {"w": value, "n": {"x": 3}}))

    def test_wrong_use(self):
        import torch

        with self.assertRaises(BaseException) as caught:
            save({"a": torch.ones(2).to_sparse()}, self.folder / "x")
        self.assertIn("a: a sparse or quantized tensor", str(caught.exception))
        with self.assertRaises(BaseException) as caught:
            load({"a": torch.ones(2)}, self.folder / "x")
        self.assertIn("no such file", str(caught.exception))
        self.assertEqual(os.listdir(self.folder), [])


def datasets(group):
    import h5py

    for value in group.values():
        if isinstance(value, h5py.Group):
            yield from datasets(value)
        else:
            yield value


def name_of(dataset):
    return dataset.attrs.get("fqn", ".".join(part.replace("%2F", "/") for part in dataset.name[1:].split("/")))


if __name__ == "__main__":
    harness.main("torch", "h5py", "safetensors", "numpy", "ml_dtypes")
