"""What a click program computes: steps on buffers, each a validated dataclass. `reference.run` is the same in numpy.

A buffer holds a vector a sample: "u1" activations after a ReLU, "i2" codes in [-CODES, CODES], where real = code *
scale, "f4" floats. Who makes a program knows the scales; a step holds what it multiplies by. Floats are rounded one
operation at a time, and NaN is clipped to the lower bound. Sums of floats run over sixteen lanes (lane l adds elements
l, l + 16, ...), then over one tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import numpy as np

from pipelines.core.errors import RequestError
from pipelines.kernels.arrays import Array, require
from pipelines.kernels.recommenders.operators import COLUMNS, FIELDS, LinearLayer

CODES = 4095
SLACK = 32  # int16 behind the last row of a table of codes, which kernels may read
VECTORS = 128  # so many products of two codes an int32 holds the sum of
WIDEST = 2**20
OUTPUTS = 64
POOLS = ("", "sum", "mean", "max")
KINDS = {"u1": np.uint8, "i2": np.int16, "f4": np.float32}


class _Slots:
    """Which buffers there are, and which are written, while the steps of a program are checked in order."""

    def __init__(self, slots: Sequence[tuple[str, int]]) -> None:
        self.slots, self.written, self._ends = slots, set[int](), dict[int, int]()

    def read(self, step: object, slot: int, kind: str) -> int:
        """The width of a buffer that the step reads."""
        if slot not in self.written:
            raise RequestError(f"{type(step).__name__} reads buffer {slot}, which no step before it writes")
        return self._width(step, slot, kind)

    def write(self, step: object, slot: int, kind: str) -> int:
        """The width of a buffer that the step writes."""
        width = self._width(step, slot, kind)
        self.written.add(slot)
        return width

    def place(self, step: object, slot: int, position: int, width: int) -> None:
        """Columns of codes that the step writes: the next ones, since it may touch those behind."""
        _fits(step, self._ends.get(slot, 0) == position <= self.write(step, slot, "i2") - width)
        self._ends[slot] = position + width

    def _width(self, step: object, slot: int, kind: str) -> int:
        if not 0 <= slot < len(self.slots) or self.slots[slot][0] != kind:
            raise RequestError(f"{type(step).__name__} has buffer {slot}; wanted one of {kind}")
        return self.slots[slot][1]


def _fits(step: object, right: bool) -> None:
    if not right:
        raise RequestError(f"the sizes of {type(step).__name__} do not fit its buffers or the inputs of the program")


def _finite(step: object, *values: float | Array) -> None:
    if not all(np.isfinite(each).all() for each in values):
        raise RequestError(f"{type(step).__name__} has values that are not finite")


class Step(Protocol):
    """One step of a program."""

    def check(self, program: ClickProgram, slots: _Slots) -> None:
        """Raise RequestError where the step does not fit the program."""


@dataclass(frozen=True, eq=False)
class Numbers:
    """out[position + k] = clip(rint(numbers[columns_k] scale_k), -CODES, CODES); NaN counts as 0.

    columns: int32 [K], scale: float32 [K].
    """

    out: int
    position: int
    columns: Array
    scale: Array

    def check(self, program: ClickProgram, slots: _Slots) -> None:
        """See `Step`."""
        require("Numbers", "columns", self.columns, np.int32, (self.columns.size,))
        require("Numbers", "scale", self.scale, np.float32, (self.columns.size,))
        _fits(self, self.columns.size >= 1 and self.columns.min() >= 0 and self.columns.max() < program.numbers)
        slots.place(self, self.out, self.position, self.columns.size)
        _finite(self, self.scale)


@dataclass(frozen=True, eq=False)
class Gather:
    """out[position:position + width] = rows of a table of codes that `count` columns of the ids choose, from `column`
    on.

    pool "": the row; "max": the maximum; "sum": clip(rint(float32(sum of the rows) factor)), "mean": the same with
    (scales[mean] factor), which counts as 0 where it is not finite. table: int16 [rows stride + SLACK], flat, entries
    in [-CODES, CODES].
    """

    out: int
    position: int
    table: Array
    rows: int
    stride: int
    width: int
    column: int
    count: int = 1
    pool: str = ""
    factor: float = 1.0
    mean: int = -1

    def check(self, program: ClickProgram, slots: _Slots) -> None:
        """See `Step`."""
        require("Gather", "table", self.table, np.int16, (self.rows * self.stride + SLACK,))
        _fits(self, 1 <= self.width <= self.stride <= WIDEST and self.rows >= 1 and self.pool in POOLS)
        slots.place(self, self.out, self.position, self.width)
        _fits(self, 1 <= self.count <= 2**16 and (self.count == 1 or bool(self.pool)))
        _fits(self, 0 <= self.column <= program.rows.size - self.count)
        limits = program.rows[self.column : self.column + self.count]
        _fits(self, limits.min() >= 1 and limits.max() <= self.rows)
        _fits(self, (self.pool == "mean") == (self.mean >= 0) and self.mean < program.means)
        _finite(self, self.factor)
        if max(int(self.table.max(initial=0)), -int(self.table.min(initial=0))) > CODES:
            raise RequestError(f"Gather has entries beyond {CODES}")


@dataclass(frozen=True, eq=False)
class Mixed:
    """Linear layers that read the same: sums of int8 table rows, where a layer is folded into its tables, and products.

        acc_j = 2^shift sum_f (table[offsets_f + ids[columns_f], j] - zero) + sum_k x[first + k] weight[k, j]
        y_j   = float32(acc_j) scale_j + bias_j

    outs: (buffer, width, relu) each; they take the columns in order, each from the next whole 64 on: as clip(rint(y),
    0, 255) in "u1", clip(rint(y), -CODES or, with relu, 0, CODES) in "i2", y in "f4". A sum of F rows fits int16, and
    acc int32; both is checked. table: uint8 [R, N] with zero = 128, entries from 1 on, or int16 with zero = 0, or None;
    weight: int16 [K, N], scale, bias: float32 [N]; columns, offsets, rows: int32 [F]. x is not read where K is 0.
    """

    x: int
    first: int
    weight: Array
    scale: Array
    bias: Array
    outs: tuple[tuple[int, int, bool], ...]
    columns: Array
    offsets: Array
    rows: Array
    shift: int = 0
    table: Array | None = None

    def check(self, program: ClickProgram, slots: _Slots) -> None:
        """See `Step`."""
        width, fields = sum(-(-columns // COLUMNS) * COLUMNS for _, columns, _ in self.outs), self.columns.size
        inputs = len(self.weight) if self.weight.ndim == 2 else 0
        require("Mixed", "weight", self.weight, np.int16, (inputs, width))
        for name, dtype, size in (
            ("scale", np.float32, width),
            ("bias", np.float32, width),
            *((name, np.int32, fields) for name in ("columns", "offsets", "rows")),
        ):
            require("Mixed", name, getattr(self, name), dtype, (size,))
        _fits(self, 1 <= width <= WIDEST and 1 <= len(self.outs) <= 8 and 0 <= self.shift <= 14 and fields <= FIELDS)
        if inputs:
            _fits(self, 0 <= self.first <= slots.read(self, self.x, "i2") - inputs)
        _fits(self, (self.table is None) == (fields == 0))
        if self.table is not None:
            wide = self.table.dtype == np.int16
            require("Mixed", "table", self.table, np.int16 if wide else np.uint8, (len(self.table), width))
            if wide and max(int(self.table.max()), -int(self.table.min())) * fields > 2**15 - 1:
                raise RequestError("Mixed has rows whose sum is beyond 16 bits")
            last = self.offsets.astype(np.int64) + self.rows
            _fits(self, self.columns.min() >= 0 and self.columns.max() < program.rows.size)
            _fits(self, self.rows.min() >= 1 and self.offsets.min() >= 0 and last.max() <= len(self.table))
            limits = program.rows[self.columns]
            _fits(self, limits.min() >= 1 and bool((limits <= self.rows).all()))
        for slot, columns, relu in self.outs:
            kind = slots.slots[slot][0] if 0 <= slot < len(slots.slots) else ""
            _fits(self, kind in KINDS and slots.write(self, slot, kind) == columns and not (relu and kind == "f4"))
        reach = ((2**15 if fields else 0) << self.shift) + CODES * np.abs(self.weight.astype(np.int64)).sum(axis=0)
        if reach.max(initial=0) >= 2**31:
            raise RequestError("Mixed can overflow 32 bits; use a smaller shift or weights")
        _finite(self, self.scale, self.bias)


@dataclass(frozen=True, eq=False)
class Dense:
    """`LinearLayer` from a buffer "u1" to one of "u1", or of "f4" where its zero point is None."""

    x: int
    out: int
    layer: LinearLayer

    def check(self, program: ClickProgram, slots: _Slots) -> None:
        """See `Step`."""
        inputs, outputs = self.layer.weight.shape
        _fits(self, slots.read(self, self.x, "u1") == inputs)
        _fits(self, slots.write(self, self.out, "f4" if self.layer.zero_point is None else "u1") == outputs)


@dataclass(frozen=True, eq=False)
class Quantize:
    """out[position:] = clip(rint(x factor), -CODES, CODES), or from 0 on where `relu`."""

    x: int
    out: int
    position: int
    factor: float
    relu: bool = False

    def check(self, program: ClickProgram, slots: _Slots) -> None:
        """See `Step`."""
        slots.place(self, self.out, self.position, slots.read(self, self.x, "f4"))
        _finite(self, self.factor)


@dataclass(frozen=True, eq=False)
class Factorization:
    """out = scale sum_j (float32(sum_f k_fj)^2 - float32(sum_f k_fj^2)) for the vectors k_f = x[p_f:p_f + width].

    positions: p, int32 [F].
    """

    x: int
    out: int
    positions: Array
    width: int
    scale: float

    def check(self, program: ClickProgram, slots: _Slots) -> None:
        """See `Step`."""
        _vectors(self, self.positions, self.width, slots.read(self, self.x, "i2"))
        _fits(self, slots.write(self, self.out, "f4") == 1)
        _finite(self, self.scale)


@dataclass(frozen=True, eq=False)
class Cross:
    """A layer of a cross network (Wang et al. 2021, DCN V2) in units of the codes k of x_0: x_l = k g_l, g_0 = 1.

    g     = g + u                                        1 + u where `first`
    out   = clip(rint((k g) factor), -CODES, CODES)      the codes of x_{l+1}, unless out is None
    total = sum_j (k g)_j weight_j                       unless total is None; weight: float32
    """

    x: int
    u: int
    g: int
    first: bool
    factor: float = 1.0
    out: int | None = None
    total: int | None = None
    weight: Array | None = None

    def check(self, program: ClickProgram, slots: _Slots) -> None:
        """See `Step`."""
        width = slots.read(self, self.u, "f4")
        _fits(self, slots.read(self, self.x, "i2") == width == slots.write(self, self.g, "f4"))
        if self.out is not None:
            _fits(self, slots.write(self, self.out, "i2") == width)
        _fits(self, (self.total is None) == (self.weight is None))
        if self.total is not None and self.weight is not None:
            _fits(self, slots.write(self, self.total, "f4") == 1)
            require("Cross", "weight", self.weight, np.float32, (width,))
            _finite(self, self.weight)
        _finite(self, self.factor)


@dataclass(frozen=True, eq=False)
class Dots:
    """out[position:] = clip(rint(float32(k_i . k_j) factor_ij), -CODES, CODES) for i = 1, 2, .., j = 0 .. i - 1, of
    vectors as in `Factorization`. factor: float32 [pairs].
    """

    x: int
    out: int
    position: int
    positions: Array
    width: int
    factor: Array

    def check(self, program: ClickProgram, slots: _Slots) -> None:
        """See `Step`."""
        _vectors(self, self.positions, self.width, slots.read(self, self.x, "i2"))
        count = self.positions.size * (self.positions.size - 1) // 2
        _fits(self, count >= 1)
        require("Dots", "factor", self.factor, np.float32, (count,))
        slots.place(self, self.out, self.position, count)
        _finite(self, self.factor)


@dataclass(frozen=True, eq=False)
class Normalize:
    """out = x / sqrt(max(sum_j x_j^2 + epsilon, least)), of max(x, 0) where `relu`."""

    x: int
    out: int
    epsilon: float
    least: float = 0.0
    relu: bool = False

    def check(self, program: ClickProgram, slots: _Slots) -> None:
        """See `Step`."""
        _fits(self, slots.read(self, self.x, "f4") == slots.write(self, self.out, "f4") and self.epsilon >= 0)
        _finite(self, self.epsilon, self.least)


@dataclass(frozen=True, eq=False)
class Leaky:
    """out_j = x_j, times slope_j where it is below 0 (a leaky ReLU, or PReLU). slope: float32 [width]."""

    x: int
    out: int
    slope: Array

    def check(self, program: ClickProgram, slots: _Slots) -> None:
        """See `Step`."""
        width = slots.read(self, self.x, "f4")
        _fits(self, slots.write(self, self.out, "f4") == width)
        require("Leaky", "slope", self.slope, np.float32, (width,))
        _finite(self, self.slope)


@dataclass(frozen=True, eq=False)
class Tanh:
    """out_j = tanh(x_j), to 1e-7."""

    x: int
    out: int

    def check(self, program: ClickProgram, slots: _Slots) -> None:
        """See `Step`."""
        _fits(self, slots.read(self, self.x, "f4") == slots.write(self, self.out, "f4"))


@dataclass(frozen=True, eq=False)
class Mixture:
    """Slices of x, each times the weight of its expert: out_ej = x_ej softmax(gates)_e."""

    x: int
    gates: int
    out: int

    def check(self, program: ClickProgram, slots: _Slots) -> None:
        """See `Step`."""
        width = slots.read(self, self.x, "f4")
        _fits(self, width % slots.read(self, self.gates, "f4") == 0 and slots.write(self, self.out, "f4") == width)


@dataclass(frozen=True, eq=False)
class Product:
    """out = sum_j x_j y_j."""

    x: int
    y: int
    out: int

    def check(self, program: ClickProgram, slots: _Slots) -> None:
        """See `Step`."""
        _fits(self, slots.read(self, self.x, "f4") == slots.read(self, self.y, "f4"))
        _fits(self, slots.write(self, self.out, "f4") == 1)


@dataclass(frozen=True, eq=False)
class Weighted:
    """out = sum_j float32(x[first + j]) weight_j. weight: float32 [K]."""

    x: int
    first: int
    weight: Array
    out: int

    def check(self, program: ClickProgram, slots: _Slots) -> None:
        """See `Step`."""
        require("Weighted", "weight", self.weight, np.float32, (self.weight.size,))
        _fits(self, self.weight.size >= 1 and 0 <= self.first <= slots.read(self, self.x, "i2") - self.weight.size)
        _fits(self, slots.write(self, self.out, "f4") == 1)
        _finite(self, self.weight)


@dataclass(frozen=True, eq=False)
class LookupSum:
    """out = sum_f table[offsets_f + ids[columns_f]], float32, added in the order of the fields.

    table: float32 [R]. columns, offsets, rows: int32 [F].
    """

    out: int
    table: Array
    columns: Array
    offsets: Array
    rows: Array

    def check(self, program: ClickProgram, slots: _Slots) -> None:
        """See `Step`."""
        fields = self.columns.size
        require("LookupSum", "table", self.table, np.float32, (self.table.size,))
        for name in ("columns", "offsets", "rows"):
            require("LookupSum", name, getattr(self, name), np.int32, (fields,))
        _fits(self, fields >= 1 and self.columns.min() >= 0 and self.columns.max() < program.rows.size)
        last = self.offsets.astype(np.int64) + self.rows
        _fits(self, self.rows.min() >= 1 and self.offsets.min() >= 0 and last.max() <= self.table.size)
        limits = program.rows[self.columns]
        _fits(self, limits.min() >= 1 and bool((limits <= self.rows).all()))
        _fits(self, slots.write(self, self.out, "f4") == 1)
        _finite(self, self.table)


@dataclass(frozen=True, eq=False)
class Total:
    """out = bias + sum_t terms_t factor_t, added in this order, through a sigmoid if asked.

    terms: (buffer, factor) each, the first column of a buffer "f4".
    """

    out: int
    terms: tuple[tuple[int, float], ...]
    bias: float
    sigmoid: bool

    def check(self, program: ClickProgram, slots: _Slots) -> None:
        """See `Step`."""
        for slot, factor in self.terms:
            slots.read(self, slot, "f4")
            _finite(self, factor)
        _fits(self, slots.write(self, self.out, "f4") == 1)
        _finite(self, self.bias)


STEPS: dict[str, type] = {
    each.__name__: each
    for each in (
        Numbers,
        Gather,
        Mixed,
        Dense,
        Quantize,
        Factorization,
        Cross,
        Dots,
        Weighted,
        Normalize,
        Leaky,
        Tanh,
        Mixture,
        Product,
        LookupSum,
        Total,
    )
}


def _vectors(step: object, positions: Array, width: int, room: int) -> None:
    require(type(step).__name__, "positions", positions, np.int32, (positions.size,))
    _fits(step, 1 <= positions.size <= VECTORS and 1 <= width <= VECTORS)
    _fits(step, positions.min() >= 0 and positions.max() <= room - width)


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
        if any(kind not in KINDS or not 1 <= width <= WIDEST for kind, width in self.slots):
            raise RequestError(f"a {self.name} has buffers of an unknown kind or width")
        slots = _Slots(self.slots)
        for step in self.steps:
            step.check(self, slots)
        for slot in self.outputs:
            slots.read(self, slot, "f4")
