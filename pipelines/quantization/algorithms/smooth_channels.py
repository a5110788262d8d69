"""Smoothing: scales down outlier channels of linear layers' inputs before they are quantized (SmoothQuant)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from pipelines.core.errors import RequestError
from pipelines.graph import edit, query
from pipelines.quantization.algorithms.channel_groups import LINEAR, outputs_first, why_not_linear
from pipelines.quantization.algorithms.equalize_channels import EPSILON, Channels, Floats, Reader
from pipelines.quantization.calibration.table import rounded_to_float32

CONVOLUTIONS = ("Conv", "ConvTranspose")
MARGIN = 0.7  # minimum reduction of the expected error for an additional float product (1.5 dB)
Factors = dict[str, tuple[float, ...]]  # {value: factor of each of its channels}


def smoothable(graph: ir.Graph) -> dict[ir.Value, list[ir.Node]]:
    """Finds activations with channels on the last axis, and the linear layers of constant weights that read them.

    Layers that share weights with layers of another activation are excluded, because each would need other factors.

    Args:
        graph: Float graph.

    Returns:
        Linear layers by activation, in graph order.
    """
    layers: dict[ir.Value, list[ir.Node]] = {}
    for node in graph:
        x = node.inputs[0] if node.op_type in LINEAR else None
        if x is not None and query.constant(x) is None and not why_not_linear(node):
            layers.setdefault(x, []).append(node)
    return {
        x: nodes
        for x, nodes in layers.items()
        if all(reader in nodes for node in nodes if node.inputs[1] is not None for reader in node.inputs[1].consumers())
    }


def is_mostly_linear(graph: ir.Graph) -> bool:
    """Returns whether most layers are linear, so that smoothing is worth its time; most of others are convolutions.

    Args:
        graph: Float graph.
    """
    kinds = [node.op_type for node in graph if node.op_type in (*LINEAR, *CONVOLUTIONS)]
    return 2 * sum(kind in LINEAR for kind in kinds) > len(kinds)


def find_smoothing(model: ir.Model, statistics: Mapping[str, Channels]) -> Factors:
    """Finds factors k for `smooth_channels`: y = (k x) (W / k).

    One token or channel far beyond the others sets the scale of all: in BERT a single channel behind a GELU or a
    LayerNormalization (Xiao et al. 2022, "SmoothQuant"; Dettmers et al. 2022, "LLM.int8()"). If a residual sum reads
    the value too, or its producer is not homogeneous, no earlier layer can take the factors, so a Mul is inserted,
    which costs a pass over the value. k_c = min(1, t / p_c) with p_c = max |x_c|: channels above t are scaled down to
    t, the others and their weights do not change. t is the channel peak of least expected error (`EqualizeChannels`); a
    value that wins less than `MARGIN` is not smoothed.

    Args:
        model: Float model.
        statistics: `channel_statistics` of the values of `smoothable`.

    Returns:
        Factor of each channel, by value name.
    """
    factors: Factors = {}
    for x, nodes in smoothable(model.graph).items():
        channels = statistics.get(str(x.name))
        if channels is None or channels.peak.max() <= EPSILON:
            continue
        readers = [Reader.of(node, [channels]) for node in nodes]
        lowest, best = MARGIN * sum(reader.error(np.ones(len(channels.peak))) for reader in readers), None
        ordered = np.sort(channels.peak)[::-1]
        for rank in np.unique(np.geomspace(1, len(ordered) / 2, 24).astype(int)) if len(ordered) > 2 else ():
            k = np.minimum(1.0, max(ordered[rank], EPSILON) / np.maximum(channels.peak, EPSILON))
            error = sum(reader.error(k) for reader in readers)
            if error < lowest:
                lowest, best = error, k
        if best is not None:
            factors[str(x.name)] = rounded_to_float32(best)
    return factors


def smooth_channels(model: ir.Model, factors: Mapping[str, Sequence[float] | Floats]) -> set[str]:
    """Smooths a model in place.

    Args:
        model: Float model that `find_smoothing` was called on; it is changed.
        factors: Factor of each channel, by value name.

    Returns:
        Names of the new operators.

    Raises:
        RequestError: The factors do not fit the graph.
    """
    made = set()
    values = {str(x.name): (x, nodes) for x, nodes in smoothable(model.graph).items()} if factors else {}
    for name, scaling in factors.items():
        k, (x, nodes) = np.asarray(scaling, np.float32), values.get(name, (None, []))
        if x is None or not (k > 0).all() or {outputs_first(node).shape[1] for node in nodes} != {len(k)}:
            raise RequestError(f"the smoothing of {name} does not fit the graph; calibrate again with: zoo calibrate")
        # the same names whenever it is done, for the table has the range of the result
        factor = edit.initializer(model.graph, f"{name}.smoothing", k)
        mul = edit.node("Mul", [x, factor], f"{name}.smoothed", dtype=ir.DataType.FLOAT)
        mul.outputs[0].shape = x.shape
        model.graph.insert_before(nodes[0], mul)
        for node in nodes:
            weight = outputs_first(node).astype(np.float64) / k
            stem, array = f"{node.outputs[0].name}.smoothed1", outputs_first(node, weight).astype(np.float32, order="C")
            node.replace_input_with(1, edit.initializer(model.graph, stem, array))
            node.replace_input_with(0, mul.outputs[0])
        made.add(str(mul.name))
    return made
