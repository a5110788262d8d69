"""Compiles cross networks; their coarse form reads the inputs of large layers as bytes with a scale per column."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.kernels.recommenders import reference, steps
from pipelines.kernels.recommenders.operators import ZERO
from pipelines.kernels.recommenders.program import ClickProgram
from pipelines.kernels.recommenders.steps import CODES
from zoo.recommenders.lowering.activity import Samples
from zoo.recommenders.lowering.code_layers import CodeLayers, Inputs
from zoo.recommenders.lowering.expressions import Crossed, Expression, Field, FloatVector, Linear, parts_of
from zoo.recommenders.lowering.fields.expressions import GatedCodes, vectors_of
from zoo.recommenders.lowering.integer_layers import balanced_units, dense_layer, positive
from zoo.recommenders.lowering.plan import HEADROOM, Columns, LayerGroup

Floats = NDArray[np.float64]

MIN_RANGE_RATIO = 1 / 8  # of the largest range of a vector's columns that every column has at least
GROWTH = 1.25  # states reach so many times what samples show, beyond the room that x_0 has
FINE_PART = 4  # one column in `FINE_PART` at most stays a code in a form of bytes
LESS = 4  # the noise must fall to this part for a vector to stay a code
SEEN = 16  # codes of x_0 from which samples show by how much a column grows


class _Vector(NamedTuple):
    """A vector that a layer reads.

    Attributes:
        part: Input of the layer: the vector itself, gated vectors or a state of a cross network.
        inner: The vector.
        start: Its first row of the weights.
        row: Its first column of `part`.
        gain: Factor of its codes.
    """

    part: Expression
    inner: Expression
    start: int
    row: int
    gain: float


class CrossSteps(CodeLayers):
    """Code layers with the steps of cross networks."""

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
        grown = 1 + sum(self._range(change.value) for change in x.changes if isinstance(change, Linear | FloatVector))
        uses, group = self._uses.get(x, set()), self.groups.get((id(x),))
        out = coarse = factors = weight = slot = None
        if "codes" in uses and group is not None and self._in_bytes(group):
            read, factors = self._bytes_of(group)
            coarse = self._slot("u1", self._codes_width)
            out = self._slot("i2", self._codes_width) if read.codes else None
        elif "codes" in uses:
            out = self._slot("i2", self._codes_width)
        if "total" in uses:
            if total is None:
                raise RequestError("a cross network's last result is read early")
            weight, slot = np.zeros(self._codes_width, np.float32), self._slot("f4", 1)
            start = 0
            for part in parts_of(x.x):
                for code, scale, row in self._code_positions(part, own=True):
                    weight[code] += total[start + row] * scale
                start += part.width
        dense = self.steps[-1] if coarse is not None and slot is None else None
        if isinstance(dense, steps.Dense) and dense.out == change:  # nothing else reads it
            self.steps[-1] = steps.CrossLayer(
                dense.x, dense.layer, self.x, state, first, 1 / grown, out, coarse, factors
            )
        else:
            self.steps.append(steps.Cross(self.x, change, state, first, 1 / grown, out, slot, weight, coarse, factors))
        self._made[x, "total"] = (-1 if slot is None else slot, 1.0)
        self._made[x, "bytes"] = (-1 if coarse is None else coarse, 1.0)
        self._made[x, "cross"] = (-1 if out is None else out, grown)
        return self._made[x, "cross"]

    def _cross_total(self, x: Crossed, rows: Floats) -> int:
        self._cross(x, rows)
        return self._made.pop((x, "total"))[0]

    def _group(self, group: LayerGroup) -> None:
        """Adds the steps of the layers of a group."""
        if self._in_bytes(group):
            return self._byte_layers(group)
        gates = [self._gated(part) for part in group.parts if isinstance(part, GatedCodes)]
        slot, factor = gates[0] if gates else (self.x, 1.0)
        read, start = Inputs(), 0
        for part in group.parts:
            if isinstance(part, Crossed):
                slot, factor = self._cross(part)
            inner = start
            for vector in vectors_of(part):
                if vector is not part:
                    codes = self._code_positions(vector, True)
                    read.add(vector, [(code, scale * factor, inner + row) for code, scale, row in codes])
                elif isinstance(part, Field) and part in group.folded:
                    read.folded.append((part, start))
                elif isinstance(part, Field) and part in self.direct:
                    read.direct.append((part, start))
                else:
                    read.add(part, [(code, scale, start + row) for code, scale, row in self._code_positions(part)])
                inner += vector.width
            start += part.width
        return self._layers(group.layers, slot, read)

    # --- bytes

    @property
    def choices(self) -> Hashable:
        """See `LoweringPlan`."""
        read = [self._split(group)[1] for group in self.groups.values() if self._in_bytes(group)]
        return super().choices, tuple(tuple(vector.inner for vector in fine) for fine in read)

    def _byte_layers(self, group: LayerGroup) -> None:
        """Adds the steps of layers that read gated vectors, a state of a cross network, or x_0, as bytes."""
        state = next((part for part in group.parts if isinstance(part, Crossed | GatedCodes)), None)
        slot: int | None = self._cross(state)[0] if isinstance(state, Crossed) else self.x
        read, factors = self._bytes_of(group)
        if isinstance(state, Crossed):
            read.bytes = self._made[state, "bytes"][0]
        else:
            read.bytes = self._slot("u1", self._codes_width)
            if state is None:
                self.steps.append(steps.ColumnBytes(self.x, 0, read.bytes, factors))
            else:
                gates, slot = self._floats(state.gates), self._slot("i2", self._codes_width) if read.codes else None
                self.steps.append(steps.GateCodes(self.x, gates, slot, bytes=read.bytes, factors=factors))
        if read.codes:
            assert slot is not None
            return self._mixed(group.layers, slot, read)
        for result in self._results(group.layers):
            weight, own = self._signed(read, result.weight), self._made[result.layer, result.form][0]
            if result.form != "i2":
                layer = dense_layer(weight, result.bias, 1.0, result.unit, result.form, ZERO, read.means)
                self.steps.append(steps.Dense(read.bytes, own, layer))
                continue
            assert isinstance(result.unit, float)
            floats = self._slot("f4", result.bias.size)
            layer = dense_layer(weight, result.bias, 1.0, 1.0, "f4", ZERO, read.means)
            self.steps.append(steps.Dense(read.bytes, floats, layer))
            self.steps.append(steps.Quantize(floats, own, 0, 1 / result.unit, result.layer.relu))
        return None

    def _bytes_of(self, group: LayerGroup) -> tuple[Inputs, NDArray[np.float32]]:
        """Returns the inputs of layers, most of them bytes, and the factors of the bytes.

        Codes of x are multiplied by gates, or by the growth of a state, and then by the factors.
        """
        coarse, fine = self._split(group)
        read, factors = Inputs(), np.zeros(self._codes_width)
        for vector in fine:
            gain = self._made[vector.part, "cross"][1] if (vector.part, "cross") in self._made else vector.gain
            for code, scale, row in self._code_positions(vector.inner, vector.inner is not vector.part):
                read.codes.append((code, gain * scale, vector.start + row))
        unit, read.means = self._units(group, coarse)[0], np.zeros(self._codes_width)
        columns, start = _joined(self.columns, coarse), 0
        for vector in coarse:
            for code, scale, row in self._code_positions(vector.inner, vector.inner is not vector.part):
                own = float(unit[start + row])
                read.signed.append((code, own, vector.start + row))
                factors[code], read.means[code] = vector.gain * scale / own, columns.mean[start + row] / own
            start += vector.inner.width
        return read, factors.astype(np.float32)

    def _split(self, group: LayerGroup) -> tuple[list[_Vector], list[_Vector]]:
        """Returns the vectors that layers read as bytes and those that stay codes.

        Vectors beside gated vectors stay codes. So do, in the form `part-int8`, the vectors whose rounding adds most
        noise.
        """
        coarse, fine, start = list[_Vector](), list[_Vector](), 0
        for part in group.parts:
            row, gain = 0, part.factor if isinstance(part, GatedCodes) else 1.0
            for inner in vectors_of(part):
                vector = _Vector(part, inner, start + row, row, gain)
                (coarse if part in self.columns else fine).append(vector)
                row += inner.width
            start += part.width
        if not self.form.fine or not coarse:
            return coarse, fine
        room, left = sum(vector.inner.width for vector in coarse) // FINE_PART, coarse
        _, noise, loudest = self._units(group, coarse)
        while len(left) > 1 and (room := room - left[loudest].inner.width) >= 0:
            left = [vector for vector in left if vector is not left[loudest]]
            _, less, loudest = self._units(group, left)
            if less * LESS <= noise:
                return left, [*fine, *(vector for vector in coarse if vector not in left)]
        return coarse, fine

    def _units(self, group: LayerGroup, vectors: Sequence[_Vector]) -> tuple[Floats, float, int]:
        """Returns the units of vectors as bytes, their noise, and the vector whose weights have the coarsest steps."""
        columns = _joined(self.columns, vectors)
        rows = np.concatenate([np.arange(vector.start, vector.start + vector.inner.width) for vector in vectors])
        weight = np.concatenate([layer.weight for layer in group.layers], axis=1)
        size = np.sqrt((weight**2).mean(axis=0))
        weight = weight[rows] / np.where(size > 0, size, 1.0)
        unit, noise = balanced_units(weight, columns.largest, columns.rms)
        reach = np.sqrt((weight**2).mean(axis=1)) * unit
        starts = np.cumsum([0, *(vector.inner.width for vector in vectors)])[:-1]
        return unit, noise, int(np.argmax(np.maximum.reduceat(reach, starts)))

    def _rooms(self, parts: Sequence[Expression]) -> list[tuple[int, float, int, float]]:
        """Returns (position, scale, row, largest magnitude) of the codes of vectors, see `_code_positions`."""
        rooms, start = [], 0
        for part in parts:
            share = np.ones(part.width)
            if isinstance(part, Field):
                most = self.scales.magnitudes(part.table)
                share = np.clip(most / positive(float(most.max())), MIN_RANGE_RATIO, 1)
            for code, scale, row in self._code_positions(part, own=True):
                rooms.append((code, scale, start + row, scale * CODES * float(share[row])))
            start += part.width
        return rooms

    @property
    def has_states(self) -> bool:
        """Whether there are gated vectors or states of cross networks."""
        return any(isinstance(x, Crossed | GatedCodes) for x in self._seen)

    def column_statistics(self, program: ClickProgram, samples: Samples) -> dict[Expression, Columns]:
        """Computes statistics of the columns of layers without a ReLU, gated vectors, x_0 and states of cross networks.

        Args:
            program: The program that `compile` returned, of int16 codes.
            samples: Inputs.

        Returns:
            Statistics by value.
        """
        buffers = reference.buffers(program, *samples)

        def seen(slot: int) -> Floats:
            values = buffers[slot].astype(np.float64)
            return np.stack([np.abs(values).max(axis=0), np.sqrt((values**2).mean(axis=0)), values.mean(axis=0)])

        codes, stats = seen(self.x), dict[Expression, Floats]()
        for (x, form), (slot, unit) in list(self._made.items()):
            if isinstance(x, Linear) and form == "i2" and not x.relu:
                stats[x] = unit * seen(slot)
                stats[x][0] = np.maximum(HEADROOM * stats[x][0], positive(float(stats[x][0].max())) * MIN_RANGE_RATIO)
            elif slot >= 0 and ((isinstance(x, Crossed) and form == "cross") or isinstance(x, GatedCodes)):
                states = unit * seen(slot)
                growth = np.where(codes[0] >= SEEN, GROWTH * states[0] / np.maximum(codes[0], 1), unit)
                growth = np.clip(growth, MIN_RANGE_RATIO * unit if isinstance(x, GatedCodes) else MIN_RANGE_RATIO, unit)
                stats[x] = np.zeros((3, x.width))
                for code, scale, row, room in self._rooms(parts_of(x.x)):
                    stats[x][:, row] = room * growth[code], scale * states[1, code], scale * states[2, code]
        for x in self.crossed.values():
            for part in parts_of(x.x):
                stats[part] = np.zeros((3, part.width))
                for code, scale, row, room in self._rooms([part]):
                    stats[part][:, row] = room, scale * codes[1, code], scale * codes[2, code]
        kept = [self.scales.columns(f"{type(x).__name__} {i}", array) for i, (x, array) in enumerate(stats.items())]
        return {x: Columns(*array) for x, array in zip(stats, kept, strict=True)}


def _joined(columns: Mapping[Expression, Columns], vectors: Sequence[_Vector]) -> Columns:
    """Returns the statistics of the columns of vectors side by side."""
    blocks = [[array[v.row : v.row + v.inner.width] for array in columns[v.part]] for v in vectors]
    return Columns(*(np.concatenate(arrays) for arrays in zip(*blocks, strict=True)))
