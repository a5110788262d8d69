"""Rounding of int8 weights otherwise than to nearest (GPTQ): its text in a calibration table, and its application."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.graph import query


def encode_rounding(changes: NDArray[np.int8]) -> str:
    """Encodes differences from rounding to nearest as text (zlib, base64).

    The differences are 0, 1 and -1 without order, so Huffman codes or run lengths are as short as a full search for
    repeats.

    Args:
        changes: Differences, int8, the shape of the weights.

    Returns:
        The text.
    """
    packed = []
    for strategy in (zlib.Z_HUFFMAN_ONLY, zlib.Z_RLE):
        stream = zlib.compressobj(9, strategy=strategy)
        packed.append(stream.compress(changes.tobytes()) + stream.flush())
    return base64.b64encode(min(packed, key=len)).decode()


def apply(graph: ir.Graph, roundings: Mapping[str, str]) -> None:
    """Changes the weights of int8 layers by encoded roundings.

    Layers that are not int8 in this graph, or have other weights, are skipped. Weights that layers share are changed
    once.

    Args:
        graph: Int8 graph; it is changed.
        roundings: Result of `encode_rounding`, by layer name.

    Raises:
        RequestError: A text is invalid.
    """
    changed = set()
    for node in graph:
        text = roundings.get(str(node.name))
        weights = Weights.of(node) if text is not None else None
        if text is None or weights is None or weights.initializer in changed:
            continue
        changed.add(weights.initializer)
        try:
            changes = np.frombuffer(zlib.decompress(base64.b64decode(text, validate=True)), np.int8)
        except (ValueError, zlib.error) as error:
            raise RequestError(
                f"the rounding of {node.name} is broken ({error}); make the calibration table anew with: zoo calibrate"
            ) from error
        if changes.size == weights.integers.size:
            better = weights.integers.astype(np.int16) + changes.reshape(weights.integers.shape)
            weights.replace(np.clip(better, -127, 127).astype(np.int8))


@dataclass(frozen=True)
class Weights:
    """Int8 weights of a layer.

    Attributes:
        integers: The weights.
        scale: Per tensor or per output channel.
        initializer: Value that holds the weights, possibly for several layers.
    """

    integers: NDArray[np.int8]
    scale: NDArray[np.float32]
    initializer: ir.Value

    @classmethod
    def of(cls, layer: ir.Node) -> Weights | None:
        """Reads the int8 weights of a layer.

        Args:
            layer: Operator of an int8 graph.

        Returns:
            The weights, or None if the layer has none or shares their DequantizeLinear.
        """
        weight = layer.inputs[1] if len(layer.inputs) > 1 else None
        found, producer = query.dequantized(weight), weight.producer() if weight is not None else None
        initializer = producer.inputs[0] if producer is not None else None
        if found is None or found[0].dtype != np.int8 or weight is None or initializer is None:
            return None
        if query.sole_user(weight) is None:
            return None
        return cls(found[0], found[1], initializer)

    def replace(self, integers: NDArray[np.int8]) -> None:
        """Replaces the int8 weights in the graph.

        Args:
            integers: New weights of the same shape.
        """
        self.initializer.const_value = ir.tensor(integers, name=self.initializer.name)
