"""Third-party ONNX rankers: recognized families, weights and scores."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pyarrow as pa
import pytest
from click.testing import CliRunner
from helpers import ranker_packages as packages
from numpy.typing import NDArray

import zoo
from pipelines.core.errors import RequestError
from pipelines.graph import io, query
from pipelines.kernels.recommenders import reference
from pipelines.kernels.recommenders.from_graph import click_program
from pipelines.models.pipeline import choose_engine
from pipelines.quantization.calibration.calibrate import calibrate
from pipelines.quantization.recipe import QuantRecipe
from pipelines.rewrites.driver import rewrite
from zoo.api import models
from zoo.cli.app import cli
from zoo.recommenders.data.features import Features
from zoo.recommenders.data.row_errors import ErrorLog
from zoo.recommenders.data.schema import Schema
from zoo.recommenders.export.rewrites import passes
from zoo.recommenders.importers.rankers import GENERIC, Ranker, read
from zoo.recommenders.lowering.lower import lower

LENGTH = packages.LENGTH
TOLERANCE = 1e-6
NOISE = (
    "Cast",
    "Unsqueeze",
    "Squeeze",
    "Flatten",
    "Tile",
    "Expand",
    "Equal",
    "Not",
    "Dropout",
    "BatchNormalization",
    "Pow",
)


def id_of(rows: int) -> dict[str, Any]:
    return {"type": "id", "rows": rows}


def schema(**changes: dict[str, Any]) -> dict[str, Any]:
    columns: list[dict[str, Any]] = [
        {"name": "user", "kind": "category", "encoding": id_of(packages.USERS)},
        {"name": "country", "kind": "category", "encoding": id_of(packages.COUNTRIES)},
        {"name": "item", "kind": "category", "encoding": id_of(packages.ITEMS)},
        {
            **{"name": "history", "kind": "categories", "encoding": id_of(packages.ITEMS)},
            **{"separator": "|", "pooling": "mean", "length": LENGTH},
        },
        {"name": "age", "kind": "number", "encoding": {"type": "value"}},
        {"name": "price", "kind": "number", "encoding": {"type": "value"}, "missing": 3},
        {"name": "label", "kind": "label"},
    ]
    return {"columns": [column | changes.get(column["name"], {}) for column in columns]}


def saved(folder: Path, value: dict[str, Any]) -> Path:
    path = folder / "schema.json"
    path.write_text(json.dumps(value))
    return path


def as_fed(rows: list[dict[str, Any]], matrix: bool) -> dict[str, NDArray[Any]]:
    """What a user of the package would feed, from raw rows."""
    ids = {name: np.array([int(row[name]) for row in rows]) for name in ("user", "country", "item")}
    history = np.zeros((len(rows), LENGTH), np.int64)
    for index, record in enumerate(rows):
        items = [int(item) for item in (record["history"] or "").split("|") if item]
        history[index, : len(items)] = items
    numbers = {name: np.array([[row[name]] for row in rows], np.float32) for name in ("age", "price")}
    if not matrix:
        return {**ids, "history": history, **numbers}
    parts = [*(column[:, None] for column in ids.values()), history, *numbers.values()]
    return {"": np.concatenate(parts, 1).astype(np.float32)}


def scores(path: Path, rows: list[dict[str, Any]]) -> NDArray[np.float32]:
    """The export's own results, of inputs made without this package."""
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [argument.name for argument in session.get_inputs()]
    arrays = as_fed(rows, len(names) == 1)
    feeds = {name: arrays[name if len(names) > 1 else ""] for name in names}
    return np.asarray(session.run(None, feeds)[0]).ravel()


def scored(ranker: Ranker, rows: list[dict[str, Any]]) -> NDArray[np.float32]:
    (read_rows,) = ranker.features.read(rows)
    session = ort.InferenceSession(io.serialized(ranker.model), providers=["CPUExecutionProvider"])
    inputs = {argument.name for argument in session.get_inputs()}
    assert inputs == set(ranker.features.inputs)
    return np.asarray(session.run(["probability"], ranker.features.encode(read_rows))[0])


