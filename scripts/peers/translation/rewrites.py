"""The gain of each rewrite of translation, in ms per step with it and without it.

MODEL: a trained model, or a size of random weights, as in the comparison `translation`. Both forms of a rewrite run in
turn, one thread (pin it: taskset -c 1), in onnxruntime, exactly `STEPS` steps of sentences of `SOURCE` tokens; medians
of pairs. The search runs as one graph, except in the rows named "in Python": these run `beam_search` over a decoding
step. The step of a decoder without caches is timed at half of the tokens. Sentences of mixed lengths (`MIXED`) have the
same mean number of tokens, and translations of the same length; a step is then one translated token per row of the
batch. No engine removes padding. Its row shows the bound: the encoder alone on a batch of mixed lengths against one of
equal lengths with the same number of tokens, over `STEPS` steps.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

import zoo
from pipelines.core import machine
from pipelines.core.progress import progress
from pipelines.engines.catalog import load
from pipelines.engines.session import Session
from pipelines.graph import edit, io, query
from pipelines.models.folder import ModelFolder, open_folder
from pipelines.models.npz import read_npz
from pipelines.quantization.calibration.calibrate import calibrate
from pipelines.quantization.quantizer import quantize
from pipelines.rewrites.driver import rewrite
from scripts.peers import harness
from scripts.peers.translation.models import RANDOM, copied
from zoo.translation.data.parallel_text import VOCABULARY, Vocabulary
from zoo.translation.data.tokens import END, START, pad
from zoo.translation.export.rewrites import passes
from zoo.translation.search import loop_graph, step_graph
from zoo.translation.search.beam_search import Step, beam_search
from zoo.translation.search.kv_cache import IncrementalModel, cached_step, incremental_model
from zoo.translation.search.sessions import ENCODER

Array = NDArray[Any]
STEPS, SOURCE, MIXED = 30, 20, (8, 32)  # tokens of a translation and of its source; of sources of mixed lengths
BATCHES = 4  # that are sorted together
NEVER = -1  # no token: translations run to their limit
SECONDS = 20.0  # of one row and case, if three repeats are done
PRECISIONS = ("fp32", "int8")
Run = Callable[[int, int], float]  # sentences, beam -> ms a step
Lengths = Callable[[int], list[int]]  # sentences -> tokens of each


class Row(NamedTuple):
    """A rewrite.

    Attributes:
        name: Name of the rewrite.
        on: Run of the form with the rewrite.
        off: Run of the form without the rewrite.
        alone: Whether the rewrite changes a batch of one.
    """

    name: str
    on: Run
    off: Run
    alone: bool = True


# --------------------------------------------------------------------------------------------------------- other forms


def gather_nd(model: IncrementalModel) -> None:
    """Reorders the caches by GatherND."""
    for node in [
        node for node in model.step.graph if node.op_type == "Gather" and str(node.inputs[1].name) == step_graph.PARENTS
    ]:  # type: ignore[union-attr]
        index = edit.node(
            "Unsqueeze", [node.inputs[1], _axes(model)], f"{node.outputs[0].name}.index", dtype=ir.DataType.INT64
        )
        model.step.graph.insert_before(node, index)
        edit.substitute([node], edit.node("GatherND", [node.inputs[0], index.outputs[0]], f"{node.outputs[0].name}"))


def _axes(model: IncrementalModel) -> ir.Value:
    return edit.initializer(model.step.graph, "last_axis", np.array([-1]), query.used_names(model.step.graph))


def copied_source(model: IncrementalModel) -> None:
    """Copies keys and values of the source for every beam."""
    main, inputs = model.step.graph, {str(value.name): value for value in model.step.graph.inputs}
    taken, first = query.used_names(main), next(iter(main))

    def add(op: str, values: list[ir.Value | None], dtype: ir.DataType, **attributes: Any) -> ir.Value:
        node = edit.node(op, values, f"copied/{op}", dtype=dtype, taken=taken, **attributes)
        main.insert_before(first, node)
        return node.outputs[0]

    integer = ir.DataType.INT64
    zero, one = (edit.initializer(main, "copied/constant", np.array(number), taken) for number in (0, 1))
    rows = add("Shape", [inputs[step_graph.TOKENS]], integer, start=0, end=1)
    sentences = add("Shape", [inputs[model.encoder_outputs[0]]], integer, start=0, end=1)
    owners = add("Range", [zero, add("Squeeze", [rows], integer), one], integer)
    owners = add("Div", [owners, add("Div", [rows, sentences], integer)], integer)
    for name in model.encoder_outputs:
        users = [use for use in inputs[name].uses() if not str(use.node.name).startswith("copied/")]
        copied = add("Gather", [inputs[name], owners], inputs[name].dtype or ir.DataType.FLOAT, axis=0)
        for user, index in users:
            user.replace_input_with(index, copied)


def skip_normalization(model: IncrementalModel) -> None:
    """Replaces Add + LayerNormalization of the step by SkipLayerNormalization of onnxruntime.

    onnxruntime does so in the encoder.
    """
    main = model.step.graph
    main.opset_imports["com.microsoft"] = 1
    for norm in [node for node in main if node.op_type == "LayerNormalization"]:
        total = query.producer(norm.inputs[0])
        if (
            total is None
            or total.op_type != "Add"
            or any(getattr(value.producer(), "op_type", "Gather") == "Gather" for value in total.inputs)
        ):
            continue  # a position is one row
        epsilon = norm.attributes.get_float("epsilon", 1e-5)
        inputs = [*total.inputs, *norm.inputs[1:]]
        fused = ir.node("SkipLayerNormalization", inputs, {"epsilon": epsilon}, domain="com.microsoft", num_outputs=4)
        for value, old in ((fused.outputs[0], norm.outputs[0]), (fused.outputs[3], total.outputs[0])):
            value.name, value.type, value.shape = old.name, old.type, old.shape
        fused.outputs[1].name = fused.outputs[2].name = ""
        main.insert_after(norm, fused)
        norm.outputs[0].replace_all_uses_with(fused.outputs[0])
        total.outputs[0].replace_all_uses_with(fused.outputs[3])
        main.remove([norm, total], safe=True)
    main.sort()


def all_normalized(model: IncrementalModel) -> None:
    """Normalizes the logits of all words before top-k."""
    (logits,) = (output for output in model.step.graph.outputs if output.name == step_graph.LOGITS)
    node = edit.node("LogSoftmax", [logits], "log_probabilities", dtype=ir.DataType.FLOAT, axis=-1)
    model.step.graph.append(node)
    model.step.graph.outputs[list(model.step.graph.outputs).index(logits)] = node.outputs[0]
    logits.name, node.outputs[0].name = "step/unnormalized", step_graph.LOGITS


def unmerged(model: IncrementalModel) -> None:
    """Splits the merged layers into one for each of Q, K and V, and for keys and values of the source."""
    for main in (model.step.graph, model.encoder.graph):
        taken = query.used_names(main)
        for split in [node for node in main if node.op_type == "Split"]:
            added = query.producer(split.inputs[0])
            layer = added.inputs[0].producer() if added is not None and added.op_type == "Add" else added
            if added is None or layer is None or layer.op_type not in ("Gemm", "MatMul"):
                continue
            start = 0
            for value, size in zip(split.outputs, query.integers(split, "split", 1) or [], strict=True):
                copied: dict[ir.Value | None, ir.Value] = {layer.inputs[0]: layer.inputs[0]}  # type: ignore[dict-item]
                part = _columns(main, split, added, slice(start, start + size), copied, taken)
                value.replace_all_uses_with(part)
                start += size
            main.remove(split, safe=True)


def _columns(
    main: ir.Graph,
    before: ir.Node,
    node: ir.Node,
    columns: slice,
    copied: dict[ir.Value | None, ir.Value],
    taken: set[str],
) -> ir.Value:
    """Returns the columns of a layer's result, by a copy of `node` and of what it reads before `before`."""
    for value in node.inputs:
        array = query.constant(value)
        if value is None or value in copied:
            continue
        if array is not None:
            part = np.ascontiguousarray(array[..., columns]) if array.ndim else array
            copied[value] = edit.initializer(main, f"{value.name}.part", part, taken)
        else:
            producer = value.producer()
            assert producer is not None
            copied[value] = _columns(main, before, producer, columns, copied, taken)
    inputs = [None if value is None else copied[value] for value in node.inputs]
    made = ir.Node(node.domain, node.op_type, inputs, list(node.attributes.values()), num_outputs=1)
    made.outputs[0].name, made.outputs[0].type = (
        edit.unique(f"{node.outputs[0].name}.part", taken),
        node.outputs[0].type,
    )
    made.name = made.outputs[0].name
    main.insert_before(before, made)
    return made.outputs[0]


