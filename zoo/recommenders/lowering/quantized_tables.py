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
from pipelines.kernels.recommenders.tables.quantized_rows import quantize
from zoo.recommenders.lowering.activity import Samples
from zoo.recommenders.lowering.plan import Decision

BITS = (8, 4, 2)  # tried in this order
BOUND = 3e-3  # largest change of an output by all quantized tables together, where the recipe has none
LEAST = 2**25  # bytes of int16 tables that stay as they are where the size of L3 is not known
SHARE = 64  # a table below this part of all of them stays int16
SPACE = 2**28  # bytes from which a table of lone lookups is quantized: that saves memory, and no time as lists do


@dataclass(frozen=True)
class QuantizedTable:
    """A table of quantized rows in place of int16 rows.

    Attributes:
        column: First column of the ids that select rows.
        rows: Rows of the table.
        width: Columns of the table.
        bits: Bits of an entry.
        megabytes: Size in 10^6 bytes.
        int16_megabytes: Size of its int16 rows in 10^6 bytes.
        change: Largest change of an output on random samples, with the tables quantized before.
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


def quantize_tables(
    program: ClickProgram, samples: Samples, caches: Mapping[str, int], bound: float = 0.0
) -> tuple[ClickProgram, list[QuantizedTable]]:
    """Quantizes the int16 tables of a program if together they do not fit L3.

    Tables get 8 bits, then 4, then 2, the largest table first, as long as no output on the samples differs from the
    original program's by more than the bound. Maxima and lone lookups of tables below `SPACE` stay int16, and tables
    that 8 bits change too much.

    Args:
        program: The program.
        samples: Inputs on which outputs are compared.
        caches: Cache sizes in bytes: {"L2", "L3"}.
        bound: Largest allowed change of an output; 0: `BOUND`.

    Returns:
        The program and its quantized tables, in the order of the steps.
    """
    gathers = {at: step for at, step in enumerate(program.steps) if isinstance(step, Gather)}
    total = sum(step.table.nbytes for step in gathers.values())
    if total <= (caches.get("L3") or LEAST):
        return program, []
    large = {at: step for at, step in gathers.items() if _pays(step, total)}
    expected = reference.run(program, *samples)
    quantized: dict[int, QuantizedTable] = {}
    for bits in BITS:
        for at, step in sorted(large.items(), key=lambda item: -item[1].table.nbytes):
            if bits < BITS[0] and at not in quantized:
                continue
            used = np.unique(samples.ids[:, step.column : step.column + step.count])
            try:
                changed = replace(program, steps=_with(program, at, _quantized(step, bits, used)))
            except RequestError:  # too long a list
                continue
            change = _largest_change(expected, reference.run(changed, *samples))
            if change <= (bound or BOUND):
                candidate = _quantized(step, bits)
                program = replace(program, steps=_with(program, at, candidate))
                size, before = (round(array.nbytes / 1e6, 3) for array in (candidate.table, step.table))
                change = float(f"{change:.2e}")
                quantized[at] = QuantizedTable(step.column, step.rows, step.width, bits, size, before, change)
    return program, [quantized[at] for at in sorted(quantized)]


def lowering_report(decisions: Mapping[str, Decision], tables: Sequence[QuantizedTable]) -> dict[str, Any]:
    """Returns the report of a lowered model, see `zoo.recommenders.lowering.lower.lower`.

    Args:
        decisions: What was folded, by hidden value.
        tables: The quantized tables.
    """
    reasons = [decision.reason for decision in decisions.values()] or ["one program of all operators"]
    if tables:
        counts = [(bits, sum(table.bits == bits for table in tables)) for bits in BITS]
        kinds = ", ".join(f"{count} of {bits} bits" for bits, count in counts if count)
        before, after = (sum(getattr(table, name) for table in tables) for name in ("int16_megabytes", "megabytes"))
        change = max(table.change for table in tables)
        sizes = f"int16 tables of {before:,.0f} MB quantized to {after:,.0f} MB"
        reasons.append(f"{sizes} ({kinds}), outputs change by at most {change:.1g}")
    layers = {name: decision.to_json() for name, decision in decisions.items()}
    report: dict[str, Any] = {"fold": True, "reason": "; ".join(reasons), "layers": layers, "refused": {}}
    return report | ({"tables": [table.to_json() for table in tables]} if tables else {})


def _pays(step: Gather, total: int) -> bool:
    size = step.table.nbytes
    return step.pool != "max" and size * SHARE >= total and (step.count > 1 or size >= SPACE)


def _with(program: ClickProgram, at: int, step: Step) -> tuple[Step, ...]:
    return (*program.steps[:at], step, *program.steps[at + 1 :])


def _quantized(step: Gather, bits: int, used: NDArray[Any] | None = None) -> QuantizedGather:
    rows = step.table[: step.rows * step.stride].reshape(step.rows, step.stride)[:, : step.width]
    table = quantize(rows, bits, used)
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


def _largest_change(expected: Sequence[NDArray[np.float32]], outputs: Sequence[NDArray[np.float32]]) -> float:
    changes = [float(np.abs(a - b).max(initial=0)) for a, b in zip(expected, outputs, strict=True)]
    return max(changes) if np.isfinite(changes).all() else np.inf
