"""Base class of the steps of a program, and functions that steps share."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.kernels.arrays import Array, require
from pipelines.kernels.recommenders.operators import ZERO
from pipelines.kernels.transformer.reference import exponential

if TYPE_CHECKING:
    from pipelines.kernels._native import ClickProgram as NativeProgram
    from pipelines.kernels.recommenders.program import ClickProgram

CODES = 4095
AHEAD = 16  # groups of four samples that rows may be fetched ahead, at most
BYTE = 32  # codes of a step of the bytes that replace them
SLACK = 32  # int16 behind the last row of a table of codes, which kernels may read
VECTORS = 128  # number of products of two codes whose sum fits int32
MAX_WIDTH = 2**20
NONE = np.zeros(0, np.float32)  # of optional arrays
MAX_OUTPUTS = 64  # buffers that one step writes or sums
KINDS = {"u1": np.uint8, "i2": np.int16, "f4": np.float32}


@dataclass(eq=False)
class Run:
    """A program while it computes in numpy.

    Attributes:
        ids: Integers [n, C].
        numbers: float32 [n, M], or None.
        scales: float32 [n, B], or None.
        buffers: The buffers, [n, width] each.
    """

    ids: NDArray[Any]
    numbers: Any
    scales: Any
    buffers: list[NDArray[Any]]


class Step(ABC):
    """One operator of a click program: a frozen dataclass whose attributes are its parameters and buffers.

    `ClickProgram` of click_program.cpp has a method of the same name in lower case, `ClickKernels` of isa.h its kernel.
    """

    @abstractmethod
    def check(self, program: ClickProgram, slots: Slots) -> None:
        """Checks the step in its program.

        Args:
            program: The program, whose inputs the step may read.
            slots: The buffers; those that the step writes are noted there.

        Raises:
            RequestError: The step does not fit the program.
        """

    @abstractmethod
    def compute(self, run: Run) -> None:
        """Computes the step in numpy; this defines the bits that its kernels return.

        Args:
            run: State of the program; the buffers that the step writes are updated.
        """

    @abstractmethod
    def add_to(self, program: NativeProgram) -> None:
        """Adds the step to a native program.

        Args:
            program: Native program.
        """


_READ_TABLES = ContextVar("_READ_TABLES", default=True)


@contextlib.contextmanager
def unread_tables() -> Iterator[None]:
    """Context in which steps do not check the values of their tables, for those that do not fit into memory."""
    token = _READ_TABLES.set(False)
    try:
        yield
    finally:
        _READ_TABLES.reset(token)


def reads_tables() -> bool:
    """Whether steps check the values of their tables, which reads them."""
    return _READ_TABLES.get()


class Slots:
    """Buffers of a program and which of them are written, while its steps are checked in order.

    Args:
        slots: (kind, width) of every buffer.
    """

    def __init__(self, slots: Sequence[tuple[str, int]]) -> None:
        self.slots, self.written, self._ends = slots, set[int](), dict[int, int]()

    def read(self, step: object, slot: int, kind: str) -> int:
        """Checks a buffer that a step reads.

        Args:
            step: The step, for messages.
            slot: Index of the buffer.
            kind: Required kind.

        Returns:
            Width of the buffer.

        Raises:
            RequestError: No earlier step writes the buffer, or it is of another kind.
        """
        if slot not in self.written:
            raise RequestError(f"{type(step).__name__} reads buffer {slot}, which no step before it writes")
        return self._width(step, slot, kind)

    def write(self, step: object, slot: int, kind: str) -> int:
        """Checks a buffer that a step writes, and records it as written.

        Args:
            step: The step, for messages.
            slot: Index of the buffer.
            kind: Required kind.

        Returns:
            Width of the buffer.

        Raises:
            RequestError: The buffer is of another kind.
        """
        width = self._width(step, slot, kind)
        self.written.add(slot)
        return width

    def write_codes(self, step: object, slot: int, position: int, width: int, kind: str = "i2") -> None:
        """Checks columns of codes or bytes that a step writes; they must follow the columns written before.

        Kernels may overwrite later columns.

        Args:
            step: The step, for messages.
            slot: Index of the buffer.
            position: First column.
            width: Number of columns.
            kind: Required kind of the buffer.

        Raises:
            RequestError: The columns do not fit.
        """
        require_fit(step, self._ends.get(slot, 0) == position <= self.write(step, slot, kind) - width)
        self._ends[slot] = position + width

    def _width(self, step: object, slot: int, kind: str) -> int:
        if not 0 <= slot < len(self.slots) or self.slots[slot][0] != kind:
            raise RequestError(f"{type(step).__name__} has buffer {slot}; expected one of {kind}")
        return self.slots[slot][1]


def require_fit(step: object, condition: bool) -> None:
    """Raises RequestError, with the name of the step, unless its sizes fit.

    Args:
        step: The step.
        condition: Whether they fit.

    Raises:
        RequestError: They do not.
    """
    if not condition:
        raise RequestError(f"the sizes of {type(step).__name__} do not fit its buffers or the inputs of the program")


def require_finite(step: object, *values: float | Array) -> None:
    """Raises RequestError, with the name of the step, for values that are infinite or NaN.

    Args:
        step: The step.
        *values: Values to check.

    Raises:
        RequestError: A value is not finite.
    """
    if not all(np.isfinite(array).all() for array in values):
        raise RequestError(f"{type(step).__name__} has values that are not finite")


def require_ids(step: object, program: ClickProgram, first: int, count: int, rows: int) -> None:
    """Raises RequestError, with the name of the step, unless columns of the ids select from at most `rows` rows.

    Args:
        step: The step.
        program: Its program.
        first: First column.
        count: Number of columns.
        rows: Rows of the table.

    Raises:
        RequestError: They do not.
    """
    require_fit(step, count >= 1 and 0 <= first <= program.rows.size - count)
    limits = program.rows[first : first + count]
    require_fit(step, limits.min() >= 1 and limits.max() <= rows)


def require_gaps(
    step: object, program: ClickProgram, begin: int, count: int, tables: Mapping[str, tuple[Array, tuple[int, ...]]]
) -> None:
    """Raises RequestError, with the name of the step, unless tables of time gaps fit a sequence.

    Args:
        step: The step.
        program: Its program.
        begin: First column of the ids that select their rows; -1 for none, with empty tables.
        count: Number of columns.
        tables: (table of float32, shape of its rows) by name.

    Raises:
        RequestError: They do not.
    """
    require_fit(step, begin >= -1)
    rows = {len(table) for table, _ in tables.values()}
    require_fit(step, len(rows) == 1 and (begin >= 0 or rows == {0}))
    if begin < 0:
        return
    for name, (table, shape) in tables.items():
        require(type(step).__name__, name, table, np.float32, (len(table), *shape))
        require_finite(step, table)
    require_ids(step, program, begin, count, *rows)


def require_vectors(step: object, positions: Array, width: int, room: int) -> None:
    """Checks vectors at positions of codes.

    Args:
        step: The step.
        positions: First code of every vector, int32 [F].
        width: Width of the vectors.
        room: Number of codes.

    Raises:
        RequestError: The vectors do not fit.
    """
    require(type(step).__name__, "positions", positions, np.int32, (positions.size,))
    require_fit(step, 1 <= positions.size <= VECTORS and 1 <= width <= VECTORS)
    require_fit(step, positions.min() >= 0 and positions.max() <= room - width)


def lane_sum(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Sums along the last axis in the order of the kernels.

    Args:
        values: float32 [n, width].

    Returns:
        float32 [n].
    """
    n, width = values.shape
    padded = np.zeros((n, -(-width // 16) * 16), np.float32)
    padded[:, :width] = values
    lanes = np.zeros((n, 16), np.float32)
    for start in range(0, padded.shape[1], 16):
        lanes += padded[:, start : start + 16]
    eight = lanes[:, :8] + lanes[:, 8:]
    four = eight[:, :4] + eight[:, 4:]
    return np.asarray((four[:, 0] + four[:, 2]) + (four[:, 1] + four[:, 3]))


def softmax(gates: NDArray[np.float32]) -> NDArray[np.float32]:
    """Computes the softmax along the last axis, with sums from the first column on.

    Args:
        gates: float32 [n, K].

    Returns:
        float32 [n, K].
    """
    weights, total = exponential(gates - gates.max(axis=1, keepdims=True)), np.zeros((len(gates), 1), np.float32)
    for column in weights.T:
        total += column[:, None]
    return np.asarray(weights / total)


def to_codes(values: NDArray[np.float32]) -> NDArray[np.int16]:
    """Rounds floats to codes, ties to even.

    Args:
        values: float32 array; NaN becomes the lowest code.

    Returns:
        int16 array of the same shape.
    """
    return np.asarray(_rounded(values, -CODES, CODES), np.int16)


def to_bytes(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Rounds floats to signed bytes with zero point 128, ties to even.

    Args:
        values: float32 array; NaN becomes the lowest byte.

    Returns:
        uint8 array of the same shape.
    """
    return np.asarray(_rounded(values, -ZERO, 255 - ZERO) + ZERO, np.uint8)


def _rounded(values: NDArray[np.float32], least: int, most: int) -> NDArray[np.float32]:
    """Rounds floats to integers of a range, NaN to the lowest."""
    filled = np.where(np.isnan(values), np.float32(least), values)
    return np.asarray(np.rint(np.clip(filled, least, most)), np.float32)


def vectors(x: NDArray[np.int16], positions: NDArray[Any], width: int) -> NDArray[np.int32]:
    """Gathers vectors of codes.

    Args:
        x: Codes, int16 [n, codes].
        positions: First code of every vector, int32 [F].
        width: Width of the vectors.

    Returns:
        int32 [n, F, width].
    """
    return np.stack([x[:, start : start + width] for start in positions], axis=1).astype(np.int32)
