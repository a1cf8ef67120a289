#!/usr/bin/env python3
"""Deltas in buckets: written there, they equal those on a disk, byte for byte, each byte is sent once, and no file is made here. They are
read there by every command that reads deltas."""

import glob
import os
import signal
import subprocess
import threading
import time
import unittest

from harness import BINARY, HANG
from s3_server import BUCKET
from test_net import made, safetensors
from test_net_targets import Targets

UPDATES = "s3://%s/up dates" % BUCKET
TARGET = UPDATES + "/weight_v000007"
PREFIX = "up dates/weight_v000007"
# Their names are in another order than their sizes. In a delta of 11.6 MB, parts end in the middle of frames, and wait for earlier ones.
SIZES = {"b": 4 << 20, "a.9": 1 << 20, "a.10": 4 << 20, "c.0": 2 << 20, "c.1": 300, "d": 40 << 10, "e": 0}


class Deltas(Targets):
    def setUp(self):
        super().setUp()
        self.old = {name: made.randbytes(size) for name, size in SIZES.items()}
        self.old_path = self.model("old", self.old)

    def model(self, folder, tensors):
        """A model of one file in a folder."""
        path = os.path.join(self.dir, folder)
        os.makedirs(path, exist_ok=True)
        with open(os.path.join(path, "model.safetensors"), "wb") as f:
            f.write(safetensors({name: ("U8", [len(data)], data) for name, data in tensors.items()}))
        return path

    def changed(self, folder, *names, each=1):
        """The old model, with every byte of some tensors changed, or every 100th one."""
        changed = dict(self.old)
        for name in names:
            data = bytearray(changed[name])
            data[::each] = made.randbytes(len(data[::each]))
            changed[name] = bytes(data)
        return self.model(folder, changed)

    def chain(self, *more):
        """Three versions on the disk. @return their folder and the models"""
        updates, models = os.path.join(self.dir, "updates"), [self.old_path]
        os.mkdir(updates)
        for i, names in enumerate((("a.9", "d"), ("c.1", "a.9"), ("d", "a.10"))):
            models.append(self.changed("model-%d" % i, *names, each=3))
            subprocess.run([BINARY, "delta", *models[-2:], "-o", "%s/weight_v%06d" % (updates, i + 1), "-q", *more], check=True)
        return updates, models

    def upload(self, folder, key):
        for path in filter(os.path.isfile, glob.glob(folder + "/**", recursive=True, include_hidden=True)):
            with open(path, "rb") as f:
                self.s3.put(key + path[len(folder):], f.read())


class Same(Deltas):
    def test_same(self):
        """Of each size, with each encoding, with several threads, and in little memory, where they wait for each other."""
        all_changed, few = self.changed("all", *self.old), self.changed("few", "a.10", "c.1", "b", each=100)
        for i, (new, *more) in enumerate((
                [all_changed, "-j", "2"], [all_changed, "-j", "4", "--memory", "1MiB"], [few], [few, "--encoding", "overwrite", "-j", "3"],
                [few, "--level", "3", "--checksum", "adler32"],
                [self.changed("small", "c.1")], [self.old_path], [few, "--include", "c.*"])):
            with self.subTest(more=more, new=os.path.basename(new)):
                where = "u%d/weight_v000003" % i
                self.same("delta", self.old_path, new, *more, target="s3://%s/%s" % (BUCKET, where), prefix=where)

    def test_parts(self):
        """Only the first part is held back: the others are sent as they are made."""
        self.command("delta", self.old_path, self.changed("all", *self.old), "-o", TARGET, "-q", "-j", "2")
        sent = [name for name, key in self.s3.log if key.endswith(".safetensors")]
        self.assertEqual(sent, ["begin", "part", "part", "part", "complete"])
        shown = [key for name, key in self.s3.log if name in ("complete", "whole")]
        self.assertEqual((shown[1][-11:], shown[-1]), ("safetensors", PREFIX + "/model.safetensors.index.json"))

    def test_from_bucket_to_bucket(self):
        new = self.changed("new", "b", "c.0", each=3)
        self.upload(self.old_path, "old")
        self.upload(new, "new")
        self.command("delta", "s3://%s/old" % BUCKET, "s3://%s/new" % BUCKET, "-o", TARGET, "-q")
        self.assertEqual(self.objects(PREFIX), self.local("delta", self.old_path, new, name="weight_v000007"))

    def test_fold(self):
        for encoding in ("xor", "overwrite"):
            with self.subTest(encoding):
                updates, _ = self.chain("--encoding", encoding)
                self.upload(updates, encoding)
                where = encoding + " folded/weight_v000003"
                self.same("fold", updates, "--memory", "256MiB", target="s3://%s/%s" % (BUCKET, where), prefix=where)
                self.command("fold", "s3://%s/%s" % (BUCKET, encoding), "-o", TARGET[:-1] + "3", "-q", "--force", "--memory", "256MiB", "-j", "3")
                self.assertEqual(self.objects(PREFIX[:-1] + "3"), self.local("fold", updates, name="weight_v000003"))
                os.rename(updates, updates + encoding)

    def test_few_requests(self):
        """Each frame is one request, however many pieces it is decoded in, and the heads of all are asked for at once."""
        updates, models = self.chain()
        self.upload(updates, "u")
        there, self.s3.requests = "s3://%s/u" % BUCKET, 0
        self.command("fold", there, "-o", TARGET[:-1] + "3", "-q", "-j", "1")
        self.assertLess(self.s3.requests, 26)
        for name, arguments in (("verify", [there]), ("diff", ["--data", models[0], models[3], "--delta", there]), ("apply", [there, models[0]])):
            self.s3.requests = 0
            self.command(name, *arguments, "-j", "1")
            self.assertLess(self.s3.requests, 26, name)

    def test_publish_and_follow(self):
        """A trainer publishes three versions. An engine looks at them, and reads its model with them, or follows in place."""
        updates, models = self.chain()
        for i in range(3):
            self.command("delta", *models[i:i + 2], "-o", "%s/weight_v%06d" % (UPDATES, i + 1), "-q")
        for command in ("inspect", "check", "verify"):
            self.command(command, UPDATES)
        self.command("verify", models[0], "--delta", UPDATES)
        self.command("diff", "--data", models[0], models[2], "--delta", UPDATES, "--up-to", "2")
        self.command("apply", UPDATES, models[0], "-q")
        with open(models[0] + "/model.safetensors", "rb") as a, open(models[3] + "/model.safetensors", "rb") as b:
            self.assertEqual(a.read(), b.read())
        self.upload(models[1], "engine")
        told = self.command("apply", updates, "s3://%s/engine" % BUCKET, status=5)
        self.assertIn("download", told)


