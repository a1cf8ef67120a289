#!/usr/bin/env python3
"""--resume with targets in buckets. A run that is killed leaves uploads and a journal, and the next one sends the rest. The result equals the
target of a run without a fault, and the bucket keeps nothing else."""

import os
import random
import signal
import threading
import time
import unittest

from harness import HANG
from s3_server import BUCKET
from test_net import made, safetensors
from test_net_targets import PART, PREFIX, TARGET, Targets

JOURNAL = os.path.join(os.path.dirname(PREFIX), ".7.fsdpckpt-resume")
WHOLE = ("s3://%s/in" % BUCKET, "in/model.safetensors")


class Resume(Targets):
    def put_source(self, tensors, elements=3500):
        path = os.path.join(self.dir, "source.safetensors")
        with open(path, "wb") as f:
            f.write(safetensors({"model.%d" % i: ("F32", [elements, 256], made.randbytes(elements << 10)) for i in range(tensors)}))
        return path

    def kill_when(self, reached, *arguments):
        """Starts a command, and kills it when `reached` says so of a request, before it is answered. @return whether it did"""
        killed, real = threading.Event(), self.s3.operation

        def look(handler, query):
            name = real(handler, query)
            if not killed.is_set() and reached(name):
                killed.set()
                run.send_signal(signal.SIGKILL)
                time.sleep(0.05)
            return name

        run = self.start(*arguments)
        self.s3.operation = look
        run.communicate(timeout=HANG)
        self.s3.operation = real
        time.sleep(0.1)  # a request may still be in the fetcher
        return killed.is_set()

    def stored(self):
        """The bytes of all parts of unfinished uploads."""
        return sum(len(body) for upload in list(self.s3.uploads.values()) for _, body in list(upload.parts.values()))

    def kill_at(self, part, total, *arguments):
        """Kills a command when it sends a part, and the bucket has this part of `total` bytes."""
        return self.kill_when(lambda name: name == "part" and self.stored() >= part * total, *arguments)

    def clean(self):
        for key in list(self.s3.objects):
            if not key.startswith("in/"):
                self.s3.remove(key)
        self.s3.uploads.clear()
        self.s3.log.clear()

    def sent(self):
        return sum(1 for name, _ in self.s3.log if name == "part")

    def check(self, expected):
        self.assertEqual((self.objects(), self.s3.uploads), (expected, {}))
        self.assertNotIn(JOURNAL, self.s3.objects)

    def finish(self, expected, *arguments):
        told = self.command(*arguments)
        self.check(expected)
        return told


class Going(Resume):
    def test_moves_the_rest(self):
        """After a kill at 90 % of the bytes, at most 15 % are read and sent again."""
        source = self.put_source(24)
        total = os.path.getsize(source)
        with open(source, "rb") as f:
            self.s3.put(WHOLE[1], f.read())
        for to in ("pt", "h5"):
            with self.subTest(to):
                arguments = ["consolidate", WHOLE[0], "--to", to, "-o", TARGET, "-q", "--resume", "--jobs", "1", "--memory", "16MiB"]
                expected = self.local("consolidate", source, "--to", to)
                self.clean()
                self.assertTrue(self.kill_at(0.9, total, *arguments))
                self.assertEqual(set(self.objects("a folder")), {"/.7.fsdpckpt-resume"})
                self.assertTrue(self.s3.uploads)
                self.s3.log.clear()
                self.s3.received = 0
                self.finish(expected, *arguments)
                self.assertLess(self.s3.received, 0.15 * total, to)
                self.assertLess(self.sent() * PART, 0.15 * total + PART)

    def test_every_format_and_layout(self):
        source = self.put_source(6)
        total = os.path.getsize(source)
        for i, arguments in enumerate((
                ["consolidate", source, "--to", "safetensors", "--max-shard-size", "8MB"], ["consolidate", source, "--to", "torch_dist"],
                ["consolidate", source, "--to", "fsdp_dtensor"], ["reshard", source, "--to", "h5", "--dp", "3"],
                ["reshard", source, "--to", "pt", "--dp", "2"], ["reshard", source, "--to", "dcp", "--dp", "3"],
                ["reshard", source, "--to", "safetensors", "--dp", "2"], ["consolidate", source, "--to", "h5", "--dtype", "f16"],
                ["consolidate", source, "--to", "pt"])):
            with self.subTest(" ".join(arguments[2:])):
                expected = self.local(*arguments)
                whole = sum(size for size, _ in expected.values())
                command = [*arguments, "-o", TARGET, "-q", "--resume"]
                self.clean()
                for part in (0.3, 0.6):
                    self.kill_at(part, min(whole, total), *command)
                if not self.objects():
                    self.command(*command)
                self.check(expected)

    def test_killed_by_chance(self):
        """Any number of times, at any request."""
        source = self.put_source(8)
        arguments = ["consolidate", source, "--to", "dcp", "-o", TARGET, "-q", "--resume"]
        expected = self.local("consolidate", source, "--to", "dcp")
        chance = random.Random(7)
        for _ in range(3):
            self.clean()
            while True:
                last = self.s3.requests + chance.randrange(1, 24)
                if not self.kill_when(lambda _, last=last: self.s3.requests >= last, *arguments):
                    break
            self.assertEqual(self.objects(), expected)
            self.finish(expected, *arguments, "--force")  # the last run that was killed may have left uploads next to a complete target

    def test_a_refusal(self):
        """A run that fails keeps what it has sent, and says so."""
        source = self.put_source(8)
        arguments = ["consolidate", source, "--to", "dcp", "-o", TARGET, "--resume"]
        self.s3.faults = {"part": ["none"] * 5 + ["always-403:AccessDenied"]}
        told = self.command(*arguments, status=4)
        self.assertIn("what is written is kept in uploads listed in s3://%s/%s: repeat the command" % (BUCKET, JOURNAL), told)
        self.s3.faults = {}
        self.s3.log.clear()
        told = self.finish(self.local(*arguments[:4]), *arguments)
        self.assertIn("goes on with a conversion of which", told)
        self.assertLess(self.sent(), 5)


