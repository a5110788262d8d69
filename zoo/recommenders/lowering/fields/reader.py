"""Reads operators on the fields of a sample: gates, and attention between fields in the layouts of other libraries.

`FieldTensor` says which axis of a value holds samples, fields, heads and columns, through Reshape, Transpose, Split,
Concat and MatMul. So the order in which a library arranges them does not matter.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from pipelines.graph import query
from zoo.recommenders.lowering.algebra import joined, stacked
from zoo.recommenders.lowering.expressions import (
    Array,
    Concat,
    Expression,
    Numbers,
    Product,
    Vectors,
    is_value,
)
from zoo.recommenders.lowering.fields.expressions import (
    Attended,
    Axes,
    FieldAttention,
    FieldLayer,
    FieldTensor,
    HeadDots,
    Heads,
    Scores,
    identity,
    same_source,
)
from zoo.recommenders.lowering.fields.gates import (
    bilinear,
    heads_of,
    layer_of_heads,
    read_div,
    read_mul,
    read_reducesum,
    read_sigmoid,
)

if TYPE_CHECKING:
    from zoo.recommenders.lowering.graph_reader import GraphReader

VIEWS = ("Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze")
ATTENDED = ("n", "f", "h", "c")


def read_fields(reader: GraphReader, node: ir.Node, value: ir.Value) -> Expression | None:
    """Reads an operator on the fields of a sample.

    Args:
        reader: Reader of the graph.
        node: Operator.
        value: Its result that is read.

    Returns:
        The expression; None for other operators.
    """
    made = OPERATORS.get(node.op_type) if not node.domain else None
    return None if made is None else made(reader, node, value)


def _gather(reader: GraphReader, node: ir.Node, value: ir.Value) -> Expression | None:
    """Selects complete parts of a concatenation, or transposes the flat vectors of fields."""
    picks, source = query.constant(node.inputs[1]), node.inputs[0]
    whole = node.attributes.get_int("axis", 0) in (1, -1) and picks is not None and picks.ndim == 1
    if not whole or picks is None or source is None or source.producer() is None or query.rank(source) != 2:
        return None
    x, chosen, places = reader.read(source), [], picks.tolist()
    if isinstance(x, FieldTensor | FieldAttention):
        tensor = tensor_of(x, 2)
        return None if tensor is None else _permuted(tensor, picks)
    if not isinstance(x, Concat):
        return None
    starts = np.cumsum([0, *(part.width for part in x.parts)])
    while places:
        index = int(np.searchsorted(starts, places[0], "right")) - 1
        part = x.parts[index]
        if places[: part.width] != list(range(int(starts[index]), int(starts[index]) + part.width)):
            return None
        chosen.append(part)
        places = places[part.width :]
    return joined(chosen)


# --- layouts


def _permuted(x: FieldTensor, picks: Array) -> FieldTensor | None:
    """Returns the flat value whose columns are a permutation of the axes of a flat value, as Transpose makes them."""
    if len(x.axes) != 2 or x.axes[0] != ("n",) or picks.size != _size(x.axes[1], x.sizes):
        return None
    names, layouts = x.axes[1], [(x.axes[1], dict(x.sizes))]
    if "m" in names:  # an axis of heads and columns, whose number of heads is unknown so far
        index, columns = names.index("m"), x.sizes["m"]
        split = (*names[:index], "h", "c", *names[index + 1 :])
        layouts += [
            (split, {**x.sizes, "h": heads, "c": columns // heads})
            for heads in range(2, columns + 1)
            if columns % heads == 0
        ]
    for order, sizes in layouts:
        whole = np.arange(picks.size).reshape([sizes[name] for name in order])
        for perm in itertools.permutations(range(len(order))):
            if np.array_equal(whole.transpose(perm).ravel(), picks):
                return FieldTensor(x.width, x.content, (("n",), tuple(order[axis] for axis in perm)), sizes)
    return None


def tensor_of(x: Expression, rank: int | None) -> FieldTensor | None:
    """Returns vectors of one width as a value with an axis of fields.

    Args:
        x: Value.
        rank: Rank of the value.

    Returns:
        The value in the layout [samples, fields, columns] or [samples, fields * columns]; None for other values.
    """
    if isinstance(x, FieldTensor):
        return x
    if isinstance(x, FieldAttention):
        return FieldTensor(x.width, x, (("n",), ("f", "m")), {"f": x.fields, "m": x.columns})
    vectors = stacked(x) or (x.parts if isinstance(x, Concat) and rank == 2 else None)
    if not vectors or not all(is_value(vector) and vector.width == vectors[0].width for vector in vectors):
        return None
    axes: Axes = (("n",), ("f",), ("m",)) if rank == 3 else (("n",), ("f", "m"))
    return FieldTensor(x.width, vectors, axes, {"f": len(vectors), "m": vectors[0].width})


def _view(reader: GraphReader, node: ir.Node, value: ir.Value) -> Expression | None:
    source, shape = node.inputs[0], query.dimensions(value)
    if source is None or shape is None:
        return None
    x = reader.read(source)
    if isinstance(x, Numbers) and node.op_type == "Unsqueeze" and shape[1:] == [x.width, 1]:
        columns = zip(x.columns, x.factor, strict=True)
        return Vectors(x.width, [Numbers(1, [column], np.array([factor])) for column, factor in columns])
    if isinstance(x, HeadDots):
        alone = shape[1:] == [x.width] == [1]
        return Product(1, x.x, x.y) if alone else x if shape[1:] == [x.width] else None
    if (heads := heads_of(x, list(shape))) is not None:
        return heads
    if isinstance(x, FieldAttention):
        tensor = tensor_of(x, 2)
        return None if tensor is None else _arranged(tensor, shape)
    if not isinstance(x, FieldTensor):
        width = shape[-1] or 0
        rows = isinstance(x, Concat) and len(shape) == 2 and query.rank(source) == 2 and 0 < width < x.width
        tensor = tensor_of(x, 2) if rows else None
        return None if tensor is None else _arranged(tensor, shape)
    return _arranged(x, shape)


def _arranged(x: FieldTensor, shape: Sequence[int | None]) -> Expression | None:
    """Groups the axes of a value by the shape of a view of it."""
    sizes = dict(x.sizes)
    order = [name for name in x.order if name != "h" or sizes["h"] > 1]
    groups: dict[int, tuple[str, ...]] = {}
    batch = next((i for i, size in enumerate(shape) if size is None), 0)
    for axis in reversed(range(batch + 1, len(shape))):
        groups[axis] = _taken(order, sizes, shape[axis] or 1, last=True)
    for axis in range(batch):
        groups[axis] = _taken(order, sizes, shape[axis] or 1, last=False)
    groups[batch] = tuple(order)
    axes = tuple(groups[i] for i in range(len(shape)))
    if "n" not in groups[batch] or any(
        _size(group, sizes) != (shape[i] or 1) for i, group in groups.items() if i != batch
    ):
        return None
    if axes == (("n",), ("f", "m")) and isinstance(x.content, FieldAttention | list):
        return x.content if isinstance(x.content, FieldAttention) else joined(x.content)
    return FieldTensor(x.width, x.content, axes, sizes)


def _taken(order: list[str], sizes: dict[str, int], size: int, last: bool) -> tuple[str, ...]:
    """Takes axes from one end of `order` until their product is `size`; columns are split into heads where needed."""
    taken: list[str] = []
    while order and _size(taken, sizes) < size:
        name = order.pop(-1 if last else 0)
        needed = size // _size(taken, sizes)
        if name == "m" and needed < sizes["m"] and sizes["m"] % needed == 0:
            own = needed if last else sizes["m"] // needed
            sizes |= {"h": sizes["m"] // own, "c": own}
            order.insert(len(order) if last else 0, "h" if last else "c")
            name = "c" if last else "h"
        taken.insert(0 if last else len(taken), name)
    return tuple(taken)


def _size(names: Sequence[str], sizes: Any) -> int:
    return int(np.prod([sizes.get(name, 1) for name in names if name != "n"], dtype=np.int64))


def _transpose(reader: GraphReader, node: ir.Node, value: ir.Value) -> Expression | None:
    x = reader.read(node.inputs[0])
    perm = node.attributes["perm"].as_ints() if "perm" in node.attributes else ()
    if not isinstance(x, FieldTensor) or len(perm) != len(x.axes):
        return None
    return replace(x, axes=tuple(x.axes[axis] for axis in perm))


def _split(reader: GraphReader, node: ir.Node, value: ir.Value) -> Expression | None:
    """Selects columns of a layer, or a head."""
    source = node.inputs[0]
    if source is None or source.is_graph_input():
        return None
    x, shape, kept = reader.read(source), query.dimensions(source), query.dimensions(value)
    if not isinstance(x, FieldTensor) or shape is None or kept is None:
        return None
    constants = [query.integers(node, "", position) for position in range(1, len(node.inputs))]
    if node.op_type == "Slice":
        scalars = [constant[0] for constant in constants if constant is not None and len(constant) == 1]
        if len(scalars) < max(3, len(constants)) or (len(scalars) > 3 and scalars[3] != 1):
            return None
        axis, start = scalars[2] % len(shape), scalars[0]
    else:
        axis, index = node.attributes.get_int("axis", 0) % len(shape), list(node.outputs).index(value)
        sizes = query.integers(node, "split", 1)
        start = sum(sizes[:index]) if sizes else index * (kept[axis] or 0)
    count = kept[axis]
    if count is None:
        return None
    if isinstance(x.content, FieldLayer) and x.axes[axis] == ("m",):
        layer = x.content
        part = slice(start, start + count)
        narrow = FieldLayer(
            count * x.sizes["f"], layer.x, layer.vectors, layer.weight[:, part], layer.bias[part], str(value.name)
        )
        return FieldTensor(narrow.width, narrow, x.axes, {**x.sizes, "m": count})
    if isinstance(x.content, Attended) and x.axes[axis] == ("h",) and count == 1 and x.content.head is None:
        axes = (*x.axes[:axis], (), *x.axes[axis + 1 :])
        return FieldTensor(x.width // x.sizes["h"], replace(x.content, head=start), axes, x.sizes)
    return None


def _concat(reader: GraphReader, node: ir.Node, value: ir.Value) -> Expression | None:
    """Joins the columns of heads to layers with an axis of heads, or heads to columns."""
    rank = query.rank(value) or 0
    if rank < 3 or not node.inputs:
        return None
    parts = [reader.read(source) for source in node.inputs]
    tensors = [part for part in parts if isinstance(part, FieldTensor)]
    first = tensors[0] if tensors else None
    axis = node.attributes.get_int("axis", 0) % rank
    if first is None or len(tensors) != len(parts) or any(tensor.axes != first.axes for tensor in tensors):
        return None
    contents: list[Any] = [tensor.content for tensor in tensors]
    if all(isinstance(part, FieldLayer) for part in contents) and first.axes[axis] == () and same_source(contents):
        weight, bias = (np.concatenate([getattr(part, name) for part in contents], -1) for name in ("weight", "bias"))
        if len({part.weight.shape[1] for part in contents}) > 1:
            return None
        layer = FieldLayer(
            len(bias) * first.sizes["f"], contents[0].x, contents[0].vectors, weight, bias, str(value.name)
        )
        axes = tuple(
            ("h",) if i == axis else ("c",) if group == ("m",) else group for i, group in enumerate(first.axes)
        )
        sizes = {"f": first.sizes["f"], "h": len(contents), "c": len(bias) // len(contents)}
        return FieldTensor(layer.width, layer, axes, sizes)
    whole = all(isinstance(part, Attended) for part in contents) and [part.head for part in contents] == [
        *range(first.sizes.get("h", 0))
    ]
    if whole and first.axes[axis] == ("c",):
        axes = tuple(("h", "c") if i == axis else group for i, group in enumerate(first.axes))
        return FieldTensor(first.width * len(contents), replace(contents[0], head=None), axes, first.sizes)
    return None


# --- layers and attention


def _layer(reader: GraphReader, node: ir.Node, value: ir.Value) -> Expression | None:
    """Reads a linear layer of every field, scores, or values weighted by a softmax."""
    weight = query.constant(node.inputs[1])
    x = reader.read(node.inputs[0])
    if isinstance(x, Heads):
        name = str(value.name)
        return bilinear(x, reader.read(node.inputs[1]), name) if weight is None else layer_of_heads(x, weight, name)
    if weight is None:
        y = reader.read(node.inputs[1])
        if isinstance(x, FieldTensor) and isinstance(y, FieldTensor):
            return _product(x, y, str(value.name))
        return None
    tensor = x if isinstance(x, FieldTensor) else tensor_of(x, 3) if query.rank(value) == 3 else None
    if tensor is None or weight.ndim != 2:
        return None
    bias = np.zeros(1)
    if node.op_type == "Gemm":
        plain = node.attributes.get_float("alpha", 1.0) == 1 and not node.attributes.get_int("transA", 0)
        shift = query.constant(node.inputs[2]) if len(node.inputs) > 2 and node.inputs[2] is not None else np.zeros(1)
        if not plain or shift is None or node.attributes.get_float("beta", 1.0) != 1:
            return None
        weight, bias = query.inputs_first(node, weight), shift
    own, source = tensor.axes[-1], tensor.content
    if own not in (("m",), ("h", "c")) or weight.shape[0] != _size(own, tensor.sizes):
        return None
    if isinstance(source, Attended):
        closed = _closed(tensor, None, source.value)
        source = source if closed is None else closed
    if not isinstance(source, list | FieldAttention):
        return None
    attention, vectors = (source, []) if isinstance(source, FieldAttention) else (None, source)
    columns, fields = weight.shape[1], tensor.sizes["f"]
    biases = np.zeros(columns) + bias.ravel()
    layer = FieldLayer(columns * fields, attention, vectors, weight.astype(np.float64), biases, str(value.name))
    return FieldTensor(layer.width, layer, (*tensor.axes[:-1], ("m",)), {"f": fields, "m": columns})


def _product(x: FieldTensor, y: FieldTensor, name: str) -> FieldTensor | None:
    """Returns the scores of queries and keys, or values weighted by a softmax; axes as MatMul has them."""
    if x.axes[:-2] != y.axes[:-2] or len(x.axes) < 3:
        return None
    batch, columns = x.axes[:-2], (("c",), ("m",))
    fields = {"f": x.sizes["f"], "g": x.sizes["f"]}
    if isinstance(x.content, FieldLayer) and isinstance(y.content, FieldLayer):
        fits = x.axes[-2] == ("f",) == y.axes[-1] and x.axes[-1] == y.axes[-2] and x.axes[-1] in columns
        if not fits or not same_source([x.content, y.content]) or x.content.weight.shape != y.content.weight.shape:
            return None
        axes = (*batch, ("f",), ("g",))
        return FieldTensor(x.width, Scores(x.content, y.content), axes, {**x.sizes, **fields})
    if isinstance(x.content, Scores) and x.content.softmax and isinstance(y.content, FieldLayer):
        fits = x.axes[-2:] == (("f",), ("g",)) and y.axes[-2] == ("f",) and y.axes[-1] in columns
        if not fits or not same_source([x.content.query, y.content]):
            return None
        if x.content.query.weight.shape[1] != y.content.weight.shape[1]:
            return None
        axes = (*batch, ("f",), ("c",))
        return FieldTensor(
            y.width, Attended(x.content, y.content, value=name), axes, {"c": y.sizes.get("m", 1), **y.sizes}
        )
    return None


def _einsum(reader: GraphReader, node: ir.Node, value: ir.Value) -> Expression | None:
    equation = re.fullmatch(r"(\w+),(\w+)->(\w+)", node.attributes["equation"].as_string().replace(" ", ""))
    x, y = (reader.read(source) for source in node.inputs)
    if equation is None or not isinstance(x, FieldTensor) or not isinstance(y, FieldTensor):
        return None
    a, b, out = equation.groups()
    if len(a) != len(x.axes) or len(b) != len(y.axes) or len(a) < 3 or a[:-2] != b[:-2] or out[:-2] != a[:-2]:
        return None
    if (a[-1], out[-2:]) == (b[-1], a[-2] + b[-2]):  # x y^T
        return _product(x, replace(y, axes=(*y.axes[:-2], y.axes[-1], y.axes[-2])), str(value.name))
    if (a[-1], out[-2:]) == (b[-2], a[-2] + b[-1]):
        return _product(x, y, str(value.name))
    return None


def _softmax(reader: GraphReader, node: ir.Node, value: ir.Value) -> Expression | None:
    x = reader.read(node.inputs[0])
    if not isinstance(x, FieldTensor) or not isinstance(x.content, Scores) or x.content.softmax:
        return None
    last = node.attributes.get_int("axis", -1) in (-1, len(x.axes) - 1) and x.axes[-1] == ("g",)
    return replace(x, content=replace(x.content, softmax=True)) if last else None


def _closed(x: FieldTensor, residual: FieldLayer | None, name: str) -> FieldAttention | None:
    """Returns the attention of weighted values whose axes are in order."""
    attended = x.content
    order = tuple(axis for axis in x.order if x.sizes.get(axis, 0) != 1 or axis == "f")
    expected = tuple(axis for axis in ATTENDED if x.sizes.get(axis, 0) > 1 or axis in ("n", "f"))
    joined_heads = x.axes[-1] == ("h", "c") or x.sizes.get("h", 1) == 1
    if not isinstance(attended, Attended) or attended.head is not None or order != expected or not joined_heads:
        return None
    scores, value = attended.scores, attended.layer
    layers = (scores.query, scores.key, value, *([residual] if residual is not None else []))
    if not same_source(layers) or (residual is not None and residual.weight.shape[1] != value.weight.shape[1]):
        return None
    heads = x.sizes.get("h", 1)
    return FieldAttention(x.width, value.x, value.vectors, x.sizes["f"], heads, layers, scores.factor, False, name)


def _add(reader: GraphReader, node: ir.Node, value: ir.Value) -> Expression | None:
    for index in (0, 1):
        constant = query.constant(node.inputs[index])
        if constant is not None:
            x = reader.read(node.inputs[1 - index])
            layer = x.content if isinstance(x, FieldTensor) else None
            if not isinstance(x, FieldTensor) or not isinstance(layer, FieldLayer) or x.axes[-1] != ("m",):
                return None
            if constant.size not in (1, len(layer.bias)):
                return None
            return replace(x, content=replace(layer, bias=layer.bias + constant.ravel(), value=str(value.name)))
    rank = query.rank(value)
    if len(node.inputs) != 2 or not any(isinstance(reader.read(source), FieldTensor) for source in node.inputs):
        return None
    tensors = [tensor_of(reader.read(source), rank) for source in node.inputs]
    for a, b in (tensors, tensors[::-1]):
        if a is None or b is None or not isinstance(a.content, Attended):
            continue
        layer = b.content
        if isinstance(layer, list):
            layer = identity(None, layer, layer[0].width, str(value.name))
        elif isinstance(layer, FieldAttention):
            layer = identity(layer, [], layer.columns, str(value.name))
        own = tuple(axis for axis in b.order if b.sizes.get(axis, 2) > 1 or axis == "f")
        if not isinstance(layer, FieldLayer) or own not in (("n", "f", "m"), ATTENDED, ("n", "f", "c"), ("n", "f")):
            return None
        attention = _closed(a, layer, str(value.name))
        return None if attention is None else _attention_tensor(attention, a)
    return None


def _attention_tensor(attention: FieldAttention, like: FieldTensor) -> FieldTensor:
    """Returns the results of an attention in the layout of weighted values with joined heads."""
    kept = [tuple(dict.fromkeys("m" if axis in ("h", "c") else axis for axis in group)) for group in like.axes]
    axes = tuple(group for index, group in enumerate(kept) if group or index == 0)
    return FieldTensor(attention.width, attention, axes, {"f": attention.fields, "m": attention.columns})


def _relu(reader: GraphReader, node: ir.Node, value: ir.Value) -> Expression | None:
    x = reader.read(node.inputs[0])
    if isinstance(x, FieldTensor) and isinstance(x.content, Attended):
        attention = _closed(x, None, str(value.name))
        x = x if attention is None else _attention_tensor(attention, x)
    if isinstance(x, FieldTensor) and isinstance(x.content, FieldAttention) and not x.content.relu:
        return replace(x, content=replace(x.content, relu=True, value=str(value.name)))
    if isinstance(x, FieldAttention) and not x.relu:
        return replace(x, relu=True, value=str(value.name))
    return None


OPERATORS = {
    **dict.fromkeys(VIEWS, _view),
    **dict.fromkeys(("Split", "Slice"), _split),
    **dict.fromkeys(("MatMul", "Gemm"), _layer),
    "Add": _add,
    "Concat": _concat,
    "Div": read_div,
    "Einsum": _einsum,
    "Gather": _gather,
    "Mul": read_mul,
    "ReduceSum": read_reducesum,
    "Relu": _relu,
    "Sigmoid": read_sigmoid,
    "Softmax": _softmax,
    "Transpose": _transpose,
}
