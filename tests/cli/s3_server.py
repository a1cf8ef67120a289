"""A bucket for tests, which net_server serves: objects, lists, uploads in parts and conditions, as Amazon documents them. Every request must
be signed. It can fail and lie: `faults` maps an operation (begin, part, complete, abort, whole, delete, list_uploads, list_parts, head, get, list) to a list
of names, one for each request in order. A name that begins with "always-" is not used up."""

import base64
import hashlib
import hmac
import re
import threading
import time
import urllib.parse
from xml.sax.saxutils import escape, unescape

KEY, SECRET, TOKEN, REGION = "AKIAEXAMPLE", "secret+/key", "session/token==", "eu-north-1"
BUCKET = "models"


def signature(method, raw_path, headers, signed, date, region, secret):
    """AWS Signature Version 4, as documented."""
    path, _, query = raw_path.partition("?")
    canonical_query = "&".join(sorted(query.split("&"))) if query else ""
    lines = "".join("%s:%s\n" % (name, " ".join(headers[name].split())) for name in signed)
    request = "\n".join([method, path, canonical_query, lines, ";".join(signed), headers["x-amz-content-sha256"]])
    scope = "%s/%s/s3/aws4_request" % (date[:8], region)
    text = "\n".join(["AWS4-HMAC-SHA256", date, scope, hashlib.sha256(request.encode()).hexdigest()])
    key = ("AWS4" + secret).encode()
    for part in (date[:8], region, "s3", "aws4_request", text):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    return key.hex()


def is_signed(handler):
    headers = {name.lower(): value for name, value in handler.headers.items()}
    match = re.fullmatch(r"AWS4-HMAC-SHA256 Credential=%s/\d{8}/%s/s3/aws4_request, ?SignedHeaders=([^,]+), ?Signature=([0-9a-f]{64})"
                         % (KEY, REGION), headers.get("authorization", ""))
    signed = match[1].split(";") if match else []
    must = {"host", "x-amz-date", "x-amz-content-sha256", "x-amz-security-token"} | {name for name in headers if name.startswith("x-amz-")}
    return (must <= set(signed) and all(name in headers for name in signed) and
            match[2] == signature(handler.command, handler.path, headers, signed, headers["x-amz-date"], REGION, SECRET))


def metadata(handler):
    return {name.lower(): value for name, value in handler.headers.items() if name.lower().startswith("x-amz-meta-")}


class Upload:
    def __init__(self, key, kind, meta=None):
        self.key, self.kind, self.meta, self.parts = key, kind, meta, {}


