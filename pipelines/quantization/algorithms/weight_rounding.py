"""Rounding of int8 weights otherwise than to nearest (GPTQ): its text in a calibration table, and its application."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.graph import query

MIN_SHARED_WEIGHTS = 64  # from this number of weights on, a byte encodes several; the number of bytes tells which
BASES = {5: 3, 3: 5, 2: 15}  # digits in a byte: their base; the digits are odd numbers of values around 0


def encode_rounding(changes: NDArray[np.int8]) -> str:
    """Encodes differences from rounding to nearest as text (zlib, base64).

    Five differences of 0, 1 and -1 are packed into a byte, as digits of base 3, so that Huffman codes come near their
    entropy; of larger differences a byte holds three or two. They have no order, so that a search for repeats gains
    nothing.

    Args:
        changes: Differences, int8, the shape of the weights.

    Returns:
        The text.
    """
    packed: NDArray[Any] = changes
    most = int(np.abs(changes).max(initial=0))
    for digits, base in BASES.items() if changes.size >= MIN_SHARED_WEIGHTS else ():
        if most <= base // 2:
            values = np.zeros(-(-changes.size // digits) * digits, np.uint8)
            values[: changes.size] = changes.ravel() + base // 2
            packed = (values.reshape(-1, digits) * _powers(digits)).sum(axis=1, dtype=np.uint8)
            break
    streams = []
    for strategy in (zlib.Z_HUFFMAN_ONLY, zlib.Z_RLE):
        stream = zlib.compressobj(9, strategy=strategy)
        streams.append(stream.compress(packed.tobytes()) + stream.flush())
    return base64.b64encode(min(streams, key=len)).decode()


def decode_rounding(text: str, size: int) -> NDArray[np.int8] | None:
    """Decodes `encode_rounding`.

    Args:
        text: The text.
        size: Number of the weights.

    Returns:
        Differences, int8 [size]; None if the text is of another number.

    Raises:
        ValueError: The text is broken.
        zlib.error: The text is broken.
    """
    packed = np.frombuffer(zlib.decompress(base64.b64decode(text, validate=True)), np.uint8)
    if packed.size == size:
        return packed.view(np.int8)
    if size < MIN_SHARED_WEIGHTS:
        return None
    for digits, base in BASES.items():
        if packed.size == -(-size // digits):
            values = packed[:, None] // _powers(digits) % base
            return values.astype(np.int8).ravel()[:size] - np.int8(base // 2)
    return None


def _powers(digits: int) -> NDArray[np.uint8]:
    return (BASES[digits] ** np.arange(digits)).astype(np.uint8)


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
            changes = decode_rounding(text, weights.integers.size)
        except (ValueError, zlib.error) as error:
            raise RequestError(
                f"the rounding of {node.name} is broken ({error}); calibrate again with: zoo calibrate"
            ) from error
        if changes is not None:
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
        parts, producer = query.dequantized(weight), query.producer(weight)
        initializer = producer.inputs[0] if producer is not None else None
        if parts is None or parts[0].dtype != np.int8 or weight is None or initializer is None:
            return None
        if query.sole_user(weight) is None:
            return None
        return cls(parts[0], parts[1], initializer)

    def replace(self, integers: NDArray[np.int8]) -> None:
        """Replaces the int8 weights in the graph.

        Args:
            integers: New weights of the same shape.
        """
        self.initializer.const_value = ir.tensor(integers, name=self.initializer.name)
