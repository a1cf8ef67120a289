"""A web server on loopback for test_net.py, with TLS and ranges. It counts requests and can lie. It needs only Python's standard library.

`faults` maps a path to a list of names, one for each request of it in order; when the list is used up, the server is honest. A name that
begins with "always-" is not used up.
"""

import contextlib
import gzip
import hashlib
import http.server
import os
import re
import socketserver
import ssl
import struct
import subprocess
import socket
import threading
import time


def make_certificate(folder):
    """A certificate for localhost that signs itself. @return its file and that of its key"""
    certificate, key = os.path.join(folder, "cert.pem"), os.path.join(folder, "key.pem")
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
                    "-keyout", key, "-out", certificate, "-subj", "/CN=localhost", "-addext",
                    "subjectAltName=DNS:localhost,DNS:server.test,IP:127.0.0.1"], check=True, stderr=subprocess.DEVNULL)
    return certificate, key


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *unused):
        pass

    def plain(self, status, headers=(), body=b""):
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def reset(self):
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()

    def handle_expect_100(self):
        says = getattr(self.server.answer, "says_to_expect", "continue")
        if says == "no":
            self.plain(417)
        return super().handle_expect_100() if says == "continue" else says == "nothing"

    def do_other(self):
        """Methods that only the server's `answer` knows. It reads the body."""
        with self.server.lock:
            self.server.requests.append((self.path.split("?")[0], None, dict(self.headers), time.monotonic()))
        time.sleep(self.server.delay)
        if not (self.server.answer and self.server.answer(self)):
            self.close_connection = True  # with a body that was not read
            self.plain(405)

    do_HEAD = do_PUT = do_POST = do_DELETE = do_other

    def do_GET(self):
        server = self.server
        path = self.path.split("?")[0]
        began = time.monotonic()
        with server.lock:
            server.requests.append((path, self.headers.get("Range"), dict(self.headers), began))
            faults = server.faults.get(path, [])
            fault = faults[0] if faults else None
            if faults and not fault.startswith("always-"):
                faults.pop(0)
            fault = fault and fault.removeprefix("always-")
        time.sleep(server.delay)
        if server.answer and server.answer(self):
            return
        if fault == "reset":
            return self.reset()
        if fault in ("503", "429", "500", "403"):
            return self.plain(int(fault), [("Retry-After", "1")] if fault != "403" else [])
        if fault and fault.startswith("to:"):
            return self.plain(302, [("Location", fault[3:])])
        if fault == "endless":
            self.wfile.write(b"HTTP/1.1 206 Partial Content\r\n")
            try:
                for i in range(100000):
                    self.wfile.write(b"X-Header-%d: %s\r\n" % (i, b"x" * 900))
            except OSError:
                pass
            self.close_connection = True
            return
        file = server.files.get(path)
        if file is None:
            return self.plain(404, [], b"<html>not here</html>")
        if server.tags.get(path, (None,))[0] is not file:
            server.tags[path] = (file, '"%s"' % hashlib.md5(file).hexdigest())
        etag = server.tags[path][1]
        if fault == "other-etag":
            etag = '"other"'
        if self.headers.get("If-Match") not in (None, etag) and fault != "other-etag":
            return self.plain(412)
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if not wanted or fault == "whole":
            return self.plain(200, [("ETag", etag)], file)
        first, last = int(wanted[1]), min(int(wanted[2]), len(file) - 1)
        if first >= len(file):
            return self.plain(416, [("Content-Range", "bytes */%d" % len(file))])
        body, said = file[first:last + 1], (first, last, len(file))
        headers = [("ETag", etag), ("Accept-Ranges", "bytes")]
        if fault == "other-range":
            said = (first + 1, last + 1, len(file) + 1)
        if fault == "gzip":
            body = gzip.compress(body)
            headers.append(("Content-Encoding", "gzip"))
        if fault == "shorter":
            body = body[:-1]
        self.send_response(206)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Range", "bytes %d-%d/%d" % said)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if fault == "truncated":  # the connection ends in the middle
            self.wfile.write(body[:len(body) // 2])
            self.wfile.flush()
            return self.reset()
        if fault == "slow":
            self.wfile.write(body[:1])
            self.wfile.flush()
            time.sleep(3)
        self.wfile.write(body)


class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads = True
    request_queue_size = 64
    slots = contextlib.nullcontext()  # or a semaphore of the connections that are served at once, also while they are idle

    def process_request_thread(self, *connection):
        with self.slots:
            super().process_request_thread(*connection)

    def handle_error(self, *unused):
        pass


def start(files, certificate=None, answer=None):
    """Starts a server of the files, {path: bytes}. @param certificate and key: https"""
    server = Server(("127.0.0.1", 0), Handler)
    if certificate:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    server.files, server.faults, server.tags, server.requests, server.lock = files, {}, {}, [], threading.Lock()
    server.delay, server.answer = 0, answer
    server.name = "%s://localhost:%d" % ("https" if certificate else "http", server.server_address[1])
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    return server


class Proxy:
    """An HTTP proxy that knows CONNECT. Whatever the name of the server, it connects to this machine. `requests` has the lines of
    each request; `refusals` are answered first."""

    def __init__(self, certificate=None, authorization=None):
        self.requests, self.refusals, self.authorization = [], [], authorization
        self.context = None
        if certificate:
            self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self.context.load_cert_chain(*certificate)
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.where = "localhost:%d" % self.listener.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def close(self):
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()

    def accept(self):
        try:
            while True:
                threading.Thread(target=self.serve, args=(self.listener.accept()[0],), daemon=True).start()
        except OSError:
            pass

    def serve(self, client):
        try:
            if self.context:
                client = self.context.wrap_socket(client, server_side=True)
            with client:
                self.connect(client)
        except OSError:
            pass

    def connect(self, client):
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            got = client.recv(1)
            if not got or got == b"\x16":  # TLS
                return
            head += got
        lines = head.decode().split("\r\n")
        self.requests.append(lines)
        if self.authorization and "Proxy-Authorization: " + self.authorization not in lines:
            client.sendall(b"HTTP/1.1 407 No\r\nProxy-Authenticate: Basic realm=\"x\"\r\nContent-Length: 0\r\n\r\n")
            return
        if self.refusals:
            client.sendall(b"HTTP/1.1 %d No\r\nContent-Length: 0\r\n\r\n" % self.refusals.pop(0))
            return
        verb, target, _ = lines[0].split()
        assert verb == "CONNECT"
        with socket.create_connection(("127.0.0.1", int(target.rpartition(":")[2]))) as server:
            client.sendall(b"HTTP/1.1 200 Connected\r\n\r\n")
            back = threading.Thread(target=self.relay, args=(server, client), daemon=True)
            back.start()
            self.relay(client, server)
            back.join()

    @staticmethod
    def relay(source, target):
        try:
            while data := source.recv(1 << 16):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            pass


def rounds(requests, delay):
    """How many requests of a server with a delay were one after the other: a request that began after another was answered."""
    count, end = 0, -1.0
    for began in sorted(r[3] for r in requests):
        if began >= end:
            count, end = count + 1, began + delay
    return count
