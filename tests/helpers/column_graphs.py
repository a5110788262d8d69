"""Graphs of feature columns, rows for them, and their scores before and after."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnxruntime as ort

from helpers.feature_columns import fc, frozen, tf, v1
from pipelines.graph import io as onnx_graph
from zoo.recommenders.data.features import Features
from zoo.recommenders.data.schema import Column
from zoo.recommenders.importers.tensorflow.columns import optimize
from zoo.recommenders.importers.tensorflow.feature_schema import map_features
from zoo.recommenders.importers.tensorflow.importing import network_to_onnx

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
        examples = []
        for row in rows:
            example = tf.train.Example()
            for name, value in row.items():
                if isinstance(value, str):
                    example.features.feature[name].bytes_list.value.extend([value.encode()] if value else [])
                elif value is not None:
                    example.features.feature[name].float_list.value.append(value)
            examples.append(example.SerializeToString())
        return {"input_example_tensor": np.array(examples, object)}
    feed = {}
    for name in rows[0]:
        text = isinstance(rows[0][name], str)
        values = np.array([row[name] if text else row[name] or 0 for row in rows], object if text else np.float32)
        feed[name] = values if shape == "[n]" else values[:, None]
    return feed


def names_of(known: Features) -> list[str]:
    """The columns of a row without its label."""
    return [column.name for column in known.raw.schema.columns if column.kind != "label"]


def raw(rows: Rows, known: Features) -> list[str]:
    """The rows as lines of a log."""
    return ["\t".join("" if row[name] is None else str(row[name]) for name in names_of(known)) for row in rows]


def converted(graph: Any, columns: Sequence[str] | None = None) -> tuple[Features, Any]:
    """Features whose numbers have a range of their own, and the ONNX model of a graph."""
    network = optimize(graph)
    features = map_features(network, columns)
    places = {column.name: index for index, column in enumerate(features.numbers)}

    def ranged(column: Column) -> Column:
        if column.kind != "number":
            return column
        i = places[column.name]
        return dataclasses.replace(column, encoding={**column.encoding, "minimum": -0.5 * i, "maximum": 1.0 + i})

    columns_of = tuple(map(ranged, features.schema.columns))
    features = Features(dataclasses.replace(features.schema, columns=columns_of))
    return features, network_to_onnx(network, features)


def scores(model: Any, known: Features, lines: Sequence[str]) -> np.ndarray:
    session = ort.InferenceSession(onnx_graph.serialized(model), providers=["CPUExecutionProvider"])
    return np.concatenate([session.run(None, known.encode(rows))[0] for rows in known.read(list(lines))])


def normalized(x: Any) -> Any:
    return (tf.math.log1p(x) - 1.5) / 0.7
