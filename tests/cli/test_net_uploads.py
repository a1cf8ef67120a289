#!/usr/bin/env python3
"""Objects that are written to buckets: what arrives equals the file; every request is signed; a server that fails or lies, and an answer that
is lost, never leave another object than the one that was sent, or a wrong word about it."""

import os
import random
import subprocess
import time
import unittest

import net_server
from harness import HANG
from s3_server import BUCKET, KEY, REGION, SECRET, TOKEN, S3
from test_net import Net

TOOL = os.environ["UPLOAD_TOOL"]
NAME = "s3://%s/runs/a & b/model \u00e9.safetensors" % BUCKET
OBJECT = NAME.split("/", 3)[3]
made = random.Random(9)


class Uploads(Net):
    def setUp(self):
        super().setUp()
        self.data = made.randbytes(1_000_003)
        with open(os.path.join(self.dir, "data"), "wb") as f:
            f.write(self.data)
        self.s3 = S3({})
        self.server = net_server.start(self.s3.files, self.certificate, self.s3)
        self.addCleanup(self.server.server_close)
        self.addCleanup(self.server.shutdown)

    def environment(self, **more):
        return dict(os.environ, SSL_CERT_FILE=self.certificate[0], FSDPCKPT_NET_PACE="1", AWS_ENDPOINT_URL=self.server.name,
                    AWS_ACCESS_KEY_ID=KEY, AWS_SECRET_ACCESS_KEY=SECRET, AWS_SESSION_TOKEN=TOKEN, AWS_REGION=REGION, HOME=self.dir,
                    FSDPCKPT_MODULE_PATH=os.path.dirname(os.environ["FSDPCKPT"]), **more)

    def tool(self, *arguments, status=0, **more):
        """Runs the tool. @return stdout; for a failure, the one line of stderr"""
        got = subprocess.run([TOOL, *arguments], env=dict(self.environment(), **more), cwd=self.dir, capture_output=True, text=True,
                             timeout=HANG, check=False)
        self.assertEqual(got.returncode, status, got.stdout + got.stderr)
        self.assertEqual(got.stderr.count("\n"), 0 if status == 0 else 1, got.stderr)
        for hidden in (SECRET, TOKEN, KEY):
            self.assertNotIn(hidden, got.stderr)
        return got.stdout if status == 0 else got.stderr

    def parts(self, end="complete", name=NAME, size="100000", threads="4", **more):
        return self.tool("parts", name, "data", size, threads, end, **more)

    def check_whole(self):
        self.assertEqual(self.s3.objects.get(OBJECT), self.data)
        self.assertEqual((self.s3.uploads, self.s3.wrong), ({}, []))

    def count(self, operation):
        return sum(name == operation for name, _ in self.s3.log)


class Right(Uploads):
    def test_parts(self):
        self.parts()
        self.check_whole()
        self.assertEqual(self.s3.types[OBJECT], "application/octet-stream")
        self.assertEqual((self.count("begin"), self.count("part"), self.count("complete")), (1, 11, 1))
        self.assertGreater(self.s3.most_busy, 1, "parts are sent at once")

    def test_one_part(self):
        self.parts(size="2000000", threads="1")
        self.check_whole()

    def test_many_parts(self):
        self.parts(size="2000", threads="16")
        self.check_whole()

    def test_whole(self):
        self.tool("whole", NAME, "data", "new")
        self.check_whole()
        self.data = b""
        open(os.path.join(self.dir, "data"), "wb").close()
        self.tool("whole", NAME, "data", "replace")
        self.check_whole()
        self.assertEqual(self.s3.types[OBJECT], "application/octet-stream")

    def test_only_new(self):
        self.parts(end="new")
        self.check_whole()
        self.s3.put(OBJECT, b"of another program")
        for run in (lambda: self.parts(end="new", status=2), lambda: self.tool("whole", NAME, "data", "new", status=2)):
            self.assertEqual(run(), "error: %s: another program created it while this one wrote it [force]\n" % NAME)
            self.assertEqual((self.s3.objects[OBJECT], self.s3.uploads), (b"of another program", {}))
        self.parts(end="complete")
        self.check_whole()


if __name__ == "__main__":
    unittest.main()
