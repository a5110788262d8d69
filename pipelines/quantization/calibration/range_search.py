"""Search of activation ranges by the error of the graph's outputs.

The range of least error of a tensor may keep outliers that do not matter downstream (a ReLU6 clips them, a mean dilutes
them) at the price of a larger scale. Another range may clip values that the outputs depend on. So each tensor is
quantized alone in the float model with several fractions of its range, and the fraction of least output error is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray

from pipelines.core.batches import Batch
from pipelines.core.progress import progress
from pipelines.graph import io, query, reference_session, token_mask
from pipelines.graph.infer import infer_shapes
from pipelines.quantization.calibration.compared_outputs import ComparedOutputs, squared_errors
from pipelines.quantization.calibration.layerwise import CHUNK, sample_chunks, subgraph_session
from pipelines.quantization.calibration.table import CalibrationTable, TensorRange
from pipelines.quantization.qdq.scales import uint8_qparams
from pipelines.quantization.quantizer import quantize
from pipelines.quantization.recipe import QuantRecipe

Array = NDArray[Any]
NARROWER, WIDER = (0.8, 0.65, 0.5, 0.4), (1.25, 1.6)  # fractions of a range that are tried, until one is worse
GAIN = 0.97  # a fraction must reduce the error to this share
# bytes of one tensor, and of what else is needed downstream of it, on the samples; of larger ones fewer samples count
MAX_TENSOR_BYTES = 2**27
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
    exact, tensors = ComparedOutputs.of(model).cut(model), dict(table.tensors)
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


class _ReadRanges(dict[str, TensorRange]):
    """Ranges that note which of them are read."""

    def __init__(self, tensors: Mapping[str, TensorRange]) -> None:
        super().__init__(tensors)
        self.read = set[str]()

    def __getitem__(self, name: str) -> TensorRange:
        self.read.add(name)
        return super().__getitem__(name)

    def copy(self) -> _ReadRanges:
        """Returns this object, so that reads of a copy are noted here."""
        return self


def quantized_tensors(model: ir.Model, recipe: QuantRecipe) -> set[str]:
    """Finds the activations whose ranges a recipe reads; no samples are needed.

    The model is quantized with placeholder ranges. Names of the remaining QuantizeLinear would not suffice: they move
    through data movement, and into embedding tables.

    Args:
        model: Float model.
        recipe: Quantization options.

    Returns:
        Names of the tensors.
    """
    copy = model.clone()
    infer_shapes(copy)
    values = (*copy.graph.inputs, *(value for node in copy.graph for value in node.outputs))
    unit = TensorRange(0.0, 1.0, 0.0, 1.0, 1), TensorRange(-1.0, 1.0, -1.0, 1.0, 1)
    ranges = _ReadRanges({str(value.name): unit[not _is_positive(value)] for value in values if query.is_float(value)})
    quantize(model, recipe, CalibrationTable(io.digest(model), recipe.observer, 1, "", ranges))
    return ranges.read


def _is_positive(value: ir.Value) -> bool:
    """Whether the operator that computes a value has no negative results."""
    node = value.producer()
    if node is None:
        return False
    low = query.constant(node.inputs[1]) if query.is_op(node, "Clip") and len(node.inputs) > 1 else None
    return query.is_op(node, "Relu", "Sigmoid", "Softmax") or (low is not None and bool((low >= 0).all()))


def output_sqnr(
    float_model: ir.Model,
    other: ir.Model,
    samples: Iterable[Batch],
    quick: bool = False,
    at_once: int = CHUNK,
    optimized: bool = False,
) -> float:
    """Computes the SQNR of the outputs of another model, for example an int8 one, against the float model's.

    The tensors are those of `ComparedOutputs`; for several, the mean relative error counts.
    Padded positions of texts do not count.

    Args:
        float_model: Reference model.
        other: Model with the same inputs and outputs.
        samples: Batches, array [samples, ...] for every graph input.
        quick: For two float models, see `reference_session.options`.
        at_once: Number of samples per run.
        optimized: Run the other model with onnxruntime's optimizations, as users do.

    Returns:
        The SQNR in dB, inf for equal outputs.

    Raises:
        RequestError: The samples do not fit the graph.
    """
    compared = ComparedOutputs.of(float_model)
    exact, tested = (
        reference_session.session(compared.cut(model), "its search needs", reference_session.options(fast))
        for model, fast in ((float_model, quick), (other, quick or optimized))
    )
    mask = token_mask.mask_of(float_model.graph)

    def results(session: ort.InferenceSession, batch: Batch) -> list[Array]:
        return token_mask.without_padding(batch, reference_session.run(session, batch), mask)

    chunks = sample_chunks(float_model, samples, at_once)
    error = compared.errors((results(exact, batch), results(tested, batch)) for batch in chunks).relative
    return float(-10 * np.log10(error)) if error > 0 else np.inf


def _best_range(
    model: ir.Model, value: ir.Value, observed: TensorRange, symmetric: bool, samples: Sequence[Batch]
) -> TensorRange:
    """Returns the fraction of the observed range of `value` with the smallest error of the outputs."""
    downstream = query.downstream(model.graph, value)
    computed = {output for node in downstream for output in node.outputs}
    outputs = [output for output in model.graph.outputs if output in computed]
    if not outputs:
        return observed
    read = dict.fromkeys(source for node in downstream for source in query.values_read(node) if source not in computed)
    inputs = [value, *(source for source in read if source is not value)]
    inputs = [source for source in inputs if source.is_graph_input() or source.producer() is not None]
    if not all(map(query.is_array, inputs)):  # a sequence cannot be fed
        return observed
    graph_inputs = [source for source in model.graph.inputs if not source.is_initializer()]
    upstream = subgraph_session(model, graph_inputs, [*inputs, *outputs], quick=True)
    rows: list[list[Array]] = []  # of every batch: arrays of `inputs`, then of `outputs`
    for batch in samples:
        if sum(array.nbytes for row in rows for array in row) < MAX_TENSOR_BYTES:
            rows.append(reference_session.run(upstream, batch))
    session = subgraph_session(model, inputs, outputs, rows[0], quick=True)
    names = [str(source.name) for source in inputs]

    def error(fraction: float) -> float:
        scale, zero = uint8_qparams(fraction * observed.low, fraction * observed.high, symmetric)

        def results() -> Iterator[tuple[Sequence[Array], Sequence[Array]]]:
            for row in rows:
                x = (np.clip(np.rint(row[0] / scale) + zero, 0, 255) - zero) * scale
                feeds = dict(zip(names, [x.astype(np.float32), *row[1 : len(inputs)]], strict=True))
                yield row[len(inputs) :], reference_session.run(session, feeds)

        return squared_errors(results()).relative

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
