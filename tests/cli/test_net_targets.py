#!/usr/bin/env python3
"""Targets in buckets: they equal those on a disk, byte for byte; each byte is sent once, no file is made here and memory is bounded."""

import glob
import hashlib
import os
import socket
import subprocess
import tempfile
import threading
import time
import unittest
import urllib.error
import urllib.request

import net_server
from harness import BINARY, HANG, corpus
from s3_server import BUCKET, KEY, REGION, SECRET, TOKEN, S3
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

    def check_resume(self, url, expected):
        """Kills a run when its journal is there. The next one goes on with the upload."""
        arguments = ["consolidate", self.large(16), "-o", "s3://models/k.pt", "--resume", "--jobs", "1", "--memory", "8MiB"]
        run = self.start(*arguments)
        while run.poll() is None:
            try:
                urllib.request.urlopen(urllib.request.Request(url + "/models/.k.pt.fsdpckpt-resume", headers={"Authorization": "AWS k:s"})).close()
                run.kill()
            except urllib.error.HTTPError:
                time.sleep(0.01)
        self.assertEqual((run.wait(), run.communicate()[1]), (-9, ""))
        self.assertIn("goes on with a conversion of which", self.command(*arguments))
        expected["k.pt"] = self.local("consolidate", arguments[1], name="k.pt")[""]

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
            self.check_resume(url, expected)
            self.large()
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


if __name__ == "__main__":
    unittest.main()
