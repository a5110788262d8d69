"""Roundings of int8 weights that samples chose: as a table carries them, and how they are put into a graph."""

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


def encoded(changes: NDArray[np.int8]) -> str:
    """Steps away from the nearest integers, as text."""
    return base64.b64encode(zlib.compress(changes.tobytes(), 9)).decode()


def apply(main: ir.Graph, changes: Mapping[str, str]) -> None:
    """Move weights of int8 layers, named by their operators, from the nearest integers to those that `encoded` was told
    of.

    Layers that are not int8 here, or have other weights, are passed over. Raises RequestError for text that `encoded`
    did not write.
    """
    for node in main:
        text = changes.get(str(node.name))
        found = Weights.of(node) if text is not None else None
        if text is None or found is None:
            continue
        try:
            steps = np.frombuffer(zlib.decompress(base64.b64decode(text, validate=True)), np.int8)
        except (ValueError, zlib.error) as error:
            raise RequestError(
                f"the rounding of {node.name} is broken ({error}); make the calibration table anew with: zoo calibrate"
            ) from error
        if steps.size == found.integers.size:
            found.replace(
                np.clip(found.integers.astype(np.int16) + steps.reshape(found.integers.shape), -127, 127).astype(
                    np.int8
                )
            )


@dataclass(frozen=True)
class Weights:
    """The weights of an int8 layer: int8, and float32 steps, one in all or one per output channel."""

    integers: NDArray[np.int8]
    step: NDArray[np.float32]
    stored: ir.Value

    @classmethod
    def of(cls, layer: ir.Node) -> Weights | None:
        """None where it has none, or shares them."""
        weight = layer.inputs[1] if len(layer.inputs) > 1 else None
        found, producer = query.dequantized(weight), weight.producer() if weight is not None else None
        stored = producer.inputs[0] if producer is not None else None
        if found is None or found[0].dtype != np.int8 or weight is None or stored is None:
            return None
        if len(stored.uses()) > 1 or query.sole_user(weight) is None:
            return None
        return cls(found[0], found[1], stored)

    def replace(self, integers: NDArray[np.int8]) -> None:
        """Store others."""
        self.stored.const_value = ir.tensor(integers, name=self.stored.name)
