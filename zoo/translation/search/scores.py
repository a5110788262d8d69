"""Scores of given translations in ONNX Runtime: the reference of the validation of native translations."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipelines.core.batches import Batch
from pipelines.engines.native.translation_check import BEAM
from pipelines.engines.native.validation import Expected

if TYPE_CHECKING:
    import onnx_ir as ir


def expected(path: Path, threads: int, start: int, end: int, padding: int, *, optimize: bool = True) -> Expected:
    """Opens encoder and decoding step in ONNX Runtime, as the reference of `translation_check.unvalidated`.

    They skip the Q/DQ pairs that native code skips, and their tables of tokens are rounded to int8 rows, as there.

    Args:
        path: ONNX file.
        threads: Number of threads.
        start: Start token.
        end: End token.
        padding: Padding token.
        optimize: Whether ONNX Runtime optimizes the graphs.

    Returns:
        A function from a batch and outputs of `unvalidated` to {"scores": float64 [n, BEAM + 1]}: the mean log
        probabilities of the tokens, and for greedy search those of the likeliest tokens after the same prefixes.

    Raises:
        RequestError: No decoding step can be derived from the graph.
    """
    from pipelines.engines.onnxruntime import OnnxRuntimeSession
    from pipelines.graph import io
    from zoo.translation.search.kv_cache import cached_step, incremental_model

    model = io.load(path)
    _round_tables(model)
    _skip_qdq(model)
    parts = incremental_model(model)
    _round_tables(parts.step)  # of normalized rows
    encoder, decoder = (
        OnnxRuntimeSession(path, threads, io.serialized(graph), optimize=optimize)
        for graph in (parts.encoder, parts.step)
    )

    def expect(batch: Batch, outputs: Batch) -> dict[str, NDArray[Any]]:
        tokens = outputs["tokens"].reshape(-1, outputs["tokens"].shape[-1])
        rows = np.arange(len(tokens))
        step = cached_step(decoder, encoder.run({"source": np.repeat(batch["source"], BEAM + 1, axis=0)}), parts.caches)
        scores, fed = np.zeros(len(tokens)), np.full(len(tokens), start)
        for chosen in tokens.T:
            if (chosen == padding).all():
                break
            logits = step(fed, rows).astype(np.float64)
            if "words" in batch:
                logits[~np.repeat(batch["words"], BEAM + 1, axis=0)] = -np.inf
            logits -= logits.max(axis=1, keepdims=True)
            likely = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
            greedy = np.delete(likely, padding, axis=1).max(axis=1)
            values = np.where(rows % (BEAM + 1) == BEAM, greedy, likely[rows, chosen])
            scores += np.where(chosen == padding, 0, values)
            fed = np.where(chosen == padding, end, chosen)
        return {"scores": (scores / (tokens != padding).sum(axis=1)).reshape(outputs["tokens"].shape[:2])}

    return expect


def _round_tables(model: ir.Model) -> None:
    """Rounds float tables of tokens to int8 with a scale a row, as `GraphMapper` does for native code."""
    import onnx_ir as ir

    from pipelines.quantization.qdq.scales import weight_qparams

    for node in model.graph:
        if node.op_type != "Gather" or node.inputs[0] is None or node.inputs[0].const_value is None:
            continue
        table = node.inputs[0].const_value.numpy()
        if table.ndim == 2 and table.dtype.kind == "f":
            scale, integers = weight_qparams(table.astype(np.float32), 0)
            rounded = integers.astype(np.float32) * scale.reshape(-1, 1)
            value = ir.Value(name=f"{node.inputs[0].name}.rounded.{node.outputs[0].name}")
            value.const_value = ir.tensor(rounded, name=value.name)
            value.shape, value.dtype = ir.Shape(rounded.shape), ir.DataType.FLOAT
            model.graph.initializers.add(value)
            node.replace_input_with(0, value)


def _skip_qdq(model: ir.Model) -> None:
    """Removes Q/DQ pairs within activations that are written as several operators, as `GraphMapper` does."""
    from pipelines.kernels.transformer.mapping.activations import ELEMENTWISE

    for node in list(model.graph):
        if node.op_type != "DequantizeLinear" or node.inputs[0] is None:
            continue
        quantize, uses = node.inputs[0].producer(), list(node.outputs[0].uses())
        if quantize is None or quantize.op_type != "QuantizeLinear":
            continue
        if all(use.node.op_type in ELEMENTWISE for use in uses):
            for use in uses:
                use.node.replace_input_with(use.idx, quantize.inputs[0])
