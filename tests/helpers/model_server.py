"""A local http server that misbehaves on request, cards of what it serves, and the beginning of a download."""

import contextlib
import functools
import hashlib
import json
import random
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from pipelines.models import transfer

BODY = random.Random(0).randbytes(300_000)  # some chunks long, so that a broken connection leaves a partial file
OTHER = random.Random(1).randbytes(300_000)


def digest(body):
    return hashlib.sha256(body).hexdigest()


SHA = digest(BODY)


class Server(ThreadingHTTPServer):
    """Serves `bodies`; every request takes the next behaviour of `plan`, and "fine" when that is used up."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.base = f"http://127.0.0.1:{self.server_address[1]}"
        self.bodies = {"/model.bin": BODY}
        self.plan = []
        self.always = "fine"
        self.ranges = True  # whether Range is answered with 206
        self.etag = None
        self.careless = False  # whether If-Range is ignored
        self.asked = []  # (path, Range, If-Range) of every request
        self.full = 0  # whole bodies sent

    def handle_error(self, request, client_address):
        pass  # a client that hangs up is part of the tests


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        server = self.server
        server.asked.append((self.path, self.headers.get("Range"), self.headers.get("If-Range")))
        act = server.plan.pop(0) if server.plan else server.always
        body = server.bodies.get(self.path)
        if act == "mute":
            time.sleep(0.5)
            return
        if act.isdigit() or body is None:
            self.send_error(int(act) if act.isdigit() else 404)
            return
        if act == "corrupt":
            body = body[:1000] + bytes([body[1000] ^ 1]) + body[1001:]
        start = 0
        asked, condition = self.headers.get("Range"), self.headers.get("If-Range")
        if server.ranges and asked and (condition in (None, server.etag) or server.careless):
            start = int(asked.removeprefix("bytes=").removesuffix("-"))
            if start >= len(body):
                self.send_error(416)
                return
            shown = start + 1 if act == "askew" else start
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {shown}-{len(body) - 1}/{len(body)}")
        else:
            self.send_response(200)
        if server.etag:
            self.send_header("ETag", server.etag)
        if act == "encoded":
            self.send_header("Content-Encoding", "gzip")
        if act != "unsized":
            self.send_header("Content-Length", str(len(body) - start))
        self.send_header("Connection", "close")
        self.end_headers()
        tail = body[start:]
        server.full += (
            act not in ("drop", "stall", "unsized") and start == 0
        )  # counted first: a client that has it all is quick
        if act in ("drop", "stall", "unsized"):
            self.wfile.write(tail[: len(tail) // 2])
            self.wfile.flush()
            if act == "stall":
                time.sleep(1)
        elif act == "slow":
            for position in range(0, len(tail), 50_000):
                self.wfile.write(tail[position : position + 50_000])
                time.sleep(0.05)
        else:
            self.wfile.write(tail)
        self.close_connection = True


def download(url, path, *, size=None, sha256=None):
    """`path` with the file of `url`, as the hub obtains it."""
    transfer.ensure(Path(path), size, sha256, functools.partial(transfer.download, url, size=size, sha256=sha256))
    return Path(path)


def partial(target):
    return target.with_name(f".{target.name}.partial")


def record(body, url=None):
    return {"size": len(body), "sha256": digest(body), "url": url}


def publish(shipped, files, name="toy", **details):
    """Write the card of a model with `files` (name -> record) into the package folder."""
    folder = shipped / name
    folder.mkdir(parents=True, exist_ok=True)
    card = {"name": name, "entry": "toy_entry", "description": "A toy.", "files": files, **details}
    (folder / "card.json").write_text(json.dumps(card))
    return folder


def visible(folder):
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def interrupt_after(monkeypatch, chunks):
    """Make the progress bar raise KeyboardInterrupt after so many chunks, as Ctrl-C would."""

    @contextlib.contextmanager
    def progress(title, total=None):
        seen = []

        def advance(amount):
            seen.append(amount)
            if len(seen) > chunks:  # the first call tells where the download starts
                raise KeyboardInterrupt

        yield advance

    monkeypatch.setattr(transfer, "progress", progress)
