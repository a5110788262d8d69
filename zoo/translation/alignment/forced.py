"""Teacher-forced passes over given translations: cross-attention and log probabilities of their tokens."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.core.plain import from_plain
from pipelines.engines.catalog import load
from pipelines.engines.native.translation import NativeTranslator
from pipelines.engines.session import Session
from pipelines.models.folder import ModelFolder, derived_graph
from pipelines.models.pipeline import PRECISIONS
from zoo.translation.data.tokens import LOGITS, SOURCE, START, TARGET, Tokens, batch_by_tokens, pad

if TYPE_CHECKING:
    import onnx_ir as ir

ATTENTION = "attention"
FORM = 1  # version of the graphs
MAX_VALUES = 1 << 24  # logits of a batch, in float32
MAX_SENTENCES, MAX_TOKENS = 32, 1024  # of a batch


@dataclass(frozen=True)
class AttentionHeads:
    """The cross-attention that alignments are read from.

    Attributes:
        layer: Number of the decoder layer, negative from the last one; None: the next to last (Garg et al. 2019,
            "Jointly Learning to Align and Translate with Transformer Models", section 4.1).
        heads: Heads whose weights are averaged; (): all.
    """

    layer: int | None = None
    heads: tuple[int, ...] = ()

    def number(self, layers: int) -> int:
        """Returns the number of the layer, from 0 on.

        Args:
            layers: Number of decoder layers with cross-attention.

        Raises:
            RequestError: There is no such layer.
        """
        number = max(layers - 2, 0) if self.layer is None else self.layer
        if not -layers <= number < layers:
            raise RequestError(
                f"found the alignment layer {number}, expected {-layers} to {layers - 1}: a layer of the decoder"
            )
        return number % layers

    @staticmethod
    def from_json(values: Any) -> AttentionHeads:
        """Reads the feature "alignment" of a card.

        Args:
            values: Plain values.

        Returns:
            The heads.

        Raises:
            RequestError: A key is unknown.
        """
        try:
            return AttentionHeads(**from_plain(values))
        except (AttributeError, TypeError) as error:
            raise RequestError(
                f'found "alignment": {values} in card.json, expected {{"layer": N, "heads": [N, ...]}}'
            ) from error


class ForcedDecoder:
    """Computes cross-attention and log probabilities of given translations, in native code or in ONNX Runtime."""

    def __init__(
        self,
        folder: ModelFolder,
        model: Path | None,
        threads: int,
        precision: str,
        vocabulary: int,
        native: NativeTranslator | None = None,
    ) -> None:
        """Remembers the graph; sessions are opened at the first use.

        Args:
            folder: The model folder; the graphs are cached beside their source.
            model: Another ONNX file, or None for that of the folder.
            threads: Number of threads.
            precision: Precision of the folder's graph.
            vocabulary: Number of target tokens.
            native: Computes in place of ONNX Runtime.
        """
        self._folder, self._model, self._threads, self._precision = folder, model, threads, precision
        self._vocabulary, self._native = vocabulary, native
        self._heads = AttentionHeads.from_json(folder.preprocessing.get("alignment", {}))
        self._sessions: dict[str, Session] = {}

    def attention(self, sources: Sequence[Tokens], targets: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        """Computes the attention of target tokens to source tokens.

        Args:
            sources: Source tokens of each sentence, int32.
            targets: Tokens of each translation.

        Returns:
            For each pair float32 [target tokens, source tokens], rows of sum 1: the weights with which the decoder
            reads the source when it writes each token.
        """
        matrices: list[NDArray[np.float32]] = [np.zeros((0, 0), np.float32)] * len(sources)
        chosen = [i for i, target in enumerate(targets) if len(target)]
        if self._native is not None and chosen:
            layer = self._heads.number(self._native.cross_attentions)
            pairs = [sources[i] for i in chosen], [targets[i] for i in chosen]
            computed = self._native.forced_attention(*pairs, start=START, layer=layer, heads=self._heads.heads)
            for i, rows in zip(chosen, computed, strict=True):
                matrices[i] = rows
            return matrices
        for chosen in self._batches(sources, targets, 1):
            weights = self._run(ATTENTION, [sources[i] for i in chosen], [targets[i] for i in chosen])
            for i, rows in zip(chosen, weights, strict=True):
                matrices[i] = rows[: len(targets[i]), : len(sources[i])].copy()
        return matrices

    def scores(
        self,
        sources: Sequence[Tokens],
        targets: Sequence[Sequence[int]],
        allowed: Sequence[NDArray[np.int64]] | None = None,
        excluded: Sequence[int] = (),
    ) -> list[NDArray[np.float64]]:
        """Computes the log probabilities of target tokens.

        Args:
            sources: Source tokens of each sentence, int32.
            targets: Tokens of each translation.
            allowed: Tokens of each sentence that share all probability (shortlist); None: all.
            excluded: Tokens that have no share of the probability.

        Returns:
            For each pair float64 [target tokens].
        """
        logs: list[NDArray[np.float64]] = [np.zeros(0)] * len(sources)
        chosen = [i for i, target in enumerate(targets) if len(target)]
        if self._native is not None and chosen:
            words = [allowed[i].astype(np.int32) for i in chosen] if allowed is not None else None
            pairs = [sources[i] for i in chosen], [targets[i] for i in chosen]
            scores = self._native.forced_scores(*pairs, start=START, words=words, excluded=excluded)
            for i, values in zip(chosen, scores, strict=True):
                logs[i] = values
            return logs
        for chosen in self._batches(sources, targets, self._vocabulary):
            logits = self._run(LOGITS, [sources[i] for i in chosen], [targets[i] for i in chosen])
            for i, rows in zip(chosen, logits, strict=True):
                values = rows[: len(targets[i])].astype(np.float64)
                picked = values[np.arange(len(values)), np.asarray(targets[i], np.int64)]
                values[:, list(excluded)] = -np.inf
                if allowed is not None:
                    values = values[:, allowed[i]]
                largest = values.max(axis=1, initial=-np.inf, keepdims=True)
                logs[i] = picked - np.log(np.exp(values - largest).sum(axis=1)) - largest[:, 0]
        return logs

    def _batches(
        self, sources: Sequence[Tokens], targets: Sequence[Sequence[int]], vocabulary: int
    ) -> Iterator[list[int]]:
        """Yields the numbers of pairs of similar length that are computed together; empty translations are left out."""
        lengths = [max(len(source), len(target)) for source, target in zip(sources, targets, strict=True)]
        order = sorted((i for i, target in enumerate(targets) if len(target)), key=lengths.__getitem__)
        most = max(min(MAX_TOKENS, MAX_VALUES // vocabulary), 1)
        for a, b in batch_by_tokens([lengths[i] for i in order], most, MAX_SENTENCES):
            yield order[a:b]

    def _run(self, kind: str, sources: Sequence[Tokens], targets: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        if kind not in self._sessions:
            self._sessions[kind] = self._open(kind)
        fed = pad([np.array([START, *target[:-1]], np.int32) for target in targets])
        result: NDArray[np.float32] = self._sessions[kind].run({SOURCE: pad(sources), TARGET: fed})[kind]
        return result.reshape(*fed.shape, -1)

    def _open(self, kind: str) -> Session:
        from pipelines.graph import io

        make: Callable[[ir.Model], ir.Model] = (
            all_logits if kind == LOGITS else lambda graph: attention_graph(graph, self._heads)
        )
        if self._model is None:
            form = f"{FORM}.{self._heads.layer}.{'-'.join(map(str, self._heads.heads))}" if kind == ATTENTION else FORM
            path = derived_graph(self._folder, PRECISIONS[self._precision], kind, form, make)
            return load(path, "onnxruntime", self._threads)
        with tempfile.TemporaryDirectory() as scratch:
            path = io.save_mapped(make(io.load(self._model)), Path(scratch) / f"{kind}.onnx", io.PAGE)
            return load(path, "onnxruntime", self._threads)


def attention_graph(model: ir.Model, heads: AttentionHeads) -> ir.Model:
    """Derives the cross-attention of given translations from a frozen graph.

    Args:
        model: What `zoo.translation.export.freeze.export` wrote, as it is, rewritten or quantized.
        heads: Which layer and heads.

    Returns:
        source int64 [n, s] and target int64 [n, t], both padded -> attention float32 [n, t, s].

    Raises:
        RequestError: The graph has no such layer.
    """
    import onnx_ir as ir

    from pipelines.graph import edit
    from pipelines.graph.builder import GraphBuilder

    layers = _cross_attentions(model)
    part = edit.extract(model, [SOURCE, TARGET], [str(layers[heads.number(len(layers))].name)])
    (weights,) = part.graph.outputs
    part.graph.outputs.clear()
    add = GraphBuilder(part.graph, "alignment/", {ATTENTION})
    if heads.heads:
        weights = add("Gather", weights, np.array(heads.heads, np.int64), axis=1)
    mean = add("ReduceMean", weights, [1], keepdims=0)
    mean.name, mean.shape = ATTENTION, ir.Shape(["batch", f"{TARGET}_length", f"{SOURCE}_length"])
    part.graph.outputs.append(mean)
    return part


def all_logits(model: ir.Model) -> ir.Model:
    """Makes the logits of all tokens, not the last one alone, the output of a frozen graph.

    Args:
        model: What `zoo.translation.export.freeze.export` wrote, as it is, rewritten or quantized; it is changed.

    Returns:
        source int64 [n, s] and target int64 [n, t], both padded -> logits float32 [n t, vocabulary].

    Raises:
        RequestError: The graph has another form.
    """
    import onnx_ir as ir

    from pipelines.graph import edit

    lasts = [node for node in model.graph if node.op_type == "GatherND"]
    if len(lasts) != 1:
        raise RequestError(f"found {len(lasts)} operators GatherND, expected that of the last token")
    (last,) = lasts
    flat = edit.node("Flatten", [last.inputs[0]], "all", dtype=last.outputs[0].dtype, axis=2)
    model.graph.insert_before(last, flat)
    last.outputs[0].replace_all_uses_with(flat.outputs[0])
    for value in _after(model, flat.outputs[0]):
        value.shape = None
    (output,) = model.graph.outputs
    output.shape = ir.Shape(["tokens", None])
    return model


def _after(model: ir.Model, value: ir.Value) -> set[ir.Value]:
    """Returns the values that depend on one, itself included."""
    dependent = {value}
    for node in model.graph:
        if any(operand in dependent for operand in node.inputs):
            dependent.update(node.outputs)
    return dependent


def _cross_attentions(model: ir.Model) -> list[ir.Value]:
    """Returns the attention weights [n, heads, t, s] of each cross-attention, in order.

    They are results of a Softmax over products of queries, which depend on the target, with keys, which do not.
    """
    targets = _after(model, next(value for value in model.graph.inputs if value.name == TARGET))
    weights = []
    for node in model.graph:
        if node.op_type != "Softmax" or node.outputs[0] not in targets:
            continue
        scores = node.inputs[0]
        while scores is not None and (producer := scores.producer()) is not None and producer.op_type != "MatMul":
            scores = next((operand for operand in producer.inputs if operand in targets), None)
        if scores is not None and (producer := scores.producer()) is not None and producer.inputs[1] not in targets:
            weights.append(node.outputs[0])
    return weights
