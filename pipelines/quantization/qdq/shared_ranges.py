"""One range for all tensors that a Split cuts or a Concat joins with its parts, so that they are moved in int8."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

import onnx_ir as ir

from pipelines.graph import query
from pipelines.quantization.calibration.table import TensorRange
from pipelines.quantization.qdq.insertion import QdqInserter
from pipelines.quantization.qdq.quantize_early import moves
from pipelines.quantization.qdq.scales import activation_qparams, dequantized_qparams

MAX_SCALE_RATIO = 2.0  # largest quotient of the common scale and that of a tensor: its quantization loses a bit


def share_ranges(inserter: QdqInserter, selected: Collection[ir.Node]) -> None:
    """Propagates the range of each Split's input to its outputs, along data movement and int8 Concats.

    The channels that pass through the units of ShuffleNet unchanged are then never quantized again, and halves of
    channels (C2f of YOLO) are cut as bytes. Tensors stay apart if the common scale exceeds
    `MAX_SCALE_RATIO` times that of one of them, or if they were int8 before.

    Args:
        inserter: Inserter of the graph; its ranges are changed.
        selected: Int8 operators.
    """
    groups: dict[ir.Value, list[ir.Value]] = {}
    nodes = list(inserter.graph)
    for node in nodes:
        if node.op_type == "Split":
            _join(inserter, groups, (node.inputs[0], *(part for part in node.outputs if part.uses())))
    if not groups:
        return
    for node in nodes:
        if moves(node) and node.op_type != "Split" and query.constant(node.inputs[0]) is None:
            _join(inserter, groups, (node.inputs[0], node.outputs[0]))
    cut = {value for node in nodes if node.op_type == "Split" for value in node.outputs}
    for node in nodes:
        if node.op_type == "Concat" and node in selected:
            parts = [value for value in node.inputs if value is not None]
            if any(cut & set(groups.get(part, ())) for part in parts):
                _join(inserter, groups, (*parts, node.outputs[0]))
    for group in {id(group): group for group in groups.values()}.values():
        if any(value in cut for value in group):
            common = _common(inserter.ranges[str(value.name)] for value in group)
            inserter.ranges |= {
                str(value.name): replace(inserter.ranges[str(value.name)], low=common[0], high=common[1])
                for value in group
            }


def _join(inserter: QdqInserter, groups: dict[ir.Value, list[ir.Value]], values: Iterable[ir.Value | None]) -> None:
    """Makes the groups of values one, unless one of them would lose too much."""
    joined: dict[ir.Value, None] = {}
    for value in values:
        if value is None or value.name not in inserter.ranges or dequantized_qparams(value) is not None:
            return
        joined |= dict.fromkeys(groups.get(value, [value]))
    scales = [_scale(inserter, inserter.ranges[str(value.name)]) for value in joined]
    low, high = _common(inserter.ranges[str(value.name)] for value in joined)
    first = next(iter(joined))
    whole = _scale(inserter, replace(inserter.ranges[str(first.name)], low=low, high=high))
    if whole <= MAX_SCALE_RATIO * min(scales):
        group = list(joined)
        groups |= dict.fromkeys(group, group)


def _common(ranges: Iterable[TensorRange]) -> tuple[float, float]:
    bounds = [(observed.low, observed.high) for observed in ranges]
    return min(low for low, _ in bounds), max(high for _, high in bounds)


def _scale(inserter: QdqInserter, observed: TensorRange) -> float:
    return float(activation_qparams(observed, inserter.recipe.symmetric)[0])
