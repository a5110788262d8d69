"""Folds the normalization of pixels into the first convolution, which then takes uint8 pixels."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from pipelines.graph import edit, query
from pipelines.rewrites.driver import Rewrite
from pipelines.rewrites.fold_batch_norm import Floats, as_affine, pads

WHITE = 255


class FoldInputNormalization(Rewrite):
    """Folds the normalization of uint8 pixels into the first convolution: Conv(a_c x_p(c) + s_c; W, b) = Conv'(x).

    Applies to a Cast of uint8, then Sub, Div, Mul, Add, batch norm or Gather of channels. Scales and the order of
    channels go into the weights, W'_p(c) = a_c W_c. Let m_c = -s_c / a_c be the means, in pixels, and z the integer in
    their middle. With DequantizeLinear(x; 1, z) before the convolution, the remainder at every tap inside the image is
    the constant r = -sum_c W'_c (m_c - z). Outside it is 0, because padding with 0 follows normalization. Two forms,
    both exact:

    - Conv without padding: Conv(x - z; W', b + sum_taps r).
    - Otherwise one more channel marks the image: k inside and, by the convolution's own padding, 0 outside. Pad(x with
      z + k) -> DequantizeLinear(.; 1, z) -> Conv([W', r / k], b).

    Computed in float64. k is the least integer for which no r / k exceeds the largest weight of its output. In int8 the
    channel then widens no output's scale, and the rounding of r / k has the least weight: the first convolution of
    torchvision's MobileNet V2 has an SQNR of 49 dB on photos; with z = 0 and k = 255 it would be 37, with a bias in
    place of the channel 46, and wrong at the borders. A fourth channel costs OpenVINO 2 to 5% of the first convolution
    and saves onnxruntime 15 to 40%, so it is added also if r = 0.

    The pixels are uint8 behind a DequantizeLinear, as the quantizer takes them, so no scale must be chosen. Does not
    fire if a value in between has another reader, the number of channels is unknown, or the end is no Conv with
    constant weights and one group.
    """

    def rewrite(self, model: ir.Model) -> int:
        """Folds the normalization of every uint8 input that is cast to float."""
        return sum(self._fold(model.graph, node) for node in list(model.graph) if _is_cast_of_uint8(node))

    def _fold(self, main: ir.Graph, cast: ir.Node) -> int:
        image = cast.inputs[0]
        sides = query.dimensions(image)
        assert image is not None
        if sides is None or len(sides) != 4 or sides[1] is None:
            self.refuse(cast, f"the channels of {image.name} are not known")
            return 0
        nodes, normalized = _follow(cast, sides[1])
        last = nodes[-1].outputs[0]
        conv = query.sole_user(last)
        if conv is None:
            self.refuse(nodes[-1], "its result has several readers, or none")
            return 0
        weight = query.constant(conv.inputs[1]) if query.is_op(conv, "Conv") and conv.inputs[0] is last else None
        bias = query.constant(conv.inputs[2]) if len(conv.inputs) > 2 and conv.inputs[2] is not None else np.zeros(1)
        if weight is None or weight.dtype != np.float32 or bias is None or conv.attributes.get_int("group", 1) != 1:
            self.refuse(cast, f"{conv.op_type} {query.label(conv)} is no Conv with constant weights and one group")
            return 0
        self._replace(main, [*nodes, conv], normalized, weight.astype(np.float64), bias.astype(np.float64))
        return 1

    def _replace(
        self, main: ir.Graph, nodes: list[ir.Node], normalized: _Normalized, weight: Floats, bias: Floats
    ) -> None:
        image, conv = nodes[0].inputs[0], nodes[-1]
        assert image is not None
        stem, taken = f"{conv.outputs[0].name}", query.used_names(main)
        zero = normalized.middle()
        folded, remainder = normalized.absorbed(weight, zero)
        if pads(conv):
            level = _level(folded, remainder, zero)
            folded = np.concatenate([folded, remainder[:, None] / level], axis=1)
            widths = edit.initializer(main, f"{stem}.image.widths", np.array([0, 0, 0, 0, 0, 1, 0, 0], np.int64), taken)
            inside = edit.initializer(main, f"{stem}.image.inside", np.array(zero + level, np.uint8), taken)
            pad = edit.node(
                "Pad", [image, widths, inside], f"{stem}.image.padded", dtype=ir.DataType.UINT8, taken=taken
            )
            batch, _, *sides = query.symbolic_shape(image) or []
            pad.outputs[0].shape = ir.Shape([batch, folded.shape[1], *sides])
            main.insert_before(nodes[0], pad)
            image = pad.outputs[0]
        else:
            bias = bias + remainder.sum(axis=(1, 2))
        scale = edit.initializer(main, f"{stem}.image.scale", np.array(1, np.float32), taken)
        point = edit.initializer(main, f"{stem}.image.zero_point", np.array(zero, np.uint8), taken)
        pixels = edit.node(
            "DequantizeLinear", [image, scale, point], f"{stem}.image", dtype=ir.DataType.FLOAT, taken=taken
        )
        pixels.outputs[0].shape = image.shape
        main.insert_before(nodes[0], pixels)
        inputs = [
            pixels.outputs[0],
            edit.initializer(main, f"{stem}.weight", folded.astype(np.float32), taken),
            edit.initializer(main, f"{stem}.bias", np.broadcast_to(bias, len(weight)).astype(np.float32), taken),
        ]
        edit.substitute(nodes, ir.Node("", "Conv", inputs, conv.attributes.values(), num_outputs=1, name=conv.name))


@dataclass(frozen=True)
class _Normalized:
    """Input of a convolution: channel c is scale[c] * pixel[order[c]] + shift[c]."""

    channels: int
    order: np.ndarray[tuple[int], np.dtype[np.int64]]
    scale: Floats
    shift: Floats

    def middle(self) -> int:
        """The zero point: the integer in the middle of the means, 0 to 255."""
        live = self.scale != 0
        means = -self.shift[live] / self.scale[live]
        return int(np.clip(np.rint((means.min() + means.max()) / 2), 0, WHITE)) if live.any() else 0

    def absorbed(self, weight: Floats, zero: int) -> tuple[Floats, Floats]:
        """Returns weights for pixels - zero [outputs, inputs, height, width], and the rest of every tap."""
        folded = np.zeros((len(weight), self.channels, *weight.shape[2:]))
        remainder = np.zeros((len(weight), *weight.shape[2:]))
        for c, source in enumerate(self.order):
            folded[:, source] += weight[:, c] * self.scale[c]
            remainder += weight[:, c] * (self.shift[c] + zero * self.scale[c])
        return folded, remainder


def _level(folded: Floats, remainder: Floats, zero: int) -> int:
    """Returns the smallest k, negative if z + k exceeds 255, for which |rest / k| exceeds no weight maximum."""
    reach, target = (np.abs(weights).reshape(len(weights), -1).max(axis=1) for weights in (folded, remainder))
    live = reach > 0
    # 1e-3 less, for the rounding of float32 means
    least = math.ceil(float((target[live] / reach[live]).max(initial=0)) - 1e-3)
    level = min(max(least, 1), max(zero, WHITE - zero))
    return level if zero + level <= WHITE else -level


def _is_cast_of_uint8(node: ir.Node) -> bool:
    to = node.attributes.get_int("to", 0) if query.is_op(node, "Cast") else 0
    return to == ir.DataType.FLOAT and node.inputs[0] is not None and node.inputs[0].dtype == ir.DataType.UINT8


def _follow(cast: ir.Node, channels: int) -> tuple[list[ir.Node], _Normalized]:
    """Returns `cast` and the normalizing operators after it, and the normalization that they compute."""
    nodes, norm = [cast], _Normalized(channels, np.arange(channels), np.ones(channels), np.zeros(channels))
    while (node := query.sole_user(value := nodes[-1].outputs[0])) is not None:
        if (affine := as_affine(node, value, len(norm.order), 4)) is not None:
            norm = _Normalized(
                channels, norm.order, affine.scale * norm.scale, affine.scale * norm.shift + affine.shift
            )
        elif query.is_op(node, "Gather") and node.inputs[0] is value and node.attributes.get_int("axis", 0) in (1, -3):
            picks = query.constant(node.inputs[1])
            if picks is None or picks.ndim != 1:
                break
            norm = _Normalized(channels, norm.order[picks], norm.scale[picks], norm.shift[picks])
        else:
            break
        nodes.append(node)
    return nodes, norm
