"""The hub against a local http server that misbehaves on request."""

import contextlib
import errno
import gzip
import hashlib
import json
import logging
import multiprocessing
import os
import random
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from pipelines.core import settings
from pipelines.core.errors import RequestError, ZooError
from pipelines.models import hub
from pipelines.models.hub import Card, CardFile, Hub, download

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
        rest = body[start:]
        server.full += (
            act not in ("drop", "stall", "unsized") and start == 0
        )  # counted first: a client that has it all is quick
        if act in ("drop", "stall", "unsized"):
            self.wfile.write(rest[: len(rest) // 2])
            self.wfile.flush()
            if act == "stall":
                time.sleep(1)
        elif act == "slow":
            for position in range(0, len(rest), 50_000):
                self.wfile.write(rest[position : position + 50_000])
                time.sleep(0.05)
        else:
            self.wfile.write(rest)
        self.close_connection = True


@pytest.fixture
def server():
    with Server() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    for name in ("ZOO_OFFLINE", "ZOO_MIRROR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ZOO_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setattr(hub, "BACKOFF", 0.001)
    monkeypatch.setattr(hub, "ATTEMPTS", 4)
    monkeypatch.setattr(hub, "READ_TIMEOUT", 5.0)


@pytest.fixture
def target(tmp_path):
    return tmp_path / "model.bin"


@pytest.fixture
def shipped(tmp_path):
    return tmp_path / "shipped"


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

    monkeypatch.setattr(hub, "progress", progress)


# Settings


def test_home_follows_its_settings(monkeypatch, tmp_path):
    assert settings.home() == tmp_path / "home"
    monkeypatch.delenv("ZOO_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert settings.home() == tmp_path / "xdg" / "int8-zoo"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert settings.home() == tmp_path / ".cache" / "int8-zoo"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert settings.home() == tmp_path / ".cache" / "int8-zoo"
    monkeypatch.setenv("ZOO_HOME", "~/zoo")
    assert settings.home() == tmp_path / "zoo"


def test_offline_and_mirror(monkeypatch):
    assert not settings.offline() and settings.mirror() is None
    for value, expected in {"1": True, "true": True, "0": False, "": False}.items():
        monkeypatch.setenv("ZOO_OFFLINE", value)
        assert settings.offline() is expected
    monkeypatch.setenv("ZOO_MIRROR", "http://there/models")
    assert settings.mirror() == "http://there/models"
    monkeypatch.setenv("ZOO_MIRROR", "")
    assert settings.mirror() is None


# Cards


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"name": "../up.onnx"}, "'../up.onnx'"),
        ({"name": "a/b.onnx"}, "'a/b.onnx'"),
        ({"name": ".hidden"}, "'.hidden'"),
        ({"name": ""}, "''"),
        ({"name": None}, "None"),
        ({"name": "card.json"}, "card.json"),
        ({"size": -1}, "-1"),
        ({"size": 1.5}, "1.5"),
        ({"size": True}, "True"),
        ({"sha256": "abc"}, "'abc'"),
        ({"sha256": SHA.upper()}, SHA.upper()),
        ({"url": "ftp://there/x"}, "'ftp://there/x'"),
        ({"url": "there/x"}, "'there/x'"),
        ({"url": "https://there/x", "sha256": None}, "no sha256"),
    ],
)
def test_card_file_refuses(change, found):
    right = {"name": "int8.onnx", "size": 3, "sha256": SHA, "url": "https://there/int8.onnx"}
    CardFile(**right)
    with pytest.raises(RequestError) as error:
        CardFile(**(right | change))
    assert found in str(error.value) and "\n" not in str(error.value)


def test_card_keeps_everything_and_its_order(tmp_path):
    value = {
        "metrics": {"int8": {"auc": 0.74}, "fp32": {"auc": 0.75}},
        "name": "toy",
        "entry": "toy_entry",
        "description": "Ein Spielzeug: größer.",
        "files": {
            "z.onnx": record(b"z", "https://there/z.onnx"),
            "a.json": {"size": None, "sha256": None, "url": None},
        },
        "data": {"licence": None},
    }
    path = tmp_path / "card.json"
    path.write_text(json.dumps(value))
    card = Card.read(path)
    assert card.to_json() == value
    assert list(card.details) == ["metrics", "data"]
    assert [file.name for file in card.files] == ["z.onnx", "a.json"]
    path.write_text(json.dumps(card.to_json()))
    assert Card.read(path) == card


