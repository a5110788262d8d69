"""Expands operators that ONNX Runtime's optimizer fuses (domain com.microsoft) into the ONNX operators they compute."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir

from pipelines.graph import edit, io, query
from pipelines.rewrites.driver import Rewrite

DOMAIN = "com.microsoft"
LAYER_NORM, GELU = 17, 20  # first opsets with LayerNormalization and Gelu
TRILU = 14
ACTIVATIONS: dict[str, tuple[str, ...]] = {  # attributes that the parameters of FusedConv and FusedGemm become
    **{"Relu": (), "Sigmoid": (), "Tanh": (), "Softplus": (), "Softsign": ()},
    **{"LeakyRelu": ("alpha",), "HardSigmoid": ("alpha", "beta"), "Elu": ("alpha",), "Clip": ("min", "max")},
}
Inputs = list[ir.Value | None]


class ExpandFused(Rewrite):
    """Expands what ONNX Runtime's optimizer fused, so that the layers in it become int8.

        FusedMatMul(A, B; alpha) = alpha A B, either transposed; FusedGemm, FusedConv = activation(Gemm or Conv + Z)
        BiasGelu(x, b) = Gelu(x + b); FastGelu is its tanh form, QuickGelu(x) = x Sigmoid(alpha x)
        SkipLayerNormalization(x, s, g, b, c) = LayerNormalization(x + c + s; g, b), also the simplified one (RMS)
        EmbedLayerNormalization = LayerNormalization of the sum of the lookups of words, positions and segments
        Attention(x, W, b) = Softmax(Q K^T / sqrt(d) + mask) V for Q, K, V = x W + b; MultiHeadAttention of Q, K, V

    Engines fuse the float remainder again when they open the file. An operator stays as it is, with the reason noted,
    where it has a cache (past, present), a mask of sequence lengths, packed inputs, weights or shapes that are unknown,
    or outputs of its inner values.
    """

    def rewrite(self, model: ir.Model) -> int:
        """Expands every fused operator of the main graph."""
        count = 0
        for node in [node for node in model.graph if node.domain == DOMAIN and node.op_type in RULES]:
            expansion = _Expansion(model, node)
            try:
                results = RULES[node.op_type](expansion, node)
            except _Unsupported as error:
                self.refuse(node, f"{node.op_type} stays as it is: {error}")
                expansion.discard()
                continue
            expansion.replace(results)
            count += 1
        return count


class _Unsupported(Exception):
    """An operator has a form that no rule expands."""


class _Expansion:
    """Nodes that replace one fused operator."""

    def __init__(self, model: ir.Model, node: ir.Node) -> None:
        self.graph, self.node = model.graph, node
        self.opset = model.opset_imports.get("", io.OPSET)
        self.stem, self.taken = str(node.outputs[0].name), query.used_names(model.graph)
        self.nodes: list[ir.Node] = []
        self.constants: list[ir.Value] = []

    def input(self, position: int) -> ir.Value | None:
        """Returns an input of the operator, None if it is left out."""
        return self.node.inputs[position] if position < len(self.node.inputs) else None

    def need(self, position: int) -> ir.Value:
        """Returns an input that must be there."""
        if (value := self.input(position)) is None:
            raise _Unsupported(f"input {position} is missing")
        return value

    def refuse_inputs(self, *positions: int) -> None:
        """Raises `_Unsupported` if one of these inputs is there."""
        if any(self.input(position) is not None for position in positions):
            raise _Unsupported("it has a cache or a further input")

    def refuse_outputs(self, *positions: int) -> None:
        """Raises `_Unsupported` if one of these outputs is read."""
        outputs = [self.node.outputs[position] for position in positions if position < len(self.node.outputs)]
        if any(value.uses() or value.is_graph_output() for value in outputs):
            raise _Unsupported("an inner value of it is read")

    def constant(self, name: str, array: Any) -> ir.Value:
        """Adds an initializer."""
        value = edit.initializer(self.graph, f"{self.stem}.{name}", np.asarray(array), self.taken)
        self.constants.append(value)
        return value

    def real(self, name: str, number: float) -> ir.Value:
        """Adds a float32 scalar."""
        return self.constant(name, np.float32(number))

    def add(
        self, op: str, inputs: Inputs, name: str, dtype: ir.DataType = ir.DataType.FLOAT, **attributes: Any
    ) -> ir.Value:
        """Adds a node with one output."""
        node = edit.node(op, inputs, f"{self.stem}.{name}", dtype=dtype, taken=self.taken, **attributes)
        self.nodes.append(node)
        return node.outputs[0]

    def number(self, key: str, default: float) -> float:
        """Returns a float attribute."""
        return self.node.attributes.get_float(key, default)

    def whole(self, key: str, default: int = 0) -> int:
        """Returns an integer attribute."""
        return self.node.attributes.get_int(key, default)

    def discard(self) -> None:
        """Removes the initializers of an expansion that is not used."""
        for value in self.constants:
            self.graph.initializers.pop(str(value.name), None)

    def replace(self, results: list[ir.Value | None]) -> None:
        """Puts the nodes in place of the operator; `results` are its outputs, None for unread ones."""
        pairs = [(old, new) for old, new in zip(self.node.outputs, results, strict=False) if new is not None]
        for old, new in pairs:
            new.type, new.shape = old.type or new.type, old.shape
        for part in self.nodes:
            if part.op_type in ("MatMul", "Gemm", "Conv") and query.constant(part.inputs[1]) is not None:
                part.name = part.name if self.node.name == "" else edit.unique(str(self.node.name), self.taken)
        old_values, new_values = [old for old, _ in pairs], [new for _, new in pairs]
        ir.convenience.replace_nodes_and_values(self.graph, self.node, [self.node], self.nodes, old_values, new_values)


def _matmul(e: _Expansion, node: ir.Node) -> list[ir.Value | None]:
    if e.whole("transBatchA") or e.whole("transBatchB"):
        raise _Unsupported("its batch axes are transposed")
    alpha, factors = e.number("alpha", 1.0), []
    for position, key in enumerate(("transA", "transB")):
        value = e.need(position)
        array = query.constant(value)
        turned = bool(e.whole(key))
        if array is not None and array.ndim > 1 and (turned or (position == 1 and alpha != 1)):
            array = array.swapaxes(-1, -2) if turned else array
            if position == 1 and alpha != 1:
                array, alpha = (array * np.float32(alpha)).astype(array.dtype), 1.0
            value = e.constant(f"factor{position}", np.ascontiguousarray(array))
        elif turned:
            rank = query.rank(value)
            if rank is None:
                raise _Unsupported("the rank of a factor is unknown")
            if rank > 1:
                value = e.add("Transpose", [value], f"turned{position}", perm=[*range(rank - 2), rank - 1, rank - 2])
        factors.append(value)
    y = e.add("MatMul", [*factors], "product")
    return [y if alpha == 1 else e.add("Mul", [y, e.real("alpha", alpha)], "scaled")]


def _activated(e: _Expansion, y: ir.Value, name: str, parameters: list[float]) -> ir.Value:
    if not name:
        return y
    if name not in ACTIVATIONS:
        raise _Unsupported(f"its activation {name} is unknown")
    keys = ACTIVATIONS[name]
    if name == "Clip":
        bounds = [e.real(key, number) for key, number in zip(keys, parameters, strict=False)]
        return e.add("Clip", [y, *bounds], "activated")
    attributes: dict[str, Any] = dict(zip(keys, parameters, strict=False))
    return e.add(name, [y], "activated", **attributes)


def _gemm(e: _Expansion, node: ir.Node) -> list[ir.Value | None]:
    keep = {key: node.attributes[key].value for key in ("alpha", "beta", "transA", "transB") if key in node.attributes}
    y = e.add("Gemm", [*node.inputs], "product", **keep)
    parameters = [e.number(f"activation_{key}", math.nan) for key in ("alpha", "beta", "gamma")]
    numbers = [number for number in parameters if not math.isnan(number)]
    return [_activated(e, y, node.attributes.get_string("activation", ""), numbers)]


def _conv(e: _Expansion, node: ir.Node) -> list[ir.Value | None]:
    keep = {key: attribute.value for key, attribute in node.attributes.items() if not key.startswith("activation")}
    y = e.add("Conv", [*node.inputs[:3]], "product", **keep)
    if (other := e.input(3)) is not None:
        y = e.add("Add", [y, other], "sum")
    parameters = list(node.attributes.get_floats("activation_params", []))
    return [_activated(e, y, node.attributes.get_string("activation", ""), parameters)]


def _gelu(e: _Expansion, node: ir.Node) -> list[ir.Value | None]:
    x = e.need(0)
    if (bias := e.input(1)) is not None:
        x = e.add("Add", [x, bias], "biased")
    tanh = node.op_type == "FastGelu"
    if e.opset >= GELU:
        return [e.add("Gelu", [x], "gelu", approximate="tanh" if tanh else "none")]
    if tanh:
        cube = e.add("Mul", [e.add("Mul", [x, x], "square"), x], "cube")
        inner = e.add("Add", [x, e.add("Mul", [cube, e.real("third", 0.044715)], "curved")], "inner")
        inner = e.add("Mul", [inner, e.real("slope", math.sqrt(2 / math.pi))], "argument")
        inner = e.add("Tanh", [inner], "tanh")
    else:
        inner = e.add("Erf", [e.add("Div", [x, e.real("root", math.sqrt(2))], "argument")], "erf")
    gate = e.add("Add", [inner, e.real("one", 1)], "gate")
    return [e.add("Mul", [e.add("Mul", [x, gate], "gated"), e.real("half", 0.5)], "gelu")]


def _quick_gelu(e: _Expansion, node: ir.Node) -> list[ir.Value | None]:
    x, alpha = e.need(0), e.number("alpha", 1.702)
    inner = x if alpha == 1 else e.add("Mul", [x, e.real("alpha", alpha)], "argument")
    return [e.add("Mul", [x, e.add("Sigmoid", [inner], "gate")], "gelu")]


def _normalized(e: _Expansion, x: ir.Value, scale: ir.Value, shift: ir.Value | None, simplified: bool) -> ir.Value:
    """LayerNormalization over the last axis; without mean and shift if `simplified`."""
    epsilon = e.number("epsilon", 1e-12 if e.node.op_type.startswith(("Skip", "Embed")) else 1e-5)
    if not simplified and e.opset >= LAYER_NORM:
        return e.add("LayerNormalization", [x, scale, shift], "normalized", axis=-1, epsilon=epsilon)
    last = e.constant("axis", np.array([-1]))

    def mean(value: ir.Value, name: str) -> ir.Value:
        if e.opset >= 18:
            return e.add("ReduceMean", [value, last], name)
        return e.add("ReduceMean", [value], name, axes=[-1])

    x = x if simplified else e.add("Sub", [x, mean(x, "mean")], "centred")
    variance = mean(e.add("Mul", [x, x], "squares"), "variance")
    deviation = e.add("Sqrt", [e.add("Add", [variance, e.real("epsilon", epsilon)], "padded")], "deviation")
    y = e.add("Mul", [e.add("Div", [x, deviation], "unit"), scale], "scaled")
    return y if shift is None else e.add("Add", [y, shift], "shifted")


def _skip_norm(e: _Expansion, node: ir.Node) -> list[ir.Value | None]:
    simplified = node.op_type.startswith("SkipSimplified")
    e.refuse_outputs(1, 2)
    x, skip, scale = (e.need(position) for position in range(3))
    shift, bias = (None, e.input(3)) if simplified else (e.input(3), e.input(4))
    if bias is not None:
        x = e.add("Add", [x, bias], "biased")
    total = e.add("Add", [x, skip], "sum")
    return [_normalized(e, total, scale, shift, simplified), None, None, total]


def _norm(e: _Expansion, node: ir.Node) -> list[ir.Value | None]:
    e.refuse_outputs(1, 2)
    rank, axis = query.rank(e.need(0)), e.whole("axis", -1)
    if axis != -1 and (rank is None or axis != rank - 1):
        raise _Unsupported("it normalizes several axes")
    simplified = node.op_type.startswith("Simplified")
    return [_normalized(e, e.need(0), e.need(1), None if simplified else e.input(2), simplified)]


def _embeddings(e: _Expansion, node: ir.Node) -> list[ir.Value | None]:
    mask, tokens = e.input(7), None
    if mask is not None:
        tokens = e.add(
            "ReduceSum", [mask, e.constant("mask.axes", np.array([1]))], "tokens", ir.DataType.INT32, keepdims=0
        )
    else:
        e.refuse_outputs(1)
    ids, words, places, scale = e.need(0), e.need(2), e.need(3), e.need(5)
    total = e.add("Gather", [words, ids], "words")
    index = e.input(8)
    if index is None:
        size = e.add("Shape", [ids], "shape", ir.DataType.INT64)
        zero, one, two = (e.constant(f"at{number}", np.array([number])) for number in (0, 1, 2))
        length = e.add("Slice", [size, one, two], "length", ir.DataType.INT64)
        rows = e.add("Slice", [places, zero, length], "positions")
    else:
        rows = e.add("Gather", [places, index], "positions")
    total = e.add("Add", [total, rows], "placed")
    segments, kinds = e.input(1), e.input(4)
    if segments is not None and kinds is not None:
        total = e.add("Add", [total, e.add("Gather", [kinds, segments], "segments")], "sum")
    return [_normalized(e, total, scale, e.input(6), False), tokens, total]


def _attention(e: _Expansion, node: ir.Node) -> list[ir.Value | None]:
    e.refuse_inputs(4, 6)
    e.refuse_outputs(1)
    if e.whole("do_rotary"):
        raise _Unsupported("it rotates positions")
    x, weights, biases = e.need(0), query.constant(e.need(1)), e.input(2)
    bias = query.constant(biases)
    if weights is None or (biases is not None and bias is None):
        raise _Unsupported("its weights are not constant")
    sizes = list(node.attributes.get_ints("qkv_hidden_sizes", ())) or [weights.shape[1] // 3] * 3
    ends = np.cumsum(sizes)[:2]
    parts: list[ir.Value] = []
    for index, name in enumerate("qkv"):
        weight = np.ascontiguousarray(np.split(weights, ends, axis=1)[index])
        part = e.add("MatMul", [x, e.constant(f"{name}.weight", weight)], f"{name}.product")
        if bias is not None:
            part = e.add("Add", [part, e.constant(f"{name}.bias", np.split(bias, ends)[index])], f"{name}.biased")
        parts.append(part)
    return [_heads(e, parts, sizes, e.input(3), e.input(5))]


def _multi_head(e: _Expansion, node: ir.Node) -> list[ir.Value | None]:
    e.refuse_inputs(6, 7, 8, 9)
    e.refuse_outputs(1, 2, 3)
    parts = [e.need(position) for position in range(3)]
    shapes = [query.dimensions(part) for part in parts]
    sizes = [shape[2] for shape in shapes if shape is not None and len(shape) == 3 and shape[2] is not None]
    if len(sizes) < 3:
        raise _Unsupported("its queries, keys and values are packed or of unknown size")
    if (bias := e.input(3)) is not None:
        array = query.constant(bias)
        if array is None:
            raise _Unsupported("its bias is not constant")
        pieces = np.split(array, np.cumsum(sizes)[:2])
        parts = [
            e.add("Add", [part, e.constant(f"{name}.bias", piece)], f"{name}.biased")
            for name, part, piece in zip("qkv", parts, pieces, strict=True)
        ]
    return [_heads(e, parts, sizes, e.input(4), e.input(5))]


def _heads(
    e: _Expansion, parts: list[ir.Value], sizes: list[int], mask: ir.Value | None, bias: ir.Value | None
) -> ir.Value:
    """Softmax(Q K^T scale + mask + bias) V of [batch, tokens, size] each, in heads."""
    heads = e.whole("num_heads")
    if not heads or any(size % heads for size in sizes):
        raise _Unsupported("its sizes are no multiple of its heads")
    q, k, v = (
        e.add(
            "Transpose",
            [
                e.add(
                    "Reshape",
                    [part, e.constant(f"{name}.shape", np.array([0, 0, heads, size // heads]))],
                    f"{name}.heads",
                )
            ],
            f"{name}.turned",
            perm=perm,
        )
        for name, part, size, perm in zip("qkv", parts, sizes, ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]), strict=True)
    )
    scale = e.number("scale", 0.0) or 1 / math.sqrt(sizes[0] // heads)
    scores = e.add("Mul", [e.add("MatMul", [q, k], "scores"), e.real("scale", scale)], "scores.scaled")
    for name, term in (("mask", _mask(e, mask, scores)), ("bias", bias), ("causal", _causal(e, scores))):
        if term is not None:
            scores = e.add("Add", [scores, term], f"scores.{name}")
    mixed = e.add("MatMul", [e.add("Softmax", [scores], "weights", axis=-1), v], "mixed")
    turned = e.add("Transpose", [mixed], "mixed.turned", perm=[0, 2, 1, 3])
    return e.add("Reshape", [turned, e.constant("shape", np.array([0, 0, sizes[2]]))], "joined")


def _mask(e: _Expansion, mask: ir.Value | None, scores: ir.Value) -> ir.Value | None:
    """The bias of the scores: the filter value where an integer mask is 0, or behind the number of tokens."""
    if mask is None:
        return None
    rank, counted = query.rank(mask), query.is_op(mask.producer(), "ReduceSum")
    if mask.dtype not in (ir.DataType.INT32, ir.DataType.INT64) or not (rank in (2, 3) or (rank == 1 and counted)):
        raise _Unsupported("its mask is no integer mask of tokens")
    if rank == 1:
        shape = e.add("Shape", [scores], "mask.shape", ir.DataType.INT64)
        size = e.add("Gather", [shape, e.constant("mask.last", np.int64(3))], "mask.size", ir.DataType.INT64)
        bounds = [e.constant(f"mask.{bound}", np.int64(bound)) for bound in (0, 1)]
        places = e.add("Range", [bounds[0], size, bounds[1]], "mask.places", ir.DataType.INT64)
        wide = e.add("Unsqueeze", [mask, e.constant("mask.columns", np.array([1]))], "mask.column", mask.dtype)
        wide = e.add("Cast", [wide], "mask.tokens", ir.DataType.INT64, to=int(ir.DataType.INT64))
        shown = e.add("Less", [places, wide], "mask.shown", ir.DataType.BOOL)
    else:
        shown = e.add("Cast", [mask], "mask.shown", ir.DataType.BOOL, to=int(ir.DataType.BOOL))
    axes = e.constant("mask.axes", np.array([1] if rank == 3 else [1, 2]))
    value = e.number("mask_filter_value", -10000.0)
    added = e.add("Where", [shown, e.real("mask.zero", 0), e.real("mask.value", value)], "mask.added")
    return e.add("Unsqueeze", [added, axes], "mask.wide")


def _causal(e: _Expansion, scores: ir.Value) -> ir.Value | None:
    """The mask of later tokens, if the operator is unidirectional."""
    if not e.whole("unidirectional"):
        return None
    if e.opset < TRILU:
        raise _Unsupported(f"it hides later tokens, which needs opset {TRILU}")
    lowest = ir.tensor(np.array([np.finfo(np.float32).min], np.float32))
    shape = e.add("Shape", [scores], "causal.shape", ir.DataType.INT64)
    bounds = [e.constant(f"causal.{bound}", np.array([bound])) for bound in (2, 4)]
    square = e.add("Slice", [shape, *bounds], "causal.square", ir.DataType.INT64)
    filled = e.add("ConstantOfShape", [square], "causal.filled", value=lowest)
    return e.add("Trilu", [filled, e.constant("causal.first", np.int64(1))], "causal", upper=1)


RULES: dict[str, Callable[[_Expansion, ir.Node], list[ir.Value | None]]] = {
    "FusedMatMul": _matmul,
    "TransposeMatMul": _matmul,
    "FusedGemm": _gemm,
    "FusedConv": _conv,
    "BiasGelu": _gelu,
    "Gelu": _gelu,
    "FastGelu": _gelu,
    "QuickGelu": _quick_gelu,
    "SkipLayerNormalization": _skip_norm,
    "SkipSimplifiedLayerNormalization": _skip_norm,
    "LayerNormalization": _norm,
    "SimplifiedLayerNormalization": _norm,
    "EmbedLayerNormalization": _embeddings,
    "Attention": _attention,
    "MultiHeadAttention": _multi_head,
}
