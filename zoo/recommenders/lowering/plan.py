"""Plans a native program: the number format in which every part is read, and the fields whose tables are folded."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.kernels.recommenders.operators import COLUMNS, FIELDS
from pipelines.quantization.calibration.table import CalibrationTable
from zoo.recommenders.lowering.expressions import (
    Concat,
    Crossed,
    Dots,
    Expression,
    Factorization,
    Field,
    FloatVector,
    L2Normalized,
    Linear,
    Numbers,
    ProbabilityProduct,
    Product,
    SigmoidGated,
    Total,
    is_relu,
    parts_of,
)
from zoo.recommenders.lowering.fields.expressions import FieldAttention, GatedCodes, vectors_of
from zoo.recommenders.lowering.forms import FORMS, Form
from zoo.recommenders.lowering.graph_reader import GraphReader
from zoo.recommenders.lowering.table_scales import TableScales

Floats = NDArray[np.float64]

LIMIT = 2**28  # bytes of all folded tables: they are kept in a file and in memory for as long as the model is
HEADROOM = 1.5  # codes reach so many times the range that calibration saw
L2_BYTES = 2**20  # bytes of the tables of a form that is to stay in L2, where its size is not known
SIGNED = 127  # steps from zero to the largest magnitude of bytes with zero point 128
FINE = 2**16  # layers of fewer products read codes, larger ones bytes: half the time, a part of the precision


@dataclass(frozen=True)
class Decision:
    """The part of a layer that is folded into tables.

    Attributes:
        fold: Whether fields are folded.
        reason: Reason in one line.
        table_bytes: Bytes of the folded table.
        macs_saved: Products saved per sample.
    """

    fold: bool
    reason: str
    table_bytes: int
    macs_saved: int

    def to_json(self) -> dict[str, Any]:
        """Returns the decision as plain JSON values."""
        return asdict(self)


class Columns(NamedTuple):
    """Statistics of the columns of a value, float64 [width] each.

    Attributes:
        largest: Largest magnitude, with headroom.
        rms: Root of the mean square.
        mean: Mean.
    """

    largest: Floats
    rms: Floats
    mean: Floats


@dataclass(eq=False)
class LayerGroup:
    """Linear layers with the same inputs: one step, with one folded table.

    Attributes:
        parts: Inputs of the layers.
        layers: The layers.
        folded: Fields that are folded into tables.
    """

    parts: list[Expression]
    layers: list[Linear]
    folded: list[Field] = field(default_factory=list)


@dataclass(frozen=True)
class LoweringOptions:
    """Input of the lowering of a graph to one form.

    Attributes:
        reader: Reader of the graph.
        table: Activation ranges.
        caches: Cache sizes in bytes: {"L2", "L3"}.
        scales: Scales of tables to keep; receives those that are used.
        coarse: Whether large layers and tables may use bytes in all forms, not only in a coarse one.
        kept: Names of the values of layers that the recipe keeps float: these read codes in all forms. Layers on states
            of cross networks may read bytes even so, which have a scale of each column there.
        form: Form of the program.
        tables: Tables of codes that programs of the model share, by content; new tables are added.
        orders: Orders of the units of hidden layers in their buffers.
        columns: Statistics of the columns of what layers may read as bytes with zero point 128.
    """

    reader: GraphReader
    table: CalibrationTable
    caches: Mapping[str, int]
    scales: TableScales
    coarse: bool = True
    kept: Set[str] = frozenset()
    form: Form = FORMS[0]
    tables: dict[Hashable, NDArray[np.int16]] = field(default_factory=dict)
    orders: Mapping[Expression, NDArray[Any]] = field(default_factory=dict)
    columns: Mapping[Expression, Columns] = field(default_factory=dict)


class LoweringPlan:
    """Number formats of all values of a program, and the fields to fold into tables.

    Args:
        options: Graph and form.

    Raises:
        RequestError: An expression is not supported.
    """

    def __init__(self, options: LoweringOptions) -> None:
        self.reader, self.table, self.caches = options.reader, options.table, options.caches
        self.scales, self.form, self.kept, self.columns = options.scales, options.form, options.kept, options.columns
        self.coarse = options.coarse or options.form.coarse
        self.decisions: dict[str, Decision] = {}
        self.groups: dict[tuple[int, ...], LayerGroup] = {}
        self.forms: dict[Expression, set[str]] = {}  # how a layer's result is read: "u1", "s1", "i2", "f4", "piece"
        self.raw: dict[Field, None] = {}  # fields whose codes are needed, in order
        self.direct: dict[Field, None] = {}  # fields whose rows are bytes that one group of layers reads
        self.summed: dict[Field, None] = {}  # terms of logits
        self.even: dict[Expression, None] = {}  # vectors whose codes share one scale
        self.pieces: dict[Expression, None] = {}  # computed vectors that stand among the codes
        self.spread: dict[Numbers, None] = {}  # numbers times vectors, whose codes are needed, in order
        self.numbers: list[Numbers] = []
        self.crossed: dict[tuple[int, ...], Crossed] = {}
        self.multiplied: dict[Expression, Expression] = {}  # layers laid out like the codes: the vectors they multiply
        self.opened: dict[Linear, None] = {}  # gates of codes, open where they stand beside codes of no gate
        self.coded: dict[Linear, None] = {}  # layers whose codes a product reads
        self.readers: dict[Linear, list[Floats]] = {}  # rows of the weights of layers that read a layer
        self._seen: set[Expression] = set()
        self._terms: set[Expression] = set()  # of logits
        self._wide = False  # folded rows are int16
        self._uses: dict[Crossed, set[str]] = {}

    def _widths(self) -> tuple[int, int]:
        """Returns the number of numbers and of scales."""
        widths = []
        for value in (self.reader.numbers, self.reader.scales):
            width = 0 if value is None or value.shape is None else value.shape[1]
            assert isinstance(width, int)
            widths.append(width)
        return widths[0], widths[1]

    def _visit(self, x: Expression) -> None:
        """Records how all values below `x` are read."""
        if x in self._seen:
            return
        self._seen.add(x)
        match x:
            case Total():
                for term, _ in x.terms:
                    self._terms.add(term)
                    if isinstance(term, Field):
                        self.summed[term] = None
                    self._visit(term)
            case Linear():
                self._visit_layer(x)
            case Concat():
                for part in x.parts:
                    self._visit(part)
            case Crossed():
                self._visit_crossed(x)
            case GatedCodes():
                self._visit_multiplied(x.x)
                self.multiplied[x.gates], self.opened[x.gates] = x.x, None
                self._visit_float(x.gates)
            case FieldAttention():
                self._visit_even(x.vectors)
                if x.x is not None:
                    self._visit(x.x)
            case Factorization():
                self._visit_even(x.vectors)
            case Dots():
                for vector in x.vectors:
                    self._visit_vector(vector)
                self.pieces[x] = None
            case L2Normalized():
                if isinstance(x.x, Field) and not x.x.pool:
                    self._seen.add(x.x)
                else:
                    self._visit_float(x.x, relu=True)
            case _ if isinstance(x, FloatVector):
                for source in x.sources():
                    self._visit_float(source, relu=x.rectifies)
            case Product():
                self._visit_product(x)
            case ProbabilityProduct():
                self._visit(x.x)
                self._visit(x.y)
            case Numbers():
                self.numbers.append(x)

    def _visit_crossed(self, x: Crossed) -> None:
        """Records a state of a cross network, whose changes multiply the codes of its vectors."""
        self.crossed[tuple(map(id, x.changes))] = x
        self._visit_multiplied(x.x)
        for change in x.changes:
            assert isinstance(change, Linear | SigmoidGated)
            for layer in [change] if isinstance(change, Linear) else [change.x, change.gates]:
                self.multiplied[layer] = x.x
            self.forms.setdefault(change, set()).add("f4")
            self._visit(change)

    def _visit_product(self, x: Product) -> None:
        """Records a product of two layers; one behind a ReLU is read as codes if the other one is not."""
        for factor, other in ((x.x, x.y), (x.y, x.x)):
            if isinstance(factor, Linear) and factor.relu and not is_relu(other):
                self.coded[factor] = None
                self.forms.setdefault(factor, set()).add("i2")
                self._visit(factor)
            else:
                self._visit_float(factor)

    def _visit_multiplied(self, x: Expression) -> None:
        """Records vectors whose codes are multiplied by floats; each entry has a code of its own."""
        parts = parts_of(x)
        if len(set(parts)) < len(parts):
            raise RequestError("a product of layers and vectors reads a vector twice")
        columns = [column for part in parts if isinstance(part, Numbers) for column in part.columns]
        for part in parts:
            if isinstance(part, Numbers) and len(set(columns)) == len(columns):
                self._visit(part)
            else:
                self._visit_vector(part)

    def _visit_even(self, vectors: Sequence[Expression]) -> None:
        """Records vectors whose codes share one scale."""
        for vector in vectors:
            self.even[vector] = None
            self._visit_vector(vector)

    def _visit_vector(self, x: Expression) -> None:
        """Records a vector whose entries are multiplied as codes."""
        match x:
            case Field():
                self.raw[x] = None
            case Numbers():
                self.spread[x] = None
            case _ if isinstance(x, Linear | FloatVector):
                self.forms.setdefault(x, set()).add("piece")
                self.pieces[x] = None
            case _:
                raise RequestError("an interaction of vectors that are no fields, numbers or layers")
        self._visit(x)

    def _visit_float(self, x: Expression, relu: bool = False) -> None:
        """Records a value that is read as floats; `relu`: the step that reads it applies the ReLU."""
        if isinstance(x, Linear):
            if x.relu and not relu:
                raise RequestError(f"{x.value} is read as floats after a Relu")
            self.forms.setdefault(x, set()).add("f4")
        elif not isinstance(x, L2Normalized | FloatVector):
            raise RequestError("a product of other than layers' results")
        self._visit(x)

    def _visit_layer(self, x: Linear) -> None:
        parts = parts_of(x.x)
        single, start = parts[0] if len(parts) == 1 else None, 0
        term = x in self._terms
        for part in parts:
            form = ""
            if isinstance(part, FloatVector):
                form = "i2" if single is part or term else "piece"
                self.forms.setdefault(part, set()).add(form)
            elif isinstance(part, FieldAttention):
                if single is not part and not term:
                    raise RequestError(f"the layer {x.value} reads an attention and more")
                self.forms.setdefault(part, set()).add("i2")
            elif isinstance(part, Linear):
                self.readers.setdefault(part, []).append(x.weight[start : start + part.width])
                hidden = part.relu and (single is part or term)
                own = hidden or (single is part and not term)
                form = self._read_as(x, part) if own else "piece"
                self.forms.setdefault(part, set()).add(form)
            if form == "piece":
                self.pieces[part] = None
            elif isinstance(part, Crossed):
                self._uses.setdefault(part, set()).add("total" if term else "codes")
            elif isinstance(part, Field) and term:
                self.raw[part] = None
            elif isinstance(part, GatedCodes):
                others = [other for other in parts if other is not part]
                if term or not all(isinstance(other, Field | Numbers) for other in others):
                    raise RequestError(f"the layer {x.value} reads gated vectors and more")
            elif not isinstance(part, Field | Numbers | Dots | Linear | FloatVector | FieldAttention):
                kind = type(part).__name__
                raise RequestError(f"the layer {x.value} reads the result of {kind}, which is not in int8")
            start += part.width
            self._visit(part)
        if not term and not isinstance(single, Linear | FloatVector | FieldAttention):
            if any(isinstance(part, Crossed) for part in parts) and single is None:
                raise RequestError(f"the layer {x.value} reads a cross network and more")
            key = tuple(map(id, parts))
            self.groups.setdefault(key, LayerGroup(parts, [])).layers.append(x)

    def _decide(self) -> None:
        """Selects the fields to fold, those that the form names as long as their tables have at most `LIMIT` bytes.

        Rows of int16 instead of bytes are for tables that fit L3 even so.

        Lists are not folded: pooling codes reads fewer bytes and does not sum many rounded rows.
        """
        self._wide = self.form.wide or not self.coarse
        room = {"all": LIMIT, "near": self.caches.get("L2") or L2_BYTES, "none": 0}[self.form.fold]
        candidates = [
            (len(part.table) * self._row(group) * (1 + self._wide), group, part)
            for group in self.groups.values()
            for part in dict.fromkeys(group.parts)
            if isinstance(part, Field) and not part.pool and group.parts.count(part) == 1
        ]
        if self.form.wide and self.coarse and sum(size for size, *_ in candidates) > self.caches.get("L3", 0):
            room = 0
        for size, group, part in sorted(candidates, key=lambda candidate: candidate[0]):
            if size <= room and len(group.folded) < FIELDS:
                room -= size
                group.folded.append(part)
        for group in self.groups.values():
            group.folded.sort(key=group.parts.index)
            fields = [part for part in group.parts if isinstance(part, Field)]
            others = [part for other in self.groups.values() if other is not group for part in other.parts]
            for part in fields:
                small = part.table.size <= LIMIT
                if self._reads_bytes(group.layers) and small and not part.pool and part not in (*self.raw, *others):
                    self.direct[part] = None
                elif part not in group.folded:
                    self.raw[part] = None
            if fields:
                self.decisions[group.layers[0].value] = self._decision(group, len(fields))

    @property
    def folds(self) -> bool:
        """Whether a field is folded, after `_decide`."""
        return any(group.folded for group in self.groups.values())

    @property
    def choices(self) -> Hashable:
        """The differences between the programs of forms, after `_decide`."""
        folded = tuple((index, part) for index, group in enumerate(self.groups.values()) for part in group.folded)
        return folded, bool(folded) and self._wide, self._coarse_reads()

    def _coarse_reads(self) -> Hashable:
        """Returns which layers read bytes, after `_decide`."""
        read = []
        for group in self.groups.values():
            parts = [part for part in group.parts if part not in group.folded]
            inner = [vector for part in parts for vector in vectors_of(part)]
            fields = self._reads_bytes(group.layers) and any(isinstance(part, Field) for part in inner)
            read.append((fields, self._in_bytes(group)))
        return tuple(read), tuple((x, tuple(sorted(forms))) for x, forms in self.forms.items())

    def _decision(self, group: LayerGroup, fields: int) -> Decision:
        line, width = self._row(group) * (1 + self._wide), sum(layer.width for layer in group.layers)
        macs = sum(part.width for part in group.folded) * width
        table_bytes = sum(len(part.table) for part in group.folded) * line
        reason = f"{len(group.folded)} of {fields} fields folded"
        if group.folded:
            reason += (
                f": rows of {len(group.folded) * line / 1e3:,.1f} kB a sample from tables of {table_bytes / 1e6:,.1f} "
                f"MB for {macs / 1e3:,.0f} k products"
            )
        return Decision(bool(group.folded), reason, table_bytes, macs)

    def _row(self, group: LayerGroup) -> int:
        """Returns the columns of the folded table."""
        return sum(-(-layer.width // COLUMNS) * COLUMNS * self._outs(layer) for layer in group.layers)

    def _reads_bytes(self, layers: Sequence[Linear]) -> bool:
        """Whether layers with the same inputs read the codes of fields as bytes."""
        return self.form.coarse and not any(layer.value in self.kept for layer in layers)

    def _in_bytes(self, group: LayerGroup) -> bool:
        """Whether the layers of a group read gated vectors, a state of a cross network, or x_0, as bytes."""
        states = [part for part in group.parts if isinstance(part, Crossed | GatedCodes)]
        large = sum(layer.weight.size for layer in group.layers) > FINE
        if not self.form.coarse or not all(state in self.columns for state in states):
            return False
        if any(isinstance(state, GatedCodes) for state in states):
            return self._reads_bytes(group.layers)
        return large and (bool(states) or any(parts_of(x.x) == group.parts for x in self.crossed.values()))

    def _read_as(self, layer: Linear, hidden: Linear) -> str:
        """Returns how a layer reads its only input: "u1", "s1" (zero point 128 and a scale of each column) or "i2"."""
        if hidden.relu:
            return "u1" if self._coarse(layer) else "i2"
        signed = self.form.coarse and hidden in self.columns and layer.value not in self.kept
        return "s1" if signed and layer.weight.size > FINE else "i2"

    def _coarse(self, layer: Linear) -> bool:
        """Whether a layer reads bytes."""
        fits = layer.weight.size > FINE and layer not in self.multiplied and layer.value not in self.kept
        return self.coarse and fits

    def _outs(self, layer: Linear) -> int:
        forms = {"f4" if form == "piece" else form for form in self.forms.get(layer, ())}
        return max(len(forms), 1)

    def _max_magnitude(self, x: Expression) -> float:
        """Returns the largest magnitude that codes of `x` must represent."""
        if isinstance(x, Field):
            most = self._largest(x)
            if not np.isfinite(most):
                raise RequestError("its tables or weights are not finite")
            if not x.pool:
                return most
            observed = self.table.tensors.get(x.value)
            seen = np.inf if observed is None else HEADROOM * max(-observed.low, observed.high)
            if x.pool == "max":  # the padding of a list may lie far below all items
                return min(seen, most)
            return max(most, min(seen, most * x.count))
        if isinstance(x, Numbers) and not x.value:
            assert self.reader.numbers is not None
            return HEADROOM * self._range(str(self.reader.numbers.name)) * float(np.abs(x.factor).max())
        assert isinstance(x, Linear | FloatVector | Dots | Numbers)
        return HEADROOM * self._range(x.value)

    def _largest(self, x: Field) -> float:
        """Returns the largest magnitude in the table of a field, that of an earlier model if it fits."""
        return self.scales.largest(f"{x.column} {x.value}", self.scales.magnitude(x.table))

    def _range(self, value: str) -> float:
        observed = self.table.tensors.get(value)
        if observed is None:
            raise RequestError(f"no calibrated range for {value}")
        return max(-observed.low, observed.high)