RECHUB = (
    "deepfm",
    "deepfm-dice",
    "deepfm-places",
    "wide-deep",
    "dcn",
    "dcn-v2",
    "dcn-v2-mixture",
    "two-tower",
    "two-tower-prelu",
)
EXPORTS = [
    *(("torch-rechub", packages.torch_rechub, name) for name in RECHUB),
    *(("deepctr", packages.deepctr, name) for name in ("deepfm", "wide-deep", "dcn", "dcn-v2", "autoint")),
    *(("fuxictr", packages.fuxictr, name) for name in ("deepfm", "wide-deep", "dcn-v2")),
]


FAMILY = {
    "deepfm-dice": "deepfm",
    "deepfm-places": "deepfm",
    "dcn": "dcn-v2",
    "dcn-v2-mixture": "dcn-v2",
    "two-tower-prelu": "two-tower",
}


@pytest.mark.parametrize(("package", "export", "name"), EXPORTS, ids=lambda x: x if isinstance(x, str) else "")
def test_exports_of_packages_become_families(
    package: str, export: Callable[..., None], name: str, tmp_path: Path
) -> None:
    export(name, tmp_path / "model.onnx")
    rows = packages.rows(200)
    ranker = read(tmp_path / "model.onnx", rows, saved(tmp_path, schema()))
    assert ranker.family == FAMILY.get(name, name)
    assert ranker.difference <= TOLERANCE
    operators = query.op_counts(ranker.model)
    assert not set(NOISE) & set(operators)
    assert [value.name for value in ranker.model.graph.outputs[1:]] == ["user", "item"][
        : 2 * (ranker.family == "two-tower")
    ]
    result = scored(ranker, rows)
    assert result.shape == (200, 1)
    assert np.ptp(result) > 0.001
    np.testing.assert_allclose(result.ravel(), scores(tmp_path / "model.onnx", rows), atol=TOLERANCE, rtol=0)
    assert moved(ranker) <= 0.002


def moved(ranker: Ranker) -> float:
    """How far its one program for the native kernels is from the graph, of probabilities and vectors."""
    model = ranker.model.clone()
    rewrite(model, passes(ranker.features.to_json()))
    feeds = {str(value.name): ranker.calibration[str(value.name)] for value in model.graph.inputs}
    made, report = lower(model, calibrate(model, [feeds], "minmax"), QuantRecipe())
    assert made is not None, report["reason"]
    program = click_program(made.graph[0])
    results = reference.run(program, feeds["ids"], feeds.get("numbers"), feeds.get("scales"))
    truth = ort.InferenceSession(io.serialized(model), providers=["CPUExecutionProvider"]).run(None, feeds)
    return float(max(np.abs(a - b).max() for a, b in zip(results, truth, strict=True)))


LISTS = [("torch-rechub", "mean"), ("torch-rechub", "sum"), ("deepctr", "mean"), ("deepctr", "sum"), ("deepctr", "max")]
LISTS += [("fuxictr", "mean"), ("fuxictr", "sum")]
VALUES = [str(number) for number in range(1, packages.ITEMS)]
KNOWN = {
    "id": id_of(packages.ITEMS),
    "vocabulary": {"type": "vocabulary", "values": VALUES},
    "hash": {"type": "hash", "buckets": packages.ITEMS - 1},
}


@pytest.mark.parametrize("kind", KNOWN)
@pytest.mark.parametrize(("package", "pool"), LISTS)
def test_lists_of_every_pooling_and_encoding(package: str, pool: str, kind: str, tmp_path: Path) -> None:
    packages.MODELS[package]("deepfm", tmp_path / "model.onnx", pool=pool)
    rows = packages.rows(300)
    rows[7]["history"] = "|".join(VALUES)  # its last ones
    ranker = read(tmp_path / "model.onnx", rows, saved(tmp_path, schema(history={"encoding": KNOWN[kind]})))
    assert (ranker.family, ranker.difference <= TOLERANCE) == ("deepfm", True)
    assert not {*NOISE, "Div"} & set(query.op_counts(ranker.model))
    (column,) = ranker.features.schema.of("categories")
    assert column.pooling == pool
    empty = [not row["history"] for row in rows]
    assert len(ranker.calibration["ids"]) == len(rows) - (sum(empty) if pool == "max" else 0)
    assert moved(ranker) <= 0.002
    if kind == "hash":  # no package hashes as this one
        return
    rows = [row | {"history": VALUES[index % 9] + "|" + (row["history"] or "7")} for index, row in enumerate(rows)]
    truth = [row | {"history": "|".join(row["history"].split("|")[-LENGTH:])} for row in rows]
    unknown = [row | {"history": "nothing|" + row["history"] + "|none"} for row in rows]
    for written in (rows, unknown):
        result = scored(ranker, written).ravel()
        np.testing.assert_allclose(result, scores(tmp_path / "model.onnx", truth), atol=TOLERANCE, rtol=0)


