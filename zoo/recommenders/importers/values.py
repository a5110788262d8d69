"""Values of the rewritten graph of an imported ranker, written in the form of `export.fx_export`."""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.graph import edit
from zoo.recommenders.data.encoding import Field
from zoo.recommenders.data.features import Features

Array = NDArray[Any]
FLOAT = ir.DataType.FLOAT
OPSET = 18
TINY = 1e-6  # largest addend of a count of items that only keeps it from being 0
OF_CODES: dict[str, Callable[..., Array]] = {  # operators between the tables and the ids
    **{"Not": np.logical_not, "And": np.logical_and, "Or": np.logical_or, "Equal": np.equal},
    **{"Greater": np.greater, "GreaterOrEqual": np.greater_equal, "Less": np.less, "LessOrEqual": np.less_equal},
    **{"Add": np.add, "Sub": np.subtract, "Mul": np.multiply},
}


@dataclass(eq=False)
class Base:
    """A value [batch, *shape] of the new graph, written when it is first read.

    Attributes:
        first: Number of its first entry.
        shape: Shape of one sample.
        make: Writes the value.
        column: Column of the ids that selects rows of `table`, or -1.
        table: Table [rows, width].
        code: Whether the value follows from the ids alone, without weights.
        pool: List and table whose rows are summed.
        count: List whose items are counted, with or without an epsilon.
        squares: Entries of the vector, for a squared Euclidean norm.
        rows: Operand of a sum of one row.
        value: Written value; None before.
    """

    first: int
    shape: tuple[int, ...]
    make: Callable[[], ir.Value]
    column: int = -1
    table: Array | None = None
    code: bool = False
    pool: tuple[Field, Array] | None = None
    count: Field | None = None
    squares: Array | None = None
    rows: Base | None = None
    value: ir.Value | None = None

    @property
    def size(self) -> int:
        """Number of entries of a sample."""
        return int(np.prod(self.shape))

    def entries(self) -> Array:
        """Returns the entry numbers, int64 [*shape]."""
        return np.arange(self.first, self.first + self.size).reshape(self.shape)

    def written(self) -> ir.Value:
        """Returns the value in the new graph; writes it on first use."""
        if self.value is None:
            self.value = self.make()
        return self.value


@dataclass(frozen=True, eq=False)
class Layout:
    """Origin of a value of the imported graph: for each entry, the number of an entry of the new graph.

    Attributes:
        entries: Entry numbers, int64, without the batch axis.
        batch: Batch axis of the original value.
    """

    entries: Array
    batch: int = 0


