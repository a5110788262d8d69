"""Compiles cross networks, of which a coarse form reads the inputs of large layers as bytes with a scale a column."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.kernels.recommenders import reference, steps
from pipelines.kernels.recommenders.operators import ZERO
from pipelines.kernels.recommenders.program import ClickProgram
from pipelines.kernels.recommenders.steps import CODES
from zoo.recommenders.lowering.activity import Samples
from zoo.recommenders.lowering.code_layers import Code, CodeLayers, Inputs
from zoo.recommenders.lowering.expressions import Crossed, Expression, Field, FloatVector, Linear, parts_of
from zoo.recommenders.lowering.fields.expressions import GatedCodes
from zoo.recommenders.lowering.integer_layers import dense_layer, largest_columns, positive
from zoo.recommenders.lowering.plan import HEADROOM, SIGNED, LayerGroup

Floats = NDArray[np.float64]

LEAST = 1 / 8  # of the largest range of a vector's columns that every column has at least
GROWTH = 1.25  # states reach so many times what samples show, beyond the room that x_0 has
SEEN = 16  # codes of x_0 from which samples show by how much a column grows


class CrossSteps(CodeLayers):
    """Code layers with the steps of cross networks."""

    def _cross(self, x: Crossed, total: Floats | None = None) -> tuple[int, float]:
        """Returns (buffer of x_l's codes or bytes, or -1; scale of its codes); `total` has its weights in the logit."""
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
        uses, group = self._uses.get(x, set()), self.groups.get((id(x),))
        out = coarse = factors = weight = slot = None
        if "codes" in uses and group is not None and self._in_bytes(group):
            factors = self._bytes_of(x)[1]
            coarse = self._slot("u1", self._codes_width)
        elif "codes" in uses:
            out = self._slot("i2", self._codes_width)
        if "total" in uses:
            if total is None:
                raise RequestError("a cross network's last result is read early")
            weight, slot = np.zeros(self._codes_width, np.float32), self._slot("f4", 1)
            start = 0
            for part in parts_of(x.x):
                for at, scale, row in self._code_positions(part, own=True):
                    weight[at] += total[start + row] * scale
                start += part.width
        self.steps.append(steps.Cross(self.x, change, state, first, 1 / grown, out, slot, weight, coarse, factors))
        self._made[x, "total"] = (-1 if slot is None else slot, 1.0)
        self._made[x, "cross"] = (next((each for each in (out, coarse) if each is not None), -1), grown)
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
            for each in parts_of(part.x) if isinstance(part, GatedCodes | Crossed) else [part]:
                if each is not part:
                    codes = self._code_positions(each, True)
                    read.add(each, [(at, scale * factor, inner + row) for at, scale, row in codes])
                elif isinstance(part, Field) and part in group.folded:
                    read.folded.append((part, start))
                elif isinstance(part, Field) and part in self.direct:
                    read.direct.append((part, start))
                else:
                    read.add(part, [(at, scale, start + row) for at, scale, row in self._code_positions(part)])
                inner += each.width
            start += part.width
        return self._layers(group.layers, slot, read)

    # --- bytes

    def _byte_layers(self, group: LayerGroup) -> None:
        """Adds the steps of layers that read a state of a cross network, or x_0, as bytes."""
        single = group.parts[0]
        if isinstance(single, Crossed):
            codes, (slot, _) = self._bytes_of(single)[0], self._cross(single)
        else:
            codes, factors = self._bytes_of(group.parts)
            slot = self._slot("u1", self._codes_width)
            self.steps.append(steps.ColumnBytes(self.x, 0, slot, factors))
        for result in self._results(group.layers):
            weight = np.zeros((self._codes_width, result.bias.size))
            for at, unit, row in codes:
                weight[at] += result.weight[row] * unit
            own = self._made[result.layer, result.form][0]
            if result.form != "i2":
                layer = dense_layer(weight, result.bias, 1.0, result.unit, result.form, ZERO)
                self.steps.append(steps.Dense(slot, own, layer))
                continue
            assert isinstance(result.unit, float)
            floats = self._slot("f4", result.bias.size)
            self.steps.append(steps.Dense(slot, floats, dense_layer(weight, result.bias, 1.0, 1.0, "f4", ZERO)))
            self.steps.append(steps.Quantize(floats, own, 0, 1 / result.unit, result.layer.relu))

    def _bytes_of(self, x: Crossed | Sequence[Expression]) -> tuple[list[Code], NDArray[np.float32]]:
        """Returns the codes of a state, or of x_0, as bytes, and the factors from codes of x_0, times g, to bytes."""
        crossed = isinstance(x, Crossed)
        codes, factors = [], np.zeros(self._codes_width)
        for at, scale, row, room in self._rooms(parts_of(x.x) if isinstance(x, Crossed) else x, crossed):
            unit = float(self.ranges[x][row] if isinstance(x, Crossed) else room) / SIGNED
            codes.append((at, unit, row))
            factors[at] = scale / unit
        return codes, factors.astype(np.float32)

    def _rooms(self, parts: Sequence[Expression], own: bool) -> list[tuple[int, float, int, float]]:
        """Returns (position, scale, row, largest magnitude) of the codes of vectors, see `_code_positions`."""
        rooms, start = [], 0
        for part in parts:
            share = np.ones(part.width)
            if isinstance(part, Field):
                most = self.scales.columns(f"{part.column} {part.value}", largest_columns(part.table))
                share = np.clip(most / positive(float(most.max())), LEAST, 1)
            for at, scale, row in self._code_positions(part, own):
                rooms.append((at, scale, start + row, scale * CODES * float(share[row])))
            start += part.width
        return rooms

    def column_ranges(self, program: ClickProgram, samples: Sequence[Samples]) -> dict[Expression, Floats]:
        """Computes the largest magnitudes by column of layers without a ReLU and of states of cross networks.

        Args:
            program: The program that `compile` returned, of int16 codes.
            samples: Inputs.

        Returns:
            Magnitudes with headroom, float64 [width] each.
        """
        buffers = [reference.buffers(program, *each) for each in samples]

        def most(slot: int) -> NDArray[Any]:
            return np.asarray(np.max([np.abs(each[slot].astype(np.float64)).max(axis=0) for each in buffers], axis=0))

        found: dict[Expression, Floats] = {}
        for (x, form), (slot, unit) in self._made.items():
            if isinstance(x, Linear) and form == "i2" and not x.relu:
                seen = HEADROOM * unit * most(slot)
                seen = np.maximum(seen, positive(float(seen.max())) * LEAST)
                found[x] = self.scales.columns(x.value, seen)
            elif isinstance(x, Crossed) and form == "cross" and slot >= 0:
                first, states = most(self.x), most(slot)
                growth = np.where(first >= SEEN, GROWTH * unit * states / np.maximum(first, 1), unit)
                growth = np.clip(growth, LEAST, unit)
                ranges = np.zeros(x.width)
                for at, _, row, room in self._rooms(parts_of(x.x), True):
                    ranges[row] = room * growth[at]
                found[x] = self.scales.columns(x.value, ranges)
        return found
