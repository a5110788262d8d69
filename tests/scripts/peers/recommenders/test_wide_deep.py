"""The benchmark beside other engines: what it feeds them, the networks it rebuilds, and the script it compares whole
runs with.
"""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import zoo
from scripts.peers import harness
from scripts.peers.engines import onnx_runtime
from scripts.peers.recommenders import engines, wide_deep

PEERS = Path(harness.__file__).parent
SCRIPT = [sys.executable, PEERS / "recommenders" / "pandas_script.py"]
MODEL = "wide-deep-criteo"
FIELDS, BUCKETS, NUMERIC = 3, 10, 2


@pytest.fixture(scope="module")
def frozen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Wide & Deep graph with the tensor names that freezing gives."""
    random = np.random.default_rng(0)
    weights = {f"deep/C{i}/embeddings": (BUCKETS, 4) for i in range(1, FIELDS + 1)}
    weights |= {f"wide/C{i}/weights": (BUCKETS, 1) for i in range(1, FIELDS + 1)}
    sizes = [FIELDS * 4 + NUMERIC, 8, 5]
    layers = [("hidden_0", *sizes[:2]), ("hidden_1", *sizes[1:]), ("deep_logit", 5, 1)]
    for name, inner, outer in layers:
        weights |= {f"{name}/kernel": (inner, outer), f"{name}/bias": (outer,)}
    nodes = []
    for i in range(1, FIELDS + 1):
        nodes.append(helper.make_node("Gather", ["ids", f"field_{i}"], [f"id_{i}"], axis=1))
        nodes.append(helper.make_node("Gather", [f"deep/C{i}/embeddings", f"id_{i}"], [f"deep_{i}"]))
        nodes.append(helper.make_node("Gather", [f"wide/C{i}/weights", f"id_{i}"], [f"wide_{i}"]))
    nodes.append(helper.make_node("Concat", [*(f"deep_{i}" for i in range(1, FIELDS + 1)), "numbers"], ["x_0"], axis=1))
    for k, (name, _, _) in enumerate(layers):
        nodes.append(helper.make_node("Gemm", [f"x_{k}", f"{name}/kernel", f"{name}/bias"], [f"y_{k}"]))
        nodes.append(helper.make_node("Relu", [f"y_{k}"], [f"x_{k + 1}"]))
    nodes[-1] = helper.make_node("Sum", ["y_2", *(f"wide_{i}" for i in range(1, FIELDS + 1))], ["logit"])
    nodes.append(helper.make_node("Sigmoid", ["logit"], ["probability"]))
    constants = [
        numpy_helper.from_array(random.normal(size=shape).astype(np.float32), name) for name, shape in weights.items()
    ]
    constants += [numpy_helper.from_array(np.int64(i - 1), f"field_{i}") for i in range(1, FIELDS + 1)]
    ports = [
        helper.make_tensor_value_info("ids", TensorProto.INT32, ["batch", FIELDS]),
        helper.make_tensor_value_info("numbers", TensorProto.FLOAT, ["batch", NUMERIC]),
    ]
    output = [helper.make_tensor_value_info("probability", TensorProto.FLOAT, ["batch", 1])]
    graph = helper.make_graph(nodes, "wide_deep", ports, output, constants)
    path = tmp_path_factory.mktemp("frozen") / "fp32.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), path)
    return path


@pytest.fixture(scope="module")
def batch() -> dict[str, np.ndarray]:
    numbers = np.random.default_rng(1).random((50, NUMERIC), dtype=np.float32)
    return {"ids": engines.draw_ids("uniform", 50, FIELDS, BUCKETS), "numbers": numbers}


@pytest.fixture(scope="module")
def expected(frozen: Path, batch: dict[str, np.ndarray]) -> np.ndarray:
    return onnxruntime.InferenceSession(frozen).run(None, batch)[0]


def test_ids_are_buckets_of_every_field_and_come_again() -> None:
    for kind in engines.DrawnInputs.kinds:
        ids = engines.draw_ids(kind, 5000, 4, 100)
        assert (ids.dtype, ids.shape) == (np.int32, (5000, 4))
        assert (ids.min(), ids.max()) == (0, 99)
        assert np.array_equal(ids, engines.draw_ids(kind, 5000, 4, 100))
        assert not np.array_equal(ids, engines.draw_ids(kind, 5000, 4, 100, seed=1))


def test_zipf_ids_have_the_frequencies_of_the_law_and_their_own_order_in_every_field() -> None:
    ids = engines.draw_ids("zipf", 200_000, 3, 1000)
    expected = np.arange(1, 1001) ** -1.1
    expected /= expected.sum()
    tops = []
    for field in ids.T:
        counts = np.sort(np.bincount(field, minlength=1000))[::-1] / len(field)
        assert np.allclose(counts[:10], expected[:10], rtol=0.05)
        assert np.isclose(counts[:100].sum(), expected[:100].sum(), rtol=0.02)
        tops.append(int(np.bincount(field).argmax()))
    assert len(set(tops)) == 3
    again = engines.draw_ids("zipf", 200_000, 3, 1000, seed=5)
    assert [int(np.bincount(field).argmax()) for field in again.T] == tops, "the permutation does not follow the seed"


def test_uniform_ids_are_even() -> None:
    counts = np.bincount(engines.draw_ids("uniform", 100_000, 1, 10).ravel(), minlength=10)
    assert np.allclose(counts, 10_000, rtol=0.05)


def test_a_pool_holds_many_different_batches(tmp_path: Path) -> None:
    inputs = engines.DrawnInputs(MODEL, tmp_path, FIELDS, BUCKETS, NUMERIC)
    assert len(inputs.batches("zipf", 1)) == 32768
    for size in (512, 1000):
        batches = inputs.batches("zipf", size)
        assert len(batches) == 64
        assert {len(batch["ids"]) for batch in batches} == {size}
    assert not np.array_equal(batches[0]["numbers"], batches[1]["numbers"])
    assert all(batch["numbers"].min() >= 0 and batch["numbers"].max() <= 1 for batch in batches)


def test_the_tensorflow_network_is_the_frozen_graph(
    frozen: Path, batch: dict[str, np.ndarray], expected: np.ndarray
) -> None:
    pytest.importorskip("tensorflow", reason="needs the train extra")
    graph = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(frozen).graph.initializer}
    fields = range(1, FIELDS + 1)
    weights = {
        "table": np.concatenate([graph[f"deep/C{field}/embeddings"] for field in fields]),
        "wide": np.concatenate([graph[f"wide/C{field}/weights"] for field in fields]),
        "offsets": np.arange(FIELDS, dtype=np.int32) * np.int32(BUCKETS),
    }
    for index, name in enumerate(("hidden_0", "hidden_1", "deep_logit")):
        weights |= {f"kernel_{index}": graph[f"{name}/kernel"], f"bias_{index}": graph[f"{name}/bias"]}
    scores = engines.tensorflow_network(weights)(batch["ids"], batch["numbers"]).numpy()
    assert np.abs(scores - expected).max() < 1e-6


def test_torch_and_tensorflow_get_the_weights_of_the_model(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs the train extra")
    pytest.importorskip("tensorflow", reason="needs the train extra")
    inputs = wide_deep.drawn_inputs(MODEL, tmp_path)
    engines.save_weights(inputs)
    pool = inputs.pool("uniform", 50)
    exact = zoo.pipeline(MODEL, "fp32", "onnxruntime").predict(pool)["probability"]
    with torch.no_grad():
        in_torch = inputs.torch_network()(*inputs.torch_inputs(pool)).numpy()
    with np.load(inputs.weights) as weights:
        in_tensorflow = engines.tensorflow_network(dict(weights))(pool["ids"], pool["numbers"]).numpy()
    assert np.abs(in_torch - exact).max() < 1e-6
    assert np.abs(in_tensorflow - exact).max() < 1e-6


def test_onnxruntimes_quantizer_writes_int8(frozen: Path, batch: dict[str, np.ndarray], tmp_path: Path) -> None:
    onnx_runtime.quantize_static(frozen, tmp_path / "stock.onnx", [batch])
    kinds = {tensor.data_type for tensor in onnx.load(tmp_path / "stock.onnx").graph.initializer}
    assert {TensorProto.INT8, TensorProto.UINT8} <= kinds


def test_a_turn_without_its_core_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "TURN_SECONDS", 0.0)
    engine = object.__new__(engines.Engine)
    engine.prepared, engine.run = itertools.repeat(1), lambda _: None
    taken, share = engine.turn()
    assert taken.size == 1
    assert np.isfinite([wide_deep.summary(1, [(taken, share)])["samples_per_second"], taken[0]]).all()


def test_rates_count_the_time_for_which_a_turn_had_the_core() -> None:
    alone, shared = (np.array([0.001, 0.001]), 1.0), (np.array([0.001, 0.003]), 0.5)
    for turn in (alone, shared):
        assert wide_deep.summary(8, [turn])["samples_per_second"] == pytest.approx(8000)


def test_ratios_pair_the_turns_of_a_round() -> None:
    seconds = {"peer": [4.0, 8.0, 12.0], "zoo-x": [2.0, 4.0, 1.0]}
    turns = {name: [(np.array([duration]), 1.0) for duration in taken] for name, taken in seconds.items()}
    assert list(wide_deep.speedups(turns)) == [{"engine": "zoo-x", "over": {"peer": 2.0}}]


@pytest.mark.parametrize(
    "arguments",
    [
        ["nosuchmodel"],
        ["--peers", "nosuchpeer"],
        ["--ids", "normal"],
        ["--batch-size", "0"],
        ["--batch-size", "many"],
        ["--batch-size", ""],
        ["--rounds", "0"],
        ["--nosuchoption"],
    ],
    ids=" ".join,
)
def test_what_is_wrong_with_a_request_is_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        harness.run("wide-deep", wide_deep, arguments)
    said = capsys.readouterr()
    assert ended.value.code == 2
    assert len(said.err.splitlines()) == 1
    assert said.out == ""


@pytest.mark.slow
def test_engines_in_processes_of_their_own_make_a_report(tmp_path: Path, require_fields) -> None:
    names = ["onnxruntime-fp32", "zoo-onnxruntime"]
    options = [
        "--peers",
        ",".join(names),
        "--batch-size",
        "16",
        "--ids",
        "zipf",
        "--rounds",
        "2",
        "-o",
        tmp_path / "report.json",
    ]
    done = subprocess.run([sys.executable, PEERS, "wide-deep", *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [line.split()[:1] for line in done.stdout.splitlines()[1:5]] == [
        ["results:"],
        ["engine"],
        *([name] for name in names),
    ]
    report = json.loads((tmp_path / "report.json").read_text())
    assert [result["engine"] for result in report["results"]] == names
    assert report["left_out"] == {}
    for row in report["results"]:
        assert (row["ids"], row["batch_size"]) == ("zipf", 16)
        assert 0 < row["latency_ms"]["p50"] <= row["latency_ms"]["p95"] <= row["latency_ms"]["p99"]
        assert row["spread"][0] <= row["samples_per_second"] <= row["spread"][1]
        assert 20 < row["memory_mb"] < 2000
        assert 0 < row["core_share"] <= 1.1  # the processor's clock is coarser
    reference, ours = (result["max_probability"] for result in report["results"])
    assert reference < 1e-6 < ours < 0.01
    assert [(ratio["engine"], list(ratio["over"])) for ratio in report["ratios"]] == [
        ("zoo-onnxruntime", ["onnxruntime-fp32"])
    ]
    assert report["environment"]["threads"] == 1
    require_fields(report, "zoo/weights/wide-deep-criteo/reports/peers-*.json", wide_deep.ENGINES)


@pytest.mark.parametrize("options", [[], ["--factorize"]], ids=["one by one", "factorize"])
def test_the_obvious_script_scores_as_zoo_run_does(options: list[str], tmp_path: Path) -> None:
    pytest.importorskip("pandas", reason="needs the peers extra")
    pytest.importorskip("farmhash", reason="needs the peers extra")
    rows = tmp_path / "rows.tsv"
    rows.write_bytes(b"\n".join(zoo.pipeline(MODEL).example(200)))
    zoo.run(MODEL, str(rows), tmp_path / "zoo.csv", precision="fp32", engine="onnxruntime")
    command = [*SCRIPT, rows, "-o", tmp_path / "obvious.csv", "--model", zoo.load(MODEL).path, *options]
    subprocess.run(command, check=True)
    ours, theirs = (np.loadtxt(tmp_path / f"{name}.csv", delimiter=",", skiprows=1) for name in ("zoo", "obvious"))
    assert theirs.shape == (200, 2)
    assert np.array_equal(ours[:, 0], theirs[:, 0])
    assert np.abs(ours - theirs).max() < 1e-5


def test_the_obvious_script_says_in_one_line_what_is_wrong(tmp_path: Path) -> None:
    pytest.importorskip("pandas", reason="needs the peers extra")
    pytest.importorskip("farmhash", reason="needs the peers extra")
    command = [*SCRIPT, tmp_path / "nothing.tsv", "-o", tmp_path / "scores.csv", "--model", zoo.load(MODEL).path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
