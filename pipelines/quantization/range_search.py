"""Ranges of activations judged where it counts: at the graph's outputs.

A range of least error of its own tensor keeps far values that nothing behind it may notice (a ReLU6 cuts them, a mean
dilutes them), at the price of a larger step for all others; another one cuts what the outputs hang on. So one tensor
after the other is rounded in the float model, the rest of it left alone, by shares of its range, and the share that
moves the outputs least is taken.
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
from pipelines.graph import reference_session
from pipelines.quantization.calibrate import CalibrationTable, TensorRange
from pipelines.quantization.layerwise import chunks, piece, reads
from pipelines.quantization.quantize import quantize
from pipelines.quantization.recipe import QuantRecipe
from pipelines.quantization.scales import uint8_qparams

Array = NDArray[Any]
NARROWER, WIDER = (0.8, 0.65, 0.5, 0.4), (1.25, 1.6)  # shares of a range that are tried, until one is worse
GAIN = 0.97  # of the error: what a share must win
# bytes of what one tensor, and whatever else is needed behind it, is on the samples; of larger ones fewer samples count
MOST = 2**27
IDLE = 3e-6  # of the outputs' squares, 55 dB; tensors that cause less error are left alone


def refined(
    model: ir.Model, recipe: QuantRecipe, table: CalibrationTable, samples: Sequence[Batch]
) -> CalibrationTable:
    """`table` with ranges chosen by what they do to the outputs of `model`, which it was made for, wherever `recipe`
    rounds.

    samples: a few batches, run as they come. Raises RequestError for samples that do not fit.
    """
    int8, _ = quantize(model, recipe, table)
    rounded = [
        str(node.inputs[0].name)
        for node in int8.graph
        if node.op_type == "QuantizeLinear" and node.inputs[0] is not None
    ]
    exact = before_softmax(model)
    values = {
        str(each.name): each for node in exact.graph for each in (*node.inputs, *node.outputs) if each is not None
    }
    tensors = dict(table.tensors)
    chosen = [name for name in dict.fromkeys(rounded) if name in values and name in tensors]
    with progress("refining ranges", len(chosen)) as advance:
        for name in chosen:
            tensors[name] = _best(exact, values[name], tensors[name], recipe.symmetric, samples)
            advance(1)
    return replace(table, tensors=tensors)


def output_sqnr(float_model: ir.Model, other: ir.Model, samples: Iterable[Batch], quick: bool = False) -> float:
    """SQNR in dB of another model's float outputs, an int8 one's say, against the float model's, over all samples;
    infinite if equal.

    What a final Softmax saw counts, not its probabilities, most of which are zero. Of several outputs the mean relative
    error counts.
    quick: for two float models, see `plain.options`. Raises RequestError for samples that do not fit.
    """
    models = (before_softmax(each) for each in (float_model, other))
    exact, found_by = (
        reference_session.session(each, "its search needs", reference_session.options(quick)) for each in models
    )
    found = _error(
        (reference_session.run(exact, batch), reference_session.run(found_by, batch))
        for batch in chunks(float_model, samples)
    )
    return float(-10 * np.log10(found)) if found > 0 else np.inf


def before_softmax(model: ir.Model) -> ir.Model:
    """A copy whose outputs are what a final Softmax or Sigmoid reads."""
    copy = model.clone()
    for at, value in enumerate(copy.graph.outputs):
        producer = value.producer()
        if producer is not None and producer.op_type in ("Softmax", "Sigmoid") and producer.inputs[0] is not None:
            copy.graph.outputs[at] = producer.inputs[0]
            producer.inputs[0].type, producer.inputs[0].shape = value.type, None
    return copy


def _error(results: Iterable[tuple[Sequence[Array], Sequence[Array]]]) -> float:
    """Squared error of float outputs relative to their squares, the mean of the outputs; results: (wanted, found) of
    every batch.

    What is wanted to be infinite, as a masked input of a Softmax, does not count.
    """
    noise, power = dict[int, float](), dict[int, float]()
    for wanted, found in results:
        for at, (x, y) in enumerate(zip(wanted, found, strict=True)):
            if x.dtype == np.float32:
                x, y = (each[np.isfinite(x)] for each in (x, y))
                noise[at] = noise.get(at, 0.0) + float(np.square(np.subtract(x, y, dtype=np.float64)).sum())
                power[at] = power.get(at, 0.0) + float(np.square(x, dtype=np.float64).sum())
    return float(np.nan_to_num(np.mean([noise[at] / power[at] for at in noise if power[at] > 0] or [0.0]), nan=np.inf))


def _best(
    model: ir.Model, value: ir.Value, observed: TensorRange, symmetric: bool, samples: Sequence[Batch]
) -> TensorRange:
    behind = _behind(model.graph, value)
    made = {each for node in behind for each in node.outputs}
    fed = [
        value,
        *dict.fromkeys(each for node in behind for each in reads(node) if each not in made and each is not value),
    ]
    fed = [each for each in fed if each.is_graph_input() or each.producer() is not None]
    outputs = [each for each in model.graph.outputs if each in made]
    if not outputs:
        return observed
    before = piece(
        model, [each for each in model.graph.inputs if not each.is_initializer()], [*fed, *outputs], quick=True
    )
    rows: list[list[Array]] = []
    for batch in samples:
        if sum(each.nbytes for row in rows for each in row) < MOST:
            rows.append(reference_session.run(before, batch))
    after = piece(model, fed, outputs, rows[0], quick=True)
    names = [str(each.name) for each in fed]

    def measure(share: float) -> float:
        scale, zero = uint8_qparams(share * observed.low, share * observed.high, symmetric)

        def results() -> Iterator[tuple[Sequence[Array], Sequence[Array]]]:
            for row in rows:
                x = (np.clip(np.rint(row[0] / scale) + zero, 0, 255) - zero) * scale
                yield (
                    row[len(fed) :],
                    reference_session.run(
                        after, dict(zip(names, [x.astype(np.float32), *row[1 : len(fed)]], strict=True))
                    ),
                )

        return _error(results())

    least = measure(1.0)
    if least < IDLE:
        return observed
    best = 1.0
    for shares in (NARROWER, WIDER):
        for share in shares:
            found = measure(share)
            if found >= GAIN * least:
                break
            best, least = share, found
        if best != 1.0:
            break
    if best == 1.0:
        return observed
    return replace(observed, low=best * observed.low, high=best * observed.high, method=f"{observed.method} x {best:g}")


def _behind(main: ir.Graph, value: ir.Value) -> list[ir.Node]:
    """The operators that are computed from `value`, in order."""
    made, found = {value}, []
    for node in main:
        if any(each in made for each in reads(node)):
            found.append(node)
            made.update(node.outputs)
    return found
