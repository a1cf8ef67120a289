#!/usr/bin/env python3
"""HDF5 on servers: every command says of it what it says of the same files on the disk, with few requests; the process in which libhdf5
runs gets the bytes from the command, and a server that fails or lies gives one line."""

import os
import subprocess
import unittest
import zipfile

import net_server
from harness import BINARY, CORPUS, HANG, corpus, without_progress
from test_net import Net
from test_net_lists import Bucket

HDF5 = os.path.dirname(CORPUS)
COMMANDS = (["inspect", "--json"], ["check", "--json"], ["verify", "--json"])
NOT_FOLLOWED = " on a server: download all of the files first"


def bytes_at(path):
    with open(path, "rb") as f:
        return f.read()


class H5(Net):
    def run_both(self, remote, local, name, *arguments, **more):
        """Runs a command on a server's file and on the disk's, and in the folders of both. @return the status, with both outputs"""
        environment = dict(os.environ, SSL_CERT_FILE=self.certificate[0], FSDPCKPT_NET_PACE="1", **more)
        said = []
        for base in (remote, local):
            got = subprocess.run([BINARY, arguments[0], base + "/" + name, *arguments[1:]], env=environment, cwd=self.dir, capture_output=True,
                                 text=True, timeout=HANG, check=False)
            texts = [text.replace(base, "BASE").replace(NOT_FOLLOWED, "") for text in (got.stdout, without_progress(got.stderr))]
            said.append((got.returncode, *texts))
            if arguments[0] == "consolidate":
                said[-1] = (said[-1][0], said[-1][2] if got.returncode else bytes_at(self.path("x.h5")))
        self.assertEqual(said[0], said[1], (name, arguments))
        return said[0]

    def compare(self, remote, local, name, status=0, **more):
        for arguments in COMMANDS:
            self.run_both(remote, local, name, *arguments, **more)
        got = self.run_both(remote, local, name, "consolidate", "-o", "x.h5", "--force", "--quiet", **more)
        self.assertEqual(got[0], status, (name, got))

    def serve_folder(self, folder, names):
        more = [name for name in os.listdir(folder) if name.endswith(".weights.h5")]
        return self.serve({name: bytes_at(os.path.join(folder, name)) for name in {*names, *more}})


class Same(H5):
    def compare_corpus(self, kind, refused=()):
        folder = os.path.join(HDF5, kind)
        names = sorted(name for name in os.listdir(folder) if name.endswith((".h5", ".keras", ".weights.json")))
        self.assertGreaterEqual(len(names), 3)
        server = self.serve_folder(folder, names)
        for name in names:
            with self.subTest(name):
                self.compare(server.name + "/m", folder, name, dict(refused).get(name, 0))

    def test_files_of_other_programs(self):
        self.compare_corpus("good")

    def test_keras(self):
        self.compare_corpus("keras")

    def test_unsupported(self):
        folder = os.path.join(HDF5, "unsupported")
        names = [name for name in os.listdir(folder) if name.endswith(".h5")]
        self.compare_corpus("unsupported", [(name, 5) for name in names])

    def test_damaged(self):
        folder = os.path.join(HDF5, "bad")
        names = [name for name in os.listdir(folder) if name.endswith(".h5")]
        self.compare_corpus("bad", [(name, 3) for name in names])

    def test_own_layouts(self):
        """Full, compressed, sharded in one and two dimensions, with index.h5 and without; a folder and its index."""
        source = corpus("dcp-torch2.15.0-2d-dp4tp2")
        folder = self.path("own")
        os.mkdir(folder)
        self.ok("consolidate", source, "-o", "own/full.h5")
        self.ok("consolidate", source, "-o", "own/packed.h5", "--compress", "6")
        self.ok("reshard", source, "-o", "own/dp/", "--dp", "3")
        self.ok("reshard", source, "-o", "own/2d/", "--dp", "4", "--tp", "2", "--compress", "1")
        self.ok("reshard", source, "-o", "own/shards/", "--dp", "2")
        os.unlink(self.path("own", "shards", "index.h5"))
        objects = {os.path.relpath(os.path.join(at, name), folder): bytes_at(os.path.join(at, name))
                   for at, _, names in os.walk(folder) for name in names}
        server = net_server.start({"/b/" + name: data for name, data in objects.items()}, self.certificate, Bucket(objects, signed=False))
        self.addCleanup(server.server_close)
        self.addCleanup(server.shutdown)
        web = self.serve(objects)
        for name in ("full.h5", "dp/index.h5"):
            with self.subTest("web", name=name):
                self.compare(web.name + "/m", folder, name)
        more = {"AWS_ENDPOINT_URL": server.name, "HOME": self.dir}
        for name in ("full.h5", "packed.h5", "dp", "dp/index.h5", "2d", "2d/index.h5", "shards"):
            with self.subTest(name):
                self.compare("s3://b", folder, name, 3 if name == "shards" else 0, **more)


class Questions(H5):
    """What the process in which libhdf5 runs asks for. The headers are behind the first MiB, which is read in any case."""

    def late(self):
        """A model of Keras whose HDF5 file is behind other things in the archive, {name: bytes}."""
        with zipfile.ZipFile(os.path.join(HDF5, "keras", "model.keras")) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        weights = members.pop("model.weights.h5")
        path = self.path("late.keras")
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in members.items():
                archive.writestr(name, data + (b" " * (3 << 20) if name == "config.json" else b""))
            archive.writestr("model.weights.h5", weights)
        return {"late.keras": bytes_at(path)}

    def test_few(self):
        server = self.serve(self.late())
        self.command("inspect", server.name + "/m/late.keras")
        asked = [r[:2] for r in server.requests if r[0].endswith(".keras")]
        self.assertLessEqual(len(asked), 5, asked)  # of the first MiB, the archive, and one for all headers of HDF5
        self.compare(server.name + "/m", self.dir, "late.keras")

    def test_passing_failures(self):
        server = self.serve(self.late())
        server.faults["/m/late.keras"] = ["", "", "reset", "503", "truncated"]
        self.command("inspect", server.name + "/m/late.keras")
        self.assertGreaterEqual(len(server.requests), 6)

    def test_lies(self):
        files = self.late()
        for fault, status, text in (("503", 4, "gave up after 6 attempts"), ("403", 4, "refuses access"), ("gzip", 3, "compressed"),
                                    ("other-etag", 3, "was changed while it was read"), ("other-range", 3, "another part")):
            with self.subTest(fault):
                server = self.serve(files)
                seen = []

                def late(handler, fault=fault, seen=seen):
                    """The fault begins with the first request in the HDF5 file."""
                    first = int(handler.headers["Range"][6:].split("-")[0])
                    if first > 3 << 20 and first < len(files["late.keras"]) - 4096 and not seen:
                        seen.append(first)
                        handler.server.faults["/m/late.keras"] = ["always-" + fault]

                server.answer = late
                line = self.command("inspect", server.name + "/m/late.keras", status=status)
                self.assertIn(text, line)
                self.assertIn("/m/late.keras", line)
                self.assertTrue(seen)


class Refused(H5):
    def test_other_files(self):
        """A file on a server may not make the command read files of this machine, or others on the server."""
        server = self.serve_folder(os.path.join(HDF5, "unsupported"), ["h5-parts.h5"])
        for option in ([], ["--follow-external"]):
            line = self.command("consolidate", server.name + "/m/h5-parts.h5", "--include=external", "-o", "x.h5", *option, status=5)
            self.assertIn("external files, which are not followed" + NOT_FOLLOWED, line)
            self.assertNotIn("--follow", line)


if __name__ == "__main__":
    unittest.main()