def scaled_scores(model: IncrementalModel) -> None:
    """Scales and masks the scores of self-attention in every step."""
    main, taken = model.step.graph, query.used_names(model.step.graph)
    one, zero = (edit.initializer(main, "scaled/constant", np.float32(number), taken) for number in (1, 0))
    for softmax in [node for node in main if node.op_type == "Softmax"]:
        scores = softmax.inputs[0]
        masked = scores is not None and query.is_op(scores.producer(), "Add")
        for op, constant in [("Div", one)] if masked else [("Div", one), ("Add", zero)]:
            node = edit.node(op, [scores, constant], f"scaled/{op}", dtype=ir.DataType.FLOAT, taken=taken)
            main.insert_before(softmax, node)
            scores = node.outputs[0]
        softmax.replace_input_with(0, scores)


@contextlib.contextmanager
def without_gemm() -> Iterator[None]:
    """Lowers layers of a step to MatMul and Add meanwhile."""
    original = step_graph.linear
    with mock.patch.object(
        step_graph, "linear", lambda *arguments, **options: original(*arguments, **{**options, "matrix": False})
    ):
        yield


def without_norm() -> Any:
    """Leaves the log-sum-exp of the likeliest words out meanwhile."""
    return mock.patch.object(loop_graph, "_norm", lambda body, *_: body.constant(0.0))


