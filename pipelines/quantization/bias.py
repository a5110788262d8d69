"""Biases of int8 layers: their steps, and how a correction is added to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from pipelines.graph import edit, query
from pipelines.quantization.qdq import BIAS
from pipelines.quantization.scales import Array


def correct(main: ir.Graph, shifts: Mapping[str, Sequence[float]]) -> dict[str, int]:
    """Add to the biases of int8 layers, named by their operators, what each output channel lacks, float in the result's
    units.

    Returns {layer: channels that changed}. Layers that are not int8 here, or have another number of channels, are
    passed over.
    """
    changed = {}
    for node in main:
        shift = shifts.get(str(node.name))
        bias = Bias.of(node) if shift is not None and node.op_type in ("Conv", "Gemm", "MatMul") else None
        if bias is not None and len(bias.step) == len(shift or ()):
            steps = bias.whole(np.asarray(shift, np.float64))
            bias.add(steps)
            changed[str(node.name)] = int(np.count_nonzero(steps))
    return changed


@dataclass(frozen=True)
class Bias:
    """The bias of an int8 layer: its steps (float64, one per output channel), and how integers are added to it."""

    layer: ir.Node
    step: Array
    integers: Array | None

    @classmethod
    def of(cls, layer: ir.Node) -> Bias | None:
        """None where the layer has none and can be given none, or shares it."""
        given = layer.inputs[2] if len(layer.inputs) > 2 else None
        if given is not None:
            found, producer = query.dequantized(given), given.producer()
            if found is None or found[0].dtype != np.int32 or producer is None or producer.inputs[0] is None:
                return None
            alone = query.sole_user(given) is layer and len(producer.inputs[0].uses()) == 1
            return cls(layer, found[1].astype(np.float64), found[0]) if alone else None
        weight, x = query.dequantized(layer.inputs[1]), layer.inputs[0]
        source = x.producer() if x is not None else None
        scale = (
            query.constant(source.inputs[1]) if source is not None and source.op_type == "DequantizeLinear" else None
        )
        if layer.op_type == "MatMul" or weight is None or scale is None or scale.size != 1:
            return None
        return cls(layer, (scale.astype(np.float32) * weight[1]).astype(np.float64).ravel(), None)

    def whole(self, shift: Array) -> Array:
        """`shift` in whole steps, int64, the bias staying in the range that the quantizer keeps."""
        least, most = (
            np.subtract(end, 0 if self.integers is None else self.integers.astype(np.int64)) for end in (-BIAS, BIAS)
        )
        return np.clip(np.rint(shift / self.step), np.minimum(least, 0), np.maximum(most, 0)).astype(np.int64)

    def add(self, steps: Array) -> None:
        """Add whole steps to the layer's bias."""
        if not steps.any():
            return
        layer, main = self.layer, self.layer.graph
        assert isinstance(main, ir.Graph)
        if self.integers is not None:
            stored = layer.inputs[2].producer().inputs[0]  # type: ignore[union-attr]
            assert stored is not None
            stored.const_value = ir.tensor((self.integers + steps).astype(np.int32), name=stored.name)
            return
        stem, scale = f"{layer.outputs[0].name}/bias", self.step.astype(np.float32)
        parts = {"quantized": steps.astype(np.int32), "scale": scale, "zero_point": np.zeros(len(scale), np.int32)}
        made = edit.node(
            "DequantizeLinear",
            [edit.initializer(main, f"{stem}.{key}", array) for key, array in parts.items()],
            f"{stem}.dequantized",
            dtype=ir.DataType.FLOAT,
            taken=query.used_names(main),
            axis=0,
        )
        main.insert_before(layer, made)
        layer.resize_inputs(3)
        layer.replace_input_with(2, made.outputs[0])
