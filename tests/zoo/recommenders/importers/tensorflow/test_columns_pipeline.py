"""Build pipeline of a graph of feature columns: frozen graphs, exports of an estimator, SavedModels, wrong requests."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from helpers.column_graphs import (
    TOLERANCE,
    converted,
    feed_of,
    graph_of,
    hashed,
    names_of,
    normalized,
    raw,
    scores,
    some_rows,
)
from helpers.feature_columns import PROBABILITY, classifier, examples, fc, features, run, tf, v1

import zoo
from pipelines.core.errors import RequestError
from pipelines.graph import io as onnx_graph
from pipelines.graph import query
from pipelines.kernels import extension
from zoo.cli import app as cli
from zoo.recommenders.importers.tensorflow.columns import read_graph


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """600 labelled rows: two numbers, three categories."""
    path = tmp_path_factory.mktemp("log") / "log.tsv"
    rows = some_rows(600, "abc", ["I2", "I10"])
    path.write_text(
        "".join(
            f"{i % 2}\t"
            + "\t".join("" if v is None else str(v) for v in (r["I2"], r["I10"], r["a"], r["b"], r["c"]))
            + "\n"
            for i, r in enumerate(rows)
        )
    )
    return path


@pytest.fixture(scope="module")
def pb(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A graph of other sizes than those trained here: 3 fields of 20, 30 and 40 buckets, embeddings of 4, 4 and 6,
    layers of 24 and 8.
    """
    path = tmp_path_factory.mktemp("graph") / "graph.pb"
    categories = [hashed(name, size) for name, size in zip("abc", (20, 30, 40), strict=True)]
    numbers = [fc.numeric_column(name, normalizer_fn=normalized) for name in ("I10", "I2")]
    deep = [*(fc.embedding_column(column, size) for column, size in zip(categories, (4, 4, 6), strict=True)), *numbers]
    graph = graph_of(lambda: classifier(features("abc", ["I10", "I2"]), deep, [*categories, *numbers], hidden=(24, 8)))
    path.write_bytes(graph.SerializeToString())
    return path


