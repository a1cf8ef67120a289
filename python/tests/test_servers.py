"""Checkpoints on servers: in threads, in forked and spawned processes, and in a process that lives longer than a version of them."""

import json
import multiprocessing
import os
import pickle
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from pathlib import Path

import harness
import numpy as np

import fsdpckpt
from fsdpckpt.pytest import assert_compatible

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "cli"))
import net_server
import s3_server

if not (Path(fsdpckpt.__file__).parent / "fsdpckpt" / "libfsdpckpt-net.so").exists():
    harness.skip("the build has no libcurl")


KNOWN = 1.1  # seconds, after which a name is asked for again


def safetensors(arrays):
    """The bytes of a file, as the format is specified."""
    header, at = {}, 0
    for name, array in arrays.items():
        header[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(array.tobytes() for array in arrays.values())


def made(start):
    """More than the fetcher reads ahead."""
    return {"a": np.arange(start, start + (1 << 19), dtype="<f4").reshape(512, 1024), "z": np.full(3, start, "<f4")}


def equal(checkpoint, arrays):
    return list(checkpoint) == list(arrays) and all(checkpoint[name].numpy().tobytes() == a.tobytes() for name, a in arrays.items())


def equal_in_child(checkpoint, start):
    return equal(checkpoint, made(start))


def die_in_child(checkpoint):
    checkpoint["a"].numpy()
    os.kill(os.getpid(), signal.SIGKILL)


WRITES = """
import fsdpckpt, numpy as np
arrays = {"w": np.arange(2_000_000, dtype="f4"), "v": np.ones((3, 5), "f2")}
names = ["s3://models/a.safetensors", "s3://models/b.pt", "s3://models/c.h5"]
fsdpckpt.save(arrays, names[0])
fsdpckpt.consolidate(names[0], names[1])
fsdpckpt.save(arrays, names[2], compress=1)
try:
    import torch.distributed.checkpoint as dcp, torch
except ImportError:
    dcp = None
if dcp:
    from fsdpckpt.torch import HDF5Reader, HDF5Writer
    names.append("s3://models/d")
    state = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
    dcp.save(state, storage_writer=HDF5Writer(names[-1]), no_dist=True)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    dcp.load(loaded, storage_reader=HDF5Reader(names[-1]), no_dist=True)
    assert all(torch.equal(loaded[name], state[name]) for name in state)
    class Broken(HDF5Writer):
        def finish(self, metadata, results):
            raise ValueError("as when another rank fails")
    kept = Broken(names[-1] + "-again/")
    try:
        dcp.save(state, storage_writer=kept, no_dist=True)
        raise AssertionError("it was saved")
    except dcp.api.CheckpointException:
        dcp.save(state, storage_writer=HDF5Writer(names[-1] + "-again"), no_dist=True)
    names.append(names[-1] + "-again")
for name in names:
    with fsdpckpt.open(name) as checkpoint:
        assert all(checkpoint[key].numpy().tobytes() == array.tobytes() for key, array in arrays.items()), name
"""


def queries_of_torch(name):
    """Uses of a URL that must fail, and what they say."""
    try:
        import torch
        import torch.distributed.checkpoint as dcp
        from fsdpckpt.torch import HDF5Reader, HDF5Writer
    except ImportError:
        return []

    class Planner(dcp.DefaultLoadPlanner):
        def resolve_tensor(self, item):
            return torch.zeros(1, 2)

    def load():
        dcp.load({"z": torch.zeros(3)}, storage_reader=HDF5Reader(name), planner=Planner(), no_dist=True)

    def save():
        dcp.save({"z": torch.zeros(3)}, storage_writer=HDF5Writer(name), no_dist=True)

    return [(load, "planner's target has the shape"), (save, "is the address of a remote storage")]


class Servers(unittest.TestCase):
    def setUp(self):
        os.environ["FSDPCKPT_NET_PACE"] = "1"
        self.arrays = made(0)
        self.server = net_server.start({"/m/model.safetensors": safetensors(self.arrays)})
        self.addCleanup(self.server.server_close)
        self.addCleanup(self.server.shutdown)
        self.name = self.server.name + "/m/model.safetensors"

    def replace(self, start):
        self.server.files["/m/model.safetensors"] = safetensors(made(start))
        return made(start)

    def test_same(self):
        for name in (self.name, self.server.name + "/m", self.server.name + "/m/"):
            with fsdpckpt.open(name) as checkpoint:
                self.assertTrue(equal(checkpoint, self.arrays))
                self.assertEqual(checkpoint["a"][5:7, 3].tobytes(), self.arrays["a"][5:7, 3].tobytes())
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / "x.safetensors"
            self.assertEqual(fsdpckpt.consolidate(self.name, target, progress=None).tensors, 2)
            self.assertTrue(equal(fsdpckpt.open(target), self.arrays))

    def test_queries(self):
        """They are not shown, because they may be secrets."""
        with fsdpckpt.open(self.name + "?sig=eCrEt") as checkpoint:
            self.assertTrue(equal(checkpoint, self.arrays))
            for text in (repr(checkpoint), repr(checkpoint.objects), checkpoint._repr_html_()):
                self.assertNotIn("eCrEt", text)
                self.assertIn("model.safetensors", text)
        checkpoint = fsdpckpt.open(self.name + "?sig=eCrEt")
        sent = pickle.dumps(checkpoint)
        self.replace(7)
        target, other = self.server.name + "/m/x.h5?sig=eCrEt", self.server.name.replace("http", "HTTP") + "/m/model.safetensors?sig=eCrEt"
        for use, says in (
            (lambda: checkpoint["a"].numpy(), "was changed"),
            (lambda: pickle.loads(sent), "was replaced or changed"),
            (lambda: fsdpckpt.open(other), "small letters"),
            (lambda: fsdpckpt.save(self.arrays, target, to="h5"), "in this place, a query"),
            (lambda: fsdpckpt.save(self.arrays, target), "does not tell the format"),
            (lambda: fsdpckpt.save({"a": np.ma.masked_array([1.0], [True])}, target), "masked array"),
            (lambda: assert_compatible(self.name + "?sig=eCrEt", {"b": self.arrays["z"]}), "is not compatible"),
            *queries_of_torch(self.name + "?sig=eCrEt"),
        ):
            with self.subTest(says):
                with self.assertRaisesRegex(BaseException, says) as caught:
                    use()
                self.assertNotIn("eCrEt", str(caught.exception))

    def test_torch(self):
        try:
            import torch
            from fsdpckpt.torch import HDF5Reader
            from torch.distributed.checkpoint import load
        except ImportError as error:
            self.skipTest(str(error))
        state = {name: torch.zeros(*a.shape) for name, a in self.arrays.items()}
        load(state, storage_reader=HDF5Reader(self.name), no_dist=True)
        self.assertTrue(all(state[name].numpy().tobytes() == a.tobytes() for name, a in self.arrays.items()))

    def test_refused(self):
        self.server.files["/m/x.h5"] = b"\x89HDF\r\n\x1a\n" + bytes(1000)
        for use, text in (
            (lambda: fsdpckpt.open(self.server.name + "/m/x.h5"), "not a readable HDF5 file"),
            (lambda: fsdpckpt.open(self.name)["a"].numpy(mmap=True), "cannot be mapped: it is on a server"),
            (lambda: fsdpckpt.save(self.arrays, self.server.name + "/new/m.safetensors"), "nothing can be written there"),
        ):
            with self.assertRaises(fsdpckpt.Error) as caught:
                use()
            self.assertIn(text, str(caught.exception))

    def test_buckets(self):
        """A process of its own, because the fetcher reads the variables once."""
        bucket = s3_server.S3({})
        server = net_server.start(bucket.files, None, bucket)
        self.addCleanup(server.server_close)
        self.addCleanup(server.shutdown)
        variables = {"AWS_ENDPOINT_URL": server.name, "AWS_ACCESS_KEY_ID": s3_server.KEY, "AWS_SECRET_ACCESS_KEY": s3_server.SECRET,
                     "AWS_SESSION_TOKEN": s3_server.TOKEN, "AWS_REGION": s3_server.REGION}
        subprocess.run([sys.executable, "-c", WRITES], env={**os.environ, **variables}, check=True, timeout=600)
        names = {"a.safetensors", "b.pt", "c.h5"}
        self.assertEqual({key for key in bucket.objects if not key.startswith("d")}, names)
        self.assertEqual((bucket.uploads, bucket.wrong), ({}, []))

    def test_threads(self):
        results = []

        def work():
            with fsdpckpt.open(self.name) as checkpoint:
                results.append(equal(checkpoint, self.arrays))

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(results, [True] * 8)

    def test_processes(self):
        """Forked ones use the process that talks to servers at the same time; the others start their own."""
        checkpoint = fsdpckpt.open(self.name)
        self.assertTrue(equal(checkpoint, self.arrays))
        directory = os.getcwd()
        os.chdir("/")  # the name of something on a server is not relative
        self.addCleanup(os.chdir, directory)
        fork = multiprocessing.get_context("fork")
        dying = fork.Process(target=die_in_child, args=(checkpoint,))
        dying.start()
        with fork.Pool(4) as pool:
            self.assertEqual(pool.starmap(equal_in_child, [(checkpoint, 0)] * 8), [True] * 8)
        dying.join()
        self.assertEqual(dying.exitcode, -9)
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            self.assertEqual(pool.starmap(equal_in_child, [(checkpoint, 0)]), [True])
        self.assertTrue(equal(checkpoint, self.arrays))

    def test_suspended(self):
        """A reader that does not take its data holds up no other one, and gets it later."""
        arrays = {"a": np.arange(4 << 20, dtype="<f4"), "z": self.arrays["z"]}  # more than sockets hold
        self.server.files["/m/large.safetensors"] = safetensors(arrays)
        large = fsdpckpt.open(self.server.name + "/m/large.safetensors")
        asked, stopped = threading.Event(), threading.Event()

        def answer(handler):
            if handler.path == "/m/large.safetensors":
                asked.set()
                stopped.wait(30)

        self.server.answer = answer
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            os._exit(not equal(large, arrays))
        self.assertTrue(asked.wait(30))
        os.kill(child, signal.SIGSTOP)
        stopped.set()
        time.sleep(0.3)
        results = []
        other = threading.Thread(target=lambda: results.append(equal(fsdpckpt.open(self.name), self.arrays)), daemon=True)
        other.start()
        other.join(20)
        os.kill(child, signal.SIGCONT)
        self.assertEqual(results, [True])
        self.assertEqual(os.waitpid(child, 0)[1], 0)

    def test_interrupted(self):
        """Ctrl-C while a server is silent ends a call at once, whatever it does; the next call works."""
        silent = threading.Event()
        self.addCleanup(silent.set)
        tensor = fsdpckpt.open(self.name)["a"]
        name, large = self.server.name + "/m/second.safetensors", self.server.name + "/m/large.safetensors"
        self.server.files["/m/second.safetensors"] = self.server.files["/m/large.safetensors"] = safetensors(made(1))
        checkpoint = fsdpckpt.open(large)
        self.server.answer = lambda handler: silent.wait(60) and False
        for use in (tensor.numpy, lambda: tensor[3:400], lambda: fsdpckpt.open(name), lambda: fsdpckpt.load(large), lambda: checkpoint["a"].numpy(),
                    lambda: fsdpckpt.consolidate(large, "never.safetensors", progress=None)):
            timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
            began = time.monotonic()
            timer.start()
            with self.assertRaises(KeyboardInterrupt):
                use()
            self.assertLess(time.monotonic() - began, 10)
        silent.set()
        self.server.answer = None
        self.assertTrue(equal(fsdpckpt.open(self.name), self.arrays))
        self.assertTrue(equal(fsdpckpt.open(name), made(1)))

    def test_killed_while_it_is_asked(self):
        """The address of a host is asked of one who waits for it. If that one is killed, it is asked of another."""
        os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"
        self.addCleanup(os.environ.pop, "RES_OPTIONS")
        self.assertTrue(equal(fsdpckpt.open(self.name), self.arrays))
        name = "https://no-such-host/model.safetensors"
        with tempfile.TemporaryDirectory() as folder:
            pipe = os.path.join(folder, "aliases")
            os.mkfifo(pipe)
            child = os.fork()
            if child == 0:
                os.environ["HOSTALIASES"] = pipe  # a file that libc reads, here without an end
                fsdpckpt.open(name)
                os._exit(1)
            time.sleep(0.3)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        signal.alarm(30)
        with self.assertRaisesRegex(fsdpckpt.SystemFailure, "no address was found"):
            fsdpckpt.open(name)
        signal.alarm(0)

    def test_fork_while_it_starts(self):
        """Children that are forked while another thread starts the process that talks to servers can use it, too."""
        with tempfile.TemporaryDirectory() as folder:
            local = Path(folder) / "x.safetensors"
            local.write_bytes(safetensors({"a": np.zeros(1, "<f4")}))
            program = (
                "import os, signal, sys, threading, fsdpckpt\n"
                "fsdpckpt.open(sys.argv[1])\n"  # imports what Python would import with a lock
                "first = threading.Thread(target=fsdpckpt.open, args=sys.argv[2:])\n"
                "first.start()\n"
                "children = []\n"
                "for _ in range(30):\n"
                "    children.append(os.fork())\n"
                "    if children[-1] == 0:\n"
                "        signal.alarm(30)\n"
                "        fsdpckpt.open(sys.argv[2])\n"
                "        os._exit(0)\n"
                "first.join()\n"
                "sys.exit(any([os.waitpid(child, 0)[1] for child in children]))\n"
            )
            for _ in range(3):
                subprocess.run([sys.executable, "-c", program, local, self.name], check=True)

    def test_another_version(self):
        """An open checkpoint never has bytes of another version; opened again, it is that one."""
        checkpoint = fsdpckpt.open(self.name)
        sent = pickle.dumps(checkpoint)
        arrays = self.replace(7)
        with self.assertRaisesRegex(fsdpckpt.CorruptError, "was changed"):
            checkpoint["a"].numpy()
        self.assertTrue(equal(fsdpckpt.open(self.name), arrays))
        with self.assertRaisesRegex(fsdpckpt.CorruptError, "was replaced"):
            checkpoint["a"].numpy()
        with self.assertRaisesRegex(fsdpckpt.CorruptError, "was replaced or changed"):
            pickle.loads(sent)

    def test_later(self):
        """What was missing, or on a server that was down, can be opened later."""
        later = self.server.name + "/m/later.safetensors"
        with self.assertRaises(fsdpckpt.NotFoundError):
            fsdpckpt.open(later)
        self.server.files["/m/later.safetensors"] = safetensors(self.arrays)
        time.sleep(KNOWN)
        self.server.faults["/m/later.safetensors"] = ["500"] * 6
        with self.assertRaisesRegex(fsdpckpt.SystemFailure, "gave up after 6 attempts"):
            fsdpckpt.open(later)
        time.sleep(KNOWN)
        self.assertTrue(equal(fsdpckpt.open(later), self.arrays))


if __name__ == "__main__":
    harness.main("numpy")
