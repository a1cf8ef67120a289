#!/usr/bin/env python3
"""Checkpoints on servers: what is read over https equals the files; a server that fails or lies gives one line and no target."""

import concurrent.futures
import contextlib
import hashlib
import json
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import tempfile
import threading
import time
import unittest

import net_server
from harness import BINARY, HANG, Case

if subprocess.run(["openssl", "version"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False).returncode != 0:
    raise SystemExit(77)
if not os.path.exists(os.path.join(os.path.dirname(BINARY), "libfsdpckpt-net.so")):
    raise SystemExit(77)

SHARDS, TENSORS = 8, 1000
made = random.Random(7)


def safetensors(tensors):
    """The bytes of a file, as the format is specified: {name: (dtype, shape, bytes)}."""
    header, at = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values())


def file_of(size):
    return safetensors({"model.a": ("F32", [size, 256], made.randbytes(size * 1024)), "model.b": ("BF16", [3], made.randbytes(6))})


def folder_of(shards, tensors):
    """Files and the index of a model, {name: bytes}."""
    files, weight_map, total = {}, {}, 0
    for s in range(shards):
        name = "model-%05d-of-%05d.safetensors" % (s + 1, shards)
        own = {"layers.%d.%d.weight" % (s, i): ("F32", [4, 4], made.randbytes(64)) for i in range(tensors)}
        total += 64 * tensors
        weight_map.update(dict.fromkeys(own, name))
        files[name] = safetensors(own)
    files["model.safetensors.index.json"] = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}).encode()
    files["config.json"] = b'{"model_type": "llama"}'
    return files


class Net(Case):
    """A server for each test."""

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.mkdtemp(prefix="fsdpckpt-net-")
        cls.certificate = net_server.make_certificate(cls.folder)

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.folder)

    def serve(self, files, https=True, answer=None):
        server = net_server.start({"/m/" + name: data for name, data in files.items()}, self.certificate if https else None, answer)
        self.addCleanup(server.server_close)
        self.addCleanup(server.shutdown)
        return server

    def command(self, *arguments, status=0, **more):
        """Runs the command. @return stdout; for a failure, the one line of stderr"""
        environment = {**os.environ, "SSL_CERT_FILE": self.certificate[0], "FSDPCKPT_NET_PACE": "1", **more}
        got = subprocess.run([BINARY, *arguments], env=environment, cwd=self.dir, capture_output=True, text=True, timeout=HANG, check=False)
        self.assertEqual(got.returncode, status, got.stdout + got.stderr)
        if status in (0, 1):
            return got.stdout
        self.assertEqual(got.stderr.count("\n"), 1, got.stderr)
        return got.stderr

    def local(self, files):
        os.mkdir(os.path.join(self.dir, "local"))
        for name, data in files.items():
            with open(os.path.join(self.dir, "local", name), "wb") as f:
                f.write(data)

    def digest(self, path):
        """Of a file or of the files of a folder, by name."""
        whole = os.path.join(self.dir, path)
        names = sorted(os.listdir(whole)) if os.path.isdir(whole) else [""]
        return [(name, hashlib.sha256(self.bytes_of(os.path.join(path, name) if name else path)).hexdigest()) for name in names]

    def bytes_of(self, path):
        with open(os.path.join(self.dir, path), "rb") as f:
            return f.read()


