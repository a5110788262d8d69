"""Programs of recommenders: steps on buffers, see `pipelines.kernels.recommenders.steps`.

A sample has three inputs: `ids`, rows of embedding tables; `numbers`, numeric columns; and `scales`, the reciprocals of
the lengths of lists, which make means of sums of rows.

A buffer holds one vector per sample: "u1" activations after a ReLU, "i2" codes in [-CODES, CODES], where real = code *
scale, "f4" floats. Scales are known where the program is built; steps hold the resulting factors. Floats are rounded
after every operation, and NaN is clipped to the lower bound. Sums of floats use sixteen lanes (lane l adds the elements
l, l + 16, ...), followed by one reduction tree.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from pipelines.core.errors import RequestError
from pipelines.kernels.arrays import Array, require
from pipelines.kernels.recommenders.steps import KINDS, Slots, Step
from pipelines.kernels.recommenders.steps.base import MAX_WIDTH

OUTPUTS = 64


@dataclass(frozen=True, eq=False)
class ClickProgram:
    """Recommender as steps on buffers.

    Attributes:
        rows: Number of table rows that the ids of every column select from, 0 for unused columns; int32 [C]. Ids are
            checked once, before any step reads them.
        numbers: Number M of numeric columns.
        means: Number B of lists with a mean, each of which has a column of `scales`.
        slots: (kind, width) of every buffer.
        steps: The steps in order.
        outputs: Buffers of the results, of kind "f4".

    Raises:
        RequestError: Sizes or values do not fit.
    """

    rows: Array
    numbers: int
    means: int
    slots: tuple[tuple[str, int], ...]
    steps: tuple[Step, ...]
    outputs: tuple[int, ...] = field(default=())
    name: ClassVar[str] = "ClickProgram"

    def __post_init__(self) -> None:
        require(self.name, "rows", self.rows, np.int32, (self.rows.size,))
        if not self.rows.size or self.rows.min() < 0 or self.numbers < 0 or self.means < 0:
            raise RequestError(f"a {self.name} has no ids, or counts below 0")
        if not 1 <= len(self.outputs) <= OUTPUTS:
            raise RequestError(f"a {self.name} has {len(self.outputs)} outputs, expected 1 to {OUTPUTS}")
        if any(kind not in KINDS or not 1 <= width <= MAX_WIDTH for kind, width in self.slots):
            raise RequestError(f"a {self.name} has buffers of an unknown kind or width")
        slots = Slots(self.slots)
        for step in self.steps:
            step.check(self, slots)
        for slot in self.outputs:
            slots.read(self, slot, "f4")
