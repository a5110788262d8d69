"""Error bound: keeps layers in float32 until int8 changes no result by more than the recipe allows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from pipelines.core.batches import Batch
from pipelines.core.progress import progress
from pipelines.graph import query, reference_session
from pipelines.quantization.calibration.table import CalibrationTable
from pipelines.quantization.qdq import layers
from pipelines.quantization.qdq.scales import Array
from pipelines.quantization.quantizer import clean_up, quantize
from pipelines.quantization.recipe import QuantRecipe

MOVES = ("Slice", "Split", "Gather", "Concat", "Reshape", "Flatten", "Squeeze", "Identity")
OPEN = "it reads an input of the graph, whose range no samples bound"


def within_bound(
    model: ir.Model, recipe: QuantRecipe, table: CalibrationTable, samples: Iterable[Batch]
) -> CalibrationTable:
    """Keeps layers in float32 until int8 changes no value of the first output by more than `recipe.bound`.

    Further outputs of the same shape, as the probabilities of several labels, have the same bound.

    Layers that read columns of the graph's inputs come first, because later samples may exceed the observed range, and
    such layers are small. The layers of most squared error per weight follow, each measured as the only int8 layer.
    Finally the largest of them return to int8 if the bound still holds.

    Args:
        model: Float model.
        recipe: Quantization options.
        table: Calibration table of `model`.
        samples: Batches, array [samples, ...] for every graph input.

    Returns:
        `table` with `keep_float`.
    """
    held, named = list(samples), model.clone()
    clean_up(named)  # names the operators as `quantize` does
    exact = _results(model, held)

    def error(kept: dict[str, str]) -> Array:
        return _results(quantize(model, recipe, replace(table, keep_float=kept))[0], held) - exact

    def within(kept: dict[str, str]) -> bool:
        return bool(np.abs(error(kept)).max() <= recipe.bound)

    kept = open_layers(named)
    if within(kept):
        return replace(table, keep_float=kept)
    report = quantize(model, recipe, replace(table, keep_float=kept))[1]
    names = {operator.name for operator in report.operators if operator.precision == "int8"}
    sizes = {str(node.name): _size(node) for node in _layers(named) if node.name in names}
    alone: dict[str, Array] = {}
    with progress("measuring layers in int8", len(sizes)) as advance:
        for name in sizes:
            alone[name] = error(kept | {other: "float" for other in sizes if other != name})
            advance(1)
    left: dict[str, str] = {}
    for name in sorted(sizes, key=lambda layer: -float((alone[layer] ** 2).sum()) / sizes[layer]):
        left[name] = f"int8 alone moves a result by up to {np.abs(alone[name]).max():.1g} here"
        if within(kept | left):
            break
    for name in sorted(left, key=lambda layer: -sizes[layer]):
        others = {other: why for other, why in left.items() if other != name}
        left = others if within(kept | others) else left
    return replace(table, keep_float=kept | left)


def open_layers(model: ir.Model) -> dict[str, str]:
    """Returns the layers that read only columns of the graph's inputs, with the reason to keep them in float32.

    Args:
        model: Float model whose operators have names.
    """
    return {str(node.name): OPEN for node in _layers(model) if _is_open(node)}


def _results(model: ir.Model, samples: list[Batch]) -> Array:
    """Returns the first output, and those of its shape, for all samples."""
    opened = reference_session.session(model, "its evaluation needs")
    names = {argument.name for argument in opened.get_inputs()}
    batches = ({name: x for name, x in batch.items() if name in names} for batch in samples)
    results = [reference_session.run(opened, batch) for batch in batches]
    return np.concatenate([output.ravel() for first, *others in results for output in (first, *_alike(first, others))])


def _alike(first: Array, others: Sequence[Array]) -> list[Array]:
    return [output for output in others if output.shape == first.shape]


def _layers(model: ir.Model) -> list[ir.Node]:
    """Returns the layers with constant weights."""
    return [
        node for node in model.graph if node.op_type in layers.LAYERS and query.constant(node.inputs[1]) is not None
    ]


def _size(layer: ir.Node) -> int:
    """Returns the number of weights of a layer."""
    weight = query.constant(layer.inputs[1])
    return 0 if weight is None else weight.size


def _is_open(node: ir.Node) -> bool:
    """Whether an operator reads only columns of the graph's inputs."""
    waiting = [node.inputs[0]]
    while waiting:
        value = waiting.pop()
        producer = query.producer(value)
        if producer is not None and producer.op_type in MOVES:
            waiting += producer.inputs if producer.op_type == "Concat" else producer.inputs[:1]
        elif value is None or not value.is_graph_input():
            return False
    return True