def test_exports_of_no_family_say_why(tmp_path: Path) -> None:
    packages.deepctr("xdeepfm", tmp_path / "model.onnx")
    rows = packages.rows(50)
    ranker = read(tmp_path / "model.onnx", rows, saved(tmp_path, schema()))
    assert (ranker.family, "Conv" in ranker.why) == (GENERIC, True)
    np.testing.assert_allclose(
        scored(ranker, rows).ravel(), scores(tmp_path / "model.onnx", rows), atol=TOLERANCE, rtol=0
    )


@pytest.mark.slow
@pytest.mark.parametrize(("package", "export", "name"), EXPORTS, ids=lambda x: x if isinstance(x, str) else "")
def test_the_other_exporter_of_torch_gives_the_same(
    package: str, export: Callable[..., None], name: str, tmp_path: Path
) -> None:
    pytest.importorskip("onnxscript")
    export(name, tmp_path / "model.onnx", dynamo=True)
    ranker = read(tmp_path / "model.onnx", packages.rows(50), saved(tmp_path, schema()))
    assert (ranker.family, ranker.difference <= TOLERANCE) == (FAMILY.get(name, name), True)
    assert moved(ranker) <= 0.002


# --- the same forms without the packages

HEAD = '<ir_version: 8, opset_import: ["" : 17]>\n'


def tables() -> dict[str, NDArray[Any]]:
    """Weights of `network`, by their names."""
    rng = np.random.default_rng(7)
    return {
        "user_table": rng.normal(0, 0.3, (packages.USERS, 4)),
        "item_table": rng.normal(0, 0.3, (packages.ITEMS, 4)),
        "wide": rng.normal(0, 0.3, (packages.USERS, 1)),
        "w": rng.normal(0, 0.3, (13, 8)),
        "b": rng.normal(0, 0.3, 8),
        "v": rng.normal(0, 0.3, (8, 1)),
        "crossed": rng.normal(0, 0.3, (13, 13)),
        "top": rng.normal(0, 0.3, (13, 1)),
        "slope": np.array([0.2]),
        **{f"v{e}": rng.normal(0, 0.3, (5, 13)) for e in (0, 1)},
        **{f"c{e}": rng.normal(0, 0.5, (5, 5)) for e in (0, 1)},
        **{f"u{e}": rng.normal(0, 0.3, (13, 5)) for e in (0, 1)},
        **{f"gate{e}": rng.normal(0, 0.3, (13, 1)) for e in (0, 1)},
        **{name: rng.normal(0, 0.3, (13, 1)) for name in ("bias", "other")},
    }


TABLES = tables()


def network(text: str, path: Path, **more: NDArray[Any]) -> Path:
    """An ONNX file of text, with the weights above that it reads."""
    proto = onnx.parser.parse_model(HEAD + text)
    read_names = {name for node in proto.graph.node for name in node.input}
    for name, array in (TABLES | more).items():
        if name in read_names:
            kept = array if array.dtype.kind == "i" else array.astype(np.float32)
            proto.graph.initializer.append(onnx.numpy_helper.from_array(kept, name))
    onnx.save(proto, path)
    return path