class Writer:
    """A new graph on the inputs of `features`; every entry of every base has a number.

    Args:
        features: Encoding of the rows.
        opsets: Operator versions by domain.
    """

    def __init__(self, features: Features, opsets: dict[str, int]) -> None:
        version = opsets.get("", OPSET)
        self.features, self.opset = features, 17 if 13 <= version < 17 else version  # LayerNormalization is the change
        self.pools: dict[str, set[str]] = {}  # by list: its pooled forms in the graph, "sum" or "max" of its items
        self.main = ir.Graph([], [], nodes=[], opset_imports={**opsets, "": self.opset}, name="ranker")
        self.inputs: dict[str, ir.Value] = {}
        for name, (dtype, shape) in features.inputs.items():
            kind = ir.TensorType(ir.DataType.from_numpy(dtype))
            self.inputs[name] = ir.Value(name=name, type=kind, shape=ir.Shape(["batch", *shape[1:]]))
        self.main.inputs.extend(self.inputs.values())
        self.taken = {"ids", "numbers", "scales", "probability"}
        self.bases: list[Base] = []
        self._firsts: list[int] = []
        self._next = 0
        self._lookups: dict[tuple[int, int], Base] = {}
        self._tables: dict[Any, Array] = {}
        self._arrays: dict[Any, Array] = {}
        self._kept: list[Any] = []  # arrays whose id() is a key
        self._values: dict[Any, ir.Value] = {}

    def base(self, shape: Sequence[int], make: Callable[[], ir.Value], **more: Any) -> Base:
        """Creates a base with the next free entry numbers.

        Args:
            shape: Shape of one sample.
            make: Writes the value when it is first read.
            **more: Further attributes of `Base`.

        Returns:
            The base.
        """
        made = Base(self._next, tuple(shape), make, **more)
        self.bases.append(made)
        self._firsts.append(self._next)
        self._next += max(made.size, 1)
        return made

    def of(self, entry: Any) -> Base:
        """Returns the base of an entry.

        Args:
            entry: Entry number.

        Returns:
            The base that contains it.
        """
        return self.bases[bisect.bisect_right(self._firsts, int(entry)) - 1]

    def bases_of(self, entries: Array) -> list[Base]:
        """Returns the distinct bases of entries.

        Args:
            entries: Entry numbers, int64 of any shape.

        Returns:
            Bases in order of their entry numbers.
        """
        places = np.searchsorted(self._firsts, np.unique(entries), "right") - 1
        return [self.bases[place] for place in dict.fromkeys(places.tolist())]

    def field(self, column: int) -> Field:
        """Returns the field of a column of the ids.

        Args:
            column: Column of the ids.

        Returns:
            The field.
        """
        return next(field for field in self.features.fields if field.start <= column < field.start + field.width)

    def lookup(self, column: int, table: Array, code: bool) -> Base:
        """Creates a base of the table rows that a column of the ids selects, or returns the existing base.

        Args:
            column: Column of the ids.
            table: Table [rows, width].
            code: Whether the value follows from the ids alone, without weights.

        Returns:
            Base of shape [width].
        """
        key = column, id(table)
        if key not in self._lookups:
            self._kept.append(table)

            def make() -> ir.Value:
                self._reads(self.field(column), "item")
                ids = self._once(("ids", column), lambda: self._ids(column))
                rows = self._floats(table)
                name = f"{self.field(column).name}.rows"
                return self.node("Gather", [self.weight(rows, f"{name}.table"), ids], name)

            self._lookups[key] = self.base(table.shape[1:], make, column=column, table=table, code=code)
        return self._lookups[key]

    def _reads(self, field: Field, how: str) -> None:
        if field.is_list:
            self.pools.setdefault(field.name, set()).add(how)

    def _ids(self, column: int) -> ir.Value:
        name, index = self.field(column).name, self.weight(np.array(column), "column")
        return self.node("Gather", [self.inputs["ids"], index], f"{name}.ids", ir.DataType.INT32, axis=1)

    def _cut(self, name: str, start: int, width: int) -> ir.Value:
        source = self.inputs[name]
        ends = [self.weight(np.array([bound]), "at") for bound in (start, start + width, 1)]
        assert source.dtype is not None
        return self._once(
            (name, start, width), lambda: self.node("Slice", [source, *ends], f"{name}.{start}", source.dtype or FLOAT)
        )

    def _cast_table(self, table: Array, dtype: np.dtype[Any]) -> Array:
        return self._derived("cast", [table], lambda t: t.astype(dtype), str(dtype))

    def _floats(self, table: Array) -> Array:
        return table if table.dtype == np.float32 else self._cast_table(table, np.dtype(np.float32))

    def _derived(self, op: str, tables: Sequence[Array], compute: Callable[..., Array], *more: Any) -> Array:
        """Returns a table computed from tables, once for the same tables."""
        key = op, *(id(table) for table in tables), *more
        if key not in self._tables:
            self._kept += tables
            with np.errstate(all="ignore"):
                self._tables[key] = self._one(compute(*tables))
        return self._tables[key]

    def _one(self, array: Array) -> Array:
        """Returns the first array with the same entries, so that equal tables are stored once."""
        digest = hashlib.sha256(np.ascontiguousarray(array).data).digest()
        return self._arrays.setdefault((array.dtype.str, array.shape, digest), array)

    def _once(self, key: Any, make: Callable[[], ir.Value]) -> ir.Value:
        if key not in self._values:
            self._values[key] = make()
        return self._values[key]

    def node(
        self, op: str, inputs: Sequence[ir.Value | None], name: str, dtype: ir.DataType = FLOAT, **more: Any
    ) -> ir.Value:
        """Appends an operator.

        Args:
            op: Operator type.
            inputs: Inputs; None for an omitted optional input.
            name: Name of the node and its output.
            dtype: Type of the output.
            **more: Attributes of the operator.

        Returns:
            First output of the operator.
        """
        made = edit.node(op, list(inputs), name, dtype=dtype, taken=self.taken, **more)
        self.main.append(made)
        return made.outputs[0]

    def weight(self, array: Array, name: str) -> ir.Value:
        """Adds an initializer, or returns the existing initializer of the same array.

        Args:
            array: Values.
            name: Name of a new initializer.

        Returns:
            Value of the initializer.
        """
        small = array.size <= 8
        key = ("weight", array.tobytes(), array.shape, str(array.dtype)) if small else ("weight", id(array))
        self._kept.append(array)
        return self._once(key, lambda: edit.initializer(self.main, name, np.array(array, order="C"), self.taken))

    def written(self, entries: Array, name: str = "joined") -> ir.Value:
        """Writes the value of some entries, joined from as few parts of bases as possible.

        Args:
            entries: Entry numbers, int64 [*shape].
            name: Name of a joined value.

        Returns:
            Value [batch, *shape].
        """
        flat, shape = entries.ravel(), entries.shape
        return self._once(("joined", flat.tobytes(), shape), lambda: self._join(flat, shape, name))

    def _join(self, flat: Array, shape: tuple[int, ...], name: str) -> ir.Value:
        parts: list[tuple[Base, Array | None]] = []  # None: whole
        start = 0
        while start < len(flat):
            base = self.of(flat[start])
            if np.array_equal(flat[start : start + base.size], base.entries().ravel()):
                parts.append((base, None))
                start += base.size
                continue
            end = start + 1
            while end < len(flat) and flat[end] != base.first and base.first < flat[end] < base.first + base.size:
                end += 1
            parts.append((base, flat[start:end] - base.first))
            start = end
        if len(parts) == 1 and parts[0][1] is None and parts[0][0].shape == shape:
            return parts[0][0].written()
        if len(shape) != 1:
            sizes = self.weight(np.array([-1, *shape], np.int64), "shape")
            return self.node("Reshape", [self.written(flat, name), sizes], f"{name}.vectors")
        if len(parts) > 2 * len(bases := self.bases_of(flat)):  # entries of few bases, mixed
            whole = np.concatenate([base.entries().ravel() for base in bases])
            places = np.argsort(whole)[np.searchsorted(np.sort(whole), flat)]
            return self.node(
                "Gather", [self.written(whole, name), self.weight(places, f"{name}.columns")], name, axis=1
            )
        values = [self._part(base, picked, name) for base, picked in parts]
        return values[0] if len(values) == 1 else self.node("Concat", values, name, axis=1)

    def _part(self, base: Base, picked: Array | None, name: str) -> ir.Value:
        value = base.written()
        if len(base.shape) != 1:
            sizes = self.weight(np.array([-1, base.size], np.int64), "shape")
            value = self._once(
                ("flat", base.first), lambda: self.node("Reshape", [base.written(), sizes], f"{name}.flat")
            )
        if picked is None:
            return value
        return self.node("Gather", [value, self.weight(picked, f"{name}.columns")], f"{name}.some", axis=1)

    def _by_base(self, entries: Array, change: Callable[[Base], Base]) -> Array:
        """Maps entries to the same positions of other bases."""
        out = np.array(entries)
        for base in self.bases_of(entries):
            own = (entries >= base.first) & (entries < base.first + base.size)
            out[own] += change(base).first - base.first
        return out

    def _root(self, x: Array, least: Any) -> Base:
        """Returns |x|, at least the root of `least`."""

        def make() -> ir.Value:
            value = self.written(x)
            squares = self.node("Mul", [value, value], "squares")
            total = self.node("ReduceSum", [squares, self.weight(np.array([1]), "axis")], "length.squared", keepdims=1)
            if least is not None:
                total = self.node("Max", [total, self.weight(np.array(least, np.float32), "least")], "length.least")
            return self.node("Sqrt", [total], "length")

        return self.base((1,), make, squares=x)

    def _row_sum(self, base: Base) -> Base:
        def make() -> ir.Value:
            axis = self.weight(np.array([1]), "axis")
            return self.node("ReduceSum", [base.written(), axis], "row.sum", keepdims=1)

        assert base.table is not None
        key = -1 - base.column, id(base.table)
        if key not in self._lookups:
            self._lookups[key] = self.base((1,), make, rows=base)
        return self._lookups[key]

    def _pooled(self, x: Array, op: str) -> Array | None:
        """Pools rows of one table over all columns of a list, along the last axis; None for other values."""
        flat = x.reshape(-1, x.shape[-1])
        first = self.of(flat[0, 0])
        if first.table is None or not (field := self.field(first.column)).is_list or x.shape[-1] != field.width:
            return None
        table = first.table
        columns = [self._lookups.get((field.start + column, id(table))) for column in range(field.width)]
        if any(column is None for column in columns):
            return None
        own = np.stack([column.entries().ravel() for column in columns if column is not None], -1)  # [width, items]
        places = flat[:, 0] - columns[0].first  # type: ignore[union-attr]
        if (places < 0).any() or (places >= len(own)).any() or not np.array_equal(flat, own[places]):
            return None
        return (self._pool_of(field, table, op).first + places).reshape(x.shape[:-1])

    def _scaled(self, entries: Array, factor: float) -> Array | None:
        """Multiplies sums over lists by a number, which is merged into their tables; None for other values."""
        if any(base.pool is None or base.count is not None for base in self.bases_of(entries)):
            return None

        def change(base: Base) -> Base:
            assert base.pool is not None
            field, table = base.pool
            scaled = self._derived("scaled", [table], lambda t: (t * factor).astype(np.float32), factor)
            return self._pool_of(field, scaled, "ReduceSum")

        return self._by_base(entries, change)

    def _pool_of(self, field: Field, table: Array, op: str) -> Base:
        key = f"pool {op}", field.start, id(table)
        if key not in self._tables:
            self._kept.append(table)
            self._tables[key] = np.array(self._pool(field, table, op).first)
        return self.of(self._tables[key])

    def _pool(self, field: Field, table: Array, op: str) -> Base:
        items = "unknown" in field.column.encoding and field.last  # else no item is 0, see `Field`
        others = np.delete(table, [field.last] if items else [0, field.last], axis=0)
        least = op == "ReduceMax" and others.size > 0 and bool((table[field.last] <= others.min(axis=0)).all())

        def make() -> ir.Value:
            self._reads(field, "max" if least else "sum" if op == "ReduceSum" else "item")
            name, floats = field.name, self._floats(table)
            ids = self._cut("ids", field.start, field.width)
            rows = self.node("Gather", [self.weight(floats, f"{name}.table"), ids], f"{name}.items")
            name = f"{name}.pooled"
            if op == "ReduceMax" and self.opset < 18:
                return self.node(op, [rows], name, axes=[1], keepdims=0)
            return self.node(op, [rows, self.weight(np.array([1]), "axis")], name, keepdims=0)

        counts = op == "ReduceSum" and table.shape[1] == 1 and (others == 1).all() and not table[field.last].any()
        pool = (field, table) if op == "ReduceSum" else None
        return self.base(table.shape[1:], make, pool=pool, count=field if counts else None)

    def _items(self, entries: Array) -> Field | None:
        """Returns the list whose items a value counts; None for other values."""
        return self.of(entries.ravel()[0]).count if np.unique(entries).size == 1 else None

    def _mean(self, total: Array, count: Array) -> Array | None:
        """Divides the sum over a list by its number of items, with a column of `scales`; None for other values."""
        field = self._items(count)
        bases = self.bases_of(total)
        if field is None or field.scale < 0 or any(base.pool is None or base.pool[0] is not field for base in bases):
            return None
        if any(base.pool is not None and base.pool[1][field.last].any() for base in bases):
            return None  # places without an item count

        def change(base: Base) -> Base:
            def make() -> ir.Value:
                assert field is not None
                return self.node("Mul", [base.written(), self._cut("scales", field.scale, 1)], f"{field.name}.mean")

            key = "mean", base.first
            if key not in self._tables:
                self._tables[key] = np.array(self.base(base.shape, make).first)
            return self.of(self._tables[key])

        return self._by_base(total, change)

    # --- tables of ids

    def _same(self, entries: Array) -> Array | None:
        """Returns entries that are equal for all ids as an array; None if an entry depends on the id."""
        values = []
        for entry in entries.ravel():
            base = self.of(entry)
            if base.table is None or not base.code or (base.table != base.table[:1]).any():
                return None
            values.append(base.table[0, entry - base.first])
        return np.array(values).reshape(entries.shape) if values else None

    def _of_codes(self, op: str, shape: tuple[int, ...], layouts: Sequence[Layout | Array | None]) -> Array | None:
        """Computes a value of one id (or the sum of one table row) and constants; None for other values."""
        operands = [known_value.entries if isinstance(known_value, Layout) else known_value for known_value in layouts]
        if any(operand is None or operand.ndim > len(shape) for operand in operands):
            return None
        parts = [np.broadcast_to(operand, shape) for operand in operands if operand is not None]
        out = np.empty(shape, np.int64)
        for place in np.ndindex(shape):
            columns: set[int] = set()
            tables: list[Array] = []
            arguments: list[Any] = []
            for layout, part in zip(layouts, parts, strict=True):
                if not isinstance(layout, Layout):
                    arguments.append(part[place])
                    continue
                base = self.of(part[place])
                table = base.table if base.code else None
                if base.rows is not None and base.rows.table is not None:
                    base = base.rows
                    table = self._derived("row sum", [base.table], lambda t: t.sum(1, keepdims=True))  # type: ignore[list-item]
                if table is None:
                    return None
                columns.add(base.column)
                tables.append(table)
                arguments.append(None)
            if len(columns) != 1:
                return None
            constants = tuple(None if argument is None else argument.item() for argument in arguments)
            compute = _filled(OF_CODES[op], arguments)
            out[place] = self.lookup(columns.pop(), self._derived(op, tables, compute, constants), True).first
        return out

    def _of_rows(self, op: str, a: Array, b: Array) -> Array | None:
        """Applies an operator to two rows of one column if one follows from the id alone, as a mask; else None."""
        a, b = np.broadcast_arrays(a, b)
        out = np.empty(a.shape, np.int64)
        for place in np.ndindex(a.shape):
            x, y = self.of(a[place]), self.of(b[place])
            if x.table is None or y.table is None or x.column != y.column:
                return None
            rows, entry, code = (y, int(b[place]), x) if x.code and x.size == 1 else (x, int(a[place]), y)
            if not code.code or code.size > 1 or x.table.dtype != np.float32 or y.table.dtype != np.float32:
                return None
            table = self._derived(op, [x.table, y.table], OF_CODES[op])
            out[place] = self.lookup(x.column, table, rows.code).first + entry - rows.first
        return out


def _filled(op: Callable[..., Array], arguments: Sequence[Any]) -> Callable[..., Array]:
    """Calls `op` with the arguments that are not None."""

    def compute(*tables: Array) -> Array:
        left = iter(tables)
        return op(*(next(left) if argument is None else argument for argument in arguments))

    return compute