class Same(Net):
    """Every command says of a name on a server what it says of the file."""

    def compare(self, remote, local):
        for arguments in (["inspect", "--json"], ["check", "--json"], ["schema"], ["verify", "--json"], ["inspect", "--tree"]):
            there = self.command(arguments[0], remote, *arguments[1:]).replace(remote, local)
            self.assertEqual(there, self.command(arguments[0], local, *arguments[1:]), arguments)
        self.assertIn("equal", self.command("diff", remote, local))
        for options in (["consolidate"], ["consolidate", "--dtype", "bf16"], ["reshard", "--dp", "3"]):
            for source, target in ((remote, "there"), (local, "here")):
                self.command(options[0], source, "-o", target + "/" if options[0] == "reshard" else target + ".safetensors", "--to",
                             "safetensors", "--force", *options[1:])
            suffix = "" if options[0] == "reshard" else ".safetensors"
            self.assertEqual(self.digest("there" + suffix), self.digest("here" + suffix))

    def test_file(self):
        files = {"model.safetensors": file_of(5000)}
        server = self.serve(files)
        self.local(files)
        self.compare(server.name + "/m/model.safetensors", "local/model.safetensors")
        for source in (server.name + "/m/model.safetensors", "local/model.safetensors"):
            self.command("extract", source, "model.a", "-o", "a.npy", "--force")
            self.assertEqual(self.bytes_of("a.npy")[128:], files["model.safetensors"][-6 - 5000 * 1024:-6])
        sent = [r for r in server.requests if r[0] == "/m/model.safetensors"]
        self.assertTrue(all(r[1] for r in sent), "every request is for a part")
        self.assertTrue(all(r[2].get("If-Match") for r in sent if not r[1].startswith("bytes=0-")), "every part is of one version")

    def test_folder(self):
        files = folder_of(4, 50)
        server = self.serve(files)
        self.local(files)
        self.compare(server.name + "/m", "local")

    def test_seal(self):
        files = {"model.safetensors": file_of(3)}
        self.local(files)
        self.command("verify", "local/model.safetensors", "--seal")
        seal = "model.safetensors.fsdpckpt-seal.json"
        server = self.serve(dict(files, **{seal: self.bytes_of("local/" + seal)}))
        name = server.name + "/m/model.safetensors"
        self.assertEqual(self.command("verify", name, "--json").replace(name, "local/model.safetensors"),
                         self.command("verify", "local/model.safetensors", "--json"))
        server.files["/m/model.safetensors"] = files["model.safetensors"][:-1] + b"?"
        self.assertIn("tensor model.b: damaged", self.command("verify", name, status=1))
        server.files["/m/" + seal] = b"{"
        self.assertIn("damaged seal", self.command("verify", name, status=3))
        server.faults["/m/" + seal] = ["always-403"]
        self.command("inspect", name)

    def test_plain_http_on_this_machine(self):
        server = self.serve({"model.safetensors": file_of(3)}, https=False)
        self.command("inspect", server.name + "/m/model.safetensors")
        for host in ("example.com", "127.0.0.1.example.com", "10.0.0.1"):
            told = self.command("inspect", "http://%s/a.safetensors" % host, status=2)
            self.assertIn("http:// is only for servers on this machine", told)

    def test_one_file_in_a_folder_with_others(self):
        files = {"model.safetensors": file_of(3), "other.safetensors": file_of(4)}
        server = self.serve(files)
        for name in ("/m/", "/m/model.safetensors"):
            self.assertIn("model.a", self.command("diff", server.name + name, server.name + "/m/other.safetensors", status=1))

    def test_a_conversion_that_broke_off_goes_on_unless_the_file_was_replaced(self):
        made_of = lambda: safetensors({name: ("U8", [size], made.randbytes(size)) for name, size in
                                       {"a": 100_000, "b": 100_000, "c": 200_000, "d": 100_000}.items()})
        files = {"model.safetensors": made_of()}
        server = self.serve(files)
        convert = ["consolidate", server.name + "/m/model.safetensors", "-o", "t/", "--to", "safetensors", "--max-shard-size", "100kB"]
        self.command(*convert)
        whole = self.digest("t")
        for replaced in (False, True):
            shutil.rmtree(os.path.join(self.dir, "t"))
            limit = ["prlimit", "--fsize=150000", BINARY, *convert, "--resume", "-j1"]  # the third file is larger
            environment = dict(os.environ, SSL_CERT_FILE=self.certificate[0], FSDPCKPT_NET_PACE="1")
            got = subprocess.run(limit, env=environment, cwd=self.dir, capture_output=True, text=True, timeout=HANG, check=False)
            self.assertEqual(got.returncode, 4, got.stderr)
            self.assertIn("is kept in", got.stderr)
            server.requests.clear()
            if replaced:
                server.files["/m/model.safetensors"] = made_of()
                told = self.command(*convert, "--resume", status=3)
                self.assertIn(server.name + "/m/model.safetensors: was changed since the unfinished conversion was begun", told)
            else:
                self.command(*convert, "--resume")
                self.assertEqual(self.digest("t"), whole)

    def test_what_cannot_be_on_a_server(self):
        server = self.serve({"model.safetensors": file_of(3)})
        name = server.name + "/m/model.safetensors"
        for arguments in (["consolidate", name, "-o", server.name + "/m/x.safetensors"], ["consolidate", name, "-o", "hf://owner/model", "--to", "safetensors"],
                          ["verify", name, "--seal"]):
            self.assertIn("nothing can be written there", self.command(*arguments, status=5))
        self.assertIn("on a server: download it first", self.command("view", name, "-o", "v.h5", status=5))

    def test_what_is_missing(self):
        server = self.serve({"notes.html": b"<html>"})
        for name in ("/m/model.safetensors", "/m/", "/nothing"):
            self.assertIn("no such file", self.command("inspect", server.name + name, status=3))


