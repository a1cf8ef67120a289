#!/usr/bin/env python3
"""HDF5 files of h5py on a server: h5_server.py COMMAND

Their headers are between the data. The command's copy must have the same elements as h5py, in few rounds of requests. A server that lies
or fails at any request must give one line, and no target.
"""
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time

try:
    import h5py
    import numpy as np
except ImportError:
    sys.exit(77)
sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cli"))
import net_server

COMMAND = sys.argv[1]
if not shutil.which("openssl") or not os.path.exists(os.path.join(os.path.dirname(COMMAND), "libfsdpckpt-net.so")):
    sys.exit(77)

LAYERS, DELAY = 24, 0.05
failures = []


def check(ok, text):
    if not ok:
        failures.append(text)
        print(text)


def fill(f, rng, separator, **options):
    for layer in range(LAYERS):
        for name, shape in (("attn.q", (160, 256)), ("mlp.up", (200, 256)), ("norm", (256,))):
            more = options if len(shape) == 2 and layer < 10 else {}
            f.create_dataset(f"layers.{layer}.{name}".replace(".", separator), data=rng.integers(0, 1 << 24, shape, "<i4"), **more)
    f["step"] = 1000
    f.attrs["note"] = "text"


# Of each kind: how to open the file, the separator in names, the options of some matrices, and the most rounds of requests.
KINDS = {
    "flat": ({}, ".", {}, 12),
    "nested": ({}, "/", {}, 20),
    "gzip": ({}, "/", {"chunks": (40, 256), "compression": 1}, 20),
    "many_chunks": ({}, ".", {"chunks": (5, 256), "shuffle": True, "compression": 1}, 30),
    "by_libhdf5": ({}, ".", {"chunks": (80, 256), "scaleoffset": 0}, 20),
    "latest": ({"libver": "latest"}, "/", {}, 30),
    "user_block": ({"userblock_size": 2048}, ".", {}, 60),
}


def run(server, *args, **more):
    environment = dict(os.environ, SSL_CERT_FILE=certificate[0], FSDPCKPT_NET_PACE="1")
    return subprocess.run([COMMAND, *args, "-q"], capture_output=True, text=True, env=environment, check=False, **more)


def same(path, copy, what):
    with h5py.File(path) as a, h5py.File(copy) as b:
        names = []

        def visit(key, d):
            if isinstance(d, h5py.Dataset):
                names.append(key)
                check(key in b and d[()].tobytes() == b[key][()].tobytes(), f"{what}: {key} differs")
        a.visititems(visit)
        check(len(names) == 3 * LAYERS + 1, f"{what}: {len(names)} datasets")


def check_kind(kind, folder):
    options, separator, more, most = KINDS[kind]
    path, copy = os.path.join(folder, kind + ".h5"), os.path.join(folder, "copy.h5")
    with h5py.File(path, "w", **options) as f:
        fill(f, np.random.default_rng(len(kind)), separator, **more)
    with open(path, "rb") as f:
        data = f.read()
    server = net_server.start({"/m/x.h5": data}, certificate)
    name = server.name + "/m/x.h5"
    server.delay = DELAY
    p = run(server, "inspect", name)
    check(p.returncode == 0 and not p.stderr, f"{kind}: inspect: exit {p.returncode}: {p.stderr}")
    asked, rounds = len(server.requests), net_server.rounds(server.requests, DELAY)
    began = time.monotonic()
    print(f"{kind}: {len(data) >> 20} MiB, inspect: {asked} requests in {rounds} rounds")
    check(rounds <= most, f"{kind}: {rounds} rounds of requests, more than {most}")
    server.delay = 0
    p = run(server, "consolidate", name, "-o", copy, "--force", "--exclude", "@attributes")
    check(p.returncode == 0, f"{kind}: exit {p.returncode}: {p.stderr}")
    if p.returncode == 0:
        same(path, copy, kind)
    if kind == "by_libhdf5":  # each of 40 boxes has a process, which needs the same headers
        check(len(server.requests) < 260, f"{kind}: {len(server.requests)} requests")
    print(f"  consolidate: {len(server.requests) - asked} requests, {time.monotonic() - began:.1f} s")
    server.shutdown()
    server.server_close()
    return data


def check_faults(data, folder):
    """The server is honest for some requests, and then no more."""
    faults = (("other-etag", 3, "was changed while it was read"), ("403", 4, "refuses access"), ("other-range", 3, "another part"),
              ("503", 4, "gave up after 6 attempts"))
    for fault, status, text in faults:
        for honest in (1, 2, 20):
            server = net_server.start({"/m/x.h5": data}, certificate)
            server.faults["/m/x.h5"] = [""] * honest + ["always-" + fault]
            target = os.path.join(folder, "t", "x.h5")
            os.mkdir(os.path.dirname(target))
            p = run(server, "consolidate", server.name + "/m/x.h5", "-o", target)
            what = f"{fault} after {honest} requests"
            check(p.returncode == status and text in p.stderr and p.stderr.count("\n") == 1, f"{what}: exit {p.returncode}: {p.stderr}")
            check(os.listdir(os.path.dirname(target)) == [], f"{what}: something is left")
            os.rmdir(os.path.dirname(target))
            server.shutdown()
            server.server_close()


with tempfile.TemporaryDirectory() as work:
    certificate = net_server.make_certificate(work)
    files = {kind: check_kind(kind, work) for kind in KINDS}
    check_faults(files["gzip"], work)
    check(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 200 << 10, "a process used more than 200 MiB")
sys.exit(1 if failures else 0)
