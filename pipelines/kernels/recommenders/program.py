"""What a click program computes: steps on buffers, see `pipelines.kernels.recommenders.steps`.

A buffer holds a vector a sample: "u1" activations after a ReLU, "i2" codes in [-CODES, CODES], where real = code *
scale, "f4" floats. Who makes a program knows the scales; a step holds what it multiplies by. Floats are rounded one
operation at a time, and NaN is clipped to the lower bound. Sums of floats run over sixteen lanes (lane l adds elements
l, l + 16, ...), then over one tree.
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
    """A click model as steps on buffers: ids int [n, C], numbers float32 [n, M], scales float32 [n, B] to `outputs`.

    rows: int32 [C], how many rows an id of each column chooses from, 0 where none does; an id is checked once, before
    anything reads it. numbers, means: M and B. slots: (kind, width) of each buffer. outputs: buffers of "f4". Raises
    RequestError for anything that does not fit.
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
