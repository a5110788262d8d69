"""The kernels in numpy: slow, plain, and the definition of what the native ones return, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.kernels.recommenders import program as steps
from pipelines.kernels.recommenders.operators import COLUMNS, ZERO, LinearLayer
from pipelines.kernels.recommenders.program import ClickProgram
from pipelines.kernels.transformer.reference import exponential


def linear(layer: LinearLayer, x: NDArray[np.uint8]) -> NDArray[Any]:
    """`LinearLayer` for x uint8 [n, K]: uint8 or float32 [n, N]."""
    accumulated = x.astype(np.int64) @ layer.weight.astype(np.int64) + layer.bias
    scaled = accumulated.astype(np.float32) * layer.scale
    if layer.zero_point is None:
        return scaled
    return np.clip(np.rint(scaled) + np.float32(layer.zero_point), layer.low, 255).astype(np.uint8)


def run(program: ClickProgram, ids: NDArray[Any], numbers: Any = None, scales: Any = None) -> list[NDArray[np.float32]]:
    """The outputs of `ClickProgram`, float32 [n, width] each; the sigmoid of `Total` may differ in its last bits."""
    computed = buffers(program, ids, numbers, scales)
    return [computed[slot] for slot in program.outputs]


def buffers(program: ClickProgram, ids: NDArray[Any], numbers: Any = None, scales: Any = None) -> list[NDArray[Any]]:
    """All buffers of `ClickProgram` after its last step, [n, width] each."""
    n = len(ids)
    of = [np.zeros((n, width), steps.KINDS[kind]) for kind, width in program.slots]
    for step in program.steps:
        match step:
            case steps.Numbers():
                scaled, end = numbers[:, step.columns] * step.scale, step.position + step.columns.size
                of[step.out][:, step.position : end] = _codes(np.where(np.isnan(scaled), np.float32(0), scaled))
            case steps.Gather():
                table = step.table[: step.rows * step.stride].reshape(step.rows, step.stride)[:, : step.width]
                rows = table[ids[:, step.column : step.column + step.count]]
                if step.pool in ("sum", "mean"):
                    factor = np.full((n, 1), step.factor, np.float32)
                    if step.pool == "mean":
                        factor = scales[:, step.mean, None] * factor
                        factor = np.where(np.isfinite(factor), factor, np.float32(0))
                    pooled = _codes(rows.sum(axis=1, dtype=np.int32).astype(np.float32) * factor)
                else:
                    pooled = rows.max(axis=1)
                of[step.out][:, step.position : step.position + step.width] = pooled
            case steps.Mixed():
                _mixed(step, ids, of)
            case steps.Dense():
                of[step.out] = linear(step.layer, of[step.x])
            case steps.Quantize():
                found = _codes(of[step.x] * np.float32(step.factor))
                found = np.maximum(found, 0) if step.relu else found
                of[step.out][:, step.position : step.position + found.shape[1]] = found
            case steps.Factorization():
                k = _vectors(of[step.x], step.positions, step.width)
                total, squares = (each.sum(axis=1).astype(np.float32) for each in (k, k * k))
                of[step.out][:, 0] = lane_sum(total * total - squares) * np.float32(step.scale)
            case steps.Cross():
                g = of[step.u] + (np.float32(1) if step.first else of[step.g])
                of[step.g], value = g, of[step.x].astype(np.float32) * g
                if step.out is not None:
                    of[step.out] = _codes(value * np.float32(step.factor))
                if step.total is not None and step.weight is not None:
                    of[step.total][:, 0] = lane_sum(np.where(step.weight == 0, np.float32(0), value * step.weight))
            case steps.Dots():
                k = _vectors(of[step.x], step.positions, step.width)
                lower = np.tril_indices(step.positions.size, -1)
                found = np.einsum("nik,njk->nij", k, k)[:, lower[0], lower[1]]
                codes = _codes(found.astype(np.float32) * step.factor)
                of[step.out][:, step.position : step.position + codes.shape[1]] = codes
            case steps.Weighted():
                x = of[step.x][:, step.first : step.first + step.weight.size]
                of[step.out][:, 0] = lane_sum(x.astype(np.float32) * step.weight)
            case steps.Normalize():
                x = np.where(of[step.x] < 0, np.float32(0), of[step.x]) if step.relu else of[step.x]
                squares = np.maximum(lane_sum(x * x) + np.float32(step.epsilon), np.float32(step.least))
                of[step.out] = x / np.sqrt(squares)[:, None]
            case steps.Leaky():
                x = of[step.x]
                of[step.out] = np.where(x < 0, x * step.slope, x)
            case steps.Tanh():
                x = of[step.x]
                e = exponential(np.float32(-2) * np.abs(x))
                size = (1 - e) / (1 + e)
                of[step.out] = np.where(x < 0, -size, size)
            case steps.Mixture():
                gates = of[step.gates]
                weights, total = exponential(gates - gates.max(axis=1, keepdims=True)), np.zeros((n, 1), np.float32)
                for each in weights.T:
                    total += each[:, None]
                of[step.out] = of[step.x] * np.repeat(weights / total, of[step.x].shape[1] // gates.shape[1], axis=1)
            case steps.Product():
                of[step.out][:, 0] = lane_sum(of[step.x] * of[step.y])
            case steps.LookupSum():
                total = np.zeros(n, np.float32)
                for column, offset in zip(step.columns, step.offsets, strict=True):
                    total += step.table[offset + ids[:, column]]
                of[step.out][:, 0] = total
            case steps.Total():
                logit = np.full(n, step.bias, np.float32)
                for slot, times in step.terms:
                    logit += of[slot][:, 0] * np.float32(times)
                of[step.out][:, 0] = 1 / (1 + np.exp(-logit)) if step.sigmoid else logit
    return of


def lane_sum(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """The sums of float32 [n, width] along the last axis in the kernels' order."""
    n, width = values.shape
    padded = np.zeros((n, -(-width // 16) * 16), np.float32)
    padded[:, :width] = values
    lanes = np.zeros((n, 16), np.float32)
    for start in range(0, padded.shape[1], 16):
        lanes += padded[:, start : start + 16]
    eight = lanes[:, :8] + lanes[:, 8:]
    four = eight[:, :4] + eight[:, 4:]
    return np.asarray((four[:, 0] + four[:, 2]) + (four[:, 1] + four[:, 3]))


def _codes(values: NDArray[np.float32]) -> NDArray[np.int16]:
    known = np.where(np.isnan(values), np.float32(-steps.CODES), values)
    return np.asarray(np.rint(np.clip(known, -steps.CODES, steps.CODES)), np.int16)


def _vectors(x: NDArray[np.int16], positions: NDArray[Any], width: int) -> NDArray[np.int32]:
    """int32 [n, vectors, width]."""
    return np.stack([x[:, p : p + width] for p in positions], axis=1).astype(np.int32)


def _mixed(step: steps.Mixed, ids: NDArray[Any], of: list[NDArray[Any]]) -> None:
    accumulated = np.zeros((len(ids), step.scale.size), np.int64)
    if step.table is not None:
        rows = step.offsets + ids[:, step.columns]
        zero = ZERO if step.table.dtype == np.uint8 else 0
        accumulated += (step.table[rows].astype(np.int64) - zero).sum(axis=1) << step.shift
    if inputs := len(step.weight):
        accumulated += of[step.x][:, step.first : step.first + inputs].astype(np.int64) @ step.weight.astype(np.int64)
    y = accumulated.astype(np.float32) * step.scale + step.bias
    start = 0
    for slot, width, relu in step.outs:
        part, dtype = y[:, start : start + width], of[slot].dtype
        if dtype == np.uint8:
            part = np.rint(np.clip(np.where(np.isnan(part), 0, part), 0, 255))
        of[slot] = _codes(part) if dtype == np.int16 else part.astype(dtype)
        of[slot] = np.maximum(of[slot], 0) if relu and dtype == np.int16 else of[slot]
        start += -(-width // COLUMNS) * COLUMNS
