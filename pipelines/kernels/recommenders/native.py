"""Click programs as native objects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipelines.kernels.arrays import contiguous
from pipelines.kernels.extension import required
from pipelines.kernels.recommenders.program import ClickProgram
from pipelines.kernels.recommenders.tables.cached_tables import CachedTables

RECORDS, SCORES = "records", "scores"  # kinds of values precomputed for items


@dataclass(frozen=True)
class SharedInputs:
    """Inputs that are the same in all samples of a call, as those of a user whose candidates are ranked.

    Attributes:
        ids: Positions of columns in the input ids.
        numbers: Positions of columns in the input numbers.
        scales: Positions of columns in the input scales.
    """

    ids: Sequence[int] = ()
    numbers: Sequence[int] = ()
    scales: Sequence[int] = ()


def click_program(
    program: ClickProgram,
    isa: str = "",
    shared: SharedInputs | None = None,
    items: str = "",
    cached: CachedTables | None = None,
    steps: int | None = None,
) -> Any:
    """Creates the native object of a program.

    The object is called as (ids int32 or int64 [n, C], numbers float32 [n, M] or None, scales float32 [n, B] or None)
    and returns float32 [n, width], or a tuple of such arrays for several outputs. Arrays must be C-contiguous and
    aligned; n may be 0. Tables are not copied. The call raises IndexError for an id outside its table, before reading a
    table with it, and TypeError or ValueError for other arrays.

    What depends on `shared` inputs alone is computed once a call, from its first sample; the results have the same
    bits, since the sums that are split are sums of integers.

    With `items` the other inputs are those of items, and what depends on these alone is computed once an item:
    `object.items(count)` has room for items of `object.item_bytes` each, `object.fill(items, first, ids, numbers,
    scales)` computes those from `first` on, and `object.rank(items, positions, ids, numbers, scales)`, with one row of
    shared inputs, returns the results of the items at these positions, int64 [n]. Inputs that are not read, the shared
    ones of `fill` and the items' of `rank`, hold ids of rows.

    Args:
        program: The program.
        isa: Instruction set of the kernels, one of `pipelines.kernels.extension.isas`; "" for the fastest.
        shared: Inputs that are the same in all samples of a call; those of its first sample count. Numbers and scales
            are left out where the program takes none.
        items: `RECORDS`: all other inputs are those of items, and there is no call of the object; `SCORES`: besides,
            target attention computes its scores of every item and all items of its table, `object.score_bytes` each.
        cached: Tables whose rows are read from their file; such a program computes one call at a time.
        steps: Number of steps that are run, to time them; None for all. With fewer there are no outputs.

    Returns:
        Native `ClickProgram`.
    """
    slots = [(kind, width) for kind, width in program.slots]
    made = required().ClickProgram(contiguous(program.rows), program.numbers, program.means, slots, isa)
    if shared is not None:
        numbers, scales = (shared.numbers if program.numbers else ()), (shared.scales if program.means else ())
        made.share(list(shared.ids), list(numbers), list(scales))
    if items:
        made.keep_items(items == SCORES)
    if cached is not None:
        made.cache(str(cached.path), list(cached.tables))
    for step in program.steps[:steps]:
        step.add_to(made)
    made.outputs(list(program.outputs) if steps is None or steps >= len(program.steps) else [])
    return made
