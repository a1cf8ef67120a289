#!/usr/bin/env python3
"""Targets in buckets that exist, that fail, or whose run is killed at any request: what is left is neither visible nor paid for once the next
run has begun, and nothing of others is touched."""

import os
import re
import signal
import subprocess
import threading
import time
import unittest

from harness import BINARY, HANG
from s3_server import BUCKET, Upload
from test_net_targets import MARK, PREFIX, TARGET, Targets, summary


class Existing(Targets):
    def setUp(self):
        super().setUp()
        self.convert = ["consolidate", self.large(), "-o", TARGET, "--to", "safetensors", "--max-shard-size", "8MB", "-q"]

    def test_refused(self):
        self.command(*self.convert)
        before = self.objects()
        self.assertIn("exists", self.command(*self.convert, status=2))
        self.assertEqual((self.objects(), self.s3.uploads), (before, {}))

    def test_replaced(self):
        self.command("reshard", self.convert[1], "-o", TARGET, "--to", "dcp", "--dp", "3", "-q")
        self.command(*self.convert, "--force")
        self.assertEqual(self.objects(), self.local(*self.convert[:2], *self.convert[4:-1]))

    def test_foreign(self):
        self.s3.put(PREFIX + "/thesis.txt", b"mine")
        self.assertIn("thesis.txt", self.command("consolidate", self.large(), "-o", TARGET, "--to", "dcp", "--force", status=2))
        self.assertEqual(self.objects(), {"/thesis.txt": summary(b"mine")})

    def test_appears_meanwhile(self):
        """Whatever is there when the new objects appear stays as it is."""
        name = "model-00002-of-00002.safetensors"

        def put(_):
            if self.s3.log and self.s3.log[-1][0] == "complete" and not self.s3.objects.get(PREFIX + "/" + name):
                self.s3.put(PREFIX + "/" + name, b"another run's")

        self.s3.each = put
        self.command(*self.convert, status=2)
        self.assertEqual((self.objects(), self.s3.uploads), ({"/" + name: summary(b"another run's")}, {}))

    def test_what_is_read_is_not_replaced(self):
        with open(self.large(), "rb") as f:
            self.s3.put(PREFIX + "/model.safetensors", f.read())
        before = self.objects()
        for target in (TARGET, TARGET + "/", TARGET + "//", TARGET + "/model.safetensors", TARGET + "/in it", "s3://%s/a folder//" % BUCKET,
                       "s3://%s" % BUCKET):
            told = self.command("consolidate", TARGET, "-o", target, "--to", "safetensors", "--force", status=2)
            self.assertIn("which is read: name another target", told)
        self.assertEqual(self.objects(), before)

    def test_refused_kinds(self):
        source = self.large()
        self.assertIn("machine, and upload it", self.command("view", source, "-o", TARGET + ".h5", status=5))
        self.assertEqual((self.s3.objects, self.s3.uploads), ({}, {}))


