"""Models of the hub: pushed, run at once, imported; and what its refusals become. The hub is a server of the test."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from helpers import color_networks as colors
from helpers.fake_hub import TOKEN, fake_hub

import zoo
from pipelines.core.errors import RequestError, ZooError
from zoo.huggingface.repository import Repository
from zoo.serving.workers import model_loader

pytest.importorskip("huggingface_hub", reason="needs the hub extra")

ID, ADDRESS = "lab/colors", "hf://lab/colors"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A built model folder with a report, and the images that calibrated it."""
    path, photos = tmp_path_factory.mktemp("model") / "colors", tmp_path_factory.mktemp("photos")
    for seed, name in enumerate(colors.NAMES):
        (photos / name).mkdir()
        colors.picture(name, seed).save(photos / name / "0.png")
    colors.make_folder(path, colors.NAMES, licence="MIT (of a test)", classes=colors.NAMES)
    zoo.calibrate(path, photos)
    zoo.build(path)
    (path / "reports").mkdir()
    (path / "reports" / "quality.json").write_text(json.dumps(zoo.evaluate(path, photos)))
    (path / "checkpoint").mkdir()
    (path / "checkpoint" / "state").write_text("of an interrupted training")
    return SimpleNamespace(path=path, photo=photos / "red" / "0.png")


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with fake_hub(monkeypatch, tmp_path / "hub-cache") as fake:
        yield fake


@pytest.fixture
def pushed(hub, folder):
    hub.add(ID)
    zoo.push(folder.path, ADDRESS)
    return hub


def test_a_pushed_model_runs_at_once_and_nothing_is_rebuilt(hub, folder, tmp_path):
    pushed = zoo.push(folder.path, ADDRESS, create=True, private=True)
    repo = hub.repos[ID]
    files = repo.commits[pushed["commit"]]
    assert repo.private and repo.refs["main"] == pushed["commit"] and pushed["url"] == f"{hub.url}/{ID}"
    assert (
        {"README.md", "card.json", "int8.onnx", "reports/quality.json"}
        <= files.keys()
        == {*pushed["files"], ".gitattributes"}
    )
    assert not any("checkpoint" in name or "lock" in name for name in files)

    got, again = zoo.load(ADDRESS), zoo.load(f"{ADDRESS}@{pushed['commit']}")
    assert got.path == again.path and got.card.name == "colors" and got.entry.name == "mobilenet-v1"
    assert set(zoo.build(ADDRESS)["stages"].values()) <= {"given", "kept"}
    assert not (got.path / "README.md").exists()
    ours, theirs = tmp_path / "ours.csv", tmp_path / "theirs.csv"
    zoo.run(folder.path, folder.photo, ours)
    zoo.run(ADDRESS, folder.photo, theirs)
    assert theirs.read_text() == ours.read_text() and zoo.info(ADDRESS)["name"] == "colors"


def test_a_server_names_a_model_of_the_hub_by_its_card(pushed):
    served, _ = model_loader.parse_options([ADDRESS, f"{ADDRESS}@fp32"])
    assert [model.name for model in served] == ["colors", "colors@fp32"]
    assert {model.model for model in served} == {str(zoo.load(ADDRESS).path)}


def test_files_of_the_cache_do_not_change_with_the_model(pushed, folder):
    path, blobs = zoo.load(ADDRESS).path, Repository(ID).snapshot()
    zoo.calibrate(path, folder.photo.parent)
    zoo.build(path)
    for name in ("int8.onnx", "calibration.json", "build.json"):
        assert (blobs / name).read_bytes() == pushed.repos[ID].at("main")[1][name] != (path / name).read_bytes()


def test_a_second_push_replaces_what_the_model_no_longer_has(pushed, folder, tmp_path):
    repo = pushed.repos[ID]
    repo.commit({**repo.at("main")[1], "ranges.json": b"{}", "picture.png": b"of its owner"})
    old = zoo.load(ADDRESS).path
    zoo.push(folder.path, ADDRESS)
    files = repo.at("main")[1]
    assert "ranges.json" not in files and files["picture.png"] == b"of its owner"
    new = zoo.load(ADDRESS).path
    assert new != old and (old / "ranges.json").exists() and not (new / "ranges.json").exists()


def test_the_model_card_says_what_the_reports_say(pushed):
    import yaml

    text = pushed.repos[ID].at("main")[1]["README.md"].decode()
    header, body = text.removeprefix("---\n").split("\n---\n", 1)
    about = yaml.safe_load(header)
    assert about["license"] == "mit" and about["pipeline_tag"] == "image-classification"
    assert about["library_name"] == "int8-zoo" and {"int8", "onnx", "mobilenet-v1"} <= {*about["tags"]}
    results = about["model-index"][0]["results"]
    metrics = {metric["name"]: metric for result in results for metric in result["metrics"]}
    assert metrics["top1 (int8)"]["type"] == "accuracy" and metrics["top1 (int8)"]["value"] == 1.0
    assert f"zoo run {ADDRESS}" in body and "| input" in body and "| output" in body
    assert "## Quality" in body and "top1" in body and "MIT (of a test)" in body


def test_a_readme_of_the_folder_is_the_model_card(hub, folder, tmp_path):
    hub.add(ID)
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in folder.path.glob("*.*"):
        (copy / path.name).write_bytes(path.read_bytes())
    (copy / "README.md").write_text("own words")
    zoo.push(copy, ADDRESS)
    assert hub.repos[ID].at("main")[1]["README.md"] == b"own words"


def test_a_download_that_broke_off_goes_on(pushed):
    pushed.cut.add("int8.onnx")
    assert (zoo.load(ADDRESS).path / "int8.onnx").read_bytes() == pushed.repos[ID].at("main")[1]["int8.onnx"]
    assert pushed.asked["range"] == 1


