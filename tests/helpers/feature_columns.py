"""Graphs as people froze them in TensorFlow 1: `tf.compat.v1.feature_column` columns into a
DNNLinearCombinedClassifier's layers.
"""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from helpers import lazily

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
logging.getLogger("tensorflow").setLevel(logging.ERROR)

REASON = "graphs are read by TensorFlow"
tf = lazily.module("tensorflow", REASON)
v1, fc = lazily.module("tensorflow.compat.v1", REASON), lazily.module("tensorflow.feature_column", REASON)

PROBABILITY = "head/predictions/logistic"


def features(
    categories: Sequence[str], numbers: Sequence[str], shape: Sequence[int | None] = (None, 1)
) -> dict[str, Any]:
    """Placeholders by name."""
    texts = {name: v1.placeholder(tf.string, shape, name=name) for name in categories}
    return texts | {name: v1.placeholder(tf.float32, shape, name=name) for name in numbers}


def examples(columns: Sequence[Any]) -> dict[str, Any]:
    """The features of serialized `tf.train.Example`s, as an estimator's serving input receiver parses them."""
    serialized = v1.placeholder(tf.string, [None], name="input_example_tensor")
    return v1.io.parse_example(serialized, v1.feature_column.make_parse_example_spec(columns))


def classifier(
    inputs: Mapping[str, Any],
    deep: Sequence[Any],
    wide: Sequence[Any],
    hidden: Sequence[int] = (16, 8),
    activation: Callable[[Any], Any] = lambda x: tf.nn.relu(x),
    head: bool = False,
) -> Any:
    """The logits of a wide and deep model over `inputs`, and its probability; head: with the other outputs that an
    estimator has.
    """
    x = v1.feature_column.input_layer(inputs, deep)
    for i, size in enumerate([*hidden, 1]):
        width = int(x.shape[1])
        bound = np.sqrt(6 / width)
        kernel = v1.get_variable(
            f"dense_{i}/kernel", [width, size], initializer=v1.random_uniform_initializer(-bound, bound)
        )
        x = tf.nn.bias_add(
            tf.matmul(x, kernel),
            v1.get_variable(f"dense_{i}/bias", [size], initializer=v1.random_normal_initializer(0, 0.1)),
        )
        x = activation(x) if i < len(hidden) else x
    logits = x + v1.feature_column.linear_model(inputs, wide) if wide else x
    probability = tf.sigmoid(logits, name=PROBABILITY)
    if head:
        both = tf.nn.softmax(tf.concat([tf.zeros_like(logits), logits], -1), name="head/predictions/probabilities")
        tf.as_string(tf.argmax(both, 1), name="head/predictions/classes")
    return probability


def frozen(graph: Any, outputs: Sequence[str] = (PROBABILITY,), seed: int = 0) -> Any:
    """The GraphDef with every variable as a constant: as it starts, and what starts at zero (linear models) at
    random.
    """
    random = np.random.default_rng(seed)
    with v1.Session(graph=graph) as session:
        session.run(v1.global_variables_initializer())
        variables = v1.global_variables()
        zeros = [x for x, values in zip(variables, session.run(variables), strict=True) if not values.any()]
        values = {x.initializer.inputs[1]: random.normal(0, 0.3, x.shape).astype(np.float32) for x in zeros}
        session.run([x.initializer for x in zeros], values)
        return v1.graph_util.convert_variables_to_constants(session, graph.as_graph_def(), list(outputs))


def run(graph_def: Any, feed: Mapping[str, Any], output: str = PROBABILITY) -> np.ndarray:
    """What TensorFlow computes of a frozen graph, by the names of its placeholders; a feed that it has not is left
    out.
    """
    names = {node.name for node in graph_def.node}
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(graph_def, name="")
        with v1.Session(graph=graph) as session:
            return session.run(f"{output}:0", {f"{name}:0": value for name, value in feed.items() if name in names})
