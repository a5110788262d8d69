"""Graphs of feature columns that are not mapped: each refusal by name and reason."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from helpers.column_graphs import graph_of, hashed
from helpers.feature_columns import PROBABILITY, classifier, fc, features, tf, v1

from pipelines.core.errors import RequestError
from zoo.recommenders.importers.tensorflow.columns import optimize


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
    with pytest.raises(RequestError, match="no lookup of a hashed category"):
        optimize(graph_of(lambda: classifier(features("", "u"), [fc.numeric_column("u")], [])))
