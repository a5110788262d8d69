"""The first fully connected layer folded into the embedding tables, and when that pays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.core import machine
from pipelines.core.errors import RequestError
from pipelines.graph import edit, io, query
from pipelines.kernels.recommenders.from_graph import parallel_embedding
from pipelines.kernels.recommenders.operators import COLUMNS, FIELDS, NUMBER_LIMIT, ZERO, EmbeddingLayer
from pipelines.quantization.calibration.calibrate import CalibrationTable
from pipelines.quantization.qdq.scales import activation_qparams
from pipelines.quantization.quantize import quantize
from pipelines.quantization.recipe import QuantRecipe
from pipelines.rewrites.driver import Rewrite, rewrite
from zoo.recommenders.export.rewrites import field_lookup
from zoo.recommenders.lowering.expressions import Field, vectors_of
from zoo.recommenders.lowering.graph_reader import Reader

Array = NDArray[Any]
Floats = NDArray[np.float64]

# Rough figures of one core, from AMD and Intel servers of 2021 to 2024, taken so that the fold has to earn its place:
# int8 products as fast as most do them (measured: 240 to 580e9 MAC/s), rows as slow as any reads them (L2 150 to 280,
# L3 30 to 130, DRAM 17 to 45 GB/s).
MACS = 400e9
BANDWIDTH = {"L2": 150e9, "L3": 30e9, "DRAM": 17e9}
LIMIT = 2**28  # bytes of one table: it is kept in a file and in memory for as long as the model is
FINEST = 1 / 64  # table scales below this part of the hidden layer's scale gain nothing
BLOCK = 8192  # table rows multiplied at once, in float64


@dataclass(frozen=True)
class Decision:
    """Whether to fold one layer and the estimate behind it: bytes of the folded table, and per sample products saved
    and microseconds.
    """

    fold: bool
    reason: str
    table_bytes: int
    macs_saved: int
    estimated_us: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        """The decision as plain JSON values."""
        return asdict(self)


def decide(widths: Sequence[int], rows: int, hidden: int, caches: Mapping[str, int]) -> Decision:
    """Whether folding a layer of `hidden` outputs into tables of `widths` columns, `rows` rows in all, pays on a CPU
    with these caches.

    Per sample and core, with H = hidden and H' = H in whole cache lines, the fold trades products for bytes:

        gemm = sum_f d_f H / MACS
        rows = F H' / BANDWIDTH[the first of L2, L3, DRAM that holds the table of R H' bytes]

    It pays where rows < gemm and the table is within `LIMIT`. Where H is a multiple of 64 it cancels: tables in L3 pay
    from 14 columns on, in DRAM from 24. This is the estimate for large batches. In small ones the layer's own weights
    have to be read for few samples, and the fold gains more.
    """
    line = -(-hidden // COLUMNS) * COLUMNS
    size, macs, read = rows * line, sum(widths) * hidden, len(widths) * line
    level = next((each for each in ("L2", "L3") if size <= caches.get(each, 0)), "DRAM")
    gemm_us, rows_us = 1e6 * macs / MACS, 1e6 * read / BANDWIDTH[level]
    if size > LIMIT:
        reason = f"a table of {size / 1e6:,.1f} MB is more than {LIMIT / 1e6:,.1f} MB"
    else:
        reason = (
            f"rows of {read / 1e3:,.1f} kB a sample from a table of {size / 1e6:,.1f} MB in {level}: {rows_us:.2f} us; "
            f"the {macs / 1e3:,.0f} k products they replace: {gemm_us:.2f} us"
        )
    estimate = {"gemm": round(gemm_us, 3), "rows": round(rows_us, 3)}
    return Decision(size <= LIMIT and rows_us < gemm_us, reason, size, macs, estimate)


@dataclass(frozen=True, eq=False)
class _Lookups:
    """Lookups by columns of one integer input, side by side: (column, table float32 [rows, width]) each."""

    ids: ir.Value
    fields: list[tuple[int, Array]]


@dataclass(frozen=True, eq=False)
class _Field:
    """One field of the folded layer: the rows `table` [rows, d] that column `column` of the ids chooses, and their
    weights [d, H].
    """

    column: int
    table: Array
    weight: Floats

    def products(self) -> Iterator[tuple[int, Floats]]:
        """(first row, block of rows of table x weight)."""
        for start in range(0, len(self.table), BLOCK):
            yield start, self.table[start : start + BLOCK].astype(np.float64) @ self.weight


@dataclass(frozen=True, eq=False)
class _Parts:
    """What the layer reads: its lookups, and its float values with their weights [M, H]."""

    ids: ir.Value
    fields: list[_Field]
    dense: list[ir.Value]
    weight: Floats


class FoldParallelEmbedding(Rewrite):
    """Relu([e_1 .. e_F; x] W + b) -> one `ParallelEmbedding` (int8.zoo, see `pipelines.kernels.recommenders.operators`)
    and a
    DequantizeLinear.

    e_f is row id_f of a constant table E_f, so e_f W_f is row id_f of the constant table P_f = E_f W_f, exactly:

        [e_1 .. e_F; x] W + b = sum_f P_f[id_f] + x W_x + b = sum_f (P_f[id_f] - c_f) + x W_x + (b + sum_f c_f)

    c_f, the middle of each column of P_f, makes the int8 scale of a column small: s_j = max_f (max - min)(P_f[:, j]) /
    254. The rows are then wrong by at most s_j / 2, numbers by half of 1 / 2048 of their calibrated range, and the
    hidden layer is rounded to the same uint8 as without the fold. The wide part ReduceSum(T[ids + offsets]) joins where
    it has the same columns with the same rows.

    Matches lookups as `FuseParallelEmbedding` joins them, or single ones, on one graph input of ids in [0, rows); other
    parts have to be float [n, m] with a range in `table`. Does not fire where the sum or the concatenation has another
    reader, where the cost model (see `decide`) advises against it, where `keep` says by name that an operator stays
    float, or where `EmbeddingLayer` refuses the numbers.
    """

    def __init__(
        self, table: CalibrationTable, caches: Mapping[str, int], keep: Callable[[str], bool] = lambda name: False
    ) -> None:
        super().__init__()
        self.table, self.caches, self.keep = table, caches, keep
        self.decisions: dict[str, Decision] = {}
        self.beside: dict[str, str] = {}  # wide parts that stay beside a folded layer, which no later round finds

    def rewrite(self, model: ir.Model) -> int:
        """Fold every Gemm that reads such lookups, and note the decision."""
        taken, count = query.used_names(model.graph), 0
        for gemm in [each for each in model.graph if each.op_type == "Gemm"]:
            try:
                count += self._fold(model.graph, gemm, taken)
            except RequestError as error:
                self.refuse(gemm.outputs[0], str(error))
        self.refused |= self.beside
        if count:
            model.graph.sort()  # readers of the wide part may stand before the layer
        return count

    def _fold(self, main: ir.Graph, gemm: ir.Node, taken: set[str]) -> int:
        x = gemm.inputs[0]
        joined = x.producer() if x is not None else None
        concat = joined if joined is not None and joined.op_type == "Concat" else None
        values = list(concat.inputs) if concat is not None else [x]
        lookups = [_lookups(value) for value in values]
        if not any(lookups) or x is None:
            if any(value is not None and _is_lookup(value) for value in values):
                raise RequestError("its lookups do not read one graph input, or others read them")
            return 0
        if concat is not None and concat.attributes.get_int("axis", 0) not in (1, -1):
            raise RequestError("what it reads is not joined by columns")
        relu = query.sole_user(gemm.outputs[0])
        if relu is None or relu.op_type != "Relu" or query.sole_user(x) is not gemm:
            raise RequestError("its sum is read by other than one Relu, or what it reads by others")
        weight = _weights(gemm)
        parts, bias = self._parts(values, lookups, weight), _bias(gemm, weight.shape[1])
        old = [each for each in (concat, gemm, relu) if each is not None]
        if self._kept(_above([hidden := relu.outputs[0]])):
            raise RequestError("kept float by the recipe")
        fields = parts.fields
        scale = self._hidden_scale(hidden)
        step = np.concatenate([np.zeros(0), *(self._inverse_scale(value) for value in parts.dense)])
        decision = decide(
            [len(each.weight) for each in fields], sum(len(each.table) for each in fields), bias.size, self.caches
        )
        self.decisions[str(hidden.name)] = decision
        if not decision.fold:
            raise RequestError(decision.reason)
        total = self._wide(main, parts)
        wide = None if total is None else np.concatenate([dict(total[1])[each.column].ravel() for each in fields])
        layer = fold_layer(fields, parts.weight, step, bias, float(scale), wide)
        nodes: list[ir.Node] = []
        numbers = parts.dense[0] if parts.dense else None
        if len(parts.dense) > 1:
            nodes.append(
                edit.node(
                    "Concat", list(parts.dense), f"{hidden.name}.numbers", dtype=ir.DataType.FLOAT, taken=taken, axis=1
                )
            )
            numbers = nodes[0].outputs[0]
        embedding = parallel_embedding(main, layer, parts.ids, numbers, f"{hidden.name}.embedding", taken)
        s = edit.initializer(main, f"{hidden.name}.scale", np.asarray(scale), taken)
        z = edit.initializer(main, f"{hidden.name}.zero_point", np.asarray(np.uint8(0)), taken)
        back = edit.node("DequantizeLinear", [embedding.outputs[0], s, z], str(hidden.name), dtype=ir.DataType.FLOAT)
        replaced = {hidden: back.outputs[0]}
        if total is not None:
            old.append(total[0])
            replaced[total[0].outputs[0]] = embedding.outputs[1]
        ir.convenience.replace_nodes_and_values(
            main, relu, old, [*nodes, embedding, back], list(replaced), list(replaced.values())
        )
        return 1

    def _parts(self, values: Sequence[ir.Value | None], joined: Sequence[_Lookups | None], weight: Floats) -> _Parts:
        lookups: list[_Lookups] = []
        fields: list[_Field] = []
        dense: list[ir.Value] = []
        rows: list[Floats] = [weight[:0]]
        start = 0
        for value, group in zip(values, joined, strict=True):
            if group is not None:
                lookups.append(group)
                for column, table in group.fields:
                    fields.append(_Field(column, table, weight[start : start + table.shape[1]]))
                    start += table.shape[1]
                continue
            width = value.shape[1] if value is not None and value.shape is not None and len(value.shape) == 2 else None
            if value is None or value.dtype != ir.DataType.FLOAT or not isinstance(width, int):
                raise RequestError(
                    f"its part {value.name if value else '?'} is not known to be float32 of a fixed number of columns"
                )
            if _is_lookup(value):
                raise RequestError(
                    f"its part {value.name} is no lookup by columns of one input that only this layer reads"
                )
            dense.append(value)
            rows.append(weight[start : start + width])
            start += width
        if start != len(weight):
            raise RequestError(f"its parts have {start} columns, its weights {len(weight)} rows")
        ids = lookups[0].ids
        if any(group.ids is not ids for group in lookups) or not ids.is_graph_input():
            raise RequestError("its lookups do not read one graph input")
        if len(fields) > FIELDS:
            raise RequestError(f"it has {len(fields)} fields; an int16 sum holds 1 to {FIELDS}")
        return _Parts(ids, fields, dense, np.concatenate(rows))

    def _hidden_scale(self, hidden: ir.Value) -> np.float32:
        observed = self.table.tensors.get(str(hidden.name))
        if observed is None or observed.low < 0:
            raise RequestError(f"no calibrated range from 0 on for its result {hidden.name}")
        return activation_qparams(observed)[0]

    def _inverse_scale(self, value: ir.Value) -> Array:
        """1 / scale of a dense part, float32 [columns]: its calibrated range reaches `NUMBER_LIMIT`."""
        observed = self.table.tensors.get(str(value.name))
        if observed is None:
            raise RequestError(f"no calibrated range for its part {value.name}")
        reach = max(abs(observed.low), abs(observed.high))
        if not NUMBER_LIMIT / np.finfo(np.float32).max < reach < np.inf:
            raise RequestError(f"its part {value.name} was {reach:g} at most in calibration, which gives no step")
        width = value.shape[1] if value.shape is not None else None
        assert isinstance(width, int)
        return np.full(width, NUMBER_LIMIT / reach, np.float32)

    def _kept(self, nodes: Iterable[ir.Node]) -> bool:
        return any(self.keep(str(each.name or each.outputs[0].name)) for each in nodes)

    def _wide(self, main: ir.Graph, parts: _Parts) -> tuple[ir.Node, list[tuple[int, Array]]] | None:
        """The first sum of scalars looked up by the same fields: (ReduceSum, its lookups)."""
        rows = sorted((each.column, len(each.table)) for each in parts.fields)
        for node in [each for each in main if each.op_type == "ReduceSum"]:
            lookups = _stacked(node.inputs[0])
            if lookups is None or lookups.ids is not parts.ids:
                continue
            axes = query.constant(node.inputs[1]) if len(node.inputs) > 1 else None
            if axes is None or axes.tolist() not in ([1], [-2]) or node.attributes.get_int("keepdims", 1) != 0:
                why = "it does not sum over the fields, or keeps their axis"
            elif any(table.shape[1] != 1 for _, table in lookups.fields):
                why = "its rows are no scalars"
            elif sorted((column, len(table)) for column, table in lookups.fields) != rows or len(dict(rows)) != len(
                rows
            ):
                why = "its columns or their rows are not those of the first layer"
            elif self._kept(_above(node.outputs)):
                why = "kept float by the recipe"
            elif node in _above(parts.dense):
                why = "the numbers of the first layer depend on it"
            else:
                return node, lookups.fields
            self.beside[str(node.outputs[0].name)] = why
        return None


def fold_layer(
    fields: Sequence[_Field], weight: Floats, step: Array, bias: Floats, hidden: float, wide: Array | None = None
) -> EmbeddingLayer:
    """The layer in integers, from float weight [M, H] of the numbers and bias [H]; step [M]: 1 / scale of the numbers;
    hidden: the scale of the uint8 hidden layer.

    Products E_f W_f are computed in float64, a block at a time. The scale of a column is half its range / 127, see
    `FoldParallelEmbedding`, and at least `FINEST` of `hidden`, so that a column of zeros has one. The shift is the
    largest for which the weights of the numbers fit int16. Raises RequestError where none does.
    """
    low, high = np.full((2, len(fields), bias.size), [[[np.inf]], [[-np.inf]]])
    for number, each in enumerate(fields):
        for _, block in each.products():
            low[number] = np.minimum(low[number], block.min(axis=0))
            high[number] = np.maximum(high[number], block.max(axis=0))
    centre = (low + high) / 2
    scale = np.maximum((high - low).max(axis=0) / 254, FINEST * hidden)
    if not np.isfinite(scale).all():
        raise RequestError("its tables or weights are not finite")
    width, counts = bias.size, np.array([len(each.table) for each in fields])
    offsets = np.cumsum([0, *counts])[:-1]
    table = np.full((counts.sum(), -(-width // COLUMNS) * COLUMNS), ZERO, np.uint8)
    for each, middle, offset in zip(fields, centre, offsets, strict=True):
        for start, block in each.products():
            first = offset + start
            table[first : first + len(block), :width] = np.clip(np.rint((block - middle) / scale), -127, 127) + ZERO
    why = RequestError("")
    for shift in range(14, -1, -1):
        units = np.rint(weight / (step.astype(np.float64)[:, None] * scale) * 2.0**shift)
        if not np.abs(units).max(initial=0) <= np.iinfo(np.int16).max:
            why = RequestError("the weights of its numbers do not fit int16 beside those of its tables")
            continue
        try:
            return EmbeddingLayer(
                table=table,
                columns=np.array([each.column for each in fields], np.int32),
                offsets=offsets.astype(np.int32),
                rows=counts.astype(np.int32),
                weight=units.astype(np.int16),
                scale=(scale * 2.0**-shift / hidden).astype(np.float32),
                bias=((bias + centre.sum(axis=0)) / hidden).astype(np.float32),
                number_scale=step.astype(np.float32),
                shift=shift,
                wide=wide,
            )
        except RequestError as error:  # a smaller shift reaches less far
            why = error
    raise why


def fold(model: ir.Model, table: CalibrationTable, recipe: QuantRecipe) -> tuple[ir.Model | None, dict[str, Any]]:
    """The rewritten float model, which is left as it is, as one for the native kernels: (model, report), or (None,
    report).

    The model has a `ParallelEmbedding` in place of the first layer, whose bytes the next one reads, and QDQ form from
    there on. The report: {"fold": bool, "reason": one line, "layers": {hidden value: `Decision`}, "refused": {operator:
    reason}, "quantization": of `QuantReport`, if folded}. On one machine the same inputs give the same bytes. Raises
    RequestError as `quantize` does.
    """
    table.require(model)
    if not recipe.quantize_tables:
        return None, {"fold": False, "reason": "the recipe keeps tables float", "layers": {}, "refused": {}}
    folded = model.clone()
    chosen = FoldParallelEmbedding(table, machine.caches(), recipe.keeps_float)
    rewrite(folded, [chosen])
    layers = {name: each.to_json() for name, each in chosen.decisions.items()}
    if not chosen.fired:
        reason = "; ".join(chosen.refused.values()) or "no layer that reads lookups by columns of one input"
        return None, {"fold": False, "reason": reason, "layers": layers, "refused": chosen.refused}
    result, report = quantize(folded, recipe, replace(table, graph=io.digest(folded)))
    reason = "; ".join(each.reason for each in chosen.decisions.values() if each.fold)
    return result, {
        "fold": True,
        "reason": reason,
        "layers": layers,
        "refused": chosen.refused,
        "quantization": report.to_json(),
    }


def _lookups(value: ir.Value | None) -> _Lookups | None:
    """`value` as lookups whose rows stand side by side, float32 [n, widths]: single, or Reshape(T[ids + offsets])."""
    field = field_lookup(value)
    if field is not None:
        table = query.constant(field.lookup.table)
        return None if table is None else _Lookups(field.ids, [(field.column, table)])
    return _read(value) if value is not None and query.sole_user(value) is not None else None


def _stacked(value: ir.Value | None) -> _Lookups | None:
    """`value` as T[ids[:, columns] + offsets], float32 [n, fields, width], read by no other."""
    gather = value.producer() if value is not None and query.sole_user(value) is not None else None
    return _read(value) if gather is not None and gather.op_type == "Gather" else None


def _read(value: ir.Value | None) -> _Lookups | None:
    reader = Reader()
    try:
        found = vectors_of(reader.read(value))
    except RequestError:
        return None
    fields = [(each.column, each.table) for each in found if isinstance(each, Field) and not each.pool]
    return _Lookups(reader.ids, fields) if reader.ids is not None and len(fields) == len(found) else None


def _is_lookup(value: ir.Value) -> bool:
    while (producer := value.producer()) is not None and producer.inputs and (source := producer.inputs[0]) is not None:
        if producer.op_type == "Gather":
            return query.constant(source) is not None
        if producer.op_type not in ("Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity"):
            return False
        value = source
    return False


def _weights(gemm: ir.Node) -> Floats:
    """The weights of a Gemm [inputs, outputs], with its alpha."""
    weight = query.constant(gemm.inputs[1])
    if weight is None or weight.ndim != 2 or weight.dtype != np.float32 or gemm.attributes.get_int("transA", 0) != 0:
        raise RequestError("its weights are no constant float32 matrix, or its input is transposed (transA)")
    turned = weight.T if gemm.attributes.get_int("transB", 0) else weight
    return np.asarray(turned * np.float64(gemm.attributes.get_float("alpha", 1.0)))


def _bias(gemm: ir.Node, width: int) -> Floats:
    """The bias of a Gemm [outputs], with its beta."""
    value = gemm.inputs[2] if len(gemm.inputs) > 2 else None
    bias = query.constant(value)
    if value is None:
        return np.zeros(width)
    if bias is None or bias.shape not in ((), (1,), (width,), (1, 1), (1, width)):
        raise RequestError("its bias is not a constant row")
    return np.asarray(np.broadcast_to(bias.ravel(), (width,)) * np.float64(gemm.attributes.get_float("beta", 1.0)))


def _above(values: Sequence[ir.Value]) -> set[ir.Node]:
    """The nodes that `values` are computed from."""
    nodes: set[ir.Node] = set()
    waiting: list[ir.Value | None] = list(values)
    while waiting:
        value = waiting.pop()
        producer = value.producer() if value is not None else None
        if producer is not None and producer not in nodes:
            nodes.add(producer)
            waiting += producer.inputs
    return nodes
