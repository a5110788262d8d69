"""Compiles the linear layers that read codes and folded fields, and quantizes their weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.kernels.recommenders import steps
from pipelines.kernels.recommenders.operators import COLUMNS, ZERO
from pipelines.kernels.recommenders.steps import BYTE, CODES
from pipelines.quantization.qdq.scales import activation_qparams
from zoo.recommenders.lowering.expressions import Expression, Field, FloatVector, Linear
from zoo.recommenders.lowering.fields.expressions import FieldAttention
from zoo.recommenders.lowering.fields.steps import FieldSteps, attention_order
from zoo.recommenders.lowering.integer_layers import FINEST, dense_layer, mixed_layer, positive
from zoo.recommenders.lowering.plan import HEADROOM, SIGNED

Array = NDArray[Any]
Floats = NDArray[np.float64]
Code = tuple[int, float, int]  # (position, scale, row of the weights)

FLOAT = 1e-9  # the finest step of a result that stays float


class _Result(NamedTuple):
    """The result of a layer in one format, and its weights [inputs, width] and bias [width]."""

    layer: Linear
    form: str
    weight: Floats
    bias: Floats
    unit: float | Floats

    @property
    def padding(self) -> int:
        return -self.bias.size % COLUMNS

    def padded(self, values: float | Floats) -> Floats:
        """Returns a value of every column, the last one again in the padding."""
        return np.pad(np.broadcast_to(values, self.bias.shape), (0, self.padding), mode="edge")


@dataclass
class Inputs:
    """Inputs of linear layers.

    Attributes:
        codes: (position, scale, row of the weights) of codes.
        coarse: The same of codes of which the higher bits suffice.
        folded: Fields that are folded into tables, and the first row of their weights.
        direct: The same of fields that these layers alone read, and as bytes.
        signed: (position, unit, row of the weights) of bytes with zero point 128 in the buffer `bytes`.
        means: Means of these bytes, by position.
        bytes: Their buffer.
    """

    codes: list[Code] = field(default_factory=list)
    coarse: list[Code] = field(default_factory=list)
    folded: list[tuple[Field, int]] = field(default_factory=list)
    direct: list[tuple[Field, int]] = field(default_factory=list)
    signed: list[Code] = field(default_factory=list)
    means: Floats | None = None
    bytes: int = -1

    def add(self, part: Expression, rows: Sequence[Code]) -> None:
        """Adds the codes of a part: all but fields have few entries with large weights, which take all bits.

        Args:
            part: The part.
            rows: Its codes.
        """
        (self.coarse if isinstance(part, Field) else self.codes).extend(rows)


class CodeLayers(FieldSteps):
    """Field steps with linear layers on codes."""

    _orders: Mapping[Expression, Array]
    _made: dict[tuple[Any, str], tuple[int, float]]

    def _layers(self, layers: Sequence[Linear], slot: int, read: Inputs) -> None:
        """Adds the steps of layers with the same inputs; in coarse forms, layers that tolerate it read bytes."""
        if self._reads_bytes(layers):
            self._mixed(layers, slot, read)
        else:
            self._mixed(layers, slot, Inputs(read.codes + read.coarse, folded=read.folded))

    def _mixed(self, layers: Sequence[Linear], slot: int, read: Inputs) -> None:
        """Adds a `Mixed` step for layers with the same inputs, codes in `slot`, and before it the products of bytes."""
        rows = read.codes
        results = self._results(layers)
        padded = [np.pad(made.weight, ((0, 0), (0, made.padding))) for made in results]
        whole, bias = (
            np.concatenate(padded, axis=1),
            np.concatenate([np.pad(made.bias, (0, made.padding)) for made in results]),
        )
        unit = np.concatenate([made.padded(made.unit) for made in results])
        fine = np.concatenate([made.padded(FLOAT if made.form == "f4" else FINEST * made.unit) for made in results])
        zero = np.concatenate([made.padded(ZERO if made.form == "s1" else 0) for made in results])
        outs = [
            (self._made[made.layer, made.form][0], made.bias.size, made.layer.relu and made.form != "f4")
            for made in results
        ]
        added = self._byte_products(slot, read, whole, unit)
        first, matrix = _matrix(rows, whole)
        ranges = self.scales.ranges_of(f"{self.form.name} {layers[0].value}")
        made = mixed_layer(matrix, read.folded, whole, fine, self._wide, ranges)
        chosen = [
            (part.column, offset, len(part.table)) for (part, _), offset in zip(read.folded, made.offsets, strict=True)
        ]
        columns, offsets, heights = np.array(chosen, np.int32).reshape(-1, 3).T.copy()
        self.steps.append(
            steps.Mixed(
                slot if rows else -1,
                first,
                made.weight,
                (made.scale / unit).astype(np.float32),
                ((bias + made.centre) / unit + zero).astype(np.float32),
                tuple(outs),
                columns,
                offsets,
                heights,
                made.shift,
                made.table,
                added,
            )
        )

    def _byte_products(self, slot: int, read: Inputs, weight: Floats, unit: Floats) -> int:
        """Returns the buffer of the products of inputs that are read as bytes, in units of the results; -1 for none."""
        if read.signed:
            products = self._slot("f4", weight.shape[1])
            layer = dense_layer(
                self._signed(read, weight), np.zeros(weight.shape[1]), 1.0, unit, "f4", ZERO, read.means
            )
            self.steps.append(steps.Dense(read.bytes, products, layer))
            return products
        first, matrix = _matrix(read.coarse, weight)
        matrix = matrix * BYTE
        width = sum(part.width for part, _ in read.direct)
        if not len(matrix) + width:
            return -1
        x, out, end = self._slot("u1", width + len(matrix)), self._slot("f4", weight.shape[1]), 0
        blocks = []
        for part, start in read.direct:
            step = positive(self._largest(part) / 127)
            table = np.clip(np.rint(part.table / step), -127, 127).astype(np.int16) + ZERO
            rows, columns = table.shape
            self.steps.append(steps.Gather(x, end, table.astype(np.uint8).ravel(), rows, columns, columns, part.column))
            blocks.append(weight[start : start + columns] * step)
            end += columns
        if len(matrix):
            self.steps.append(steps.CodeBytes(slot, first, x, end, len(matrix)))
        layer = dense_layer(np.concatenate([*blocks, matrix]), np.zeros(weight.shape[1]), 1.0, unit, "f4", ZERO)
        self.steps.append(steps.Dense(x, out, layer))
        return out

    def _signed(self, read: Inputs, weight: Floats) -> Floats:
        """Returns the weights of the columns of a buffer of bytes with zero point 128."""
        matrix = np.zeros((self.slots[read.bytes][1], weight.shape[1]))
        for position, unit, row in read.signed:
            matrix[position] += weight[row] * unit
        return matrix

    def _results(self, layers: Sequence[Linear]) -> list[_Result]:
        """Returns the results of layers in the formats that their readers need, with new buffers."""
        results = []
        for layer in layers:
            for form in sorted({"f4" if form == "piece" else form for form in self.forms.get(layer, {"f4"})}):
                order = self._order(layer)
                weight, bias = layer.weight[:, order], layer.bias[order]
                if layer in self.multiplied and form == "f4":
                    weight, bias = self._like_codes(layer)
                if not (np.isfinite(weight).all() and np.isfinite(bias).all()):
                    raise RequestError("its tables or weights are not finite")
                unit = self._unit(layer, form)
                slot = self._slot("u1" if form == "s1" else form, bias.size)
                self._made[layer, form] = (slot, unit if isinstance(unit, float) else 1.0)
                results.append(_Result(layer, form, weight, bias, unit))
        return results

    def _order(self, x: Linear | FloatVector | FieldAttention) -> Array:
        """Returns the order of the units of a layer in its buffers."""
        order = attention_order(x) if isinstance(x, FieldAttention) else self._orders.get(x)
        return np.arange(x.width) if order is None else order

    def _unit(self, x: Linear | FloatVector, form: str) -> Any:
        """Returns the scale of the result of a layer in a form; float64 [width] for "s1"."""
        if form == "s1":
            return self.columns[x].largest / SIGNED
        if form == "u1":
            observed = self.table.tensors.get(x.value)
            if observed is None or observed.low < 0:
                raise RequestError(f"no calibrated range from 0 on for {x.value}")
            return float(activation_qparams(observed)[0])
        if not isinstance(x, Linear) and x.bounded and form != "f4":
            return 1 / CODES
        return 1.0 if form == "f4" else positive(HEADROOM * self._range(x.value) / CODES)


def _matrix(rows: Sequence[Code], weight: Floats) -> tuple[int, Floats]:
    """Returns the first code that layers read, and their weights by code, times the scales of the codes."""
    first = min((code for code, _, _ in rows), default=0)
    matrix = np.zeros((max((code for code, _, _ in rows), default=first - 1) + 1 - first, weight.shape[1]))
    for position, scale, row in rows:
        matrix[position - first] += weight[row] * scale
    return first, matrix