# as torch-rechub: an input a column, [n, 1, d] lookups, a list's mean by a mask
LOOKUPS = """
    one = Constant <value = int64[1] {1}> ()
    last = Constant <value = int64[1] {-1}> ()
    zero = Constant <value = int64 {0}> ()
    tiny = Constant <value = float {1e-16}> ()
    user_rows = Gather (user_table, user)
    user_vector = Unsqueeze (user_rows, one)
    item_rows = Gather (item_table, item)
    item_vector = Unsqueeze (item_rows, one)
    empty = Equal (history, zero)
    full = Not (empty)
    full1 = Unsqueeze (full, one)
    mask = Cast <to = 1> (full1)
    history_rows = Gather (item_table, history)
    total = MatMul (mask, history_rows)
    count = ReduceSum <keepdims = 1> (mask, last)
    some = Add (count, tiny)
    history_vector = Div (total, some)
    vectors = Concat <axis = 1> (user_vector, item_vector, history_vector)
    flat = Flatten (vectors)
    x = Concat <axis = 1> (flat, age)
"""
INPUTS = "agraph (int64[n] user, int64[n] item, int64[n, l] history, float[n, 1] age) => (float[n] y) {"
DEEP = """
    h = Gemm (x, w, b)
    r = Relu (h)
    deep = MatMul (r, v)
"""
FM = """
    two = Constant <value = float {2}> ()
    half = Constant <value = float {0.5}> ()
    sum = ReduceSum <keepdims = 1> (vectors, one)
    sum2 = Pow (sum, two)
    each2 = Pow (vectors, two)
    sum_each2 = ReduceSum <keepdims = 1> (each2, one)
    twice = Sub (sum2, sum_each2)
    pairs2 = ReduceSum <keepdims = 0> (twice, last)
    pairs = Mul (pairs2, half)
"""
END = """
    s = Squeeze (logit, one)
    y = Sigmoid (s)
}"""
EXPERTS = [
    f"""
    v{e}x = MatMul (v{e}, column)
    v{e}t = Tanh (v{e}x)
    c{e}x = MatMul (c{e}, v{e}t)
    c{e}t = Tanh (c{e}x)
    u{e}x = MatMul (u{e}, c{e}t)
    b{e} = Add (u{e}x, bias)
    d{e} = Mul (column, b{e})
    g{e} = MatMul (x, gate{e})
    gu{e} = Unsqueeze (g{e}, one)
"""
    for e in (0, 1)
]
MIXTURE = f"""
    two_axes = Constant <value = int64[1] {{2}}> ()
    column = Unsqueeze (x, two_axes)
    {"".join(EXPERTS)}
    gates = Concat <axis = 1> (gu0, gu1)
    shares = Softmax <axis = 1> (gates)
    both = Concat <axis = 2> (d0, d1)
    mixed = MatMul (both, shares)
    sum = Add (mixed, column)
    x1 = Squeeze (sum, two_axes)
"""
GRAPHS = {
    "deepfm": INPUTS + LOOKUPS + DEEP + FM + "logit = Add (deep, pairs)" + END,
    "wide-deep": INPUTS + LOOKUPS + DEEP + "linear = MatMul (x, top) logit = Add (deep, linear)" + END,
    "dcn-v2": INPUTS
    + LOOKUPS
    + "c = MatMul (x, crossed) x0c = Mul (x, c) x1 = Add (x0c, x) cross = MatMul (x1, top)"
    + DEEP
    + "logit = Add (deep, cross)"
    + END,
    "deepfm, slopes, all places count": INPUTS
    + LOOKUPS.replace("zero = Constant <value = int64 {0}>", "zero = Constant <value = int64 {-1}>")
    + DEEP.replace("Relu (h)", "PRelu (h, slope)")
    + FM
    + "logit = Add (deep, pairs)"
    + END,
    "dcn-v2, of vectors": INPUTS
    + LOOKUPS
    + "c = MatMul (x, top) x0c = Mul (x, c) x1 = Add (x0c, x) cross = MatMul (x1, top)"
    + DEEP
    + "logit = Add (deep, cross)"
    + END,
    "dcn-v2, a mixture of experts": INPUTS + LOOKUPS + MIXTURE + "logit = MatMul (x1, top)" + END,
    "ranker, experts with biases of their own": INPUTS
    + LOOKUPS
    + MIXTURE.replace("Add (u1x, bias)", "Add (u1x, other)")
    + "logit = MatMul (x1, top)"
    + END,
    "ranker": INPUTS + LOOKUPS + DEEP + "t = Tanh (deep) logit = Add (t, deep)" + END,
}


@pytest.mark.parametrize("family", GRAPHS)
def test_a_graph_with_an_input_a_column(family: str, tmp_path: Path) -> None:
    path = network(GRAPHS[family], tmp_path / "model.onnx")
    rows = packages.rows(40)
    ranker = read(path, rows, saved(tmp_path, schema()))
    assert (ranker.family, ranker.difference <= TOLERANCE) == (family.partition(",")[0], True)
    assert not {*NOISE, "Div"} & set(query.op_counts(ranker.model))
    assert ranker.family == GENERIC or moved(ranker) <= 0.002
    assert [column.name for column in ranker.features.numbers] == ["age"]  # the graph reads no others
    assert ranker.features.indicators == ()
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = {argument.name for argument in session.get_inputs()}
    feeds = {name: x for name, x in as_fed(rows, False).items() if name in names}
    np.testing.assert_allclose(scored(ranker, rows).ravel(), session.run(None, feeds)[0], atol=TOLERANCE, rtol=0)


