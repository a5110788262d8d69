"""Splitting: repeats hidden channels of feed-forward blocks whose weights are outliers (Zhao et al. 2019, "OCS")."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from pipelines.core.errors import RequestError
from pipelines.graph import edit, query
from pipelines.quantization.algorithms.channel_groups import LINEAR, outputs_first, why_not_linear
from pipelines.quantization.algorithms.equalize_channels import EPSILON, Channels, Floats
from pipelines.quantization.algorithms.smooth_channels import smoothable

ELEMENTWISE = ("Add", "Clip", "Div", "Erf", "Gelu", "Mul", "Pow", "Relu", "Sigmoid", "Sub", "Tanh")
BLOCK, SHARE = 16, 1 / 48  # copies are made in blocks that fill vectors, up to this share of the channels
GAIN = 0.5  # maximum error with another block of copies, relative to that without
Splits = dict[str, tuple[int, ...]]  # {value: channels of which copies are appended}


def splittable(graph: ir.Graph) -> dict[ir.Value, tuple[list[ir.Node], list[ir.Node], dict[ir.Value, None]]]:
    """Finds activations whose channels can be repeated: elementwise functions of linear layers without other readers.

    Args:
        graph: Float graph.

    Returns:
        By activation: the linear layers that read it, the nodes that compute it from linear layers (these included),
        and the values between them.
    """
    blocks = {}
    for x, readers in smoothable(graph).items():
        nodes: dict[ir.Node, None] = {}
        values: dict[ir.Value, None] = {}
        width, todo = outputs_first(readers[0]).shape[1], [x]
        while todo:
            value = todo.pop()
            producer = value.producer()
            if value in values or query.constant(value) is not None:
                continue
            values[value] = None
            is_layer = producer is not None and producer.op_type in LINEAR and not why_not_linear(producer)
            if producer is None or producer.graph is not graph or value.is_graph_output():
                break
            if not is_layer and producer.op_type not in ELEMENTWISE:
                break
            nodes[producer] = None
            todo += [] if is_layer else [part for part in producer.inputs if part is not None]
        else:
            inside = all(node in nodes or node in readers for value in values for node in value.consumers())
            layers = [node for node in nodes if node.op_type in LINEAR]
            wide = all(outputs_first(node).shape[0] == width for node in layers)
            if layers and inside and wide and all(node in readers for node in x.consumers()):
                blocks[x] = (readers, list(nodes), values)
    return blocks


def find_splits(model: ir.Model, statistics: Mapping[str, Channels]) -> Splits:
    """Finds the channels to copy with a part of their weights, for `split_channels`.

    A network of BERT's kind has one weight far beyond all others of its output channel, of the first token's massive
    activation (Sun et al. 2024, "Massive Activations in Large Language Models"). It sets the scale of that output
    channel, in which the other weights are then 0: a token whose products in float cancel each other gets a false
    massive activation (cosine .898 of a sentence where .998 is the mean). Of n copies each has the weight W / n.

    Copies are given, one at a time, to the channel that sets the scale of the output channel of the largest rounding
    error, for every threshold of `find_smoothing`. Another `BLOCK` of copies must lower the expected error, which is
    that of `EqualizeChannels` as an absolute one, to `GAIN` of it.

    Args:
        model: Float model.
        statistics: `channel_statistics` of the values of `splittable`.

    Returns:
        Channels to repeat, by value name.
    """
    splits: Splits = {}
    for x, (readers, _, _) in splittable(model.graph).items():
        channels = statistics.get(str(x.name))
        if channels is None or channels.peak.max() <= EPSILON:
            continue
        weight = np.concatenate([outputs_first(node).astype(np.float64) for node in readers])
        most = int(weight.shape[1] * SHARE) // BLOCK * BLOCK
        ordered = np.sort(channels.peak)[::-1]
        best: dict[int, tuple[float, tuple[int, ...]]] = {}
        for rank in np.unique(np.geomspace(1, len(ordered) / 2, 12).astype(int)) if len(ordered) > 2 and most else ():
            k = np.minimum(1.0, max(ordered[rank], EPSILON) / np.maximum(channels.peak, EPSILON))
            for count, error, copies in _greedy(weight, channels, k, most):
                best[count] = min(best.get(count, (np.inf, ())), (error, copies))
        chosen = 0
        while chosen + BLOCK in best and best[chosen + BLOCK][0] < GAIN * best[chosen][0]:
            chosen += BLOCK
        if chosen:
            splits[str(x.name)] = best[chosen][1]
    return splits


def _greedy(weight: Floats, channels: Channels, k: Floats, most: int) -> list[tuple[int, float, tuple[int, ...]]]:
    """Returns the number of copies, the expected error and the channels after every `BLOCK` of copies, and of none."""
    scaled, power = np.abs(weight / k), float(weight.shape[0])
    copies, made, steps = np.ones(len(k)), list[int](), []
    peak, largest = scaled.max(axis=1), scaled.argmax(axis=1)
    energy, noise = channels.square * k**2, channels.scale(k) ** 2
    while True:
        if len(made) % BLOCK == 0:
            error = noise * float((scaled**2 / copies).sum()) + float(
                ((peak / 127) ** 2).sum() * (energy * copies).sum()
            )
            steps.append((len(made), error / power, tuple(sorted(made))))
        if len(made) == most:
            return steps
        channel = int(largest[np.argmax(peak)])
        made.append(channel)
        copies[channel] += 1
        rows = largest == channel
        shares = scaled[rows] / copies
        peak[rows], largest[rows] = shares.max(axis=1), shares.argmax(axis=1)


def split_channels(model: ir.Model, splits: Mapping[str, Sequence[int]]) -> None:
    """Appends copies of channels to activations in place; in float the model computes the same.

    Args:
        model: Float model that `find_splits` was called on; it is changed.
        splits: Channels to repeat, by value name.

    Raises:
        RequestError: The channels do not fit the graph.
    """
    blocks = {str(x.name): block for x, block in splittable(model.graph).items()} if splits else {}
    for name, copies in splits.items():
        readers, nodes, values = blocks.get(name, ([], [], {}))
        width = outputs_first(readers[0]).shape[1] if readers else 0
        if not all(isinstance(channel, int) and 0 <= channel < width for channel in copies):
            raise RequestError(f"the splitting of {name} does not fit the graph; calibrate again with: zoo calibrate")
        index = np.concatenate([np.arange(width), np.asarray(copies, np.int64)])
        for node in nodes:
            for position, value in enumerate(node.inputs):
                array = query.constant(value) if value is not None else None
                if array is None or (node.op_type in LINEAR and position == 1):
                    continue
                if array.ndim and array.shape[-1] == width:
                    _replace(model.graph, node, position, np.asarray(array)[..., index])
            if node.op_type in LINEAR:
                _replace(model.graph, node, 1, outputs_first(node, outputs_first(node)[index]))
        count = np.bincount(index, minlength=width)
        for node in readers:
            weight = outputs_first(node).astype(np.float64) / count
            _replace(model.graph, node, 1, outputs_first(node, weight[:, index]).astype(np.float32))
        for value in values:
            if value.shape is not None:
                value.shape = ir.Shape([*value.shape[:-1], len(index)])


def _replace(graph: ir.Graph, node: ir.Node, position: int, array: np.ndarray) -> None:
    """Gives a node its own constant, because others may share the old one."""
    node.replace_input_with(
        position, edit.initializer(graph, f"{node.outputs[0].name}.split{position}", np.ascontiguousarray(array))
    )