class S3:
    """The bucket. Give it to net_server.start as `answer`, and the server's `files` to it."""

    def __init__(self, files, page=1000, least_part=0):
        self.files, self.page, self.least_part = files, page, least_part
        self.objects, self.types, self.etags, self.meta = {}, {}, {}, {}
        self.keeps_metadata = True
        self.requester_pays = False
        self.demands_sums = False  # as buckets with Object Lock do
        self.sums = 0  # that were right
        self.uploads, self.began, self.faults, self.log, self.wrong = {}, 0, {}, [], []
        self.lock, self.wake = threading.Lock(), threading.Event()  # until then a silent server is silent
        self.busy = self.most_busy = 0  # parts that are received at once
        self.says_to_expect = "continue"
        self.other = None  # replaces an object, or removes it
        self.conditions = True  # whether it knows If-None-Match

    def put(self, key, data, etag=None, kind=None, meta=None):
        self.objects[key], self.types[key] = data, kind
        self.meta[key] = meta or {} if self.keeps_metadata else {}
        self.etags[key] = '"%s"' % (etag or hashlib.md5(data).hexdigest())
        self.files[urllib.parse.quote("/%s/%s" % (BUCKET, key), safe="/-_.~")] = data

    def remove(self, key):
        self.objects.pop(key, None)
        self.files.pop(urllib.parse.quote("/%s/%s" % (BUCKET, key), safe="/-_.~"), None)

    # ---- requests ----

    @staticmethod
    def operation(handler, query):
        method = handler.command
        if method == "GET":
            return ("list_uploads" if "uploads" in query else "list_parts" if "uploadId" in query else "list" if "list-type" in query else "get")
        if method == "POST":
            return "begin" if "uploads" in query else "complete"
        if method == "PUT":
            return "part" if "uploadId" in query else "whole"
        return "head" if method == "HEAD" else "abort" if "uploadId" in query else "delete"

    def __call__(self, handler):
        path, _, text = handler.path.partition("?")
        query = {name: values[0] for name, values in urllib.parse.parse_qs(text, keep_blank_values=True).items()}
        bucket, _, key = urllib.parse.unquote(path)[1:].partition("/")
        name = self.operation(handler, query)
        with self.lock:
            self.log.append((name, key))
            faults = self.faults.get(name, [])
            fault = faults[0] if faults else None
            if faults and not fault.startswith("always-"):
                faults.pop(0)
        fault = fault and fault.removeprefix("always-")
        size = int(handler.headers.get("Content-Length", 0))
        if fault == "reset":
            handler.rfile.read(size // 2)
            return handler.reset() or True
        if fault == "slow":
            handler.rfile.read(min(size, 1))
            time.sleep(3)
            handler.close_connection = True
            return True
        if fault == "silent":
            self.wake.wait(60)
            handler.close_connection = True
            return True
        if fault == "at-once":  # says no before the body has come
            handler.close_connection = True
            return self.error(handler, 503, "SlowDown")
        if fault == "late":
            time.sleep(0.5)
        if name == "part":
            with self.lock:
                self.busy += 1
                self.most_busy = max(self.busy, self.most_busy)
        body = handler.rfile.read(size)
        if name == "part":
            time.sleep(0.01)
            with self.lock:
                self.busy -= 1
        if len(body) < size:  # the sender has died
            handler.close_connection = True
            return True
        said = handler.headers.get("x-amz-content-sha256")
        if not is_signed(handler) or said not in ("UNSIGNED-PAYLOAD", hashlib.sha256(body).hexdigest()):
            self.wrong.append((handler.command, handler.path))
            return self.error(handler, 403, "SignatureDoesNotMatch", more="<AWSAccessKeyId>%s</AWSAccessKeyId>" % KEY)
        sum_said = handler.headers.get("Content-MD5")
        if sum_said and sum_said != base64.b64encode(hashlib.md5(body).digest()).decode():
            return self.error(handler, 400, "BadDigest")
        if self.demands_sums and name in ("part", "whole") and not sum_said:
            return self.error(handler, 400, "InvalidRequest", "Content-MD5 OR x-amz-checksum- HTTP header is required for Put %s requests with "
                              "Object Lock parameters" % ("Part" if name == "part" else "Object"))
        self.sums += sum_said is not None
        if self.requester_pays and handler.headers.get("x-amz-request-payer") != "requester":
            return self.error(handler, 403, "AccessDenied")
        if bucket != BUCKET:
            return self.error(handler, 404, "NoSuchBucket")
        if fault and re.fullmatch(r"\d+(:\w+)?", fault):
            status, _, code = fault.partition(":")
            return self.error(handler, int(status), code or "Fault")
        if fault == "endless":
            return self.answer(handler, 200, b"x" * (1 << 20))
        if fault == "list":  # a page after which there is another one, without saying where
            return self.answer(handler, 200, b"<ListMultipartUploadsResult><IsTruncated>true</IsTruncated></ListMultipartUploadsResult>")
        if fault == "parts":
            return self.answer(handler, 200, b"<ListPartsResult><Part><PartNumber>0</PartNumber><ETag>x</ETag><Size>1</Size></Part></ListPartsResult>")
        if fault == "replace":
            self.remove(key)
            if self.other is not None:
                self.put(key, self.other)
        if fault == "nonsense":
            return self.answer(handler, 200, b"<html>hello</html>")
        if fault == "region":
            handler.plain(400, [("x-amz-bucket-region", "us-west-2")], b"<Error><Code>AuthorizationHeaderMalformed</Code></Error>")
            return True
        if fault in ("lost", "lost-500", "closed"):  # it is done, but the connection breaks, or another answer comes, or none
            plain = handler.plain
            if fault == "closed":
                handler.close_connection = True
            handler.plain = lambda *unused: handler.reset() if fault == "lost" else plain(500) if fault == "lost-500" else None
            with self.lock:
                getattr(self, name)(handler, query, key, body)
            handler.plain = plain
            return True
        if fault and fault.startswith("error-in-200:"):
            return self.answer(handler, 200, b"<?xml version='1.0'?>\n\n  <Error><Code>%s</Code></Error>" % fault[13:].encode())
        if name == "get":
            return False
        with self.lock:
            getattr(self, name)(handler, query, key, body)
        return True

    def answer(self, handler, status, body=b"", headers=()):
        if handler.command == "HEAD":
            handler.send_response(status)
            for name, value in headers:
                handler.send_header(name, value)
            handler.end_headers()
        else:
            handler.plain(status, headers, body)
        return True

    def error(self, handler, status, code, why="why", more=""):
        return self.answer(handler, status, ("<?xml version='1.0'?><Error><Code>%s</Code><Message>%s</Message>%s</Error>" % (code, why, more)).encode(),
                           [("Content-Length", "0")] if handler.command == "HEAD" else [])

    def may_write(self, handler, key):
        condition = handler.headers.get("If-None-Match")
        if condition and not self.conditions:
            return self.error(handler, 501, "NotImplemented") and False
        if condition == "*" and key in self.objects:
            return self.error(handler, 412, "PreconditionFailed") and False
        return True

    # ---- operations ----

    def list(self, handler, query, key, body):
        prefix, after = query.get("prefix", ""), query.get("continuation-token", "")
        names = sorted(name for name in self.objects if name.startswith(prefix) and name > after)
        page = names[:self.page]
        text = "<?xml version='1.0'?><ListBucketResult><IsTruncated>%s</IsTruncated>" % ("true" if len(names) > len(page) else "false")
        if len(names) > len(page):
            text += "<NextContinuationToken>%s</NextContinuationToken>" % escape(page[-1])
        text += "".join("<Contents><Key>%s</Key></Contents>" % escape(name) for name in page)
        self.answer(handler, 200, (text + "</ListBucketResult>").encode())

    def head(self, handler, query, key, body):
        if key not in self.objects:
            return self.error(handler, 404, "NoSuchKey")
        return self.answer(handler, 200, b"", [("ETag", self.etags[key]), ("Content-Length", str(len(self.objects[key]))),
                                                 *self.meta[key].items()])

    def begin(self, handler, query, key, body):
        self.began += 1
        name = "id&%d/+ =" % self.began  # needs to be encoded in XML and in a URL
        self.uploads[name] = Upload(key, handler.headers.get("Content-Type"), metadata(handler))
        self.answer(handler, 200, ("<?xml version='1.0'?><InitiateMultipartUploadResult><Bucket>%s</Bucket><Key>%s</Key><UploadId>%s</UploadId>"
                                   "</InitiateMultipartUploadResult>" % (BUCKET, escape(key), escape(name))).encode())

    def part(self, handler, query, key, body):
        upload = self.uploads.get(query["uploadId"])
        if not upload or upload.key != key:
            return self.error(handler, 404, "NoSuchUpload")
        etag = '"%s"' % hashlib.md5(body).hexdigest()
        upload.parts[int(query["partNumber"])] = (etag, body)
        return self.answer(handler, 200, b"", [("ETag", etag)])

    def complete(self, handler, query, key, body):
        upload = self.uploads.get(query["uploadId"])
        if not upload or upload.key != key:
            return self.error(handler, 404, "NoSuchUpload")
        if not self.may_write(handler, key):
            return None
        listed = re.findall(r"<Part><PartNumber>(\d+)</PartNumber><ETag>(.*?)</ETag></Part>", body.decode())
        numbers = [int(number) for number, _ in listed]
        if numbers != sorted(numbers) or not numbers:
            return self.error(handler, 400, "InvalidPartOrder")
        for number, etag in listed:
            if upload.parts.get(int(number), (None,))[0] != unescape(etag, {"&quot;": '"'}):
                return self.error(handler, 400, "InvalidPart")
        bodies = [upload.parts[number][1] for number in numbers]
        if any(len(part) < self.least_part for part in bodies[:-1]):
            return self.error(handler, 400, "EntityTooSmall")
        del self.uploads[query["uploadId"]]
        etag = "%s-%d" % (hashlib.md5(b"".join(hashlib.md5(part).digest() for part in bodies)).hexdigest(), len(bodies))
        self.put(key, b"".join(bodies), etag, upload.kind, upload.meta)
        return self.answer(handler, 200, ("<?xml version='1.0'?>\n\n<CompleteMultipartUploadResult><ETag>&quot;%s&quot;</ETag>"
                                          "</CompleteMultipartUploadResult>" % etag).encode())

    def abort(self, handler, query, key, body):
        upload = self.uploads.pop(query["uploadId"], None)
        return self.answer(handler, 204) if upload and upload.key == key else self.error(handler, 404, "NoSuchUpload")

    def whole(self, handler, query, key, body):
        if self.may_write(handler, key):
            self.put(key, body, None, handler.headers.get("Content-Type"), metadata(handler))
            self.answer(handler, 200, b"", [("ETag", self.etags[key])])

    def delete(self, handler, query, key, body):
        self.remove(key)
        self.answer(handler, 204)

    def list_parts(self, handler, query, key, body):
        upload = self.uploads.get(query["uploadId"])
        if not upload or upload.key != key:
            return self.error(handler, 404, "NoSuchUpload")
        rest = sorted(number for number in upload.parts if number > int(query.get("part-number-marker", 0)))
        page, more = rest[:self.page], len(rest) > self.page
        text = "<?xml version='1.0'?><ListPartsResult><UploadId>%s</UploadId><IsTruncated>%s</IsTruncated>" % (
            escape(query["uploadId"]), "true" if more else "false")
        text += "<NextPartNumberMarker>%d</NextPartNumberMarker>" % (page[-1] if page else 0)
        text += "".join("<Part><PartNumber>%d</PartNumber><ETag>%s</ETag><Size>%d</Size></Part>" % (
            number, escape(upload.parts[number][0], {'"': "&quot;"}), len(upload.parts[number][1])) for number in page)
        return self.answer(handler, 200, (text + "</ListPartsResult>").encode())

    def list_uploads(self, handler, query, key, body):
        prefix, after = query.get("prefix", ""), (query.get("key-marker", ""), query.get("upload-id-marker", ""))
        rest = sorted((upload.key, name) for name, upload in self.uploads.items() if upload.key.startswith(prefix))
        rest = [one for one in rest if one > after]
        page, more = rest[:self.page], len(rest) > self.page
        text = "<?xml version='1.0'?><ListMultipartUploadsResult><IsTruncated>%s</IsTruncated>" % ("true" if more else "false")
        if more:
            text += "<NextKeyMarker>%s</NextKeyMarker><NextUploadIdMarker>%s</NextUploadIdMarker>" % tuple(escape(x) for x in page[-1])
        text += "".join("<Upload><Key>%s</Key><UploadId>%s</UploadId></Upload>" % (escape(k), escape(i)) for k, i in page)
        self.answer(handler, 200, (text + "</ListMultipartUploadsResult>").encode())
