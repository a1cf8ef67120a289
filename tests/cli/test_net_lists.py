#!/usr/bin/env python3
"""Checkpoints in buckets and on the hub: names, lists, credentials and signatures. The signature is computed again from the algorithm
that Amazon publishes; moto, an implementation of S3 in Python, is asked, too, if FSDPCKPT_MOTO names a Python that has it."""

import hashlib
import json
import os
import re
import socket
import subprocess
import unittest
import urllib.parse
from xml.sax.saxutils import escape

import net_server
from harness import CORPUS
from s3_server import BUCKET, KEY, REGION, SECRET, TOKEN, signature
from test_net import Net, file_of, folder_of

class Bucket:
    """Answers lists and checks signatures; net_server answers objects."""

    def __init__(self, objects, signed=True, page=1000):
        self.objects, self.signed, self.page, self.wrong = objects, signed, page, []

    def check(self, handler):
        headers = {name.lower(): value for name, value in handler.headers.items()}
        got = headers.get("authorization")
        if not self.signed:
            return got is None
        match = re.fullmatch(r"AWS4-HMAC-SHA256 Credential=%s/\d{8}/%s/s3/aws4_request, ?SignedHeaders=([^,]+), ?Signature=([0-9a-f]{64})"
                             % (KEY, REGION), got or "")
        if not match:
            return False
        signed = match[1].split(";")
        if not {"host", "x-amz-date", "x-amz-content-sha256", "x-amz-security-token"} <= set(signed):
            return False
        return match[2] == signature("GET", handler.path, headers, signed, headers["x-amz-date"], REGION, SECRET)

    def __call__(self, handler):
        if not self.check(handler):
            self.wrong.append((handler.path, handler.headers.get("Authorization")))
            handler.plain(403, [], b"<Error><Code>SignatureDoesNotMatch</Code></Error>")
            return True
        query = urllib.parse.parse_qs(urllib.parse.urlsplit(handler.path).query)
        if "list-type" not in query:
            return False
        prefix, after = query.get("prefix", [""])[0], query.get("continuation-token", [""])[0]
        names = sorted(name for name in self.objects if name.startswith(prefix) and name > after)
        page = names[:self.page]
        text = "<?xml version='1.0'?><ListBucketResult><IsTruncated>%s</IsTruncated>" % ("true" if len(names) > len(page) else "false")
        if len(names) > len(page):
            text += "<NextContinuationToken>%s</NextContinuationToken>" % escape(page[-1])
        text += "".join("<Contents><Key>%s</Key></Contents>" % escape(name) for name in page)
        handler.plain(200, [("Content-Type", "application/xml")], (text + "</ListBucketResult>").encode())
        return True


