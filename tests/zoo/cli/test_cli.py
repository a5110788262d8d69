"""The face: exit codes, one line per error, one JSON document on stdout."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import click
import numpy as np
import onnx
import pytest
from helpers.rewriting import model
from onnx import helper, numpy_helper

import zoo
from pipelines.core import machine
from pipelines.graph import io
from pipelines.kernels import extension
from zoo.cli import app as cli
from zoo.cli.inference import Run
from zoo.cli.options import Threads

ROOT = Path(__file__).resolve().parents[3]


def command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "zoo.cli.app", *map(str, arguments)],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )


def call(captured: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of the command, run in this process."""
    try:
        cli.call(list(map(str, arguments)))
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    out, err = captured.readouterr()
    return code, out, err


@pytest.fixture
def mlp(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    weights = [rng.normal(size=shape).astype(np.float32) for shape in ((8, 16), (16, 4))]
    nodes = [
        helper.make_node("MatMul", ["x", "w0"], ["h"], name="first"),
        helper.make_node("Relu", ["h"], ["r"], name="relu"),
        helper.make_node("MatMul", ["r", "w1"], ["y"], name="second"),
    ]
    inputs = [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["batch", 8])]
    outputs = [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["batch", 4])]
    made = helper.make_graph(
        nodes, "mlp", inputs, outputs, [numpy_helper.from_array(w, f"w{i}") for i, w in enumerate(weights)]
    )
    path = tmp_path / "mlp.onnx"
    onnx.save(helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    np.savez(tmp_path / "calibration.npz", x=rng.normal(size=(64, 8)).astype(np.float32))
    return path


@pytest.mark.parametrize("verb", ["schema LOG -o schema.json --label y", "doctor --nothing"])
def test_a_closed_stderr_changes_neither_results_nor_the_exit_code(tmp_path: Path, verb: str) -> None:
    (tmp_path / "log.csv").write_text("y,x\n" + "0,a\n1,b\n1,a\n" * 9)
    line = f"exec {sys.executable} -m zoo {verb.replace('LOG', 'log.csv')} 2>&-"
    done = subprocess.run(["sh", "-c", line], cwd=tmp_path, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
    assert done.returncode == (0 if "LOG" in verb else 2)
    assert (tmp_path / "schema.json").is_file() == ("LOG" in verb)


def test_help_names_every_verb() -> None:
    done = command("--help")
    assert done.returncode == 0
    assert all(verb in done.stdout for verb in ("list", *zoo.VERBS))
    for verb in ("list", *zoo.VERBS):
        assert verb in cli.cli.commands
    assert all(callable(getattr(zoo, verb)) for verb in zoo.VERBS)


def test_the_help_of_run_has_the_text_of_several_tasks_once() -> None:
    helps = {option.name: option.help or "" for option in Run._of_families() if isinstance(option, click.Option)}
    assert helps["max_length"].count("Maximum number of tokens") == 1
    assert helps["max_length"].startswith("Late interaction, ") and ", embedding" in helps["max_length"]
    assert helps["keep"].startswith("Recommenders: ")
    assert not any("[default: ]" in text for text in helps.values())


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"config.json": "{}"}, "needs torch, which is not installed; run: pip install 'int8-zoo[import]'"),
        ({"notes.txt": ""}, "found no model in"),
    ],
)
def test_an_import_without_torch_says_so_of_models_alone(tmp_path: Path, files: dict[str, str], said: str) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    code = "import sys; sys.modules['torch'] = None; from zoo.cli import app as cli; cli.call(sys.argv[1:])"
    words = [sys.executable, "-c", code, "import", str(folder), "-o", str(tmp_path / "ours")]
    done = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(("file", "said"), [("card.json", "for int8 run: zoo build"), ("x", "interrupted\n")])
def test_an_interrupted_import_says_how_to_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], file: str, said: str
) -> None:
    def interrupted(source: str, output: str, **options: object) -> None:
        Path(output, file).write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr("zoo.api.import_model", interrupted)
    code, out, err = call(capsys, "import", "theirs", "-o", tmp_path)
    assert code == 130 and not out and said in err and err.count("\n") == 1


