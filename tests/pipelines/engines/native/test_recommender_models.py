"""The native engine on the shipped recommender through the commands, and without native kernels."""

import gzip
import itertools
import json
import multiprocessing
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest
from helpers.clicks_folded import ROWS, feeds, needs_kernels, one_line
from helpers.rewriting import EXACT
from helpers.tiers import one_in

import zoo
from pipelines.analysis.benchmark import Configuration, benchmark
from pipelines.core import machine
from pipelines.core.errors import RequestError
from pipelines.core.files import mapped
from pipelines.engines.catalog import load
from pipelines.engines.native.forms import Forms
from pipelines.graph import io
from pipelines.kernels import extension
from pipelines.kernels.recommenders.from_graph import click_program
from pipelines.kernels.recommenders.steps import Mixed
from pipelines.models.pipeline import choose_engine
from pipelines.models.record import NATIVE
from pipelines.models.stages import build

NAME = "wide-deep-criteo"


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    """The folder of the shipped model with its native.onnx."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZOO_HOME", str(tmp_path_factory.mktemp("home")))
        model = zoo.load(NAME)
        model.ensure(NATIVE)
    return model


@pytest.fixture(scope="module")
def rows(shipped, tmp_path_factory):
    """A file of 600 rows."""
    path = tmp_path_factory.mktemp("rows") / "rows.tsv"
    with gzip.open(shipped.path / "sample.tsv.gz") as file:
        path.write_bytes(b"".join(itertools.islice(file, 600)))
    return path


@needs_kernels
@pytest.mark.parametrize(
    ("name", "damage"),
    one_in(
        3,
        [
            (f"{NATIVE}.data", lambda content: content[:-1] + bytes([content[-1] ^ 1])),
            (f"{NATIVE}.data", None),
            (NATIVE, lambda content: content[:-1]),
        ],
    ),
)
def test_a_damaged_build_is_made_anew(shipped, tmp_path, name, damage):
    path = tmp_path / "model"
    shutil.copytree(shipped.path, path)
    mine = replace(shipped, path=path)
    made = {name: (path / name).read_bytes() for name in (NATIVE, f"{NATIVE}.data")}
    assert build(mine, until=NATIVE)[NATIVE] == "kept"
    if damage is None:
        (path / name).unlink()
    else:
        (path / name).write_bytes(damage(made[name]))
    mine.ensure(NATIVE)
    assert {name: (path / name).read_bytes() for name in made} == made


@needs_kernels
def test_info_names_the_form_that_runs(shipped):
    info = zoo.info(shipped.path)["native"]
    assert info["chosen"] in [form["form"] for form in info["forms"]]


@needs_kernels
def test_the_card_of_a_folder_names_the_form_chosen_at_the_build(shipped, tmp_path):
    path = tmp_path / "model"
    shutil.copytree(shipped.path, path, ignore=shutil.ignore_patterns("native*"))
    before = zoo.load(path).card
    zoo.load(path).ensure(NATIVE)
    after = zoo.load(path).card.to_json()
    assert after.pop("form") == {"name": Forms(path / NATIVE).chosen, "cpu": machine.environment()["cpu"]}
    assert after == before.to_json()
    assert "form" not in shipped.card.details


def _ensure(path, gate):
    gate.wait()
    zoo.load(path).ensure(NATIVE)


@pytest.mark.slow
def test_two_processes_may_build_at_once(shipped, tmp_path):
    path = tmp_path / "model"
    shutil.copytree(shipped.path, path, ignore=shutil.ignore_patterns("native*"))
    context = multiprocessing.get_context("spawn")
    gate = context.Barrier(2)
    both = [context.Process(target=_ensure, args=(path, gate)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(120)
    assert [child.exitcode for child in both] == [0, 0]
    assert (path / NATIVE).read_bytes() == (shipped.path / NATIVE).read_bytes()
    assert mapped(path / NATIVE).read_bytes() == mapped(shipped.path / NATIVE).read_bytes()
    assert not list(path.glob("*tmp*"))


@needs_kernels
def test_the_shipped_model_scores_alike_in_all_engines(shipped, rows):
    scores = {}
    for name in ("native", *EXACT):
        opened = zoo.pipeline(shipped.path, engine=name)
        scores[name] = opened.predict(opened.preprocess(rows))["probability"]
        assert opened.engine == name
    for name in EXACT:
        assert np.abs(scores["native"] - scores[name]).max() < 0.02


@needs_kernels
def test_evaluate_and_run_take_the_engine(shipped, rows, tmp_path):
    report = zoo.evaluate(shipped.path, str(rows), engine="native")
    assert report["environment"]["engines"]["int8"] == "native" != report["environment"]["engines"]["fp32"]
    assert report["samples"] == 600 and report["difference"]["max_probability"] < 0.05
    done = zoo.run(shipped.path, str(rows), tmp_path / "scores.csv", engine="native")
    assert (done["engine"], done["rows"]) == ("native", 600)


@needs_kernels
def test_a_finished_model_runs_without_what_reads_graphs(shipped, rows, tmp_path):
    code = "import sys, zoo; zoo.run(*sys.argv[1:], engine='native'); print(*sys.modules)"
    for _ in range(2):  # the first time the graph is read
        ran = [sys.executable, "-c", code, shipped.path, rows, tmp_path / "scores.csv"]
        done = subprocess.run(ran, capture_output=True, text=True, check=True)
    assert {"onnx", "onnx_ir", "sympy", "onnxruntime", "openvino", "requests"} & set(done.stdout.split()) == set()


@needs_kernels
def test_weights_beyond_memory_run_in_the_native_kernels_alone(shipped, rows, monkeypatch):
    batch = zoo.pipeline(shipped.path).preprocess(rows)
    assert len(choose_engine(shipped, "int8", batch, 1, fresh=True).milliseconds) > 1
    monkeypatch.setattr(machine, "table_memory", lambda: 1 << 16)
    choice = choose_engine(shipped, "int8", batch, 1, fresh=True)
    assert (choice.engine, choice.milliseconds) == ("native", {})


@needs_kernels
def test_the_engine_is_found_by_the_process_that_measures_memory(folder, monkeypatch):
    monkeypatch.setenv("ZOO_HOME", str(folder / "home"))
    results = benchmark([Configuration("native", "int8", folder / NATIVE)], feeds(16), rounds=2)
    assert results[0]["memory_mb"] > 10 and results[0]["samples_per_second"] > 0


@pytest.mark.parametrize("verb", ["pipeline", "run", "benchmark"])
def test_float_is_refused(shipped, rows, tmp_path, verb):
    calls = {
        "pipeline": lambda: zoo.pipeline(shipped.path, "fp32", "native"),
        "run": lambda: zoo.run(shipped.path, str(rows), tmp_path / "scores.csv", precision="fp32", engine="native"),
        "benchmark": lambda: zoo.benchmark(shipped.path, precisions=["fp32"], engines=["native"]),
    }
    with pytest.raises(RequestError) as error:
        calls[verb]()
    one_line(error, "native computes in int8, not fp32")


# --- without kernels


@pytest.fixture
def bare(monkeypatch):
    """An installation without the extension."""
    monkeypatch.setattr(extension, "_built", lambda: None)


def test_without_kernels_auto_takes_a_stock_engine(bare, shipped, rows, tmp_path):
    report = zoo.run(shipped.path, str(rows), tmp_path / "scores.csv")
    assert report["engine"] in ("onnxruntime", "openvino") and report["rows"] == 600
    opened = zoo.pipeline(shipped.path)
    plan = choose_engine(shipped, "int8", opened.preprocess(rows), 1, fresh=True)
    timed = {name.removesuffix("+fp32") for name in plan.milliseconds}  # of the float file, those that may be faster
    assert timed == (set(EXACT) if len(EXACT) > 1 else set())  # one is not timed


@needs_kernels
def test_with_kernels_auto_times_them(shipped, rows):
    plan = choose_engine(shipped, "int8", zoo.pipeline(shipped.path).preprocess(rows), 1, fresh=True)
    assert {name.removesuffix("+fp32") for name in plan.milliseconds} == {*EXACT, "native"}
    assert "native+fp32" not in plan.milliseconds
    plan = choose_engine(shipped, "fp32", zoo.pipeline(shipped.path).preprocess(rows), 1, fresh=True)
    assert set(plan.milliseconds) == {"onnxruntime", "openvino"}


def test_without_kernels_the_engine_says_what_is_missing(bare, shipped, rows, tmp_path):
    for call in (
        lambda: zoo.pipeline(shipped.path, engine="native"),
        lambda: zoo.run(shipped.path, str(rows), tmp_path / "scores.csv", engine="native"),
        lambda: zoo.evaluate(shipped.path, str(rows), engine="native"),
        lambda: zoo.benchmark(shipped.path, engines=["native"], rounds=1),
        lambda: load(shipped.path / NATIVE, "native"),
    ):
        with pytest.raises(RequestError) as error:
            call()
        one_line(error, "native kernels are not available", "install a C++17 compiler")


def command(*arguments, without=False):
    """(exit code, stdout, stderr) of the command, in a process with kernels or without."""
    hide = "import sys; sys.modules['pipelines.kernels._native'] = None; " if without else ""
    code = f"{hide}from zoo.cli.app import main; main()"
    done = subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def test_the_command_says_what_is_missing(shipped):
    code, out, err = command("benchmark", shipped.path, "--engine", "native", "--rounds", "1", without=True)
    *warned, err = err.splitlines()
    assert (code, out, len(warned)) == (2, "", 0 if machine.has_vnni() else 1)
    assert err.startswith("zoo: the native kernels are not available: ") and "install a C++17 compiler" in err


@pytest.mark.parametrize("without", [True, pytest.param(False, marks=needs_kernels)])
def test_the_doctor_knows_the_kernels(without):
    code, out, _ = command("doctor", "--json", without=without)
    said = json.loads(out)["kernels"]
    assert code == 0
    assert ("install a C++17 compiler" in said) if without else (said == f"ok: {', '.join(extension.isas())}")


def test_a_model_that_has_no_program_says_why(shipped, tmp_path, monkeypatch):
    def refuse(*_):
        raise RequestError("the recipe keeps tables float")

    path = tmp_path / "model"
    shutil.copytree(shipped.path, path, ignore=shutil.ignore_patterns("native*"))
    monkeypatch.setattr("zoo.recommenders.lowering.lower.Compiler.compile", refuse)
    with pytest.raises(RequestError) as error:
        zoo.pipeline(path, engine="native")
    one_line(error, "does not run in the native kernels", "the recipe keeps tables float", "it runs in onnxruntime")
    assert not (path / NATIVE).exists()


def test_the_operator_survives_saving(folder):
    loaded = io.load_mapped(folder / NATIVE)
    layer = next(step for step in click_program(loaded.graph[0]).steps if isinstance(step, Mixed))
    assert layer.rows.tolist() == list(ROWS) and layer.table.shape == (sum(ROWS), 64)
    assert not layer.table.flags.writeable
    assert ir.to_proto(loaded).opset_import[-1].domain == "int8.zoo"
