#!/usr/bin/env python3
"""Objects that are written to buckets: what arrives equals the file; every request is signed; a server that fails or lies, and an answer that
is lost, never leave another object than the one that was sent, or a wrong message about it."""

import contextlib
import hashlib
import os
import random
import signal
import socket
import subprocess
import time
import unittest

import net_server
from harness import HANG
from s3_server import BUCKET, KEY, REGION, SECRET, TOKEN, S3, Upload
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

    def wait_for(self, operation, count):
        end = time.monotonic() + HANG
        while (self.count(operation) < count or (operation == "abort" and self.s3.uploads)) and time.monotonic() < end:
            time.sleep(0.01)
        self.assertEqual(self.count(operation), count)

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

    def test_what_is_seen(self):
        """What was known of a name is asked for again after the object was written."""
        for key in ("a/b/model.safetensors", "a/b/c"):
            self.assertEqual(self.tool("see", "s3://%s/%s" % (BUCKET, key), "data"),
                             "nothing 0 0\nfolder 1 %d\nnothing 0 0\n" % len(self.data))

    @unittest.skipUnless("FSDPCKPT_MOTO" in os.environ, "FSDPCKPT_MOTO names no Python with moto[server]")
    def test_moto(self):
        """moto checks every signature with Amazon's own code."""
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            url = "http://127.0.0.1:%d" % s.getsockname()[1]
        program = """import boto3, hashlib, json, moto.server, sys, threading, time
threading.Thread(target=moto.server.main, args=(["-H", "127.0.0.1", "-p", sys.argv[1].rsplit(":", 1)[1]],), daemon=True).start()
def client(what, key="k", secret="s"):
    return boto3.client(what, endpoint_url=sys.argv[1], aws_access_key_id=key, aws_secret_access_key=secret, region_name="us-east-1")
while True:
    try: client("s3").create_bucket(Bucket="models"); break
    except Exception: time.sleep(0.1)
client("iam").create_user(UserName="u")
policy = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "*", "Resource": "*"}]}
client("iam").put_user_policy(UserName="u", PolicyName="p", PolicyDocument=json.dumps(policy))
key = client("iam").create_access_key(UserName="u")["AccessKey"]
print(key["AccessKeyId"], key["SecretAccessKey"], flush=True)
s3 = client("s3", key["AccessKeyId"], key["SecretAccessKey"])
for line in sys.stdin:
    what, name = line.rstrip("\\n").split(" ", 1)
    if what == "begin": print(bool(s3.create_multipart_upload(Bucket="models", Key=name)), flush=True)
    if what == "sum": print(hashlib.sha256(s3.get_object(Bucket="models", Key=name)["Body"].read()).hexdigest(), flush=True)
    if what == "left": print(len(s3.list_multipart_uploads(Bucket="models").get("Uploads", [])), flush=True)
"""
        server = subprocess.Popen([os.environ["FSDPCKPT_MOTO"], "-c", program, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                  stderr=subprocess.DEVNULL, text=True, env=dict(os.environ, INITIAL_NO_AUTH_ACTION_COUNT="4"))

        def ask(line):
            server.stdin.write(line + "\n")
            server.stdin.flush()
            return server.stdout.readline().strip()

        try:
            key, secret = server.stdout.readline().split()
            more = {"AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret, "AWS_REGION": "us-east-1",
                    "AWS_SESSION_TOKEN": ""}
            self.data = made.randbytes(11_000_000)
            with open(os.path.join(self.dir, "data"), "wb") as f:
                f.write(self.data)
            for name in (OBJECT, "x+&?=%41"):
                full = "s3://models/" + name
                self.parts(end="new", name=full, size="6000000", **more)
                self.assertEqual(ask("sum " + name), hashlib.sha256(self.data).hexdigest())
                for run in (["parts", full, "data", "6000000", "2", "new"], ["whole", full, "data", "new"]):
                    self.assertIn("another program created it", self.tool(*run, status=2, **more))
                self.assertEqual(self.tool("delete-own", full, **more), "deleted\n")
                self.tool("whole", full, "data", "new", **more)
                self.assertEqual(ask("sum " + name), hashlib.sha256(self.data).hexdigest())
                self.assertEqual(self.tool("delete-own", full, **more), "deleted\n")
                self.tool("whole", full, "data", "new", **more)
                self.assertEqual((ask("begin " + name), ask("begin " + name)), ("True", "True"))
                self.assertEqual(self.tool("clear", full, **more), "2\n")
                self.assertEqual(ask("left "), "0")
            self.assertIn("EntityTooSmall", self.parts(name=full, status=4, **more))
            self.assertEqual(ask("left "), "0")
            more["AWS_SECRET_ACCESS_KEY"] = "wrong"
            self.assertIn("SignatureDoesNotMatch", self.tool("whole", full, "data", "replace", status=4, **more))
        finally:
            server.communicate("")


class Names(Uploads):
    def test_check(self):
        for name, status, says in (("https://localhost/x", 5, "nothing can be written there"), ("hf://owner/model/x", 5, "nothing can be"),
                                   ("/local/x", 5, "nothing can be"), ("s3://", 2, "is not the name"),
                                   ("s3://b/../x", 2, "as a folder"), ("s3://b/x/.", 2, "as a folder")):
            self.assertIn(says, self.tool("check", name, status=status))
        for name in ("s3://b", "s3://b/x", "gs://b/x/..y", "s3://b/.x/y"):
            self.tool("check", name)
        for command in (["whole", "s3://b", "data", "new"], ["parts", "s3://b/", "data", "9", "1", "new"], ["delete", "s3://b"], ["clear", "s3://b"]):
            self.assertIn("is a bucket, not an object", self.tool(*command, status=2))
        self.assertEqual(self.s3.log, [])

    def test_names(self):
        """Names that need other characters in a URL, and in the XML that lists them."""
        for key in ("a/b", "a b/+&=?#%41", "\u00e9/\u4e2d", "<x>/\"quoted\"/'y'"):
            name = "s3://%s/%s" % (BUCKET, key)
            self.parts(name=name)
            self.tool("whole", name, "data", "replace")
            self.assertEqual(self.s3.objects[key], self.data)
            self.s3.began += 1
            self.s3.uploads["id %d" % self.s3.began] = Upload(key, None)
            self.assertEqual(self.tool("clear", name), "1\n")
            self.tool("delete", name)
            self.tool("delete", name)  # it may be missing
            self.s3.faults["delete"] = ["403:AccessDenied", "503"]
            self.assertIn("refuses access (status 403, AccessDenied)", self.tool("delete", name, status=4))
            self.tool("delete", name)
        self.assertEqual((self.s3.objects, self.s3.uploads, self.s3.wrong), ({}, {}, []))


class Ends(Uploads):
    """What is not completed is aborted."""

    def test_abort(self):
        self.parts(end="abort")
        self.assertEqual((self.count("part"), self.s3.objects, self.s3.uploads), (11, {}, {}))
        self.s3.faults["abort"] = ["always-503"]
        self.parts(end="abort")

    def test_killed(self):
        for number in (signal.SIGKILL, signal.SIGINT, signal.SIGTERM):
            tool = subprocess.Popen([TOOL, "parts", NAME, "data", "100000", "4", "wait"], env=self.environment(), cwd=self.dir,
                                    stdout=subprocess.PIPE, text=True)
            self.assertEqual(tool.stdout.readline(), "sent\n")
            self.assertEqual(len(self.s3.uploads), 1)
            tool.send_signal(number)
            tool.communicate()
            self.wait_for("abort", 1)
            self.assertEqual((self.s3.objects, self.s3.uploads, self.s3.wrong), ({}, {}, []))
            self.s3.log.clear()

    def test_killed_early(self):
        """Before the server has given the upload an ID, and while parts are sent."""
        for operation in ("begin", "part"):
            self.s3.faults[operation] = ["late"] * 4
            tool = subprocess.Popen([TOOL, "parts", NAME, "data", "100000", "4", "wait"], env=self.environment(), cwd=self.dir,
                                    stdout=subprocess.DEVNULL)
            self.wait_for(operation, 1 if operation == "begin" else 4)
            tool.kill()
            tool.wait()
            self.wait_for("abort", 1)
            self.assertEqual((self.s3.objects, self.s3.uploads, self.s3.wrong), ({}, {}, []))
            self.s3.log.clear()

    def begin(self, *keys):
        for key in keys:
            self.s3.began += 1
            self.s3.uploads["old&%d" % self.s3.began] = Upload(key, None)

    def left(self):
        return sorted(upload.key for upload in self.s3.uploads.values())

    def test_clear(self):
        self.s3.page = 2
        keys = ("d & e/a", "d & e/a", "d & e/a.x", "d & e/b/c", "d & e", "d & ex/y", "z")
        self.begin(*keys)
        name = "s3://%s/d & e" % BUCKET
        self.assertEqual(self.tool("clear", name + "/a"), "2\n")
        self.assertEqual(self.left(), sorted(keys[2:]))
        self.assertEqual(self.tool("clear-folder", name + "/"), "2\n")
        self.assertEqual(self.left(), ["d & e", "d & ex/y", "z"])
        self.assertEqual(self.tool("clear-folder", name), "0\n")
        self.assertEqual(self.tool("clear", name), "1\n")
        self.assertEqual(self.tool("clear-folder", "s3://%s" % BUCKET), "2\n")
        self.assertEqual(self.tool("clear-folder", "s3://%s" % BUCKET), "0\n")
        self.assertEqual((self.left(), self.s3.wrong), ([], []))

    def test_many(self):
        keys = ["d/%d" % i for i in range(250)]
        self.begin(*keys)
        self.s3.page = 100
        self.assertEqual(self.tool("clear-folder", "s3://%s/d" % BUCKET), "250\n")
        self.assertEqual((self.left(), self.count("list_uploads")), ([], 3))

    def test_clear_fails(self):
        folder = "s3://%s/d" % BUCKET
        self.begin("d/a", "d/b")
        for fault in ("nonsense", "endless", "list"):
            self.s3.faults["list_uploads"] = [fault]
            self.assertIn("the server's list of uploads cannot be understood", self.tool("clear-folder", folder, status=3))
        self.s3.faults["list_uploads"] = ["403:AccessDenied"]
        self.assertIn("refuses access (status 403, AccessDenied)", self.tool("clear-folder", folder, status=4))
        self.assertEqual(self.left(), ["d/a", "d/b"])
        self.s3.faults["abort"] = ["403:AccessDenied"]
        self.assertIn("refuses access (status 403, AccessDenied)", self.tool("clear-folder", folder, status=4))
        self.assertEqual(len(self.left()), 1)
        self.s3.faults["list_uploads"] = ["501:NotImplemented"]
        self.assertEqual(self.tool("clear-folder", folder), "0\n")
        self.s3.faults = {"list_uploads": ["503", "reset"], "abort": ["503", "lost"]}
        self.assertEqual(self.tool("clear-folder", folder), "1\n")
        self.assertEqual(self.left(), [])


class Faults(Uploads):
    def test_parts_again(self):
        for faults in (["reset"] * 3, ["503", "500", "", "at-once"], ["slow"], ["lost", "lost-500", "lost"], ["400:RequestTimeout"]):
            self.s3.faults["part"] = faults
            self.parts()
            self.assertEqual(self.s3.faults["part"], [])
            self.check_whole()
            self.s3.remove(OBJECT)

    def test_expect(self):
        """Servers that do not know "Expect: 100-continue", or refuse it."""
        for says in ("nothing", "no"):
            self.s3.says_to_expect = says
            self.parts()
            self.check_whole()
            self.s3.remove(OBJECT)

    def test_fetcher_killed(self):
        self.s3.faults["part"] = ["late"] * 4
        tool = subprocess.Popen([TOOL, "parts", NAME, "data", "100000", "4", "new"], env=self.environment(), cwd=self.dir,
                                stderr=subprocess.PIPE, text=True)
        self.wait_for("part", 4)
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if os.path.samefile("/proc/%s/cwd" % pid, self.dir) and int(pid) != tool.pid:
                    os.kill(int(pid), signal.SIGKILL)
        self.assertIn("the process that talks to servers has ended", tool.communicate()[1])
        self.assertEqual((tool.returncode, self.s3.objects), (4, {}))

    def test_parts_fail(self):
        for fault, says in (("always-503", "gave up after 6 attempts"), ("403:AccessDenied", "refuses access (status 403, AccessDenied)"),
                            ("404:NoSuchUpload", "the upload was aborted by another program"), ("always-reset", "gave up after 6 attempts"),
                            ("501:Strange_Code", "cannot write it (status 501)"), ("400:BadDigest", "cannot write it (status 400, BadDigest)"),
                            ("404:NoSuchBucket", "the upload was aborted")):
            self.s3.faults["part"] = [fault]
            self.assertIn(says, self.parts(status=4))
            self.assertEqual((self.s3.objects, self.s3.uploads), ({}, {}))
        self.assertEqual(self.s3.wrong, [])

    def test_begin(self):
        self.s3.faults["begin"] = ["503", "reset"]
        self.parts()
        self.check_whole()
        for fault, status, says in (("nonsense", 3, "answer cannot be understood"), ("endless", 3, "more bytes than it was asked for"),
                                    ("region", 2, "set AWS_REGION to us-west-2"), ("404:NoSuchBucket", 4, "there is no such bucket"),
                                    ("403:AccessDenied", 4, "AccessDenied")):
            self.s3.faults["begin"] = [fault]
            self.assertIn(says, self.parts(status=status))
            self.assertEqual(self.s3.uploads, {})

    def test_credentials(self):
        line = self.parts(status=4, AWS_SECRET_ACCESS_KEY="wrong")
        self.assertIn("refuses access (status 403, SignatureDoesNotMatch)", line)
        self.assertNotIn("wrong", line)
        self.assertIn("AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY give access",
                      self.parts(status=4, AWS_ACCESS_KEY_ID="", AWS_SECRET_ACCESS_KEY=""))
        self.assertIn("AWS_REGION is too long or has a newline", self.parts(status=2, AWS_REGION="x\ny"))

    def test_completion_again(self):
        for end in ("complete", "new"):
            for faults in (["lost"], ["closed"], ["lost-500"], ["lost", "503"], ["503", "reset"], ["error-in-200:InternalError", "error-in-200:SlowDown"],
                           ["nonsense"], ["slow"] if end == "complete" else []):
                self.s3.faults["complete"] = list(faults)
                self.s3.says_to_expect = "nothing" if faults == ["closed"] else "continue"  # so that nothing at all is answered
                self.parts(end=end)
                self.assertEqual(self.s3.faults["complete"], [])
                self.check_whole()
                self.s3.remove(OBJECT)

    def test_completion_fails(self):
        for fault, says in (("always-error-in-200:InternalError", "gave up after 6 attempts; the object may have been made"),
                            ("error-in-200:AccessDenied", "AccessDenied"), ("404:NoSuchUpload", "the upload was completed or aborted by another program"),
                            ("400:EntityTooSmall", "status 400, EntityTooSmall"), ("always-reset", "gave up after 6 attempts")):
            self.s3.faults["complete"] = [fault]
            self.assertIn(says, self.parts(status=4))
            self.assertEqual((self.s3.objects, self.s3.uploads), ({}, {}))
        self.s3.faults["complete"] = ["409:ConditionalRequestConflict"]
        self.assertIn("another program created it", self.parts(end="new", status=2))

    def test_lost_answer_about_another_object(self):
        """The server completed the upload and its answer was lost; then another program wrote the object."""
        for other in (b"shorter", made.randbytes(len(self.data)), None):
            for end, status in (("complete", 4), ("new", 2 if other else 4)):
                self.s3.faults = {"complete": ["lost"], "head": ["replace"]}
                self.s3.other = other
                line = self.parts(end=end, status=status)
                self.assertIn("another program created it" if status == 2 else
                              "cannot be found out: compare it" if other else "the upload was aborted by another program", line)
                self.s3.remove(OBJECT)
        self.s3.faults = {"complete": ["lost"], "head": ["403"]}
        self.assertIn("cannot be found out: compare it", self.parts(status=4))

    def test_whole_again(self):
        for faults in (["reset"], ["503"], ["lost"], ["503", "closed"], ["lost-500", "503"], ["409:ConditionalRequestConflict"], ["at-once"]):
            self.s3.faults["whole"] = list(faults)
            self.tool("whole", NAME, "data", "new")
            self.assertEqual(self.s3.faults["whole"], [])
            self.check_whole()
            self.s3.remove(OBJECT)
        self.s3.put(OBJECT, b"of another program", meta={"x-amz-meta-fsdpckpt-run": "00000000deadbeef"})
        self.s3.faults["whole"] = ["reset"]
        self.assertIn("another program created it", self.tool("whole", NAME, "data", "new", status=2))

    def test_delete_own(self):
        """An object is deleted only if its metadata says that this run made it."""
        for make in (self.parts, lambda: self.tool("whole", NAME, "data", "replace")):
            make()
            self.assertEqual(self.tool("delete-own", NAME), "deleted\n")
            self.assertEqual(self.s3.objects, {})
            self.assertEqual(self.tool("delete-own", NAME), "deleted\n")  # it may be missing
            self.s3.faults = {"head": ["503", "reset"], "delete": ["503", "lost"]}
            make()
            self.assertEqual(self.tool("delete-own", NAME), "deleted\n")
            self.assertEqual(self.s3.objects, {})
            self.s3.keeps_metadata = False
            make()
            self.s3.keeps_metadata = True
            self.assertEqual(self.tool("delete-own", NAME), "left\n")
        for run in ("0000000012345678", "1234abcd", "x", ""):
            self.s3.put(OBJECT, self.data, meta={"x-amz-meta-fsdpckpt-run": run})
            self.assertEqual(self.tool("delete-own", NAME), "left\n")
        self.s3.faults["head"] = ["403"]
        self.assertIn("refuses access", self.tool("delete-own", NAME, status=4))
        self.check_whole()

    def test_sums(self):
        """A bucket with Object Lock demands MD5 sums. Others get none."""
        self.parts()
        self.assertEqual(self.s3.sums, 0)
        self.s3.demands_sums = True
        self.s3.faults["part"] = ["503", "", "reset"]
        self.parts()
        self.check_whole()
        self.assertEqual(self.s3.sums, 11)
        self.s3.faults["part"] = ["always-400:MissingContentMD5"]
        self.assertIn("status 400, MissingContentMD5", self.parts(status=4))
        self.s3.faults, self.s3.sums = {}, 0
        for size in (100_000, 65, 64, 63, 56, 55, 1, 0):
            self.data = self.data[:size]
            with open(os.path.join(self.dir, "data"), "wb") as f:
                f.write(self.data)
            self.tool("whole", NAME, "data", "replace")
            self.check_whole()
        self.assertEqual(self.s3.sums, 8)

    def test_requester_pays(self):
        self.s3.requester_pays = True
        self.assertIn("AccessDenied", self.parts(status=4))
        self.parts(AWS_REQUEST_PAYER="requester")
        self.check_whole()
        self.assertIn("folder 1 ", self.tool("see", "s3://%s/a/b" % BUCKET, "data", AWS_REQUEST_PAYER="requester"))

    def test_lost_without_metadata(self):
        """Then nobody can know what became of the upload."""
        self.s3.keeps_metadata = False
        self.s3.faults["complete"] = ["lost"]
        self.assertIn("cannot be found out: compare it", self.parts(status=4))
        self.check_whole()

    def test_without_conditions(self):
        self.s3.conditions = False
        for run in (lambda status: self.parts(end="new", status=status), lambda status: self.tool("whole", NAME, "data", "new", status=status)):
            self.s3.faults["head"] = ["503"]
            run(0)
            self.check_whole()
            self.assertIn("another program created it", run(2))
            self.check_whole()
            self.s3.remove(OBJECT)


if __name__ == "__main__":
    unittest.main()