class Process(Net):
    """The process that talks to servers: what it may do, and what is said without its module."""

    def test_confined(self):
        server = self.serve({"model.safetensors": file_of(3)})
        server.delay = 1
        running = subprocess.Popen([BINARY, "inspect", server.name + "/m/model.safetensors"], stdout=subprocess.DEVNULL,
                                   env=dict(os.environ, SSL_CERT_FILE=self.certificate[0]))
        try:
            while not server.requests:
                time.sleep(0.01)
            found = []
            for pid in filter(str.isdigit, os.listdir("/proc")):
                with contextlib.suppress(OSError):
                    with open("/proc/%s/cmdline" % pid, encoding="utf-8", errors="replace") as f:
                        if server.name in f.read() and int(pid) != running.pid:
                            found.append(pid)
            self.assertEqual(len(found), 1)
            with open("/proc/%s/status" % found[0], encoding="utf-8") as f:
                status = dict(line.rstrip("\n").split(":\t", 1) for line in f if ":\t" in line)
            self.assertEqual(status["NoNewPrivs"], "1")
            version = subprocess.run([BINARY, "--version"], capture_output=True, text=True, check=True).stdout
            if not re.search(r"seccomp +no", version):
                self.assertEqual(status["Seccomp"], "2")
            open_files = {os.readlink("/proc/%s/fd/%s" % (found[0], fd)) for fd in os.listdir("/proc/%s/fd" % found[0])}
            self.assertEqual([name for name in open_files if not name.startswith(("socket:", "pipe:", "anon_inode:")) and name != "/dev/null"], [])
        finally:
            self.assertEqual(running.wait(), 0)
        for _ in range(500):  # it ends with the command
            if not os.path.exists("/proc/" + found[0]):
                break
            time.sleep(0.01)
        self.assertFalse(os.path.exists("/proc/" + found[0]))

    def test_without_the_module(self):
        line = self.command("inspect", "https://localhost/model.safetensors", status=5, FSDPCKPT_MODULE_PATH=self.dir)
        self.assertIn("libfsdpckpt-net.so was not found", line)


    def test_interrupted(self):
        """Ctrl-C while a server is silent: the command ends at once, and leaves nothing."""
        server = self.serve({"1.safetensors": file_of(3000), "4.safetensors": file_of(3000)})
        silent, asked = threading.Event(), {"1": threading.Event(), "4": threading.Event()}
        self.addCleanup(silent.set)

        def answer(handler):
            if not handler.headers["Range"].startswith("bytes=0-"):
                asked[os.path.basename(handler.path)[0]].set()
                silent.wait(60)

        server.answer = answer
        for jobs in ("1", "4"):
            running = subprocess.Popen([BINARY, "consolidate", "%s/m/%s.safetensors" % (server.name, jobs), "-o", "x.h5", "-j", jobs], cwd=self.dir,
                                       env=dict(os.environ, SSL_CERT_FILE=self.certificate[0]), stderr=subprocess.PIPE, text=True)
            self.assertTrue(asked[jobs].wait(30))
            running.send_signal(signal.SIGINT)
            _, line = running.communicate(timeout=20)
            self.assertEqual((running.returncode, line.count("interrupted"), line.count("\n")), (130, 1, 1), line)
            self.assertEqual(self.listing(), [])


