"""Downloads from a local http server that misbehaves on request."""

import gzip
import socket

import pytest
from helpers.model_server import BODY, OTHER, SHA, digest, download, interrupt_after, partial, visible

from pipelines.core.errors import RequestError, ZooError
from pipelines.models import transfer

pytestmark = pytest.mark.usefixtures("own_network")


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
    monkeypatch.setattr(transfer.time, "sleep", pauses.append)
    monkeypatch.setattr(transfer, "BACKOFF", 0.5)
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
    monkeypatch.setattr(transfer, "READ_TIMEOUT", 0.1)
    server.plan = [act]
    download(f"{server.base}/model.bin", target, size=len(BODY), sha256=SHA)
    assert target.read_bytes() == BODY
    (_, first, _), (_, second, _) = server.asked
    assert first is None and second is not None
    assert 2 * transfer.CHUNK <= int(second[6:-1]) <= 150_000  # what lies behind the last whole chunk may be lost


def test_a_server_that_does_not_answer_is_asked_again(server, target, monkeypatch):
    monkeypatch.setattr(transfer, "READ_TIMEOUT", 0.1)
    server.plan = ["mute"]
    download(f"{server.base}/model.bin", target, sha256=SHA)
    assert target.read_bytes() == BODY and len(server.asked) == 2


def test_many_breaks_are_no_failure_while_the_file_grows(server, target, monkeypatch):
    monkeypatch.setattr(transfer, "ATTEMPTS", 2)
    monkeypatch.setattr(transfer, "CHUNK", 1000)
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
    assert length == 3 * transfer.CHUNK and partial(target).read_bytes() == BODY[:length]
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
    spans = [f"bytes={count * transfer.CHUNK}-" for count in (1, 2)]
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


def test_a_full_disk_is_one_line(server, target):
    partial(target).symlink_to("/dev/full")
    with pytest.raises(ZooError, match="No space left on device") as error:
        download(f"{server.base}/model.bin", target, sha256=SHA)
    assert str(target) in str(error.value) and "\n" not in str(error.value) and len(server.asked) == 1
    assert error.value.exit_code == 1


def test_a_folder_that_cannot_be_made_is_one_line(server, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RequestError, match="cannot read or write"):
        download(f"{server.base}/model.bin", tmp_path / "file" / "model.bin")
    (tmp_path / "folder").mkdir()
    with pytest.raises(RequestError, match="Is a directory"):
        download(f"{server.base}/model.bin", tmp_path / "folder")
