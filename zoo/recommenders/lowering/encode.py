"""Lays out the int16 codes that a program multiplies, and the lookup steps that fill them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from pipelines.core import machine
from pipelines.core.errors import RequestError
from pipelines.core.machine import BLOCK_ROWS
from pipelines.kernels.recommenders import steps
from pipelines.kernels.recommenders.steps import CODES, SLACK
from zoo.recommenders.lowering.expressions import Dots, Expression, Field
from zoo.recommenders.lowering.integer_layers import positive
from zoo.recommenders.lowering.plan import HEADROOM, LoweringOptions, LoweringPlan

Key = tuple[int, int, str, int]  # column, count, pooling, mean of a field


class CodeLayout(LoweringPlan):
    """Lowering plan with the buffers (`slots`) and first steps of its program.

    Args:
        options: Graph and form.

    Attributes:
        slots: (kind, width) of every buffer.
        steps: Steps of the program.
        x: Buffer of the codes.

    Raises:
        RequestError: An expression is not supported.
    """

    def __init__(self, options: LoweringOptions) -> None:
        super().__init__(options)
        self._tables = options.tables
        self.slots: list[tuple[str, int]] = []
        self.steps: list[steps.Step] = []
        self._at: dict[Expression, tuple[int, float]] = {}  # (position, scale) among the codes
        self._numbers_at = 0

    def _lay_out(self) -> None:
        """Assigns positions and scales among the codes, and adds the steps that look them up."""
        numbers, _ = self._widths()
        order = {part: i for i, group in reversed(list(enumerate(self.groups.values()))) for part in group.parts}
        needed = {part for group in self.groups.values() for part in group.parts if part not in group.folded}
        looked_up = {_key(field) for field in self.raw}
        for term in self.summed:  # a scalar next to codes is read with them
            if term.width > 1 or term.pool or _key(term) in looked_up:
                self.raw[term] = None
        keys: dict[Key, list[Field]] = {}
        for part in sorted(self.raw, key=lambda field: order[field] if field in needed else len(self.groups)):
            keys.setdefault(_key(part), []).append(part)
        even = max((self._max_magnitude(part) for part in self.even), default=0.0) / CODES
        scale = {part: even for part in self.even}
        position = 0
        before = self._before_numbers(keys)
        for number, fields in enumerate(keys.values()):
            if number == before:
                self._numbers_at, position = position, position + numbers
            for field in fields:
                self._at[field] = (position, scale.get(field) or positive(self._max_magnitude(field) / CODES))
                position += field.width
        if before == len(keys):
            self._numbers_at, position = position, position + numbers
        for piece in (*self.spread, *self._ordered_pieces()):
            self._at[piece] = (position, scale.get(piece) or positive(self._max_magnitude(piece) / CODES))
            position += piece.width
        self.x = self._slot("i2", max(position, 1))
        self._codes_width = position
        keyed = list(keys.items())
        for key, fields in keyed[:before]:
            self._gather(*key, fields)
        if numbers and self.numbers:
            value = self.reader.numbers
            assert value is not None
            step = positive(HEADROOM * self._range(str(value.name)) / CODES)
            self._number_scale = step
            own = np.arange(numbers, dtype=np.int32)
            self.steps.append(steps.Numbers(self.x, self._numbers_at, own, np.full(numbers, 1 / step, np.float32)))
        for key, fields in keyed[before:]:
            self._gather(*key, fields)
        if self.spread:
            columns = np.concatenate([part.columns for part in self.spread]).astype(np.int32)
            factor = np.concatenate([part.factor / self._at[part][1] for part in self.spread]).astype(np.float32)
            self.steps.append(steps.Numbers(self.x, self._at[next(iter(self.spread))][0], columns, factor))

    def _before_numbers(self, keys: Mapping[Key, Sequence[Field]]) -> int:
        """Returns the number of lookups placed before the numbers: those that only the first layers read.

        A layer multiplies all codes between its first and its last input; this order lets other layers skip them.
        """
        first, *others = [set(group.parts) - set(group.folded) for group in self.groups.values()] or [set()]
        alone = first.difference(*others) if others else set()
        return sum(alone.issuperset(fields) for fields in keys.values())

    def _ordered_pieces(self) -> list[Expression]:
        """Returns the computed vectors, layers first, then the values computed from them."""
        return sorted(self.pieces, key=lambda piece: isinstance(piece, Dots))

    def _gather(self, column: int, count: int, pool: str, mean: int, fields: list[Field]) -> None:
        factor = 1.0
        if pool in ("sum", "mean"):  # codes of the table are finer than those of the result
            factor = max(self._largest(field) / (CODES * self._at[field][1]) for field in fields)
            factor = min(max(factor, 1e-6), 1.0)
        height, width = len(fields[0].table), sum(field.width for field in fields)
        if any(len(field.table) != height for field in fields):
            raise RequestError(f"tables of column {column} differ in their rows")
        units = [self._at[field][1] * factor for field in fields]
        key = tuple(zip(map(id, fields), units, strict=True))
        if (table := self._tables.get(key)) is None:
            table = machine.large_zeros((height * width + SLACK,), np.int16)
            codes, start = table[: height * width].reshape(height, width), 0
            for field, unit in zip(fields, units, strict=True):
                for first in range(0, height, BLOCK_ROWS):
                    rows = field.table[first : first + BLOCK_ROWS]
                    block = codes[first : first + BLOCK_ROWS, start : start + field.width]
                    block[:] = np.clip(np.rint(rows / unit), -CODES, CODES)
                start += field.width
            self._tables[key] = table
        self.steps.append(
            steps.Gather(self.x, self._at[fields[0]][0], table, height, width, width, column, count, pool, factor, mean)
        )

    def _slot(self, kind: str, width: int) -> int:
        self.slots.append((kind, width))
        return len(self.slots) - 1


def _key(field: Field) -> Key:
    return field.column, field.count, field.pool, field.mean
