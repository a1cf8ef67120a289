#!/usr/bin/env python3
"""Measures a conversion whose source is on a server, next to programs that download the same bytes: curl, aria2c, and Python's requests.
remote.py FSDPCKPT [--dir DIR] [--size 2G] [--rounds 5] [--connections 16] [--only TEXT] [--peers FILE ...]

nginx on loopback serves a model in eight safetensors files, by http and by https, with no delay, with 20 ms before each answer (it needs
libnginx-mod-http-lua), and with 20 ms and at most 20 MB a second for each connection, as object stores have. Every round runs every command
once; the bytes are in the page cache of the server. `consolidate` writes one file. The downloads write the eight files, or parts of
them, and `then converted` adds a `consolidate` of the files on the disk. Our times include all fsyncs, those of the others a `sync -f`.

The result of each round of ours is compared with that of the files on the disk. Processor seconds are those of all processes of a
command, without the server's; on a busy machine, only these can be compared. --peers: other builds of fsdpckpt, to compare with.
"""
import argparse
import concurrent.futures
import ctypes
import filecmp
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time

from deltas import write_header

FILES, ELEMENTS, PART = 8, 8 << 20, 8 << 20
SETTINGS = {"now": "", "20 ms": "access_by_lua_block { ngx.sleep(0.02) }",
            "20 ms, 20 MB/s": "access_by_lua_block { ngx.sleep(0.02) } limit_rate 20m;"}

CONFIGURATION = """
{modules}
worker_processes 2;
pid {home}/nginx.pid;
error_log {home}/error.log;
events {{ worker_connections 256; }}
http {{
  access_log off;
  sendfile on;
  keepalive_requests 1000000;
  client_body_temp_path {home}/t1; proxy_temp_path {home}/t2; fastcgi_temp_path {home}/t3; uwsgi_temp_path {home}/t4; scgi_temp_path {home}/t5;
  server {{
    listen 127.0.0.1:{port};
    listen 127.0.0.1:{secure} ssl{http2};
    ssl_certificate {home}/cert.pem;
    ssl_certificate_key {home}/key.pem;
    {locations}
  }}
}}
"""


