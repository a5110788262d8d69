"""Bad days, fault by fault: one line, the right exit code, nothing half-written, nothing lost."""

import errno
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import filelock
import numpy as np
import onnx
import pytest
from helpers.model_server import download
from onnx import helper, numpy_helper

import zoo
from pipelines.core import files
from pipelines.core.errors import RequestError, ZooError
from pipelines.engines import stock, timing
from pipelines.graph import io
from pipelines.models import hub, transfer
from pipelines.models.npz import read_npz
from zoo.cli import app as cli
from zoo.training import runs


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder to work in, with a small model and samples beside it."""
    rng = np.random.default_rng(0)
    weight = numpy_helper.from_array(rng.normal(size=(8, 4)).astype(np.float32), "w")
    ends = [helper.make_tensor_value_info(name, 1, ["n", size]) for name, size in (("x", 8), ("y", 4))]
    made = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "one", ends[:1], ends[1:], [weight])
    onnx.save(helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), tmp_path / "m.onnx")
    x = rng.normal(size=(40, 8)).astype(np.float32)
    np.savez(tmp_path / "x.npz", x=x)
    np.savez(tmp_path / "large.npz", x=x.astype(np.float64) * 1e300)
    np.savez(tmp_path / "short.npz", x=x[:, :5])
    np.savez(tmp_path / "text.npz", x=np.array(["a", "b"]))
    np.savez(tmp_path / "nan.npz", x=np.where(np.arange(8) == 3, np.nan, x).astype(np.float32))
    np.savez(tmp_path / "far.npz", x=x, label=np.full(40, 99))
    np.savez(tmp_path / "words.npz", x=x, label=np.array(["cat"] * 40))
    (tmp_path / "file").write_text("")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


def refused(capsys, *arguments, code=2):
    """The one line that the command says; the folder is left as it was."""
    before = {path: path.read_bytes() for path in Path("..").rglob("*") if path.is_file()}
    with pytest.raises(SystemExit) as end:
        cli.call(list(map(str, arguments)))
    out, err = capsys.readouterr()
    assert (end.value.code, out, len(err.splitlines())) == (code, "", 1), err
    assert {path: path.read_bytes() for path in Path("..").rglob("*") if path.is_file()} == before
    return err


# -------------------------------------------------------------------------------------- outputs that cannot be written


OUTPUTS = {
    "quantize": ["quantize", "../m.onnx", "--calibration-data", "../x.npz", "-o"],
    "calibrate": ["calibrate", "../m.onnx", "--data", "../x.npz", "-o"],
    "rewrite": ["rewrite", "../m.onnx", "-o"],
    "plan": ["plan", "../m.onnx", "-o"],
    "tune": ["tune", "../m.onnx", "--evaluation-data", "../x.npz", "-o"],
    "a report": ["quantize", "../m.onnx", "--calibration-data", "../x.npz", "-o", "o.onnx", "--report"],
    "a report of tune": ["tune", "../m.onnx", "--evaluation-data", "../x.npz", "-o", "o.onnx", "--report"],
}


@pytest.mark.parametrize("arguments", OUTPUTS.values(), ids=OUTPUTS.keys())
def test_an_output_below_a_file_is_refused_before_the_work(arguments, here, capsys, monkeypatch):
    monkeypatch.setattr(io, "load", lambda path: pytest.fail("the model was read before its output was looked at"))
    said = refused(capsys, *arguments, "../file/o.html" if "--report" in arguments else "../file/o.onnx")
    assert "cannot write ../file/o" in said and "Not a directory" in said


def test_a_training_is_refused_before_it_begins(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match="cannot write .*Not a directory; choose another output path"):
        runs.require_output(tmp_path / "file" / "model", "checkpoint/state", resume=False)
    runs.require_output(tmp_path / "new" / "model", "checkpoint/state", resume=False)
    assert not (tmp_path / "new").exists()


def test_what_a_teacher_said_is_in_no_training_s_way(tmp_path):
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "distilled.npz").touch()
    runs.require_output(tmp_path, "checkpoint/state.pt", resume=False)
    with pytest.raises(RequestError, match="in use"):
        runs.require_free_run(tmp_path)
    for other in ("checkpoint/epoch-0001.pt", "model.pt"):
        (tmp_path / other).touch()
        with pytest.raises(RequestError, match="in use"):
            runs.require_output(tmp_path, "checkpoint/state.pt", resume=False)
        (tmp_path / other).unlink()


@pytest.mark.parametrize("verb", [["train", "transformer-mt"], ["finetune", "wide-deep-criteo"]])
def test_a_used_folder_is_refused_before_a_framework_is_imported(verb, here, tmp_path, capsys, monkeypatch):
    for family in map(zoo.entry, ("transformer-mt", "wide-deep")):
        for name in ("train", "train_config", "finetune_config"):
            monkeypatch.setattr(type(family), name, lambda *_, **__: pytest.fail("too late"))
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").write_text("")
    (tmp_path / "pairs.tsv").write_text("a\tb\n")
    said = refused(capsys, *verb, "--data", str(tmp_path / "pairs.tsv"), "-o", str(tmp_path / "used"))
    assert "in use, expected a new or empty folder" in said


def test_samples_that_may_not_be_read_are_named_with_the_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(
        Path,
        "open",
        lambda path, *_: (_ for _ in ()).throw(PermissionError(errno.EACCES, "Permission denied", str(path))),
    )
    with pytest.raises(RequestError, match=r"cannot read .*x\.npz: Permission denied"):
        read_npz(tmp_path / "x.npz")


def test_two_processes_do_not_train_into_one_folder(tmp_path):
    code = "import sys, pathlib; from zoo.training.runs import require_output as r; r(pathlib.Path(sys.argv[1]), 'state', False)"
    output = tmp_path / "model"
    for _ in range(2):  # one process may, one training after the other
        runs.require_output(output, "state", resume=False)
    completed = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "work" / ".." / "model"], capture_output=True, text=True
    )
    assert "another training in" in completed.stderr
    completed = subprocess.run([sys.executable, "-c", code, tmp_path / "other"], capture_output=True, text=True)
    assert (completed.returncode, completed.stderr) == (0, "")


def test_a_folder_without_permission_is_named_with_the_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(
        RequestError,
        match=rf"cannot write .*o\.csv: {tmp_path}: (Permission denied|Read-only file system); choose another",
    ):
        files.require_place(tmp_path / "deep" / "o.csv")


def test_a_report_replaces_neither_the_model_nor_what_it_is_made_of(here, capsys):
    quantize = ["quantize", "../m.onnx", "--calibration-data", "../x.npz", "-o"]
    assert "the same path o.json" in refused(capsys, *quantize, "o.json", "--report", "./o.json")
    cli.call(["calibrate", "../m.onnx", "--data", "../x.npz", "-o", "../table.json"])
    capsys.readouterr()
    said = refused(
        capsys, "quantize", "../m.onnx", "--table", "../table.json", "-o", "o.onnx", "--report", "../table.json"
    )
    assert "a report needs samples" in said
    (here / "x.json").write_bytes((here / "x.npz").read_bytes())
    said = refused(capsys, *quantize[:3], "../x.json", "-o", "o.onnx", "--report", "../x.json")
    assert "would replace the input ../x.json" in said


def test_rewrite_does_not_pass_over_an_output(here, capsys):
    assert "-o requires an .onnx file" in refused(capsys, "rewrite", "wide-deep-criteo", "-o", "o.onnx")


# ------------------------------------------------------------------------------------------------ numbers out of range


TUNE = ["tune", "../m.onnx", "--calibration-data", "../x.npz", "-o", "o.onnx", "--evaluation-data"]
NUMBERS = {
    "no batch": ([*TUNE, "../x.npz", "--batch-size", "0"], "batch size is 0"),
    "less than a batch": ([*TUNE, "../x.npz", "--batch-size", "-1"], "batch size is -1"),
    "no threads": ([*TUNE, "../x.npz", "--threads", "0"], "threads must be 1 or more"),
    "no time": ([*TUNE, "../x.npz", "--time-budget", "nan"], "is not a time"),
    "time run backwards": ([*TUNE, "../x.npz", "--time-budget", "-5s"], "is not a time"),
    "time without end": ([*TUNE, "../x.npz", "--time-budget", "inf"], "is not a time"),
    "threads to time": (["plan", "../m.onnx", "--threads", "100000"], "at most 1,024, not 100000"),
    "threads that no machine has": (["run", "wide-deep-criteo", "SAMPLE", "-o", "o.csv", "--threads", "100000"], "not 100000"),
    "a price below nothing": (
        ["benchmark", "mobilenet-v1-cifar10", "--scenario", "offline", "--data", ".", "--price-per-hour", "-1"], "the price is -1.0"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "said"), NUMBERS.values(), ids=NUMBERS.keys())
def test_numbers_out_of_range(arguments, said, here, capsys):
    sample = str(zoo.SHIPPED / "wide-deep-criteo" / "sample.tsv.gz")
    assert said in refused(capsys, *(sample if argument == "SAMPLE" else argument for argument in arguments))


# ------------------------------------------------------------------------------------------------ data that do not fit


DATA = {
    "names": (
        ["plan", "../m.onnx", "--data", "../far.npz"],
        "x float32 [40, 8], label int64 [40]; expected the graph's inputs, x float32 [n, 8]",
    ),
    "text": (
        ["plan", "../m.onnx", "--data", "../text.npz"],
        "x <U1 [2]; expected the graph's inputs, x float32 [n, 8]",
    ),
    "shape": (
        ["plan", "../m.onnx", "--data", "../short.npz"],
        "x float32 [40, 5]; expected the graph's inputs, x float32 [n, 8]",
    ),
    "too large for the graph's dtype": (
        [*TUNE, "../large.npz"],
        "holds x as float64; expected float32, which cannot hold its values",
    ),
}


@pytest.mark.parametrize(("arguments", "said"), DATA.values(), ids=DATA.keys())
def test_samples_that_do_not_fit_the_graph(arguments, said, here, capsys):
    assert said in refused(capsys, *arguments)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("far", "found labels 99 to 99; expected 0 to 3"),
        ("words", "not all of them numbers; expected class numbers"),
        ("nan", "NaN or infinity on the evaluation samples"),
    ],
)
def test_a_search_that_nothing_can_judge_ends_at_once(data, said, here, capsys):
    with pytest.raises(SystemExit) as end:
        cli.call([*TUNE, f"../{data}.npz"])
    err = capsys.readouterr().err
    assert end.value.code == 2 and said in err and len(err.splitlines()) == 1
    assert not Path("o.onnx").exists()


# --------------------------------------------------------------------------------------------- a cache that is damaged


def test_a_cache_where_a_file_is_says_which_setting_to_change(zoo_home):
    zoo_home.write_text("")
    with pytest.raises(RequestError, match="Not a directory; set ZOO_HOME to another folder"):
        hub.Hub(zoo.SHIPPED).fetch("wide-deep-criteo", ["quantization.json"])


@pytest.mark.parametrize("name", ["card.json", "quantization.json"])
def test_a_folder_where_a_cached_file_should_be(name):
    shelf = hub.Hub(zoo.SHIPPED)
    (folder := shelf.folder("wide-deep-criteo") / name).mkdir(parents=True)
    with pytest.raises(
        RequestError, match=f"^cannot read or write {folder}: Is a directory; set ZOO_HOME to another folder$"
    ):
        shelf.fetch("wide-deep-criteo", ["quantization.json"])


def test_a_folder_where_mapped_weights_should_be(here):
    (here / "n.onnx.data").mkdir()
    with pytest.raises(RequestError, match=r"cannot write .*n\.onnx\.data: it is a folder"):
        io.save_mapped(io.load(here / "m.onnx"), here / "n.onnx")
    assert not (here / "n.onnx").exists()


def test_a_full_cache_does_not_end_a_run(here, monkeypatch):
    def full(path, value):
        raise files.DiskFull(path, OSError(errno.ENOSPC, ""))

    monkeypatch.setattr(files, "write_json", full)
    batch = {"x": np.zeros((2, 8), np.float32)}
    assert timing.choose("digest", stock.candidates(here / "m.onnx", 1), batch).engine in stock.available()


# ----------------------------------------------------------------------------------------------------- another process


def test_who_waits_for_another_process_is_told(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(files, "LOCK_NOTICE_SECONDS", 0.05)
    held = threading.Event()

    def hold():
        with filelock.FileLock(tmp_path / ".lock"):
            held.set()
            time.sleep(0.3)

    threading.Thread(target=hold).start()
    held.wait()
    with files.locked(tmp_path / ".lock", "another process builds m"):
        assert [record.message for record in caplog.records] == ["waiting: another process builds m"]
    with files.locked(tmp_path / ".lock", "another process builds m"):
        assert len(caplog.records) == 1


# ---------------------------------------------------------------------------------------------------------- no network


def test_a_server_that_says_nothing_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(transfer, "READ_TIMEOUT", 0.2)
    monkeypatch.setattr(transfer, "RETRY_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        begun = time.monotonic()
        with pytest.raises(ZooError, match=r"timed out \(1 attempts\); run it again to resume"):
            download(f"http://127.0.0.1:{silent.getsockname()[1]}/x", tmp_path / "x", size=3)
    assert time.monotonic() - begun < 5


def test_a_library_that_tries_again_says_nothing(caplog):
    pytest.importorskip("datasets", reason="needs the train extra")
    runs.datasets()
    logging.getLogger("huggingface_hub.utils._http").warning("Retrying in 1s [Retry 1/5].")
    assert not caplog.records


# --------------------------------------------------------------------------------------------------------- wrong files


@pytest.mark.parametrize("verb", ["build", "download", "freeze"])
def test_a_file_where_a_model_is_expected(verb, here, capsys):
    said = refused(capsys, verb, "../m.onnx")
    assert "found the file ../m.onnx, expected a model folder, or one of: " in said and "serve, quantize" in said
    Path("m.plan").touch()
    assert "zoo.open_plan opens a plan" in refused(capsys, verb, "m.plan")


def test_one_array_is_no_archive(here, capsys):
    np.save(here / "x.npy", np.zeros((3, 8), np.float32))
    quantize = ["quantize", "../m.onnx", "-o", "o.onnx", "--calibration-data"]
    assert "cannot read ../x.npy as .npz: it is no archive of numpy.savez; it must hold" in refused(
        capsys, *quantize, "../x.npy"
    )
    assert "cannot read nothing.npz: No such file or directory" in refused(capsys, *quantize, "nothing.npz")


# -------------------------------------------------------------------------------------------------------------- Ctrl-C


@pytest.mark.parametrize(
    ("left", "begun"), [("", False), ("distilled.npz", False), ("state.npz", True), ("run.json", True)]
)
def test_only_a_training_with_a_checkpoint_is_said_to_go_on(left, begun, tmp_path, capsys, monkeypatch):
    def interrupted(*_, **__):
        (tmp_path / "m" / "checkpoint").mkdir(parents=True)
        if left:
            (tmp_path / "m" / "checkpoint" / left).touch()
        raise KeyboardInterrupt

    monkeypatch.setattr("zoo.api.train", interrupted)
    with pytest.raises(SystemExit) as end:
        cli.call(["train", "wide-deep", "--data", "x", "-o", str(tmp_path / "m")])
    said = capsys.readouterr().err.strip()  # the ^C of a terminal has no end of line
    assert (
        end.value.code == 130
        and said.startswith("zoo: interrupted")
        and ("--resume" in said) == begun
        and len(said.splitlines()) == 1
    )


def test_an_interrupt_while_the_command_is_imported_is_one_line(tmp_path):
    (tmp_path / "click.py").write_text("raise KeyboardInterrupt\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(zoo.__file__).parent.parent}"}
    done = subprocess.run(
        [sys.executable, "-m", "zoo", "list"], capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "zoo: interrupted\n")


def test_a_damaged_report_of_quantization_says_what_mends_it(capsys, zoo_home):
    cli.call(["download", "wide-deep-criteo"])
    (hub.Hub(zoo.SHIPPED).folder("wide-deep-criteo") / "quantization.json").write_text("{")
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        cli.call(["info", "wide-deep-criteo"])
    assert end.value.code == 2 and "rebuild it with: zoo build wide-deep-criteo --force" in capsys.readouterr().err


def test_no_engine_reports_to_its_maker(here):
    """Both keep an id and a queue in the home directory where they do."""
    home = here / "home"
    home.mkdir()
    code = "import sys; from pathlib import Path; from pipelines.engines.catalog import load; [load(Path(sys.argv[1]), e) for e in sys.argv[2:]]"
    chosen = {key: value for key, value in os.environ.items() if key != "ORT_DISABLE_TELEMETRY"} | {"HOME": str(home)}
    engines = [engine for engine in ("onnxruntime", "openvino") if engine in stock.available()]
    subprocess.run([sys.executable, "-c", code, here / "m.onnx", *engines], env=chosen, check=True)
    assert not [path for path in home.rglob("*") if path.is_file()]


def test_a_plan_needs_an_engine_that_computes_the_model(here, capsys):
    assert "none of the engines asked for" in refused(capsys, "plan", "../m.onnx", "--engine", "native")


def test_the_bare_command_prints_its_help(capsys):
    with pytest.raises(SystemExit) as end:
        cli.call([])
    out, err = capsys.readouterr()
    assert end.value.code == 2 and "Use models:\n  list" in out + err