def test_card_digest_is_of_the_content(tmp_path):
    path = publish(tmp_path, {"a.onnx": record(b"a")}, data="x", licence="y") / "card.json"
    card = Card.read(path)
    value = json.loads(path.read_text())
    path.write_text(json.dumps(dict(reversed(value.items())), indent=7))
    assert Card.read(path).digest() == card.digest()
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"))
    assert card.digest() == hashlib.sha256(canonical.encode()).hexdigest()
    path.write_text(json.dumps(value | {"licence": "z"}))
    assert Card.read(path).digest() != card.digest()


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"name": "../toy"}, "'../toy'"),
        ({"name": None}, "model name None"),
        ({"entry": ""}, "entry is ''"),
        ({"description": 3}, "description is 3"),
        ({"files": ["int8.onnx"]}, "files"),
        ({"files": {"int8.onnx": "abc"}}, "'abc'"),
        ({"files": {"int8.onnx": {"sha512": "abc"}}}, "sha512"),
        ({"files": {"int8.onnx": {"size": "3"}}}, "size is '3'"),
    ],
)
def test_card_read_refuses_and_names_the_file(tmp_path, change, found):
    path = publish(tmp_path, {"int8.onnx": record(b"a")}) / "card.json"
    Card.read(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(RequestError) as error:
        Card.read(path)
    assert found in str(error.value) and str(path) in str(error.value) and "\n" not in str(error.value)


def test_card_read_refuses_what_is_no_card(tmp_path):
    path = tmp_path / "card.json"
    with pytest.raises(RequestError, match="cannot read"):
        Card.read(path)
    for text in ("[]", "{", "3"):
        path.write_text(text)
        with pytest.raises(RequestError, match="card"):
            Card.read(path)
    one = CardFile("a", None, None, None)
    with pytest.raises(RequestError, match="twice"):
        Card("toy", "entry", "text", (one, one))
    with pytest.raises(RequestError, match="details may not hold files"):
        Card("toy", "entry", "text", (one,), {"files": 1})


def test_models_of_several_folders_the_first_of_a_name_counts(tmp_path, monkeypatch):
    monkeypatch.setenv("ZOO_HOME", str(tmp_path / "home"))
    first, second = tmp_path / "first", tmp_path / "second"
    for shipped, names, body in ((first, ("b", "c"), b"one"), (second, ("a", "b"), b"two")):
        for name in names:
            (publish(shipped, {"model.bin": record(body)}, name) / "model.bin").write_bytes(body)
    hub = Hub(first, second, tmp_path / "nothing here")
    assert hub.names() == ["a", "b", "c"]
    assert {name: (hub.fetch(name) / "model.bin").read_bytes() for name in hub.names()} == {
        "a": b"two",
        "b": b"one",
        "c": b"one",
    }


def test_hub_finds_models(shipped):
    assert Hub(shipped).names() == []
    for name in ("wide-deep", "resnet50", "mobilenet"):
        publish(shipped, {}, name=name)
    (shipped / "no-card").mkdir()
    catalogue = Hub(shipped)
    assert catalogue.names() == ["mobilenet", "resnet50", "wide-deep"]
    assert catalogue.card("resnet50").name == "resnet50"
    with pytest.raises(
        RequestError, match=r"no model 'resnet-5O'; did you mean 'resnet50'\? known: mobilenet, resnet50, wide-deep"
    ):
        catalogue.card("resnet-5O")
    with pytest.raises(RequestError, match=r"no model '\.\./shipped/resnet50'"):
        catalogue.card("../shipped/resnet50")
    (shipped / "wide-deep").rename(shipped / "wide")
    with pytest.raises(RequestError, match="named 'wide-deep'"):
        catalogue.card("wide")


# Downloads


def test_download(server, target):
    url = f"{server.base}/model.bin"
    assert download(url, target, size=len(BODY), sha256=SHA) == target
    assert target.read_bytes() == BODY
    assert download(url, target, size=len(BODY), sha256=SHA.upper()) == target
    assert download(url, str(target)) == target
    assert len(server.asked) == 1  # what is there and right is not asked for again
    assert visible(target.parent) == ["model.bin"] and not partial(target).exists()


def test_download_makes_the_folder_and_takes_an_empty_file(server, target):
    server.bodies["/empty"] = b""
    path = target.parent / "deep" / "down" / "empty"
    download(f"{server.base}/empty", path, size=0, sha256=digest(b""))
    assert path.read_bytes() == b""


def test_bytes_are_kept_as_they_lie_on_the_server(server, target):
    server.always = "encoded"  # what some servers say of every .gz file
    server.bodies["/model.bin"] = body = gzip.compress(BODY)
    download(f"{server.base}/model.bin", target, size=len(body), sha256=digest(body))
    assert target.read_bytes() == body


@pytest.mark.parametrize("status", ["503", "500", "429", "408"])
def test_a_failing_server_is_asked_again(server, target, status):
    server.plan = [status, status]
    download(f"{server.base}/model.bin", target, sha256=SHA)
    assert target.read_bytes() == BODY and len(server.asked) == 3


def test_retries_end(server, target):
    server.always = "503"
    with pytest.raises(
        ZooError, match=rf"cannot download {server.base}/model.bin: answered 503 Service Unavailable \(4 attempts\)"
    ):
        download(f"{server.base}/model.bin", target, sha256=SHA)
    assert len(server.asked) == 4 and not target.exists()


def test_pauses_double(server, target, monkeypatch):
    pauses = []
    monkeypatch.setattr(hub.time, "sleep", pauses.append)
    monkeypatch.setattr(hub, "BACKOFF", 0.5)
    server.plan = ["503"] * 3
    download(f"{server.base}/model.bin", target, sha256=SHA)
    assert pauses == [0.5, 1.0, 2.0]


@pytest.mark.parametrize("status", ["404", "403", "410"])
def test_a_refusal_is_final(server, target, status):
    server.always = status
    with pytest.raises(ZooError, match=rf"{server.base}/model.bin answered {status} ") as error:
        download(f"{server.base}/model.bin", target, sha256=SHA)
    assert len(server.asked) == 1 and "\n" not in str(error.value) and visible(target.parent) == []


def test_no_server_at_all(target):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/model.bin"  # bound, not listening: refuses
        with pytest.raises(ZooError, match=rf"cannot download {url}: \[Errno \d+\] Connection refused \(4 attempts\)"):
            download(url, target, sha256=SHA)


def test_an_impossible_address_is_final(target):
    with pytest.raises(ZooError, match="cannot download gopher://there/x"):
        download("gopher://there/x", target)


@pytest.mark.parametrize("act", ["drop", "stall"])
def test_a_broken_connection_is_resumed(server, target, act, monkeypatch):
    monkeypatch.setattr(hub, "READ_TIMEOUT", 0.1)
    server.plan = [act]
    download(f"{server.base}/model.bin", target, size=len(BODY), sha256=SHA)
    assert target.read_bytes() == BODY
    (_, first, _), (_, second, _) = server.asked
    assert first is None and second is not None
    assert 2 * hub.CHUNK <= int(second[6:-1]) <= 150_000  # what lies behind the last whole chunk may be lost


def test_a_server_that_does_not_answer_is_asked_again(server, target, monkeypatch):
    monkeypatch.setattr(hub, "READ_TIMEOUT", 0.1)
    server.plan = ["mute"]
    download(f"{server.base}/model.bin", target, sha256=SHA)
    assert target.read_bytes() == BODY and len(server.asked) == 2


def test_many_breaks_are_no_failure_while_the_file_grows(server, target, monkeypatch):
    monkeypatch.setattr(hub, "ATTEMPTS", 2)
    monkeypatch.setattr(hub, "CHUNK", 1000)
    server.plan = ["drop"] * 6
    download(f"{server.base}/model.bin", target, size=len(BODY), sha256=SHA)
    assert target.read_bytes() == BODY and len(server.asked) == 7


def test_a_server_that_always_truncates_is_given_up(server, target):
    server.always, server.ranges = "drop", False
    with pytest.raises(ZooError, match=r"4 attempts"):
        download(f"{server.base}/model.bin", target, sha256=SHA)
    assert not target.exists() and len(server.asked) == 4


def test_a_short_body_without_a_length_is_noticed(server, target):
    server.plan = ["unsized"]
    download(f"{server.base}/model.bin", target, size=len(BODY), sha256=SHA)
    assert target.read_bytes() == BODY and len(server.asked) == 2


def test_a_server_that_ignores_ranges_starts_anew(server, target):
    server.plan, server.ranges = ["drop"], False
    download(f"{server.base}/model.bin", target, size=len(BODY), sha256=SHA)
    assert target.read_bytes() == BODY
    assert server.asked[1][1] is not None and server.full == 1


def test_corrupt_bytes_are_deleted_and_named(server, target, caplog):
    server.always = "corrupt"
    wrong = digest(BODY[:1000] + bytes([BODY[1000] ^ 1]) + BODY[1001:])
    url = f"{server.base}/model.bin"
    with pytest.raises(ZooError) as error:
        download(url, target, size=len(BODY), sha256=SHA)
    text = str(error.value)
    assert url in text and SHA in text and wrong in text and "deleted" in text and "\n" not in text
    assert len(server.asked) == 1
    assert not target.exists() and not partial(target).exists()


def test_a_wrong_size_is_named(server, target):
    with pytest.raises(ZooError, match="size 300000, expected 7"):
        download(f"{server.base}/model.bin", target, size=7)
    assert visible(target.parent) == [] and not partial(target).exists()


def test_an_interrupt_leaves_a_partial_file_that_is_resumed(server, target, monkeypatch):
    url = f"{server.base}/model.bin"
    with monkeypatch.context() as patch:
        interrupt_after(patch, 3)
        with pytest.raises(KeyboardInterrupt):
            download(url, target, size=len(BODY), sha256=SHA)
    assert visible(target.parent) == []
    length = partial(target).stat().st_size
    assert length == 3 * hub.CHUNK and partial(target).read_bytes() == BODY[:length]
    download(url, target, size=len(BODY), sha256=SHA)
    assert target.read_bytes() == BODY and not partial(target).exists()
    assert server.asked[1][1] == f"bytes={length}-"


@pytest.mark.parametrize("ranges", [True, False])
def test_a_partial_file_of_something_else_is_replaced(server, target, ranges):
    server.ranges = ranges
    partial(target).write_bytes(OTHER[:1000])
    download(f"{server.base}/model.bin", target, size=len(BODY), sha256=SHA)
    assert target.read_bytes() == BODY and server.full == 1
    assert len(server.asked) == (2 if ranges else 1)


def test_a_whole_partial_file_needs_no_request(server, target):
    partial(target).write_bytes(BODY)
    download(f"{server.base}/model.bin", target, size=len(BODY), sha256=SHA)
    assert target.read_bytes() == BODY and server.asked == []


def test_a_partial_file_beyond_the_end_is_replaced(server, target):
    for size, asked in ((len(BODY), [None]), (None, ["bytes=300001-", None])):  # without a size the server says so: 416
        target.unlink(missing_ok=True)
        server.asked.clear()
        partial(target).write_bytes(BODY + b"x")
        download(f"{server.base}/model.bin", target, size=size, sha256=SHA)
        assert target.read_bytes() == BODY and [span for _, span, _ in server.asked] == asked


def test_a_range_other_than_asked_for_is_not_appended(server, target):
    partial(target).write_bytes(BODY[:1000])
    server.plan = ["askew"]
    download(f"{server.base}/model.bin", target, size=len(BODY), sha256=SHA)
    assert target.read_bytes() == BODY and [span for _, span, _ in server.asked] == ["bytes=1000-", None]


@pytest.mark.parametrize("careless", [False, True])
def test_the_etag_guards_a_resumed_download(server, target, monkeypatch, careless):
    url = f"{server.base}/model.bin"
    server.etag = '"one"'
    with monkeypatch.context() as patch:
        interrupt_after(patch, 1)
        for _ in range(2):  # the second one is resumed and interrupted again
            with pytest.raises(KeyboardInterrupt):
                download(url, target)
    server.bodies["/model.bin"], server.etag, server.careless = OTHER, '"two"', careless
    download(url, target)  # no digest: the tag alone tells that the old beginning is of another file
    assert target.read_bytes() == OTHER
    spans = [f"bytes={count * hub.CHUNK}-" for count in (1, 2)]
    assert server.asked == [
        ("/model.bin", None, None),
        ("/model.bin", spans[0], '"one"'),
        ("/model.bin", spans[1], '"one"'),
        *[("/model.bin", None, None)] * careless,
    ]
    assert [path.name for path in target.parent.iterdir() if "etag" in path.name] == []


def test_an_etag_belongs_to_its_address(server, target, monkeypatch):
    server.etag = '"one"'
    server.bodies["/other.bin"] = OTHER
    with monkeypatch.context() as patch:
        interrupt_after(patch, 2)
        with pytest.raises(KeyboardInterrupt):
            download(f"{server.base}/other.bin", target)
    download(f"{server.base}/model.bin", target)
    assert target.read_bytes() == BODY and server.asked[1] == ("/model.bin", None, None)


@pytest.mark.parametrize("etag", [None, 'W/"weak"'])
def test_nothing_is_resumed_that_could_not_be_checked(server, target, etag):
    server.etag, server.plan = etag, ["drop"]
    download(f"{server.base}/model.bin", target)
    assert target.read_bytes() == BODY and [span for _, span, _ in server.asked] == [None, None]


def test_a_wrong_file_at_the_target_is_replaced(server, target, caplog):
    target.write_bytes(OTHER)
    download(f"{server.base}/model.bin", target, sha256=SHA)
    assert target.read_bytes() == BODY
    assert str(target) in caplog.text and "deleted" in caplog.text


def test_download_offline(server, target, monkeypatch):
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    with pytest.raises(RequestError, match="ZOO_OFFLINE") as error:
        download(f"{server.base}/model.bin", target, sha256=SHA)
    assert server.asked == [] and str(target) in str(error.value)
    target.write_bytes(BODY)
    assert download(f"{server.base}/model.bin", target, sha256=SHA) == target


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_line(server, target):
    partial(target).symlink_to("/dev/full")
    with pytest.raises(ZooError, match="No space left on device") as error:
        download(f"{server.base}/model.bin", target, sha256=SHA)
    assert str(target) in str(error.value) and "\n" not in str(error.value) and len(server.asked) == 1
    assert error.value.exit_code == 1


def test_a_full_disk_is_no_fault_of_the_package(server, shipped, monkeypatch):
    folder = publish(shipped, {"model.bin": record(BODY, f"{server.base}/model.bin")})
    (folder / "model.bin").write_bytes(BODY)

    def full(source, target):
        raise OSError(
            errno.ENOSPC, os.strerror(errno.ENOSPC), source, None, target
        )  # as shutil does: the source comes first

    monkeypatch.setattr(hub.shutil, "copyfile", full)
    with pytest.raises(ZooError, match="No space left on device; free space") as error:
        Hub(shipped).fetch("toy")
    target = Hub(shipped).folder("toy") / "model.bin"
    assert str(target) in str(error.value) and str(folder) not in str(error.value) and "\n" not in str(error.value)
    assert error.value.exit_code == 1 and server.asked == [] and not target.exists()


def test_a_folder_that_cannot_be_made_is_one_line(server, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RequestError, match="cannot read or write"):
        download(f"{server.base}/model.bin", tmp_path / "file" / "model.bin")
    (tmp_path / "folder").mkdir()
    with pytest.raises(RequestError, match="Is a directory"):
        download(f"{server.base}/model.bin", tmp_path / "folder")


# Models


def test_shipped_files_come_without_network(server, shipped, monkeypatch):
    folder = publish(
        shipped, {"int8.onnx": record(BODY, f"{server.base}/model.bin"), "table.json": record(b"{}")}, note="ä"
    )
    (folder / "int8.onnx").write_bytes(BODY)
    (folder / "table.json").write_bytes(b"{}")
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    catalogue = Hub(shipped)
    working = catalogue.fetch("toy")
    assert working == settings.home() / "models" / "toy" / catalogue.card("toy").digest()[:12]
    assert visible(working) == ["card.json", "int8.onnx", "table.json"]
    assert (working / "int8.onnx").read_bytes() == BODY
    assert Card.read(working / "card.json") == catalogue.card("toy")
    assert server.asked == []


def test_only_the_named_files_are_fetched(shipped):
    folder = publish(shipped, {name: record(name.encode()) for name in ("a", "b", "c")})
    for name in "abc":
        (folder / name).write_text(name)
    catalogue = Hub(shipped)
    assert visible(catalogue.fetch("toy", [])) == ["card.json"]
    assert visible(catalogue.fetch("toy", ["b", "b"])) == ["b", "card.json"]
    with pytest.raises(RequestError, match="toy has no file 'd'; its card lists: a, b, c"):
        catalogue.fetch("toy", ["a", "d"])
    assert visible(catalogue.fetch("toy")) == ["a", "b", "c", "card.json"]


def test_other_files_stay_and_a_damaged_card_is_repaired(shipped):
    publish(shipped, {})
    working = Hub(shipped).fetch("toy")
    (working / "folded.bin").write_text("derived")
    (working / "card.json").write_text("{")
    assert Hub(shipped).fetch("toy") == working
    assert Card.read(working / "card.json").name == "toy"
    assert (working / "folded.bin").read_text() == "derived"


def test_a_filled_cache_is_only_read(shipped):
    (publish(shipped, {"a": record(b"a")}) / "a").write_text("a")
    working = Hub(shipped).fetch("toy")
    for path in working.glob(".*"):
        path.unlink()
    before = {path.name: path.stat() for path in working.iterdir()}
    Hub(shipped).fetch("toy")
    assert {path.name: path.stat().st_mtime_ns for path in working.iterdir()} == {
        name: stat.st_mtime_ns for name, stat in before.items()
    }


@pytest.mark.parametrize("damage", [BODY[:-1], BODY[:-1] + b"?", b""])
def test_a_corrupt_cache_is_repaired(server, shipped, caplog, damage):
    publish(shipped, {"model.bin": record(BODY, f"{server.base}/model.bin")})
    path = Hub(shipped).fetch("toy") / "model.bin"
    path.write_bytes(damage)
    caplog.clear()
    Hub(shipped).fetch("toy")
    assert path.read_bytes() == BODY and server.full == 2
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert str(path) in caplog.text and "deleted" in caplog.text


def test_a_corrupt_cache_that_cannot_be_repaired_is_deleted(shipped):
    folder = publish(shipped, {"a": record(b"a")})
    (folder / "a").write_text("a")
    path = Hub(shipped).fetch("toy") / "a"
    (folder / "a").unlink()
    path.write_text("b")
    with pytest.raises(
        RequestError, match=r"cannot find a of toy: not in the package, and its card has no url; set ZOO_MIRROR"
    ):
        Hub(shipped).fetch("toy")
    assert not path.exists()


def test_folder_mirror(server, shipped, tmp_path, monkeypatch):
    publish(shipped, {"model.bin": record(BODY, f"{server.base}/model.bin")})
    place = tmp_path / "mirror"
    place.mkdir()
    (place / "model.bin").write_bytes(BODY)
    monkeypatch.setenv("ZOO_MIRROR", str(place))
    monkeypatch.setenv("ZOO_OFFLINE", "1")  # a folder is no network
    assert (Hub(shipped).fetch("toy") / "model.bin").read_bytes() == BODY
    assert server.asked == []


@pytest.mark.parametrize("tail", ["", "/"])
def test_http_mirror_comes_before_the_public_address(server, shipped, monkeypatch, tail):
    publish(shipped, {"int8.onnx": record(BODY, f"{server.base}/model.bin")})
    server.bodies["/mirror/int8.onnx"] = BODY
    monkeypatch.setenv("ZOO_MIRROR", f"{server.base}/mirror{tail}")
    assert (Hub(shipped).fetch("toy") / "int8.onnx").read_bytes() == BODY
    assert [path for path, *_ in server.asked] == ["/mirror/toy/int8.onnx", "/mirror/int8.onnx"]


@pytest.mark.parametrize("kind", ["folder", "address"])
def test_a_mirror_may_hold_a_folder_a_model(server, shipped, tmp_path, monkeypatch, kind, caplog):
    """As zoo/weights does, so that files of one name lie apart."""
    publish(shipped, {"model.bin": record(BODY)})
    (tmp_path / "mirror" / "toy").mkdir(parents=True)
    (tmp_path / "mirror" / "toy" / "model.bin").write_bytes(BODY)
    (tmp_path / "mirror" / "model.bin").write_bytes(OTHER)  # of another model
    server.bodies = {"/mirror/toy/model.bin": BODY, "/mirror/model.bin": OTHER}
    monkeypatch.setenv("ZOO_MIRROR", str(tmp_path / "mirror") if kind == "folder" else f"{server.base}/mirror")
    assert (Hub(shipped).fetch("toy") / "model.bin").read_bytes() == BODY
    assert not caplog.text


def test_the_source_tree_of_an_installation_has_what_its_wheel_leaves_out(server, shipped, tmp_path, monkeypatch):
    publish(shipped, {"model.bin": record(BODY, f"{server.base}/model.bin")})
    tree = tmp_path / "a clone"
    place = tree.joinpath(*(shipped / "toy").parts[-3:])
    place.mkdir(parents=True)
    (place / "model.bin").write_bytes(BODY)

    class Installed:
        def read_text(self, name):
            return json.dumps({"url": tree.as_uri(), "dir_info": {}}) if name == "direct_url.json" else None

    monkeypatch.setattr("importlib.metadata.distribution", lambda name: Installed())
    hub.source_tree.cache_clear()
    try:
        assert hub.source_tree() == tree
        assert visible(Hub(shipped).fetch("toy", later=["model.bin"])) == ["card.json", "model.bin"]
    finally:
        hub.source_tree.cache_clear()
    assert not server.asked


def test_files_for_later_are_taken_only_where_they_are(server, shipped, tmp_path, monkeypatch):
    publish(shipped, {"a": record(BODY, f"{server.base}/model.bin"), "b": record(OTHER)})
    (shipped / "toy" / "b").write_bytes(OTHER)
    working = Hub(shipped).fetch("toy", later=["a", "b"])
    assert visible(working) == ["b", "card.json"] and not server.asked
    (tmp_path / "mirror").mkdir()
    (tmp_path / "mirror" / "a").write_bytes(BODY)
    with monkeypatch.context() as patch:
        patch.setenv("ZOO_MIRROR", str(tmp_path / "mirror"))
        assert visible(Hub(shipped).fetch("toy", later=["a"])) == ["a", "b", "card.json"]
    (working / "a").write_bytes(OTHER)  # damaged: it was there, and is fetched anew
    assert (Hub(shipped).fetch("toy", later=["a"]) / "a").read_bytes() == BODY and server.full == 1


def test_a_mirror_serves_files_without_url(server, shipped, monkeypatch):
    publish(shipped, {"model.bin": record(BODY)})
    monkeypatch.setenv("ZOO_MIRROR", server.base)
    assert (Hub(shipped).fetch("toy") / "model.bin").read_bytes() == BODY


def test_a_mirror_that_fails_is_named_and_passed_over(server, shipped, tmp_path, monkeypatch, caplog):
    publish(shipped, {"int8.onnx": record(BODY, f"{server.base}/model.bin")})
    place = tmp_path / "mirror"
    place.mkdir()
    (place / "int8.onnx").write_bytes(OTHER)
    server.bodies["/bad/int8.onnx"] = OTHER
    for base, named in {
        f"{server.base}/bad": digest(OTHER),
        f"{server.base}/none": "404",
        str(place): digest(OTHER),
        str(tmp_path / "none"): "there is no folder",
    }.items():
        caplog.clear()
        monkeypatch.setenv("ZOO_MIRROR", base)
        path = Hub(shipped).fetch("toy") / "int8.onnx"
        assert path.read_bytes() == BODY
        assert named in caplog.text and base in caplog.text
        path.unlink()
    assert (place / "int8.onnx").read_bytes() == OTHER  # a mirror is not ours to clean


def test_a_damaged_package_is_passed_over(server, shipped, caplog):
    folder = publish(shipped, {"model.bin": record(BODY, f"{server.base}/model.bin")})
    (folder / "model.bin").write_bytes(OTHER)
    assert (Hub(shipped).fetch("toy") / "model.bin").read_bytes() == BODY
    assert str(folder / "model.bin") in caplog.text


def test_a_file_found_nowhere_is_named(server, shipped, tmp_path, monkeypatch):
    publish(shipped, {"model.bin": record(BODY), "gone.bin": record(BODY, f"{server.base}/gone.bin")})
    for base, named in {
        "": "not in the package",
        str(tmp_path): f"ZOO_MIRROR={tmp_path}",
        f"{server.base}/none": "404 Not Found",
    }.items():
        monkeypatch.setenv("ZOO_MIRROR", base)
        with pytest.raises(RequestError, match=r"cannot find model.bin of toy: .*has no url; set ZOO_MIRROR") as error:
            Hub(shipped).fetch("toy", ["model.bin"])
        assert named in str(error.value) and "\n" not in str(error.value)
    monkeypatch.delenv("ZOO_MIRROR")
    with monkeypatch.context() as patch:
        patch.setenv("ZOO_OFFLINE", "1")  # going online would not help
        with pytest.raises(RequestError, match=r"cannot find model.bin of toy: not in the package"):
            Hub(shipped).fetch("toy", ["model.bin"])
    with pytest.raises(ZooError, match=rf"cannot fetch gone.bin of toy: {server.base}/gone.bin answered 404 ") as error:
        Hub(shipped).fetch("toy", ["gone.bin"])
    assert not isinstance(error.value, RequestError)  # the network failed, not the request


def test_offline(server, shipped, monkeypatch):
    publish(shipped, {"model.bin": record(BODY, f"{server.base}/model.bin")})
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    for base in ("", server.base):  # an http mirror is network too
        monkeypatch.setenv("ZOO_MIRROR", base)
        with pytest.raises(RequestError) as error:
            Hub(shipped).fetch("toy")
        text = str(error.value)
        assert (
            all(part in text for part in ("model.bin", "`zoo download toy`", "ZOO_OFFLINE", "ZOO_MIRROR"))
            and "\n" not in text
        )
    assert server.asked == []
    monkeypatch.delenv("ZOO_OFFLINE")
    working = Hub(shipped).fetch("toy")
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    assert Hub(shipped).fetch("toy") == working and server.full == 1


def test_a_cache_that_cannot_be_made_is_one_line(shipped, tmp_path, monkeypatch):
    publish(shipped, {})
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("ZOO_HOME", str(tmp_path / "file"))
    with pytest.raises(RequestError, match="cannot"):
        Hub(shipped).fetch("toy")


def fetch_together(shipped, barrier):
    barrier.wait(30)
    path = Hub(shipped).fetch("toy") / "model.bin"
    os._exit(0 if path.read_bytes() == BODY else 3)


def test_two_processes_at_once(server, shipped):
    publish(shipped, {"model.bin": record(BODY, f"{server.base}/model.bin")})
    server.always = "slow"
    spawning = multiprocessing.get_context("spawn")
    barrier = spawning.Barrier(2)
    processes = [spawning.Process(target=fetch_together, args=(shipped, barrier)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert server.full == 1 and len(server.asked) == 1


def test_the_first_eight_digits_of_a_digest_will_do(tmp_path):
    (tmp_path / "weights.pth").write_bytes(b"weights")
    digest = hashlib.sha256(b"weights").hexdigest()
    assert CardFile("weights.pth", None, digest[:8], None).fault(tmp_path / "weights.pth") is None
    assert "expected 00000000" in str(CardFile("weights.pth", None, "00000000", None).fault(tmp_path / "weights.pth"))
    with pytest.raises(RequestError, match="or their first 8"):
        CardFile("weights.pth", None, digest[:9], None)
