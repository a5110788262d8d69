"""Values of a graph that depend on the number of samples alone: sizes, masks of windows, tokens of the class."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from pipelines.core.errors import RequestError
from pipelines.graph import io, query, reference_session
from pipelines.kernels.arrays import Array
from pipelines.kernels.images.mapping.qdq import input_at, real_constant, refused
from pipelines.rewrites.fold_constants import QUANTIZED, SKIPPED


class Constants:
    """Constants, and values that depend on the number of samples alone.

    Args:
        model: QDQ model.

    Attributes:
        joined: Why samples may depend on each other: a Reshape that moves their axis. None where none does.
        moves: Whether a Reshape may move their axis.
    """

    joined: RequestError | None = None
    moves = True

    def __init__(self, model: ir.Model) -> None:
        self._opset = model.opset_imports.get("", io.OPSET)
        self._samples = (query.dimensions(model.graph.inputs[0]) or [None])[0] if model.graph.inputs else None
        self._known: dict[ir.Value, tuple[Array, Array]] = {}  # for one sample and two

    def take(self, node: ir.Node, shape: Sequence[int] | None) -> bool:
        """Computes the result of a node; False where it depends on the samples.

        Args:
            node: Operator of the graph.
            shape: Shape of its first input for one sample, None where it is unknown.
        """
        skipped = node.op_type in SKIPPED and node.op_type not in QUANTIZED
        if len(node.outputs) != 1 or not query.is_op(node, node.op_type) or skipped:
            return False
        if node.op_type in ("Shape", "Size") and shape is not None:
            dims = [np.array([count * shape[0], *shape[1:]]) for count in (1, 2)]
            cut = slice(node.attributes.get_int("start", 0), node.attributes.get_int("end", len(shape)))
            one, two = (np.asarray(sizes.prod()) if node.op_type == "Size" else sizes[cut] for sizes in dims)
            self._known[node.outputs[0]] = one, two
            return True
        inputs = [value for value in node.inputs if value is not None]
        quantizes = node.op_type == "QuantizeLinear" and all(query.constant(value) is not None for value in inputs)
        if not quantizes and not any(value in self._known for value in inputs):
            return False
        feeds: list[dict[str, Array]] = [{}, {}]
        for value in inputs:
            constant = query.constant(value) if value in self._known else self.dequantized(value)
            pair = self._known.get(value, None if constant is None else (constant, constant))
            if pair is None:
                return False
            for feed, array in zip(feeds, pair, strict=True):
                feed[str(value.name)] = array
        try:
            one, two = (reference_session.computed(node, feed, self._opset) for feed in feeds)
        except RequestError:
            return False
        self._known[node.outputs[0]] = one, two
        return True

    def dequantized(self, value: ir.Value) -> Array | None:
        """Returns a constant, dequantized if it is one of 8 bits; None for another value.

        Args:
            value: Value of the graph.
        """
        dequantize = value.producer() if query.dequantized(value) is not None else None
        if dequantize is None:
            return query.constant(value)
        parts = {str(x.name): query.constant(x) for x in dequantize.inputs if x is not None}
        feeds = {name: array for name, array in parts.items() if array is not None}
        array: Array = reference_session.computed(dequantize, feeds, self._opset)
        return array

    def real(self, value: ir.Value, size: int = 0) -> Array | None:
        """Returns a constant for one sample, see `real_constant`; None where samples have different values.

        Args:
            value: Value of the graph.
            size: Size of the first axis for one sample, 0 if it has no such axis.
        """
        if value not in self._known:
            array = real_constant(value)
            samples = self._samples or 1
            if array is not None and size and samples > 1 and array.ndim and len(array) == samples * size:
                return array[:size] if np.array_equal(array, np.concatenate([array[:size]] * samples)) else None
            return array
        one, two = self._known[value]
        repeats = one.ndim > 0 and _are_equal(np.concatenate([one, one]), two)
        same = self._samples == 1 or repeats or _are_equal(one, two)
        return one if same else None

    def real_of(self, value: ir.Value | None) -> list[float] | None:
        """Returns the elements of a constant for one sample; None for another value.

        Args:
            value: Value of the graph, or None.
        """
        array = None if value is None else self.real(value)
        return None if array is None or not array.size else [float(number) for number in array.ravel()]

    def sizes_of(self, value: ir.Value | None) -> list[int] | None:
        """Returns a shape for one sample, the first axis as it is; None for another value.

        Args:
            value: Value of shape arithmetic, or None.
        """
        if value in self._known:
            one, two = self._known[value]
            return [int(size) for size in one] if np.array_equal(one[1:], two[1:]) else None
        elements = query.shape_elements(value)
        is_known = elements is not None and all(isinstance(size, int) for size in elements[1:])
        return [1, *(int(size) for size in (elements or [])[1:])] if is_known and elements else None  # type: ignore[arg-type]

    def holds(self, value: ir.Value) -> bool:
        """Returns whether a value was computed here.

        Args:
            value: Value of the graph.
        """
        return value in self._known

    def keep(self, value: ir.Value, array: Array) -> None:
        """Keeps the value of a constant, the same for all samples.

        Args:
            value: Value of the graph.
            array: Its elements, or one of them if all are equal.
        """
        self._known[value] = array, array

    def shape_of(self, value: ir.Value) -> tuple[int, ...] | None:
        """Returns the shape of a constant for one sample; None for another value.

        Args:
            value: Value of the graph.
        """
        array = self._known[value][0] if value in self._known else real_constant(value)
        return None if array is None else array.shape

    def stride(self, value: ir.Value) -> int | None:
        """Returns by which number all elements of a constant rise from sample to sample, from 0 on; None for another.

        Args:
            value: Value of the graph.
        """
        one, two = self._known.get(value, (np.ones(1), np.ones(1)))
        array = real_constant(value)
        if self._samples == 1 and array is not None and not array.any():
            return 1
        if one.any() or not one.ndim or two.shape != (2 * len(one), *one.shape[1:]):
            return None
        stride = int(two[-1].flat[0])
        return stride if np.array_equal(np.concatenate([one, one + stride]), two) else None

    def expanded(self, node: ir.Node, rank: int) -> list[int]:
        """Returns the shape of an Expand, or the repeats of a Tile, of a value of `rank` axes, 1 for that of samples.

        Args:
            node: The Expand or Tile.
            rank: Number of axes.

        Raises:
            RequestError: The shape is not constant, has more axes, or repeats samples.
        """
        sizes, elements = self.sizes_of(input_at(node, 1)), query.shape_elements(input_at(node, 1)) or [1]
        fixed = isinstance(elements[0], int) and elements[0] not in (1, self._samples)
        if sizes is None or len(sizes) > rank or (len(sizes) == rank and fixed):
            raise refused(node, "has no constant shape, or repeats samples")
        return [1, *sizes[1:]] if len(sizes) == rank else sizes

    def slices(self, node: ir.Node) -> list[tuple[int, slice]]:
        """Returns the cuts of a Slice.

        Args:
            node: The Slice.

        Returns:
            (axis, negative ones from the end; elements of the axis).

        Raises:
            RequestError: The bounds are not constant.
        """
        names = ("starts", "ends", "axes", "steps")
        starts, ends, axes, steps = (self._integers(node, name, index) for index, name in enumerate(names, 1))
        computed = [index for index, bounds in ((3, axes), (4, steps)) if bounds is None and input_at(node, index)]
        if starts is None or ends is None or computed:
            raise refused(node, "has bounds that are not constant")
        cuts = zip(axes or range(len(starts)), starts, ends, steps or [1] * len(starts), strict=True)
        return [(axis, slice(start, end, step)) for axis, start, end, step in cuts]

    def _integers(self, node: ir.Node, name: str, position: int) -> list[int] | None:
        """An attribute of integers, or a constant input in its place, the same for all samples; None for another."""
        value = input_at(node, position)
        if value not in self._known:
            return query.integers(node, name, position)
        one, two = self._known[value]
        return [int(number) for number in one.ravel()] if np.array_equal(one, two) else None

    def indices(self, node: ir.Node, size: int) -> Array:
        """Returns the indices of a Gather for one sample.

        Args:
            node: The Gather.
            size: Size of the axis for one sample where it has those of all samples, else 0.

        Raises:
            RequestError: The indices are not constant, or join samples.
        """
        value = input_at(node, 1)
        indices = query.constant(value)
        if value in self._known:
            one, two = self._known[value]
            indices = (
                one if np.array_equal(np.concatenate([one, one + size]) if size and one.ndim else one, two) else None
            )
        if indices is None:
            raise refused(node, "has no constant indices")
        return indices.astype(np.int64)

    def sizes(self, node: ir.Node) -> list[int]:
        """Returns the shape of a Reshape for one sample; notes in `joined` one whose first axis is not that of samples.

        Args:
            node: The Reshape.

        Raises:
            RequestError: The shape is not constant, or joins samples.
        """
        value = input_at(node, 1)
        if value in self._known:
            one, two = (sizes.tolist() for sizes in self._known[value])
            if one[1:] != two[1:] or (one[:1] == two[:1] and one[:1] not in ([0], [-1])):
                self._move_samples(node, one)
            return list(one)
        sizes = query.shape_elements(value)
        if sizes is None:
            raise refused(node, "has no constant shape")
        first, *more = [size if isinstance(size, int) else 1 for size in sizes] or [1]
        if isinstance(sizes[0], int) and first > 0:
            if self._samples is None or first % self._samples:
                self._move_samples(node, sizes)
            else:
                first //= self._samples
        return [first, *more]

    def _move_samples(self, node: ir.Node, sizes: Sequence[object]) -> None:
        """Notes a Reshape of values whose first axis may not be that of samples, of any number of samples."""
        error = refused(node, f"reshapes to {sizes}, which joins samples")
        if self._samples is not None or not self.moves:
            raise error
        self.joined = self.joined or error


def _are_equal(one: Array, two: Array) -> bool:
    """Whether two arrays are equal; floats up to rounding: products of one row and of two have other orders of sums."""
    if one.shape != two.shape or one.dtype.kind != "f" or not one.size:
        return np.array_equal(one, two)
    finite = np.isfinite(one)
    if not np.array_equal(one[~finite], two[~finite], equal_nan=True):
        return False
    return bool(np.allclose(one[finite], two[finite], 1e-5, 1e-6 * float(np.abs(one[finite]).max(initial=0))))
