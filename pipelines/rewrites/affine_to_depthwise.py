"""Batch normalization that no neighbouring layer can absorb becomes a depthwise convolution, which can be int8."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from pipelines.graph import edit, query
from pipelines.rewrites.driver import Rewrite
from pipelines.rewrites.fold_batch_norm import Affine, as_affine


class AffineToDepthwise(Rewrite):
    """Turns remaining scales and shifts of channels into a depthwise 1 x 1 Conv: y_c = a_c x_c + s_c.

    Applies to BatchNormalization over [n, C, H, W] that `FoldBatchNorm` could not fold, for example before the first
    layer, after a Concat or a sum (DenseNet, pre-activation ResNets), and to the Sub, Div, Mul and Add that normalize a
    float input before a Conv with padding. An engine runs such operators in float between two quantizations; as a layer
    they are integer arithmetic, and a channel's only weight loses nothing to int8. Computed in float64. Does not fire
    if the number of channels is unknown.
    """

    def rewrite(self, model: ir.Model) -> int:
        """Turns every batch normalization and input normalization of the main graph."""
        return sum(self._turn(model.graph, node) for node in list(model.graph) if node.graph is not None)

    def _turn(self, main: ir.Graph, first: ir.Node) -> int:
        x = next((value for value in first.inputs if value is not None and query.constant(value) is None), None)
        norm = query.is_op(first, "BatchNormalization")
        if x is None or (norm and not query.is_float(x)):  # the weights are float32
            return 0
        sides = query.dimensions(x)
        turned = x.producer()
        image = turned.inputs[0] if turned is not None and query.is_op(turned, "Transpose") else x
        if (
            not (norm or (image is not None and image.is_graph_input()))
            or sides is None
            or len(sides) != 4
            or sides[1] is None
        ):
            return 0
        nodes, whole = self._chain(first, x, sides[1])
        last = nodes[-1].outputs[0] if nodes else x
        if not nodes or not (norm or any(query.is_op(reader, "Conv") for reader in last.consumers())):
            return 0
        name = str(last.name)
        weight = whole.scale.astype(np.float32).reshape(-1, 1, 1, 1)
        values = [edit.initializer(main, f"{name}.scale", weight)]
        values.append(edit.initializer(main, f"{name}.shift", whole.shift.astype(np.float32)))
        attributes = [ir.AttrInt64("group", sides[1]), ir.AttrInt64s("kernel_shape", [1, 1])]
        edit.substitute(nodes, ir.Node("", "Conv", [x, *values], attributes, num_outputs=1, name=nodes[-1].name))
        return 1

    def _chain(self, node: ir.Node, x: ir.Value, channels: int) -> tuple[list[ir.Node], Affine]:
        """Returns the operators from `node` on that scale and shift x, and their combined scale and shift."""
        nodes: list[ir.Node] = []
        whole, affine = Affine(np.ones(channels), np.zeros(channels)), as_affine(node, x, channels, 4)
        while affine is not None:
            nodes.append(node)
            whole = Affine(whole.scale * affine.scale, whole.shift * affine.scale + affine.shift)
            x = node.outputs[0]
            after = query.sole_user(x)
            if after is None:
                break
            node, affine = after, as_affine(after, x, channels, 4)
        return nodes, whole
