"""Rows of 8, 4 or 2 bits in place of int16 rows, for tables that do not fit the caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.kernels.recommenders import reference
from pipelines.kernels.recommenders.program import ClickProgram
from pipelines.kernels.recommenders.steps import Gather, QuantizedGather, Step
from pipelines.kernels.recommenders.tables.quantized_rows import Extent, quantize
from zoo.recommenders.lowering.activity import Samples

BITS = (8, 4, 2)  # tried in this order
BOUND = 3e-3  # largest change of an output by all quantized tables together, where the recipe has none
MIN_TABLES_BYTES = 2**25  # bytes of int16 tables that stay as they are where the size of L3 is not known
SHARE = 64  # a table below this part of all of them stays int16
SPACE = 2**28  # bytes from which a table of lone lookups is quantized: that saves memory, and no time as lists do


@dataclass(frozen=True)
class LookupTable:
    """A table that is looked up row by row, with int16 rows or quantized rows in their place.

    Attributes:
        column: First column of the ids that select rows.
        rows: Rows of the table.
        width: Columns of the table.
        bits: Bits of an entry, 16 or fewer.
        megabytes: Size in 10^6 bytes.
        int16_megabytes: Size of its int16 rows in 10^6 bytes.
        change: Largest change of an output on random samples, with the tables quantized before; 0 for 16 bits.
    """

    column: int
    rows: int
    width: int
    bits: int
    megabytes: float
    int16_megabytes: float
    change: float

    def to_json(self) -> dict[str, Any]:
        """Returns the table as plain JSON values."""
        return asdict(self)


class QuantizedTables:
    """Quantizes the int16 tables of a model's programs, where together they do not fit L3.

    Tables get 8 bits, then 4, then 2, the largest table first, as long as no output on the samples changes by more than
    half of the bound. The other half is left to other rows and to the integers of layers. Tables remain int16 if 8 bits
    change an output too much, or if they are below `SPACE` and read by single lookups. Programs that share a table get
    the same quantized one.

    Args:
        caches: Cache sizes in bytes: {"L2", "L3"}.
        bound: Largest allowed change of an output; 0: `BOUND`.
    """

    def __init__(self, caches: Mapping[str, int], bound: float = 0.0) -> None:
        self._room, self._bound = caches.get("L3") or MIN_TABLES_BYTES, (bound or BOUND) / 2
        self._known: dict[int, tuple[Gather, QuantizedGather | None]] = {}  # by the address of the int16 table
        self._made: dict[int, LookupTable] = {}

    @property
    def made(self) -> list[LookupTable]:
        """The quantized tables, in the order of the columns."""
        return sorted(self._made.values(), key=lambda table: table.column)

    def tables(self, program: ClickProgram) -> list[LookupTable]:
        """Returns the tables of a program that are looked up row by row, in the order of the columns.

        Args:
            program: Program of `applied`.
        """
        plain = []
        for step in program.steps:
            if isinstance(step, Gather) and not step.coarse:
                size = round(step.table.nbytes / 1e6, 3)
                plain.append(LookupTable(step.column, step.rows, step.width, 16, size, size, 0.0))
        return sorted([*plain, *self._made.values()], key=lambda table: table.column)

    def applied(self, program: ClickProgram, samples: Samples) -> ClickProgram:
        """Returns a program with quantized tables.

        Args:
            program: The program.
            samples: Inputs on which outputs are compared.
        """
        gathers = {i: step for i, step in enumerate(program.steps) if isinstance(step, Gather) and not step.coarse}
        total = sum(step.table.nbytes for step in gathers.values())
        if total <= self._room:
            return program
        large = {i: step for i, step in gathers.items() if _pays(step, total)}
        for index, step in list(large.items()):
            if (cached := self._known.get(id(step.table))) is not None:
                if cached[1] is not None:
                    same = replace(cached[1], out=step.out, position=step.position)
                    program = replace(program, steps=_with(program, index, same))
                del large[index]
        if large:
            program = self._quantized(program, large, samples)
            for index, step in large.items():
                made = program.steps[index]
                self._known[id(step.table)] = step, made if isinstance(made, QuantizedGather) else None
        return program

    def _quantized(self, program: ClickProgram, large: Mapping[int, Gather], samples: Samples) -> ClickProgram:
        expected = reference.run(program, *samples)
        chosen: dict[int, tuple[int, float]] = {}  # bits and change by step
        tried = program  # with the rows that samples read
        extents = {i: Extent.of(_rows(step)) for i, step in large.items()}
        for bits in BITS:
            for index, step in sorted(large.items(), key=lambda item: -item[1].table.nbytes):
                if bits < BITS[0] and index not in chosen:
                    continue
                used = np.unique(samples.ids[:, step.column : step.column + step.count])
                try:
                    changed = replace(tried, steps=_with(tried, index, _quantized(step, bits, extents[index], used)))
                except RequestError:  # too long a list
                    continue
                change = largest_change(expected, reference.run(changed, *samples))
                if change <= self._bound:
                    tried, chosen[index] = changed, (bits, float(f"{change:.2e}"))
        for index, (bits, change) in chosen.items():
            step, made = large[index], _quantized(large[index], bits, extents[index])
            program = replace(program, steps=_with(program, index, made))
            size, before = (round(array.nbytes / 1e6, 3) for array in (made.table, step.table))
            self._made[id(step.table)] = LookupTable(step.column, step.rows, step.width, bits, size, before, change)
        return program


def tables_report(tables: Sequence[LookupTable]) -> list[str]:
    """Returns the line of a report on quantized tables, if there are any.

    Args:
        tables: Tables of the model.
    """
    tables = [table for table in tables if table.bits < 16]
    if not tables:
        return []
    counts = [(bits, sum(table.bits == bits for table in tables)) for bits in BITS]
    kinds = ", ".join(f"{count} of {bits} bits" for bits, count in counts if count)
    before, after = (sum(getattr(table, name) for table in tables) for name in ("int16_megabytes", "megabytes"))
    change = max(table.change for table in tables)
    sizes = f"int16 tables of {before:,.0f} MB quantized to {after:,.0f} MB"
    return [f"{sizes} ({kinds}), outputs change by at most {change:.1g}"]


def _pays(step: Gather, total: int) -> bool:
    size = step.table.nbytes
    return size * SHARE >= total and (step.count > 1 or size >= SPACE)


def _with(program: ClickProgram, index: int, step: Step) -> tuple[Step, ...]:
    return (*program.steps[:index], step, *program.steps[index + 1 :])


def _rows(step: Gather) -> NDArray[Any]:
    return step.table[: step.rows * step.stride].reshape(step.rows, step.stride)[:, : step.width]


def _quantized(step: Gather, bits: int, extent: Extent, used: NDArray[Any] | None = None) -> QuantizedGather:
    table = quantize(_rows(step), bits, used, extent)
    return QuantizedGather(
        step.out,
        step.position,
        table.data,
        table.rows,
        table.width,
        bits,
        table.scale_unit,
        table.bias_unit,
        step.column,
        step.count,
        step.pool,
        step.factor,
        step.mean,
    )


def largest_change(expected: Sequence[NDArray[np.float32]], outputs: Sequence[NDArray[np.float32]]) -> float:
    """Returns the largest difference between outputs; infinite if one is not finite.

    Args:
        expected: Outputs.
        outputs: Outputs of the same shapes.
    """
    changes = [float(np.abs(a - b).max(initial=0)) for a, b in zip(expected, outputs, strict=True)]
    return max(changes) if np.isfinite(changes).all() else np.inf
