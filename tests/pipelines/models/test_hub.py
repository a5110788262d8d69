"""The hub: cards, folders, mirrors and what is fetched."""

import errno
import hashlib
import json
import logging
import multiprocessing
import os

import pytest
from helpers.model_server import BODY, OTHER, SHA, digest, publish, record, visible

from pipelines.core import settings
from pipelines.core.errors import RequestError, ZooError
from pipelines.models import hub
from pipelines.models.hub import Card, CardFile, Hub

pytestmark = pytest.mark.usefixtures("own_network")


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


@pytest.mark.parametrize("home", ["", "~/zoo"])
def test_a_user_without_a_home_folder_is_told_to_name_one(monkeypatch, home):
    def nobody(_):
        raise KeyError

    monkeypatch.setattr("pwd.getpwuid", nobody)
    monkeypatch.delenv("HOME")
    monkeypatch.setenv("ZOO_HOME", home)
    with pytest.raises(RequestError, match="^found no home folder of this user; set ZOO_HOME to a folder"):
        settings.home()


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
        ({"hub": "hf://org/name"}, "'hf://org/name'"),
        ({"hub": "hf://org/name@main/x"}, "'hf://org/name@main/x'"),
        ({"hub": "hf://org/name@v1", "url": None, "sha256": None}, "no sha256"),
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


def test_texts_of_an_open_card_are_shared(tmp_path):
    path = tmp_path / "card.json"
    preprocessing = {"schema": {"values": ["a", "b"]}}
    card = {"name": "m", "entry": "e", "description": "d", "files": {}, "preprocessing": preprocessing}
    path.write_text(json.dumps(card))
    equal = json.loads(json.dumps(preprocessing))
    assert Card.shared(path, equal) is equal  # not read
    opened = Card.read(path)
    assert Card.shared(path, equal) is opened.details["preprocessing"]
    other = {"schema": {"values": ["a", "c"]}}
    assert Card.shared(path, other) is other
    del opened
    assert Card.shared(path, equal) is equal


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
        RequestError,
        match=r"no model 'resnet-5O'; did you mean 'resnet50'\? choose one of: mobilenet, resnet50, wide-deep",
    ):
        catalogue.card("resnet-5O")
    with pytest.raises(RequestError, match=r"no model '\.\./shipped/resnet50'"):
        catalogue.card("../shipped/resnet50")
    (shipped / "wide-deep").rename(shipped / "wide")
    with pytest.raises(RequestError, match="named 'wide-deep'"):
        catalogue.card("wide")


def test_a_full_disk_is_no_fault_of_the_package(server, shipped, monkeypatch):
    folder = publish(shipped, {"model.bin": record(BODY, f"{server.base}/model.bin")})
    (folder / "model.bin").write_bytes(BODY)

    def full(source, target):
        raise OSError(
            errno.ENOSPC, os.strerror(errno.ENOSPC), source, None, target
        )  # as shutil does: the source comes first

    monkeypatch.setattr("pipelines.core.files.shutil.copyfile", full)
    with pytest.raises(ZooError, match="No space left on device; free space") as error:
        Hub(shipped).fetch("toy")
    target = Hub(shipped).folder("toy") / "model.bin"
    assert str(target) in str(error.value) and str(folder) not in str(error.value) and "\n" not in str(error.value)
    assert error.value.exit_code == 1 and server.asked == [] and not target.exists()


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


@pytest.mark.parametrize("held", ["mirror", "hub", "origin"])
def test_the_hub_is_asked_after_the_mirror_and_before_the_origin(server, shipped, monkeypatch, held):
    hub_file = record(BODY, f"{server.base}/origin/model.bin") | {"hub": "hf://org/toy@v1"}
    publish(shipped, {"model.bin": hub_file})
    places = ["/mirror/toy/model.bin", "/mirror/model.bin", "/org/toy/resolve/v1/model.bin", "/origin/model.bin"]
    index = {"mirror": 0, "hub": 2, "origin": 3}[held]
    server.bodies = {places[index]: BODY}
    monkeypatch.setenv("ZOO_MIRROR", f"{server.base}/mirror")
    monkeypatch.setenv("HF_ENDPOINT", f"{server.base}/")
    assert (Hub(shipped).fetch("toy") / "model.bin").read_bytes() == BODY
    assert list(dict.fromkeys(path for path, *_ in server.asked)) == places[: index + 1]
    assert Hub(shipped).card("toy").to_json()["files"]["model.bin"] == hub_file


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


def test_files_of_a_model_may_be_in_the_folder_of_another_package(tmp_path) -> None:
    content, other = b"float weights", tmp_path / "weights" / "toy"
    other.mkdir(parents=True)
    file = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest(), "url": "https://zoo.invalid/a.bin"}
    (tmp_path / "models" / "toy").mkdir(parents=True)
    card = {"name": "toy", "entry": "toy", "description": "of a test", "files": {"a.bin": file}}
    (tmp_path / "models" / "toy" / "card.json").write_text(json.dumps(card))
    catalogue = Hub(tmp_path / "models", tmp_path / "weights")
    (other / "a.bin").write_bytes(content)
    assert catalogue.names() == ["toy"]
    assert (catalogue.fetch("toy") / "a.bin").read_bytes() == content
