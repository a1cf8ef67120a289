"""Open checkpoints in other processes and directories, and memory of the caller that does not fit what is read.

Whoever reads after the files became others gets an error: never values of another checkpoint, and never more bytes than
there is memory for.
"""

import multiprocessing
import os
import pickle
import shutil
import tempfile
import threading
import unittest
from pathlib import Path

import harness

import fsdpckpt

FORMATS = ("plain.h5", "small.h5", "one.pt", "one.safetensors", "sharded-dcp", "sharded-h5")


def arrays(start):
    import numpy as np

    return {"a": np.arange(start, start + 4096, dtype="<f4").reshape(64, 64), "z": np.arange(start, start + 99, dtype="<i8")}


def write(folder, values):
    """The same values in each format."""
    plain = folder / "plain.h5"
    fsdpckpt.save(values, plain, force=True, progress=None)
    fsdpckpt.save(values, folder / "small.h5", compress=1, force=True, progress=None)
    for name in ("one.pt", "one.safetensors"):
        fsdpckpt.save(values, folder / name, force=True, progress=None)
    for kind in ("dcp", "h5"):
        fsdpckpt.reshard(plain, folder / f"sharded-{kind}", to=kind, dp=2, force=True, progress=None)


def read(tensor):
    return tensor.numpy().tobytes()


def read_whole(checkpoint):
    return {name: read(tensor) for name, tensor in checkpoint.items()}


def elsewhere(context, function, *args):
    """Runs a function in another process. Returns its result or its exception."""
    with multiprocessing.get_context(context).Pool(1) as pool:
        try:
            return pool.apply(function, args)
        except Exception as error:
            return error


def in_a_fork(function):
    """Runs a function in a forked process. Returns its result or its exception."""
    ours, theirs = multiprocessing.Pipe()
    child = os.fork()
    if child == 0:
        try:
            result = function()
        except BaseException as error:
            result = error
        theirs.send(result)
        os._exit(0)
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        return None
    finally:
        os.waitpid(child, 0)


