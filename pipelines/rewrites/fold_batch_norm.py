"""Folds batch normalization and other scales and shifts of channels into the weights of a neighbouring layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.graph import edit, query
from pipelines.rewrites.driver import Rewrite

Floats = NDArray[np.float64]
LAYERS = ("Conv", "ConvTranspose", "Gemm", "MatMul")


class FoldBatchNorm(Rewrite):
    """Folds batch normalization, and other constant scales and shifts of channels, into the weights of a layer.

    a (W x + b) + c = (a W) x + (a b + c), and W (a x + c) + b = (W a) x + (b + W c). BatchNormalization is a = gamma /
    sqrt(variance + epsilon), c = beta - a mean. Mul, Div, Add and Sub by a constant of one value per channel (or one in
    all) are the same with c = 0 or a = 1, the form that tf2onnx writes. Computed in float64.

    After a Conv, ConvTranspose, Gemm, or MatMul (a only; `FuseLinear` takes c) it always holds. Before a Conv it holds
    without padding, or if c = 0, because padding puts zeros in place of c. It does not fire after a product of two
    computed values, which may be a Gelu without its last factor, if the value between the two has another reader, if
    weights are not constant, or if the result would leave the range of the weights' type.
    """

    def rewrite(self, model: ir.Model) -> int:
        """Folds operators after and before every layer with constant weights."""
        layers = [
            node for node in model.graph if query.is_op(node, *LAYERS) and query.constant(node.inputs[1]) is not None
        ]
        self._taken = query.used_names(model.graph)
        return sum(self._fold(layer) for layer in layers)

    def _fold(self, layer: ir.Node) -> int:
        count = 0
        while (folded := self._after(layer) or self._before(layer)) is not None:
            layer, count = folded, count + 1
        return count

    def _after(self, layer: ir.Node) -> ir.Node | None:
        """Folds a scale and shift of the output into the layer: a (W x + b) + c = (a W) x + (a b + c)."""
        result = layer.outputs[0]
        weight = _Weights.of(layer)
        if weight is None:
            return None
        affines = ((node, as_affine(node, result, weight.channels, weight.rank)) for node in result.consumers())
        reader, affine = next((pair for pair in affines if pair[1] is not None), (layer, None))
        if affine is None:
            return None
        if query.sole_user(result) is None:
            self.refuse(layer, f"its result is read by others than {reader.op_type} {query.label(reader)}")
            return None
        if layer.op_type == "MatMul" and (affine.shift.any() or not _same_rank(result, reader.outputs[0])):
            return None
        return self._replace(
            [layer, reader], layer, layer.inputs[0], weight.scaled(affine), affine.scale * weight.bias + affine.shift
        )

    def _before(self, layer: ir.Node) -> ir.Node | None:
        """Folds a scale and shift of the input into the layer: W (a x + c) + b = (W a) x + (b + W c)."""
        x = layer.inputs[0]
        weight = _Weights.of(layer)
        before = query.producer(x)
        if (
            x is None
            or weight is None
            or before is None
            or layer.op_type == "ConvTranspose"
            or layer.attributes.get_int("transA", 0) != 0
        ):
            return None
        source = next((value for value in before.inputs if value is not None and query.constant(value) is None), None)
        affine = as_affine(before, source, weight.inputs, weight.rank) if source is not None else None
        if affine is None or source is None or not _same_rank(source, x):
            return None
        constants = [] if query.is_op(before, "BatchNormalization") else map(query.constant, before.inputs)
        if any(constant is not None and constant.size > 1 for constant in constants):
            sizes = query.dimensions(source) or []
            if sizes[-1 if weight.rank is None else 1] != weight.inputs:
                self.refuse(before, "it may spread one channel over several")
                return None
        if query.sole_user(x) is not layer:
            self.refuse(before, "its result has several readers")
            return None
        gate = source.producer()
        if query.is_op(gate, "Mul") and gate is not None and all(query.constant(arg) is None for arg in gate.inputs):
            self.refuse(before, "it may end a Gelu, which engines fuse whole")
            return None
        if affine.shift.any() and (layer.op_type == "MatMul" or pads(layer)):
            self.refuse(
                before,
                f"{layer.op_type} {query.label(layer)} pads its input with zeros"
                if pads(layer)
                else "a MatMul has no bias",
            )
            return None
        array, moved = weight.absorbed(affine)
        return self._replace([before, layer], layer, source, array, weight.bias + moved)

    def _replace(
        self, nodes: list[ir.Node], layer: ir.Node, x: ir.Value | None, array: Floats, bias: Floats
    ) -> ir.Node | None:
        main, name = layer.graph, str(nodes[-1].outputs[0].name)
        old = query.constant(layer.inputs[1])
        assert isinstance(main, ir.Graph) and old is not None
        with np.errstate(over="ignore", invalid="ignore"):
            weights, biases = array.astype(old.dtype), bias.astype(old.dtype)
        if not (np.isfinite(weights).all() and np.isfinite(biases).all()):
            self.refuse(layer, f"the folded weights leave the range of {old.dtype}")
            return None
        inputs: list[ir.Value | None] = [x, edit.initializer(main, f"{name}.weight", weights, self._taken)]
        if layer.op_type != "MatMul" and (len(layer.inputs) > 2 or biases.any()):
            inputs.append(edit.initializer(main, f"{name}.bias", biases, self._taken))
        new = ir.Node("", layer.op_type, inputs, layer.attributes.values(), num_outputs=1, name=layer.name)
        edit.substitute(nodes, new)
        return new


def _same_rank(x: ir.Value, y: ir.Value) -> bool:
    return query.rank(x) is not None and query.rank(x) == query.rank(y)


@dataclass(frozen=True)
class Affine:
    """scale * x + shift, channel by channel, float64 [channels]."""

    scale: Floats  # one value per channel
    shift: Floats


def as_affine(node: ir.Node, x: ir.Value | None, channels: int, rank: int | None) -> Affine | None:
    """Reads a node that computes scale * x + shift channel by channel.

    Args:
        node: Operator.
        x: Input of the function.
        channels: Number of channels.
        rank: Rank of x with channels on axis 1; None: channels are last.

    Returns:
        Scale and shift, or None for another node.
    """
    ones = np.ones(channels)
    if query.is_op(node, "BatchNormalization") and node.inputs[0] is x and rank is not None:
        constants = [query.constant(value) for value in node.inputs[1:5]]
        if (
            node.attributes.get_int("training_mode", 0)
            or len(node.outputs) > 1
            or any(constant is None for constant in constants)
        ):
            return None
        gamma, beta, mean, variance = (np.asarray(constant, np.float64) for constant in constants)
        scale = gamma / np.sqrt(variance + np.float32(node.attributes.get_float("epsilon", 1e-5)))
        return Affine(scale, beta - scale * mean)
    if not query.is_op(node, "Mul", "Div", "Add", "Sub") or len(set(node.inputs)) < 2:
        return None
    first = node.inputs[0] is x
    c = _per_channel(query.constant(node.inputs[1 if first else 0]), channels, rank)
    if c is None or not (first or node.op_type in ("Mul", "Add")):
        return None
    if node.op_type == "Div" and not c.all():
        return None
    return {"Mul": Affine(c, 0 * ones), "Div": Affine(1 / np.where(c, c, 1), 0 * ones)}.get(
        node.op_type, Affine(ones, c if node.op_type == "Add" else -c)
    )


def _per_channel(array: NDArray[Any] | None, channels: int, rank: int | None) -> Floats | None:
    """Returns an array as one value per channel; None if it does not broadcast so."""
    if array is None or array.dtype.kind != "f":
        return None
    if array.size == 1 and array.ndim <= (rank or 1):
        return np.full(channels, array.item(), np.float64)
    if array.size != channels or array.ndim > (rank or array.ndim):
        return None
    axis = array.ndim - 1 if rank is None else array.ndim - rank + 1
    return array.astype(np.float64).ravel() if axis >= 0 and array.shape[axis] == channels else None


@dataclass(frozen=True)
class _Weights:
    """Weights of a layer as float64 [outputs, inputs of the group, ...], its bias, and their storage."""

    layer: ir.Node
    array: Floats
    bias: Floats
    group: int
    rank: int | None  # of what it reads and writes; None where channels lie last

    @property
    def channels(self) -> int:
        """Number of output channels."""
        return len(self.bias)

    @property
    def inputs(self) -> int:
        """Number of input channels of all groups."""
        return int(self.array.shape[1]) * self.group

    @classmethod
    def of(cls, layer: ir.Node) -> _Weights | None:
        """Reads the weights of a layer; None if they are not constant floats."""
        array = query.constant(layer.inputs[1])
        bias_input = layer.inputs[2] if len(layer.inputs) > 2 else None
        bias = query.constant(bias_input)
        if array is None or array.dtype.kind != "f" or (bias_input is not None and bias is None):
            return None
        group, w = layer.attributes.get_int("group", 1), array.astype(np.float64)
        rank: int | None = array.ndim
        if layer.op_type == "ConvTranspose":
            w = w.reshape(group, w.shape[0] // group, *w.shape[1:]).swapaxes(1, 2)
            w = w.reshape(-1, *w.shape[2:])
        elif layer.op_type == "Gemm":
            if any(layer.attributes.get_float(key, 1.0) != 1.0 for key in ("alpha", "beta")):
                return None
            w = query.inputs_first(layer, w).T
        elif layer.op_type == "MatMul":
            if w.ndim != 2:
                return None
            w, rank = w.T, None
        full = np.zeros(len(w)) if bias is None else bias.astype(np.float64).ravel()
        if full.size not in (1, len(w)) or (bias is not None and bias.ndim > 1 and bias.shape[0] > 1):
            return None
        return cls(layer, w, np.broadcast_to(full, len(w)), group, rank)

    def scaled(self, affine: Affine) -> Floats:
        """Returns the weights with scaled outputs, in the layout of the layer."""
        return self._stored(self.array * affine.scale.reshape(-1, *[1] * (self.array.ndim - 1)))

    def absorbed(self, affine: Affine) -> tuple[Floats, Floats]:
        """Returns the weights with scaled inputs, in the layer's layout, and the change of the bias."""
        per_group = (self.group, 1, self.array.shape[1], *[1] * (self.array.ndim - 2))
        w = self.array.reshape(self.group, -1, *self.array.shape[1:])
        moved = (w * affine.shift.reshape(per_group)).reshape(len(self.array), -1).sum(axis=1)
        return self._stored((w * affine.scale.reshape(per_group)).reshape(self.array.shape)), moved

    def _stored(self, w: Floats) -> Floats:
        """Converts [outputs, inputs of the group, ...] to the layout of the layer."""
        if self.layer.op_type == "ConvTranspose":
            w = w.reshape(self.group, -1, *w.shape[1:]).swapaxes(1, 2)
            return w.reshape(-1, *w.shape[2:])
        return (
            w.T
            if self.layer.op_type == "MatMul" or (self.layer.op_type == "Gemm" and not query.is_transposed(self.layer))
            else w
        )


def pads(layer: ir.Node) -> bool:
    """Returns whether a Conv pads its input, or may pad it."""
    automatic = layer.attributes.get_string("auto_pad", "NOTSET")
    return automatic not in ("NOTSET", "VALID") or any(layer.attributes.get_ints("pads", ()))
