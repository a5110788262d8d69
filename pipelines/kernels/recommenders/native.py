"""Click programs as native objects."""

from __future__ import annotations

from typing import Any

from pipelines.kernels.arrays import contiguous
from pipelines.kernels.extension import required
from pipelines.kernels.recommenders.program import ClickProgram


def click_program(program: ClickProgram, isa: str = "") -> Any:
    """`ClickProgram` as a native object: `(ids int32 or int64 [n, C], numbers float32 [n, M] or None, scales float32
    [n, B] or None) -> float32 [n, width]`, or a tuple of such where the program has several outputs.

    All arrays C-contiguous and aligned; any n, also 0. Tables are used where they lie. Raises, when called, IndexError
    for an id that is no row, before a table is read with it, and TypeError or ValueError for other arrays.
    """
    slots = [(kind, width) for kind, width in program.slots]
    made = required().ClickProgram(contiguous(program.rows), program.numbers, program.means, slots, isa)
    for step in program.steps:
        step.add_to(made)
    made.outputs(list(program.outputs))
    return made