def test_ids_beside_numbers_in_one_matrix_of_floats(tmp_path: Path) -> None:
    text = """agraph (float[n, 2] x) => (float[n, 1] y) {
        zero = Constant <value = int64[1] {0}> ()
        one = Constant <value = int64[1] {1}> ()
        two = Constant <value = int64[1] {2}> ()
        user = Slice (x, zero, one, one)
        age = Slice (x, one, two, one)
        ids = Cast <to = 7> (user)
        rows = Gather (wide, ids)
        w1 = Squeeze (rows, one)
        a = Mul (age, slope)
        logit = Add (w1, a)
        y = Sigmoid (logit)
    }"""
    path = network(text, tmp_path / "model.onnx", slope=np.array([0.5]))
    rows = packages.rows(20)
    ranker = read(path, rows, saved(tmp_path, schema()), columns=["user", "age"])
    assert ranker.difference <= TOLERANCE
    feeds = {"x": np.array([[row["user"], row["age"]] for row in rows], np.float32)}
    truth = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, feeds)[0]
    np.testing.assert_allclose(scored(ranker, rows), truth, atol=TOLERANCE, rtol=0)


def test_known_values_are_the_rankers_rows_and_missing_ones_row_zero(tmp_path: Path) -> None:
    values = {"encoding": {"type": "vocabulary", "values": [str(number) for number in range(1, packages.USERS)]}}
    path = network(GRAPHS["wide-deep"], tmp_path / "model.onnx")
    rows = packages.rows(20)
    rows[3]["user"], rows[4]["user"] = None, "nobody"
    ranker = read(path, rows, saved(tmp_path, schema(user=values)))
    truth = [dict(row) for row in rows]
    truth[3]["user"] = truth[4]["user"] = "0"
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    feeds = {name: x for name, x in as_fed(truth, False).items() if name in ("user", "item", "history", "age")}
    np.testing.assert_allclose(scored(ranker, rows).ravel(), session.run(None, feeds)[0], atol=TOLERANCE, rtol=0)


def test_what_cannot_be_written_again_stands_behind_new_inputs(tmp_path: Path) -> None:
    text = """agraph (int64[n] user, float[n, 1] age) => (float[n, 1] y) {
        rows = Gather (wide, user)
        turned = Transpose <perm = [1, 0]> (rows)
        t = Tanh (turned)
        back = Transpose <perm = [1, 0]> (t)
        logit = Add (back, age)
        y = Sigmoid (logit)
    }"""
    path = network(text, tmp_path / "model.onnx")
    ranker = read(path, packages.rows(20), saved(tmp_path, schema()))
    assert ranker.family == GENERIC
    assert "with the batch turned" in ranker.why
    assert ranker.difference == 0
    assert set(ranker.features.inputs) == {value.name for value in ranker.model.graph.inputs}


