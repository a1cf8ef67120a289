"""Several ranks that save to a bucket: the same bytes as in a directory, and the same answers as with one process. If a rank fails or dies,
nothing is visible, and the next save works."""

import os
import shutil
import signal
import sys
import tempfile
import time
import unittest
from pathlib import Path

import harness
from torch_ranks import load, plain_state, run_ranks, same, save, zeroed

import fsdpckpt

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "cli"))
import net_server
import s3_server

if not (Path(fsdpckpt.__file__).parent / "fsdpckpt" / "libfsdpckpt-net.so").exists():
    harness.skip("the build has no libcurl")

RANKS = 3
BUCKET = "s3://models/"
MARK = ".fsdpckpt-unfinished"
FORMATS = ("h5", "dcp", "pt", "safetensors")
SHARDS = [f"shard-0000{rank}-of-00003.h5" for rank in range(RANKS)]


class Bucket(s3_server.S3):
    """Refuses to complete rank 1's file below "refused", and notes what is visible before each change of "kept"."""

    def __init__(self):
        super().__init__({}, least_part=5 << 20)
        self.seen, self.strangers = [], []  # strangers: objects that the mark next to them does not list with their run

    def complete(self, handler, query, key, body):
        if key == "refused/shard-00001-of-00003.h5":
            return self.error(handler, 403, "AccessDenied")
        return super().complete(handler, query, key, body)

    def put(self, key, *rest):
        super().put(key, *rest)
        if key.startswith("large/"):
            self.seen.append(key[6:])
            line = f"{self.meta[key].get('x-amz-meta-fsdpckpt-run')} {key[6:]}".encode()
            if key[6:] != MARK and line not in self.objects["large/" + MARK].split(b"\n"):
                self.strangers.append(key)

    def remove(self, key):
        super().remove(key)
        if key.startswith("large/"):
            self.seen.append("-" + key[6:])


