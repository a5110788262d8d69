"""Lowers the float graph of a click model to one program of the native kernels.

Linear layers are folded into embedding tables where this saves time; other embeddings become int16 codes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.core import machine
from pipelines.core.batches import Batch
from pipelines.core.errors import RequestError
from pipelines.graph.infer import infer_shapes
from pipelines.kernels.recommenders import reference, steps
from pipelines.kernels.recommenders.from_graph import program_node
from pipelines.kernels.recommenders.operators import ZERO
from pipelines.kernels.recommenders.program import ClickProgram
from pipelines.quantization.calibration.table import CalibrationTable
from pipelines.quantization.recipe import QuantRecipe
from zoo.recommenders.lowering.activity import Samples, by_activity, random_samples, samples_of
from zoo.recommenders.lowering.algebra import total_of
from zoo.recommenders.lowering.code_layers import Inputs
from zoo.recommenders.lowering.crosses.steps import CrossSteps
from zoo.recommenders.lowering.expressions import (
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
    Total,
    parts_of,
)
from zoo.recommenders.lowering.fields.expressions import FieldAttention
from zoo.recommenders.lowering.forms import (
    FORMS,
    SAMPLES,
    MadeForm,
    OverBoundError,
    changes_on,
    lowering_report,
    within_bound,
)
from zoo.recommenders.lowering.graph_reader import GraphReader
from zoo.recommenders.lowering.integer_layers import dense_layer
from zoo.recommenders.lowering.plan import LoweringOptions
from zoo.recommenders.lowering.quantized_tables import LookupTable, QuantizedTables, largest_change
from zoo.recommenders.lowering.sequences.encoder_precision import StateUse, uses_of_states
from zoo.recommenders.lowering.sequences.expressions import EncodedSequence
from zoo.recommenders.lowering.table_scales import TableScales

Array = NDArray[Any]
Floats = NDArray[np.float64]

RANGE_SAMPLES = 1024  # rows of a log that show the ranges of columns


def lower(
    model: ir.Model,
    table: CalibrationTable,
    recipe: QuantRecipe,
    scales: TableScales | None = None,
    rows: Batch | None = None,
    held: bool = True,
) -> tuple[ir.Model | None, dict[str, Any]]:
    """Lowers a rewritten float model to several forms of a `ClickProgram`; a machine selects the fastest.

    Supports the operators of the families in `zoo.recommenders.models`, as `GraphReader` reads them. If the recipe
    keeps an operator float because 8 bits are too coarse, all forms but `int8` use int16 codes throughout, also for the
    rows of folded tables; `int8` does so for that operator. The same inputs give the same bytes, on machines with
    caches of the same sizes.

    A form is left out if it equals an earlier form, or if it changes an output by more than the bound (`within_bound`):
    compared with the form of int16 products on `rows` or random samples, and with the float model on `rows` if `held`.
    If all forms exceed the bound, int16 codes throughout are tried.

    Args:
        model: Float32 model after the rewrites. It is not changed.
        table: Activation ranges, calibrated on this graph.
        recipe: Operators to quantize, and whether to quantize tables.
        scales: Scales of an earlier model to keep; receives those that are used.
        rows: Inputs of the model, also for the ranges of columns of bytes; None: random samples are drawn.
        held: Whether the bound applies to the difference from the float model on `rows`, too.

    Returns:
        (model, report). The model is None if the graph has an unsupported operator, the recipe keeps tables float, or
        no form is within the bound. It has a node of every form, the first one with the model's outputs. The report is
        {"fold": bool, "reason": one line, "forms": [{"form", "megabytes" of its tables, "change" of outputs, "folded":
        {hidden value: `Decision`}}], "refused": {operator or form: reason}, "tables": [`LookupTable`] of the form
        without folded tables}.

    Raises:
        RequestError: The table belongs to another graph.
    """
    table.require(model)
    shaped = model.clone()
    infer_shapes(shaped)
    reader = GraphReader()
    try:
        if not recipe.quantize_tables:
            raise RequestError("the recipe keeps tables float")
        outputs = [reader.read(value) for value in shaped.graph.outputs]
        kept = _kept(shaped.graph, reader, recipe)
        change = None if rows is None or not held else changes_on(rows, shaped, reader)
        options = LoweringOptions(reader, table, machine.caches(), scales or TableScales(), not kept, kept)
        try:
            forms, tables, refused = _forms(options, outputs, recipe.bound, rows, change)
        except OverBoundError:
            if kept:
                raise
            forms, tables, refused = _forms(replace(options, coarse=False), outputs, recipe.bound, rows, change)
    except RequestError as error:
        return None, {"fold": False, "reason": str(error), "forms": [], "refused": {}}
    return _model_of(forms, shaped, reader), lowering_report(forms, tables, refused)


def _model_of(forms: Sequence[MadeForm], original: ir.Model, reader: GraphReader) -> ir.Model:
    """Returns a model with a node of every form, the first one with the outputs of the original model."""
    names = [str(value.name) for value in original.graph.outputs]
    inputs = [reader.ids, reader.numbers, reader.scales]
    fed = [None if old is None else ir.Value(name=old.name, type=old.type, shape=old.shape) for old in inputs]
    graph = ir.Graph(
        [value for value in fed if value is not None],
        [],
        nodes=[],
        opset_imports=dict(original.graph.opset_imports),
        name=original.graph.name,
    )
    taken = {*names, *(str(value.name) for value in fed if value is not None)}
    written: dict[int, ir.Value] = {}
    for number, made in enumerate(forms):
        own = [f"{made.name}.{name}" for name in names] if number else names
        graph.append(program_node(graph, made.program, fed, own, made.name, taken, written))
    graph.outputs.extend(graph[0].outputs)
    return ir.Model(graph, ir_version=original.ir_version)


def _kept(graph: ir.Graph, reader: GraphReader, recipe: QuantRecipe) -> frozenset[str]:
    """Returns the values of operators that the recipe keeps float, also after the sums and ReLUs that follow."""
    kept: set[str] = set()
    for node in graph:
        follows = node.op_type in ("Add", "Relu") and any(
            value is not None and value.name in kept for value in node.inputs
        )
        if node in reader.nodes and (follows or recipe.keeps_float(str(node.name or node.outputs[0].name))):
            kept.add(str(node.outputs[0].name))
    return frozenset(kept)


def _forms(
    options: LoweringOptions,
    outputs: Sequence[Expression],
    bound: float,
    rows: Batch | None,
    change: Callable[[ClickProgram], float] | None,
) -> tuple[list[MadeForm], list[LookupTable], dict[str, str]]:
    """Returns the forms of a model that differ, their quantized tables, and why forms are left out."""
    made: dict[Hashable, MadeForm] = {}
    options = replace(options, tables={})
    reader, table, scales = options.reader, options.table, options.scales
    quantized = QuantizedTables(options.caches, bound)
    for form in FORMS:
        options = replace(options, form=form)
        compiler = Compiler(options)
        choices = compiler.choose(outputs)
        if choices in made or (form.fold != "none" and not compiler.folds):
            continue
        program = compiler.compile()
        if not made:
            samples = random_samples(program, reader, table)
            if hidden := compiler.hidden():
                activity = by_activity(program, hidden, samples)
                options = replace(options, orders={x: scales.order(x.value, activity[x]) for x in hidden})
                compiler = Compiler(options)
                compiler.choose(outputs)
                program = compiler.compile()
        if form.name == "int16" and compiler.has_states:
            many = _samples(program, reader, table, rows, RANGE_SAMPLES)
            options = replace(options, columns=compiler.column_statistics(program, many))
        made[choices] = MadeForm(form.name, quantized.applied(program, samples), compiler.decisions)
    shown = _samples(program, reader, table, rows, SAMPLES)
    results = {form.name: reference.run(form.program, *shown) for form in made.values()}
    exact = results["int16" if "int16" in results else next(iter(results))]
    for entry in made.values():
        entry.change = max(largest_change(exact, results[entry.name]), change(entry.program) if change else 0.0)
    kept, refused = within_bound(made.values(), bound)
    if any(form.name == "int8" for form in kept):  # the finer form only takes longer then
        kept = [form for form in kept if form.name != "part-int8"]
    far = [form.far() for form in kept if form.name == "folded"]
    unfolded = next((form.program for form in made.values() if form.name == "int16"), program)
    return [*kept, *far], quantized.tables(unfolded), refused


def _samples(
    program: ClickProgram, reader: GraphReader, table: CalibrationTable, rows: Batch | None, count: int
) -> Samples:
    """Returns the first rows of a log, or random samples without one."""
    return random_samples(program, reader, table, count) if rows is None else samples_of(program, reader, rows, count)


class Compiler(CrossSteps):
    """Compiles expressions to a `ClickProgram`.

    Args:
        options: Graph and form.

    Raises:
        RequestError: An expression has no step.
    """

    def __init__(self, options: LoweringOptions) -> None:
        super().__init__(options)
        self._orders, self._made = options.orders, {}
        self._states: dict[Expression, StateUse] = {}
        self._outputs: list[Expression] = []

    def choose(self, outputs: Sequence[Expression]) -> Hashable:
        """Chooses number formats and folded fields for the expressions `outputs`.

        Returns:
            What differs between the programs of forms.

        Raises:
            RequestError: An expression has no step.
        """
        self._outputs = [total_of(output) or output for output in outputs]
        for output in self._outputs:
            self._visit(output)
        ids = self.reader.ids
        if ids is None or ids.shape is None or not isinstance(ids.shape[1], int):
            raise RequestError("no layer that reads lookups by columns of one input")
        self._states = uses_of_states(self._outputs)
        self._decide()
        return self.choices

    def compile(self) -> ClickProgram:
        """Returns the program after `choose`; raises RequestError for an expression without a step."""
        ids, outputs = self.reader.ids, self._outputs
        assert ids is not None and ids.shape is not None and isinstance(ids.shape[1], int)
        self._lay_out()
        slots = [self._output(output) for output in outputs]
        rows = np.zeros(ids.shape[1], np.int32)
        for part in self._seen:
            for column, count, height in part.spans:
                span = slice(column, column + count)
                rows[span] = np.where(rows[span] == 0, height, np.minimum(rows[span], height))
        return ClickProgram(rows, *self._widths(), tuple(self.slots), tuple(self.steps), tuple(slots))

    # --- steps

    def _output(self, x: Expression) -> int:
        if isinstance(x, Total | ProbabilityProduct):
            if (x, "output") not in self._made:
                self._made[x, "output"] = (self._total(x) if isinstance(x, Total) else self._product(x), 1.0)
            return self._made[x, "output"][0]
        if isinstance(x, L2Normalized):
            return self._floats(x)
        raise RequestError("an output is no probability, logit or vector of length one")

    def _product(self, x: ProbabilityProduct) -> int:
        first, second = self._output(x.x), self._output(x.y)
        out = self._slot("f4", 1)
        self.steps.append(steps.Product(first, second, out))
        return out

    def _total(self, x: Total) -> int:
        weights = np.zeros(max(self._codes_width, 1), np.float64)
        terms: list[tuple[int, float]] = []
        bias = x.bias
        looked_up: list[tuple[Field, float]] = []
        for term, factor in x.terms:
            match term:
                case Linear():
                    bias += float(term.bias[0]) * factor
                    start = 0
                    for part in parts_of(term.x):
                        rows = term.weight[start : start + part.width, 0] * factor
                        start += part.width
                        if self.forms.get(part, set()) & {"u1", "i2"}:
                            assert isinstance(part, Linear | FloatVector | FieldAttention)
                            terms.append((self._hidden_term(part, rows), 1.0))
                        elif isinstance(part, Crossed):
                            terms.append((self._cross_total(part, rows), 1.0))
                        else:
                            for position, scale, row in self._code_positions(part):
                                weights[position] += rows[row] * scale
                case Field() if term not in self.raw:
                    looked_up.append((term, factor))
                case Field() | Numbers():
                    for position, scale, _ in self._code_positions(term):
                        weights[position] += factor * scale
                case Factorization():
                    scale = self._at[term.vectors[0]][1]
                    out = self._slot("f4", 1)
                    vectors = np.array([self._at[vector][0] for vector in term.vectors], np.int32)
                    width = term.vectors[0].width
                    self.steps.append(steps.Factorization(self.x, out, vectors, width, term.factor * scale**2))
                    terms.append((out, factor))
                case Product():
                    terms.append((self._dot_product(term), factor))
                case _:
                    raise RequestError("a term of the logit has no step")
        if looked_up:
            terms.append((self._lookup_sum(looked_up), 1.0))
        out = self._slot("f4", 1)
        if (used := np.flatnonzero(weights)).size:
            first, end = int(used[0]), int(used[-1]) + 1
            terms.append((self._weighted(self.x, first, weights[first:end]), 1.0))
        self.steps.append(steps.Total(out, tuple(terms), bias, x.sigmoid))
        return out

    def _lookup_sum(self, terms: Sequence[tuple[Field, float]]) -> int:
        """Returns the buffer of a weighted sum of scalars selected by ids."""
        out, heights = self._slot("f4", 1), [len(field.table) for field, _ in terms]
        table = np.concatenate([field.table[:, 0] * np.float32(factor) for field, factor in terms])
        columns = np.array([field.column for field, _ in terms], np.int32)
        offsets = np.cumsum([0, *heights])[:-1].astype(np.int32)
        # first of all: the cache fetches its rows while the next steps run
        self.steps.insert(0, steps.LookupSum(out, table, columns, offsets, np.array(heights, np.int32)))
        return out

    def _weighted(self, slot: int, first: int, weight: Floats) -> int:
        out = self._slot("f4", 1)
        self.steps.append(steps.Weighted(slot, first, weight.astype(np.float32), out))
        return out

    def _code_positions(self, part: Expression, own: bool = False) -> Iterator[tuple[int, float, int]]:
        """Yields (position among the codes, scale, column of `part`); with `own`, of codes of their own."""
        if isinstance(part, Numbers) and not (own and part in self.spread):
            for row, (column, factor) in enumerate(zip(part.columns, part.factor, strict=True)):
                yield self._numbers_at + column, self._number_scale * float(factor), row
            return
        self._write_piece(part)
        position, scale = self._at[part]
        for row in range(part.width):
            yield position + row, scale, row

    def _write_piece(self, part: Expression) -> None:
        """Adds the steps that write a computed vector to the codes."""
        if part not in self.pieces or (part, "piece") in self._made:
            return
        for before in self._ordered_pieces():  # they are written in order
            if before is part:
                break
            self._write_piece(before)
        self._made[part, "piece"] = (self.x, 1.0)
        position, scale = self._at[part]
        if isinstance(part, Linear | FloatVector):
            relu = isinstance(part, Linear) and part.relu
            self.steps.append(steps.Quantize(self._floats(part), self.x, position, 1 / scale, relu))
        elif isinstance(part, Dots):
            for vector in part.vectors:
                self._write_piece(vector)
            size, width = len(part.vectors), part.vectors[0].width
            order = [(i, j) for i in range(size) for j in range(i)]
            if [tuple(sorted(pair, reverse=True)) for pair in part.pairs] != order:
                raise RequestError("dot products in another order than that of the lower triangle")
            positions = np.array([self._at[vector][0] for vector in part.vectors], np.int32)
            steps_of = [self._at[vector][1] for vector in part.vectors]
            factor = np.array([steps_of[i] * steps_of[j] / scale for i, j in order], np.float32)
            self.steps.append(steps.Dots(self.x, self.x, position, positions, width, factor))

    def _floats(self, x: Expression) -> int:
        if isinstance(x, L2Normalized):
            if (x, "f4") not in self._made:
                if isinstance(x.x, Field):
                    self._made[x, "f4"] = (self._unit_rows(x.x, x), 1.0)
                    return self._made[x, "f4"][0]
                slot = self._floats(x.x)
                out = self._slot("f4", x.width)
                relu = isinstance(x.x, Linear) and x.x.relu
                self.steps.append(steps.Normalize(slot, out, x.epsilon, x.least, relu))
                self._made[x, "f4"] = (out, 1.0)
            return self._made[x, "f4"][0]
        assert isinstance(x, Linear | FloatVector)
        return self._result(x, "f4")[0]

    def _unit_rows(self, field: Field, x: L2Normalized) -> int:
        """Returns the buffer of the rows of a table, normalized beforehand."""
        rows = field.table.astype(np.float64)
        squares = np.maximum((rows**2).sum(axis=1, keepdims=True) + x.epsilon, x.least)
        out = self._slot("f4", x.width)
        self.steps.append(steps.Rows(out, field.column, (rows / np.sqrt(squares)).astype(np.float32)))
        return out

    def _coded(self, x: Expression) -> tuple[int, float]:
        assert isinstance(x, Linear | FloatVector | FieldAttention)
        return self._result(x, "i2")

    def _result(self, x: Linear | FloatVector | FieldAttention, form: str) -> tuple[int, float]:
        """Returns (buffer, scale) of the result of a layer; the form "f4" is the result before its ReLU."""
        if isinstance(x, FieldAttention):
            return self._attention(x)
        if (x, form) not in self._made and isinstance(x, FloatVector):
            if form == "f4":
                out, unit = self._curved(x), 1.0
            else:
                floats, out, unit = self._floats(x), self._slot(form, x.width), self._unit(x, form)
                self.steps.append(steps.Quantize(floats, out, 0, 1 / unit))
            self._made[x, form] = (out, unit)
        elif (x, form) not in self._made and isinstance(x, Linear):
            parts = parts_of(x.x)
            single = parts[0] if len(parts) == 1 else None
            if isinstance(single, Linear) and self._read_as(x, single) in ("u1", "s1"):
                self._dense(x, single, form)
            elif isinstance(single, Linear | FloatVector | FieldAttention):
                slot, scale = self._result(single, "i2")
                rows = [(position, scale, row) for position, row in enumerate(self._order(single).tolist())]
                self._mixed([x], slot, Inputs(rows))
            else:
                self._group(self.groups[tuple(map(id, parts))])
        return self._made[x, form]

    def _curved(self, x: FloatVector) -> int:
        """Returns the buffer of a vector computed as floats."""
        sources = [self._floats(source) for source in x.sources()]
        out = self._slot("f4", self.slots[sources[0]][1] if sources else x.width)
        step = x.step_for(self._states.get(x), sources, out) if isinstance(x, EncodedSequence) else x.step(sources, out)
        self.steps.append(step)
        return out

    def hidden(self) -> dict[Linear, int]:
        """Returns the buffers of layers before a ReLU that only other layers read."""
        forms = {x: "u1" if "u1" in self.forms[x] else "i2" for x in self.readers if self.forms[x] <= {"u1", "i2"}}
        own = {x: form for x, form in forms.items() if x.relu and (x, form) in self._made and x not in self.coded}
        return {x: self._made[x, form][0] for x, form in own.items()}

    def _dense(self, x: Linear, hidden: Linear, form: str) -> None:
        unit = self._unit(x, form)
        if form == "i2":
            floats, out = self._result(x, "f4")[0], self._slot(form, x.width)
            self.steps.append(steps.Quantize(floats, out, 0, 1 / unit, x.relu))
            self._made[x, form] = (out, unit)
            return
        read = self._read_as(x, hidden)
        slot, scale = self._result(hidden, read)
        weight, bias = x.weight[:, self._order(x)], x.bias[self._order(x)]
        if x in self.multiplied:
            weight, bias = self._like_codes(x)
        weight = weight[self._order(hidden)]
        if read == "s1":
            weight = weight * self._unit(hidden, read)[:, None]
        out = self._slot("u1" if form == "s1" else form, bias.size)
        means = self.columns[hidden].mean / self._unit(hidden, read) if read == "s1" else None
        layer = dense_layer(weight, bias, scale, unit, form, ZERO if read == "s1" else 0, means)
        self.steps.append(steps.Dense(slot, out, layer))
        self._made[x, form] = (out, unit if isinstance(unit, float) else 1.0)

    def _hidden_term(self, part: Linear | FloatVector | FieldAttention, rows: Floats) -> int:
        """Returns the buffer of the contribution of a hidden layer to the logit."""
        rows = rows[self._order(part)]
        if "i2" in self.forms[part]:
            slot, scale = self._result(part, "i2")
            return self._weighted(slot, 0, rows * scale)
        slot, scale = self._result(part, "u1")
        out = self._slot("f4", 1)
        self.steps.append(steps.Dense(slot, out, dense_layer(rows[:, None], np.zeros(1), scale, 1.0, "f4")))
        return out
