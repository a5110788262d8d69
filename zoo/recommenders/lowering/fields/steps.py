"""Compiles expressions on the fields of a sample: gates of codes, bilinear forms and attention."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.kernels.recommenders import steps
from pipelines.kernels.recommenders.steps import CODES
from zoo.recommenders.lowering.encode import CodeLayout
from zoo.recommenders.lowering.expressions import Expression, Linear, Product, is_relu, parts_of
from zoo.recommenders.lowering.fields.expressions import FieldAttention, GatedCodes
from zoo.recommenders.lowering.integer_layers import MAX_SUM, positive
from zoo.recommenders.lowering.plan import HEADROOM

Floats = NDArray[np.float64]

OPEN = 64.0  # logit of a gate that is 1: of codes beside those that are gated


class FieldSteps(CodeLayout):
    """Code layout with the steps of gates and of attention between fields."""

    _made: dict[tuple[Any, str], tuple[int, float]]

    @abstractmethod
    def _floats(self, x: Expression) -> int:
        """Returns the buffer of a value as floats."""

    @abstractmethod
    def _coded(self, x: Expression) -> tuple[int, float]:
        """Returns (buffer, scale) of a layer or attention as codes."""

    @abstractmethod
    def _write_piece(self, part: Expression) -> None:
        """Adds the steps that write a computed vector to the codes."""

    @abstractmethod
    def _code_positions(self, part: Expression, own: bool = False) -> Iterator[tuple[int, float, int]]:
        """Yields (position among the codes, scale, column of `part`); with `own`, of codes of their own."""

    def _like_codes(self, layer: Linear) -> tuple[Floats, Floats]:
        """Returns weights and bias of a layer that multiplies codes, with columns at the positions of the codes."""
        weight, bias = np.zeros((len(layer.weight), self._codes_width)), np.zeros(self._codes_width)
        bias += OPEN if layer in self.opened else 0.0
        start = 0
        for part in parts_of(self.multiplied[layer]):
            for position, _, row in self._code_positions(part, own=True):
                weight[:, position], bias[position] = layer.weight[:, start + row], layer.bias[start + row]
            start += part.width
        return weight, bias

    def _gated(self, x: GatedCodes) -> tuple[int, float]:
        """Returns (buffer, factor of the scales) of gated codes; other codes stand there as they are."""
        if (x, "gated") not in self._made:
            for part in parts_of(x.x):
                self._write_piece(part)
            out = self._slot("i2", self._codes_width)
            self.steps.append(steps.GateCodes(self.x, self._floats(x.gates), out))
            self._made[x, "gated"] = (out, x.factor)
        return self._made[x, "gated"]

    def _dot_product(self, x: Product) -> int:
        """Returns the buffer of a dot product of floats, or of floats and codes."""
        out = self._slot("f4", 1)
        for codes, floats in ((x.x, x.y), (x.y, x.x)):
            if isinstance(codes, Linear) and is_relu(codes) and not is_relu(floats):
                slot, scale = self._coded(codes)
                self.steps.append(steps.CodeProduct(self._floats(floats), slot, out, scale))
                return out
        self.steps.append(steps.Product(self._floats(x.x), self._floats(x.y), out))
        return out

    def _attention(self, x: FieldAttention) -> tuple[int, float]:
        """Returns (buffer, scale) of the codes of an attention; see `attention_order` for their order."""
        if (x, "i2") in self._made:
            return self._made[x, "i2"]
        positions = None
        if x.x is not None:
            slot, scale = self._coded(x.x)
        else:
            for vector in x.vectors:
                self._write_piece(vector)
            slot, scale = self.x, self._at[x.vectors[0]][1]
            positions = np.array([self._at[vector][0] for vector in x.vectors], np.int32)
        units = [positive(HEADROOM * self._range(layer.value) / CODES) for layer in x.layers[:3]]
        unit = positive(HEADROOM * self._range(x.value) / CODES)
        units += [unit] * (len(x.layers) - 3)
        weights = [layer.weight * (scale / own) for layer, own in zip(x.layers, units, strict=True)]
        biases = [layer.bias / own for layer, own in zip(x.layers, units, strict=True)]
        whole, bias = np.concatenate(weights, axis=1), np.concatenate(biases)
        if not (np.isfinite(whole).all() and np.isfinite(bias).all()):
            raise RequestError("its tables or weights are not finite")
        factor = np.maximum(np.abs(whole).max(axis=0) / 32767, CODES * np.abs(whole).sum(axis=0) / MAX_SUM)
        factor = np.maximum(factor, 1e-30)
        out = self._slot("i2", x.width)
        self.steps.append(
            steps.FieldAttention(
                slot,
                out,
                x.fields,
                x.heads,
                x.columns // x.heads,
                np.rint(whole / factor).astype(np.int16),
                factor.astype(np.float32),
                bias.astype(np.float32),
                units[0] * units[1] * x.score,
                units[2] / unit,
                x.relu,
                positions,
            )
        )
        self._made[x, "i2"] = (out, unit)
        return out, unit


def attention_order(x: FieldAttention) -> NDArray[np.int64]:
    """Returns the order of the columns of an attention in its buffer: all fields of a column, then the next column.

    Args:
        x: Attention.

    Returns:
        int64 [width].
    """
    return np.arange(x.width).reshape(x.fields, -1).T.ravel()
