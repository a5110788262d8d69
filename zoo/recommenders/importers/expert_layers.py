"""Graph rewrite: merges the mixture of experts in the cross layers of DCN V2 (Wang et al. 2021, section 3.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.graph import edit, query
from pipelines.rewrites.driver import Rewrite

Array = NDArray[Any]


@dataclass(frozen=True)
class Layer:
    """Linear layer x weight + bias.

    Attributes:
        x: Input.
        weight: float32 [inputs, outputs].
        bias: float32 [outputs].
    """

    x: ir.Value
    weight: Array
    bias: Array


@dataclass(frozen=True)
class Expert:
    """Expert x_0 (U tanh(C tanh(V x_l)) + b) with its gate.

    Attributes:
        x0: x_0.
        x: x_l.
        v: V, [inputs, rank].
        c: C, [rank, rank].
        u: U, [rank, outputs].
        bias: b, [outputs].
        weights: Softmax over the experts.
        place: Index of the expert in the softmax.
    """

    x0: ir.Value
    x: ir.Value
    v: Array
    c: Array
    u: Array
    bias: Array
    weights: ir.Value
    place: int

    def is_parallel_to(self, other: Expert) -> bool:
        """Whether two experts read the same values and have the same size and bias.

        Args:
            other: Another expert.

        Returns:
            Whether they can be merged.
        """
        same = self.x0 is other.x0 and self.x is other.x and self.weights is other.weights
        return same and self.c.shape == other.c.shape and np.array_equal(self.bias, other.bias)


class MergeExperts(Rewrite):
    """Merges experts: sum_e softmax(G x)_e x_0 (U_e tanh(C_e tanh(V_e x)) + b) = x_0 (U (g tanh(C tanh(V x))) + b).

    V and U concatenate the matrices of all experts, C is block-diagonal, and g repeats the gate of every expert for
    each of its columns. The weights of a softmax sum to 1, so a bias shared by all experts is added once. Does not fire
    if experts read different values, have different biases, or are not all of the softmax.
    """

    def rewrite(self, model: ir.Model) -> int:
        """Merges the experts of every such sum.

        Args:
            model: Model to rewrite in place.

        Returns:
            Number of sums.
        """
        return sum(self._merge(model, node) for node in list(model.graph) if node.op_type == "Add")

    def _merge(self, model: ir.Model, node: ir.Node) -> int:
        user = query.sole_user(node.outputs[0])
        if user is not None and user.op_type == "Add" and any(map(_expert, user.inputs)):
            return 0  # part of a longer sum
        terms = _terms(node.outputs[0])
        experts = [expert for expert in map(_expert, terms) if expert is not None]
        if len(experts) < len(terms) or len(experts) < 2:
            return 0
        first, gates = experts[0], _gates(experts[0].weights)
        if gates is None or sorted(expert.place for expert in experts) != list(range(gates.weight.shape[1])):
            self.refuse(node, "experts are not all that a softmax of layers weighs")
            return 0
        if gates.x is not first.x or any(not expert.is_parallel_to(first) for expert in experts):
            self.refuse(node, "experts read different values, or have biases or sizes of their own")
            return 0
        experts.sort(key=lambda expert: expert.place)
        main, name, rank = model.graph, str(node.outputs[0].name), len(first.c)
        taken = query.used_names(main)
        diagonal = np.zeros((rank * len(experts),) * 2, np.float32)
        for index, term in enumerate(experts):
            diagonal[index * rank : (index + 1) * rank, index * rank : (index + 1) * rank] = term.c
        made: list[ir.Node] = []

        def add(op: str, inputs: Sequence[ir.Value], kind: str, **more: Any) -> ir.Value:
            made.append(edit.node(op, list(inputs), f"{name}.{kind}", dtype=ir.DataType.FLOAT, taken=taken, **more))
            return made[-1].outputs[0]

        def weight(array: Array, kind: str) -> ir.Value:
            return edit.initializer(main, f"{name}.{kind}", np.ascontiguousarray(array, np.float32), taken)

        v, u = np.concatenate([expert.v for expert in experts], 1), np.concatenate([expert.u for expert in experts])
        inner = add("Tanh", [add("MatMul", [first.x, weight(v, "V")], "down")], "down.tanh")
        inner = add("Tanh", [add("MatMul", [inner, weight(diagonal, "C")], "inner")], "inner.tanh")
        logits = [first.x, weight(gates.weight, "G"), weight(gates.bias, "gates.bias")]
        shares = add("Softmax", [add("Gemm", logits, "gates")], "shares", axis=1)
        spread = add("MatMul", [shares, weight(np.repeat(np.eye(len(experts)), rank, axis=1), "spread")], "weights")
        gated = add("Mul", [inner, spread], "gated")
        change = add("Gemm", [gated, weight(u, "U"), weight(first.bias, "bias")], "up")
        result = add("Mul", [first.x0, change], "cross")
        main.insert_before(node, made)
        node.outputs[0].replace_all_uses_with(result)
        return 1


def _terms(value: ir.Value | None) -> list[ir.Value | None]:
    node = query.producer(value, "Add")
    return [value] if node is None else [term for x in node.inputs for term in _terms(x)]


def _layer(value: ir.Value | None) -> Layer | None:
    node = query.producer(value, "Gemm", "MatMul")
    weight = query.constant(node.inputs[1]) if node is not None else None
    if node is None or weight is None or weight.ndim != 2 or node.inputs[0] is None:
        return None
    if node.attributes.get_int("transA", 0) or any(
        node.attributes.get_float(key, 1.0) != 1 for key in ("alpha", "beta")
    ):
        return None
    weight = query.inputs_first(node, weight)
    bias = query.constant(node.inputs[2]) if len(node.inputs) > 2 else np.zeros(weight.shape[1], np.float32)
    return None if bias is None else Layer(node.inputs[0], weight, np.broadcast_to(bias.ravel(), weight.shape[1]))


def _gates(value: ir.Value) -> Layer | None:
    """Returns the operand of a softmax as one layer: layers of one column that are concatenated, or one layer."""
    node = query.producer(value, "Softmax")
    joined = query.producer(node.inputs[0], "Concat") if node is not None else None
    if node is None or joined is None:
        return None if node is None else _layer(node.inputs[0])
    layers = [layer for layer in map(_layer, joined.inputs) if layer is not None]
    if len(layers) < len(joined.inputs) or any(layer.x is not layers[0].x for layer in layers):
        return None
    return Layer(
        layers[0].x,
        np.concatenate([layer.weight for layer in layers], 1),
        np.concatenate([layer.bias for layer in layers]),
    )


def _expert(value: ir.Value | None) -> Expert | None:
    product = query.producer(value, "Mul")
    if product is None:
        return None
    for scaled, share in (product.inputs, reversed(product.inputs)):
        entry, inner = query.producer(share, "Gather"), query.producer(scaled, "Mul")
        place = query.constant(entry.inputs[1]) if entry is not None else None
        if entry is None or inner is None or place is None or place.size != 1 or entry.inputs[0] is None:
            continue
        for x0, up in (inner.inputs, reversed(inner.inputs)):
            u = _layer(up)
            c = _behind_tanh(u)
            v = _behind_tanh(c)
            if x0 is None or u is None or c is None or v is None or c.bias.any() or v.bias.any():
                continue
            return Expert(x0, v.x, v.weight, c.weight, u.weight, u.bias, entry.inputs[0], int(place.item()))
    return None


def _behind_tanh(layer: Layer | None) -> Layer | None:
    tanh = query.producer(layer.x, "Tanh") if layer is not None else None
    return None if tanh is None else _layer(tanh.inputs[0])