def unchanged(model: IncrementalModel) -> None:
    """Changes nothing."""


# rewrites of the whole search: name, the change of its graphs that undoes it, what is patched meanwhile
SEARCHES: tuple[tuple[str, Callable[[IncrementalModel], None], Callable[[], Any]], ...] = (
    ("keys and values of the source shared by the beams", copied_source, contextlib.nullcontext),
    ("beams reordered by Gather, not GatherND", gather_nd, contextlib.nullcontext),
    ("Q, K and V merged", unmerged, contextlib.nullcontext),
    ("scale in the weights, no mask in the step", scaled_scores, contextlib.nullcontext),
    ("Reshape before MatMul, fused with its bias", unchanged, without_gemm),
    ("Add + LayerNormalization, not SkipLayerNormalization", skip_normalization, contextlib.nullcontext),
    ("top-k before log-sum-exp", all_normalized, without_norm),
)


# --------------------------------------------------------------------------------------------------------------- forms


class Forms:
    """All forms of one model in one precision."""

    def __init__(self, folder: ModelFolder, precision: str) -> None:
        self.folder, self.precision = folder, precision
        self.whole = self.rewritten()
        self.words = len(Vocabulary.read(folder.verify(VOCABULARY)))

    def rewritten(self) -> ir.Model:
        """Returns the graph in this precision."""
        model = io.load(self.folder.ensure("fp32.onnx"))
        rewrite(model, passes())
        if self.precision == "fp32":
            return model
        samples = read_npz(self.folder.path / "calibration.npz")[0]
        return quantize(model, self.folder.recipe, calibrate(model, samples, "minmax"))[0]

    def opened(self, model: ir.Model) -> Session:
        """Opens a graph in onnxruntime, one thread."""
        return load(self.folder.path / "fp32.onnx", "onnxruntime", 1, self.precision, io.serialized(model))

    def drawn(self, lengths: Sequence[int]) -> Array:
        """Returns sentences of random words, padded."""
        random = np.random.default_rng(0)
        return pad([np.array([*random.integers(END + 1, self.words, length - 1), END]) for length in lengths])

    def session(self, change: Callable[[IncrementalModel], None] = unchanged) -> Session:
        """Opens the beam search as one graph."""
        model = incremental_model(self.whole)
        change(model)
        return self.opened(loop_graph.search(model, NEVER))

    def search(self, session: Session) -> Run:
        """Returns the run of a search on sentences of equal length."""
        return lambda count, beam: self.timed(session, self.drawn([SOURCE] * count), beam, (0, STEPS)) / STEPS

    def timed(self, session: Session, source: Array, beam: int, growth: tuple[int, int]) -> float:
        """Returns the milliseconds of a translation."""
        batch = {"source": source, "beam": np.array([beam]), "best": np.array([1]), "growth": np.array(growth)}
        start = time.perf_counter()
        session.run({**batch, "length_penalty": np.ones(1, np.float32)})
        return 1e3 * (time.perf_counter() - start)

    def python(self, begin: Callable[[Array], Step]) -> Run:
        """Returns the run of the search in Python."""

        def run(count: int, beam: int) -> float:
            source = self.drawn([SOURCE] * count)
            start = time.perf_counter()
            beam_search(begin(source), np.full(count, STEPS), start=START, end=NEVER, beam=beam)
            return 1e3 * (time.perf_counter() - start) / STEPS

        return run

    def of_lengths(self, session: Session, lengths: Lengths, batches: int = 1) -> Run:
        """Returns the run of a search per token of the sources, whose translations have natural lengths.

        Args:
            session: The search.
            lengths: Returns the lengths of so many sources.
            batches: Number of batches whose lengths are drawn together.
        """

        def run(count: int, beam: int) -> float:
            sizes = lengths(count * batches)
            parts = [self.drawn(sizes[start : start + count]) for start in range(0, len(sizes), count)]
            return sum(self.timed(session, source, beam, (1, 0)) for source in parts) * count / sum(sizes)

        return run

    def encoding(self, encoder: Session, lengths: Lengths) -> Run:
        """Returns the run of an encoder on sources of such lengths."""

        def run(count: int, beam: int) -> float:
            source = self.drawn(lengths(count))
            start = time.perf_counter()
            encoder.run({"source": source})
            return 1e3 * (time.perf_counter() - start) / STEPS

        return run

    def recomputed(self, session: Session, encoder: Session) -> Run:
        """Returns the run of a decoder without caches, at half of the target tokens.

        Args:
            session: The decoder.
            encoder: Computes the decoder's inputs from the source, a row a sentence.
        """

        def run(count: int, beam: int) -> float:
            source = self.drawn([SOURCE] * count)
            inputs = {"source": source, **encoder.run({"source": source})}
            batch = {name: np.repeat(array, beam, axis=0) for name, array in inputs.items() if name in session.inputs}
            batch["target"] = np.full((count * beam, STEPS // 2), START)
            start = time.perf_counter()
            session.run(batch)
            return 1e3 * (time.perf_counter() - start)

        return run


def mixed(count: int) -> list[int]:
    """Returns lengths in a random order."""
    lengths = np.linspace(*MIXED, count).round().astype(int)
    return [int(length) for length in np.random.default_rng(1).permutation(lengths)]


def rows(forms: Forms) -> Iterator[Row]:
    """Yields all comparisons; sessions of one comparison alone are not kept."""
    model = incremental_model(forms.whole)
    first, step = forms.opened(model.encoder), forms.opened(model.step)
    in_python = forms.python(lambda source: cached_step(step, first.run({"source": source}), model.caches))
    encoder = forms.opened(edit.extract(forms.whole, *ENCODER))

    naive = forms.opened(edit.extract(forms.whole, ["source", "memory", "target"], ["logits"]))
    yield Row("all caches (in Python)", in_python, forms.recomputed(naive, encoder))
    constants = [*_keys_and_values(forms.whole), "source.mask"]
    decoder = forms.opened(edit.extract(forms.whole, ["target", *constants], ["logits"]))
    of_source = forms.opened(edit.extract(forms.whole, ["source"], constants))
    yield Row("keys and values of self-attention cached (in Python)", in_python, forms.recomputed(decoder, of_source))

    keys = forms.opened(edit.extract(forms.whole, ["memory"], _keys_and_values(forms.whole)))

    def recomputing(source: Array) -> Step:
        memory, cached = encoder.run({"source": source}), cached_step(step, first.run({"source": source}), model.caches)

        def both(tokens: Array, parents: Array) -> Array:
            keys.run(memory)
            return cached(tokens, parents)

        return both

    yield Row("keys and values of the source computed once (in Python)", in_python, forms.python(recomputing))
    session = forms.session()
    whole = forms.search(session)
    yield Row("the search in the graph, not in Python", whole, in_python)
    for name, change, patched in SEARCHES:
        with patched():
            changed = forms.session(change)
        yield Row(name, whole, forms.search(changed))
        del changed

    with mock.patch.object(loop_graph, "ACTIVE_SHARE", (0, 1)):
        staying = forms.session()
    yield Row(
        "finished sentences leave (mixed lengths)",
        forms.of_lengths(session, mixed),
        forms.of_lengths(staying, mixed),
        False,
    )
    in_order = forms.of_lengths(session, lambda count: sorted(mixed(count)), BATCHES)
    unordered = forms.of_lengths(session, mixed, BATCHES)
    yield Row(f"{BATCHES} batches sorted by length (mixed lengths)", in_order, unordered, False)
    without_padding = forms.encoding(encoder, lambda count: [sum(mixed(count)) // count] * count)
    yield Row("padding removed in the encoder (bound)", without_padding, forms.encoding(encoder, mixed), False)


def _keys_and_values(model: ir.Model) -> list[str]:
    """Returns the names of keys and values of the source in a graph that `freeze` wrote."""
    names = [str(value.name) for node in model.graph for value in node.outputs]
    return [name for name in names if re.fullmatch(r"decoder\.\d+\.cross\.(key|value)\.split", name)]


# ------------------------------------------------------------------------------------------------------------- measure


def compare(
    forms: Forms, cases: Sequence[tuple[int, int]], repeats: int, advance: harness.Advance
) -> list[dict[str, Any]]:
    """Times all rows in all cases.

    Args:
        forms: The model.
        cases: Batch sizes and beams.
        repeats: Pairs of each row and case.
        advance: Progress, one a row.

    Returns:
        [{"rewrite", "cases": [{"batch_size", "beam", "on", "off" (median ms a step), "times" (median of off / on of a
        pair)}]}].
    """
    compared = []
    for row in rows(forms):
        results = []
        for count, beam in cases:
            if count == 1 and not row.alone:
                continue
            pairs: list[tuple[float, float]] = []
            begin = time.perf_counter()
            while len(pairs) <= repeats and (len(pairs) < 4 or time.perf_counter() - begin < SECONDS):
                pairs.append((row.on(count, beam), row.off(count, beam)))
            on, off = zip(*pairs[1:], strict=True)  # the first pair warms up
            figures = {"on": harness.median(on, 4)["median"], "off": harness.median(off, 4)["median"]}
            results.append({"batch_size": count, "beam": beam, **figures, "times": harness.ratio(off, on)})
        compared.append({"rewrite": row.name, "cases": results})
        advance(1)
    return compared


def options(parser: harness.Parser) -> None:
    """Adds the options."""
    parser.names("models", "model", None, RANDOM)
    parser.names("--precision", "precision", PRECISIONS)
    parser.numbers("--batch-size", "1,32", "batch sizes")
    parser.numbers("--beam", "1,4", "beam sizes")
    parser.count("--repeats", 9, "pairs of each row and case")
    parser.work()


def measure(args: Any) -> dict[str, Any]:
    """Returns {"models": [{"model", "precision", "rows": `compare`}], "environment"}."""
    names = [*RANDOM, *zoo.names()]
    harness.require_known("model", [name for name in args.models if not Path(name).is_dir()], names)
    cases, pairs = (
        list(itertools.product(*choices)) for choices in ((args.batch_size, args.beam), (args.models, args.precision))
    )
    with harness.folder(args.work) as scratch, progress("timing rewrites", 15 * len(pairs)) as advance:

        def one(pair: tuple[str, str]) -> dict[str, Any]:
            model, precision = pair
            folder = scratch / f"{Path(model).name}-steps" / "model"
            if not folder.is_dir():
                folder.parent.mkdir(parents=True, exist_ok=True)
                copied(model, folder, STEPS)
            forms = Forms(open_folder(folder, zoo.entry), precision)
            return {"model": model, "precision": precision, "rows": compare(forms, cases, args.repeats, advance)}

        facts = machine.environment(threads=1, repeats=args.repeats, steps=STEPS)
        return harness.gather("models", pairs, one, args.output, facts)
