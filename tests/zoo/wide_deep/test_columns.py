"""Graphs made of feature columns: the same outputs before and after, from raw rows; what is refused; the whole road
from a graph.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

pytest.importorskip("tensorflow", reason="graphs are read by TensorFlow")

from feature_columns import PROBABILITY, classifier, examples, fc, features, frozen, run, tf, v1

import zoo
from pipelines.core.errors import RequestError
from pipelines.graph import io as onnx_graph
from pipelines.graph import query
from pipelines.kernels import extension
from zoo import cli
from zoo.wide_deep.data import read_rows
from zoo.wide_deep.freeze import map_features, network_to_onnx
from zoo.wide_deep.tensorflow_graph.columns import optimize, read_graph
from zoo.wide_deep.tensorflow_graph.mapped import MappedFeatures, Number, ordered

TOLERANCE = 1e-6
Rows = list[dict[str, Any]]


def graph_of(build: Callable[[], Any], seed: int = 1) -> Any:
    """The frozen graph that `build` makes."""
    with tf.Graph().as_default() as graph:
        v1.set_random_seed(seed)
        build()
        return frozen(
            graph,
            [node.name for node in graph.as_graph_def().node if node.name.startswith("head/") and node.op in ENDS],
        )


ENDS = ("Sigmoid", "Softmax", "AsString")


def hashed(name: str, buckets: int = 10) -> Any:
    return fc.categorical_column_with_hash_bucket(name, buckets)


def some_rows(count: int, texts: Sequence[str], numbers: Sequence[str], seed: int = 0) -> Rows:
    """Categories of every length, some missing; numbers, some missing."""
    random = np.random.default_rng(seed)
    rows: Rows = []
    for _ in range(count):
        row: dict[str, Any] = {
            name: "x" * random.integers(0, 4) + str(random.integers(0, 40)) * random.integers(0, 3) for name in texts
        }
        rows.append(
            row | {name: None if random.random() < 0.1 else round(float(random.gamma(1, 4)), 3) for name in numbers}
        )
    return rows


def feed_of(rows: Rows, shape: str = "[n, 1]", integers: Sequence[str] = ()) -> dict[str, Any]:
    """The rows as TensorFlow takes them; a missing number is 0."""
    if shape == "examples":
        found = []
        for row in rows:
            example = tf.train.Example()
            for name, value in row.items():
                if isinstance(value, str):
                    example.features.feature[name].bytes_list.value.extend([value.encode()] if value else [])
                elif value is not None:
                    example.features.feature[name].float_list.value.append(value)
            found.append(example.SerializeToString())
        return {"input_example_tensor": np.array(found, object)}
    feed = {}
    for name in rows[0]:
        text = isinstance(rows[0][name], str)
        values = np.array([row[name] if text else row[name] or 0 for row in rows], object if text else np.float32)
        feed[name] = values if shape == "[n]" else values[:, None]
    return feed


def raw(rows: Rows, known: MappedFeatures) -> list[str]:
    """The rows as lines of a log."""
    return [
        "\t".join(
            "" if row[name] is None else str(row[name]) for name in (*known.numeric_columns, *known.categorical_columns)
        )
        for row in rows
    ]


def converted(graph: Any, columns: Sequence[str] | None = None) -> tuple[MappedFeatures, Any]:
    """Features whose numbers have a range of their own, and the ONNX model of a graph."""
    network = optimize(graph)
    known = map_features(network, columns)
    numbers = tuple(dataclasses.replace(each, lo=-0.5 * i, hi=1.0 + i) for i, each in enumerate(known.numbers))
    known = dataclasses.replace(known, numbers=numbers)
    return known, network_to_onnx(network, known)


def scores(model: Any, known: MappedFeatures, lines: Sequence[str]) -> np.ndarray:
    session = ort.InferenceSession(onnx_graph.serialized(model), providers=["CPUExecutionProvider"])
    return np.concatenate([session.run(None, known.encode(rows))[0] for rows in read_rows(list(lines), **known.counts)])


def check(
    graph: Any, texts: Sequence[str], numbers: Sequence[str], shape: str = "[n, 1]", output: str = PROBABILITY
) -> Any:
    """That a graph and its ONNX model say the same of 512 rows and of one; returns the model."""
    known, model = converted(graph)
    for count in (512, 1, 1, 1):
        rows = some_rows(count, texts, numbers, seed=count)
        rows[0] |= {texts[0]: ""} if count == 1 else {}
        before = run(graph, feed_of(rows, shape), output)
        before = before[:, 1:] if before.shape[1:] == (2,) else before.reshape(-1, 1)
        after = scores(model, known, raw(rows, known))
        assert after.shape == before.shape == (count, 1)
        assert np.abs(after - before).max() < TOLERANCE
        assert count == 1 or before.std() > 0.002, "a model that says something"
    return model


def normalized(x: Any) -> Any:
    return (tf.math.log1p(x) - 1.5) / 0.7


COLUMNS = {  # the wide and the deep part's columns over the categories a, b, c and the numbers u, v
    "combiners": lambda: [
        fc.embedding_column(hashed(name, 7 + i), 3 + i, combiner=how)
        for i, (name, how) in enumerate(zip("abc", HOW, strict=True))
    ],
    "numbers": lambda: [
        fc.embedding_column(hashed("a"), 4),
        fc.numeric_column("u", normalizer_fn=normalized),
        fc.numeric_column("v"),
    ],
    "indicators": lambda: [
        fc.indicator_column(hashed("a")),
        fc.embedding_column(hashed("b", 30), 5),
        fc.indicator_column(hashed("c", 4)),
    ],
    "one embedding": lambda: [fc.embedding_column(hashed("a", 5), 4)],
    "only indicators": lambda: [fc.indicator_column(hashed("a")), fc.numeric_column("u")],
}
HOW = ("mean", "sum", "sqrtn")


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        *((kind, "[n, 1]") for kind in COLUMNS),
        ("numbers", "[n]"),
        ("combiners", "examples"),
        ("indicators", "examples"),
    ],
)
def test_outputs_before_and_after_are_equal(kind: str, shape: str) -> None:
    deep = COLUMNS[kind]()
    wide = [
        hashed("a", deep_buckets(deep)),
        hashed("z", 12),
        fc.numeric_column("u"),
        fc.numeric_column("w", normalizer_fn=lambda x: 2 / (x + 1)),
    ]

    def build() -> None:
        columns = [*deep, *wide]
        sizes = {"[n, 1]": (None, 1), "[n]": (None,)}
        inputs = examples(columns) if shape == "examples" else features("abcz", "uvw", sizes[shape])
        classifier(inputs, deep, wide, head=True)

    graph = graph_of(build)
    rows_without_missing = shape == "examples"  # a number that an Example must hold
    model = check(graph, "abcz", "uvw", shape) if not rows_without_missing else check_filled(graph)
    assert len(model.graph) * 5 < sum(node.op not in ("Const", "Placeholder") for node in graph.node)


def deep_buckets(deep: Sequence[Any]) -> int:
    return next(
        each.categorical_column.hash_bucket_size
        for each in deep
        if getattr(each, "categorical_column", None) and "a" in each.name[:1]
    )


def check_filled(graph: Any) -> Any:
    known, model = converted(graph)
    for count in (512, 1):
        rows = [
            {name: 1.25 if value is None else value for name, value in row.items()}
            for row in some_rows(count, "abcz", "uvw", count)
        ]
        assert np.abs(scores(model, known, raw(rows, known)) - run(graph, feed_of(rows, "examples"))).max() < TOLERANCE
    return model


@pytest.mark.parametrize(
    "activation",
    [
        tf.nn.tanh,
        tf.nn.elu,
        tf.nn.selu,
        tf.nn.relu6,
        tf.nn.sigmoid,
        tf.nn.softplus,
        lambda x: tf.nn.leaky_relu(x, 0.3),
        tf.square,
        lambda x: x,
    ],
)
def test_activations(activation: Callable[[Any], Any]) -> None:
    deep = [fc.embedding_column(hashed("a"), 4), fc.numeric_column("u")]
    check(graph_of(lambda: classifier(features("a", "u"), deep, [], activation=activation)), "a", "u")


def batch_norm(x: Any) -> Any:
    x = tf.nn.relu(x)
    made = [
        v1.get_variable(f"{x.op.name}/{name}", [x.shape[1]], initializer=v1.random_uniform_initializer(0.5, 1.5))
        for name in "mvbg"
    ]
    return tf.nn.batch_normalization(x, *made, 1e-3)


def test_batch_normalization_leaves_no_operator_behind() -> None:
    deep = [fc.embedding_column(hashed("a"), 4), fc.numeric_column("u", normalizer_fn=normalized)]
    model = check(
        graph_of(lambda: classifier(features("a", "u"), deep, [hashed("a")], activation=batch_norm)), "a", "u"
    )
    assert set(query.op_counts(model)) == {"Gather", "Concat", "MatMul", "Add", "Relu", "Sum", "Sigmoid"}


def test_shared_embeddings_wide_numbers_and_the_two_class_output() -> None:
    def build() -> None:
        shared = v1.feature_column.shared_embedding_columns([hashed("a"), hashed("b")], 4)
        inputs = features("ab", "") | {"m": v1.placeholder(tf.float64, [None, 3], name="m")}
        numbers = fc.numeric_column(
            "m", shape=(3,), dtype=tf.float64, normalizer_fn=lambda x: (x - [1.0, 2.0, 3.0]) / [4.0, 5.0, 6.0]
        )
        classifier(inputs, [*shared, numbers], [hashed("b"), numbers], head=True)

    graph = graph_of(build)
    known, model = converted(graph)
    assert known.numeric_columns == ("m_1", "m_2", "m_3")
    rows = some_rows(64, "ab", known.numeric_columns)
    feed = feed_of(rows)
    feed["m"] = np.concatenate([feed.pop(name) for name in known.numeric_columns], axis=1)
    for output in (PROBABILITY, "head/predictions/probabilities"):
        before = run(graph, feed, output)
        assert np.abs(scores(model, known, raw(rows, known)) - before[:, -1:]).max() < TOLERANCE


def test_plain_lookups_and_a_softmax_over_two_classes() -> None:
    """What Keras users write: the empty text has a hash like any other."""

    def build() -> None:
        inputs = features("ab", "u", (None,))
        table = [v1.get_variable(f"t{i}", [9, 4]) for i in range(2)]
        rows = [
            tf.gather(each, tf.strings.to_hash_bucket_fast(inputs[name], 9))
            for each, name in zip(table, "ab", strict=True)
        ]
        x = tf.concat([*rows, inputs["u"][:, None] / 10], 1)
        logits = tf.matmul(tf.nn.relu(tf.matmul(x, v1.get_variable("k", [9, 8]))), v1.get_variable("l", [8, 2]))
        tf.nn.softmax(logits, name="head/both")

    check(graph_of(build), "ab", "u", "[n]", "head/both")


def test_names_of_nodes_mean_nothing() -> None:
    deep = [fc.embedding_column(hashed("a"), 4), fc.embedding_column(hashed("b"), 4), fc.numeric_column("u")]
    graph = graph_of(lambda: classifier(features("ab", "u"), deep, [hashed("b"), hashed("a")]))
    names = {
        node.name: node.name if node.op == "Placeholder" else f"n{i * 7919 % 1009}" for i, node in enumerate(graph.node)
    }
    assert len(set(names.values())) == len(graph.node)
    renamed = type(graph).FromString(graph.SerializeToString())
    for node in renamed.node:
        node.name = names[node.name]
        node.input[:] = [names[each.split(":")[0]] + each[len(each.split(":")[0]) :] for each in node.input]
    assert onnx_graph.serialized(converted(graph)[1]) == onnx_graph.serialized(converted(renamed)[1])


# ------------------------------------------------------------------------------------------------------------ refusals


def with_column(column: Any, texts: str = "ab", extra: Callable[[], dict[str, Any]] = dict) -> Any:
    deep = [fc.embedding_column(hashed("a"), 4)]
    return graph_of(lambda: classifier(features(texts, "u") | extra(), [*deep, *column()], []))


@pytest.mark.parametrize(
    ("column", "extra", "why"),
    [
        (
            lambda: [fc.embedding_column(hashed("m"), 4)],
            lambda: {"m": v1.placeholder(tf.string, [None, 3], "m")},
            r"m \(Placeholder\).*\[\?, 3\].*several",
        ),
        (
            lambda: [fc.embedding_column(hashed("m"), 4)],
            lambda: {"m": v1.placeholder(tf.string, [None, None], "m")},
            r"m \(Placeholder\).*several",
        ),
        (
            lambda: [fc.embedding_column(fc.weighted_categorical_column(hashed("b"), "u"), 4)],
            dict,
            r"\(NotEqual\).*weighted",
        ),
        (lambda: [fc.embedding_column(fc.crossed_column(["a", "b"], 50), 4)], dict, r"\(SparseCross\w*\).*crossed"),
        (lambda: [fc.bucketized_column(fc.numeric_column("u"), [1.0, 2.0])], dict, r"\(Bucketize\).*bucketized"),
        (
            lambda: [fc.embedding_column(fc.categorical_column_with_hash_bucket("i", 9, tf.int64), 4)],
            lambda: {"i": v1.placeholder(tf.int64, [None, 1], "i")},
            "categories that are numbers are not mapped",
        ),
    ],
)
def test_a_column_that_is_not_mapped_is_refused_by_name_and_reason(column: Any, extra: Any, why: str) -> None:
    with pytest.raises(RequestError, match=why) as raised:
        optimize(with_column(column, extra=extra))
    assert "\n" not in str(raised.value)


def test_an_unknown_combiner_and_another_hash_are_refused() -> None:
    graph = with_column(lambda: [fc.embedding_column(hashed("b"), 4)])
    segment = next(node for node in graph.node if node.op == "SparseSegmentMean")
    segment.op = "SegmentMax"
    with pytest.raises(
        RequestError, match=rf"{segment.name} \(SegmentMax\): rows are combined by other than mean, sum or sqrtn"
    ):
        optimize(graph)
    deep = [fc.embedding_column(hashed("a"), 4)]
    with pytest.raises(RequestError, match=r"\(StringToHashBucketFast\): a is hashed to 1[02] and to 1[02] buckets"):
        optimize(graph_of(lambda: classifier(features("a", ""), deep, [hashed("a", 12)])))
    graph = with_column(list)
    next(node for node in graph.node if node.op == "StringToHashBucketFast").op = "StringToHashBucketStrong"
    with pytest.raises(RequestError, match="StringToHashBucketFast alone"):
        optimize(graph)


def test_everything_that_cannot_be_mapped_is_listed_at_once() -> None:
    def extra() -> dict[str, Any]:
        shapes = {"m": [None, 2], "k": [None, None], "one": [1, 1]}
        return {name: v1.placeholder(tf.string, shape, name) for name, shape in shapes.items()}

    def columns() -> list[Any]:
        return [
            *(fc.embedding_column(hashed(name), 4) for name in ("m", "k", "one")),
            fc.bucketized_column(fc.numeric_column("u"), [1.0]),
        ]

    with pytest.raises(RequestError, match="cannot map 4 parts of the graph") as raised:
        optimize(with_column(columns, extra=extra))
    assert all(re.search(rf"\b{name} \(Placeholder\)", str(raised.value)) for name in ("m", "k", "one"))
    assert "Bucketize" in str(raised.value)


def test_numbers_of_any_length_and_texts_with_a_default_in_examples_are_refused() -> None:
    def build() -> None:
        spec = {
            "v": tf.io.VarLenFeature(tf.float32),
            "a": tf.io.FixedLenFeature([1], tf.string, "none"),
            "b": tf.io.FixedLenFeature([1], tf.string),
        }
        parsed = v1.io.parse_example(v1.placeholder(tf.string, [None], name="input_example_tensor"), spec)
        parsed["v"] = tf.sparse.to_dense(parsed["v"])
        parsed["v"].set_shape([None, 1])
        classifier(
            parsed,
            [fc.embedding_column(hashed("a"), 4), fc.embedding_column(hashed("b"), 4), fc.numeric_column("v")],
            [],
        )

    with pytest.raises(
        RequestError, match=r"cannot map 2 parts.*v \(ParseExample\w*\): numbers of any length"
    ) as raised:
        optimize(graph_of(build))
    assert "a missing text becomes" in str(raised.value)


def test_graphs_without_one_probability_are_refused() -> None:
    deep = [fc.embedding_column(hashed("a"), 4)]
    graph = graph_of(lambda: classifier(features("a", ""), deep, []))
    for node in graph.node:
        node.op = "Identity" if node.op == "Sigmoid" else node.op
    with pytest.raises(RequestError, match=rf"no Sigmoid or Softmax at the end.*{PROBABILITY} \(Identity\)"):
        optimize(graph)

    def two() -> None:
        inputs = features("a", "")
        x = v1.feature_column.input_layer(inputs, deep)
        for name in ("head/click", "head/buy"):
            tf.sigmoid(tf.matmul(x, v1.get_variable(name[5:], [4, 1])), name=name)

    graph = graph_of(two)
    with pytest.raises(
        RequestError, match="several probabilities: head/click, head/buy; choose one with --output-node"
    ):
        optimize(graph)
    assert optimize(graph, "head/buy").output == "head/buy"
    with pytest.raises(RequestError, match="no node head/sell.*head/click"):
        optimize(graph, "head/sell")
    with pytest.raises(RequestError, match="no hashed category"):
        optimize(graph_of(lambda: classifier(features("", "u"), [fc.numeric_column("u")], [])))


# ---------------------------------------------------------------------------------------------------- rows and columns


def test_columns_of_a_row_stand_in_their_natural_order_or_the_one_given() -> None:
    assert ordered(["I10", "I2"], ["C1", "b"], None) == (["I2", "I10"], ["C1", "b"])
    assert ordered(["I10", "I2"], ["C1", "b"], ["label", "I10", "I2", "b", "C1"]) == (["I10", "I2"], ["b", "C1"])
    with pytest.raises(
        RequestError,
        match="x is no column.*I2 is named twice.*number I10 is missing.*category b stands in front of a number",
    ):
        ordered(["I10", "I2"], ["C1", "b"], ["I2", "b", "I2", "x", "C1"])


def test_features_come_back_from_json_and_broken_ones_are_refused() -> None:
    known = MappedFeatures(("u",), (0.5,), ("a", "b"), (3, 4), (Number(0, (("log1p",), ("divide", 2.0)), 0.0, 3.0),))
    value = json.loads(json.dumps(known.to_json()))
    assert MappedFeatures.from_json(value) == known
    number = value["numbers"][0]
    changes: list[dict[str, Any]] = [
        {"hash": "md5"},
        {"buckets": [3]},
        {"buckets": [0, 4]},
        {"fill": ["x"]},
        {"fill": [float("nan")]},
    ]
    changes += [
        {"numbers": [{**number, **each}]}
        for each in ({"column": 1}, {"lo": 4.0}, {"steps": [["cube"]]}, {"steps": [["divide"]]})
    ]
    for change in changes:
        with pytest.raises(RequestError, match="broken features"):
            MappedFeatures.from_json(value | change)


@pytest.mark.parametrize("native", [True, False])
def test_every_category_has_its_own_buckets_and_a_missing_one_none_of_them(
    native: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if native and extension.native() is None:
        pytest.skip("built without the native kernels")
    if not native:
        monkeypatch.setattr(extension, "native", lambda: None)
    texts = ["", "a", "12345678", "some longer text", "ü"]
    sizes = (3, 1000, 2**31 - 2)
    lines = [f"{i}\t{a}\t{b}\t{a}" for i, a in enumerate(texts) for b in texts] * 300
    ids = np.concatenate([rows.ids for rows in read_rows(lines, numeric=1, categorical=3, buckets=sizes)])
    columns = [[line.split("\t")[1 + k] for line in lines] for k in range(3)]
    for column, size, found in zip(columns, sizes, ids.T, strict=True):
        wanted = tf.strings.to_hash_bucket_fast(column, size).numpy()
        assert found.tolist() == [
            size if not text else bucket for text, bucket in zip(column, wanted.tolist(), strict=True)
        ]
    import pyarrow as pa
    import pyarrow.parquet

    table = pa.table({"n": list(range(len(lines))), **{name: columns[k] for k, name in enumerate("abc")}})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    (stored,) = read_rows(tmp_path / "rows.parquet", numeric=1, categorical=3, buckets=sizes)
    assert (stored.ids == ids).all()


# ------------------------------------------------------------------------------------------------------------ the road


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
    deep = [*(fc.embedding_column(each, size) for each, size in zip(categories, (4, 4, 6), strict=True)), *numbers]
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
    assert [each["precision"] for each in quantized["operators"] if each["type"] in ("Gemm", "MatMul")].count(
        "int8"
    ) == 4

    lines = log.read_text().splitlines()
    found = zoo.run(taken, str(log), tmp_path / "scores.csv", precision="fp32", engine="onnxruntime")
    assert found["rows"] == 600
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
    with pytest.raises(RequestError, match="found id 21 in row 0, column 0; wanted 0 to 20"):
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
    from pipelines.rewrites.driver import rewrite
    from zoo.clicks.rewrites import passes

    names, numbers = [f"C{i + 1}" for i in range(26)], [f"I{i + 1}" for i in range(13)]
    categories = [hashed(name, 100) for name in names]
    deep = [
        *(fc.embedding_column(each, 8) for each in categories),
        *(fc.numeric_column(name, normalizer_fn=normalized) for name in numbers),
    ]
    graph = graph_of(lambda: classifier(features(names, numbers), deep, categories, hidden=(64, 32)))
    _, model = converted(graph)
    rewrite(model, passes())
    own = onnx_graph.load(trained / "rewritten.onnx")
    assert query.op_counts(model) == query.op_counts(own)
    assert sum(node.op not in ("Const", "Placeholder") for node in graph.node) > 100 * len(model.graph)


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
    known, model = converted(read_graph(tmp_path / "m"))
    assert np.abs(scores(model, known, raw(rows, known)) - before[:, 1:]).max() < TOLERANCE


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
    known, network = converted(read_graph(tmp_path / "two"))
    rows = some_rows(64, "a", "u")
    feed = feed_of(rows)
    assert (known.numeric_columns, known.categorical_columns) == (("u",), ("a",))
    assert np.abs(scores(network, known, raw(rows, known)) - model(feed["a"], feed["u"]).numpy()).max() < TOLERANCE


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
    assert "zoo freeze" in fails(["finetune", str(taken), "--data", str(log), "-o", str(target)], capsys)


# ----------------------------------------------------------------------------------------------------------- full size


@pytest.mark.slow
def test_the_published_model_at_its_full_size() -> None:
    """26 columns of 1000 buckets and 32 dimensions, 13 numbers, layers of 1024, 512 and 256: 10,000 rows within
    1e-6.
    """
    names, numbers = [f"C{i + 1}" for i in range(26)], [f"I{i + 1}" for i in range(13)]
    categories = [hashed(name, 1000) for name in names]
    ready = [fc.numeric_column(name, normalizer_fn=normalized) for name in numbers]
    deep = [*(fc.embedding_column(each, 32) for each in categories), *ready]
    graph = graph_of(lambda: classifier(features(names, numbers), deep, [*categories, *ready], hidden=(1024, 512, 256)))
    known, model = converted(graph)
    assert sum(node.op not in ("Const", "Placeholder") for node in graph.node) > 10 * len(model.graph)
    rows = some_rows(10_000, names, numbers)
    before = np.concatenate([run(graph, feed_of(rows[i : i + 2500])) for i in range(0, len(rows), 2500)])
    assert before.std() > 0.1
    assert np.abs(scores(model, known, raw(rows, known)) - before).max() < TOLERANCE