def large_state(start=0):
    """A shard has three parts, the last of which is small."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    rows = torch.arange(start, start + 900 * 3000, dtype=torch.float32).reshape(900, 3000)
    size = {"shape": rows.shape, "stride": rows.stride()}
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    local = rows.chunk(ranks)[rank].clone()
    return {"weight": DTensor.from_local(local, mesh, [Shard(0)], run_check=False, **size), "step": start}


class Failing:
    """A planner whose rank 1 does something when its data is asked for."""

    def __new__(cls, does):
        from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

        class Planner(DefaultSavePlanner):
            def resolve_data(self, item):
                import torch

                if torch.distributed.get_rank() == 1:
                    does()
                return super().resolve_data(item)

        return Planner()


def fail():
    raise ValueError("no data")


def refusal(state, path, **options):
    """What a save that must fail says, on each rank."""
    import torch.distributed.checkpoint as dcp

    from fsdpckpt.torch import HDF5Writer

    writer_options = {"force": options.pop("force", False)}
    try:
        dcp.save(state, storage_writer=HDF5Writer(path, **writer_options), **options)
    except dcp.api.CheckpointException as error:
        return {rank: str(failure[0]) for rank, failure in error.failures.items()}, error  # whoever keeps it keeps the writer
    raise AssertionError("it was saved")


def save_all(folder):
    import torch
    import torch.distributed.checkpoint as dcp

    from fsdpckpt.torch import HDF5Writer

    said, kept = {}, []
    state = large_state()
    for where in (f"{folder}/", BUCKET):
        save(state, where + "large")
    assert same(load(zeroed(state), BUCKET + "large"), state)
    said["exists"], _ = refusal(state, BUCKET + "large")
    newer = large_state(7)
    for where in (f"{folder}/", BUCKET):
        save(newer, where + "large", force=True)
    said["refused"], _ = refusal(state, BUCKET + "refused")
    said["failed"], error = refusal(state, BUCKET + "again", planner=Failing(fail))
    kept.append(error)
    save(state, BUCKET + "again")
    plain = plain_state()
    for where in (f"{folder}/", BUCKET):
        save(plain, where + "plain")
        for to in FORMATS:
            values = {"weight": state["weight"], "buffer": torch.arange(5.0), **({"tag": {"lr": 0.5}} if to == "pt" else {})}
            fsdpckpt.save(values if to in ("pt", "safetensors") else plain, where + "saved-" + to, to=to, progress=None)
        dcp.async_save(plain, storage_writer=HDF5Writer(where + "async")).result()
    assert same(load(zeroed(plain), BUCKET + "plain"), plain)
    torch.distributed.barrier()
    return said


def save_and_die():
    """Rank 1 is killed after it has sent its file."""
    import torch.distributed as dist

    from fsdpckpt.torch import HDF5Writer

    write = HDF5Writer.write_data

    def write_data(*arguments):
        written = write(*arguments)
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return written

    HDF5Writer.write_data = write_data
    save(large_state(), BUCKET + "dead")


def save_over_dead():
    save(large_state(), BUCKET + "dead")


class Ranks(unittest.TestCase):
    def setUp(self):
        self.bucket = Bucket()
        server = net_server.start(self.bucket.files, None, self.bucket)
        self.addCleanup(server.server_close)
        self.addCleanup(server.shutdown)
        os.environ.update({"AWS_ENDPOINT_URL": server.name, "AWS_ACCESS_KEY_ID": s3_server.KEY, "AWS_SECRET_ACCESS_KEY": s3_server.SECRET,
                           "AWS_SESSION_TOKEN": s3_server.TOKEN, "AWS_REGION": s3_server.REGION, "FSDPCKPT_NET_PACE": "1"})
        self.folder = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.folder)

    def objects(self, name):
        return {key[len(name) + 1:]: data for key, data in self.bucket.objects.items() if key.startswith(name + "/")}

    def check_same(self, name, local=None):
        files = {str(file.relative_to(local or self.folder / name)): file.read_bytes() for file in (local or self.folder / name).rglob("*")}
        self.assertEqual(sorted(self.objects(name)), sorted(files), name)
        self.assertTrue(self.objects(name) == files, name)

    def check_rank_files(self):
        """torch.save: each file has all that its rank holds, what is replicated, too."""
        import torch

        rows = []
        for rank in range(RANKS):
            values = torch.load(os.path.join(self.folder, "saved-pt", f"model_world_size_{RANKS}_rank_{rank}.pt"), weights_only=True)
            self.assertEqual((sorted(values), values["tag"]), (["buffer", "tag", "weight"], {"lr": 0.5}))
            self.assertEqual(values["buffer"].tolist(), [0, 1, 2, 3, 4])
            rows.append(values["weight"])
        self.assertTrue(torch.equal(torch.cat(rows), torch.arange(900 * 3000, dtype=torch.float32).reshape(900, 3000)))

    def test_saves(self):
        results = run_ranks(save_all, self.folder, ranks=RANKS)
        for name in ("large", "plain", "async", *("saved-" + to for to in FORMATS)):
            self.check_same(name)
        self.check_rank_files()
        self.assertEqual((self.bucket.uploads, self.bucket.wrong), ({}, []))
        self.assertEqual(list(self.objects("refused")), [MARK])
        self.assertRegex(self.objects("refused")[MARK], rb"^new\n[0-9a-f]{16} shard-00001-of-00003\.h5\n$")  # its answer may have been lost
        self.assertEqual(sorted(self.objects("again")), ["index.h5", *SHARDS])
        self.assertEqual(self.bucket.seen, 2 * [MARK, *SHARDS, "index.h5", "-" + MARK])
        self.assertEqual(self.bucket.strangers, [], "the next run knows each file by the run that the mark says")
        for said in results:
            self.assertEqual(said, results[0])
        self.assertEqual({name: list(failures) for name, failures in results[0].items()}, {"exists": [0], "refused": [0], "failed": [1]})
        self.assertIn("large: exists", results[0]["exists"][0])
        self.assertIn("refused/shard-00001-of-00003.h5: the server refuses access", results[0]["refused"][0])

    def test_a_rank_dies(self):
        with self.assertRaisesRegex(AssertionError, "failed"):
            run_ranks(save_and_die, ranks=RANKS)
        until = time.monotonic() + 20
        while self.bucket.uploads and time.monotonic() < until:
            time.sleep(0.05)
        self.assertEqual((self.bucket.objects, self.bucket.uploads), ({}, {}))  # the process that talks to servers outlives the rank
        self.bucket.uploads["of a machine that was lost"] = s3_server.Upload("dead/shard-00001-of-00003.h5", None)
        run_ranks(save_over_dead, ranks=RANKS)
        self.assertEqual((len(self.objects("dead")), self.bucket.uploads), (RANKS + 1, {}))


if __name__ == "__main__":
    harness.main("torch", "numpy")
