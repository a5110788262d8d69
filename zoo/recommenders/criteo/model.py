"""Wide & Deep (Cheng et al. 2016) in Keras, of rows of the Criteo format."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from pipelines.core.errors import RequestError
from zoo.recommenders.criteo.features import Features
from zoo.recommenders.data.number_parsing import Floats

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault(
    "TF_ENABLE_ONEDNN_OPTS", "0"
)  # oneDNN announces itself on stderr and brings this small model nothing
import keras
import tensorflow as tf

Weights = Mapping[str, Floats]  # by variable path


class Tables(keras.layers.Layer):  # type: ignore[misc]
    """One table a field: int32 [n, fields] -> a list of float32 [n, size]. The variables are called
    `<layer>/C<field>/<variable>`.
    """

    def __init__(self, fields: int, buckets: int, size: int, variable: str, initializer: str, **options: Any) -> None:
        super().__init__(**options)
        self.tables = [_Table((buckets, size), variable, initializer, name=f"C{i + 1}") for i in range(fields)]

    def build(self, shape: Any) -> None:
        """Make the variables."""
        for table in self.tables:
            table.build(shape)

    def call(self, ids: Any) -> Any:
        """Look every field up in its table."""
        return [table(ids[:, i]) for i, table in enumerate(self.tables)]


class _Table(keras.layers.Layer):  # type: ignore[misc]
    """keras.layers.Embedding without its wrap of negative ids, which is half of the operators of a frozen graph."""

    def __init__(self, shape: tuple[int, int], variable: str, initializer: str, **options: Any) -> None:
        super().__init__(**options)
        self.settings = {"shape": shape, "name": variable, "initializer": initializer}

    def build(self, shape: Any) -> None:
        self.table = self.add_weight(**self.settings)

    def call(self, ids: Any) -> Any:
        return tf.gather(self.table, ids)


class Dropout(keras.layers.Dropout):  # type: ignore[misc]
    """keras.layers.Dropout with masks of its own in every process that trains; those of the first are Keras'."""

    def call(self, inputs: Any, training: bool = False) -> Any:
        """Zero a share `rate` of the inputs, scale the others up."""
        if not training or not self.rate:
            return inputs
        rank = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.int32)
        seed = tf.cast(self.seed_generator.next(), tf.int32) + tf.stack([rank, 0])
        return tf.nn.experimental.stateless_dropout(inputs, self.rate, seed)


def build_model(features: Features, config: Any) -> keras.Model:
    """Build the network of Cheng et al. 2016, figure 4, with fresh weights from Keras' global seed.

    Inputs `ids` int32 [n, 26] and `numbers` float32 [n, 13]; output `probability` float32 [n, 1]. Variables:
    `deep/C<i>/embeddings` [buckets, embedding_size], `wide/C<i>/weights` [buckets, 1], `hidden_<k>/kernel` and `/bias`,
    `deep_logit/kernel` and `/bias`.
    """
    fields = features.categorical
    ids = keras.Input((fields,), dtype="int32", name="ids")
    numbers = keras.Input((features.numeric,), dtype="float32", name="numbers")
    embeddings = Tables(fields, features.buckets, config.embedding_size, "embeddings", "uniform", name="deep")(ids)
    hidden = keras.layers.Concatenate(name="features")([*embeddings, numbers])
    for k, size in enumerate(config.hidden):
        hidden = keras.layers.Dense(size, activation="relu", name=f"hidden_{k}")(hidden)
        hidden = Dropout(config.dropout, name=f"dropout_{k}")(hidden)
    deep = keras.layers.Dense(1, name="deep_logit")(hidden)
    wide = Tables(fields, features.buckets, 1, "weights", "zeros", name="wide")(ids)
    logit = keras.layers.Add(name="logit")([deep, *wide])
    return keras.Model([ids, numbers], keras.layers.Activation("sigmoid", name="probability")(logit), name="wide_deep")


def assign(model: keras.Model, weights: Weights) -> None:
    """Set the model's weights by variable path. Raises RequestError naming every weight that is missing or has another
    shape.
    """
    wrong = [
        f"{variable.path} {list(weights[variable.path].shape) if variable.path in weights else 'missing'}, wanted "
        f"{list(variable.shape)}"
        for variable in model.weights
        if variable.path not in weights or weights[variable.path].shape != tuple(variable.shape)
    ]
    if wrong:
        raise RequestError(f"found weights of another model: {'; '.join(wrong)}")
    for variable in model.weights:
        variable.assign(weights[variable.path])


def sort_neurons(model: keras.Model, samples: Mapping[str, Any]) -> None:
    """Number the neurons of every hidden layer by how often they are active on `samples` (model inputs), most often
    first. In place.

    The same function: columns of a kernel and the rows of the next change places together. Zeros of the ReLU then come
    in runs, which the native kernels skip.
    """
    hidden = [each for each in model.layers if each.name.startswith("hidden_")]
    outputs = keras.Model(model.inputs, {each.name: each.output for each in hidden})(
        [samples["ids"], samples["numbers"]], training=False
    )
    for layer, after in itertools.pairwise([*hidden, model.get_layer("deep_logit")]):
        values = np.asarray(outputs[layer.name])
        active = (values > values.max(initial=0) / 512).mean(axis=0)  # what does not round to zero in 8 bits
        order = np.argsort(-active, kind="stable")
        kernel, bias = layer.get_weights()
        layer.set_weights([kernel[:, order], bias[order]])
        kernel, bias = after.get_weights()
        after.set_weights([kernel[order], bias])
