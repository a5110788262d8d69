"""Masks and biases of attention that depend on the distance of a key from a query alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import onnx_ir as ir

from pipelines.graph import edit, query
from pipelines.kernels.transformer.mapping.activations import GraphActivations
from pipelines.kernels.transformer.mapping.layers import Array
from pipelines.kernels.transformer.mapping.values import PROBE

MASKED = -1e4  # a mask adds at most this where attention is hidden
MAX_TOKENS = 8192  # tokens, where no table of the graph limits a text
CHECKED = 300  # tokens for which a mask is compared with its function of distance


class GraphDistances(GraphActivations):
    """Computes the bias of attention scores for all distances at once."""

    def __init__(self, model: ir.Model, names: tuple[str, ...], memory: str, for_kernels: bool = True) -> None:
        """See `GraphValues`."""
        super().__init__(model, names, memory, for_kernels)
        self._masks: dict[tuple[ir.Value, ...], tuple[int | None, int | None, Array | None]] = {}

    def _by_distance(
        self, value: ir.Value, masks: list[ir.Value | None], heads: int, longest: int
    ) -> tuple[int | None, int | None, Array | None]:
        """Reads masks that depend on the distance of a key from a query alone.

        Args:
            value: The value that is mapped.
            masks: What is added to the scores.
            heads: Number of heads.
            longest: Maximum number of tokens.

        Returns:
            Keys before and after a query that it attends to, None for all; the bias [heads, 2 P - 1] or None.
        """
        key = tuple(mask for mask in masks if mask is not None)
        if key not in self._masks:
            rows: list[Array] = []
            for mask in key:
                if (row := self._distance_row(value, mask, longest)) is not None:
                    rows.append(row)
            shortest = min((len(row[0]) for row in rows), default=0)
            rows = [row[:, (len(row[0]) - shortest) // 2 :][:, :shortest] for row in rows]
            self._masks[key] = self._window(value, rows, heads)
        return self._masks[key]

    def _window(self, value: ir.Value, rows: list[Array], heads: int) -> tuple[int | None, int | None, Array | None]:
        """Splits a bias by distance into a window and the bias within it."""
        if not rows:
            return None, None, None
        total = np.asarray(sum(rows), np.float32)
        most = total.shape[1] // 2
        hidden = total.max(axis=0) <= MASKED
        before = int(np.argmax(hidden[most::-1])) - 1 if hidden[: most + 1].any() else most
        after = int(np.argmax(hidden[most:])) - 1 if hidden[most:].any() else most
        visible = slice(most - before, most + after + 1)
        if (
            min(before, after) < 0
            or hidden.sum() != total.shape[1] - before - after - 1
            or (total[:, visible] <= MASKED).any()
        ):
            self.refuse(value, "its mask hides tokens otherwise than by a window around a query")
        bias = None
        if total[:, visible].any():
            bias = np.zeros((heads, total.shape[1]), np.float32)
            bias[:, visible] = total[:, visible]
        return None if before == most else before, None if after == most else after, bias

    def _distance_row(self, value: ir.Value, mask: ir.Value, longest: int) -> Array | None:
        """Returns the bias [heads or 1, 2 P - 1] of a mask that depends only on the distance of two tokens, or None.

        It is computed for all distances at once, not for all pairs of P tokens: what computes key - query is fed.
        """
        distances = dict(self._distances(value, mask))
        if not distances:
            if self._evaluate(value, mask).any():
                self.refuse(value, "its mask hides tokens, or is of more than their distance")
            return None
        # a table by distance, from the furthest key before a query to the furthest after it
        tables = [(rows + 1) // 2 for rows in self._rows_of([mask], 1) if rows % 2 and rows > 1]
        length = min([longest, *tables])
        part = edit.extract(
            self.model, [*self.names, *(str(distance.name) for distance in distances)], [str(self.skip_qdq(mask).name)]
        )
        ahead = np.arange(1 - length, length)
        feed = {name: self._probe(name, len(ahead), 0) for name in self.names}
        for distance, sign in distances.items():
            shape = [1] * ((query.rank(distance) or 2) - 1) + [-1]
            kind = ir.DataType(distance.dtype or ir.DataType.INT64).numpy()
            feed[str(distance.name)] = (sign * ahead).reshape(shape).astype(kind)
        for graph_input in part.graph.inputs:
            graph_input.shape = None
        result = self._run(part, {str(one.name): feed[str(one.name)] for one in part.graph.inputs})
        row = result.reshape(-1, len(ahead))
        few = min(length, CHECKED)
        square = self._evaluate(value, mask, few).reshape(-1, few, few)
        if not np.array_equal(row[:, np.arange(few) - np.arange(few)[:, None] + length - 1], square):
            self.refuse(value, "its mask is of more than the distance of tokens")
        return row

    def _distances(self, value: ir.Value, mask: ir.Value) -> Iterator[tuple[ir.Value, int]]:
        """Yields the values before a mask that are the distances of all keys from all queries, with their sign."""
        expected = np.arange(PROBE) - np.arange(PROBE)[:, None]
        waiting, seen = [mask], set[ir.Value]()
        while waiting:
            part = self.skip_qdq(waiting.pop())
            node = part.producer()
            if part in seen or node is None or self.constant(part) is not None:
                continue
            seen.add(part)
            if query.is_op(node, "Sub"):
                result = np.squeeze(self._evaluate(value, part))
                for sign in (1, -1):
                    if np.array_equal(sign * result, expected):
                        yield part, sign
                        break
                else:
                    waiting += [x for x in node.inputs if x is not None]
                continue
            waiting += [x for x in node.inputs if x is not None]

    def _rows_of(self, values: Sequence[ir.Value], least: int = 2) -> Iterator[int]:
        """Yields the number of rows of each constant table, of `least` axes, from which values are computed."""
        waiting, seen = list(values), set[ir.Value]()
        while waiting:
            value = waiting.pop()
            if value in seen:
                continue
            seen.add(value)
            array = self.constant(value)
            if array is not None:
                if array.ndim >= least:
                    yield array.shape[-2] if array.ndim > 1 else len(array)
            elif (node := value.producer()) is not None:
                waiting += [x for x in node.inputs if x is not None]