class Marked(Targets):
    """What a failure leaves, the next run must neither take for more than it is, nor for less."""

    def setUp(self):
        super().setUp()
        self.convert = ["consolidate", self.large(), "-o", TARGET, "--to", "dcp", "-q"]
        self.command("reshard", self.convert[1], "-o", TARGET, "--to", "dcp", "--dp", "2", "-q")
        self.old = self.objects()
        self.new = self.local(*self.convert[:2], "--to", "dcp")

    def clear(self):
        for key in list(self.s3.objects):
            self.s3.remove(key)

    def shown(self):
        return {name: what for name, what in self.objects().items() if name != "/" + MARK}

    def fail(self, faults, *more, status=4):
        self.s3.faults = faults
        told = self.command(*self.convert, *more, status=status)
        self.s3.faults = {}
        return told

    def test_nothing_was_replaced(self):
        self.fail({"complete": ["always-404:NoSuchUpload"]}, "--force")
        self.command(*self.convert, status=2)
        self.assertEqual(self.shown(), self.old)

    def test_half_was_replaced(self):
        real, count = self.s3.operation, iter(range(100))
        self.s3.operation = lambda handler, query: (lambda name: "refused" if name == "whole" and next(count) > 0 else name)(real(handler, query))
        self.fail({"refused": ["always-403:AccessDenied"]}, "--force")
        self.s3.operation = real
        self.assertIn("/" + MARK, self.objects())
        self.assertIn("died while it replaced this", self.command(*self.convert, status=2))
        self.assertIn("/" + MARK, self.objects())
        self.command(*self.convert, "--force")
        self.assertEqual(self.objects(), self.new)

    def test_what_another_program_made_is_not_in_the_mark(self):
        self.clear()

        def put(_):
            if self.s3.log and self.s3.log[-1] == ("whole", PREFIX + "/" + MARK):
                self.s3.put(PREFIX + "/__0_0.distcp", b"another program's")

        self.s3.each = put
        self.fail({"delete": ["always-503"]}, status=2)
        self.s3.each = lambda number: None
        self.command(*self.convert, status=2)
        self.assertEqual(self.objects()["/__0_0.distcp"], summary(b"another program's"))

    def test_only_what_is_ours_is_deleted(self):
        """A run is killed between the mark, which lists names that were free, and the moment when the server refuses one that another
        program has taken. The next run leaves that program's object, and deletes its own."""
        self.clear()

        def put(_):
            if self.s3.log and self.s3.log[-1] == ("complete", PREFIX + "/__0_0.distcp"):
                self.s3.put(PREFIX + "/.metadata", b"another program's")
                run.send_signal(signal.SIGKILL)
                time.sleep(0.05)

        for keeps in (True, False):
            self.s3.keeps_metadata = keeps
            self.s3.each = put
            run = self.start(*self.convert)
            run.communicate(timeout=HANG)
            time.sleep(0.1)
            self.s3.each = lambda number: None
            self.assertEqual(set(self.objects()), {"/" + MARK, "/__0_0.distcp", "/.metadata"})
            told = self.command(*self.convert[:-1], status=2)
            stays = {"/.metadata"} | (set() if keeps else {"/__0_0.distcp"})
            self.assertEqual(set(self.objects()), stays)
            self.assertEqual(self.objects()["/.metadata"], summary(b"another program's"))
            for name in self.new:
                line = "s3://%s/%s%s: stays: its metadata does not say" % (BUCKET, PREFIX, name)
                self.assertEqual(line in told, name in stays, told)
            self.clear()
        self.s3.keeps_metadata = True
        self.command(*self.convert)
        self.assertEqual(self.objects(), self.new)

    def test_a_mark_that_is_none(self):
        self.clear()
        for text in (b"new\n__0_0.distcp\n", b"new\n12 x\n", b"new\n0000000000000000 x\n", b"new\n00000000000000ab ../x\n", b"other"):
            self.s3.put(PREFIX + "/" + MARK, text)
            self.assertIn("is not a list of names: look at it", self.command(*self.convert, status=3))
            self.assertEqual(self.objects(), {"/" + MARK: summary(text)})

    def test_a_lost_answer(self):
        self.clear()
        self.fail({"complete": ["lost", "always-reset"], "head": ["always-reset"]})
        self.assertEqual(set(self.objects()), {"/__0_0.distcp", "/" + MARK})
        self.command(*self.convert)
        self.assertEqual(self.objects(), self.new)

    def test_who_may_not_delete(self):
        self.clear()
        for more in ([], ["--force"]):
            self.fail({"delete": ["always-403:AccessDenied"]}, *more, status=0)
            self.assertEqual(self.shown(), self.new)

    def test_uploads_of_others(self):
        """A target that is refused is left alone, and so is what cannot be of a target."""
        self.s3.uploads["1"] = Upload(PREFIX + "/__0_0.distcp", None)
        self.command(*self.convert, status=2)
        self.assertEqual(list(self.s3.uploads), ["1"])
        self.s3.uploads["2"] = Upload(PREFIX + "/x/y/z.tar", None)
        self.command(*self.convert, "--force")
        self.assertEqual(list(self.s3.uploads), ["2"])

    def test_little_memory_and_few_files(self):
        self.command("consolidate", self.convert[1], "-o", TARGET + ".pt", "--memory", "1MiB", "-q")
        for target in (TARGET, os.path.join(self.dir, "7")):  # what it asks for suffices
            compress = ["consolidate", self.convert[1], "--compress", "1", "-q", "-o", target + ".h5", "--memory"]
            needed = re.search(r"needs (\d+) bytes", self.command(*compress, "2MiB", status=2))[1]
            self.command(*compress, needed)
        limit = ["sh", "-c", 'ulimit -n 256; exec "$@"', "sh"]
        run = subprocess.run([*limit, BINARY, "reshard", self.convert[1], "-o", TARGET + "x", "--to", "dcp", "--dp", "600"],
                             env=self.environment(), capture_output=True, text=True, timeout=HANG, check=False)
        self.assertEqual((run.returncode, self.objects(PREFIX + "x")), (5, {}), run.stderr)
        self.assertIn("ulimit -n", run.stderr)


