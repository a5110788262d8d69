"""Int8 weights rounded otherwise than to nearest (GPTQ): as a calibration table holds them, and put into a graph."""

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
    """Differences from rounding to nearest (int8, shaped as the weights) as text: zlib, base64.

    They are 0, 1 and -1 in no order: codes by frequency, or runs, are as short as what a long search for repeats finds.
    """
    packed = []
    for strategy in (zlib.Z_HUFFMAN_ONLY, zlib.Z_RLE):
        stream = zlib.compressobj(9, strategy=strategy)
        packed.append(stream.compress(changes.tobytes()) + stream.flush())
    return base64.b64encode(min(packed, key=len)).decode()


def apply(graph: ir.Graph, roundings: Mapping[str, str]) -> None:
    """Change the weights of int8 layers, named by their operators, by what `encode_rounding` wrote of them.

    Layers that are not int8 here, or have other weights, are passed over, and those that share the weights of a layer
    before them, which are changed once. Raises RequestError for other text.
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
    """The int8 weights of a layer. scale: float32, per tensor or per output channel. initializer: what holds them, for
    other layers too where these share it.
    """

    integers: NDArray[np.int8]
    scale: NDArray[np.float32]
    initializer: ir.Value

    @classmethod
    def of(cls, layer: ir.Node) -> Weights | None:
        """The int8 weights of `layer`; None where it has none, or shares their DequantizeLinear."""
        weight = layer.inputs[1] if len(layer.inputs) > 1 else None
        found, producer = query.dequantized(weight), weight.producer() if weight is not None else None
        initializer = producer.inputs[0] if producer is not None else None
        if found is None or found[0].dtype != np.int8 or weight is None or initializer is None:
            return None
        if query.sole_user(weight) is None:
            return None
        return cls(found[0], found[1], initializer)

    def replace(self, integers: NDArray[np.int8]) -> None:
        """Put other int8 weights in their place in the graph."""
        self.initializer.const_value = ir.tensor(integers, name=self.initializer.name)
