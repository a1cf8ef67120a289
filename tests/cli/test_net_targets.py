#!/usr/bin/env python3
"""Targets in buckets: they equal those on a disk, byte for byte; each byte is sent once, no file is made here and memory is bounded. A run
that fails or is killed at any request leaves nothing that is visible or paid for once the next one has begun."""

import glob
import hashlib
import os
import re
import signal
import socket
import subprocess
import tempfile
import threading
import time
import unittest

import net_server
from harness import BINARY, HANG, corpus
from s3_server import BUCKET, KEY, REGION, SECRET, TOKEN, S3, Upload
from test_net import Net, made, safetensors
from test_net_commands import HAS_ZSTD

PART = 5 << 20
MARK = ".fsdpckpt-unfinished"
TARGET = "s3://%s/a folder/7" % BUCKET
PREFIX = "a folder/7"


def summary(data):
    return len(data), hashlib.md5(data).hexdigest()


class Counting(S3):
    """Counts what is received, and calls `each` with the number of a request before it is answered."""

    def __init__(self):
        super().__init__({}, least_part=PART)
        self.received, self.requests, self.each = 0, 0, lambda number: None

    def __call__(self, handler):
        with self.lock:
            self.requests += 1
            self.received += int(handler.headers.get("Content-Length", 0)) if handler.command == "PUT" else 0
            number = self.requests
        self.each(number)
        return super().__call__(handler)


