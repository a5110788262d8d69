"""Elements of values in other orders and shapes: tokens, heads, windows."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.graph import query
from pipelines.kernels.arrays import Array
from pipelines.kernels.images.mapping.floats import FloatValues
from pipelines.kernels.images.mapping.qdq import data_input, input_at, qparams, real_constant, refused, split_sizes
from pipelines.kernels.images.mapping.walk import Bytes, Pending, layout_of
from pipelines.kernels.images.steps import Gathering, Operand

LAYOUTS = (  # last, flat, tokens
    *((False, False, False), (True, False, False), (True, False, True), (False, False, True)),
    *((False, True, False), (True, True, False)),
)
ORDERS = {"Flatten", "Gather", "Identity", "Reshape", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze"}


@dataclass(frozen=True, eq=False)
class View:
    """Elements of a value in another order and shape.

    Attributes:
        source: The value, real.
        index: Elements of a sample [height, width, channels] of `source`, int64 [...]; a first axis of 1 is that of
            samples.
        factor: By which the elements are multiplied.
        qparams: Scale and zero point that quantize the elements, None for real ones.
        real: Whether they are dequantized again.
        reason: Why the operator that made it has no other form.
    """

    source: Bytes | Pending
    index: NDArray[np.int64]
    factor: float = 1.0
    qparams: tuple[np.float32, int] | None = None
    real: bool = True
    reason: RequestError | None = None


@dataclass(frozen=True, eq=False)
class Scores:
    """Attention scores: queries times keys.

    Attributes:
        queries: [windows, heads, tokens, size].
        keys: [windows, heads, size, tokens].
        factor: Factor of the scores.
        bias: float32 [1 or windows, 1 or heads, tokens, tokens], or None.
        shape: Shape in the graph.
        weights: Whether they went through a softmax.
    """

    queries: View
    keys: View
    factor: float
    shape: tuple[int, ...]
    bias: Array | None = None
    weights: bool = False


class Views(FloatValues):
    """A walk that knows orders of elements."""

    def __init__(self, model: ir.Model) -> None:
        super().__init__(model)
        self.views: dict[ir.Value, View | Scores] = {}

    @abstractmethod
    def _by_rule(self, node: ir.Node) -> None:
        """Maps a node that reads no view."""

    def _is_view(self, node: ir.Node) -> bool:
        """Whether a node reads a view."""
        return any(value in self.views for value in node.inputs if value is not None)

    def _viewed(self, node: ir.Node, reason: RequestError | None = None) -> None:
        """Maps a node that reads a view, or rearranges a value in a way that has no other form, for this reason."""
        found = self._views_of(node)
        first = found[0] if found else None
        if node.op_type in ORDERS:
            self._rearrange(node, reason)
        elif node.op_type in ("QuantizeLinear", "DequantizeLinear") and first is not None:
            self._requantize_view(node, first)
        elif node.op_type in ("Mul", "Div") and self._is_scaled(node):
            self._scale_view(node, found)
        elif node.op_type == "Concat" and all(isinstance(each, View) for each in found):
            self._join_views(node, [each for each in found if isinstance(each, View)])
        elif self._gather(node):
            self._by_rule(node)
        elif len([each for each in found if each is not None]) == 1:
            self._commute(node)
        else:
            raise refused(node, "reads values in another order")

    def _views_of(self, node: ir.Node) -> list[View | Scores | None]:
        """The views among the inputs of a node."""
        return [None if value is None else self.views.get(value) for value in node.inputs]

    def _join_views(self, node: ir.Node, views: list[View]) -> None:
        first = views[0]
        if len({(each.source, each.factor, each.qparams, each.real) for each in views}) != 1:
            raise refused(node, "joins values in another order")
        index = np.concatenate([each.index for each in views], node.attributes.get_int("axis", 0))
        self._settle(node.outputs[0], replace(first, index=index))

    def _commute(self, node: ir.Node) -> None:
        """Maps an operator on the channels of pixels in another order, such as windows, in the order of the pixels."""
        (value,) = [value for value in node.inputs if value in self.views]
        assert value is not None
        view = self.views[value]
        places = self._places(view) if isinstance(view, View) else None
        if not isinstance(view, View) or places is None or view.factor != 1:
            raise getattr(view, "reason", None) or refused(node, "reads values in another order")
        self.values[value] = self._whole(view, True, False, True)
        try:
            self._by_rule(node)
        finally:
            del self.values[value]
        made = self.values.pop(node.outputs[0])
        assert isinstance(made, Bytes | Pending)
        channels = self._shape(made)[2]
        if not made.last or self._shape(made)[:2] != self._shape(view.source)[:2]:
            raise refused(node, "reads values in another order")
        self._settle(node.outputs[0], View(made, places[..., None] * channels + np.arange(channels)))

    def _token_concat(self, node: ir.Node) -> None:
        """Maps tokens behind or before constant ones, such as that of the class."""
        parts = [(value, None if value is None else self.values.get(value)) for value in node.inputs]
        values = [each for _, each in parts if each is not None]
        found = values[0] if len(values) == 1 else None
        if not isinstance(found, Bytes | Pending) or layout_of(found) != (True, False, True):
            raise refused(node, "concatenates a float value")
        x, channels, places, added = self._operand_of(node, found), self._shape(found)[2], [], []
        for value, each in parts:
            constant = None if value is None or each is not None else _token(value)
            if each is None and (constant is None or constant.size % channels or constant.shape[-1] != channels):
                raise refused(node, "concatenates a float value")
            count = self._shape(found)[0] * self._shape(found)[1] if constant is None else constant.size // channels
            places.append(np.arange(count) if constant is None else np.full(count, -1))
            rows = np.zeros((count, channels)) if constant is None else constant.reshape(count, channels)
            added.append(rows.astype(np.float32))
        if node.attributes.get_int("axis", 1) % 3 != 1:
            raise refused(node, "does not concatenate tokens")
        whole, rows = np.concatenate(places)[:, None], np.concatenate(added)
        shape = (len(whole), 1, channels)
        self._float_value(node, shape, lambda to: Gathering(x, to, whole, rows), found)

    def _rearrange(self, node: ir.Node, reason: RequestError | None) -> None:
        value = data_input(node)
        view = self.views.get(value)
        if view is None:
            source = self.values.get(value)
            if not isinstance(source, Bytes | Pending):
                raise refused(node, "rearranges the input")
            quantized = isinstance(source, Bytes) and not source.real
            if isinstance(source, Bytes) and quantized:
                view = View(source, self._elements(source), 1.0, (np.float32(source.scale or 0), source.zero), False)
            else:
                view = View(source, self._elements(source))
            view = replace(view, reason=reason)
        assert isinstance(view, View)
        for output, index in zip(node.outputs, self._rearranged(node, view.index), strict=True):
            self._settle(output, replace(view, index=index))

    def _settle(self, output: ir.Value, view: View) -> None:
        """Keeps a view, as a value where its elements are a whole value in one of `LAYOUTS`."""
        for layout in LAYOUTS if view.factor == 1 else ():
            if np.array_equal(view.index, self._elements(view.source, layout)):
                self.values[output] = self._whole(view, *layout)
                return
        self.views[output] = view

    def _gather(self, node: ir.Node) -> bool:
        """Makes the views that a node reads values, where they are whole pixels of a sample; False where one is not."""
        for value in [value for value in node.inputs if value in self.views]:
            assert value is not None
            view = self.views[value]
            places = self._places(view) if isinstance(view, View) else None
            if not isinstance(view, View) or places is None or view.factor != 1:
                return False
            rank = view.index.ndim
            if len(places) != 1 or rank not in (2, 3, 4):
                return False
            found = self._gathered(node, view, places[0] if rank == 4 else places.reshape(-1, 1))
            self.values[value] = self._whole(found, True, rank == 2, rank == 3)
            del self.views[value]
        return True

    def _rearranged(self, node: ir.Node, x: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        samples = (query.dimensions(self.main.inputs[0]) or [None])[0]
        try:
            return _rearranged(node, x, samples)
        except RequestError:
            raise
        except (ValueError, IndexError) as error:
            raise refused(node, f"rearranges {list(x.shape)}: {error}") from error

    def _places(self, view: View) -> NDArray[np.int64] | None:
        """The pixels of a view whose last axis is the channels; None for another view."""
        channels = self._shape(view.source)[2]
        if view.index.shape[-1] != channels:
            return None
        first = view.index[..., 0]
        whole = not (first % channels).any() and (view.index == first[..., None] + np.arange(channels)).all()
        return first // channels if whole else None

    def _gathered(self, node: ir.Node, view: View, places: NDArray[np.int64]) -> View:
        """The view of a tensor of pixels [height, width]."""
        found, shape = self._whole(view, True, False, False), (*places.shape, self._shape(view.source)[2])
        places = np.ascontiguousarray(places)
        if isinstance(found, Bytes):
            out = self._new(shape)
            x, to = (Operand(each, float(found.scale or 0), found.zero) for each in (found.tensor, out))
            self.steps.append(Gathering(x, to, places))
            return View(replace(found, tensor=out), np.zeros(0, np.int64))
        made = self._float_pending(shape, lambda to: Gathering(self._operand_of(node, found), to, places), shared=True)
        return View(made, np.zeros(0, np.int64))

    def _whole(self, view: View, last: bool, flat: bool, tokens: bool) -> Bytes | Pending:
        """The value of a view of all its elements in order."""
        source = view.source
        layout: dict[str, Any] = {"last": last, "flat": flat, "tokens": tokens}
        if view.qparams is not None:
            scale, zero = view.qparams
            real = replace(source, real=True) if isinstance(source, Bytes) else source
            tensor = (
                source.tensor if isinstance(source, Bytes) and (source.scale, source.zero) == (scale, zero) else None
            )
            tensor = self._requantized(real, scale, zero, 0, 255) if tensor is None else tensor
            return Bytes(tensor, scale, zero, real=view.real, **layout)
        return replace(source, **layout) if isinstance(source, Bytes) else replace(source, result=None, **layout)

    def _requantize_view(self, node: ir.Node, found: View | Scores) -> None:
        """Quantizes a view; scores and weights of attention have codes of their kernel's own."""
        if isinstance(found, Scores):
            self.views[node.outputs[0]] = found
            return
        scale, zero = qparams(node)
        if node.op_type == "DequantizeLinear":
            if found.qparams != (scale, zero) or found.real:
                raise refused(node, "dequantizes a float value, or with other qparams")
            self.views[node.outputs[0]] = replace(found, real=True)
            return
        self.views[node.outputs[0]] = replace(found, qparams=(scale, zero), real=False)

    def _is_scaled(self, node: ir.Node) -> bool:
        """Whether a node multiplies a view by a single constant."""
        others = [value for value in node.inputs if value is not None and value not in self.views]
        constants = [real_constant(value) for value in others]
        return len(others) == 1 and constants[0] is not None and constants[0].size == 1

    def _scale_view(self, node: ir.Node, found: list[View | Scores | None]) -> None:
        position = 0 if found[0] is not None else 1
        view, other = found[position], input_at(node, 1 - position)
        constant = None if other is None else real_constant(other)
        divides = node.op_type == "Div"
        if view is None or constant is None or constant.size != 1 or (divides and position == 1) or not constant.all():
            raise refused(node, "multiplies values in another order by no single constant")
        factor = 1 / float(constant.item()) if divides else float(constant.item())
        self.views[node.outputs[0]] = replace(view, factor=view.factor * factor)


