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

import logging
import os
import pickle
import shutil
import signal
import tempfile
import time
import unittest
import warnings
from pathlib import Path

import harness
from torch_ranks import run_ranks, same, zeroed


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
        logging.disable()  # that there is no checkpoint of all ranks
        self.addCleanup(logging.disable, logging.NOTSET)

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
            STORAGES[1].save({"w": torch.ones(1)}, "abfs://bucket/step-1")
        self.assertIn("abfs://bucket/step-1: is the address of a remote storage", str(caught.exception))
        self.assertEqual(os.listdir(), ["file"])

    def test_states_without_values(self):
        import torch

        import fsdpckpt

        for storage in self.each():
            for number, state in enumerate(({}, {"o": {}}, {"model": Stateless()}, {"w": torch.ones(2), "o": {}}, {"l": []})):
                saved = storage.save(state, f"step-{number}")
                self.assertEqual(list(saved.state_dict_metadata), {3: ["w"], 4: ["l"]}.get(number, []))
                loaded = storage.load(zeroed(state) if number != 2 else state, f"step-{number}")
                self.assertEqual(list(loaded), list(state))
                self.assertEqual(Stateless.loaded, 1 if number == 2 else 0)
                Stateless.loaded = 0
                for missing in ({"x": torch.ones(1)}, {"x": 1}):
                    with self.assertRaisesRegex(BaseException, "Missing key in checkpoint state_dict: x"):
                        storage.load(missing, f"step-{number}")
        self.assertEqual(list(fsdpckpt.open("step-0")), [])
        self.assertTrue(fsdpckpt.verify("step-0", progress=None).ok)

    def test_files_of_others_are_kept(self):
        import torch

        state = {"w": torch.arange(6.0).reshape(2, 3), "step": 1}
        for storage in self.each():
            os.makedirs("step-1/logs/deep/empty")
            for name in ("train_state.json", "logs/a.txt", "logs/deep/b.bin", ".hidden"):
                Path("step-1", name).write_text(f"content of {name}")
            os.chmod("step-1/.hidden", 0o600)
            os.chmod("step-1/logs/deep", 0o700)
            os.symlink("nowhere", "step-1/link")
            before = foreign("step-1")
            with open("step-1/train_state.json", "a") as file:
                self.check_trip(storage, state, "step-1")
                file.write(", and more")
            self.assertEqual(Path("step-1/train_state.json").read_text(), "content of train_state.json, and more")
            os.truncate("step-1/train_state.json", len("content of train_state.json"))
            self.assertEqual(foreign("step-1"), before)
            state["w"] += 1
            modes = {name: os.stat(f"step-1/{name}").st_mode for name in os.listdir("step-1") if name.endswith(".h5")}
            self.check_trip(storage, state, "step-1", force=True)
            self.assertEqual(foreign("step-1"), before)
            self.assertEqual(modes, {name: os.stat(f"step-1/{name}").st_mode for name in modes})
            self.assertEqual(os.listdir(), ["step-1"])

    def test_files_of_others_that_come_during_a_save(self):
        import torch
        import torch.distributed.checkpoint as dcp

        class Planner(dcp.DefaultSavePlanner):
            def resolve_data(self, item):
                os.makedirs("step-1/logs", exist_ok=True)
                Path("step-1/train_state.json").write_text("{}")
                Path("step-1/logs/a").write_text("a")
                return super().resolve_data(item)

        for storage in self.each():
            self.check_trip(storage, {"w": torch.arange(3.0)}, "step-1", planner=Planner())
            self.assertEqual(sorted(foreign("step-1")), ["logs", "logs/a", "train_state.json"])

    def test_files_of_others_without_room_for_them(self):
        import torch
        import torch.distributed.checkpoint as dcp

        ours = STORAGES[1]
        path = self.folder / "step-1"
        path.mkdir()
        asked = []

        class Planner(dcp.DefaultSavePlanner):
            def resolve_data(self, item):
                asked.append(item)
                return super().resolve_data(item)

        def refuses(name):
            for force in (False, True):
                with self.assertRaisesRegex(BaseException, f"step-1/{name}: replacing it would delete .*move it away"):
                    ours.save({"w": torch.ones(2)}, path, force=force, planner=Planner())
            self.assertEqual(asked, [], "data was read before the save was refused")
            self.assertEqual(os.listdir(self.folder), ["step-1"])

        for name in ("index.h5", "shard-00000-of-00001.h5"):
            (path / name).write_text("notes of somebody")
            refuses(name)
            self.assertEqual((path / name).read_text(), "notes of somebody")
            (path / name).unlink()
            (path / name).mkdir()
            (path / name / "a").touch()
            refuses(name)
            shutil.rmtree(path / name)
            os.symlink("nowhere", path / name)
            refuses(name)
            (path / name).unlink()
        ours.save({"w": torch.ones(2)}, path)
        (path / "notes").touch()
        with self.assertRaisesRegex(BaseException, "exists; force=True replaces it"):
            ours.save({"w": torch.ones(2)}, path)
        self.assertEqual(sorted(os.listdir(path)), ["index.h5", "notes", "shard-00000-of-00001.h5"])

    def test_a_save_that_is_killed_loses_no_file(self):
        import torch

        ours = STORAGES[1]
        path = self.folder / "step-1"
        ours.save({"w": torch.ones(2)}, path)
        (path / "train_state.json").write_text("{}")
        for turn in range(30):
            child = os.fork()
            if child == 0:
                while True:
                    ours.save({"w": torch.zeros(2)}, path, force=True)
            time.sleep(0.05 + turn * 0.004)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            self.assertEqual((path / "train_state.json").read_text(), "{}")
            self.assertEqual(ours.load({"w": torch.ones(2)}, path)["w"].sum().item() % 2, 0)
        ours.save({"w": torch.full((2,), 5.0)}, path, force=True)
        self.assertEqual(os.listdir(self.folder), ["step-1"])
        self.assertEqual((path / "train_state.json").read_text(), "{}")

    def test_without_collectives(self):
        import torch

        import fsdpckpt

        for storage in self.each():
            self.check_trip(storage, {"w": torch.arange(3.0), "inner": {"n": 5}}, "runs/step-1", use_collectives=False)
        for number, results in enumerate(zip(*(run_ranks(save_alone, storage, self.folder, ranks=2) for storage in STORAGES))):
            self.assertEqual(*results, f"rank {number}")
        # Both kinds of checkpoint in one directory would hide each other.
        ours = STORAGES[1]
        ours.save({"w": torch.ones(2)}, "step-1")
        with self.assertRaisesRegex(BaseException, "step-1: has a checkpoint of all ranks"):
            ours.save({"w": torch.ones(2)}, "step-1", use_collectives=False)
        with fsdpckpt.open(self.folder / "ours/runs/step-2/rank-00001") as part:
            self.assertEqual(part["model.rows[4:7, 0:3]"].shape, (3, 3))

    def test_chunks_that_are_no_shards_of_a_mesh(self):
        import fsdpckpt

        for results in zip(*(run_ranks(save_odd_chunks, storage, self.folder, ranks=3) for storage in STORAGES)):
            self.assertEqual(*results)
        path = self.folder / "ours" / "odd"
        self.assertTrue(fsdpckpt.verify(path, progress=None).ok)
        with fsdpckpt.open(path) as checkpoint:
            self.assertEqual(checkpoint["deep.odd[0:4]"].shape, (4,))
            self.assertEqual(checkpoint["rows"].shape, (9, 2))

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
                if step == 0:
                    drop_cached_plans()
                state = {"w": torch.full((3, 2), float(step)), "n": {"step": step}}
                planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
                self.check_trip(storage, state, self.folder / f"{number}-{step}", planner=planner)
        # Chunks that are no shards of a mesh are stored as tensors of their own, which is in the plans of our saves only.
        theirs, ours = "theirs", "ours"
        for order in ((ours, theirs, theirs, ours), (theirs, ours, theirs)):
            run_ranks(save_odd_chunks_in_turn, order, self.folder / "-".join(order), ranks=2)


