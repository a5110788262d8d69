"""Writes convolutions along channels as linear layers, as of efficient channel attention (Wang et al. 2020)."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.graph import edit, query
from pipelines.rewrites.driver import Rewrite

LONGEST = 512  # channels; a matrix of 512 x 512 takes a microsecond in int8


class MixChannels(Rewrite):
    """Conv(x, w) = MatMul(x, B) + b for x [n, 1, channels] and w [1, 1, k], with the band matrix B of w.

    Gates of channels then stay in the order of channels, of which they are factors: native kernels and engines would
    turn them into a line of pixels and back. A Transpose from [n, channels, 1] or back is a Reshape. Does not fire on
    unknown or more than `LONGEST` channels.
    """

    def rewrite(self, model: ir.Model) -> int:
        """Replaces every such Conv of the main graph.

        Args:
            model: Model to change.

        Returns:
            Number of replaced operators.
        """
        convolutions = [node for node in list(model.graph) if query.is_op(node, "Conv")]
        return sum(self._replace(model.graph, node) for node in convolutions)

    def _replace(self, graph: ir.Graph, conv: ir.Node) -> bool:
        sizes, weight = query.dimensions(conv.inputs[0]), query.constant(conv.inputs[1])
        if (
            sizes is None
            or len(sizes) != 3
            or weight is None
            or weight.shape[:2] != (1, 1)
            or weight.dtype != np.float32
        ):
            return False
        bias = query.constant(conv.inputs[2]) if len(conv.inputs) > 2 and conv.inputs[2] is not None else np.zeros(1)
        channels = sizes[2]
        matrix = _band(conv, weight.ravel(), channels) if channels is not None and channels <= LONGEST else None
        if matrix is None or bias is None:
            self.refuse(conv, f"it is over more than {LONGEST} values, or a number that is unknown")
            return False
        taken, name = query.used_names(graph), str(conv.outputs[0].name)
        _reshape(graph, query.producer(conv.inputs[0], "Transpose"), (1, matrix.shape[0]), taken)
        _reshape(graph, query.sole_user(conv.outputs[0]), (matrix.shape[1], 1), taken)
        product = edit.node(
            "MatMul",
            [conv.inputs[0], edit.initializer(graph, f"{name}.band", matrix, taken)],
            f"{name}.product",
            dtype=ir.DataType.FLOAT,
            taken=taken,
        )
        if not bias.any():
            edit.substitute([conv], product)
            return True
        row = edit.initializer(graph, f"{name}.bias", np.full(matrix.shape[1], bias, np.float32), taken)
        graph.insert_before(conv, product)
        edit.substitute([conv], ir.node("Add", [product.outputs[0], row], name=conv.name))
        return True


def _reshape(graph: ir.Graph, turn: ir.Node | None, sizes: tuple[int, int], taken: set[str]) -> None:
    """Replaces a Transpose of channels [n, channels, 1] to a line [n, 1, channels], or back, by a Reshape."""
    if turn is not None and turn.op_type == "Transpose" and list(turn.attributes.get_ints("perm", [])) == [0, 2, 1]:
        shape = edit.initializer(graph, f"{turn.outputs[0].name}.shape", np.array([0, *sizes]), taken)
        edit.substitute([turn], ir.node("Reshape", [turn.inputs[0], shape], name=turn.name))


def _band(conv: ir.Node, weight: NDArray[np.float32], channels: int) -> NDArray[np.float32] | None:
    """B [channels, results]; None where the Conv pads by itself or has no result."""
    stride, dilation = (conv.attributes.get_ints(key, [1])[0] for key in ("strides", "dilations"))
    begin, end = conv.attributes.get_ints("pads", [0, 0])
    results = (channels + begin + end - dilation * (len(weight) - 1) - 1) // stride + 1
    if conv.attributes.get_string("auto_pad", "NOTSET") != "NOTSET" or results < 1:
        return None
    band = np.zeros((channels, results), np.float32)
    for tap, value in enumerate(weight):
        rows = np.arange(results) * stride + tap * dilation - begin
        inside = (rows >= 0) & (rows < channels)
        band[rows[inside], np.flatnonzero(inside)] = value
    return band
