"""Places of deltas: a folder, a URL of fsspec, and Redis."""

from pathlib import Path
from typing import Any

import pytest

from pipelines.core.errors import RequestError, ZooError
from pipelines.deltas import transport
from pipelines.deltas.delta import open_delta, write_delta
from pipelines.deltas.transport import is_place, open_transport, publish


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    return {
        "folder": str(tmp_path / "place"),
        "url": f"memory://{tmp_path.name}/place",
        "redis": "redis://host:1/0#ctr",
    }


def opened(kind: str, place: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    if kind == "url":
        pytest.importorskip("fsspec", reason="needs int8-zoo[remote]")
    if kind == "redis":
        redis = pytest.importorskip("redis", reason="needs int8-zoo[redis]")
        fake = pytest.importorskip("fakeredis", reason="needs the test extra")
        server = fake.FakeServer()
        monkeypatch.setattr(redis.Redis, "from_url", lambda url: fake.FakeRedis(server=server))
    return open_transport(place)


@pytest.mark.parametrize("kind", ["folder", "url", "redis"])
def test_a_place_lists_reads_and_adds(kind: str, places: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    place = opened(kind, places[kind], monkeypatch)
    assert place.names() == []
    for name in ("000001.zoo", "000002.zoo"):
        place.write(name, name.encode())
    assert place.names() == ["000001.zoo", "000002.zoo"]
    content = place.read("000002.zoo")
    assert (content.read_bytes() if isinstance(content, Path) else content) == b"000002.zoo"
    assert (place.local("000001.zoo") is not None) == (kind == "folder")


def test_hidden_and_other_files_are_no_deltas(tmp_path: Path) -> None:
    for name in (".1.zoo", "_2.zoo", "3.txt", "4.zoo"):
        (tmp_path / name).touch()
    assert open_transport(tmp_path).names() == ["4.zoo"]


def test_a_client_that_cannot_connect_is_one_line() -> None:
    pytest.importorskip("redis", reason="needs int8-zoo[redis]")
    with pytest.raises(ZooError, match="cannot read the deltas of redis://127.0.0.1:1/0"):
        open_transport("redis://127.0.0.1:1/0").names()


def test_a_file_is_no_place(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RequestError, match="expected a folder"):
        open_transport(tmp_path / "file")
    assert is_place(tmp_path) and is_place("s3://a/b") and not is_place(tmp_path / "d.zoo")


def model(folder: Path, text: str) -> Path:
    folder.mkdir()
    (folder / "card.json").write_text(text)
    return folder


def test_deltas_are_numbered_and_follow_each_other(tmp_path: Path) -> None:
    models = [model(tmp_path / name, name) for name in ("a", "b", "c")]
    first, second = tmp_path / "first.zoo", tmp_path / "second.zoo"
    one = write_delta(models[0], models[1], first, "toy")
    two = write_delta(models[1], models[2], second, "toy")
    assert one.digest == two.parent != two.digest
    place = tmp_path / "place"
    assert [publish(first, place), publish(second, place)] == ["000001.zoo", "000002.zoo"]
    with pytest.raises(RequestError, match=r"after 000002\.zoo"):
        publish(second, place)
    assert transport.Folder(place).names() == ["000001.zoo", "000002.zoo"]
    with open_delta(place / "000002.zoo") as delta:
        assert (delta.parent, delta.digest) == (two.parent, two.digest)


def test_a_url_of_an_unknown_protocol_is_a_wrong_request() -> None:
    with pytest.raises(RequestError, match=r"ftp9://x/y: Protocol not known: ftp9; expected a folder, a URL"):
        open_transport("ftp9://x/y")
