"""A family outside the tree, `tests/zoo/toy_family/toy_sums`, walks CONTRIBUTING's "Add a model"."""

import importlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import zoo
from pipelines.core import files
from pipelines.core.errors import RequestError
from pipelines.models.hub import CARD
from zoo.cli import app as cli

ROOT = Path(__file__).resolve().parents[2]
TOY = Path(__file__).parent / "toy_family" / "toy_sums"
POINTS = "[int8_zoo.families]\ntoy-sums = toy_sums:FAMILY\n[int8_zoo.models]\ntoy-sums = toy_sums.weights\n"
NAME = "toy-sums-demo"


def install(folder: Path, points: str, package: Path | None = None) -> None:
    """What pip leaves of a package: its files, and its metadata with the entry points."""
    if package is not None:
        shutil.copytree(package, folder / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    metadata = folder / "toy-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(points)


@pytest.fixture
def site(tmp_path, monkeypatch):
    """The folder of installed packages, with the toy family in it."""
    install(tmp_path / "site", POINTS, TOY)
    monkeypatch.syspath_prepend(tmp_path / "site")
    yield tmp_path / "site"
    for name in [name for name in sys.modules if name.split(".")[0] == "toy_sums"]:
        del sys.modules[name]


@pytest.fixture
def call(capsys):
    """Run the command; (stdout, stderr) of what ends well."""

    def run(*arguments: object) -> tuple[str, str]:
        capsys.readouterr()
        cli.call(list(map(str, arguments)))
        return capsys.readouterr()

    return run


def write_rows(path: Path, count: int, seed: int) -> Path:
    numbers = np.random.default_rng(seed).normal(size=(count, 8)).round(3)
    lines = ["\t".join(map(str, [np.abs(row).sum().round(4), *row])) for row in numbers]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_family_of_another_package_does_all_that_one_of_the_tree_does(site, call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows, held_out = write_rows(tmp_path / "rows.tsv", 2000, 0), write_rows(tmp_path / "held_out.tsv", 500, 1)
    assert [*zoo.ENTRIES] == ["toy-sums", *zoo.BUILT_IN] and zoo.entry("toy-sums").task == "sums"

    # train, build, evaluate
    call("train", "toy-sums", "--data", rows, "-o", "model", "--set", "hidden=256")
    assert "made" in call("build", "model")[0]
    report = json.loads(call("evaluate", "model", "--data", held_out, "--engine", "onnxruntime", "--json")[0])
    assert report["samples"] == 500 and report["metrics"]["fp32"]["r2"] > 0.9
    assert report["difference"]["r2"] == report["metrics"]["int8"]["r2"] - report["metrics"]["fp32"]["r2"] != 0
    assert "r2" in call("evaluate", "model", "--data", held_out)[0]

    # run: an option and a summary line of its own
    assert re.search(r"--digits INTEGER\s+Sums: places after the point. \[default: 2\]", call("run", "--help")[0])
    _, err = call("run", "model", held_out, "-o", "sums.csv", "--digits", 1, "--engine", "onnxruntime")
    assert re.fullmatch(r"500 sums, the largest \d+\.\d, int8 in onnxruntime\n", err)
    lines = (tmp_path / "sums.csv").read_text().splitlines()
    assert len(lines) == 501 and all(re.fullmatch(r"-?\d+(\.\d)?", line) for line in lines[1:])
    with pytest.raises(RequestError, match="model has no option beam, expected digits"):
        zoo.run("model", str(held_out), "sums.csv", beam=2)
    with pytest.raises(RequestError, match="wide-deep-criteo has no option digits"):
        zoo.run("wide-deep-criteo", str(held_out), "sums.csv", digits=2)

    # benchmark, quantize, tune, plan
    options = ["--batch-size", 16, "--rounds", 2, "--json"]
    timed = json.loads(call("benchmark", "model", "--data", held_out, *options)[0])["results"]
    assert {(timing["engine"], timing["precision"]) for timing in timed} >= {
        ("onnxruntime", "fp32"),
        ("onnxruntime", "int8"),
    }
    operators = json.loads(call("quantize", "model", "-o", "other.onnx", "--keep-float", "sum", "--json")[0])
    assert {operator["name"]: operator["precision"] for operator in operators["operators"]}["sum"] == "float"
    options = ["--engine", "onnxruntime", "--max-drop", "50%", "--time-budget", "5s", "--json"]
    tuned = json.loads(call("tune", "model", "--evaluation-data", held_out, "-o", "tuned.onnx", *options)[0])
    assert tuned["metric"] == "r2" and tuned["met"]
    call("plan", "model", "--batch-size", 16, "--engine", "onnxruntime")
    assert (tmp_path / "model" / "model.plan").is_file()

    # published in the package: found, fetched and built like any other
    card = {"name": NAME, "entry": "toy-sums", "description": "Sums for the test", "files": {}}
    files.write_json(site / "toy_sums" / "weights" / NAME / CARD, card)
    subprocess.run(
        [sys.executable, ROOT / "scripts" / "ship_model.py", "model", NAME, site / "toy_sums" / "weights"],
        env={"PYTHONPATH": f"{site}:{ROOT}", "ZOO_HOME": str(tmp_path / "other home")}, check=True, capture_output=True,
    )  # fmt: skip
    assert NAME in call("list")[0] and NAME in zoo.names()
    assert Path(call("download", NAME)[0].strip()) == zoo.hub().folder(NAME)
    assert zoo.pipeline(NAME, engine="onnxruntime")(["1\t-1\t1\t-1\t1\t-1\t1\t-1"])[0] == pytest.approx(8, rel=0.3)
    assert zoo.entry_of(NAME).report_sections().sections(NAME) == f"`{NAME}`: Sums for the test"


def test_no_file_of_the_tree_knows_the_family_and_contributing_names_its_files() -> None:
    sources = [path for part in ("zoo", "pipelines", "scripts") for path in (ROOT / part).rglob("*.py")]
    assert sources and not [path for path in sources if re.search(r"toy.sums", path.read_text())]
    text = (ROOT / "CONTRIBUTING.md").read_text()
    section = text[text.index("## Add a model") :].split("\n## ")[0]
    for path in TOY.glob("*.py"):
        assert f"`{path.name}`" in section, path.name
    assert "int8_zoo.families" in section and "int8_zoo.models" in section


BROKEN = {
    "no module": ("nothing_of_that_name:ENTRY", "No module named 'nothing_of_that_name'"),
    "no attribute": ("json:ENTRY", "has no attribute 'ENTRY'"),
    "no entry": ("json:dumps", "it is no Family of the name broken"),
    "no attribute named": ("json", "not enough values to unpack"),
    "another name": ("zoo.recommenders.models.wide_deep:WIDE_DEEP", "it is no Family of the name broken"),
}


@pytest.mark.parametrize(("value", "why"), BROKEN.values(), ids=BROKEN)
def test_a_broken_family_is_named_when_it_is_asked_for_and_not_before(tmp_path, monkeypatch, call, value, why):
    install(tmp_path / "site", f"[int8_zoo.families]\nbroken = {value}\nwide-deep = nothing:ENTRY\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    with pytest.raises(
        RequestError, match=f"the family broken cannot be opened as {value}: .*{why}.*; repair"
    ) as error:
        zoo.entry("broken")
    assert "\n" not in str(error.value)
    assert [*zoo.entries()] == [*zoo.BUILT_IN] and zoo.entry("wide-deep").checkpoint  # built-in families win
    assert "--beam" in call("run", "--help")[0]


def test_models_of_a_package_that_is_gone_are_left_out_and_named(tmp_path, monkeypatch, caplog):
    before = zoo.names()
    install(tmp_path / "site", "[int8_zoo.models]\ngone = nothing_of_that_name.weights\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert zoo.names() == before
    assert "the models gone are left out: there is no package nothing_of_that_name.weights" in caplog.text


def test_opening_a_family_loads_none_of_its_parts(site):
    importlib.invalidate_caches()
    assert zoo.entry("toy-sums").name == "toy-sums"
    assert not [name for name in sys.modules if name.startswith("toy_sums.")]
