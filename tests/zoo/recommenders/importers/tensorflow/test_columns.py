"""Graphs made of feature columns: the same outputs before and after, from raw rows; rows and columns."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.column_graphs import TOLERANCE, converted, feed_of, graph_of, hashed, normalized, raw, scores, some_rows
from helpers.criteo_logs import read_rows
from helpers.feature_columns import PROBABILITY, classifier, examples, fc, features, run, tf, v1

from pipelines.core.errors import RequestError
from pipelines.graph import io as onnx_graph
from pipelines.graph import query
from pipelines.kernels import extension
from zoo.recommenders.importers.tensorflow.feature_schema import ordered


def check(
    graph: Any, texts: Sequence[str], numbers: Sequence[str], shape: str = "[n, 1]", output: str = PROBABILITY
) -> Any:
    """That a graph and its ONNX model say the same of 512 rows and of one; returns the model."""
    feats, model = converted(graph)
    for count in (512, 1, 1, 1):
        rows = some_rows(count, texts, numbers, seed=count)
        rows[0] |= {texts[0]: ""} if count == 1 else {}
        before = run(graph, feed_of(rows, shape), output)
        before = before[:, 1:] if before.shape[1:] == (2,) else before.reshape(-1, 1)
        after = scores(model, feats, raw(rows, feats))
        assert after.shape == before.shape == (count, 1)
        assert np.abs(after - before).max() < TOLERANCE
        assert count == 1 or before.std() > 0.002, "a model that says something"
    return model


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
        column.categorical_column.hash_bucket_size
        for column in deep
        if getattr(column, "categorical_column", None) and "a" in column.name[:1]
    )


def check_filled(graph: Any) -> Any:
    feats, model = converted(graph)
    for count in (512, 1):
        rows = [
            {name: 1.25 if value is None else value for name, value in row.items()}
            for row in some_rows(count, "abcz", "uvw", count)
        ]
        assert np.abs(scores(model, feats, raw(rows, feats)) - run(graph, feed_of(rows, "examples"))).max() < TOLERANCE
    return model


@pytest.mark.parametrize(
    "activation",
    [
        "tanh",
        "elu",
        "selu",
        "relu6",
        "sigmoid",
        "softplus",
        lambda x: tf.nn.leaky_relu(x, 0.3),
        lambda x: tf.square(x),
        lambda x: x,
    ],
)
def test_activations(activation: Callable[[Any], Any] | str) -> None:
    deep = [fc.embedding_column(hashed("a"), 4), fc.numeric_column("u")]
    function = getattr(tf.nn, activation) if isinstance(activation, str) else activation
    check(graph_of(lambda: classifier(features("a", "u"), deep, [], activation=function)), "a", "u")


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
    feats, model = converted(graph)
    assert [number.name for number in feats.numbers] == ["m_1", "m_2", "m_3"]
    rows = some_rows(64, "ab", [number.name for number in feats.numbers])
    feed = feed_of(rows)
    feed["m"] = np.concatenate([feed.pop(name) for name in [number.name for number in feats.numbers]], axis=1)
    for output in (PROBABILITY, "head/predictions/probabilities"):
        before = run(graph, feed, output)
        assert np.abs(scores(model, feats, raw(rows, feats)) - before[:, -1:]).max() < TOLERANCE


def test_plain_lookups_and_a_softmax_over_two_classes() -> None:
    """What Keras users write: the empty text has a hash like any other."""

    def build() -> None:
        inputs = features("ab", "u", (None,))
        table = [v1.get_variable(f"t{i}", [9, 4]) for i in range(2)]
        rows = [
            tf.gather(variable, tf.strings.to_hash_bucket_fast(inputs[name], 9))
            for variable, name in zip(table, "ab", strict=True)
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
        node.input[:] = [names[name.split(":")[0]] + name[len(name.split(":")[0]) :] for name in node.input]
    assert onnx_graph.serialized(converted(graph)[1]) == onnx_graph.serialized(converted(renamed)[1])


# ---------------------------------------------------------------------------------------------------- rows and columns


def test_columns_of_a_row_stand_in_their_natural_order_or_the_one_given() -> None:
    assert ordered(["I10", "I2"], ["C1", "b"], None) == (["I2", "I10"], ["C1", "b"])
    assert ordered(["I10", "I2"], ["C1", "b"], ["label", "I10", "I2", "b", "C1"]) == (["I10", "I2"], ["b", "C1"])
    with pytest.raises(
        RequestError,
        match="x is no column.*I2 is named twice.*number I10 is missing.*category b stands in front of a number",
    ):
        ordered(["I10", "I2"], ["C1", "b"], ["I2", "b", "I2", "x", "C1"])


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
    for column, size, buckets in zip(columns, sizes, ids.T, strict=True):
        wanted = tf.strings.to_hash_bucket_fast(column, size).numpy()
        assert buckets.tolist() == [
            size if not text else bucket for text, bucket in zip(column, wanted.tolist(), strict=True)
        ]
    import pyarrow as pa
    import pyarrow.parquet

    table = pa.table({"n": list(range(len(lines))), **{name: columns[k] for k, name in enumerate("abc")}})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    (stored,) = read_rows(tmp_path / "rows.parquet", numeric=1, categorical=3, buckets=sizes)
    assert (stored.ids == ids).all()