class Buckets(Net):
    PREFIX = "runs/a & b/step=1"

    def bucket(self, files, **how):
        objects = {self.PREFIX + "/" + name: data for name, data in files.items()}
        answer = Bucket(objects, **how)
        paths = {urllib.parse.quote("/%s/%s" % (BUCKET, name), safe="/-_.~"): data for name, data in objects.items()}
        server = net_server.start(paths, self.certificate, answer)
        self.addCleanup(server.server_close)
        self.addCleanup(server.shutdown)
        return server, answer

    def environment(self, server, **more):
        return dict(dict(AWS_ENDPOINT_URL=server.name, AWS_ACCESS_KEY_ID=KEY, AWS_SECRET_ACCESS_KEY=SECRET, AWS_SESSION_TOKEN=TOKEN,
                         AWS_REGION=REGION, HOME=self.dir), **more)

    def test_signed(self):
        files = folder_of(3, 5)
        server, answer = self.bucket(files, page=2)
        self.local(files)
        name = "s3://%s/%s" % (BUCKET, self.PREFIX)
        more = self.environment(server)
        self.assertIn("equal", self.command("diff", name + "/", "local", **more))
        self.command("inspect", name + "/model-00001-of-00003.safetensors", **more)
        self.command("consolidate", name, "-o", "x.safetensors", **more)
        self.assertEqual(answer.wrong, [])
        self.assertTrue(server.requests)

    def test_profile(self):
        server, answer = self.bucket({"model.safetensors": file_of(5)})
        os.mkdir(os.path.join(self.dir, ".aws"))
        with open(os.path.join(self.dir, ".aws", "credentials"), "w", encoding="utf-8") as f:
            f.write("[default]\naws_access_key_id=no\naws_secret_access_key=no\n[work]\naws_access_key_id = %s\n"
                    "aws_secret_access_key = %s\naws_session_token=%s\n" % (KEY, SECRET, TOKEN))
        with open(os.path.join(self.dir, ".aws", "config"), "w", encoding="utf-8") as f:
            f.write("[profile work]\nregion = %s\nendpoint_url = %s/\n" % (REGION, server.name))
        self.command("inspect", "s3://%s/%s" % (BUCKET, self.PREFIX), HOME=self.dir, AWS_PROFILE="work")
        self.assertEqual(answer.wrong, [])

    def test_without_credentials(self):
        server, answer = self.bucket({"model.safetensors": file_of(5)}, signed=False)
        self.command("inspect", "s3://%s/%s" % (BUCKET, self.PREFIX), HOME=self.dir, AWS_ENDPOINT_URL=server.name)
        self.assertEqual(answer.wrong, [])

    def test_failures(self):
        server, _ = self.bucket({"model.safetensors": file_of(5)})
        name = "s3://%s/%s" % (BUCKET, self.PREFIX)
        line = self.command("inspect", name, status=4, **self.environment(server, AWS_SECRET_ACCESS_KEY="wrong"))
        self.assertIn("refuses access", line)
        self.assertNotIn("wrong", line)
        self.assertIn("no such file", self.command("inspect", "s3://%s/nothing" % BUCKET, status=3, **self.environment(server)))
        server.answer = lambda handler: handler.plain(301, [("x-amz-bucket-region", "us-west-2")]) or True
        self.assertIn("set AWS_REGION to us-west-2", self.command("inspect", name, status=2, **self.environment(server)))
        server.answer = lambda handler: handler.plain(200, [], b"<html>") or True
        self.assertIn("list of files cannot be understood", self.command("inspect", name, status=3, **self.environment(server)))

    def test_other_files(self):
        """Files next to the checkpoint are reported like those in a local folder."""
        files = dict(folder_of(2, 3), **{"training_args.bin": b"x", "optimizer.pt": b"y", "notes.txt": b"z"})
        self.local(files)
        name = "s3://%s/%s" % (BUCKET, self.PREFIX)
        server, _ = self.bucket(files)
        for command in ("inspect", "check", "verify"):
            there = self.command(command, name, **self.environment(server)).replace(name, "local")
            self.assertEqual(there, self.command(command, "local"))
        self.assertIn("2 files in the same directory are not part of the checkpoint", self.command("inspect", name, **self.environment(server)))

    def test_region(self):
        """A server that names the bucket's region, in a header or in the page, is asked again, with a signature for it."""
        files = folder_of(2, 3)
        server, answer = self.bucket(files)
        self.local(files)
        page = b"<Error><Code>AuthorizationHeaderMalformed</Code><Region>%s</Region></Error>"
        for status, header, says in ((301, REGION, b""), (307, REGION, b""), (400, REGION, b""), (400, None, REGION.encode()), (301, None, b"x.evil.com/"),
                                     (301, "evil.com/", b""), (301, "us-west-2", b"")):
            headers = [("x-amz-bucket-region", header)] if header else []
            away = lambda handler: "/%s/" % REGION not in handler.headers["Authorization"] and (handler.plain(status, headers, page % says) or True)
            server.answer = lambda handler: away(handler) or answer(handler)
            arguments = ("diff", "s3://%s/%s" % (BUCKET, self.PREFIX), "local")
            more = self.environment(server, AWS_REGION="us-east-1")
            server.requests.clear()
            if REGION in (header, says.decode()):
                self.assertIn("equal", self.command(*arguments, **more))
            else:
                self.assertIn("the bucket is in another region: set AWS_REGION", self.command(*arguments, status=2, **more))
                self.assertLessEqual(len(server.requests), 2)
        self.assertEqual(answer.wrong, [])

    def test_refusals(self):
        """Why the server refuses access, and what can be done."""
        server, _ = self.bucket({"model.safetensors": file_of(5)})
        name, more = "s3://%s/%s" % (BUCKET, self.PREFIX), self.environment(server)
        page = b"<?xml version='1.0'?><Error><Code>%s</Code><Message>hidden</Message></Error>"
        for code, says in ((b"ExpiredToken", "(status 403, ExpiredToken); the key or the token has expired"), (b"RequestTimeTooSkewed", "set the clock"),
                           (b"InvalidAccessKeyId", "refuses access (status 403, InvalidAccessKeyId)\n"), (b"a b", "(status 403)\n"), (b"x" * 99, "(status 403)\n"),
                           (b"\x1b[1m", "(status 403)\n")):
            server.answer = lambda handler, code=code: handler.plain(403, [], page % code) or True
            for arguments in (("inspect", name), ("inspect", name + "/model.safetensors")):
                line = self.command(*arguments, status=4, **more)
                self.assertIn(says, line)
                self.assertNotIn("hidden", line)
        keyless = {"HOME": self.dir, "AWS_ENDPOINT_URL": server.name}
        self.assertIn("no key is set in AWS_ACCESS_KEY_ID", self.command("inspect", name, status=4, **keyless))

    def test_what_is_set(self):
        """A newline would end a header, and a user in a URL would be sent; blanks at the ends do not matter."""
        server, answer = self.bucket({"model.safetensors": file_of(5)})
        name = "s3://%s/%s" % (BUCKET, self.PREFIX)
        for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION"):
            line = self.command("inspect", name, status=2, **self.environment(server, **{variable: "hidden\nX-Injected: 1"}))
            self.assertIn(variable + " is too long or has a newline", line)
            self.assertNotIn("hidden", line)
        for url in ("https://me:hidden@localhost", "https://local host", "localhost:9000", "https://", "https://localhost/?hidden"):
            line = self.command("inspect", name, status=2, **self.environment(server, AWS_ENDPOINT_URL=url))
            self.assertIn("AWS_ENDPOINT_URL must be https://host", line)
            self.assertNotIn("hidden", line)
        self.assertEqual(server.requests, [])
        self.command("inspect", name, **self.environment(server, AWS_SECRET_ACCESS_KEY=SECRET + "\n", AWS_ENDPOINT_URL=server.name + "/ "))
        self.assertEqual(answer.wrong, [])

    def test_names(self):
        """Names that no file here could have are in the way of nothing; others are asked for as they are."""
        plain = file_of(5)
        strange = ["a b/\u00e9 \u4e2d \U0001f600.safetensors", "a b/new\nline.safetensors", "a b/50%2f?x=&y#<z>.safetensors"]
        files = dict({"model.safetensors": plain}, **dict.fromkeys(strange, plain))
        server, answer = self.bucket(files)
        more = self.environment(server)
        for name in ("../x.safetensors", "./y.safetensors", "/z.safetensors", "a b/", "model.safetensors/below", "n" * 5000 + ".safetensors"):
            answer.objects[self.PREFIX + "/" + name] = b""
        self.command("inspect", "s3://%s/%s/model.safetensors" % (BUCKET, self.PREFIX), **more)
        self.command("inspect", "s3://%s/%s" % (BUCKET, self.PREFIX), **more)
        self.assertTrue(all("n" * 5000 not in r[0] for r in server.requests))
        for name in strange:
            self.command("inspect", "s3://%s/%s/%s" % (BUCKET, self.PREFIX, name), **more)
        numbers = "".join("&#%d;" % ord(c) if ord(c) % 2 else "&#x%X;" % ord(c) for c in self.PREFIX + "/a b/\u00e9 \u4e2d \U0001f600.safetensors")
        text = "<ListBucketResult><Contents><Key>%s</Key></Contents></ListBucketResult>" % numbers
        server.answer = lambda handler: "list-type" in handler.path and (handler.plain(200, [], text.encode()) or True)
        self.command("inspect", "s3://%s/%s/a b" % (BUCKET, self.PREFIX), **more)
        self.assertEqual(answer.wrong, [])

    def test_lists_that_lie(self):
        server, _ = self.bucket({"model.safetensors": file_of(5)})
        name, more = "s3://%s/%s" % (BUCKET, self.PREFIX), self.environment(server)
        key = "<Contents><Key>%s/model.safetensors</Key></Contents>" % self.PREFIX.replace("&", "&amp;")
        again = "<IsTruncated>true</IsTruncated><NextContinuationToken>x</NextContinuationToken></ListBucketResult>"
        long = "<Contents><Key>%s/%s</Key></Contents>" % (self.PREFIX.replace("&", "&amp;"), "n" * 3900)
        cases = (("<ListBucketResult>" + key, "cannot be understood"),
                 ("<ListBucketResult>%s\0%s" % (key, again), "cannot be understood"),
                 ("<ListBucketResult><IsTruncated>true</IsTruncated></ListBucketResult>", "cannot be understood"),
                 ("<ListBucketResult>" + long * 10000 + again, "is too long"))
        for text, says in cases:
            server.answer = lambda handler, text=text: handler.plain(200, [], text.encode()) or True
            line = self.command("inspect", name, status=5 if says == "is too long" else 3, **more)
            self.assertIn("the server's list of files " + says, line)
        pages = iter(("<ListBucketResult>" + key + again, None))

        def stop(handler):
            text = next(pages)
            return handler.plain(200 if text else 404, [], (text or "").encode()) or True

        server.answer = stop
        self.assertIn("cannot be understood", self.command("inspect", name, status=3, **more))

    def test_dcp(self):
        """A format whose files the list names."""
        folder = os.path.join(CORPUS, "dcp-torch2.15.0-train")
        files = {}
        for name in os.listdir(folder):
            with open(os.path.join(folder, name), "rb") as f:
                files[name] = f.read()
        server, answer = self.bucket(files)
        more = self.environment(server)
        self.assertIn("equal", self.command("diff", "s3://%s/%s" % (BUCKET, self.PREFIX), folder, **more))
        self.assertEqual(answer.wrong, [])

    @unittest.skipUnless("FSDPCKPT_MOTO" in os.environ, "FSDPCKPT_MOTO names no Python with moto[server]")
    def test_moto(self):
        files = folder_of(3, 5)
        self.local(files)
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            url = "http://127.0.0.1:%d" % s.getsockname()[1]
        python = os.environ["FSDPCKPT_MOTO"]
        program = """import moto.server, sys, threading, time, boto3, os
threading.Thread(target=moto.server.main, args=(["-H", "127.0.0.1", "-p", sys.argv[1].rsplit(":", 1)[1]],), daemon=True).start()
s3 = boto3.client("s3", endpoint_url=sys.argv[1], aws_access_key_id="k", aws_secret_access_key="s", region_name="us-east-1")
while True:
    try: s3.create_bucket(Bucket="models"); break
    except Exception: time.sleep(0.1)
for name in os.listdir(sys.argv[2]): s3.upload_file(os.path.join(sys.argv[2], name), "models", "a b/" + name)
print("ready", flush=True)
sys.stdin.read()
"""
        server = subprocess.Popen([python, "-c", program, url, os.path.join(self.dir, "local")], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                  stderr=subprocess.DEVNULL, text=True)
        try:
            self.assertEqual(server.stdout.readline(), "ready\n")
            more = {"AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "HOME": self.dir}
            self.assertIn("equal", self.command("diff", "s3://models/a b", "local", **more))
        finally:
            server.communicate("")


class Hub(Net):
    """hf://owner/model[@revision]: the list, the files behind a redirect to another server, and the token, which only the hub gets."""

    def hub(self, files, revision="main"):
        storage = net_server.start({"/blob/" + name: data for name, data in files.items()}, self.certificate)
        base, tokens = "/owner/model/resolve/%s/" % revision, []
        names = sorted(files)

        def answer(handler):
            path, _, query = handler.path.partition("?")
            tokens.append(handler.headers.get("Authorization"))
            if path == "/api/models/owner/model/tree/%s" % revision:
                second = "cursor" in query  # two pages
                half = names[len(names) // 2:] if second else names[:len(names) // 2]
                body = json.dumps([{"type": "directory", "path": "original"}] + [{"type": "file", "path": name, "size": 1} for name in half])
                link = [] if second else [("Link", '<%s%s?recursive=true&cursor=x>; rel="next"' % (hub.name, path))]
                handler.plain(200, link, body.encode())
            elif path.startswith(base) and path[len(base):] in files:
                handler.plain(302, [("Location", storage.name + "/blob/" + path[len(base):] + "?sign=secret")])
            else:  # the hub does not say whether another model is there
                handler.plain(404 if path.startswith(base) or "/owner/other/" in path else 401)
            return True

        hub = net_server.start({}, self.certificate, answer)
        for server in (hub, storage):
            self.addCleanup(server.server_close)
            self.addCleanup(server.shutdown)
        return hub, storage, tokens

    def test_model(self):
        files = dict(folder_of(3, 5), **{"README.md": b"# model"})
        self.local(files)
        for revision in ("main", "v1.0"):
            hub, storage, tokens = self.hub(files, revision)
            more = {"HF_ENDPOINT": hub.name, "HF_TOKEN": "hf_secret", "HOME": self.dir}
            name = "hf://owner/model" + ("" if revision == "main" else "@" + revision)
            self.assertIn("equal", self.command("diff", name, "local", **more))
            self.assertEqual(set(tokens), {"Bearer hf_secret"})
            self.assertTrue(storage.requests)
            self.assertTrue(all("Authorization" not in r[2] for r in storage.requests), "only the hub gets the token")
            self.command("export", "local", "-o", "exported", "--like", name, "--force", **more)
            self.assertEqual(self.bytes_of("exported/README.md"), files["README.md"])
        self.command("inspect", name + "/model-00002-of-00003.safetensors", **more)

    def test_token_file(self):
        hub, _, tokens = self.hub({"model.safetensors": file_of(3)})
        os.makedirs(os.path.join(self.dir, ".cache", "huggingface"))
        with open(os.path.join(self.dir, ".cache", "huggingface", "token"), "w", encoding="utf-8") as f:
            f.write("hf_file\n")
        self.command("inspect", "hf://owner/model", HF_ENDPOINT=hub.name, HOME=self.dir)
        self.assertEqual(set(tokens), {"Bearer hf_file"})

    def test_cache(self):
        """What is in the cache with all its files is read there; there is no request, also without HF_HUB_OFFLINE."""
        files = folder_of(3, 5)
        self.local(files)
        folder = os.path.join(self.dir, "cache", "models--owner--model")
        commit = "0123456789abcdef0123456789abcdef01234567"
        snapshot = os.path.join(folder, "snapshots", commit)
        for name in ("refs", "blobs", "snapshots/" + commit):
            os.makedirs(os.path.join(folder, name))
        for name, data in files.items():
            blob = hashlib.sha256(data).hexdigest()
            with open(os.path.join(folder, "blobs", blob), "wb") as f:
                f.write(data)
            os.symlink("../../blobs/" + blob, os.path.join(snapshot, name))
        for name in ("main", "v1"):
            with open(os.path.join(folder, "refs", name), "w", encoding="utf-8") as f:
                f.write(commit)
        hub, _, tokens = self.hub(files)
        names = ("hf://owner/model", "hf://owner/model@main/", "hf://owner/model@v1", "hf://owner/model@" + commit)
        for more in ({"HF_HUB_CACHE": os.path.join(self.dir, "cache")}, {"HF_HUB_CACHE": os.path.join(self.dir, "cache"), "HF_HUB_OFFLINE": "1"}):
            more = dict(more, HF_ENDPOINT=hub.name, HOME=self.dir)
            for name in names:
                self.assertIn("equal", self.command("diff", name, "local", **more))
                self.command("check", name + ("" if name.endswith("/") else "/") + "model-00002-of-00003.safetensors", **more)
            for arguments in (["inspect", names[0]], ["check", names[0]], ["consolidate", names[0], "-o", "x.safetensors", "--force"],
                              ["export", names[0], "-o", "exported", "--force"]):
                self.command(*arguments, **more)
            self.assertEqual(tokens, [])
        for name in ("hf://owner/other", "hf://owner/model@v2", "hf://owner/model/x.safetensors"):
            line = self.command("inspect", name, status=2, **more)
            self.assertIn(name + ": it is not in the cache, and HF_HUB_OFFLINE is set", line)
        # another snapshot of which a part was not downloaded
        os.remove(os.path.join(snapshot, "model-00003-of-00003.safetensors"))
        self.assertIn("HF_HUB_OFFLINE", self.command("inspect", names[0], status=2, **more))
        self.assertEqual(tokens, [])
        del more["HF_HUB_OFFLINE"]
        self.assertIn("equal", self.command("diff", names[0], "local", **more))
        self.assertNotEqual(tokens, [])

    def test_what_is_set(self):
        hub, _, tokens = self.hub({"model.safetensors": file_of(3)})
        for token in ("hidden\r\nX-Injected: 1", "hidden" * 1000):
            line = self.command("inspect", "hf://owner/model", status=2, HF_ENDPOINT=hub.name, HF_TOKEN=token)
            self.assertIn("HF_TOKEN is too long or has a newline", line)
            self.assertNotIn("hidden", line)
        line = self.command("inspect", "hf://owner/model", status=2, HF_ENDPOINT=hub.name.replace("//", "//me:hidden@"))
        self.assertIn("HF_ENDPOINT must be https://host", line)
        self.assertEqual(tokens, [])
        self.command("inspect", "hf://owner/model", HF_ENDPOINT=hub.name, HF_TOKEN=" hf_secret\n")
        self.assertEqual(set(tokens), {"Bearer hf_secret"})

    def test_next_page(self):
        """The hub says where the next page is. That is like a redirect: to https only, and others do not get the token."""
        hub, _, _ = self.hub({"model.safetensors": file_of(3)})
        seen = []

        def other(handler):
            seen.append(handler.headers.get("Authorization"))
            return handler.plain(200, [], b"[]") or True

        first = json.dumps([{"type": "file", "path": "model.safetensors", "size": 1}]).encode()
        more = {"HF_ENDPOINT": hub.name, "HF_TOKEN": "hf_secret", "HOME": self.dir}
        honest = hub.answer
        for https, status in ((True, 0), (False, 2)):
            server = net_server.start({}, self.certificate if https else None, other)
            self.addCleanup(server.server_close)
            self.addCleanup(server.shutdown)
            link = [("Link", '<%s/page>; rel="next"' % server.name)]
            hub.answer = lambda handler, link=link: (handler.plain(200, link, first) or True) if "/api/" in handler.path else honest(handler)
            line = self.command("inspect", "hf://owner/model", status=status, **more)
            self.assertEqual(seen, [None])
        self.assertIn("another scheme than https", line)

    def test_page_that_breaks(self):
        """A page that is asked for again comes as a whole."""
        hub, _, _ = self.hub(folder_of(3, 5))
        honest, broken = hub.answer, []

        def breaks(handler):
            if "/api/" not in handler.path or broken:
                return honest(handler)
            broken.append(handler.path)
            handler.send_response(200)
            handler.send_header("Content-Length", "1000")
            handler.end_headers()
            handler.wfile.write(b'[{"type": "file", "path": "x')
            handler.wfile.flush()
            return handler.reset() or True

        hub.answer = breaks
        self.command("inspect", "hf://owner/model", HF_ENDPOINT=hub.name, HOME=self.dir)
        self.assertEqual(len(broken), 1)

    def test_failures(self):
        hub, storage, _ = self.hub({"model.safetensors": file_of(3000)})
        more = {"HF_ENDPOINT": hub.name, "HOME": self.dir}
        self.assertIn("no such file", self.command("inspect", "hf://owner/other", status=3, **more))
        self.assertIn("hf://owner/model[@revision]", self.command("inspect", "hf://owner", status=2, **more))
        storage.faults["/blob/model.safetensors"] = ["", "always-403"]
        line = self.command("consolidate", "hf://owner/model", "-o", "x.safetensors", status=4, **more)
        self.assertIn("refuses access", line)
        self.assertNotIn("secret", line)
        # an address that is no longer valid is asked for again
        storage.faults["/blob/model.safetensors"] = ["", "403"]
        self.command("consolidate", "hf://owner/model", "-o", "x.safetensors", **more)


if __name__ == "__main__":
    unittest.main()