class Failing(Targets):
    """Ends a run at its first request, at its second, and so on, until it succeeds."""

    def setUp(self):
        super().setUp()
        source = self.large(3)
        self.convert = ["consolidate", source, "--to", "safetensors", "--max-shard-size", "8MB"]
        self.expected = self.local(*self.convert)
        self.assertEqual(len(self.expected), 3)

    def again(self, *more):
        """The next run, which must succeed and leave no trace of the one before."""
        self.s3.each = lambda number: None
        told = self.command(*self.convert, "-o", TARGET, "-q", *more)
        self.assertEqual((self.objects(), self.s3.uploads), (self.expected, {}))
        return told

    def reset(self):
        for key in list(self.s3.objects):
            self.s3.remove(key)
        self.s3.requests = 0

    def test_killed_at_each_request(self):
        visible, ended, n = 0, False, 0
        while not ended:
            n += 1
            self.reset()
            killed = threading.Event()

            def kill(number, n=n, killed=killed):
                if number >= n:
                    self.run.send_signal(signal.SIGKILL)
                    killed.set()
                    time.sleep(0.05)

            self.s3.each = kill
            self.run = self.start(*self.convert, "-o", TARGET, "-q")
            self.run.communicate(timeout=HANG)
            time.sleep(0.1)  # a request may still be in the fetcher, which lives as long as the other process
            ended = not killed.is_set()
            shown = self.objects()
            if shown == self.expected:  # it died after it was done
                continue
            if shown:
                visible += 1
                self.assertIn("/" + MARK, shown)
            self.again()
        self.assertGreater(n, 10)
        self.assertGreater(visible, 0)

    def test_compressed(self):
        self.convert = ["reshard", self.compressible(), "--to", "h5", "--dp", "2", "--compress", "1", "--memory", "32MiB", "-j", "4"]
        self.expected = self.local(*self.convert)
        for n in (5, 8):
            with self.subTest(killed=n):
                self.reset()
                self.s3.each = lambda number, n=n: self.run.send_signal(signal.SIGKILL) if number >= n else None
                self.run = self.start(*self.convert, "-o", TARGET, "-q")
                self.assertEqual(self.run.wait(HANG), -signal.SIGKILL)
                self.run.communicate()
                time.sleep(0.1)
                self.again()
        for part in (0, 2):
            with self.subTest(failed=part):
                self.reset()
                real, parts = self.s3.operation, iter(range(100))
                self.s3.operation = lambda *a, real=real, parts=parts, part=part: (
                    lambda name: "refused" if name == "part" and next(parts) == part else name)(real(*a))
                self.s3.faults = {"refused": ["always-403:AccessDenied"]}
                told = self.command(*self.convert, "-o", TARGET, "-q", status=4)
                self.s3.operation, self.s3.faults = real, {}
                self.assertIn("the server refuses access", told)
                self.assertEqual((told.count("\n"), self.objects(), self.s3.uploads), (1, {}, {}))

    def test_fails_at_each_request(self):
        failed, n = True, 0
        while failed:
            n += 1
            self.reset()
            real, failed = self.s3.operation, False

            def refuse(handler, query, n=n, real=real):
                nonlocal failed
                name = real(handler, query)
                if self.s3.requests == n:
                    failed = True
                    self.s3.faults[name] = ["403:AccessDenied"]
                return name

            self.s3.operation = refuse
            run = self.start(*self.convert, "-o", TARGET, "-q")
            told = run.communicate(timeout=HANG)[1]
            self.s3.operation, self.s3.faults = real, {}
            if run.returncode == 0:
                self.assertEqual({name: what for name, what in self.objects().items() if what[0] > 0}, self.expected)
            else:
                self.assertEqual((run.returncode, told.count("\n")), (4, 1), told)
                self.assertEqual(set(self.objects()) - {"/" + MARK}, set(), "request %d: %s" % (n, told))
                self.again()
        self.assertGreater(n, 10)

    def test_interrupted(self):
        begun = threading.Event()
        self.s3.each = lambda number: (begun.set(), time.sleep(0.05)) if number > 4 else None
        run = self.start(*self.convert, "-o", TARGET, "-q")
        begun.wait(HANG)
        run.send_signal(signal.SIGINT)
        told = run.communicate(timeout=HANG)[1]
        self.assertEqual((run.returncode, self.objects(), self.s3.uploads), (130, {}, {}), told)
        self.again()


if __name__ == "__main__":
    unittest.main()