class Targets(Net):
    def setUp(self):
        super().setUp()
        self.s3 = Counting()
        self.server = net_server.start(self.s3.files, self.certificate, self.s3)
        self.addCleanup(self.server.server_close)
        self.addCleanup(self.server.shutdown)
        self.empty = tempfile.mkdtemp(dir=self.dir)

    def environment(self):
        return dict(os.environ, SSL_CERT_FILE=self.certificate[0], FSDPCKPT_NET_PACE="1", AWS_ENDPOINT_URL=self.server.name,
                    AWS_ACCESS_KEY_ID=KEY, AWS_SECRET_ACCESS_KEY=SECRET, AWS_SESSION_TOKEN=TOKEN, AWS_REGION=REGION, HOME=self.empty,
                    TMPDIR=self.empty)

    def start(self, *arguments):
        return subprocess.Popen([BINARY, *arguments], env=self.environment(), cwd=self.empty, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, text=True)

    def command(self, *arguments, status=0):
        run = self.start(*arguments)
        out, told = run.communicate(timeout=HANG)
        self.assertEqual(run.returncode, status, told)
        for hidden in (SECRET, TOKEN, KEY):
            self.assertNotIn(hidden, out + told)
        self.assertEqual((os.listdir(self.empty), self.s3.wrong), ([], []))
        return told

    def objects(self, prefix=PREFIX):
        """{name: (bytes, digest)}"""
        return {key[len(prefix):]: summary(data) for key, data in self.s3.objects.items() if key.startswith(prefix)}

    def local(self, *arguments, name="7"):
        """Makes the same target on the disk. @return its files, {name: (bytes, digest)}"""
        target = os.path.join(tempfile.mkdtemp(dir=self.dir), name)
        subprocess.run([BINARY, *arguments, "-o", target, "-q"], check=True, stderr=subprocess.DEVNULL)
        names = [target] if os.path.isfile(target) else glob.glob(target + "/**", recursive=True, include_hidden=True)
        files = {}
        for file in filter(os.path.isfile, names):
            with open(file, "rb") as f:
                files[file[len(target):]] = summary(f.read())
        return files

    def same(self, *arguments, target=TARGET, prefix=PREFIX):
        self.s3.received = 0
        self.command(*arguments, "-o", target, "-q")
        files = self.local(*arguments, name=os.path.basename(target))
        self.assertEqual(files, self.objects(prefix))
        self.assertEqual(self.s3.uploads, {})
        total = sum(size for size, _ in files.values())
        self.assertLessEqual(self.s3.received, total + 4096, "each byte is sent once; a list of names may be added")

    def compressible(self, rows=23131, tensors=3):
        """A file whose tensors take half of their bytes when they are compressed, but for one that cannot be compressed, and a small one."""
        half = bytearray(rows * 408)
        half[::2] = made.randbytes(len(half) // 2)
        path = os.path.join(self.dir, "compressible.safetensors")
        with open(path, "wb") as f:
            f.write(safetensors({**{"model.layers.%d.mlp.up_proj.weight" % i: ("F32", [rows, 102], bytes(half[i:] + half[:i])) for i in range(tensors)},
                                 "odd": ("U8", [3, 70001], bytes(half[:3 * 70001])), "raw": ("F32", [999, 256], made.randbytes(999 << 10)),
                                 "small": ("BF16", [7], bytes(14)), "vector": ("F64", [50001], bytes(half[:50001 * 8]))}))
        return path

    def large(self, tensors=4):
        """A file with tensors of 3.5 MB."""
        path = os.path.join(self.dir, "large.safetensors")
        with open(path, "wb") as f:
            f.write(safetensors({"model.%d" % i: ("F32", [3500, 256], made.randbytes(3500 << 10)) for i in range(tensors)}))
        return path


class Same(Targets):
    def test_formats_and_layouts(self):
        source = self.large()
        for i, arguments in enumerate((
                ["consolidate", source, "--to", "safetensors", "--max-shard-size", "8MB"], ["consolidate", source, "--to", "dcp"],
                ["consolidate", source, "--to", "torch_dist"], ["consolidate", source, "--to", "fsdp_dtensor"],
                ["consolidate", source, "--to", "accelerate"], ["reshard", source, "--to", "h5", "--dp", "3"],
                ["reshard", source, "--to", "pt", "--dp", "2"], ["reshard", source, "--to", "dcp", "--dp", "3"],
                ["reshard", source, "--to", "safetensors", "--dp", "2"])):
            with self.subTest(" ".join(arguments[2:])):
                self.same(*arguments, target="s3://%s/t%d" % (BUCKET, i), prefix="t%d" % i)

    def test_files(self):
        source = self.large()
        for extension in ("safetensors", "pt", "h5"):
            with self.subTest(extension):
                self.same("consolidate", source, target="s3://%s/f/m.%s" % (BUCKET, extension), prefix="f/m." + extension)

    def test_compressed(self):
        source = self.compressible()
        for i, arguments in enumerate((["consolidate", source, "--to", "h5"], ["reshard", source, "--to", "h5", "--dp", "3"],
                                       ["reshard", source, "--to", "h5", "--dp", "2", "--tp", "2"],
                                       ["consolidate", source, "--to", "h5", "-j", "9"], ["consolidate", corpus("dcp-torch2.15.0-train"), "--to", "h5"])):
            with self.subTest(" ".join(arguments[2:])):
                name = "c/%d%s" % (i, "" if "--dp" in arguments else ".h5")
                self.same(*arguments, "--compress", "1", target="s3://%s/%s" % (BUCKET, name), prefix=name)
        self.command("diff", "--data", source, "s3://%s/c/0.h5" % BUCKET)

    def test_corpus(self):
        """Objects, ties, dtypes, empty and 0-dim tensors."""
        for name in ("dcp-torch2.15.0-objects", "dcp-torch2.15.0-tied", "dcp-torch2.15.0-dtypes", "dcp-torch2.15.0-empty",
                     "dcp-torch2.15.0-train"):
            for to in ("h5", "pt", "dcp"):
                with self.subTest(name + " to " + to):
                    where = "%s/%s" % (name, "m." + to if to != "dcp" else "dcp")
                    self.same("consolidate", corpus(name), "--to", to, target="s3://%s/%s" % (BUCKET, where), prefix=where)

    def test_from_bucket_to_bucket(self):
        with open(self.large(), "rb") as f:
            self.s3.put("in/model.safetensors", f.read())
        self.command("consolidate", "s3://%s/in" % BUCKET, "-o", TARGET, "--to", "dcp", "-q")
        self.assertEqual(self.objects(), self.local("consolidate", os.path.join(self.dir, "large.safetensors"), "--to", "dcp"))
        self.command("diff", "--data", "s3://%s/in" % BUCKET, TARGET)

    def test_empty_bucket(self):
        source = self.large(1)
        self.command("consolidate", source, "--to", "dcp", "-o", "s3://" + BUCKET, "-q")
        self.assertEqual({"/" + name: what for name, what in self.objects("").items()}, self.local("consolidate", source, "--to", "dcp"))

    def test_side_files(self):
        folder = os.path.join(self.dir, "model")
        os.mkdir(folder)
        with open(self.large(), "rb") as source, open(os.path.join(folder, "model.safetensors"), "wb") as f:
            f.write(source.read())
        for name in ("config.json", "tokenizer.json"):
            with open(os.path.join(folder, name), "w", encoding="utf-8") as f:
                f.write("{}")
        self.same("export", folder, "--like", folder, "--max-shard-size", "8MB")
        self.assertIn("/config.json", self.objects())

    def test_one_tensor(self):
        """It is sent while it is read."""
        path = os.path.join(self.dir, "one.safetensors")
        with open(path, "wb") as f:
            f.write(safetensors({"large": ("F32", [3000, 1000], made.randbytes(12000000)), "none": ("F32", [0], b"")}))
        for name, part, file in (("large", "part", "x.npy"), ("large", "part", "raw"), ("none", "whole", "n.npy")):
            self.s3.log.clear()
            self.same("extract", path, name, target="s3://%s/e/%s" % (BUCKET, file), prefix="e/" + file)
            self.assertIn(part, [what for what, _ in self.s3.log])

    def test_the_index_comes_last(self):
        self.command("consolidate", self.large(), "-o", TARGET, "--to", "safetensors", "--max-shard-size", "8MB", "-q")
        shown = [key for name, key in self.s3.log if name in ("complete", "whole")]
        self.assertEqual(shown[0], PREFIX + "/" + MARK)
        self.assertEqual(shown[-1], PREFIX + "/model.safetensors.index.json")
        self.assertEqual(self.s3.log[-1], ("delete", PREFIX + "/" + MARK))

    def test_memory(self):
        """How much of the target is in memory, by the blocks of its memfds, for many tensors with headers and gaps between them. They have
        97 MB, and half of --memory has room for two parts."""
        path = os.path.join(self.dir, "many.safetensors")
        with open(path, "wb") as f:
            f.write(safetensors({"m.%d" % i: (("F32", [101, 251], made.randbytes(101 * 251 * 4)) if i % 2 else
                                              ("BF16", [50, 1001], made.randbytes(100100))) for i in range(970)}))
        for name, *more in ((".safetensors",), (".pt",), (".h5",), ("/dcp", "--to", "dcp"), ("c.h5", "--compress", "1")):
            most = 0
            run = self.start("consolidate", path, "-o", TARGET + name, "-q", "--memory", "16MiB", *more)
            while run.poll() is None:
                blocks = {}
                for link in glob.glob("/proc/%d/fd/*" % run.pid):
                    try:
                        if "memfd:fsdpckpt-target" in os.readlink(link):
                            blocks[os.stat(link).st_ino] = os.stat(link).st_blocks
                    except OSError:
                        pass
                most = max(most, sum(blocks.values()) * 512)
                time.sleep(0.002)
            self.assertEqual((run.returncode, run.communicate()[1]), (0, ""))
            self.assertGreater(most, 1 << 20)
            self.assertLess(most, 60 << 20, name)  # two parts, those that are held for headers for a moment, the first and the last
            self.assertEqual(self.s3.uploads, {})

@unittest.skipUnless("FSDPCKPT_MOTO" in os.environ, "FSDPCKPT_MOTO names no Python with moto[server]")
class Moto(Targets):
    """A bucket by other hands."""

    def test_same(self):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            url = "http://127.0.0.1:%d" % s.getsockname()[1]
        program = """import boto3, hashlib, moto.server, sys, threading, time
threading.Thread(target=moto.server.main, args=(["-H", "127.0.0.1", "-p", sys.argv[1].rsplit(":", 1)[1]],), daemon=True).start()
s3 = boto3.client("s3", endpoint_url=sys.argv[1], aws_access_key_id="k", aws_secret_access_key="s", region_name="us-east-1")
while True:
    try: s3.create_bucket(Bucket="models"); break
    except Exception: time.sleep(0.1)
print("ready", flush=True)
sys.stdin.readline()
for one in s3.list_objects_v2(Bucket="models")["Contents"]:
    body = s3.get_object(Bucket="models", Key=one["Key"])["Body"].read()
    print(len(body), hashlib.md5(body).hexdigest(), one["Key"])
print(len(s3.list_multipart_uploads(Bucket="models").get("Uploads", [])), "uploads", "")
"""
        source, expected = self.large(), {}
        server = subprocess.Popen([os.environ["FSDPCKPT_MOTO"], "-c", program, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                  stderr=subprocess.DEVNULL, text=True)
        try:
            self.assertEqual(server.stdout.readline(), "ready\n")
            self.server.name = url
            other = os.path.join(self.dir, "other.safetensors")
            os.rename(source, other)
            for name, arguments in {"a.pt": ["consolidate", other], "b c/d.h5": ["consolidate", other],
                                    "e+f": ["reshard", other, "--to", "dcp", "--dp", "2"],
                                    **({"g/weight_v000001": ["delta", other, self.large()]} if HAS_ZSTD else {})}.items():
                self.command(*arguments, "-o", "s3://models/" + name, "-q")
                files = self.local(*arguments, name=os.path.basename(name))
                expected.update({name + below: what for below, what in files.items()})
                if arguments[0] == "delta":
                    self.command("diff", "--data", other, source, "--delta", "s3://models/" + name)
                else:
                    self.command("diff", "--data", other, "s3://models/" + name)
        finally:
            told = server.communicate("\n")[0].splitlines()
        self.assertEqual(told.pop(), "0 uploads ")
        self.assertEqual({name: (int(size), digest) for size, digest, name in (line.split(" ", 2) for line in told)}, expected)


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
