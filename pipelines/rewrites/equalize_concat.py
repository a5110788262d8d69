"""Equal ranges for the parts of a concatenation, which share one int8 scale."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.graph import edit, query
from pipelines.rewrites.driver import Rewrite

Floats = NDArray[np.float64]


class EqualizeConcat(Rewrite):
    """Cross-layer equalization of concatenated embeddings by powers of two, bit-exact.

    Columns of the tables are scaled up, rows of the next layer's weights down. For y = concat(e_1 .. e_k) W, where
    every e_i is a row of a constant table T_i, column c of T_i may be multiplied by any k_c > 0 if row c of W is
    divided by it. Int8 gives the concatenation one scale s and every output column j of W one scale t_j, so with
    uniform rounding errors the expected squared error of the outputs is

        sum_j sum_c [ s^2/12 (W_cj / k_c)^2  +  t_j^2/12 k_c^2 E[x_c^2] ],
        s = (max - min)/255,  t_j = max_c |W_cj / k_c| / 127.

    The factors are searched in the family k_c = 2^round(log2(a w_c^b / r_c^(1-b))), w_c = max_j |W_cj|, r_c = max
    |column c of T| (b = 1/2 is the cross-layer equalization of Nagel et al., 2019), and the best are applied if they
    lower the error clearly. Columns that are no table rows keep k_c = 1.

    Args:
        ranges: (min, max) by name of values that are no table rows; a part of unknown range is refused.
    """

    MARGIN = 0.9  # fire only for a clear gain, so that a second run finds nothing to do

    def __init__(self, ranges: Mapping[str, tuple[float, float]]) -> None:
        super().__init__()
        self.ranges = dict(ranges)

    def rewrite(self, model: ir.Model) -> int:
        """Equalizes every Concat of table lookups that one linear layer reads."""
        return sum(self._equalize(model.graph, node) for node in model.graph if node.op_type == "Concat")

    def _equalize(self, main: ir.Graph, concat: ir.Node) -> int:
        """Scales the tables that `concat` joins and the weights that read it; 0 if refused."""
        lookups = [query.table_lookup(part) for part in concat.inputs]
        if not any(lookups):
            return 0
        if concat.attributes.get_int("axis", 0) not in (-1, (query.rank(concat.outputs[0]) or 0) - 1):
            self.refuse(concat, "it does not join columns")
            return 0
        reader = query.sole_user(concat.outputs[0])
        if reader is None or reader.op_type not in ("MatMul", "Gemm") or reader.inputs[0] is not concat.outputs[0]:
            self.refuse(concat, "its only reader is not a MatMul or Gemm")
            return 0
        weight = query.constant(reader.inputs[1])
        if weight is None or weight.ndim != 2 or reader.attributes.get_int("transA", 0) != 0:
            self.refuse(concat, "the weights that read it are not a constant matrix")
            return 0
        transposed = query.is_transposed(reader)
        weight = weight.T if transposed else weight
        parts = []
        for value, lookup in zip(concat.inputs, lookups, strict=True):
            if lookup is not None and len(lookup.table.uses()) > 1:
                self.refuse(concat, f"table {lookup.table.name} has another reader")
                return 0
            part = _part(value, lookup, self.ranges)
            if part is None:
                self.refuse(concat, f"the range of its part {value.name if value else '?'} is not known")
                return 0
            parts.append(part)
        factors = _search(
            _Columns(*map(np.concatenate, zip(*parts, strict=True))), weight.astype(np.float64), self.MARGIN
        )
        if factors is None:
            return 0
        ends = np.cumsum([len(part[0]) for part in parts])[:-1]
        for lookup, k in zip(lookups, np.split(factors, ends), strict=True):
            if lookup is not None:
                table = query.constant(lookup.table)
                assert table is not None
                lookup.table.const_value = ir.tensor((table * k).astype(table.dtype), name=lookup.table.name)
        scaled = (weight / factors[:, None]).astype(weight.dtype)
        scaled = np.ascontiguousarray(scaled.T) if transposed else scaled
        reader.replace_input_with(1, edit.initializer(main, f"{reader.outputs[0].name}.equalized", scaled))
        return 1


@dataclass(frozen=True)
class _Columns:
    """Statistics per column of the concatenation: range, mean square, and whether it may be scaled."""

    low: Floats
    high: Floats
    square: Floats
    free: NDArray[np.bool_]

    def error(self, weight: Floats, k: Floats) -> float:
        """Returns the expected squared error of the class docstring for factors `k`."""
        s = (max((self.high * k).max(), 0.0) - min((self.low * k).min(), 0.0)) / 255
        w = weight / k[:, None]
        t = np.abs(w).max(axis=0) / 127
        return float(s**2 * (w**2).sum() + (t**2).sum() * (k**2 * self.square).sum()) / 12


def _part(
    value: ir.Value | None, lookup: query.Lookup | None, ranges: Mapping[str, tuple[float, float]]
) -> tuple[NDArray[Any], ...] | None:
    """Returns the fields of `_Columns` for one part of a concatenation; None if its range is unknown."""
    if lookup is not None:
        t = np.asarray(query.constant(lookup.table), np.float64)
        return t.min(axis=0), t.max(axis=0), (t**2).mean(axis=0), np.ones(t.shape[1], bool)
    width = None if value is None or value.shape is None else value.shape[-1]
    bounds = ranges.get(str(value.name)) if value is not None else None
    if bounds is None or not isinstance(width, int):
        return None
    a, b = bounds
    uniform = (a * a + a * b + b * b) / 3
    return np.full(width, a), np.full(width, b), np.full(width, uniform), np.zeros(width, bool)


def _search(columns: _Columns, weight: Floats, margin: float) -> Floats | None:
    """Returns the best factors, float64 [columns], of the family of `EqualizeConcat`; None if they gain too little."""
    ones = np.ones(len(weight))
    reach = np.maximum(np.maximum(-columns.low, columns.high), 1e-12)
    rows = np.maximum(np.abs(weight).max(axis=1), 1e-12)
    best, lowest = None, margin * columns.error(weight, ones)
    for b in (0.0, 0.25, 0.5, 0.75):
        shape = rows**b / reach ** (1 - b)
        for a in np.geomspace(2**-6, 2**6, 25) * np.median(1 / shape[columns.free]) if columns.free.any() else ():
            k = np.where(columns.free, 2.0 ** np.round(np.log2(a * shape)), 1.0)
            error = columns.error(weight, k)
            if error < lowest:
                best, lowest = k, error
    return best