@pytest.fixture(scope="module")
def taken(pb: Path, log: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "taken"
    zoo.freeze("wide-deep", from_pb=pb, data=[str(log)], output=folder)
    return folder


def test_a_graph_goes_down_the_whole_road(taken: Path, pb: Path, log: Path, tmp_path: Path) -> None:
    report = json.loads((taken / "freeze.json").read_text())
    assert report["nodes"]["operators"] > 10 * report["nodes"]["fp32.onnx"] / 2
    assert len(onnx.load(taken / "rewritten.onnx").graph.node) * 10 < report["nodes"]["operators"]
    assert set(zoo.build(taken)["stages"].values()) == {"kept"}
    quantized = json.loads((taken / "quantization.json").read_text())
    assert [op["precision"] for op in quantized["operators"] if op["type"] in ("Gemm", "MatMul")].count("int8") == 4

    lines = log.read_text().splitlines()
    summary = zoo.run(taken, str(log), tmp_path / "scores.csv", precision="fp32", engine="onnxruntime")
    assert summary["rows"] == 600
    said = np.loadtxt(tmp_path / "scores.csv", delimiter=",", skiprows=1)[:, 1]
    names = ("label", "I2", "I10", "a", "b", "c")
    rows = [
        {
            k: (float(v) if v else None) if k[0] == "I" else v
            for k, v in zip(names, line.split("\t"), strict=True)
            if k != "label"
        }
        for line in lines
    ]
    before = run(read_graph(pb), feed_of(rows))
    assert np.abs(said - before[:, 0]).max() < TOLERANCE

    compared = zoo.evaluate(taken, str(log), engine="onnxruntime")
    assert compared["samples"] == 600
    assert compared["difference"]["max_probability"] < 0.03
    zoo.calibrate(taken, str(log), observer="minmax", samples=100)
    zoo.quantize(taken)
    assert zoo.freeze(taken)["nodes"] == report["nodes"]
    opened = zoo.pipeline(taken, engine="onnxruntime")
    with pytest.raises(RequestError, match="found id 21 in row 0, column 0; expected 0 to 20"):
        opened.predict({"ids": np.array([[21, 0, 0]], np.int32), "numbers": np.zeros((1, 2), np.float32)})


def test_the_native_kernels_take_a_graph(taken: Path, log: Path) -> None:
    if not extension.isas():
        pytest.skip("built without the native kernels")
    form = zoo.info(taken)["native"]
    assert "reason" in form


def test_a_graph_without_numbers(log: Path, tmp_path: Path) -> None:
    deep = [fc.embedding_column(hashed(name, 20), 4) for name in "abc"]
    graph = graph_of(lambda: classifier(features("abc", ""), deep, []))
    (tmp_path / "graph.pb").write_bytes(graph.SerializeToString())
    rows = tmp_path / "rows.tsv"
    rows.write_text(
        "".join("\t".join(line.split("\t")[i] for i in (0, 3, 4, 5)) + "\n" for line in log.read_text().splitlines())
    )
    zoo.freeze("wide-deep", from_pb=tmp_path / "graph.pb", data=str(rows), output=tmp_path / "m")
    assert zoo.evaluate(tmp_path / "m", str(rows), engine="onnxruntime")["difference"]["max_probability"] < 0.03


def test_the_rewritten_graph_is_that_of_a_model_trained_here(trained: Path) -> None:
    """Of 6 columns and 3 numbers as of 26 and 13: tables are joined, so their number changes no operator."""
    from pipelines.rewrites.driver import rewrite
    from zoo.recommenders.export.rewrites import passes_without_header as passes

    names, numbers = [f"C{i + 1}" for i in range(6)], [f"I{i + 1}" for i in range(3)]
    categories = [hashed(name, 100) for name in names]
    deep = [
        *(fc.embedding_column(column, 8) for column in categories),
        *(fc.numeric_column(name, normalizer_fn=normalized) for name in numbers),
    ]
    graph = graph_of(lambda: classifier(features(names, numbers), deep, categories, hidden=(64, 32)))
    _, model = converted(graph)
    rewrite(model, passes())
    own = onnx_graph.load(trained / "rewritten.onnx")
    assert query.op_counts(model) == query.op_counts(own)
    assert sum(node.op not in ("Const", "Placeholder") for node in graph.node) > 20 * len(model.graph)


def test_a_graph_is_trained_on(taken: Path, log: Path, tmp_path: Path) -> None:
    """From the graph's own weights; the result has its operators, and is trained on again."""
    settings = {"held_out": "100", "epochs": "1", "learning_rate": "1e-12"}
    zoo.finetune(taken, str(log), tmp_path / "still", settings=settings)
    zoo.build(tmp_path / "still")
    models = [onnx_graph.load(folder / "fp32.onnx") for folder in (taken, tmp_path / "still")]
    assert query.op_counts(models[0]) == query.op_counts(models[1])
    opened = [zoo.pipeline(folder, "fp32", "onnxruntime") for folder in (taken, tmp_path / "still")]
    batches = [pipeline.preprocess(log) for pipeline in opened]
    assert all((batches[0][name] == batches[1][name]).all() for name in batches[0])
    still = [pipeline.predict(batch)["probability"] for pipeline, batch in zip(opened, batches, strict=True)]
    np.testing.assert_allclose(still[1], still[0], atol=1e-6)

    settings |= {"learning_rate": "0.02", "epochs": "5", "refit": "false", "min_delta": "0.0"}
    zoo.finetune(tmp_path / "still", str(log), tmp_path / "tuned", settings=settings)
    losses = [epoch["train_logloss"] for epoch in json.loads((tmp_path / "tuned/train.json").read_text())["history"]]
    assert losses[-1] < losses[0] - 0.01
    zoo.build(tmp_path / "tuned")
    assert zoo.evaluate(tmp_path / "tuned", str(log), engine="onnxruntime")["difference"]["max_probability"] < 0.03


def saved(folder: Path, graph_def: Any) -> str:
    """A frozen graph as a SavedModel of TensorFlow 1."""
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(graph_def, name="")
        tensors = {
            node.name: graph.get_tensor_by_name(f"{node.name}:0") for node in graph_def.node if node.op == "Placeholder"
        }
        with v1.Session(graph=graph) as session:
            v1.saved_model.simple_save(
                session, str(folder), tensors, {"probability": graph.get_tensor_by_name(f"{PROBABILITY}:0")}
            )
    return str(folder)


@pytest.mark.parametrize("resource", [True, False])
def test_what_an_estimator_exports(resource: bool, tmp_path: Path) -> None:
    """Variables of both kinds, serialized examples in, the probabilities of two classes out."""
    columns = [hashed("a"), fc.numeric_column("u")]
    with tf.Graph().as_default() as graph, v1.variable_scope("", use_resource=resource), v1.Session() as session:
        v1.set_random_seed(0)
        inputs = examples(columns)
        classifier(inputs, [fc.embedding_column(columns[0], 4), columns[1]], columns, head=True)
        session.run(v1.global_variables_initializer())
        serialized, both = (
            graph.get_tensor_by_name(f"{name}:0") for name in ("input_example_tensor", "head/predictions/probabilities")
        )
        builder = v1.saved_model.Builder(str(tmp_path / "m"))
        signature = v1.saved_model.classification_signature_def(serialized, None, both)
        builder.add_meta_graph_and_variables(session, ["serve"], {"serving_default": signature})
        builder.save()
        rows = some_rows(32, "a", "u")
        before = session.run(
            both,
            {serialized: feed_of([row | {"u": row["u"] or 0.0} for row in rows], "examples")["input_example_tensor"]},
        )
    feats, model = converted(read_graph(tmp_path / "m"))
    assert np.abs(scores(model, feats, raw(rows, feats)) - before[:, 1:]).max() < TOLERANCE


def test_saved_models_of_both_kinds(pb: Path, tmp_path: Path) -> None:
    one, _ = converted(read_graph(pb))
    from_one, _ = converted(read_graph(saved(tmp_path / "one", read_graph(pb))))
    assert from_one == one

    class Model(tf.Module):
        def __init__(self) -> None:
            self.table, self.kernel = tf.Variable(tf.random.normal([9, 4])), tf.Variable(tf.random.normal([5, 1]))

        @tf.function
        def __call__(self, a: Any, u: Any) -> Any:
            row = tf.gather(self.table, tf.strings.to_hash_bucket_fast(a[:, 0], 9))
            return tf.sigmoid(tf.matmul(tf.concat([row, u], 1), self.kernel))

    model = Model()
    inputs = [tf.TensorSpec([None, 1], kind, name) for kind, name in ((tf.string, "a"), (tf.float32, "u"))]
    tf.saved_model.save(model, str(tmp_path / "two"), model.__call__.get_concrete_function(*inputs))
    feats, network = converted(read_graph(tmp_path / "two"))
    rows = some_rows(64, "a", "u")
    feed = feed_of(rows)
    assert names_of(feats) == ["u", "a"]
    assert np.abs(scores(network, feats, raw(rows, feats)) - model(feed["a"], feed["u"]).numpy()).max() < TOLERANCE


def fails(arguments: Sequence[str], capsys: pytest.CaptureFixture[str], code: int = 2) -> str:
    with pytest.raises(SystemExit) as end:
        cli.call(list(arguments))
    assert end.value.code == code
    error = capsys.readouterr().err.strip()
    assert error.startswith("zoo: ")
    assert "\n" not in error
    return error


def test_wrong_requests_are_one_line_and_leave_nothing_behind(
    pb: Path, log: Path, taken: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "m"
    start = ["freeze", "wide-deep", "--data", str(log), "-o", str(target), "--from-pb"]
    assert "found no" in fails([*start, str(tmp_path / "none.pb")], capsys)
    assert "no GraphDef" in fails([*start, str(log)], capsys)
    assert "no saved_model.pb" in fails([*start, str(tmp_path)], capsys)
    assert "x is no column of the graph" in fails([*start, str(pb), "--columns", "x,I2,I10,a,b,c"], capsys)
    assert "it may end in head" in fails([*start, str(pb), "--output-node", "x"], capsys)
    assert "--data" in fails(["freeze", "wide-deep", "--from-pb", str(pb), "-o", str(target)], capsys)
    assert "-o" in fails(["freeze", "wide-deep", "--from-pb", str(pb), "--data", str(log)], capsys)
    assert "wide-deep" in fails(
        ["freeze", "resnet50", "--from-pb", str(pb), "--data", str(log), "-o", str(target)], capsys
    )
    assert "family" in fails(
        ["freeze", str(taken), "--from-pb", str(pb), "--data", str(log), "-o", str(target)], capsys
    )
    assert "--from-pb" in fails(["freeze", str(taken), "--data", str(log)], capsys)
    short = tmp_path / "short.tsv"
    short.write_text("1\t2\t3\n")
    error = fails(["freeze", "wide-deep", "--from-pb", str(pb), "--data", str(short), "-o", str(target)], capsys)
    assert "found 3 columns" in error
    assert "I2, I10, a, b, c" in error
    assert not target.exists()
    assert "in use" in fails(
        ["freeze", "wide-deep", "--from-pb", str(pb), "--data", str(log), "-o", str(taken)], capsys
    )
    assert "found 3 columns" in fails(["run", str(taken), str(short)], capsys)
    assert "found 3 columns" in fails(["evaluate", str(taken), "--data", str(short)], capsys)
    assert "found 3 columns" in fails(["calibrate", str(taken), "--data", str(short)], capsys)
    cut = fails(["finetune", str(taken), "--data", str(log), "-o", str(target), "--prune", "ratio=.3"], capsys)
    assert "came as a TensorFlow graph, whose layers cannot be cut" in cut
    tune = ["finetune", str(taken), "--data", str(log), "-o", str(target), "--qat"]
    assert "is not trained with int8's rounding" in fails(tune, capsys)


# ----------------------------------------------------------------------------------------------------------- full size


@pytest.mark.slow
def test_the_published_model_at_its_full_size() -> None:
    """26 columns of 1000 buckets and 32 dimensions, 13 numbers, layers of 1024, 512 and 256: 10,000 rows within
    1e-6.
    """
    names, numbers = [f"C{i + 1}" for i in range(26)], [f"I{i + 1}" for i in range(13)]
    categories = [hashed(name, 1000) for name in names]
    ready = [fc.numeric_column(name, normalizer_fn=normalized) for name in numbers]
    deep = [*(fc.embedding_column(column, 32) for column in categories), *ready]
    graph = graph_of(lambda: classifier(features(names, numbers), deep, [*categories, *ready], hidden=(1024, 512, 256)))
    feats, model = converted(graph)
    assert sum(node.op not in ("Const", "Placeholder") for node in graph.node) > 10 * len(model.graph)
    rows = some_rows(10_000, names, numbers)
    before = np.concatenate([run(graph, feed_of(rows[i : i + 2500])) for i in range(0, len(rows), 2500)])
    assert before.std() > 0.1
    assert np.abs(scores(model, feats, raw(rows, feats)) - before).max() < TOLERANCE
