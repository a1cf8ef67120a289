"""HDF5Writer and HDF5Reader in calls that FileSystemWriter and FileSystemReader accept: what PyTorch's own tests of
torch.distributed.checkpoint do, in our words. Each call is made with both, and both must give the same.

Tests of PyTorch that do not apply to another storage, and why:

- of FileSystemWriter's own options: single_file_per_rank, thread_count, per_thread_copy_ahead, overwrite, _extensions,
  serialization_format, cache_staged_state_dict
- of the files that it writes: their names, .metadata and its pickle, format_utils (dcp_to_torch_save and back)
- of other storages: fsspec, Hugging Face's safetensors, their consolidation
- of planners alone, which write nothing: deduplication, validation of plans, create_read_items
- of staging, loggers, process groups over which a checkpoint is sent (PGTransport), and get_state_dict, none of which
  meets the storage
"""

import os
import pickle
import shutil
import tempfile
import unittest
import warnings
from pathlib import Path

import harness
from torch_ranks import same, zeroed


class Storage:
    """One of the two, by name."""

    def __init__(self, name):
        self.name = name

    def writer(self, *args, **options):
        import torch.distributed.checkpoint as dcp

        from fsdpckpt.torch import HDF5Writer

        return HDF5Writer(*args, **options) if self.name == "ours" else dcp.FileSystemWriter(*args)

    def reader(self, *args):
        import torch.distributed.checkpoint as dcp

        from fsdpckpt.torch import HDF5Reader

        return (HDF5Reader if self.name == "ours" else dcp.FileSystemReader)(*args)

    def save(self, state, path, *, force=False, **options):
        import torch.distributed.checkpoint as dcp

        return dcp.save(state, storage_writer=self.writer(path, **({"force": True} if force else {})), **options)

    def load(self, state, path, **options):
        import torch.distributed.checkpoint as dcp

        dcp.load(state, storage_reader=self.reader(path), **options)
        return state


STORAGES = (Storage("theirs"), Storage("ours"))


class OneProcess(unittest.TestCase):
    def setUp(self):
        self.folder = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.folder)
        self.addCleanup(os.chdir, os.getcwd())
        warnings.simplefilter("ignore")

    def each(self):
        """Both storages, each in an empty directory of its own that is the current one."""
        for storage in STORAGES:
            with self.subTest(storage.name):
                folder = self.folder / storage.name
                folder.mkdir()
                os.chdir(folder)
                yield storage

    def check_trip(self, storage, state, path, **options):
        storage.save(state, path, **options)
        self.assertTrue(same(storage.load(zeroed(state), path), state))

    def test_missing_directories_above_are_made(self):
        import torch

        for storage in self.each():
            for path in ("runs/a/step-1", "runs/b/step-1/", Path("runs/c/step-1"), os.path.abspath("runs/d/e/step-1")):
                self.check_trip(storage, {"w": torch.arange(4.0)}, path)
            self.assertEqual(sorted(os.listdir("runs")), ["a", "b", "c", "d"])

    def test_a_directory_above_that_cannot_be_made(self):
        import torch

        for storage in self.each():
            Path("file").touch()
            with self.assertRaises(BaseException) as caught:
                storage.save({"w": torch.ones(1)}, "file/step-1")
            self.assertIn("file", str(caught.exception))
            self.assertEqual(os.listdir(), ["file"])
        with self.assertRaises(BaseException) as caught:
            STORAGES[1].save({"w": torch.ones(1)}, "s3://bucket/step-1")
        self.assertIn("s3://bucket/step-1: is the address of a remote storage", str(caught.exception))
        self.assertEqual(os.listdir(), ["file"])

    def test_what_is_a_checkpoint_id(self):
        ids = ("s3://bucket/a", "abc://abc.abc", "step-1", "/tmp/step-1", "/no/such/folder/step-1", Path("/no/such"), "")
        for theirs, ours in (
            (STORAGES[0].writer("x"), STORAGES[1].writer("x")),
            (STORAGES[0].reader("x"), STORAGES[1].reader("x")),
        ):
            for name in ids:
                self.assertEqual(ours.validate_checkpoint_id(name), theirs.validate_checkpoint_id(name), name)
            self.assertFalse(ours.validate_checkpoint_id(3))

    def test_ids_of_saves_and_loads(self):
        import torch

        for storage in self.each():
            writer, reader = storage.writer("step-1"), storage.reader("step-1")
            again = pickle.loads(pickle.dumps(writer))
            self.assertEqual(writer.storage_meta(), again.storage_meta())
            first = writer.save_id
            writer.reset("step-1")
            self.assertNotEqual(writer.save_id, first)
            import torch.distributed.checkpoint as dcp

            saved = dcp.save({"w": torch.ones(2)}, storage_writer=writer)
            self.assertEqual(os.fspath(saved.storage_meta.checkpoint_id), "step-1")
            self.assertEqual(saved.storage_meta.save_id, writer.save_id)
            self.assertIsNone(saved.storage_meta.load_id)
            read = reader.read_metadata().storage_meta
            self.assertEqual(os.fspath(read.checkpoint_id), "step-1")
            self.assertEqual(read.load_id, reader.load_id)
            reader.reset()
            self.assertNotEqual(read.load_id, reader.load_id)

    def test_plans_that_another_writer_has_cached(self):
        import inspect

        import torch
        import torch.distributed.checkpoint as dcp

        if "enable_plan_caching" not in inspect.signature(dcp.DefaultSavePlanner).parameters:
            self.skipTest("this PyTorch caches no plans")
        theirs, ours = STORAGES
        orders = ((theirs, theirs, ours, ours, theirs), (ours, theirs, ours, ours))
        for number, order in enumerate(orders):
            for step, storage in enumerate(order):
                for name in ("save_plan", "all_plans", "global_plan", "metadata", "final_save_plan"):
                    if step == 0:
                        getattr(dcp.SavePlanner, f"_cached_{name}").clear()
                state = {"w": torch.full((3, 2), float(step)), "n": {"step": step}}
                planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
                self.check_trip(storage, state, self.folder / f"{number}-{step}", planner=planner)


if __name__ == "__main__":
    harness.main("torch", "numpy", "ml_dtypes")
