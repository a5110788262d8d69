"""The Wide & Deep network of an fp32.onnx as arrays, and of those as torch and TensorFlow have it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.graph import io

Array = NDArray[Any]


class Network(NamedTuple):
    """The weights as arrays: every field's table in one, float32 [fields * buckets, width], and layers of kernel [in,
    out], bias [out].
    """

    table: Array
    wide: Array
    layers: list[tuple[Array, Array]]
    offsets: Array  # int32 [fields]: the first row of each field

    @staticmethod
    def read(path: Path, fields: int) -> Network:
        """The network in an fp32.onnx. Raises RequestError where the graph's initializers are not those of a frozen
        Wide & Deep model.
        """
        found = {name: value.const_value for name, value in io.load(path).graph.initializers.items()}
        weights = {name: value.numpy() for name, value in found.items() if value is not None}
        hidden = sorted(
            (name.split("/")[0] for name in weights if name.startswith("hidden_") and name.endswith("/kernel")),
            key=_number,
        )
        try:
            table, wide = (
                np.concatenate([weights[name.format(field)] for field in range(1, fields + 1)])
                for name in ("deep/C{}/embeddings", "wide/C{}/weights")
            )
            layers = [(weights[f"{name}/kernel"], weights[f"{name}/bias"]) for name in (*hidden, "deep_logit")]
        except KeyError as error:
            raise RequestError(
                f"{path} has no weight {error}; wanted the frozen graph of a Wide & Deep model"
            ) from error
        return Network(table, wide, layers, np.arange(fields, dtype=np.int32) * np.int32(len(table) // fields))


def _number(name: str) -> int:
    return int(name.rpartition("_")[2])


def torch_network(network: Network) -> Any:
    """The network as a torch module in evaluation mode: (ids int32 [n, fields], numbers float32 [n, m]) -> probability
    [n, 1].
    """
    import torch

    def linear(kernel: Array, bias: Array) -> torch.nn.Linear:
        layer = torch.nn.Linear(*kernel.shape)
        layer.weight.data, layer.bias.data = torch.from_numpy(kernel.T.copy()), torch.from_numpy(bias.copy())
        return layer

    class WideDeep(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding.from_pretrained(torch.from_numpy(network.table))  # type: ignore[no-untyped-call]
            self.wide = torch.nn.Embedding.from_pretrained(torch.from_numpy(network.wide))  # type: ignore[no-untyped-call]
            self.register_buffer("offsets", torch.from_numpy(network.offsets))
            layers = [layer for each in network.layers for layer in (linear(*each), torch.nn.ReLU())]
            self.deep = torch.nn.Sequential(*layers[:-1])

        def forward(self, ids: Any, numbers: Any) -> Any:
            rows = ids + self.offsets
            features = torch.cat([self.table(rows).flatten(1), numbers], 1)
            return torch.sigmoid(self.deep(features) + self.wide(rows).sum(1))

    return WideDeep().eval()


def tensorflow_network(network: Network) -> Any:
    """The network as a tf.function (ids int32 [n, fields], numbers float32 [n, m]) -> probability [n, 1], its weights
    constants.
    """
    import tensorflow as tf

    @tf.function(autograph=False)  # type: ignore[untyped-decorator]
    def wide_deep(ids: Any, numbers: Any) -> Any:
        rows = ids + network.offsets
        embeddings = tf.gather(tf.constant(network.table), rows)
        x = tf.concat([tf.reshape(embeddings, [-1, embeddings.shape[1] * embeddings.shape[2]]), numbers], 1)
        for kernel, bias in network.layers[:-1]:
            x = tf.nn.relu(tf.nn.bias_add(tf.matmul(x, kernel), bias))
        kernel, bias = network.layers[-1]
        deep = tf.nn.bias_add(tf.matmul(x, kernel), bias)
        return tf.sigmoid(deep + tf.reduce_sum(tf.gather(tf.constant(network.wide), rows), 1))

    return wide_deep