class Workers(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.root = Path(tempfile.mkdtemp())
        cls.addClassCleanup(shutil.rmtree, cls.root)
        cls.old, cls.new = arrays(0), arrays(70_000)
        cls.wider = {name: array.astype("<f8") for name, array in cls.new.items()}
        for name, values in (("old", cls.old), ("new", cls.new), ("wider", cls.wider)):
            (cls.root / name).mkdir()
            write(cls.root / name, values)

    def setUp(self):
        self.folder = Path(tempfile.mkdtemp(dir=self.root))
        self.want = {name: array.tobytes() for name, array in self.old.items()}

    def checkpoint(self, name, state="old"):
        """A copy of a checkpoint in a folder of its own."""
        target = self.folder / name
        if target.is_dir():
            shutil.rmtree(target)
        source = self.root / state / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
        return target

    def replace(self, name, state):
        if state is None:
            path = self.folder / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            return
        if state != "rewritten":
            if not (self.folder / name).is_dir():
                (self.folder / name).unlink()
            self.checkpoint(name, state)
            return
        path = self.folder / name
        files = [path] if path.is_file() else [file for file in path.iterdir() if not file.name.startswith((".metadata", "index"))]
        for file in files:
            with file.open("r+b") as stream:  # in place, with the size that it has
                stream.write((self.root / "new" / name / file.name if path.is_dir() else self.root / "new" / name).read_bytes())

    def assert_refused(self, result, note):
        self.assertIsInstance(result, fsdpckpt.Error, note)
        self.assertNotIsInstance(result, fsdpckpt.UnsupportedError, note)

    def test_unchanged_files_are_read_everywhere(self):
        for name in FORMATS:
            with self.subTest(name), fsdpckpt.open(self.checkpoint(name)) as checkpoint:
                self.assertEqual(in_a_fork(lambda: read_whole(checkpoint)), self.want)
                self.assertEqual(in_a_fork(lambda: in_a_fork(lambda: read_whole(checkpoint))), self.want)
                self.assertEqual(read_whole(pickle.loads(pickle.dumps(checkpoint))), self.want)
        with fsdpckpt.open(self.checkpoint("plain.h5")) as checkpoint:
            self.assertEqual(elsewhere("spawn", read_whole, checkpoint), self.want)

    def test_other_files_are_refused(self):
        for name in FORMATS:
            for state in ("new", "wider", "rewritten", None):
                with self.subTest(name=name, state=state):
                    checkpoint = fsdpckpt.open(self.checkpoint(name))
                    packed, tensor = pickle.dumps(checkpoint), pickle.dumps(checkpoint["a"])
                    self.replace(name, state)
                    self.assert_refused(in_a_fork(lambda: read(checkpoint["a"])), "forked")
                    self.assert_refused(in_a_fork(lambda: checkpoint["a"][3:5]), "a part")
                    self.assert_refused(in_a_fork(lambda: checkpoint["a"].torch().sum().item()), "torch")
                    for data in (packed, tensor):
                        with self.assertRaises(fsdpckpt.Error):
                            pickle.loads(data)
                    with self.assertRaises(fsdpckpt.Error):
                        read(checkpoint["a"])
                    checkpoint.close()
                    shutil.rmtree(self.folder)
                    self.folder.mkdir()

    def test_a_spawned_process_refuses_them_too(self):
        checkpoint = fsdpckpt.open(self.checkpoint("plain.h5"))
        tensor = pickle.dumps(checkpoint["a"])
        self.replace("plain.h5", "wider")
        result = elsewhere("spawn", pickle.loads, tensor)
        self.assert_refused(result, "spawned")
        self.assertIn("replaced or changed", str(result))

    def test_a_recipe_that_was_replaced(self):
        source = harness.GOOD.parent / "recipes" / "nanogpt" / "from.safetensors"
        recipe = self.folder / "mine.json"
        shipped = fsdpckpt.recipes()["nanogpt"]
        import json

        recipe.write_text(json.dumps(shipped))
        with fsdpckpt.open(source, recipe=recipe) as checkpoint:
            name = next(iter(checkpoint))
            want = read(checkpoint[name])
            self.assertEqual(in_a_fork(lambda: read(checkpoint[name])), want)
            recipe.write_text(json.dumps({**shipped, "description": "another"}))
            self.assert_refused(in_a_fork(lambda: read(checkpoint[name])), "recipe")

    def test_another_directory(self):
        """The same relative name is another checkpoint there."""
        here = os.getcwd()
        self.addCleanup(os.chdir, here)
        other = self.folder / "other"
        other.mkdir()
        for name in FORMATS:
            with self.subTest(name):
                self.checkpoint(name)
                source = self.root / "wider" / name
                (shutil.copytree if source.is_dir() else shutil.copy)(source, other / name)
                os.chdir(self.folder)
                with fsdpckpt.open(name) as checkpoint:
                    os.chdir(other)
                    self.assertEqual(in_a_fork(lambda: read_whole(checkpoint)), self.want)
                    self.assertEqual(read_whole(pickle.loads(pickle.dumps(checkpoint))), self.want)
                    self.assertEqual(read_whole(checkpoint), self.want)
                    os.chdir(self.folder)
                    self.assertEqual(read_whole(checkpoint), self.want)

    def test_options_in_another_directory(self):
        here = os.getcwd()
        self.addCleanup(os.chdir, here)
        recipes = harness.GOOD.parent / "recipes" / "torchtitan-llama3"
        for name in ("from.safetensors", "config.json"):
            shutil.copy(recipes / name, self.folder)
        shutil.copy(self.folder / "config.json", self.folder / "nanogpt")  # which is also the name of a recipe
        for config in ("config.json", "nanogpt"):
            os.chdir(self.folder)
            with fsdpckpt.open("from.safetensors", recipe="auto", config=config) as checkpoint:
                want = read_whole(checkpoint)
                os.chdir(here)
                self.assertEqual(in_a_fork(lambda: read_whole(checkpoint)), want)
                self.assertEqual(read_whole(pickle.loads(pickle.dumps(checkpoint))), want)

    def test_another_machine_may_have_a_copy(self):
        path = self.checkpoint("plain.h5")
        checkpoint = fsdpckpt.open(path)
        reopen, (origin, proof) = checkpoint["a"].__reduce__()[1][0].__reduce__()
        shutil.copy2(path, self.folder / "copy.h5")
        os.rename(self.folder / "copy.h5", path)  # another inode, the same size and time
        with self.assertRaises(fsdpckpt.CorruptError):
            reopen(origin, proof)
        again = checkpoint.__reduce__()[0](reopen(origin, proof._replace(machine="another")))
        self.assertEqual(read_whole(again), self.want)
        os.utime(path)
        with self.assertRaises(fsdpckpt.CorruptError):
            reopen(origin, proof._replace(machine="another"))

    def test_closing_does_not_wait_for_forked_processes(self):
        for name in FORMATS:
            checkpoint = fsdpckpt.open(self.checkpoint(name))
            read(checkpoint["a"])
            release, hold = os.pipe()
            child = os.fork()
            if child == 0:
                os.close(hold)
                os.read(release, 1)
                os._exit(0)
            os.close(release)
            closing = threading.Thread(target=checkpoint.close, daemon=True)
            closing.start()
            closing.join(20)
            self.assertFalse(closing.is_alive(), name)
            os.close(hold)
            os.waitpid(child, 0)

    def test_a_fork_that_closes_it_leaves_it_to_the_parent(self):
        for name in FORMATS:
            with fsdpckpt.open(self.checkpoint(name)) as checkpoint:

                def close_and_read():
                    checkpoint.close()
                    return read(checkpoint["a"])

                self.assertIsInstance(in_a_fork(close_and_read), ValueError, name)
                self.assertEqual(read_whole(checkpoint), self.want)

    def test_data_loaders(self):
        from torch.utils.data import DataLoader

        for context in ("fork", "spawn"):
            path = self.checkpoint("small.h5")
            with fsdpckpt.open(path) as checkpoint:
                loader = DataLoader(
                    Rows(checkpoint["a"]), batch_size=8, num_workers=2, persistent_workers=True, multiprocessing_context=context
                )
                for _ in range(2):
                    rows = b"".join(batch.numpy().tobytes() for batch in loader)
                    self.assertEqual(rows, self.want["a"], context)
                self.replace("small.h5", "wider")
                with self.assertRaises(fsdpckpt.Error, msg=context):
                    list(loader)
                del loader
            if context == "fork":
                checkpoint = fsdpckpt.open(self.checkpoint("small.h5", "old"))
                loader = DataLoader(Rows(checkpoint["a"]), batch_size=8, num_workers=1, multiprocessing_context=context)
                self.replace("small.h5", "wider")
                with self.assertRaises(fsdpckpt.Error):
                    list(loader)


class Rows:
    """A dataset of the rows of a tensor."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __len__(self):
        return len(self.tensor)

    def __getitem__(self, index):
        import torch

        return torch.from_numpy(self.tensor[index])


class Targets(unittest.TestCase):
    """HDF5Reader accepts and refuses the tensors of a planner as FileSystemReader does."""

    @classmethod
    def setUpClass(cls):
        import torch
        import torch.distributed.checkpoint as dcp

        cls.root = Path(tempfile.mkdtemp())
        cls.addClassCleanup(shutil.rmtree, cls.root)
        cls.value = torch.arange(48.0).reshape(8, 6)
        dcp.save({"w": cls.value}, storage_writer=dcp.FileSystemWriter(cls.root / "dcp"), no_dist=True)

    def load(self, reader, target):
        """Loads with a planner whose target is that tensor. Returns the exception, or None."""
        from torch.distributed.checkpoint import DefaultLoadPlanner
        from torch.distributed.checkpoint.api import CheckpointException
        import torch.distributed.checkpoint as dcp
        import torch

        class Planner(DefaultLoadPlanner):
            def resolve_tensor(self, item):
                return target

            def commit_tensor(self, item, tensor):
                pass

        try:
            dcp.load({"w": torch.zeros(8, 6)}, storage_reader=reader, planner=Planner(), no_dist=True)
        except CheckpointException as error:
            return error.failures[0][0]
        return None

    def targets(self):
        import torch

        def filled(*shape, **how):
            return torch.full(shape, -1.0, **how)

        freed = filled(8, 6)
        freed.untyped_storage().resize_(0)
        return {
            "fits": filled(8, 6),
            "half": filled(8, 6, dtype=torch.float16),
            "integers": torch.full((8, 6), -1),
            "transposed": filled(6, 8).T,
            "steps": filled(8, 12)[:, ::2],
            "smaller": filled(4, 6),
            "a row": filled(1, 6),
            "one": filled(1),
            "scalar": filled(),
            "larger": filled(16, 6),
            "flat": filled(48),
            "more dimensions": filled(1, 8, 6),
            "empty": filled(0, 6),
            "freed": freed,
            "repeated": filled(1, 6).expand(8, 6),
            "no tensor": [1.0],
        }

    def test_the_same_are_refused(self):
        from torch.distributed.checkpoint import FileSystemReader

        from fsdpckpt.torch import HDF5Reader

        accepted = 0
        for name in self.targets():
            if name == "freed":  # PyTorch writes to address 0
                continue
            with self.subTest(name):
                theirs, ours = self.targets()[name], self.targets()[name]
                want = self.load(FileSystemReader(self.root / "dcp"), theirs)
                got = self.load(HDF5Reader(self.root / "dcp"), ours)
                self.assertEqual(want is None, got is None, (want, got))
                if want is None:
                    self.assertEqual(ours.tolist(), theirs.tolist())
                    accepted += 1
                elif isinstance(want, AssertionError):
                    self.assertIsInstance(got, AssertionError)
                    self.assertIsInstance(got, fsdpckpt.Error)
                    self.assertEqual(got.tensor, "w")
        self.assertEqual(accepted, 5)

    def test_a_freed_storage_is_refused(self):
        from fsdpckpt.torch import HDF5Reader

        self.assertIsInstance(self.load(HDF5Reader(self.root / "dcp"), self.targets()["freed"]), fsdpckpt.UsageError)
        with self.assertRaises(fsdpckpt.UsageError) as caught:
            fsdpckpt.save({"w": self.targets()["freed"]}, self.root / "freed.h5", progress=None)
        self.assertIn("w: its storage", str(caught.exception))

    def test_the_native_functions_compare_the_memory(self):
        import numpy as np

        handle = fsdpckpt.open(self.root / "dcp")._opened.handle()
        out = np.empty(48, "f4")
        address = out.__array_interface__["data"][0]
        handle.read(0, [0, 0], [8, 6], address, 192)
        for wrong in ((address, 191), (address, 193), (address, 0), (0, 192)):
            for call in (lambda w: handle.read(0, [0, 0], [8, 6], *w), lambda w: handle.read_many([(0, [0, 0], [8, 6], *w)], 1, 1, False)):
                with self.assertRaises(ValueError):
                    call(wrong)
        row = ("w", ("w",), "float32", None, (2, 3), [(None, None, None, 0, None)])
        with self.assertRaises(ValueError):
            fsdpckpt._native.save(str(self.root / "none.h5"), "h5", [row])


if __name__ == "__main__":
    harness.main("numpy", "ml_dtypes", "torch")
