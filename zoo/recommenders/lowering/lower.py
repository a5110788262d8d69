"""Lowers the float graph of a click model to one program of the native kernels.

Linear layers are folded into embedding tables where this saves time; other embeddings become int16 codes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.core import machine
from pipelines.core.errors import RequestError
from pipelines.graph.infer import infer_shapes
from pipelines.kernels.recommenders import steps
from pipelines.kernels.recommenders.from_graph import program_node
from pipelines.kernels.recommenders.operators import COLUMNS
from pipelines.kernels.recommenders.program import ClickProgram
from pipelines.kernels.recommenders.steps import CODES
from pipelines.quantization.calibration.table import CalibrationTable
from pipelines.quantization.qdq.scales import activation_qparams
from pipelines.quantization.recipe import QuantRecipe
from zoo.recommenders.lowering.activity import by_activity, random_samples
from zoo.recommenders.lowering.algebra import total_of
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
from zoo.recommenders.lowering.fields.expressions import FieldAttention, GatedCodes
from zoo.recommenders.lowering.fields.steps import FieldSteps, attention_order
from zoo.recommenders.lowering.graph_reader import GraphReader
from zoo.recommenders.lowering.integer_layers import FINEST, dense_layer, mixed_layer, positive
from zoo.recommenders.lowering.plan import HEADROOM, LayerGroup
from zoo.recommenders.lowering.quantized_tables import lowering_report, quantize_tables
from zoo.recommenders.lowering.sequences.encoder_precision import StateUse, uses_of_states
from zoo.recommenders.lowering.sequences.expressions import EncodedSequence

Array = NDArray[Any]
Floats = NDArray[np.float64]

FLOAT = 1e-9  # the finest step of a result that stays float


def lower(model: ir.Model, table: CalibrationTable, recipe: QuantRecipe) -> tuple[ir.Model | None, dict[str, Any]]:
    """Lowers a rewritten float model to one `ClickProgram`.

    Supports the structures of Wide & Deep, DeepFM, DCN V2, DLRM and two-tower models, see
    `zoo.recommenders.lowering.graph_reader`. If the recipe keeps an operator float because 8 bits are too coarse, the
    program uses int16 codes throughout, also for the rows of folded tables. On one machine the same inputs give the
    same bytes.

    Args:
        model: Float32 model after the rewrites. It is not changed.
        table: Activation ranges, calibrated on this graph.
        recipe: Operators to quantize, and whether to quantize tables.

    Returns:
        (model, report). The model is None if the graph has an unsupported operator or the recipe keeps tables float.
        The report is {"fold": bool, "reason": one line, "layers": {hidden value: `Decision`}, "refused": {operator:
        reason}}, and {"tables": [`QuantizedTable`]} if there are quantized tables.

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
        kept = any(recipe.keeps_float(str(node.name or node.outputs[0].name)) for node in reader.nodes)
        compiler = Compiler(reader, table, machine.caches(), not kept)
        program = compiler.compile(outputs)
        if hidden := compiler.hidden():
            compiler = Compiler(reader, table, machine.caches(), not kept, by_activity(program, hidden, reader, table))
            program = compiler.compile(outputs)
        samples = random_samples(program, reader, table)
        program, quantized = quantize_tables(program, samples, machine.caches(), recipe.bound)
    except RequestError as error:
        return None, {"fold": False, "reason": str(error), "layers": {}, "refused": {}}
    names = [str(value.name) for value in shaped.graph.outputs]
    inputs = [reader.ids, reader.numbers, reader.scales]
    fed = [None if old is None else ir.Value(name=old.name, type=old.type, shape=old.shape) for old in inputs]
    graph = ir.Graph(
        [each for each in fed if each is not None],
        [],
        nodes=[],
        opset_imports=dict(shaped.graph.opset_imports),
        name=shaped.graph.name,
    )
    taken = {*names, *(str(each.name) for each in fed if each is not None)}
    node = program_node(graph, program, fed, names, "program", taken)
    graph.append(node)
    graph.outputs.extend(node.outputs)
    return ir.Model(graph, ir_version=model.ir_version), lowering_report(compiler.decisions, quantized)


