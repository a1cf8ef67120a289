#!/usr/bin/env python3
"""Measures a conversion from a bucket to a bucket, next to a download and an upload of the same bytes by curl, with as many connections.
buckets.py FSDPCKPT [--dir DIR] [--size 2G] [--rounds 5] [--connections 16]

nginx with Lua on loopback plays the bucket: the source is a model in eight safetensors files, and what is sent is read and thrown away. It
answers at once, or 20 ms later and with at most 20 MB a second for each download. `consolidate` makes one file; it has as many workers as
there are connections, and memory for as many parts. curl downloads to --dir and sends from there. It needs libnginx-mod-http-lua.
Processor seconds are those of all processes of a command, without the server's; on a busy machine, only these can be compared.
"""
import ctypes
import os
import shutil
import statistics
import subprocess
import sys
import time

import remote

PART = 5 << 20
remote.SETTINGS = {"at once": "", "20 ms, 20 MB/s": "access_by_lua_block { ngx.sleep(0.02) } limit_rate 20m;"}

BUCKET = """
location /{i}/b/in/ {{ alias {home}/model/; {setting} }}
location /{i}/b/out/ {{
  client_max_body_size 0;
  client_body_buffer_size 16m;
  {setting}
  content_by_lua_block {{
    ngx.req.clear_header("If-None-Match")
    ngx.req.read_body()
    ngx.header["ETag"] = '"0123456789abcdef0123456789abcdef"'
    local method, query = ngx.req.get_method(), ngx.var.args or ""
    local say = query:find("uploads") and "<InitiateMultipartUploadResult><UploadId>id</UploadId></InitiateMultipartUploadResult>"
      or "<CompleteMultipartUploadResult><ETag>x</ETag></CompleteMultipartUploadResult>"
    if method == "DELETE" then ngx.exit(204) elseif method == "GET" or method == "HEAD" then ngx.exit(404)
    else ngx.header["Content-Length"] = #say ngx.print(say) end
  }}
}}
location /{i}/b {{
  {setting}
  content_by_lua_block {{
    local query, name = ngx.var.args or "", "ListBucketResult"
    local keys = query:find("prefix=in") and "{keys}" or ""
    if query:find("uploads") then name = "ListMultipartUploadsResult" end
    ngx.print("<" .. name .. "><IsTruncated>false</IsTruncated>" .. keys .. "</" .. name .. ">")
  }}
}}
"""


class Server(remote.Server):
    def __init__(self, home, port):
        super().__init__(home, port, False)
        self.close()
        model = os.path.join(self.home, "model")
        keys = "".join(f"<Contents><Key>in/{name}</Key></Contents>" for name in sorted(os.listdir(model)))
        path = os.path.join(self.home, "nginx.conf")
        with open(path, encoding="utf-8") as f:
            lines = [line for line in f if not line.lstrip().startswith("location ")]
        ours = "".join(BUCKET.format(i=i, home=self.home, setting=remote.SETTINGS[name], keys=keys) for i, name in enumerate(self.settings))
        at = next(i for i, line in enumerate(lines) if "ssl_certificate_key" in line)
        with open(path, "w", encoding="utf-8") as f:
            f.writelines([*lines[:at + 1], ours, *lines[at + 1:]])
        self.process = subprocess.Popen(["nginx", "-c", path, "-e", f"{self.home}/error.log", "-g", "daemon off;"])
        time.sleep(0.5)
        assert self.process.poll() is None


def curl_up(url, certificate, out, connections):
    argv = ["curl", "-Z", "--parallel-immediate", "--parallel-max", str(connections)]
    for i, name in enumerate(sorted(os.listdir(out))):
        argv += [*(["--next"] if i else []), "--no-progress-meter", "--cacert", certificate, "--http1.1", "-o", "/dev/null", "-H", "Expect:",
                 "-T", os.path.join(out, name), f"{url}x?partNumber={i + 1}&uploadId=id"]
    return argv


def main():
    o = remote.parser_of(__doc__, 18090).parse_args()
    home = remote.make_in(os.path.join(o.dir, "buckets"), o.size)
    out = os.path.join(home, "out")
    server = Server(home, o.port)
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
    os.environ.update(SSL_CERT_FILE=server.certificate, AWS_ACCESS_KEY_ID="key", AWS_SECRET_ACCESS_KEY="secret", AWS_REGION="us-east-1")
    print("| server | command | best | median | × download and upload | processor | memory, MiB |\n|---|---|---|---|---|---|---|")
    try:
        for (scheme, setting), url in server.urls.items():
            os.environ["AWS_ENDPOINT_URL"] = url.rstrip("/")
            memory = 2 * PART * (o.connections + 1)
            ours = [o.fsdpckpt, "consolidate", "s3://b/in", "-o", "s3://b/out/x.safetensors", "-q", "-j", str(o.connections), "--memory", str(memory)]
            results = {"fsdpckpt": [], "curl": []}
            for _ in range(o.rounds):
                shutil.rmtree(out, True)
                os.mkdir(out)
                down = remote.timed(remote.curl(url + "b/in/", server.certificate, os.path.join(home, "model"), out, o.connections), 1, False, home)
                up = remote.timed(curl_up(url + "b/out/", server.certificate, out, o.connections), 1, False, home)
                results["curl"].append((down[0] + up[0], down[1] + up[1], max(down[2], up[2])))
                results["fsdpckpt"].append(remote.timed(ours, 2, False, home))
            best = statistics.median(seconds for seconds, _, _ in results["curl"])
            for name, rows in results.items():
                times, processor, memory = zip(*rows)
                remote.print_row(f"{scheme}, {setting}", name, times, best, processor, memory)
    finally:
        server.close()
    shutil.rmtree(home)
    return 0


if __name__ == "__main__":
    sys.exit(main())