def save_alone(storage, folder):
    """Ranks that save and load parts, whole tensors and objects without collectives. Returns what they know and get."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    rank, path = dist.get_rank(), folder / storage.name / "runs" / "step-2"
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    state = {
        "model": {
            "rows": distribute_tensor(torch.randn(7, 3), mesh, [Shard(0)]),
            "columns": distribute_tensor(torch.randn(2, 6).to(torch.bfloat16), mesh, [Shard(1)]),
            "one": distribute_tensor(torch.randn(1, 4), mesh, [Shard(0)]),
            "copy": distribute_tensor(torch.randn(4), mesh, [Replicate()]),
        },
        "own": torch.full((2,), float(rank)),
        "list": [torch.ones(2) * rank, {"n": rank}],
        f"only.{rank}": rank,
        "step": 7,
    }
    for _ in range(2):
        # 2 is what plans of another save would break; FileSystemWriter overwrites as HDF5Writer does with force.
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        saved = storage.save(state, path, force=True, use_collectives=False, planner=planner)
        loaded = storage.load(zeroed(state), path)
        assert same(loaded, state), (loaded, state)
    reader = storage.reader(path)
    read = reader.read_metadata(rank=rank)
    sizes = {name: (value.size, value.chunks) for name, value in read.state_dict_metadata.items() if hasattr(value, "size")}
    assert saved.state_dict_metadata.keys() == read.state_dict_metadata.keys()
    return sizes, read.planner_data, sorted(saved.state_dict_metadata)


def drop_cached_plans():
    import torch.distributed.checkpoint as dcp

    for name in ("save_plan", "all_plans", "global_plan", "metadata", "final_save_plan"):
        getattr(dcp.SavePlanner, f"_cached_{name}").clear()


def save_odd_chunks_in_turn(order, folder):
    """The two storages save chunks of other sizes on each rank, one after the other, with planners that cache their plans."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed._shard.sharded_tensor import Shard, init_from_local_shards

    rank = dist.get_rank()
    storages = {storage.name: storage for storage in STORAGES}
    drop_cached_plans()

    def odd(value):
        offset, size = ((0, 4), (4, 1))[rank]
        return init_from_local_shards([Shard.from_tensor_and_offsets(torch.arange(size) + value, [offset], rank)], 5)

    for step, name in enumerate(order):
        path = folder / str(step)
        if rank == 0:
            os.makedirs(folder, exist_ok=True)
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        state = {"deep": {"odd": odd(10 * step)}, "w": torch.full((2,), float(step)), "step": step}
        storages[name].save(state, path, planner=planner)
        again = {"deep": {"odd": odd(-1)}, "w": torch.zeros(2), "step": -1}
        storages[name].load(again, path)
        want, got = (x["deep"]["odd"].local_shards()[0].tensor for x in (state, again))
        assert torch.equal(want, got), (step, name, want, got)
        assert torch.equal(again["w"], state["w"]) and again["step"] == step, (step, name, again)