WRONG = {
    "no verb of that name": ["rum"],
    "missing argument": ["run"],
    "unknown option": ["run", "wide-deep-criteo", "--fast"],
    "unknown model": ["run", "wide-deep-kriteo", "rows.tsv"],
    "missing file": ["run", "wide-deep-criteo", "nothing-here.tsv", "-o", "out.csv"],
    "unknown format": ["run", "wide-deep-criteo", "SAMPLE", "-o", "out.xls"],
    "unknown precision": ["run", "wide-deep-criteo", "SAMPLE", "-o", "out.csv", "--precision", "int4"],
    "unknown engine": ["run", "wide-deep-criteo", "SAMPLE", "-o", "out.csv", "--engine", "tensorrt"],
    "no threads": ["run", "wide-deep-criteo", "SAMPLE", "-o", "out.csv", "--threads", "0"],
    "json where results go": ["run", "wide-deep-criteo", "SAMPLE", "--json"],
    "folder that is no model": ["run", ".", "SAMPLE", "-o", "out.csv"],
    "info of nothing": ["info", "nothing"],
    "download of nothing": ["download", "nothing"],
    "train nothing": ["train", "wide-shallow", "--data", "rows.tsv", "-o", "out"],
    "train on a missing file": ["train", "wide-deep", "--data", "nothing-here.tsv", "-o", "out"],
    "unknown setting": ["train", "wide-deep", "--data", "SAMPLE", "-o", "out", "--set", "depth=3"],
    "a setting of other families": ["finetune", "wide-deep-criteo", "--data", "SAMPLE", "-o", "out", "--set", "arch=x"],
    "setting that is no number": ["train", "wide-deep", "--data", "SAMPLE", "-o", "out", "--set", "dropout=much"],
    "finetune nothing": ["finetune", "nothing", "--data", "SAMPLE", "-o", "out"],
    "freeze a shipped model's missing folder": ["freeze", "nothing"],
    "rewrite without a place": ["rewrite", "MLP"],
    "calibrate without data": ["calibrate", "MLP", "-o", "table.json"],
    "calibrate a missing model": ["calibrate", "nothing.onnx", "--data", "calibration.npz", "-o", "table.json"],
    "overwrite a shipped table": ["calibrate", "wide-deep-criteo", "--data", "SAMPLE"],
    "quantize without data": ["quantize", "MLP", "-o", "int8.onnx"],
    "quantize on a file that is no npz": ["quantize", "MLP", "--calibration-data", "MLP", "-o", "int8.onnx"],
    "overwrite a shipped int8 model": ["quantize", "wide-deep-criteo"],
    "broken expression": [
        "quantize",
        "MLP",
        "--calibration-data",
        "calibration.npz",
        "--keep-float",
        "(",
        "-o",
        "int8.onnx",
    ],
    "evaluate without labels": ["evaluate", "wide-deep-criteo", "--data", "UNLABELLED"],
    "evaluate nothing": ["evaluate", "wide-deep-criteo", "--data", "nothing-here.tsv"],
    "benchmark an unknown engine": ["benchmark", "wide-deep-criteo", "--engine", "tensorrt"],
    "benchmark no precision": ["benchmark", "wide-deep-criteo", "--precision", ","],
    "benchmark rows that are not there": ["benchmark", "wide-deep-criteo", "--data", "nothing-here.tsv"],
    "train for ever": ["train", "wide-deep", "--data", "SAMPLE", "-o", "out", "--set", "held_out=inf"],
    "a seed too large": ["train", "wide-deep", "--data", "SAMPLE", "-o", "out", "--seed", "99999999999"],
    "benchmark no batch": ["benchmark", "wide-deep-criteo", "--batch-size", "0"],
    "benchmark a batch that is no number": ["benchmark", "wide-deep-criteo", "--batch-size", "many"],
    "hold out two and a half rows": ["train", "wide-deep", "--data", "SAMPLE", "-o", "out", "--set", "held_out=2.5"],
    "train into a file": ["train", "wide-deep", "--data", "SAMPLE", "-o", "calibration.npz"],
    "export into a file": ["export", "wide-deep-criteo", "--to", "triton", "-o", "calibration.npz"],
    "build nothing": ["build", "nothing"],
    "plan nothing": ["plan", "nothing"],
}


