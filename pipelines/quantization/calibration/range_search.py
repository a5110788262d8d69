"""Search of activation ranges by the error of the graph's outputs.

The range of least error of a tensor may keep outliers that do not matter downstream (a ReLU6 clips them, a mean dilutes
them) at the price of a larger scale. Another range may clip values that the outputs depend on. So each tensor is
quantized alone in the float model with several fractions of its range, and the fraction of least output error is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.core.batches import Batch
from pipelines.core.progress import progress
from pipelines.graph import query, reference_session
from pipelines.graph.infer import infer_shapes
from pipelines.quantization.calibration.layerwise import CHUNK, sample_chunks, subgraph_session, values_read
from pipelines.quantization.calibration.table import CalibrationTable, TensorRange
from pipelines.quantization.qdq.scales import uint8_qparams
from pipelines.quantization.quantizer import quantize
from pipelines.quantization.recipe import QuantRecipe

Array = NDArray[Any]
NARROWER, WIDER = (0.8, 0.65, 0.5, 0.4), (1.25, 1.6)  # fractions of a range that are tried, until one is worse
GAIN = 0.97  # of the error: what a fraction must win
# bytes of one tensor, and of what else is needed downstream of it, on the samples; of larger ones fewer samples count
MOST = 2**27
CHOOSING = ("NonMaxSuppression", "NonZero", "Compress", "Unique")  # the size of their results depends on the data
IDLE = 3e-6  # of the outputs' squares, 55 dB; tensors that cause less error are left alone


def search_ranges(
    model: ir.Model, recipe: QuantRecipe, table: CalibrationTable, samples: Sequence[Batch]
) -> CalibrationTable:
    """Chooses the ranges of quantized activations by the squared error of the outputs.

    Args:
        model: Float model.
        recipe: Quantization options.
        table: Calibration table of `model`.
        samples: A few batches; each runs as it is.

    Returns:
        `table` with the ranges found.

    Raises:
        RequestError: The samples do not fit the graph.
    """
    int8, _ = quantize(model, recipe, table)
    exact, tensors = before_softmax(model), dict(table.tensors)
    values: dict[str, ir.Value] = {}
    for node in exact.graph:
        values.update({str(value.name): value for value in (*node.inputs, *node.outputs) if value is not None})
    inputs = (node.inputs[0] for node in int8.graph if node.op_type == "QuantizeLinear")
    quantized = dict.fromkeys(str(value.name) for value in inputs if value is not None)
    searched = [name for name in quantized if name in values and name in tensors]
    with progress("refining ranges", len(searched)) as advance:
        for name in searched:
            tensors[name] = _best_range(exact, values[name], tensors[name], recipe.symmetric, samples)
            advance(1)
    return replace(table, tensors=tensors)


def output_sqnr(
    float_model: ir.Model, other: ir.Model, samples: Iterable[Batch], quick: bool = False, at_once: int = CHUNK
) -> float:
    """Computes the SQNR of the outputs of another model, for example an int8 one, against the float model's.

    Logits count instead of the probabilities of a final Softmax, most of which are near zero. For several outputs, the
    mean relative error counts.

    Args:
        float_model: Reference model.
        other: Model with the same inputs and outputs.
        samples: Batches, array [samples, ...] for every graph input.
        quick: For two float models, see `reference_session.options`.
        at_once: Number of samples per run.

    Returns:
        The SQNR in dB, inf for equal outputs.

    Raises:
        RequestError: The samples do not fit the graph.
    """
    exact, tested = (
        reference_session.session(before_softmax(model), "its search needs", reference_session.options(quick))
        for model in (float_model, other)
    )
    error = relative_error(
        (reference_session.run(exact, batch), reference_session.run(tested, batch))
        for batch in sample_chunks(float_model, samples, at_once)
    )
    return float(-10 * np.log10(error)) if error > 0 else np.inf


def before_softmax(model: ir.Model) -> ir.Model:
    """Copies a model so that its outputs are logits, the inputs of a final Softmax or Sigmoid.

    Outputs whose size depends on the data (boxes selected by NonMaxSuppression) are replaced by the float values that
    they were selected from, because an int8 model may select fewer or more.

    Args:
        model: Float or int8 model; it is not changed.

    Returns:
        The copy.
    """
    copy = model.clone()
    chosen = [node for node in copy.graph if query.is_op(node, *CHOOSING)]
    if chosen:
        infer_shapes(copy)
        _end_before(copy.graph, chosen)
    for at, value in enumerate(copy.graph.outputs):
        producer = value.producer()
        if producer is not None and producer.op_type in ("Softmax", "Sigmoid") and producer.inputs[0] is not None:
            copy.graph.outputs[at] = producer.inputs[0]
            producer.inputs[0].type, producer.inputs[0].shape = value.type, None
    return copy


def _end_before(main: ir.Graph, chosen: Sequence[ir.Node]) -> None:
    """Replaces outputs downstream of the `chosen` nodes by the float values that these and later nodes read."""
    nodes = [*chosen, *_downstream(main, *(value for node in chosen for value in node.outputs))]
    computed = {value for node in nodes for value in node.outputs}
    kept = [value for value in main.outputs if value not in computed]
    if len(kept) == len(main.outputs):
        return
    read: dict[str, ir.Value] = {}
    for value in (value for node in nodes for value in values_read(node) if value not in computed):
        float_value = _rounded_from(value)
        if query.is_float(float_value) and float_value.producer() is not None and float_value not in kept:
            read[str(float_value.name)] = float_value
    if kept or read:
        main.outputs[:] = [*kept, *(read[name] for name in sorted(read))]  # those of the int8 graph have the same names


def _rounded_from(value: ir.Value) -> ir.Value:
    """Returns the value that was quantized and dequantized to `value`, or `value`."""
    node = value.producer()
    quantize = node.inputs[0].producer() if query.is_op(node, "DequantizeLinear") and node and node.inputs[0] else None
    found = quantize.inputs[0] if query.is_op(quantize, "QuantizeLinear") and quantize else None
    return value if found is None else found


def relative_error(results: Iterable[tuple[Sequence[Array], Sequence[Array]]]) -> float:
    """Computes sum (x - y)^2 / sum x^2 per float output, and returns the mean over the outputs.

    Infinite values of x, such as masked inputs of a Softmax, do not count. A y of another shape counts as zeros.

    Args:
        results: For every batch the outputs x and the outputs y, float32 arrays.

    Returns:
        The mean relative squared error.
    """
    noise, power = dict[int, float](), dict[int, float]()
    for exact, tested in results:
        for at, (x, y) in enumerate(zip(exact, tested, strict=True)):
            if x.dtype == np.float32:
                finite = np.isfinite(x)
                x, y = x[finite], y[finite] if y.shape == x.shape else np.zeros(finite.sum(), np.float32)
                noise[at] = noise.get(at, 0.0) + float(np.square(np.subtract(x, y, dtype=np.float64)).sum())
                power[at] = power.get(at, 0.0) + float(np.square(x, dtype=np.float64).sum())
    return float(np.nan_to_num(np.mean([noise[at] / power[at] for at in noise if power[at] > 0] or [0.0]), nan=np.inf))


def _best_range(
    model: ir.Model, value: ir.Value, observed: TensorRange, symmetric: bool, samples: Sequence[Batch]
) -> TensorRange:
    """Returns the fraction of the observed range of `value` with the smallest error of the outputs."""
    downstream = _downstream(model.graph, value)
    computed = {output for node in downstream for output in node.outputs}
    outputs = [output for output in model.graph.outputs if output in computed]
    if not outputs:
        return observed
    read = dict.fromkeys(each for node in downstream for each in values_read(node) if each not in computed)
    inputs = [value, *(each for each in read if each is not value)]
    inputs = [each for each in inputs if each.is_graph_input() or each.producer() is not None]
    graph_inputs = [each for each in model.graph.inputs if not each.is_initializer()]
    upstream = subgraph_session(model, graph_inputs, [*inputs, *outputs], quick=True)
    rows: list[list[Array]] = []  # of every batch: arrays of `inputs`, then of `outputs`
    for batch in samples:
        if sum(array.nbytes for row in rows for array in row) < MOST:
            rows.append(reference_session.run(upstream, batch))
    session = subgraph_session(model, inputs, outputs, rows[0], quick=True)
    names = [str(each.name) for each in inputs]

    def error(fraction: float) -> float:
        scale, zero = uint8_qparams(fraction * observed.low, fraction * observed.high, symmetric)

        def results() -> Iterator[tuple[Sequence[Array], Sequence[Array]]]:
            for row in rows:
                x = (np.clip(np.rint(row[0] / scale) + zero, 0, 255) - zero) * scale
                feeds = dict(zip(names, [x.astype(np.float32), *row[1 : len(inputs)]], strict=True))
                yield row[len(inputs) :], reference_session.run(session, feeds)

        return relative_error(results())

    best, least = 1.0, error(1.0)
    if least < IDLE:
        return observed
    for fractions in (NARROWER, WIDER):
        for fraction in fractions:
            current = error(fraction)
            if current >= GAIN * least:
                break
            best, least = fraction, current
        if best != 1.0:
            break
    if best == 1.0:
        return observed
    return replace(observed, low=best * observed.low, high=best * observed.high, method=f"{observed.method} x {best:g}")


def _downstream(main: ir.Graph, *values: ir.Value) -> list[ir.Node]:
    """Returns the operators computed from any of `values`, in order."""
    computed, nodes = set(values), []
    for node in main:
        if any(each in computed for each in values_read(node)):
            nodes.append(node)
            computed.update(node.outputs)
    return nodes