class Kept(Resume):
    """Runs that are not the one that went on."""

    def setUp(self):
        super().setUp()
        self.source = self.put_source(8)
        self.arguments = ["consolidate", self.source, "--to", "dcp", "-o", TARGET, "-q", "--jobs", "1", "--memory", "16MiB"]
        self.expected = self.local(*self.arguments[:4])
        self.assertTrue(self.kill_at(0.6, os.path.getsize(self.source), *self.arguments, "--resume"))
        self.assertIn(JOURNAL, self.s3.objects)

    def test_other_options(self):
        uploads = dict(self.s3.uploads)
        told = self.command(*self.arguments, "--resume", "--dtype", "bf16", status=2)
        self.assertIn("'--dtype", told)
        self.assertIn(JOURNAL, told)
        self.assertEqual((self.s3.uploads, JOURNAL in self.s3.objects), (uploads, True))
        self.finish(self.expected, *self.arguments, "--resume")

    def test_a_target_that_appeared(self):
        """A run that is refused loses nothing of what is kept."""
        uploads = dict(self.s3.uploads)
        self.s3.put(PREFIX + "/thesis.txt", b"mine")
        for force in ([], ["--force"]):
            self.command(*self.arguments, "--resume", *force, status=2)
            self.assertEqual((self.s3.uploads, JOURNAL in self.s3.objects), (uploads, True))
        self.s3.remove(PREFIX + "/thesis.txt")
        self.s3.log.clear()
        self.finish(self.expected, *self.arguments, "--resume")
        self.assertLess(self.sent(), 5)

    def test_not_completed(self):
        """What is sent is kept even if the server cannot complete it."""
        self.s3.faults = {"complete": ["always-503:SlowDown"]}
        self.command(*self.arguments, "--resume", status=4)
        self.assertEqual((len(self.s3.uploads), JOURNAL in self.s3.objects), (1, True))
        self.s3.faults = {}
        self.s3.log.clear()
        self.finish(self.expected, *self.arguments, "--resume")
        self.assertLess(self.sent(), 2)

    def test_two_at_once(self):
        """The later one fails, and neither it nor the next run takes back what the other one has made."""
        real, done = self.s3.operation, []

        def overtake(handler, query):
            name = real(handler, query)
            if name == "complete" and not done:
                done.append(name)
                self.command(*self.arguments, "--resume")
            return name

        self.s3.operation = overtake
        self.assertIn("by another program", self.command(*self.arguments, "--resume", status=4))
        self.s3.operation = real
        self.assertEqual(self.objects(), self.expected)
        self.command(*self.arguments, "--resume", status=2)
        self.assertEqual(self.objects(), self.expected)

    def test_a_changed_source(self):
        with open(self.source, "r+b") as f:
            f.seek(-1, os.SEEK_END)
            f.write(b"?")
        self.assertIn("was changed since the unfinished conversion was begun", self.command(*self.arguments, "--resume", status=3))

    def test_without_the_option(self):
        """What is kept stays for the run that goes on, as on a disk."""
        uploads = set(self.s3.uploads)
        told = self.command(*self.arguments)
        self.assertIn("an unfinished conversion to this is kept in uploads that s3://%s/%s lists" % (BUCKET, JOURNAL), told)
        self.assertEqual((self.objects(), set(self.s3.uploads)), (self.expected, uploads))
        self.finish(self.expected, *self.arguments, "--resume", "--force")

    def test_removed_journal(self):
        self.s3.remove(JOURNAL)
        self.assertIn("unfinished upload", self.finish(self.expected, *self.arguments))

    def test_aborted_uploads(self):
        """A rule of the bucket has removed them: the file begins again."""
        self.s3.uploads.clear()
        self.finish(self.expected, *self.arguments, "--resume")

    def test_lost_part(self):
        for upload in self.s3.uploads.values():
            del upload.parts[min(upload.parts)]
        self.finish(self.expected, *self.arguments, "--resume")

    def test_damaged_journal(self):
        whole = self.s3.objects[JOURNAL]
        for size in (0, 8, len(whole) // 2, len(whole) - 1):
            with self.subTest(size):
                self.s3.put(JOURNAL, whole[:size])
                for key in self.objects():
                    self.s3.remove(PREFIX + key)
                self.finish(self.expected, *self.arguments, "--resume")

    def test_lists_that_lie(self):
        for fault in ("nonsense", "parts", "403:AccessDenied"):
            with self.subTest(fault):
                self.s3.faults = {"list_parts": ["always-" + fault]}
                self.command(*self.arguments, "--resume", status=4 if fault[0] == "4" else 3)
                self.assertEqual(self.objects(), {})
        self.s3.faults = {}
        self.s3.page = 1
        self.finish(self.expected, *self.arguments, "--resume")

    def test_killed_while_it_is_published(self):
        """What was visible is deleted, and made again."""
        for last in ("complete", "delete"):
            with self.subTest(last):
                self.assertTrue(self.kill_when(lambda name, last=last: name == last, *self.arguments, "--resume"))
                self.finish(self.expected, *self.arguments, "--resume", "--force")
                self.clean()
                self.kill_at(0.6, os.path.getsize(self.source), *self.arguments, "--resume")

    def test_whole_bucket(self):
        self.assertIn("name a folder in the bucket",
                      self.command(*self.arguments[:4], "-o", "s3://" + BUCKET, "--resume", "-q", status=2))


if __name__ == "__main__":
    unittest.main()
