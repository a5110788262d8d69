"""Padding of texts: positions that a mask input of a graph excludes.

Results at padded positions mean nothing, and there are often more of them than of tokens. They would choose the ranges,
the rounding of weights and the candidates of a calibration.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.core.batches import Batch, joined, share_axis
from pipelines.graph import query

NAMES = ("attention_mask", "input_mask", "padding_mask", "mask")  # of inputs that are 1 at tokens and 0 at padding
AT_ONCE = 2**26  # bytes of samples among which texts of one length are sought
Array = NDArray[Any]


def mask_of(graph: ir.Graph) -> str | None:
    """Returns the name of the input [samples, tokens] that is 1 at tokens and 0 at padding; None without one.

    Args:
        graph: Main graph.
    """
    shapes = {str(value.name): query.dimensions(value) for value in graph.inputs if not value.is_initializer()}
    return next((name for name in NAMES if len(shapes.get(name) or ()) == 2), None)


@dataclass(frozen=True)
class Unpadded:
    """Samples of texts without the padding behind them, for repeated iteration.

    A batch has texts of one length; the shortest texts come first. Samples are unchanged if the graph fixes the number
    of tokens or samples, if an input has another dynamic axis, or if a mask has values other than 0 and 1 or zeros
    before a one.

    Attributes:
        model: Model with a mask input, see `mask_of`.
        samples: Batches, array [samples, ...] for every graph input.
    """

    model: ir.Model
    samples: Iterable[Batch]

    def __iter__(self) -> Iterator[Batch]:
        mask, names = _inputs_to_cut(self.model.graph)
        waiting: list[Batch] = []
        for batch in self.samples:
            lengths = _lengths(batch, mask, names)
            if lengths is None:
                yield batch
                continue
            for size in np.unique(lengths):
                rows = lengths == size
                waiting.append({name: x[rows][:, :size] if name in names else x[rows] for name, x in batch.items()})
            if sum(x.nbytes for part in waiting for x in part.values()) > AT_ONCE:
                yield from _of_one_length(waiting, mask)
                waiting = []
        yield from _of_one_length(waiting, mask)


def without_padding(batch: Batch, results: Sequence[Array], mask: str | None) -> list[Array]:
    """Returns results with zeros at padded positions.

    Args:
        batch: Batch of the graph's inputs.
        results: Results of the graph for the batch; those [samples, tokens, ...] are changed in the copy.
        mask: Result of `mask_of`; None: the results are returned as they are.
    """
    x = batch.get(mask or "")
    if x is None or x.ndim != 2 or (x != 0).all():
        return list(results)
    tokens = x != 0
    return [
        np.where(tokens.reshape(*x.shape, *[1] * (result.ndim - 2)), result, np.zeros((), result.dtype))
        if result.shape[:2] == x.shape and result.dtype.kind == "f"
        else result
        for result in results
    ]


def _inputs_to_cut(graph: ir.Graph) -> tuple[str, set[str]]:
    """Returns the mask, and the inputs whose second axis is its dynamic axis of tokens; empty if nothing can be cut."""
    mask = mask_of(graph)
    shapes = {str(value.name): query.symbolic_shape(value) for value in graph.inputs if not value.is_initializer()}
    tokens = (shapes[mask] or [1, 1])[1] if mask is not None else 1
    names = {name for name, shape in shapes.items() if shape and len(shape) == 2 and shape[1] == tokens}
    others = [shape for name, shape in shapes.items() if name not in names]
    fixed = all(shape and all(isinstance(size, int) for size in shape[1:]) for shape in others)
    sizes = {shape[0] for shape in shapes.values() if shape}
    if (
        mask is None
        or isinstance(tokens, int)
        or not fixed
        or any(isinstance(size, int) and size > 1 for size in sizes)
    ):
        return "", set()
    return mask, names


def _lengths(batch: Batch, mask: str, names: set[str]) -> NDArray[np.int64] | None:
    """Returns the number of tokens of every sample; None if the batch is not to be cut."""
    x = batch.get(mask)
    if x is None or x.ndim != 2 or not share_axis(batch) or not np.isin(x, (0, 1)).all():
        return None
    if any(batch[name].shape != x.shape for name in names & set(batch)) or (x[:, 1:] > x[:, :-1]).any():
        return None
    lengths: NDArray[np.int64] = np.count_nonzero(x, axis=1)
    return lengths if len(lengths) and lengths.all() else None


def _of_one_length(parts: Sequence[Batch], mask: str) -> Iterator[Batch]:
    """Yields samples of one length together."""
    for size in sorted({part[mask].shape[1] for part in parts}):
        yield joined([part for part in parts if part[mask].shape[1] == size])
