"""Cross-layer equalization and SmoothQuant: equal ranges of channels that share a scale."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.core.batches import length
from pipelines.core.errors import RequestError
from pipelines.core.progress import progress
from pipelines.graph import edit, query, reference_session
from pipelines.graph.infer import infer_shapes
from pipelines.quantization.algorithms import channel_groups
from pipelines.quantization.algorithms.channel_groups import ChannelGroup
from pipelines.rewrites.driver import Rewrite

Floats = NDArray[np.float64]
EPSILON = 1e-12
# other samples reach further than those of the calibration; a channel cut by its Clip loses more than a scale so much
# larger costs
HEADROOM = 1.5
QUIET = 1 / 8  # of the loudest channel: what other samples may reach in any channel that a linear layer reads


@dataclass(frozen=True)
class Channels:
    """Statistics of one activation by channel, float64 [channels].

    Attributes:
        low: Least value, at most 0.
        high: Greatest value, at least 0.
        square: Mean square.
    """

    low: Floats
    high: Floats
    square: Floats

    @property
    def peak(self) -> Floats:
        """Largest magnitude of each channel."""
        return np.maximum(-self.low, self.high)

    def scale(self, k: Floats) -> float:
        """Returns the int8 scale of the activation with channels multiplied by `k`, float64 [channels]."""
        return float((self.high * k).max() - (self.low * k).min()) / 255

    def times(self, k: Floats) -> Channels:
        """Returns the statistics of the activation with channels multiplied by `k`, float64 [channels]."""
        return Channels(self.low * k, self.high * k, self.square * k**2)


def channel_statistics(
    model: ir.Model,
    samples: Iterable[Mapping[str, NDArray[Any]]],
    linear: Mapping[str, int] | None = None,
) -> dict[str, Channels]:
    """Computes statistics of the values that `EqualizeChannels` needs, or of chosen values.

    By default these are inputs of convolutions of the main graph, their outputs that are added to a sum, and inputs of
    linear layers in a channel group. Only the statistics leave the graph, so memory is that of one batch's inference.

    Args:
        model: Float model.
        samples: Batches, array [samples, ...] for every graph input; each runs as it is.
        linear: Number of channels of chosen values with channels on the last axis, by name, instead of the default
            values.

    Returns:
        Statistics by value name.

    Raises:
        RequestError: The samples do not fit the graph.
    """
    copy = model.clone()
    infer_shapes(copy)
    if linear is None:
        plain, last = _channels_read(copy.graph)
    else:
        values = (*copy.graph.inputs, *(value for node in copy.graph for value in node.outputs))
        plain, last = [], {value: (value, linear[str(value.name)]) for value in values if value.name in linear}
    names = [str(value.name) for value in dict.fromkeys((*plain, *last))]
    if not names:
        return {}
    _reduce_to_channels(copy.graph, dict.fromkeys((*plain, *last)), last)
    statistics: dict[str, Channels] = {}
    seen = dict.fromkeys(names, 0)
    session = reference_session.lean_session(copy, "its equalization needs", quick=True)
    with progress("observing channels") as advance:
        for batch in samples:
            results = [
                array.reshape(*array.shape[:2]).astype(np.float64) for array in reference_session.run(session, batch)
            ]
            for name, high, low, square in zip(seen, results[::3], results[1::3], results[2::3], strict=True):
                before = statistics.get(name) or Channels(*[np.zeros(high.shape[1])] * 3)
                least, most = np.minimum(before.low, -low.max(axis=0)), np.maximum(before.high, high.max(axis=0))
                statistics[name] = Channels(least, most, before.square + square.sum(axis=0))
                seen[name] += len(square)
            advance(length(batch))
    return {name: Channels(stats.low, stats.high, stats.square / seen[name]) for name, stats in statistics.items()}


Last = dict[ir.Value, tuple[ir.Value, int]]  # {value: (the same with its channels on the last axis, their number)}


def _channels_read(main: ir.Graph) -> tuple[list[ir.Value], Last]:
    """The values that `EqualizeChannels` needs: those with channels on the second axis, and those on the last."""
    convolutions = [node for node in main if node.op_type == "Conv"]
    read = [value for node in convolutions if (value := node.inputs[0]) is not None]
    summed = [
        node.outputs[0] for node in convolutions if any(user.op_type == "Add" for user in node.outputs[0].consumers())
    ]
    last = {
        value: (channel_groups.gathered_from(value), group.channels.pop())
        for node in main
        if node.op_type in channel_groups.WRITERS[1:] and not isinstance(group := channel_groups.find(node), str)
        for value in group.rounded
    }
    return [*read, *summed], last


def _reduce_to_channels(main: ir.Graph, values: Iterable[ir.Value], last: Last) -> None:
    """Makes the outputs of the graph the maximum of x, the maximum of -x and the mean of x^2 by channel of values."""
    taken = query.used_names(main)
    del main.outputs[:]
    may_be_empty = {value for node in query.selected(main) for value in node.outputs}
    for value in values:
        x, channels = last.get(value, (value, 0))
        x = _not_empty(main, x, taken) if x in may_be_empty else x
        x = _channels_second(main, x, channels, taken) if value in last else x
        for op, inputs, pool in (("Identity", [x], "Max"), ("Neg", [x], "Max"), ("Mul", [x, x], "Average")):
            inner = edit.node(op, [*inputs], f"{value.name}.{op}", dtype=ir.DataType.FLOAT, taken=taken)
            end = edit.node(
                f"Global{pool}Pool", [*inner.outputs], f"{inner.name}.{pool}", dtype=ir.DataType.FLOAT, taken=taken
            )
            main.extend([inner, end])
            main.outputs.append(end.outputs[0])
    main.sort()


def _not_empty(main: ir.Graph, value: ir.Value, taken: set[str]) -> ir.Value:
    """Computes `value` with one zero along each axis of size 0, which pools and Reshapes refuse."""
    one, zero = (edit.initializer(main, f"{value.name}.{number}", np.array([number]), taken) for number in (1, 0))

    def add(op: str, inputs: list[ir.Value | None], kind: str, dtype: ir.DataType, **attributes: int) -> ir.Value:
        main.append(edit.node(op, inputs, f"{value.name}.{kind}", dtype=dtype, taken=taken, **attributes))
        return main[-1].outputs[0]

    shape = add("Shape", [value], "shape", ir.DataType.INT64)
    ends = add("Max", [add("Sub", [one, shape], "lack", ir.DataType.INT64), zero], "ends", ir.DataType.INT64)
    begins = add("Mul", [shape, zero], "begins", ir.DataType.INT64)
    pads = add("Concat", [begins, ends], "pads", ir.DataType.INT64, axis=0)
    return add("Pad", [value, pads], "filled", ir.DataType.FLOAT)


def _channels_second(main: ir.Graph, value: ir.Value, channels: int, taken: set[str]) -> ir.Value:
    """Computes `value`, whose channels are last, as [first axis, channels, all others] in `main`."""
    shape = edit.initializer(main, f"{value.name}.rows", np.array([0, -1, channels]), taken)
    rows = edit.node("Reshape", [value, shape], f"{value.name}.reshaped", dtype=ir.DataType.FLOAT, taken=taken)
    turned = edit.node(
        "Transpose", [rows.outputs[0]], f"{value.name}.turned", dtype=ir.DataType.FLOAT, taken=taken, perm=[0, 2, 1]
    )
    main.extend([rows, turned])
    return turned.outputs[0]


class EqualizeChannels(Rewrite):
    """Cross-layer equalization: output channels of a layer times k, input channels of its readers divided by k.

    For y = conv(f(conv(x, V)), W) with f(k x) = k f(x) channel by channel (ReLU, sums, pooling), output channel c of V
    and its bias may be multiplied by any k_c > 0 if input channel c of W is divided by it. Values tied by a residual
    sum share k_c. The rounding of V does not change, because every output channel has its own scale. Int8 gives the
    activation between one scale s = (max_c k_c x_c - min_c k_c x_c) / 255 and every output j of W one scale t_j = max
    |W_j. / k| / 127. The expected squared error of the readers, each relative to the power of its products, is

        sum_j sum_c [ s^2/12 |W_jc / k_c|^2  +  n_jc t_j^2/12 k_c^2 E[x_c^2] ]  /  sum_j sum_c |W_jc|^2 E[x_c^2],

    where |W_jc|^2 is summed over the n_jc taps of the kernel. If x is a sum, s^2 is that of x and of its terms, because
    all are rounded. A depthwise W has one c for every j: its second term does not depend on k, and all channels may
    fill the range. The factors are searched in the family k_c = a w_c^b / p_c^(1-b), w_c = max |W_.c|, p_c = max |x_c|
    (Nagel et al. 2019, "Data-Free Quantization Through Weight Equalization and Bias Correction").

    Clip(0, m) commutes with k_c only where it does not clip, or k_c = 1. It is not changed, so 1 <= k_c <= m / (h p_c)
    with headroom h = 1.5: a channel that is scaled up is clipped at m / k_c, beyond all observed values, as the int8
    range would clip it.

    Linear layers (MatMul, Gemm) are scaled alike, V with the bias that is added behind it, and so are scale and bias of
    a LayerNormalization before them (SmoothQuant, Xiao et al. 2022, whose alpha is 1 - b). Their b is at least 1/2, and
    p_c at least an eighth of the loudest channel's. The smaller b is, the more channels come near the ends of the
    range, where other samples are clipped, which the formula does not model. Without these limits most linear layers of
    a Transformer got b = 0, and its logits on other samples 0.8 dB more noise; with them, 0.3 dB less.

    Args:
        ranges: `channel_statistics` of the graph.
        depthwise_only: Skip groups that a dense layer reads.

    Attributes:
        factors: Factors that were applied, float64 [channels], by the name of the first layer's output of a group;
            input of `scale_channels`.
    """

    MARGIN = 0.9  # fire only for a clear gain, so that a second run finds nothing to do

    def __init__(self, ranges: Mapping[str, Channels], depthwise_only: bool = False) -> None:
        super().__init__()
        self.ranges, self.depthwise_only, self.factors = dict(ranges), depthwise_only, dict[str, Floats]()

    def rewrite(self, model: ir.Model) -> int:
        """Equalizes every channel group of the main graph whose error falls clearly.

        Args:
            model: Float model; it is changed.

        Returns:
            Number of equalized groups.
        """
        done: set[ir.Value] = set()
        count = 0
        for node in list(model.graph):
            if node.op_type in channel_groups.WRITERS and node.outputs[0] not in done:
                group = self.group(node)
                if group is None:
                    continue
                done.update(group.values)
                count += self._equalize(model.graph, group)
        return count

    def group(self, start: ir.Node) -> ChannelGroup | None:
        """Finds the channel group that an operator writes.

        Args:
            start: Writer of a group.

        Returns:
            The group, or None, with the reason noted, if it cannot be scaled.
        """
        group = channel_groups.find(start)
        if isinstance(group, str):
            self.refuse(start, group)
            return None
        return group

    def _equalize(self, main: ir.Graph, group: ChannelGroup) -> int:
        """Scale one group by the best factors; 0 where it is refused or gains too little."""
        first = next(iter(group.writers))
        readers = [
            Reader.of(node, self._rounded(group, x))
            for node in group.readers
            if (x := node.inputs[0]) and x.name in self.ranges
        ]
        if not readers or len(readers) < len(group.readers):
            self.refuse(first, "no layer reads it, or one of unknown range")
            return 0
        if self.depthwise_only and not all(reader.depthwise for reader in readers):
            return 0
        if group.linear and first.outputs[0].name in self.factors:
            return 0  # another round would take from its `QUIET` channels what that leaves them
        limit = np.full(len(readers[0].channels.peak), np.inf)
        for clip in group.clips:
            low, high = (query.constant(bound) for bound in (*clip.inputs[1:], None, None)[:2])
            channels = self.ranges.get(str(clip.outputs[0].name))
            if low is None or high is None or low.item() != 0 or channels is None:
                self.refuse(first, f"Clip {clip.name} does not cut at 0 and a constant right before a layer")
                return 0
            limit = np.minimum(limit, high.item() / np.maximum(HEADROOM * channels.peak, EPSILON))
        k = _search(readers, limit, self.MARGIN)
        if k is None:
            return 0
        _scale(main, group, readers, k)
        name = str(first.outputs[0].name)
        self.factors[name] = self.factors.get(name, np.ones(len(k))) * k
        for name in {str(value.name) for value in group.values} & set(self.ranges):
            self.ranges[name] = self.ranges[name].times(k)
        return 1

    def _rounded(self, group: ChannelGroup, read: ir.Value) -> list[Channels]:
        """Statistics of `read`, and of the values of the group upstream of it, as far as int8 quantizes them."""
        upstream, todo = {read: None}, [read]
        while todo:
            producer = todo.pop().producer()
            if producer is not None and producer not in group.writers:
                new = [value for value in producer.inputs if value in group.values and value not in upstream]
                upstream.update(dict.fromkeys(value for value in new if value is not None))
                todo += [value for value in new if value is not None]
        return [self.ranges[str(value.name)] for value in upstream if value.name in self.ranges]


def scale_channels(model: ir.Model, factors: Mapping[str, Sequence[float] | Floats]) -> None:
    """Equalizes a model in place.

    Args:
        model: Float model that `EqualizeChannels` was applied to; it is changed.
        factors: `EqualizeChannels.factors`.

    Raises:
        RequestError: The factors do not fit the graph.
    """
    nodes = {str(node.outputs[0].name): node for node in model.graph if node.op_type in channel_groups.WRITERS}
    if any(nodes[name].op_type != "Conv" for name in factors if name in nodes):
        infer_shapes(model)  # as `rewrite` does before it finds groups
    for name, factor in factors.items():
        k, group = np.asarray(factor, np.float64), channel_groups.find(nodes[name]) if name in nodes else ""
        if isinstance(group, str) or group.channels != {len(k)} or not (k > 0).all():
            raise RequestError(
                f"the equalization of {name} does not fit the graph; calibrate again with: zoo calibrate"
            )
        _scale(model.graph, group, [Reader.of(node, []) for node in group.readers], k)


def _scale(main: ir.Graph, group: ChannelGroup, readers: Sequence[Reader], k: Floats) -> None:
    """Multiplies the channels of a group by `k`."""
    for node in group.writers:
        for index, axis in channel_groups.scaled_constants(node).items():
            array = np.asarray(query.constant(node.inputs[index]))
            _replace(main, node, index, array * (k if axis else k.reshape(-1, *[1] * (array.ndim - 1))))
    for reader in readers:
        weight = channel_groups.outputs_first(reader.node) / reader.spread(k)  # scaled by now where it is a writer, too
        _replace(main, reader.node, 1, channel_groups.outputs_first(reader.node, weight))


def _replace(main: ir.Graph, node: ir.Node, index: int, array: Floats) -> None:
    """Gives a node its own weights, because others may share the old ones."""
    node.replace_input_with(
        index, edit.initializer(main, f"{node.outputs[0].name}.equalized{index}", array.astype(np.float32, order="C"))
    )


@dataclass(frozen=True)
class Reader:
    """A layer that reads a channel group.

    Attributes:
        node: The layer.
        weight: float64 [out, in / groups, ...].
        rounded: Statistics of its input, and of quantized values upstream of the input.
        index: Channel of the group for each [out, in / groups]; [1, in] for a linear layer.
    """

    node: ir.Node
    weight: Floats
    rounded: list[Channels]
    index: NDArray[np.int64]

    @classmethod
    def of(cls, node: ir.Node, rounded: list[Channels]) -> Reader:
        """Reads a layer of constant weights.

        Args:
            node: Conv, MatMul or Gemm.
            rounded: Statistics of its input, and of quantized values upstream of the input.

        Returns:
            The reader.
        """
        weight = channel_groups.outputs_first(node).astype(np.float64)
        if node.op_type in channel_groups.LINEAR:
            return cls(node, weight, rounded, np.arange(weight.shape[1])[None])
        groups, (out, width) = node.attributes.get_int("group", 1), weight.shape[:2]
        return cls(node, weight, rounded, np.arange(out)[:, None] // (out // groups) * width + np.arange(width))

    @property
    def channels(self) -> Channels:
        """Statistics of its input."""
        return self.rounded[0]

    @property
    def depthwise(self) -> bool:
        """Whether it is a convolution whose outputs each read one channel."""
        return bool(self.node.op_type == "Conv" and self.weight.shape[1] == 1)

    def spread(self, k: Floats) -> Floats:
        """Broadcasts factors `k`, float64 [channels], to the layout of the weights."""
        return k[self.index].reshape(*self.index.shape, *[1] * (self.weight.ndim - 2))

    def error(self, k: Floats) -> float:
        """Computes the expected relative squared error by the formula of `EqualizeChannels` for factors `k`."""
        w = self.weight / self.spread(k)
        taps = tuple(range(2, w.ndim))
        s2 = sum(statistics.scale(k) ** 2 for statistics in self.rounded)
        t = np.abs(w).max(axis=tuple(range(1, w.ndim))) / 127
        square, product = (self.channels.square * k**2)[self.index], (w**2).sum(axis=taps)
        number = w[0, 0].size
        noise = s2 * product.sum() + (t**2 * number * square.sum(axis=1)).sum()
        return float(noise / 12 / max((product * square).sum(), EPSILON))


def _search(readers: list[Reader], limit: Floats, margin: float) -> Floats | None:
    """Returns the best factors [channels] of the family of `EqualizeChannels`; None if they gain too little.

    At most `limit`, float64 [channels], and at least 1 where that is finite.
    """
    peak = np.max([reader.channels.peak for reader in readers], axis=0)
    reach = np.zeros_like(peak)
    for layer in readers:
        most = np.abs(layer.weight).max(axis=tuple(range(2, layer.weight.ndim)), initial=0)
        np.maximum.at(reach, np.broadcast_to(layer.index, most.shape), most)
    alive = (peak > EPSILON) & (reach > EPSILON)
    if not alive.any():
        return None
    best, lowest = None, margin * sum(reader.error(np.ones(len(peak))) for reader in readers)
    bounded, linear = bool(np.isfinite(limit).all()), readers[0].node.op_type in channel_groups.LINEAR
    least = QUIET * peak.max() if linear else EPSILON
    for b in (0.5, 0.75) if linear else (0.0, 0.25, 0.5, 0.75):
        shape = np.where(alive, np.maximum(reach, EPSILON) ** b / np.maximum(peak, least) ** (1 - b), 1.0)
        shape = shape * peak.max() / (shape * peak)[alive].max()
        for a in np.geomspace(1, 2**8, 25) if bounded else (1.0,):
            k = np.where(alive, np.clip(a * shape, 1.0, np.maximum(limit, 1.0)) if bounded else shape, 1.0)
            error = sum(reader.error(k) for reader in readers)
            if error < lowest:
                best, lowest = k, error
    return best