def save_odd_chunks(storage, folder):
    """ShardedTensors of any chunks, loaded as they are, in other chunks, and whole."""
    import torch
    import torch.distributed as dist
    from torch.distributed._shard.sharded_tensor import Shard, init_from_local_shards

    rank, path = dist.get_rank(), folder / storage.name / "odd"

    def sharded(whole, boxes):
        """`boxes`: the rank, offsets and sizes of each."""
        shards = []
        for owner, offsets, sizes in boxes:
            part = whole[tuple(slice(o, o + n) for o, n in zip(offsets, sizes))].clone()
            if owner == rank:
                shards.append(Shard.from_tensor_and_offsets(part, offsets, rank))
        return init_from_local_shards(shards, *whole.shape)

    odd = torch.arange(5.0), [(0, [0], [4]), (2, [4], [1])]
    other = odd[0], [(0, [0], [1]), (1, [1], [1]), (2, [2], [3])]
    # As embedding tables are: several chunks on a rank, and of other sizes on each.
    boxes = [(1, [0, 0], [3, 4]), (2, [3, 0], [7, 1]), (1, [3, 1], [7, 3])]
    table = torch.arange(40.0).reshape(10, 4).to(torch.bfloat16), boxes
    rows = torch.arange(18).reshape(9, 2), [(r, [3 * r, 0], [3, 2]) for r in range(3)]
    state = {"deep": {"odd": sharded(*odd)}, "table": sharded(*table), "rows": sharded(*rows)}
    state.update(copy=torch.ones(2), step=3)
    saved = storage.save(state, path)
    for boxes in (odd, other):
        again = {"deep": {"odd": sharded(torch.zeros(5), boxes[1])}, "table": sharded(table[0] * 0, table[1]), "step": 0}
        storage.load(again, path)
        for want, got in ((sharded(*boxes), again["deep"]["odd"]), (state["table"], again["table"])):
            for a, b in zip(want.local_shards(), got.local_shards()):
                assert torch.equal(a.tensor, b.tensor), (a.tensor, b.tensor)
        assert again["step"] == 3
    whole = storage.load({"deep": {"odd": torch.zeros(5)}, "table": torch.zeros(10, 4), "copy": torch.zeros(2)}, path)
    assert torch.equal(whole["deep"]["odd"], odd[0]) and torch.equal(whole["table"], table[0].float()), whole
    read = storage.reader(path).read_metadata()
    return sorted(read.state_dict_metadata), read.planner_data, sorted(saved.state_dict_metadata)


class Stateless:
    """An object with a state dict that is empty."""

    loaded = 0

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        assert state == {}
        Stateless.loaded += 1


def foreign(path):
    """What is known of the files of a directory that neither storage writes."""
    found = {}
    for folder, folders, files in os.walk(path):
        for name in folders + files:
            full = os.path.join(folder, name)
            if folder == path and (name.endswith((".distcp", ".h5")) or name == ".metadata"):
                continue
            status = os.lstat(full)
            content = None if os.path.islink(full) or os.path.isdir(full) else Path(full).read_text()
            found[os.path.relpath(full, path)] = status.st_mode, content, os.path.islink(full) and os.readlink(full)
    return found


if __name__ == "__main__":
    harness.main("torch", "numpy", "ml_dtypes")