class Requests(Net):
    """How few requests are made, and how many at once."""

    def test_rounds_of_a_large_folder(self):
        server = self.serve(folder_of(SHARDS, TENSORS))
        server.delay = 0.1  # long enough that a busy machine starts what is asked for at once within it
        self.command("inspect", server.name + "/m")
        self.assertLessEqual(net_server.rounds(server.requests, server.delay), 12)
        names = [r[0] for r in server.requests]
        self.assertEqual(len(names), len(set(names)), "each head is read once")

    def test_rounds_of_many_files(self):
        """Files are asked for before each is looked at, also those that an index does not announce."""
        server = self.serve(folder_of(360, 1), https=False)
        server.delay = 0.1
        self.command("inspect", server.name + "/m")
        self.assertLessEqual(net_server.rounds(server.requests, server.delay), 30)
        self.assertLess(len(server.requests), 380)

    def test_rounds_of_data(self):
        """The tiles of a file are asked for at once, as many as the memory has room for."""
        server = self.serve({"model.safetensors": file_of(16 << 10)}, https=False)
        server.delay = 0.3
        for options, least, most in (([], 2, 6), (["--memory", "4M"], 7, 40), (["-j", "4"], 4, 40)):
            server.requests.clear()
            self.command("consolidate", server.name + "/m/model.safetensors", "-o", "x.safetensors", "--force", *options,
                         FSDPCKPT_NET_PACE="100")
            rounds = net_server.rounds(server.requests, server.delay)
            self.assertGreaterEqual(rounds, least, options)
            self.assertLessEqual(rounds, most, options)

    def test_rounds_of_samples(self):
        """The elements by which a target is compared with its source are asked for at once."""
        server = self.serve({"model.safetensors": safetensors({"t%d" % i: ("U8", [64 << 10], made.randbytes(64 << 10)) for i in range(96)})})
        server.delay = 0.1
        self.command("consolidate", server.name + "/m/model.safetensors", "-o", "x.safetensors")
        self.assertLessEqual(net_server.rounds(server.requests, server.delay), 14)

    def test_small_tensors(self):
        """Those that are next to each other are read with one request, and each byte about once."""
        data = safetensors({"t%04d" % i: ("U8", [9 << 10], made.randbytes(9 << 10)) for i in range(1000)})
        server = self.serve({"model.safetensors": data})
        self.command("consolidate", server.name + "/m/model.safetensors", "-o", "x.safetensors")
        asked = [[int(n) for n in r[1][6:].split("-")] for r in server.requests if r[0].endswith("model.safetensors")]
        large = [last + 1 - first for first, last in asked if last - first > 3000]  # not the samples
        self.assertLess(len(large), 60)
        self.assertLess(sum(large), len(data) + (1 << 20))

    def test_bytes(self):
        """A copy reads each byte about once."""
        data = file_of(8000)
        server = self.serve({"model.safetensors": data})
        self.command("consolidate", server.name + "/m/model.safetensors", "-o", "x.safetensors")
        total = sum(int(last) - int(first) + 1 for first, last in (r[1][6:].split("-") for r in server.requests if r[0].endswith("model.safetensors")))
        self.assertLess(total, len(data) + (2 << 20))

    def test_servers_of_few_connections(self):
        """Neither what is read ahead nor idle connections keep reads waiting that get none."""
        server = self.serve({"model.safetensors": safetensors({"t%02d" % i: ("U8", [1 << 20], made.randbytes(1 << 20)) for i in range(24)})},
                            https=False)
        name = server.name + "/m/model.safetensors"
        self.command("consolidate", name, "-o", "all.safetensors")
        for slots, workers in ((1, "1"), (1, "32"), (3, "32"), (8, "32")):
            server.slots = threading.Semaphore(slots)
            began = time.monotonic()
            self.command("consolidate", name, "-o", "few.safetensors", "--force", "-j", workers)
            self.assertLess(time.monotonic() - began, 30, (slots, workers))  # reads that starve end after minutes
            self.assertEqual(self.bytes_of("few.safetensors"), self.bytes_of("all.safetensors"))


