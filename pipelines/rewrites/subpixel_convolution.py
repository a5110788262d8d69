"""Transposed convolutions as convolutions of all phases of a pixel (Shi et al. 2016), which have int8 kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.graph import edit, query
from pipelines.rewrites.driver import Rewrite

UNARY = (
    *("Relu", "Clip", "LeakyRelu", "Elu", "Selu", "Celu", "HardSigmoid", "HardSwish", "Sigmoid", "Tanh", "Softplus"),
    *("Softsign", "Gelu", "Mish", "Swish", "Abs", "Neg", "Exp", "Erf"),
)


class SubpixelConvolution(Rewrite):
    """ConvTranspose(x) = DepthToSpace(Conv(x)), f(DepthToSpace(x)) = DepthToSpace(f(x)).

    Along an axis with stride s and padding p, pixel s q + r of the result is sum_j x[q + (r + p) div s - j] w[s j +
    (r + p) mod s]. A convolution over the pixels that any phase r needs has the outputs of all phases, with zeros where
    a phase needs no pixel; DepthToSpace lays the phases side by side, or Reshape and Transpose where the strides differ
    and the size of the input is known. A stride of 1 needs no DepthToSpace.

    It does not fire for groups, dilations, one-dimensional or padded outputs (`auto_pad`,
    `output_shape`), or weights that are not constant. Functions f of single values move before a DepthToSpace whose
    only reader they are, so that they follow their layer.
    """

    def rewrite(self, model: ir.Model) -> int:
        """Replaces transposed convolutions, then moves functions."""
        self._taken = query.used_names(model.graph)
        nodes = list(model.graph)
        count = sum(self._replace(node) for node in nodes if query.is_op(node, "ConvTranspose"))
        return count + sum(self._sink(node) for node in list(model.graph) if query.is_op(node, "DepthToSpace"))

    def _replace(self, node: ir.Node) -> int:
        weight, bias = (query.constant(node.inputs[index]) if index < len(node.inputs) else None for index in (1, 2))
        attributes, main = node.attributes, node.graph
        if weight is None or (len(node.inputs) > 2 and node.inputs[2] is not None and bias is None):
            self.refuse(node, "its weights are not constant")
            return 0
        strides = tuple(attributes.get_ints("strides", [1, 1]))
        sizes = query.dimensions(node.inputs[0])
        if weight.ndim != 4 or weight.dtype != np.float32:
            self.refuse(node, "it is not over height and width")
            return 0
        if len(set(strides)) != 1 and (not sizes or None in sizes[1:]):
            self.refuse(node, "its strides differ, and the size of its input is unknown")
            return 0
        plain = set(attributes.get_ints("dilations", [1])) == {1} and attributes.get_int("group", 1) == 1
        if not plain or attributes.get_string("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
            self.refuse(node, "it has groups, dilations or automatic padding")
            return 0
        if "output_shape" in attributes:
            self.refuse(node, "its size is given")
            return 0
        assert isinstance(main, ir.Graph)
        top, left, bottom, right = attributes.get_ints("pads", [0, 0, 0, 0])
        added = tuple(attributes.get_ints("output_padding", [0, 0]))
        axes = [
            _axis(size, stride, *pads)
            for size, stride, pads in zip(
                weight.shape[2:], strides, ((top, bottom, added[0]), (left, right, added[1])), strict=True
            )
        ]
        if any(min(pads) < 0 for _, pads, _ in axes):
            self.refuse(node, "its padding exceeds its kernel")
            return 0
        (rows, (up, down), crop_rows), (columns, (before, behind), crop_columns) = axes
        phases = np.einsum("coij,aui,bvj->abocuv", weight.astype(np.float64), rows, columns).astype(np.float32)
        outputs = weight.shape[1]
        phases = phases.reshape(math.prod(strides) * outputs, *phases.shape[3:])
        name, x = str(node.outputs[0].name), node.inputs[0]
        inputs = [x, edit.initializer(main, f"{name}.weight", phases, self._taken)]
        if bias is not None:
            inputs.append(
                edit.initializer(main, f"{name}.bias", np.tile(bias.ravel(), math.prod(strides)), self._taken)
            )
        nodes = [_made("Conv", inputs, f"{name}.phases", self._taken, pads=[up, before, down, behind])]
        nodes[0].name = node.name
        if strides[0] == strides[1] > 1:
            attribute = {"blocksize": strides[0]}
            nodes.append(_made("DepthToSpace", [nodes[-1].outputs[0]], f"{name}.pixels", self._taken, **attribute))
        elif strides[0] != strides[1]:
            assert sizes is not None
            padded = (up + down, before + behind)
            pixels = [
                (size or 0) + pads + 1 - kernel
                for size, pads, kernel in zip(sizes[2:], padded, phases.shape[2:], strict=True)
            ]
            nodes += self._side_by_side(main, nodes[-1].outputs[0], name, strides, outputs, pixels)
        if crop_rows or crop_columns:
            bounds = {
                "starts": [0, 0],
                "ends": [-crop or np.iinfo(np.int64).max for crop in (crop_rows, crop_columns)],
                "axes": [2, 3],
            }
            cut = [
                edit.initializer(main, f"{name}.{key}", np.array(numbers, np.int64), self._taken)
                for key, numbers in bounds.items()
            ]
            nodes.append(_made("Slice", [nodes[-1].outputs[0], *cut], f"{name}.cut", self._taken))
        nodes[-1].outputs[0].shape = node.outputs[0].shape
        ir.convenience.replace_nodes_and_values(main, node, [node], nodes, node.outputs, nodes[-1].outputs)
        return 1

    def _side_by_side(
        self, main: ir.Graph, x: ir.Value, name: str, strides: Sequence[int], outputs: int, pixels: Sequence[int]
    ) -> list[ir.Node]:
        """DepthToSpace of blocks of unequal sides."""
        (rows, columns), (height, width) = strides, pixels
        shapes = [0, rows, columns, outputs, height, width], [0, outputs, rows * height, columns * width]
        first, last = (
            edit.initializer(main, f"{name}.blocks", np.array(shape, np.int64), self._taken) for shape in shapes
        )
        blocks = _made("Reshape", [x, first], f"{name}.phases", self._taken)
        order = _made("Transpose", [blocks.outputs[0]], f"{name}.order", self._taken, perm=[0, 3, 4, 1, 5, 2])
        return [blocks, order, _made("Reshape", [order.outputs[0], last], f"{name}.pixels", self._taken)]

    def _sink(self, node: ir.Node) -> int:
        """f(DepthToSpace(x)) = DepthToSpace(f(x))."""
        count = 0
        while (function := query.sole_user(node.outputs[0])) is not None and function.op_type in UNARY:
            if function.domain not in ("", "ai.onnx") or any(
                value is not None and value.producer() is not None for value in function.inputs[1:]
            ):
                break
            x, y, main = node.inputs[0], function.outputs[0], node.graph
            assert x is not None and isinstance(main, ir.Graph)
            first = ir.Node(
                *(function.domain, function.op_type, [x, *function.inputs[1:]], function.attributes.values()),
                num_outputs=1,
                name=function.name,
            )
            first.outputs[0].name = edit.unique(f"{y.name}.channels", self._taken)
            first.outputs[0].type, first.outputs[0].shape = y.type, x.shape
            main.insert_before(function, first)
            last = ir.Node("", "DepthToSpace", first.outputs, node.attributes.values(), num_outputs=1, name=node.name)
            edit.substitute([node, function], last)
            node, count = last, count + 1
        return count


def _axis(size: int, stride: int, begin: int, end: int, added: int) -> tuple[NDArray[np.float64], tuple[int, int], int]:
    """The phases of an axis.

    Args:
        size: Size of the kernel.
        stride: Stride.
        begin: Padding before the first pixel.
        end: Padding behind the last pixel.
        added: Additional padding of the output.

    Returns:
        For each phase and pixel of the convolution's kernel the weight that it is multiplied by, float64 [stride,
        pixels, size]; the pads of the convolution; and the pixels behind the output.
    """
    taps = [
        (phase, (phase + begin) // stride - index, stride * index + (phase + begin) % stride)
        for phase in range(stride)
        for index in range(-(-size // stride))
        if stride * index + (phase + begin) % stride < size
    ]
    least, most = min(0, *(place for _, place, _ in taps)), max(0, *(place for _, place, _ in taps))
    chosen = np.zeros((stride, most - least + 1, size))
    for phase, pixel, weight in taps:
        chosen[phase, pixel - least, weight] = 1
    grown = added + size - begin - end - stride  # pixels of the output beyond stride times those of the input
    windows = -(-grown // stride)
    return chosen, (-least, windows + most), windows * stride - grown


def _made(op_type: str, inputs: list[ir.Value | None], name: str, taken: set[str], **attributes: object) -> ir.Node:
    made: ir.Node = edit.node(op_type, inputs, name, dtype=ir.DataType.FLOAT, taken=taken, **attributes)
    return made