def _sizes(node: ir.Node, samples: int | None) -> list[int]:
    """The shape of a Reshape for one of the graph's samples."""
    sizes = query.shape_elements(input_at(node, 1))
    if sizes is None:
        raise refused(node, "has no constant shape")
    first, *more = [size if isinstance(size, int) else 1 for size in sizes] or [1]
    if isinstance(sizes[0], int) and first > 0:
        if samples is None or first % samples:
            raise refused(node, f"reshapes to {sizes}, which joins samples")
        first //= samples
    return [first, *more]


def _token(value: ir.Value) -> Array | None:
    """A float constant, also one that is repeated for each sample."""
    expand = value.producer()
    if expand is None or expand.op_type != "Expand":
        return real_constant(value)
    constant, sizes = real_constant(data_input(expand)), query.dimensions(value)
    if constant is None or constant.ndim != 3 or len(constant) != 1:
        return None
    same = sizes is None or all(size in (None, have) for size, have in zip(sizes[1:], constant.shape[1:], strict=False))
    return constant if same else None


def _rearranged(node: ir.Node, x: NDArray[np.int64], samples: int | None) -> list[NDArray[np.int64]]:
    """The outputs of a node of `ORDERS` for one of the graph's samples."""
    attributes = node.attributes
    axis = attributes.get_int("axis", 1 if node.op_type == "Flatten" else 0)
    match node.op_type:
        case "Identity":
            return [x]
        case "Transpose":
            order = attributes.get_ints("perm", list(range(x.ndim))[::-1])
            return [x.transpose(order)]
        case "Flatten":
            return [x.reshape(int(np.prod(x.shape[:axis])), -1)]
        case "Reshape":
            known = _sizes(node, samples)
            return [x.reshape([x.shape[at] if size == 0 else size for at, size in enumerate(known)])]
        case "Squeeze" | "Unsqueeze":
            axes = query.integers(node, "axes", 1)
            if axes is None:
                raise refused(node, "has no constant axes")
            return [np.squeeze(x, tuple(axes)) if node.op_type == "Squeeze" else np.expand_dims(x, tuple(axes))]
        case "Gather":
            indices = query.constant(input_at(node, 1))
            if indices is None:
                raise refused(node, "has no constant indices")
            return [np.take(x, indices.astype(np.int64), axis)]
        case "Split":
            return np.split(x, np.cumsum(split_sizes(node, x.shape[axis]))[:-1].tolist(), axis)
    bounds = [query.integers(node, name, at) for at, name in ((1, "starts"), (2, "ends"), (3, "axes"))]
    starts, ends, axes = bounds
    steps = query.constant(input_at(node, 4))
    if starts is None or ends is None:
        raise refused(node, "has bounds that are not constant")
    cuts = [slice(None)] * x.ndim
    strides = [1] * len(starts) if steps is None else steps.ravel().tolist()
    for start, end, each, step in zip(starts, ends, axes or range(len(starts)), strides, strict=True):
        cuts[each] = slice(start, end, step)
    return [x[tuple(cuts)]]
