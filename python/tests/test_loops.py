"""A loop that opens checkpoints keeps nothing: no descriptor, thread, process or memory, also before Python looks for cycles."""

import gc
import os
import tempfile
import unittest
from pathlib import Path

import harness

import fsdpckpt


def children():
    found = set()
    for task in os.listdir("/proc/self/task"):
        found.update(Path("/proc/self/task", task, "children").read_text(encoding="ascii").split())
    return found


def held():
    """What this process has open."""
    return sorted(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), children()


def resident():
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def drop(path):
    fsdpckpt.open(path)


def close(path):
    with fsdpckpt.open(path):
        pass


def read(path):
    checkpoint = fsdpckpt.open(path)
    name = next(iter(checkpoint))
    checkpoint[name].numpy()
    list(checkpoint.objects)


def read_after(path):
    """A tensor outlives its checkpoint."""
    next(iter(fsdpckpt.open(path).values()))[...]


def layout(path):
    checkpoint = fsdpckpt.open(path)
    return [tensor.placements for tensor in checkpoint.values()], checkpoint.mesh


def fail(path):
    try:
        fsdpckpt.open(path)["no such tensor"]
    except KeyError:
        pass
    try:
        next(iter(fsdpckpt.open(path).values()))[0, 0, 0, 0, 0, 0, 0, 0, 0]
    except IndexError:
        pass


def refuse(path):
    try:
        fsdpckpt.open(path, include="no such tensor")
    except fsdpckpt.Error:
        pass


WAYS = (drop, close, read, read_after, layout, fail, refuse)


class Loops(unittest.TestCase):
    def assert_no_more(self, now, before):
        self.assertEqual((now[0], now[2]), (before[0], before[2]))
        self.assertLessEqual(now[1], before[1])  # a thread of another package may end

    @classmethod
    def setUpClass(cls):
        import h5py
        import numpy as np
        import torch

        cls.folder = tempfile.TemporaryDirectory()
        root = Path(cls.folder.name)
        torch.save({"w": torch.ones(64, 64), "n": {"s": 1}}, root / "zip.pt")
        torch.save({"w": torch.ones(64, 64)}, root / "legacy.pt", _use_new_zipfile_serialization=False)
        source = harness.GOOD / "dcp-torch2.15.0-2d-dp4tp2"
        fsdpckpt.convert(source, root / "sharded", to="h5", progress=None)
        fsdpckpt.consolidate(source, root / "full.h5", progress=None)
        with h5py.File(root / "foreign.h5", "w") as file:
            file["w"] = np.ones((64, 64))
            file.create_dataset("packed", data=np.ones((64, 64)), compression="gzip")
        good = ("st-torch2.15.0-index", "st-torch2.15.0-dtypes", "st-torch2.15.0-2d", source.name, "dcp-torch2.15.0-train")
        cls.paths = [harness.GOOD / name for name in good]
        cls.paths += [root / name for name in ("zip.pt", "legacy.pt", "sharded", "full.h5", "foreign.h5")]

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def setUp(self):
        gc.collect()
        gc.disable()
        self.addCleanup(gc.enable)

    def test_nothing_stays_open(self):
        for path in self.paths:
            for way in WAYS:
                with self.subTest(path=path.name, way=way.__name__):
                    way(path)
                    before = held()
                    way(path)
                    self.assert_no_more(held(), before)
                    # A checkpoint that only a cycle keeps would be found now.
                    self.assertEqual([value for value in gc.get_objects() if isinstance(value, fsdpckpt.Checkpoint)], [])

    def test_an_open_checkpoint_holds_no_file(self):
        before = held()
        for path in self.paths:
            checkpoint = fsdpckpt.open(path)
            for name, tensor in checkpoint.items():
                tensor.numpy()
            for name in checkpoint.objects:
                checkpoint.objects[name]
                checkpoint.objects.raw(name)
            with self.subTest(path=path.name):
                self.assert_no_more(held(), before)

    def test_memory_does_not_grow(self):
        for path in self.paths:
            rounds = 2 if path.suffix == ".h5" else 30  # the confined process that reads headers is slow to start
            with self.subTest(path=path.name):
                for _ in range(rounds):
                    for way in WAYS:
                        way(path)
                before = resident()
                for _ in range(rounds):
                    for way in WAYS:
                        way(path)
                self.assertLess(resident() - before, 1 << 20)


if __name__ == "__main__":
    harness.main("numpy", "torch", "h5py", "ml_dtypes")