def make(home, size):
    """The files of a model."""
    import numpy as np
    rng = np.random.default_rng(1)
    os.makedirs(os.path.join(home, "model"))
    weight_map = {}
    per_file = max(1, int(size) // FILES // (2 * ELEMENTS))
    for k in range(FILES):
        file = f"model-{k + 1:05d}-of-{FILES:05d}.safetensors"
        names = [f"layers.{k}.{i}.weight" for i in range(per_file)]
        weight_map.update(dict.fromkeys(names, file))
        with open(os.path.join(home, "model", file), "wb") as f:
            write_header(f, [(name, "BF16", [ELEMENTS // 4096, 4096], 2 * ELEMENTS) for name in names])
            for _ in names:
                rng.integers(0, 1 << 16, ELEMENTS, "<u2").tofile(f)
    with open(os.path.join(home, "model", "model.safetensors.index.json"), "w") as f:
        json.dump({"metadata": {}, "weight_map": weight_map}, f)


class Server:
    def __init__(self, home, port, http2):
        self.home = os.path.abspath(home)
        folder = "/usr/lib/nginx/modules"
        lua = os.path.exists(f"{folder}/ngx_http_lua_module.so")
        modules = [f"load_module {folder}/{name}.so;" for name in ("ndk_http_module", "ngx_http_lua_module")] if lua else []
        self.settings = list(SETTINGS) if lua else ["now"]
        locations = [f"location /{i}/ {{ alias {self.home}/model/; {SETTINGS[name]} }}" for i, name in enumerate(self.settings)]
        subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2", "-keyout",
                        f"{home}/key.pem", "-out", f"{home}/cert.pem", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"],
                       check=True, stderr=subprocess.DEVNULL)
        self.certificate = os.path.join(self.home, "trusted.pem")  # with those of the system, which take time to parse
        with open(self.certificate, "wb") as f:
            for path in ("/etc/ssl/certs/ca-certificates.crt", f"{home}/cert.pem"):
                if os.path.exists(path):
                    with open(path, "rb") as one:
                        shutil.copyfileobj(one, f)
        configuration = os.path.join(self.home, "nginx.conf")
        with open(configuration, "w") as f:
            f.write(CONFIGURATION.format(modules="\n".join(modules), home=self.home, port=port, secure=port + 1, locations="\n".join(locations),
                                         http2=" http2" if http2 else ""))
        # The server runs in the foreground as the same user: it needs no privileges, and ends with us.
        self.process = subprocess.Popen(["nginx", "-c", configuration, "-e", f"{self.home}/error.log", "-g", "daemon off;"])
        self.urls = {(scheme, name): f"{scheme}://localhost:{port + (scheme == 'https')}/{i}/" for scheme in ("http", "https")
                     for i, name in enumerate(self.settings)}
        time.sleep(0.5)
        assert self.process.poll() is None

    def close(self):
        self.process.terminate()
        self.process.wait()


def parts_of(model, connections):
    """(file, first, last) for each connection, all of about one size."""
    each = max(1, connections // FILES)
    for file in sorted(os.listdir(model)):
        if file.endswith(".safetensors"):
            size = os.path.getsize(os.path.join(model, file))
            bounds = [size * i // each for i in range(each + 1)]
            yield from ((file, first, last - 1) for first, last in zip(bounds, bounds[1:]))


def curl(url, certificate, model, out, connections):
    argv = ["curl", "--no-progress-meter", "-Z", "--parallel-immediate", "--parallel-max", str(connections), "--http1.1"]
    for i, (file, first, last) in enumerate(parts_of(model, connections)):
        argv += [*(["--next"] if i else []), "--no-progress-meter", "--cacert", certificate, "--http1.1", "-r", f"{first}-{last}", "-o", f"{out}/{file}.{first}",
                 url + file]
    return argv


def aria2c(url, certificate, model, out, connections):
    files = sorted({file for file, _, _ in parts_of(model, connections)})
    listed = os.path.join(out, "list")
    with open(listed, "w") as f:
        f.writelines(f"{url}{file}\n" for file in files)
    each = max(1, connections // FILES)
    return ["aria2c", "-q", f"--ca-certificate={certificate}", "-d", out, "-j", str(FILES), "-x", str(each), "-s", str(each), "-k", "1M",
            "--file-allocation=falloc", "-i", listed]


def peer_requests(url, certificate, model, out, connections):
    """Parts of 8 MiB in threads, as boto3 and huggingface_hub download."""
    import requests
    own = threading.local()

    def get(part):
        file, first, last, fd = part
        if not hasattr(own, "session"):
            own.session = requests.Session()
            own.session.verify = certificate
            own.session.trust_env = False
        with own.session.get(url + file, headers={"Range": f"bytes={first}-{last}", "Accept-Encoding": "identity"}, stream=True) as r:
            r.raise_for_status()
            for block in r.iter_content(1 << 20):
                os.pwrite(fd, block, first)
                first += len(block)

    parts = []
    for file in sorted(os.listdir(model)):
        if file.endswith(".safetensors"):
            size = os.path.getsize(os.path.join(model, file))
            fd = os.open(os.path.join(out, file), os.O_CREAT | os.O_WRONLY)
            parts += [(file, at, min(at + PART, size) - 1, fd) for at in range(0, size, PART)]
    with concurrent.futures.ThreadPoolExecutor(int(connections)) as pool:
        list(pool.map(get, parts))


def timed(argv, processes, sync, home):
    """@return wall seconds, processor seconds (with those of the fetcher), and the peak memory of a process in MiB."""
    start, processor, most = time.perf_counter(), 0, 0
    p = subprocess.Popen(argv)
    seconds = 0
    for _ in range(processes):  # the command, and the fetcher, for which this process waits when its parent has ended
        pid, status, usage = os.wait4(-1, 0)
        assert status == 0, argv
        if pid == p.pid:
            p.returncode = 0
            if sync:
                subprocess.run(["sync", "-f", home], check=True)
            seconds = time.perf_counter() - start
        processor += usage.ru_utime + usage.ru_stime
        most = max(most, usage.ru_maxrss / 1024)
    return seconds, processor, most


def print_row(server, command, times, best, processor, memory):
    """One row of the table; `times` and `processor` in seconds and `memory` in MiB, of each round."""
    median = statistics.median(times)
    print(f"| {server} | {command} | {min(times):.2f} s | {median:.2f} s | {median / best:.2f} | {statistics.median(processor):.2f} s | "
          f"{max(memory):.0f} |", flush=True)


def parser_of(text, port):
    """The options that this and buckets.py have."""
    parser = argparse.ArgumentParser(description=text.split("\n")[0])
    parser.add_argument("fsdpckpt")
    parser.add_argument("--dir", default=".")
    parser.add_argument("--size", default="2G")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--port", type=int, default=port)
    return parser


def make_in(folder, size):
    """@return a new folder with the model"""
    shutil.rmtree(folder, True)
    subprocess.run([sys.executable, os.path.abspath(__file__), "make", folder, str(int(size[:-1]) << {"M": 20, "G": 30}[size[-1]])], check=True)
    return folder


def main():
    if sys.argv[1] in ("make", "peer_requests"):
        return globals()[sys.argv[1]](*sys.argv[2:])
    parser = parser_of(__doc__, 18080)
    parser.add_argument("--http2", action="store_true", help="the server offers HTTP/2")
    parser.add_argument("--only", default="", help="only servers with this text in their name, such as 'https, 20 ms'")
    parser.add_argument("--options", default="", help="more options of consolidate")
    parser.add_argument("--peers", nargs="*", default=[], help="other builds of fsdpckpt")
    parser.add_argument("--ours", action="store_true", help="only fsdpckpt")
    o = parser.parse_args()
    home = make_in(os.path.join(o.dir, "remote"), o.size)
    me = [sys.executable, os.path.abspath(__file__)]
    model, out, target, here = (os.path.join(home, name) for name in ("model", "out", "x.safetensors", "here.safetensors"))
    subprocess.run([o.fsdpckpt, "consolidate", model, "-o", here, "-q"], check=True)
    server = Server(home, o.port, o.http2)
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
    os.environ["SSL_CERT_FILE"] = server.certificate
    print("| server | command | best | median | × the best download | processor | memory, MiB |\n|---|---|---|---|---|---|---|")
    try:
        for (scheme, setting), url in server.urls.items():
            if o.only not in f"{scheme}, {setting}":
                continue
            load = os.getloadavg()[0]
            known = (url, server.certificate, model, out, o.connections)
            ours = {"fsdpckpt": o.fsdpckpt, **{f"fsdpckpt {i + 1}": path for i, path in enumerate(o.peers)}}
            jobs = {name: [path, "consolidate", url, "-o", target, "-q", *o.options.split()] for name, path in ours.items()}
            if not o.ours:
                jobs["curl"] = curl(*known)
                jobs["requests"] = [*me, "peer_requests", *map(str, known)]
                if shutil.which("aria2c"):
                    jobs["aria2c"] = None
            times, processor, rss = ({name: [] for name in jobs} for _ in range(3))
            for _ in range(o.rounds):
                for name, argv in jobs.items():
                    shutil.rmtree(out, True)
                    os.mkdir(out)
                    if os.path.exists(target):
                        os.unlink(target)
                    if name == "aria2c":
                        argv = aria2c(*known)
                    subprocess.run(["sync", "-f", home], check=True)
                    seconds, used, most = timed(argv, 2 if name in ours else 1, name not in ours, home)
                    processor[name].append(used)
                    times[name].append(seconds)
                    rss[name].append(most)
                    if name in ours:
                        assert filecmp.cmp(target, here, False)
                if not o.ours:
                    convert = [o.fsdpckpt, "consolidate", model, "-o", target, "-q"]
                    times.setdefault("converted", []).append(timed(convert, 1, False, home)[0])
            median = {name: statistics.median(values) for name, values in times.items()}
            best = min((median[name] for name in jobs if name not in ours), default=median["fsdpckpt"])
            for name in jobs:
                print_row(f"{scheme}, {setting}", name, times[name], best, processor[name], rss[name])
            if not o.ours:
                both = best + median["converted"]
                print(f"| {scheme}, {setting} | the best download, then converted | | {both:.2f} s | {both / best:.2f} | | |")
            print(f"load at the start {load:.1f}, at the end {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
    finally:
        server.close()
    shutil.rmtree(home)
    return 0


if __name__ == "__main__":
    sys.exit(main())