class Compiler(FieldSteps):
    """Compiles expressions to a `ClickProgram`.

    Arguments are those of `CodeLayout`, and `orders`: the orders of the units of hidden layers in their buffers. Raises
    RequestError for an expression without a step.
    """

    def __init__(
        self,
        reader: GraphReader,
        table: CalibrationTable,
        caches: Mapping[str, int],
        coarse: bool = True,
        orders: Mapping[Expression, Array] = MappingProxyType({}),
    ) -> None:
        super().__init__(reader, table, caches, coarse)
        self._orders = orders
        self._made: dict[tuple[Any, str], tuple[int, float]] = {}
        self._states: dict[Expression, StateUse] = {}

    def compile(self, outputs: Sequence[Expression]) -> ClickProgram:
        """Returns the program that computes the expressions `outputs`; raises RequestError for one without a step."""
        outputs = [total_of(output) or output for output in outputs]
        for output in outputs:
            self._visit(output)
        ids = self.reader.ids
        if ids is None or ids.shape is None or not isinstance(ids.shape[1], int):
            raise RequestError("no layer that reads lookups by columns of one input")
        self._states = uses_of_states(outputs)
        self._decide()
        self._lay_out()
        slots = [self._output(output) for output in outputs]
        rows = np.zeros(ids.shape[1], np.int32)
        for each in self._seen:
            for column, count in each.spans:
                span, height = slice(column, column + count), len(each.table)  # type: ignore[attr-defined]
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
                            for at, scale, row in self._code_positions(part):
                                weights[at] += rows[row] * scale
                case Field() if term not in self.raw:
                    looked_up.append((term, factor))
                case Field() | Numbers():
                    for at, scale, _ in self._code_positions(term):
                        weights[at] += factor * scale
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
            at = np.array([self._at[vector][0] for vector in part.vectors], np.int32)
            steps_of = [self._at[vector][1] for vector in part.vectors]
            factor = np.array([steps_of[i] * steps_of[j] / scale for i, j in order], np.float32)
            self.steps.append(steps.Dots(self.x, self.x, position, at, width, factor))

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
            if isinstance(single, Linear) and single.relu and self._coarse(x):
                self._dense(x, single, form)
            elif isinstance(single, Linear | FloatVector | FieldAttention):
                slot, scale = self._result(single, "i2")
                rows = [(at, scale, row) for at, row in enumerate(self._order(single).tolist())]
                self._mixed([x], slot, rows, [])
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

    def _order(self, x: Linear | FloatVector | FieldAttention) -> Array:
        """Returns the order of the units of a layer in its buffers."""
        order = attention_order(x) if isinstance(x, FieldAttention) else self._orders.get(x)
        return np.arange(x.width) if order is None else order

    def hidden(self) -> dict[Linear, int]:
        """Returns the buffers of layers before a ReLU that only other layers read."""
        forms = {x: "u1" if "u1" in self.forms[x] else "i2" for x in self.readers if self.forms[x] <= {"u1", "i2"}}
        own = {x: form for x, form in forms.items() if x.relu and (x, form) in self._made and x not in self.coded}
        return {x: self._made[x, form][0] for x, form in own.items()}

    def _unit(self, x: Linear | FloatVector, form: str) -> float:
        """Returns the scale of the result of a layer in a form."""
        if form == "u1":
            observed = self.table.tensors.get(x.value)
            if observed is None or observed.low < 0:
                raise RequestError(f"no calibrated range from 0 on for {x.value}")
            return float(activation_qparams(observed)[0])
        if not isinstance(x, Linear) and x.bounded and form != "f4":
            return 1 / CODES
        return 1.0 if form == "f4" else positive(HEADROOM * self._range(x.value) / CODES)

    def _dense(self, x: Linear, hidden: Linear, form: str) -> None:
        slot, scale = self._result(hidden, "u1")
        if form == "i2":
            floats, unit, out = self._result(x, "f4")[0], self._unit(x, form), self._slot(form, x.width)
            self.steps.append(steps.Quantize(floats, out, 0, 1 / unit, x.relu))
            self._made[x, form] = (out, unit)
            return
        unit = self._unit(x, form)
        out = self._slot(form, x.width)
        weight, order = x.weight[self._order(hidden)], self._order(x)
        self.steps.append(steps.Dense(slot, out, dense_layer(weight[:, order], x.bias[order], scale, unit, form)))
        self._made[x, form] = (out, unit)

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

    # --- cross networks

    def _cross(self, x: Crossed, total: Floats | None = None) -> tuple[int, float]:
        """Returns (buffer of x_l's codes or -1, their scale); `total` has the weights of x_l in the logit."""
        if (x, "cross") in self._made:
            return self._made[x, "cross"]
        before = self.crossed.get(tuple(map(id, x.changes[:-1])))
        if before is not None:
            self._cross(before)
        elif len(x.changes) > 1:
            raise RequestError("a cross network without its inner layers")
        change = self._floats(x.changes[-1])
        first = len(x.changes) == 1
        state = self._slot("f4", self._codes_width) if first else self._made[x.x, "state"][0]
        self._made[x.x, "state"] = (state, 1.0)
        grown = 1 + sum(self._range(each.value) for each in x.changes if isinstance(each, Linear | FloatVector))
        uses = self._uses.get(x, set())
        out = self._slot("i2", self._codes_width) if "codes" in uses else None
        weight = slot = None
        if "total" in uses:
            if total is None:
                raise RequestError("a cross network's last result is read early")
            weight, slot = np.zeros(self._codes_width, np.float32), self._slot("f4", 1)
            start = 0
            for part in parts_of(x.x):
                for at, scale, row in self._code_positions(part, own=True):
                    weight[at] += total[start + row] * scale
                start += part.width
        self.steps.append(steps.Cross(self.x, change, state, first, 1 / grown, out, slot, weight))
        self._made[x, "total"] = (-1 if slot is None else slot, 1.0)
        self._made[x, "cross"] = (-1 if out is None else out, grown)
        return self._made[x, "cross"]

    def _cross_total(self, x: Crossed, rows: Floats) -> int:
        self._cross(x, rows)
        return self._made.pop((x, "total"))[0]

    # --- layers on codes

    def _group(self, group: LayerGroup) -> None:
        rows: list[tuple[int, float, int]] = []
        slot, start, folded = self.x, 0, []
        gates = [self._gated(part) for part in group.parts if isinstance(part, GatedCodes)]
        slot, factor = gates[0] if gates else (slot, 1.0)
        for part in group.parts:
            if isinstance(part, GatedCodes):
                inner = 0
                for each in parts_of(part.x):
                    rows += [
                        (at, scale * factor, start + inner + row) for at, scale, row in self._code_positions(each, True)
                    ]
                    inner += each.width
            elif isinstance(part, Crossed):
                slot, grown = self._cross(part)
                inner = 0
                for each in parts_of(part.x):
                    rows += [(at, scale * grown, inner + row) for at, scale, row in self._code_positions(each, True)]
                    inner += each.width
            elif part in group.folded:
                assert isinstance(part, Field)
                folded.append((part, start))
            else:
                rows += [(at, scale, start + row) for at, scale, row in self._code_positions(part)]
            start += part.width
        self._mixed(group.layers, slot, rows, folded)

    def _mixed(
        self,
        layers: Sequence[Linear],
        slot: int,
        rows: Sequence[tuple[int, float, int]],
        folded: Sequence[tuple[Field, int]],
    ) -> None:
        """Adds a `Mixed` step for layers with the same inputs.

        `rows` has (position, scale, row of the weights) of the codes in `slot`; `folded` has fields with their first
        row of the weights.
        """
        weights: list[Floats] = []
        biases: list[Floats] = []
        units: list[Floats] = []
        fine: list[Floats] = []
        outs: list[tuple[int, int, bool]] = []
        for layer in layers:
            forms = sorted({"f4" if form == "piece" else form for form in self.forms.get(layer, {"f4"})})
            for form in forms:
                order = self._order(layer)
                weight, bias = layer.weight[:, order], layer.bias[order]
                if layer in self.multiplied and form == "f4":
                    weight, bias = self._like_codes(layer)
                step_of = self._unit(layer, form)
                width = weight.shape[1]
                out = self._slot(form, width)
                outs.append((out, width, layer.relu and form != "f4"))
                self._made[layer, form] = (out, step_of)
                padding = -width % COLUMNS
                weights.append(np.pad(weight, ((0, 0), (0, padding))))
                biases.append(np.pad(bias, (0, padding)))
                units.append(np.full(width + padding, step_of))
                fine.append(np.full(width + padding, FLOAT if form == "f4" else FINEST * step_of))
        whole, bias, unit = np.concatenate(weights, axis=1), np.concatenate(biases), np.concatenate(units)
        if not (np.isfinite(whole).all() and np.isfinite(bias).all()):
            raise RequestError("its tables or weights are not finite")
        first = min((at for at, _, _ in rows), default=0)
        count = max((at for at, _, _ in rows), default=first - 1) + 1 - first
        matrix = np.zeros((count, whole.shape[1]))
        for at, scale, row in rows:
            matrix[at - first] += whole[row] * scale
        made = mixed_layer(matrix, folded, whole, np.concatenate(fine), self._wide)
        chosen = [
            (part.column, offset, len(part.table)) for (part, _), offset in zip(folded, made.offsets, strict=True)
        ]
        columns, offsets, heights = np.array(chosen, np.int32).reshape(-1, 3).T.copy()
        self.steps.append(
            steps.Mixed(
                slot if count else -1,
                first if count else 0,
                made.weight,
                (made.scale / unit).astype(np.float32),
                ((bias + made.centre) / unit).astype(np.float32),
                tuple(outs),
                columns,
                offsets,
                heights,
                made.shift,
                made.table,
            )
        )
