"""Int32 biases of int8 layers: their scales, and bias correction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from pipelines.graph import edit, query
from pipelines.quantization.qdq.insertion import MAX_BIAS
from pipelines.quantization.qdq.scales import Array


def apply(graph: ir.Graph, shifts: Mapping[str, Sequence[float]]) -> dict[str, int]:
    """Adds shifts of output channels to the biases of int8 layers.

    Layers that are not int8 in this graph, or have another number of channels, are skipped.

    Args:
        graph: Int8 graph; it is changed.
        shifts: Shift of each output channel by layer name, in units of the layer's output.

    Returns:
        Number of changed channels, by layer name.
    """
    changed = {}
    for node in graph:
        shift = shifts.get(str(node.name))
        bias = Bias.of(node) if shift is not None and node.op_type in ("Conv", "Gemm", "MatMul") else None
        if bias is not None and len(bias.scale) == len(shift or ()):
            whole = bias.quantized(np.asarray(shift, np.float64))
            bias.add(whole)
            changed[str(node.name)] = int(np.count_nonzero(whole))
    return changed


@dataclass(frozen=True)
class Bias:
    """Bias of an int8 layer.

    Attributes:
        layer: The layer.
        scale: float64, one per output channel.
        integers: int32 bias, None if the layer has none yet.
    """

    layer: ir.Node
    scale: Array
    integers: Array | None

    @classmethod
    def of(cls, layer: ir.Node) -> Bias | None:
        """Reads the bias of a layer.

        Args:
            layer: Conv, Gemm or MatMul of an int8 graph.

        Returns:
            The bias, or None if the layer can have none or shares its DequantizeLinear.
        """
        value = layer.inputs[2] if len(layer.inputs) > 2 else None
        if value is not None:
            parts = query.dequantized(value)
            if parts is None or parts[0].dtype != np.int32 or query.sole_user(value) is not layer:
                return None
            return cls(layer, parts[1].astype(np.float64), parts[0])
        weight, x = query.dequantized(layer.inputs[1]), layer.inputs[0]
        source = query.producer(x)
        x_scale = None
        if source is not None and source.op_type == "DequantizeLinear":
            x_scale = query.constant(source.inputs[1])
        if layer.op_type == "MatMul" or weight is None or x_scale is None or x_scale.size != 1:
            return None
        return cls(layer, (x_scale.astype(np.float32) * weight[1]).astype(np.float64).ravel(), None)

    def quantized(self, shift: Array) -> Array:
        """Computes round(shift / scale), limited so that the bias stays within `MAX_BIAS`.

        Args:
            shift: float64 [channels], in units of the output.

        Returns:
            int64 [channels].
        """
        present = 0 if self.integers is None else self.integers.astype(np.int64)
        least, most = np.minimum(-MAX_BIAS - present, 0), np.maximum(MAX_BIAS - present, 0)
        return np.clip(np.rint(shift / self.scale), least, most).astype(np.int64)

    def add(self, whole: Array) -> None:
        """Adds integers to the layer's bias in its graph.

        Args:
            whole: int64 [channels].
        """
        if not whole.any():
            return
        layer, graph = self.layer, self.layer.graph
        assert isinstance(graph, ir.Graph)
        if self.integers is not None:
            producer = layer.inputs[2].producer()  # type: ignore[union-attr]
            assert producer is not None and producer.inputs[0] is not None
            initializer, integers = producer.inputs[0], (self.integers + whole).astype(np.int32)
            if len(initializer.uses()) > 1:  # others that share it have shifts of their own
                name = f"{layer.outputs[0].name}/bias.quantized"
                producer.replace_input_with(0, edit.initializer(graph, name, integers))
            else:
                initializer.const_value = ir.tensor(integers, name=initializer.name)
            return
        stem, scale = f"{layer.outputs[0].name}/bias", self.scale.astype(np.float32)
        parts = {"quantized": whole.astype(np.int32), "scale": scale, "zero_point": np.zeros(len(scale), np.int32)}
        dq = edit.node(
            "DequantizeLinear",
            [edit.initializer(graph, f"{stem}.{key}", array) for key, array in parts.items()],
            f"{stem}.dequantized",
            dtype=ir.DataType.FLOAT,
            taken=query.used_names(graph),
            axis=0,
        )
        graph.insert_before(layer, dq)
        layer.resize_inputs(3)
        layer.replace_input_with(2, dq.outputs[0])