class Faults(Net):
    """A server that fails for a moment makes no difference; one that lies is an error with one line, and there is no target."""

    def setUp(self):
        super().setUp()
        self.data = file_of(6000)
        self.path = "/m/model.safetensors"

    def consolidate(self, faults, status=0, **more):
        """Runs the command in an empty folder, so that several can run at once."""
        server = self.serve({"model.safetensors": self.data}, **more)
        server.faults[self.path] = list(faults)
        folder = tempfile.mkdtemp(dir=self.dir)
        target = os.path.join(folder, "x.safetensors")
        line = self.command("consolidate", server.name + self.path, "-o", target, status=status)
        if status == 0:
            self.assertTrue(self.bytes_of(target).endswith(self.data[-6000 * 1024 - 6:]))
        self.assertEqual(os.listdir(folder), ["x.safetensors"] if status == 0 else [])
        return line

    def all_at_once(self, work, cases):
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            for case, job in [(case, pool.submit(work, *case)) for case in cases]:
                with self.subTest(case):
                    job.result()

    def test_passing(self):
        self.all_at_once(self.consolidate, [([fault, "", fault, fault, ""],) for fault in ("reset", "503", "429", "500", "truncated")])

    def test_slow(self):
        self.consolidate(["", "slow"])

    def test_lies(self):
        def lie(fault, status, text, before):
            line = self.consolidate([*before, "always-" + fault], status=status)
            self.assertIn(text, line)
            self.assertIn(self.path, line)

        lies = (("whole", 3, "support ranges"), ("other-range", 3, "another part"), ("gzip", 3, "compressed"), ("shorter", 3, "fewer bytes"),
                ("endless", 3, "64 KiB of headers"), ("to:http://localhost:1/x", 2, "another scheme than https"),
                ("to:ftp://localhost/x", 2, "another scheme"), ("to:https://localhost/" + "x" * 9000, 3, "redirects to a place that cannot"),
                ("to:https://me:secret@localhost/x", 2, "cannot be understood"), ("to:" + self.path, 3, "redirects more than 5 times"),
                ("503", 4, "gave up after 6 attempts"), ("reset", 4, "gave up after 6 attempts"), ("403", 4, "refuses access"))
        # the first request lies, or one of the data
        self.all_at_once(lie, [(*one, before) for one in lies for before in ([], [""])])

    def test_changed(self):
        """Another version than the one whose header was read: by its ETag, and by the answer 412."""
        self.assertIn("was changed while it was read", self.consolidate(["", "always-other-etag"], status=3))
        changed = self.data[:-1] + bytes([self.data[-1] ^ 1])

        def change(handler):
            if not handler.headers.get("Range", "").startswith("bytes=0-"):
                handler.server.files[self.path] = changed

        self.assertIn("was changed while it was read", self.consolidate([], status=3, answer=change))

    def test_certificate_of_another(self):
        server = self.serve({"model.safetensors": self.data})
        folder = os.path.join(self.dir, "other")
        os.mkdir(folder)
        other = net_server.make_certificate(folder)
        got = subprocess.run([BINARY, "inspect", server.name + self.path], env=dict(os.environ, SSL_CERT_FILE=other[0]), capture_output=True,
                             text=True, check=False)
        self.assertEqual(got.returncode, 4)
        self.assertIn("certificate is not trusted", got.stderr)

    def test_secrets_are_not_shown(self):
        for name in ("https://me:secret@localhost/m.safetensors", "https://localhost/m.safetensors#secret"):
            self.assertNotIn("secret", self.command("inspect", name, status=2))