class Refused(Deltas):
    def test_refused(self):
        new = self.changed("all", *self.old)
        for status, words, more in ((5, "choose xor or overwrite", ["--encoding", "auto"]),
                                    (2, "tensor a.10: on the way", ["--encoding", "overwrite", "-j", "1"])):
            self.assertIn(words, self.command("delta", self.old_path, new, "-o", TARGET, "-q", *more, status=status))
        self.assertEqual((self.s3.objects, self.s3.uploads), ({}, {}))

    def test_existing(self):
        few, more = self.changed("few", "c.1"), self.changed("more", "b", "c.1")
        self.command("delta", self.old_path, more, "-o", TARGET, "-q")
        self.assertIn("exists", self.command("delta", self.old_path, few, "-o", TARGET, status=2))
        self.command("delta", self.old_path, few, "-o", TARGET, "-q", "--force")
        self.assertEqual(self.objects(PREFIX), self.local("delta", self.old_path, few, name="weight_v000007"))
        self.command("delta", self.old_path, self.old_path, "-o", TARGET, "-q", "--force")
        self.assertEqual(list(self.objects(PREFIX)), ["/model.safetensors.index.json"])

    def test_a_failing_worker_ends_the_others(self):
        """In little memory, where all others wait for the first tensor: its part is refused, or its bytes are missing."""
        new = self.changed("all", *self.old)
        self.s3.faults = {"part": ["403:AccessDenied"]}
        self.assertEqual(self.command("delta", self.old_path, new, "-o", TARGET, "-q", "-j", "4", "--memory", "1MiB", status=4).count("\n"), 1)
        self.s3.faults = {}
        run = self.start("delta", self.old_path, new, "-o", TARGET, "-q", "-j", "4", "--memory", "1MiB")
        once = iter([signal.SIGINT])
        self.s3.each = lambda number: [(run.send_signal(s), time.sleep(0.1)) for s in once] if self.s3.uploads else None
        told = run.communicate(timeout=HANG)[1]
        self.assertEqual((run.returncode, self.s3.objects, self.s3.uploads), (130, {}, {}), told)

    def test_killed(self):
        """Before each of the last requests, which make it visible. The next run leaves no trace of that."""
        new = self.changed("all", *self.old)
        expected = self.local("delta", self.old_path, new, name="weight_v000007")
        self.command("delta", self.old_path, new, "-o", TARGET, "-q")
        requests = self.s3.requests
        for n in range(requests - 6, requests + 1, 3):
            for key in list(self.s3.objects):
                self.s3.remove(key)
            self.s3.requests, killed = 0, threading.Event()
            self.s3.each = lambda number, n=n, killed=killed: (run.send_signal(signal.SIGKILL), killed.set(), time.sleep(0.05)) if number >= n else None
            run = self.start("delta", self.old_path, new, "-o", TARGET, "-q")
            run.communicate(timeout=HANG)
            time.sleep(0.1)
            self.assertTrue(killed.is_set())
            self.s3.each = lambda number: None
            self.command("delta", self.old_path, new, "-o", TARGET, "-q", *(["--force"] if self.objects(PREFIX) == expected else []))
            self.assertEqual((self.objects(PREFIX), self.s3.uploads), (expected, {}))


if __name__ == "__main__":
    unittest.main()