def test_the_cache_is_enough_offline(pushed, monkeypatch):
    path = zoo.load(ADDRESS).path
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    asked = sum(pushed.asked.values())
    assert zoo.load(ADDRESS).path == path and sum(pushed.asked.values()) == asked
    with pytest.raises(RequestError, match=r"cannot download hf://lab/other: ZOO_OFFLINE .* forbids the network"):
        zoo.load("hf://lab/other")
    with pytest.raises(RequestError, match="zoo push needs the network"):
        zoo.push(path, ADDRESS)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("hf://colors", "expected hf://ORG/NAME"),
        ("hf://lab/colors@", "expected .* or hf://ORG/NAME@REVISION"),
        ("hf://lab/../colors", "expected hf://ORG/NAME"),
        ("hf://lab/nothing", "found no repository lab/nothing at .*HF_TOKEN"),
        ("hf://lab/colors@v9", "found no revision v9 of lab/colors"),
        ("hf://lab/gated", "is gated; accept its terms at .*/lab/gated"),
        ("hf://lab/empty", "found no model in .*; expected one of: .*marian"),
    ],
)
def test_wrong_addresses_are_one_line(hub, address, message):
    hub.add(ID)
    hub.add("lab/gated", gated=True)
    hub.add("lab/empty")
    with pytest.raises(RequestError, match=message) as error:
        zoo.load(address)
    assert "\n" not in str(error.value)


def test_a_private_repository_asks_for_a_token(hub, monkeypatch):
    hub.add(ID, private=True)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(RequestError, match=f"{ID} at .*private; log in"):
        zoo.load(ADDRESS)


@pytest.mark.parametrize(("status", "message"), [(429, "its rate limit; run it again later"), (503, "answered 503")])
def test_a_hub_that_fails_is_no_fault_of_the_request(hub, folder, status, message):
    hub.add(ID)
    hub.statuses["/api/models/"] = status
    for work in (lambda: zoo.load(ADDRESS), lambda: zoo.push(folder.path, ADDRESS)):
        with pytest.raises(ZooError, match=message) as error:
            work()
        assert error.value.exit_code == 1 and "\n" not in str(error.value)


def test_no_hub_is_one_line(hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ZooError, match=r"cannot download hf://lab/colors at http://127.0.0.1:9: ") as error:
        zoo.load(ADDRESS)
    assert error.value.exit_code == 1


def test_wrong_pushes_are_refused_before_anything_is_sent(hub, folder, tmp_path):
    for arguments, options, message in (
        ((folder.path, "lab/colors"), {}, "expected hf://ORG/NAME"),
        ((folder.path, ADDRESS), {"private": True}, "add --create"),
        ((tmp_path / "nothing", ADDRESS), {}, "no model"),
        (("hf://a/b", ADDRESS), {}, "expected a folder"),
    ):
        with pytest.raises(RequestError, match=message):
            zoo.push(*arguments, **options)
    assert not hub.asked
    with pytest.raises(RequestError, match=r"found no repository lab/colors .*--create"):
        zoo.push(folder.path, ADDRESS)


def test_a_refused_upload_leaves_the_repository_as_it_was(hub, folder):
    repo = hub.add(ID)
    before = dict(repo.refs)
    hub.statuses["/commit/"] = 403
    with pytest.raises(RequestError, match="cannot upload .* answered 403; check the token"):
        zoo.push(folder.path, ADDRESS)
    assert repo.refs == before


def test_signatures_hold_for_all_files_of_a_repository(hub, folder, tmp_path):
    pytest.importorskip("model_signing", reason="needs the sign extra")
    hub.add(ID)
    keys = [tmp_path / "key.pem", tmp_path / "public.pem", tmp_path / "other.pem", tmp_path / "other-public.pem"]
    for private, public in (keys[:2], keys[2:]):
        key_pair(private, public)
    zoo.push(folder.path, ADDRESS, signature=keys[0])
    assert {"int8.onnx", "card.json", "README.md"} <= {*zoo.verify(ADDRESS, keys[1])["files"]}
    with pytest.raises(ZooError, match=r"was signed with another key than that of .*other-public.pem"):
        zoo.verify(ADDRESS, keys[3])
    zoo.run(ADDRESS, folder.photo, tmp_path / "results.csv")  # leaves locks in the folder
    assert zoo.verify(zoo.load(ADDRESS).path, keys[1])["files"] == zoo.verify(ADDRESS, keys[1])["files"]
    repo = hub.repos[ID]
    repo.commit({**repo.at("main")[1], "int8.onnx": b"another"})
    with pytest.raises(ZooError, match=r"the signature does not match .*int8.onnx\W+; download the model again"):
        zoo.verify(ADDRESS, keys[1])
    with pytest.raises(RequestError, match="found no model.sig"):
        zoo.verify(folder.path, keys[1])
    with pytest.raises(RequestError, match="cannot sign with"):
        zoo.push(folder.path, ADDRESS, signature=folder.photo)


def key_pair(private, public):
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    private.write_bytes(key.private_bytes(serialization.Encoding.PEM, *form))
    public.write_bytes(
        key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )


def test_the_command_reads_the_variables_of_huggingface_hub(pushed, tmp_path):
    variables = {"HF_ENDPOINT": pushed.url, "HF_HOME": str(tmp_path / "hf"), "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "zoo", "info", ADDRESS],
        capture_output=True,
        text=True,
        env={**os.environ, **variables},
    )
    assert done.returncode == 0 and "mobilenet-v1" in done.stdout and not done.stderr, done.stderr
    assert (tmp_path / "hf" / "hub" / "models--lab--colors").is_dir()
