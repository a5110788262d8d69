"""Rewrites activations into the form that engines fuse into the layer before them."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from pipelines.graph import edit, io, query
from pipelines.rewrites.driver import Rewrite

HARD_SWISH = 14  # first opset with HardSwish
LARGEST = float(np.finfo(np.float32).max)  # written by exporters for "no bound"


class FuseActivations(Rewrite):
    """Fuses activations into the one operator that engines know.

        Max(x, c) = Clip(x, c, inf), Min(x, c) = Clip(x, -inf, c), Clip(x, 0, inf) = Relu(x)
        Clip(Clip(x, a, b), c, d) = Clip(x, min(max(a, c), d), min(max(b, c), d)), a Relu being Clip(x, 0, inf)
        Clip(x + 3, 0, 6) / 6 = HardSigmoid(x; 1/6, 1/2), x HardSigmoid(x; 1/6, 1/2) = HardSwish(x)
        Max(x, a x) = LeakyRelu(x; a) for 0 < a < 1

    Bounds are constants of one value, tensors float32. HardSwish needs opset 14: a graph of opset 13 with one becomes
    opset 14, which changed no operator for inference. x Sigmoid(x) does not change: engines fuse the two by themselves,
    and only opset 24 has one operator for it. Does not fire if a value in between has another reader.
    """

    def rewrite(self, model: ir.Model) -> int:
        """Fuses every float32 activation of the main graph."""
        opset = model.opset_imports.get("", io.OPSET)
        nodes = [node for node in model.graph if node.outputs and query.is_float(node.outputs[0])]
        fused = sum(self._clamp(node) or self._leaky(node) or self._hard_sigmoid(node) for node in nodes)
        if opset < HARD_SWISH - 1:
            return fused
        swishes = sum(self._hard_swish(node) for node in list(model.graph) if node.outputs)
        if swishes and opset < HARD_SWISH:
            model.opset_imports[""] = HARD_SWISH
        return fused + swishes

    def _clamp(self, node: ir.Node) -> int:
        clamp = _clamp(node)
        if clamp is None:
            return 0
        x, low, high = clamp
        nodes = [node]
        before = x.producer()
        inner = _clamp(before) if before is not None else None
        if before is not None and inner is not None:
            if query.sole_user(x) is not node:
                self.refuse(node, f"{before.op_type} {query.label(before)} before it has another reader")
            else:
                x, nodes = inner[0], [before, node]
                low, high = (min(max(bound, low), high) for bound in inner[1:])
        op_type = "Relu" if low == 0 and high == math.inf else "Clip"
        if len(nodes) == 1 and node.op_type == op_type:
            return 0
        main, name = node.graph, str(node.outputs[0].name)
        assert isinstance(main, ir.Graph)
        bounds: list[ir.Value | None] = []
        if op_type == "Clip":
            for label, bound in (("min", low), ("max", high)):
                bounds.append(
                    None
                    if math.isinf(bound)
                    else edit.initializer(main, f"{name}.{label}", np.array(bound, np.float32))
                )
        if op_type == "Clip" and bounds[1] is None:
            bounds.pop()
        edit.substitute(nodes, ir.node(op_type, [x, *bounds], name=node.name))
        return 1

    def _leaky(self, node: ir.Node) -> int:
        if not query.is_op(node, "Max") or len(node.inputs) != 2:
            return 0
        for x, scaled in (node.inputs, node.inputs[::-1]):
            product = query.producer(scaled, "Mul")
            if x is None or product is None or x not in product.inputs:
                continue
            slope = query.scalar(next((value for value in product.inputs if value is not x), None))
            if (
                slope is None
                or not 0 < slope < 1
                or query.sole_user(product.outputs[0]) is not node
                or not _same_shape(x, node.outputs[0])
            ):
                continue
            edit.substitute([product, node], ir.node("LeakyRelu", [x], {"alpha": slope}, name=node.name))
            return 1
        return 0

    def _hard_sigmoid(self, node: ir.Node) -> int:
        """Fuses Clip(x + 3, 0, 6) / 6, also with the division last: (y Clip(x + 3, 0, 6)) / 6 = y HardSigmoid(x)."""
        scaled = _times(node)
        if scaled is None or not math.isclose(scaled[1], 1 / 6, rel_tol=1e-6):
            return 0
        value = scaled[0]
        inner, between = value.producer(), None
        if inner is not None and query.is_op(inner, "Mul"):  # x * clip / 6 = x * (clip / 6)
            between = inner
            value = next((factor for factor in inner.inputs if factor is not None and _six(factor) is not None), value)
        clip = _six(value)
        if (
            clip is None
            or query.sole_user(value) is None
            or (between is not None and query.sole_user(between.outputs[0]) is not node)
        ):
            return 0
        add = query.producer(clip.inputs[0], "Add")
        if add is None or query.sole_user(add.outputs[0]) is not clip:
            return 0
        x = next((value for value in add.inputs if query.scalar(value) is None), None)
        three = next((query.scalar(value) for value in add.inputs if query.scalar(value) is not None), None)
        if x is None or three != 3 or not _same_shape(x, value):
            return 0
        sigmoid = ir.node("HardSigmoid", [x], {"alpha": 1 / 6, "beta": 0.5}, name=f"{node.outputs[0].name}.gate")
        if between is None:
            edit.substitute([add, clip, node], sigmoid)
            return 1
        other = next((factor for factor in between.inputs if factor is not value), None)
        main = node.graph
        assert isinstance(main, ir.Graph) and other is not None
        gate = sigmoid.outputs[0]
        gate.name, gate.type, gate.shape = (
            edit.unique(str(sigmoid.name), query.used_names(main)),
            value.type,
            value.shape,
        )
        main.insert_before(node, sigmoid)
        edit.substitute([add, clip, between, node], ir.node("Mul", [other, gate], name=node.name))
        return 1

    def _hard_swish(self, node: ir.Node) -> int:
        if not query.is_op(node, "Mul"):
            return 0
        for x, gate in (node.inputs, node.inputs[::-1]):
            sigmoid = query.producer(gate, "HardSigmoid")
            if gate is None or sigmoid is None or sigmoid.inputs[0] is not x:
                continue
            slopes = [sigmoid.attributes.get_float(key, default) for key, default in (("alpha", 0.2), ("beta", 0.5))]
            if not np.allclose(slopes, (1 / 6, 0.5), rtol=1e-6):
                self.refuse(
                    node, f"its HardSigmoid has alpha {slopes[0]:g} and beta {slopes[1]:g}; HardSwish has 1/6 and 1/2"
                )
            elif query.sole_user(gate) is not node:
                self.refuse(node, "its HardSigmoid has another reader")
            else:
                edit.substitute([sigmoid, node], ir.node("HardSwish", [x], name=node.name))
                return 1
        return 0


def _clamp(node: ir.Node | None) -> tuple[ir.Value, float, float] | None:
    """Returns (x, low, high) if `node` computes min(max(x, low), high) for constants low <= high."""
    x = node.inputs[0] if node is not None and node.inputs else None
    if node is None or x is None:
        return None
    if query.is_op(node, "Relu"):
        return x, 0.0, math.inf
    if query.is_op(node, "Clip") and "min" not in node.attributes and "max" not in node.attributes:
        bounds = [*node.inputs[1:], None, None][:2]
        low, high = (
            None if value is not None and query.scalar(value) is None else query.scalar(value) for value in bounds
        )
        if any(value is not None and query.scalar(value) is None for value in bounds):
            return None
        low, high = -math.inf if low is None else low, math.inf if high is None else high
    elif query.is_op(node, "Max", "Min") and len(node.inputs) == 2:
        x = next((value for value in node.inputs if query.constant(value) is None), None)
        other = next((value for value in node.inputs if value is not x), None)
        bound = query.scalar(other)
        if x is None or bound is None or not _same_shape(x, node.outputs[0]):
            return None
        low, high = (bound, math.inf) if node.op_type == "Max" else (-math.inf, bound)
    else:
        return None
    low, high = -math.inf if low <= -LARGEST else low, math.inf if high >= LARGEST else high
    return (x, low, high) if low <= high else None


def _six(value: ir.Value) -> ir.Node | None:
    """Returns the Clip(.., 0, 6) that computes `value`."""
    node = value.producer()
    clamp = _clamp(node)
    return node if clamp is not None and clamp[1:] == (0.0, 6.0) else None


def _times(node: ir.Node) -> tuple[ir.Value, float] | None:
    """Returns (x, c) if `node` computes c x for a constant c."""
    if not query.is_op(node, "Mul", "Div"):
        return None
    first, second = node.inputs
    c = query.scalar(second)
    if c is not None and first is not None and _same_shape(first, node.outputs[0]):
        return (first, c) if node.op_type == "Mul" else ((first, 1 / c) if c else None)
    c = query.scalar(first)
    return (
        (second, c)
        if c is not None and second is not None and node.op_type == "Mul" and _same_shape(second, node.outputs[0])
        else None
    )


def _same_shape(a: ir.Value, b: ir.Value) -> bool:
    """Whether `b`, computed from `a` and a constant of one element, has the rank of `a`: its shape is then the same."""
    return query.rank(a) is not None and query.rank(a) == query.rank(b)