class Proxies(Net):
    """The variables that curl and Python know. `server.test` is a name that only the proxy knows."""

    def setUp(self):
        super().setUp()
        self.data = file_of(3000)
        self.server = self.serve({"model.safetensors": self.data})
        self.far = self.server.name.replace("localhost", "server.test") + "/m/model.safetensors"
        self.near = self.server.name + "/m/model.safetensors"

    def proxy(self, *arguments):
        made_ = net_server.Proxy(*arguments)
        self.addCleanup(made_.close)
        return made_

    def test_variables(self):
        proxy, other = self.proxy(), "http://localhost:1"
        for given in ({"https_proxy": proxy.where}, {"HTTPS_PROXY": "http://" + proxy.where + "/"}, {"all_proxy": "HTTP://" + proxy.where},
                      {"ALL_PROXY": proxy.where}, {"https_proxy": proxy.where, "HTTPS_PROXY": other, "all_proxy": other, "http_proxy": other},
                      {"https_proxy": "", "HTTPS_PROXY": proxy.where, "ALL_PROXY": other, "NO_PROXY": "other.test, er.test,server.tes"}):
            with self.subTest(given):
                proxy.requests.clear()
                self.command("consolidate", self.far, "-o", "x.safetensors", "--force", **given)
                self.assertTrue(self.bytes_of("x.safetensors").endswith(self.data[-3000 * 1024 - 6:]))
                self.assertEqual({lines[0] for lines in proxy.requests}, {"CONNECT " + self.far.split("/")[2] + " HTTP/1.1"})

    def test_password(self):
        proxy = self.proxy(None, "Basic dXM6YS9icCU=")  # us:a/bp%
        self.command("inspect", self.far, https_proxy="http://us:a%2Fbp%25@" + proxy.where)
        for wrong in ("http://us:hidden@" + proxy.where, "https://us:hidden@" + proxy.where, "socks5h://us:hidden@" + proxy.where,
                      "http://us:hid den@" + proxy.where, "http://us:hidden@localhost:1", "http://us:hidden@proxy.invalid",
                      "http://us:hidden@localhost:x", "ftp://us:hidden@" + proxy.where, "http://us:hidden@" + "x" * 1100):
            with self.subTest(wrong):
                got = subprocess.run([BINARY, "inspect", self.far], capture_output=True, text=True, timeout=HANG, check=False, env={
                    **os.environ, "SSL_CERT_FILE": self.certificate[0], "FSDPCKPT_NET_PACE": "1", "https_proxy": wrong})
                self.assertEqual(got.returncode, 5 if "socks" in wrong else 2 if re.search("x{9}|:x|ftp| ", wrong) else 4, got.stderr)
                self.assertEqual(got.stderr.count("\n"), 1)
                self.assertIn("proxy", got.stderr)
                self.assertNotIn("hid", got.stdout + got.stderr)
        self.assertIn("wants a user and a password", self.command("inspect", self.far, status=4, https_proxy=proxy.where))

    def test_tls_to_the_proxy(self):
        proxy = self.proxy(self.certificate)
        self.command("inspect", self.far, https_proxy="https://" + proxy.where)
        self.assertEqual(len(proxy.requests), 1)

    def test_without(self):
        proxy = self.proxy()
        address = self.near.replace("localhost", "127.0.0.1")
        for name, given in ((self.near, "localhost"), (self.near, "other.test,LOCALHOST"), (self.near, ".localhost"), (self.near, "*"),
                            (self.near, self.near.split("/")[2]), (address, "127.0.0.1"), (address, "10.0.0.0/8 127.0.0.0/9")):
            for variable in ("NO_PROXY", "no_proxy"):
                self.command("inspect", name, ALL_PROXY=proxy.where, **{variable: given})
        plain = self.serve({"model.safetensors": self.data}, https=False)
        self.command("inspect", plain.name + "/m/model.safetensors", http_proxy=proxy.where, https_proxy=proxy.where, ALL_PROXY=proxy.where)
        self.assertEqual(proxy.requests, [])
        for name, given in ((self.near, "localhost:1"), (self.near, "host"), (address, "127.0.0.2"), (address, "127.128.0.0/9")):
            proxy.requests.clear()
            self.command("inspect", name, ALL_PROXY=proxy.where, NO_PROXY=given)
            self.assertEqual(len(proxy.requests), 1, given)

    def test_tokens_are_not_for_the_proxy(self):
        proxy = self.proxy()
        self.command("inspect", "s3://m/model.safetensors", https_proxy=proxy.where, AWS_ENDPOINT_URL=self.far[:self.far.index("/m/")],
                     AWS_ACCESS_KEY_ID="hidden", AWS_SECRET_ACCESS_KEY="hidden", AWS_SESSION_TOKEN="hidden")
        self.assertNotIn("hidden", str(proxy.requests))
        self.assertIn("hidden", str(self.server.requests))

    def test_refusals(self):
        proxy = self.proxy()
        proxy.refusals = [502, 503]
        self.command("inspect", self.far, https_proxy=proxy.where)
        proxy.refusals = [502] * 10
        self.assertIn("the proxy is busy or cannot reach the server (status 502)", self.command("inspect", self.far, status=4, https_proxy=proxy.where))
        proxy.refusals = [403]
        self.assertIn("the proxy refuses to connect to the server (status 403)", self.command("inspect", self.far, status=4, https_proxy=proxy.where))


if __name__ == "__main__":
    unittest.main()
