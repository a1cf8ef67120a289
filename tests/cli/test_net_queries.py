#!/usr/bin/env python3
"""URLs with a query, such as presigned ones: the server gets the query, and nobody else sees it."""

import os
import subprocess
import time
import unittest

from harness import BINARY, HANG
from test_net import Net, file_of, folder_of

SECRET = "SeCrEt/0%2B="
QUERY = "?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=AKIA/20261128/eu-north-1/s3/aws4_request&X-Amz-Signature=" + SECRET


class Queries(Net):
    def setUp(self):
        super().setUp()
        self.files = {"model.safetensors": file_of(3000), "other": file_of(7), "shard.safetensors": folder_of(1, 5)["model-00001-of-00001.safetensors"]}
        self.server = self.serve(self.files, answer=self.judge)
        self.asked = set()

    def judge(self, handler):
        """Refuses every request without the query. With "part=other" in it, it redirects to another file."""
        self.asked.add(handler.path)
        path, _, query = handler.path.partition("?")
        if SECRET not in query:
            return handler.plain(403) or True
        if query.endswith("&part=other"):
            return handler.plain(302, [("Location", "/m/other" + QUERY)]) or True
        return False

    def url(self, name="model.safetensors", query=QUERY):
        return "%s/m/%s%s" % (self.server.name, name, query)

    def run_it(self, *arguments, status=0):
        """Runs the command. @return what it says, which has nothing of the query"""
        got = subprocess.run([BINARY, *arguments], env=dict(os.environ, SSL_CERT_FILE=self.certificate[0], FSDPCKPT_NET_PACE="1"), cwd=self.dir,
                             capture_output=True, text=True, timeout=HANG, check=False)
        self.assertEqual(got.returncode, status, got.stdout + got.stderr)
        self.assertNotIn("eCrEt", got.stdout + got.stderr)
        self.assertNotIn("X-Amz", got.stdout + got.stderr)
        return got.stdout + got.stderr

    def test_read(self):
        self.local(self.files)
        for arguments in (["inspect", "--json"], ["check", "--json"], ["schema"], ["verify", "--json"], ["inspect", "--tree"], ["diff", "--data", "--json"]):
            more = ["local/model.safetensors"] if arguments[0] == "diff" else []
            remote, local = self.url(), "local/model.safetensors"
            told = self.run_it(arguments[0], remote, *more, *arguments[1:])
            shown = self.url(query="?\u2026")
            if arguments[-1] == "--json":
                self.assertIn(shown, told)
            if arguments[0] in ("schema", "inspect"):
                self.assertEqual(told.replace(shown, "X").replace("?\u2026", ""), self.run_it(arguments[0], local, *arguments[1:]).replace(local, "X"))
        self.assertIn("/m/model.safetensors" + QUERY, self.asked)

    def test_targets(self):
        """Nothing of the query is in a target, and it is the same as for the file."""
        self.local(self.files)
        for to, name in (("h5", "x.h5"), ("pt", "x.pt"), ("dcp", "x"), ("safetensors", "x.safetensors")):
            told = self.run_it("consolidate", self.url(), "--to", to, "-o", name, "--json")
            self.assertNotIn("?", told)
            made = self.digest(name)
            for root, _, files in [*os.walk(os.path.join(self.dir, name)), (self.dir, [], [] if os.path.isdir(os.path.join(self.dir, name)) else [name])]:
                for file in files:
                    self.assertNotIn(b"eCrEt", self.bytes_of(os.path.join(root, file)))
            self.run_it("consolidate", "local/model.safetensors", "--to", to, "-o", name, "-q", "--force")
            self.assertEqual(self.digest(name), made)

    def test_several(self):
        """Queries can say which file is meant, and be those of options."""
        self.assertIn("model.b", self.run_it("diff", self.url(), self.url(query=QUERY + "&part=other"), status=1))
        self.run_it("diff", "--data", self.url("other"), self.url(query=QUERY + "&part=other"))
        self.assertIn("/m/model.safetensors" + QUERY + "&part=other", self.asked)
        for option in (["--against", self.url("shard.safetensors")], ["--against=" + self.url("shard.safetensors")]):
            self.run_it("check", self.url("shard.safetensors"), *option)

    def test_errors(self):
        for arguments, status, says in (
                (["inspect", self.url("missing.safetensors")], 3, "/m/missing.safetensors?\u2026: no such file"),
                (["inspect", self.url("")], 3, "/m/?\u2026: no such file"),
                (["inspect", self.url(query="?sig=x%20eCrEt")], 4, "refuses access (status 403); the URL may have expired"),
                (["inspect", self.url(query="?sig=" + SECRET + "#part")], 2, "a character that a URL cannot have"),
                (["inspect", self.url(query="?sig=" + SECRET + " x")], 2, "a character that a URL cannot have"),
                (["inspect", self.url(query="?")], 2, "the query is empty"),
                (["inspect", self.url(query="?" + 5000 * "eCrEt")], 2, "a URL of more than 4095 bytes is refused"),
                (["inspect", self.url().replace("localhost", "eCrEt@localhost")], 2, "a user"),
                ([self.url()], 2, "unknown command"), (["inspect", self.url(), self.url()], 2, "one argument too many"),
                (["inspect", self.url(), "--recipe", self.url("missing.json")], 2, "missing.json?\u2026"),
                (["inspect", "--unknown=" + self.url()], 2, "--unknown"), (["inspect", "--unknown" + self.url()], 2, "--unknownhttps://"),
                (["inspect", self.url().replace("https", "HTTPS")], 2, "HTTPS://...: write this part in small letters"),
                (["inspect", self.url().replace("https", "Https"), "--unknown"], 2, "small letters"),
                (["consolidate", self.url(), "-oHTTPS" + self.url("target")[5:], "--to", "h5"], 2, "small letters"),
                (["consolidate", self.url(), "-o" + self.url("target"), "--to", "h5"], 5, "nothing can be written there"),
                (["consolidate", self.url(), "-o" + self.url("target")], 2, "-o https://"),
                (["consolidate", self.url(), "-o", "S3://bucket/x.h5"], 2, "S3://...: write this part in small letters"),
                (["consolidate", self.url(), "-o", self.url("target"), "--to", "h5"], 5, "nothing can be written there")):
            with self.subTest(says):
                self.assertIn(says, self.run_it(*arguments, status=status))

    def test_list_of_processes(self):
        self.server.delay = 1
        with subprocess.Popen([BINARY, "inspect", self.url(), "--json"], env=dict(os.environ, SSL_CERT_FILE=self.certificate[0]),
                              stdout=subprocess.DEVNULL) as run:
            end = time.monotonic() + HANG
            while not self.server.requests and time.monotonic() < end:
                time.sleep(0.01)
            with open("/proc/%d/cmdline" % run.pid, "rb") as f:
                shown = f.read()
        self.assertIn(b"model.safetensors****", shown)
        self.assertNotIn(b"eCrEt", shown)


if __name__ == "__main__":
    unittest.main()