FAULTS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "columns": ({}, {"user": {"name": "who"}}, "found no column user"),
    "few": ({"columns": ["user", "item"]}, {}, "has 4 inputs"),
    "twice": ({"columns": ["user", "item", "history", "user"]}, {}, "a column twice"),
    "ids": ({}, {"user": {"encoding": id_of(51)}}, "column user has ids up to 50, but its table 50 rows"),
    "output": ({"output_node": "z"}, {}, "found no result z, expected one of y"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_does_not_fit_is_told_in_one_line(name: str, tmp_path: Path) -> None:
    options, changes, message = FAULTS[name]
    path = network(GRAPHS["ranker"], tmp_path / "model.onnx")
    with pytest.raises(RequestError, match=message) as caught:
        read(path, packages.rows(10), saved(tmp_path, schema(**changes)), **options)
    assert "\n" not in str(caught.value)


def test_logits_are_refused(tmp_path: Path) -> None:
    path = network(
        GRAPHS["ranker"].replace("y = Sigmoid (s)", "y = Mul (s, slope)"), tmp_path / "m.onnx", slope=np.array(9.0)
    )
    with pytest.raises(RequestError, match="expected probabilities; export it with its sigmoid"):
        read(path, packages.rows(10), saved(tmp_path, schema()))


def test_a_ranker_becomes_a_model_of_the_zoo(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, rows = network(GRAPHS["deepfm"], tmp_path / "model.onnx"), packages.rows(60)
    log, schema_path = tmp_path / "log.jsonl", saved(tmp_path, schema())
    log.write_text("\n".join(map(json.dumps, rows)))
    report = zoo.quantize(path, tmp_path / "made", calibration_data=str(log), schema=schema_path)
    assert (report["family"], report["structure"]["family"]) == ("deepfm", "deepfm")
    moved = report["probability"]
    assert moved["rows"] == 60 and 0 < moved["mean"] <= moved["largest"] < 0.05 and moved["bound"] == 0.003
    assert ("int8 moves a probability by up to" in caplog.text) == (moved["largest"] > 0.004)
    compared = zoo.evaluate(tmp_path / "made", [str(log)])
    assert compared["samples"] == 60
    assert compared["difference"]["max_probability"] < 0.05
    assert zoo.info(tmp_path / "made")["entry"] == "deepfm"
    made = zoo.pipeline(tmp_path / "made", precision="fp32", engine="onnxruntime")
    assert len(made(rows)) == 60
    choice = choose_engine(zoo.load(tmp_path / "made"), "int8", made.preprocess(rows), 1, fresh=True)
    assert {"onnxruntime", "onnxruntime+fp32"} <= choice.milliseconds.keys()
    with pytest.raises(RequestError, match="is an imported graph"):
        zoo.finetune(tmp_path / "made", [str(log)], tmp_path / "tuned")
    frozen = zoo.freeze("ranker", from_onnx=path, schema=schema_path, data=[str(log)], output=tmp_path / "any")
    assert (frozen["family"], frozen["structure"]["family"]) == ("ranker", "deepfm")
    for family, wanted in (
        ("dlrm", "is no dlrm, but deepfm"),
        ("wide-deep", "is no wide-deep, but deepfm"),
        ("resnet50", "cannot be imported"),
    ):
        with pytest.raises(RequestError, match=wanted):
            zoo.freeze(family, from_onnx=path, schema=schema_path, data=[str(log)], output=tmp_path / "other")
    with pytest.raises(RequestError, match="add --schema"):
        zoo.freeze("deepfm", from_onnx=path, data=[str(log)], output=tmp_path / "other")
    with pytest.raises(RequestError, match="in use"):
        zoo.quantize(path, tmp_path / "made", calibration_data=str(log), schema=schema_path)
    assert not (tmp_path / "other").exists()


def test_probabilities_that_int8_moves_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, log = network(GRAPHS["deepfm"], tmp_path / "model.onnx"), tmp_path / "log.jsonl"
    log.write_text("\n".join(map(json.dumps, packages.rows(30))))
    monkeypatch.setattr(models, "MAX_CHANGE", 0.0)
    made, schema_path = str(tmp_path / "made"), str(saved(tmp_path, schema()))
    shown = CliRunner().invoke(
        cli, ["quantize", str(path), "--schema", schema_path, "--calibration-data", str(log), "-o", made]
    )
    assert shown.exit_code == 0, shown.output
    assert re.search(r"\nint8 moves a probability by at most 0\.\d{4} \(mean 0\.\d{5}\) on 30 rows\n", shown.output)
    assert "int8 moves a probability by up to 0." in caplog.text and "on 30 rows, more than 0.000" in caplog.text


# --- encodings for them


def test_row_numbers_and_plain_numbers_are_read_as_they_are() -> None:
    features = Features(Schema.from_json(schema()))
    texts = {
        "user": ["7", "49", "50", "-1", "1.5", "x", None],
        "history": ["3|9", "3|0|9|40", "", "1|2|3|4|5|6", None, " 8 ", "a"],
        "age": ["35", "-1e3", "", "x", None, "0.5", "12"],
    }
    columns = {
        name: pa.array(texts.get(name, ["1"] * 7), pa.string())
        for name in ("user", "country", "item", "history", "age", "price")
    }
    rows = features.encode_columns(columns, np.arange(7), labelled=False)
    assert rows.ids[:, 0].tolist() == [7, 49, 0, 0, 0, 0, 0]
    history = [[3, 9, 0, 0, 0], [3, 9, 0, 0, 0], [0] * 5, [2, 3, 4, 5, 6], [0] * 5, [8, 0, 0, 0, 0], [0] * 5]
    assert rows.ids[:, 3:].tolist() == history
    np.testing.assert_array_equal(rows.scales[:, 0], np.array([1 / 2, 1 / 2, 0, 1 / 5, 0, 1, 0], np.float32))
    assert rows.numbers[:, 0].tolist() == [35, -1000, 0, 0, 0, 0.5, 12]
    assert features.last_ids[:4].tolist() == [49, 6, 39, 39]
    encoding = {"type": "vocabulary", "values": ["a", "b"], "skip_unknown": True}
    features = Features(Schema.from_json(schema(history={"encoding": encoding})))
    columns["history"] = pa.array(["a|x|b", "x", "", None, "x|a|a|a|a|a|b", " b |", "3"], pa.string())
    rows = features.encode_columns(columns, np.arange(7), labelled=False)
    history = [[1, 2, 3, 3, 3], [3] * 5, [3] * 5, [3] * 5, [1, 1, 1, 1, 2], [2, 3, 3, 3, 3], [3] * 5]
    assert rows.ids[:, 3:].tolist() == history
    np.testing.assert_array_equal(rows.scales[:, 0], np.array([1 / 2, 0, 0, 0, 1 / 5, 1, 0], np.float32))
    with pytest.raises(RequestError, match="has no 'skip_unknown'"):
        Schema.from_json(schema(user={"encoding": encoding}))
    with pytest.raises(RequestError, match="lacks 'rows'"):
        Schema.from_json(schema(user={"encoding": {"type": "id"}}))


def test_unknown_values_have_the_row_that_the_schema_names(tmp_path: Path) -> None:
    """FuxiCTR's `__PAD__` is row 0, its `__OOV__` the last row, which missing categories have too."""
    oov = packages.USERS - 1
    values = {"type": "vocabulary", "values": [str(number) for number in range(1, oov)], "unknown": oov}
    item = {"type": "id", "rows": packages.ITEMS, "unknown": packages.ITEMS - 1}
    path = network(GRAPHS["wide-deep"], tmp_path / "model.onnx")
    rows = packages.rows(20)
    rows[3]["user"], rows[4]["user"], rows[5]["item"] = None, "nobody", str(packages.ITEMS + 7)
    changes = {"user": {"encoding": values}, "item": {"encoding": item}, "history": {"encoding": item}}
    rows[6]["history"] = f"1|{packages.ITEMS}|2"
    ranker = read(path, rows, saved(tmp_path, schema(**changes)))
    truth = [dict(row) for row in rows]
    truth[3]["user"] = truth[4]["user"] = str(oov)
    truth[5]["item"] = str(packages.ITEMS - 1)
    truth[6]["history"] = f"1|{packages.ITEMS - 1}|2"
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    feeds = {name: x for name, x in as_fed(truth, False).items() if name in ("user", "item", "history", "age")}
    np.testing.assert_allclose(scored(ranker, rows).ravel(), session.run(None, feeds)[0], atol=TOLERANCE, rtol=0)
    errors = ErrorLog()
    list(ranker.features.read(rows, errors=errors))
    assert errors.outside == {"item": 1, "history": 1}
    with pytest.raises(RequestError, match=f"found its row of unknown values {packages.ITEMS}, expected 0 to"):
        Schema.from_json(schema(item={"encoding": {**item, "unknown": packages.ITEMS}}))


@pytest.mark.parametrize(("package", "pool"), LISTS)
def test_unknown_items_of_a_list_have_their_row(package: str, pool: str, tmp_path: Path) -> None:
    oov = packages.ITEMS - 1
    values = {"type": "vocabulary", "values": VALUES[:-1], "unknown": oov}
    packages.MODELS[package]("deepfm", tmp_path / "model.onnx", pool=pool)
    rows = packages.rows(300)
    ranker = read(tmp_path / "model.onnx", rows, saved(tmp_path, schema(history={"encoding": values})))
    assert (ranker.family, ranker.difference <= TOLERANCE) == ("deepfm", True)
    rows = [row | {"history": ("new|3|none", "none")[index % 2]} for index, row in enumerate(rows)]
    truth = [row | {"history": (f"{oov}|3|{oov}", f"{oov}")[index % 2]} for index, row in enumerate(rows)]
    result = scored(ranker, rows).ravel()
    np.testing.assert_allclose(result, scores(tmp_path / "model.onnx", truth), atol=TOLERANCE, rtol=0)