@pytest.mark.usefixtures("shared_home")
@pytest.mark.parametrize("arguments", WRONG.values(), ids=WRONG.keys())
def test_a_wrong_request_gets_one_line_exit_code_2_and_leaves_nothing(
    arguments: list[str], mlp: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if arguments[0] in ("train", "finetune"):
        pytest.importorskip("tensorflow", reason="training needs the train extra")
    sample = zoo.SHIPPED / "wide-deep-criteo" / "sample.tsv.gz"
    unlabelled = tmp_path / "unlabelled.tsv"
    unlabelled.write_text("\t".join(["1"] * 39) + "\n")
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    (empty / "calibration.npz").write_bytes((tmp_path / "calibration.npz").read_bytes())
    names = {"SAMPLE": str(sample), "MLP": str(mlp), "UNLABELLED": str(unlabelled)}
    code, out, err = call(capsys, *(names.get(argument, argument) for argument in arguments))
    assert code == 2
    assert out == ""
    assert len(err.strip().splitlines()) == 1, err
    assert err.startswith("zoo: ")
    assert [path.name for path in empty.iterdir()] == ["calibration.npz"]


IDLE = {  # an option that the command has no use for, with what it names in the message
    "calibrate shop-clicks --column user_id -o t.json": "--column requires --data FILE",
    "calibrate shop-clicks --samples 9 -o t.json": "--samples requires --data FILE",
    "calibrate wide-deep-criteo --data SAMPLE --column C1 -o t.json": "--column has no effect",
    "quantize wide-deep-criteo -o int8.onnx --max-memory 1GB": "--max-memory requires an .onnx file",
    "quantize MLP --table t.json --search -o int8.onnx": "--search has no effect with --table",
    "quantize MLP --schema s.json --table t.json -o out": "--table has no effect with --schema",
    "tune MLP --evaluation-data calibration.npz --preprocess p.json -o int8.onnx": "--preprocess requires a folder",
    "benchmark MLP --precision int8": "--precision requires a zoo model",
    "benchmark MLP --price-per-hour 2": "--price-per-hour require --scenario",
    "benchmark MLP --count 9": "--count requires --scenario",
    "benchmark resnet26d-cifar10 --scenario offline --rounds 3": "--rounds has no effect with --scenario",
    "plan MLP --precision int8": "found --precision int8",
    "run --check shards --threads 2": "--threads has no effect with --check",
    "run --check shards rows.csv": "found rows.csv",
    "export MLP --to ovms --threads 2 -o out": "--threads has no effect with --to ovms",
    "export MLP --to triton --precision fp32 -o out": "--precision requires a zoo model",
    "delta old new --apply --all -o out": "--all has no effect with --apply",
    "train transformer-mt --preset draft --teacher t --data p.tsv --resume -o out": "--resume has no effect",
    "cluster yaml --cloud aws --project p -o c.yaml": "--project requires --cloud gcp, found aws",
}


@pytest.mark.usefixtures("shared_home")
@pytest.mark.parametrize(("line", "said"), IDLE.items(), ids=IDLE.keys())
def test_an_option_without_effect_is_refused(
    line: str, said: str, mlp: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = {"SAMPLE": str(zoo.SHIPPED / "wide-deep-criteo" / "sample.tsv.gz"), "MLP": str(mlp)}
    code, out, err = call(capsys, *(names.get(word, word) for word in line.split()))
    assert (code, out, err.count("\n")) == (2, "", 1) and said in err, err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["calibration.npz", "mlp.onnx"]


def test_a_wrong_setting_is_refused_before_the_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ZOO_TABLE_MEMORY", "much")
    code, _, said = call(capsys, "list")
    assert (code, said) == (2, "zoo: found ZOO_TABLE_MEMORY=much, expected a size such as 4GB or 512MB\n")


def test_a_warning_comes_once() -> None:
    once = cli.UniqueMessages()
    records = [logging.makeLogRecord({"name": "zoo", "msg": "line %d", "args": (number,)}) for number in (1, 2, 1)]
    assert [once.filter(record) for record in records] == [True, True, False]
    event = logging.makeLogRecord({"name": "zoo.serving.http.server", "msg": "version 1 is served"})
    assert once.filter(event) and once.filter(event)


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_first_process_of_a_training_prints_metrics(
    rank: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setattr("zoo.api.train", lambda *_, **__: {"top1": 0.5})
    assert call(capsys, "train", "resnet26d", "--data", "folder", "-o", "out") == (0, "" if rank else "top1: 0.5\n", "")


def test_any_onnx_model_is_quantized_from_the_command_line(
    mlp: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "int8.onnx"
    samples = tmp_path / "calibration.npz"
    code, out, _ = call(capsys, "quantize", mlp, "--calibration-data", samples, "-o", target, "--json")
    assert code == 0
    report = json.loads(out)
    assert {op["name"]: op["precision"] for op in report["operators"]} == {
        "first": "int8",
        "relu": "int8",
        "second": "int8",
    }
    assert "2 of 2 layers int8, 100% of the MACs; SQNR " in report["summary"]["line"]
    code, out, _ = call(capsys, "quantize", mlp, "--calibration-data", samples, "-o", target)
    assert "2 of 2 layers int8" in out and "second" not in out
    code, out, _ = call(capsys, "quantize", mlp, "--calibration-data", samples, "-o", target, "--all")
    assert "second" in out
    code, out, _ = call(capsys, "calibrate", mlp, "--data", samples, "-o", tmp_path / "table.json", "--json")
    assert code == 0
    assert json.loads(out)["samples"] == 64
    code, _, _ = call(capsys, "quantize", mlp, "--table", tmp_path / "table.json", "-o", tmp_path / "again.onnx")
    assert code == 0
    assert (tmp_path / "again.onnx").read_bytes() == target.read_bytes()
    code, _, err = call(capsys, "quantize", target, "--table", tmp_path / "table.json", "-o", tmp_path / "third.onnx")
    assert code == 2
    assert "is quantized already (2 MatMul of int8 weights); expected a float model" in err


def test_the_effort_of_a_calibration_is_chosen_and_reported(
    mlp: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = tmp_path / "calibration.npz"
    arguments = "quantize", mlp, "--data", samples, "-o", tmp_path / "int8.onnx", "--json"
    for options, effort in (((), "default"), (("--effort", "fast"), "fast"), (("--effort", "best"), "best")):
        report = tmp_path / "report.json"
        code, out, _ = call(capsys, *arguments, *options, "--report", report)
        assert code == 0
        assert json.loads(out)["effort"] == json.loads(report.read_text())["effort"] == effort
    code, _, err = call(capsys, *arguments, "--effort", "most")
    assert code == 2 and "found the effort 'most', expected one of fast, default, best" in err
    code, _, err = call(capsys, "quantize", "wide-deep-criteo", "-o", tmp_path / "own.onnx", "--effort", "fast")
    assert code == 2 and "--effort requires an .onnx file; wide-deep-criteo is calibrated by its recipe" in err


def test_a_file_is_written_for_an_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    text = "(float[n,3,8,8] x) => (float[n,4,8,8] y) { a = Conv<pads=[1,1,1,1]>(x, k) g = Sigmoid(a) f = Mul(a, g) "
    weights = {
        name: rng.normal(size=shape).astype(np.float32) for name, shape in (("k", (4, 3, 3, 3)), ("l", (4, 4, 1, 1)))
    }
    path, samples = tmp_path / "silu.onnx", tmp_path / "samples.npz"
    io.save(model(text + "y = Conv(f, l) }", **weights), path)
    np.savez(samples, x=rng.normal(size=(16, 3, 8, 8)).astype(np.float32))

    def operators(engine: str) -> list[str]:
        target = tmp_path / f"{engine}.onnx"
        options = "--data", samples, "--effort", "fast", "--engine", engine, "-o", target
        assert call(capsys, "quantize", path, *options)[0] == 0
        return [node.op_type for node in io.load(target).graph if node.op_type in ("Add", "QuantizeLinear")]

    pairs = operators("auto")
    assert operators("onnxruntime") == pairs and "Add" not in pairs
    assert sorted(operators("openvino")) == ["Add", *pairs[:-1]], "no pair between the Sigmoid and the Mul"
    arguments = "--data", samples, "-o", tmp_path / "other.onnx", "--engine"
    code, _, err = call(capsys, "quantize", path, *arguments, "native")
    assert code == 2 and "found the engine 'native', expected one of auto, onnxruntime, openvino" in err
    code, _, err = call(capsys, "quantize", "wide-deep-criteo", "-o", tmp_path / "own.onnx", "--engine", "openvino")
    assert code == 2 and "--engine openvino requires an .onnx file" in err


def test_a_spent_time_budget_is_said_in_one_line(
    mlp: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    arguments = "quantize", mlp, "--calibration-data", tmp_path / "calibration.npz", "-o"
    assert call(capsys, *arguments, tmp_path / "spent.onnx", "--time-budget", "0s")[0] == 0

    def spent() -> list[str]:  # another line may say that so small a model is no quicker in int8
        return [
            record.getMessage()
            for record in caplog.records
            if record.name == "pipelines.quantization.algorithms.correction"
        ]

    assert spent() == [
        "the time budget of 0 s sufficed to correct 0 of 2 layers; for the others give more (--time-budget), "
        "or fewer samples"
    ]
    assert call(capsys, *arguments, tmp_path / "without.onnx", "--no-correct")[0] == 0
    assert len(spent()) == 1
    assert (tmp_path / "spent.onnx").is_file() and (tmp_path / "without.onnx").is_file()


@pytest.mark.parametrize(
    "verb", ["list", "info wide-deep-criteo", "download wide-deep-criteo", "doctor", "build wide-deep-criteo"]
)
def test_json_is_exactly_one_document(verb: str, shared_home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capfd, *verb.split(), "--json")
    assert code == 0, err
    json.loads(out)


@pytest.mark.skipif(not extension.isas(), reason="there are no kernels")
def test_an_instruction_set_caps_the_kernels(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ZOO_ISA", raising=False)
    report = json.loads(call(capsys, "doctor", "--isa", "portable", "--json")[1])
    assert (report["kernels"], report["settings"]["ZOO_ISA"]) == ("ok: portable", "portable")
    assert report["instruction_sets"]["portable"].startswith("used, the fastest")
    others = [name for name in extension.isas() if name != "portable"]  # the option lasts for its command
    assert all(report["instruction_sets"][name].startswith("excluded by ZOO_ISA=portable") for name in others)
    assert report["advice"] != machine.VNNI
    code, _, err = call(capsys, "doctor", "--isa", "avx10")
    assert code == 2 and "found ZOO_ISA=avx10, expected an instruction set of this CPU" in err
    assert "ZOO_ISA" not in os.environ


def test_threads_are_a_number_or_auto() -> None:
    threads = Threads()
    assert threads.convert("auto", None, None) == machine.processors().threads and threads.convert("3", None, None) == 3
    with pytest.raises(click.BadParameter, match="'many' is no whole number, nor auto"):
        threads.convert("many", None, None)


def test_results_go_through_pipes(shared_home: Path) -> None:
    import gzip

    lines = gzip.decompress((zoo.SHIPPED / "wide-deep-criteo" / "sample.tsv.gz").read_bytes()).splitlines(
        keepends=True
    )[:100]
    done = subprocess.run(
        [sys.executable, "-m", "zoo.cli.app", "run", "wide-deep-criteo", "-", "--engine", "onnxruntime"],
        input=b"".join(lines), capture_output=True, check=True,
    )  # fmt: skip
    out = done.stdout.decode().splitlines()
    assert out[0] == "row,probability"
    assert [line.split(",")[0] for line in out[1:]] == [str(i) for i in range(100)]
    assert done.stderr.decode() == ("" if machine.has_vnni() else f"zoo: {machine.NO_VNNI}\n")
