"""Native Transformer: tokens to translations."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipelines.core import machine
from pipelines.core.errors import RequestError, ZooError, one_line
from pipelines.kernels.extension import required
from pipelines.kernels.transformer import native, program_file
from pipelines.kernels.transformer.draft import DraftProgram, build_draft
from pipelines.kernels.transformer.program import DecoderProgram, EncoderProgram

if TYPE_CHECKING:
    import onnx_ir as ir

Translation = tuple[list[int], float]  # tokens without the end, and the score


def store(source: Path, path: Path) -> None:
    """Writes the programs of an ONNX file, for `NativeTranslator`.

    Args:
        source: ONNX file.
        path: File to write.

    Raises:
        RequestError: The graph cannot be mapped.
    """
    program_file.save(path, _mapped(source))


class NativeTranslator:
    """Translates tokens: encoder and beam search over the decoder of a frozen graph, in native code.

    Args:
        path: File that `store` wrote, ONNX file or model.
        threads: Number of batches translated in parallel over one copy of the weights.
        isa: Instruction set, see `kernels`; "": the best of the CPU.

    Attributes:
        longest: Largest number of source tokens.
        positions: Largest number of target tokens.

    Raises:
        RequestError: The graph cannot be mapped, or the kernels are missing.
    """

    def __init__(self, path: str | Path | ir.Model, threads: int = 1, isa: str = "") -> None:
        machine.require_threads(threads)
        packed = isinstance(path, str | Path) and Path(path).suffix == program_file.SUFFIX
        self._programs: Callable[[], tuple[EncoderProgram, DecoderProgram]] = functools.partial(
            program_file.load if packed else _mapped,
            path,  # type: ignore[arg-type]
        )
        encoder, decoder = self._programs()
        self.threads = threads
        self.longest, self.positions = encoder.positions, decoder.positions
        self._decoder = native.compile_program(decoder, isa)
        self._encoder = native.compile_program(encoder, isa, (decoder, self._decoder))

    @property
    def isa(self) -> str:
        """Instruction set in use."""
        return str(self._decoder.isa)

    def share_words(self, words: NDArray[np.int32]) -> None:
        """Computes the logits of common words for all sentences of a batch at once; results do not change.

        Args:
            words: int32 tokens in ascending order, part of the `words` of every sentence.

        Raises:
            RequestError: The words do not fit the vocabulary.
        """
        with _reported():
            self._decoder.share_words(words.tolist())

    def speculation(
        self,
        copies: bool = False,
        draft: DraftProgram | Mapping[str, NDArray[Any]] | None = None,
        costs: tuple[float, float, float] | None = None,
    ) -> Speculation:
        """Prepares speculative decoding: tokens of greedy search are proposed, and the decoder verifies them together.

        Args:
            copies: Whether source tokens are target tokens that may be proposed.
            draft: Small decoder that proposes tokens, or the content of its file; None: no draft.
            costs: Microseconds of a step of one row, of each further row, and of a step of the draft; None: they are
                measured, in a few milliseconds. Tokens are proposed where they save time, as they do in small batches.

        Returns:
            An option of `translate`.

        Raises:
            RequestError: The draft belongs to another decoder.
        """
        if isinstance(draft, Mapping):
            draft = build_draft(draft, self._programs()[1])
        with _reported():
            speculation = native.compile_speculation(self._decoder, copies, draft)
            if costs is None:
                speculation.measure()
            else:
                speculation.assume(costs)
        return Speculation(speculation)

    def translate(
        self,
        sources: Sequence[NDArray[np.int32]],
        limits: Sequence[int] | NDArray[np.int64],
        *,
        start: int,
        end: int | None,
        beam: int = 4,
        best: int = 1,
        length_penalty: float = 1.0,
        slots: int = 32,
        rules: Mapping[str, Any] | None = None,
        words: Sequence[NDArray[np.int32]] | None = None,
        demands: Sequence[Any] | None = None,
        speculation: Speculation | None = None,
    ) -> list[list[Translation]]:
        """Translates sentences by beam search, as `zoo.translation.search.beam_search.beam_search` does.

        The call releases the GIL; Ctrl-C ends it within a step.

        Args:
            sources: Tokens of each sentence, integers [1 to `longest`].
            limits: Largest number of tokens of each translation with its end, at most `positions`.
            start: Start token.
            end: End token; None: every translation reaches its limit.
            beam: Beam size.
            best: Number of translations per sentence.
            length_penalty: Exponent of the length that scores are divided by.
            slots: Sentences in the batch of a thread; the next sentence replaces a finished one. Results do not depend
                on it.
            rules: Values of `zoo.translation.search.config.SearchConfig` that differ from its defaults, but those that
                are options here.
            words: Shortlist of each sentence, int32 in ascending order, with `end`; only their logits are computed.
            demands: `zoo.translation.search.config.Demands` of each sentence; None: none.
            speculation: Result of `speculation`; it makes greedy search faster and changes no result. None: every step
                computes one token of a beam.

        Returns:
            For each sentence its translations, highest score first.

        Raises:
            RequestError: Tokens or options do not fit.
            ZooError: Scores are not finite.
        """
        arrays, last = _arrays(sources, limits), -1 if end is None else end
        others = {**_rules(rules), **_words(words), **_demands(demands), **_speculation(speculation)}
        with _reported():
            translations: list[list[Translation]] = self._decoder.translate(
                self._encoder, *arrays, start, last, beam, best, float(length_penalty), slots, self.threads, **others
            )
        return translations

    def stream(
        self,
        *,
        start: int,
        end: int | None,
        beam: int = 4,
        best: int = 1,
        length_penalty: float = 1.0,
        slots: int = 32,
        rules: Mapping[str, Any] | None = None,
        speculation: Speculation | None = None,
    ) -> TranslationStream:
        """Starts threads that translate sentences as they arrive, with the results of `translate`.

        Args:
            start: Start token.
            end: End token; None: every translation reaches its limit.
            beam: Beam size.
            best: Number of translations per sentence.
            length_penalty: Exponent of the length that scores are divided by.
            slots: Sentences in the batch of a thread.
            rules: See `translate`.
            speculation: See `translate`.

        Returns:
            The stream.

        Raises:
            RequestError: Options do not fit.
        """
        last = -1 if end is None else end
        with _reported():
            native = required().TranslationStream(
                self._decoder,
                self._encoder,
                start,
                last,
                beam,
                best,
                float(length_penalty),
                slots,
                self.threads,
                **_rules(rules),
                **_speculation(speculation),
            )
        return TranslationStream(native)

    def forced_scores(
        self,
        sources: Sequence[NDArray[np.int32]],
        targets: Sequence[Sequence[int]],
        *,
        start: int,
        words: Sequence[NDArray[np.int32]] | None = None,
        excluded: Sequence[int] = (),
    ) -> list[NDArray[np.float64]]:
        """Computes the log probabilities of the tokens of given translations, all tokens of one in a step.

        Args:
            sources: See `translate`.
            targets: Tokens of each translation, 1 to `positions`.
            start: Start token.
            words: Shortlist of each sentence, int32 in ascending order; other tokens have no share of the probability.
            excluded: Tokens that have no share of the probability.

        Returns:
            For each translation float64 [tokens].

        Raises:
            RequestError: Tokens do not fit.
            ZooError: Logits are not finite.
        """
        pairs, lengths = _pairs(sources, targets)
        listed = _words(words)
        shortlists = (listed["words"], listed["word_counts"]) if listed else None
        with _reported():
            scores = self._decoder.forced_scores(self._encoder, *pairs, start, self.threads, [*excluded], shortlists)
        return np.split(scores.ravel(), np.cumsum(lengths)[:-1])

    def forced_attention(
        self,
        sources: Sequence[NDArray[np.int32]],
        targets: Sequence[Sequence[int]],
        *,
        start: int,
        layer: int,
        heads: Sequence[int] = (),
    ) -> list[NDArray[np.float32]]:
        """Computes the weights of a cross-attention for given translations.

        Args:
            sources: See `translate`.
            targets: See `forced_scores`.
            start: Start token.
            layer: Number of the cross-attention, less than `cross_attentions`.
            heads: Heads whose weights are averaged; (): all.

        Returns:
            For each pair float32 [target tokens, source tokens].

        Raises:
            RequestError: Tokens do not fit, or there is no such layer or head.
        """
        pairs, lengths = _pairs(sources, targets)
        with _reported():
            weights = self._decoder.forced_attention(self._encoder, *pairs, start, self.threads, layer, [*heads])
        shapes = [(count, len(source)) for count, source in zip(lengths, sources, strict=True)]
        parts = np.split(weights.ravel(), np.cumsum([a * b for a, b in shapes])[:-1])
        return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]

    @property
    def cross_attentions(self) -> int:
        """Number of decoder layers with cross-attention."""
        return int(self._decoder.cross_attentions)


class Speculation:
    """Proposals of speculative decoding, see `NativeTranslator.speculation`; for searches of any thread."""

    def __init__(self, native: Any) -> None:
        self._native = native

    @property
    def costs(self) -> tuple[float, float, float]:
        """Times in microseconds: a step of one row, each further row, and a step of the draft."""
        costs: tuple[float, float, float] = self._native.costs
        return costs

    @property
    def counts(self) -> tuple[int, int, int]:
        """Totals of all searches: verification steps, proposed tokens, and accepted tokens."""
        counts: tuple[int, int, int] = self._native.counts
        return counts


class TranslationStream:
    """Translates sentences that arrive at any time, from any thread (continuous batching).

    New sentences join the running batch between two steps. See `NativeTranslator.stream`.
    """

    def __init__(self, native: Any) -> None:
        self._native = native

    def submit(
        self,
        sources: Sequence[NDArray[np.int32]],
        limits: Sequence[int] | NDArray[np.int64],
        words: Sequence[NDArray[np.int32]] | None = None,
        demands: Sequence[Any] | None = None,
        prefix: Sequence[int] | None = None,
    ) -> range:
        """Submits sentences.

        Args:
            sources: See `NativeTranslator.translate`.
            limits: See `NativeTranslator.translate`.
            words: See `NativeTranslator.translate`.
            demands: See `NativeTranslator.translate`.
            prefix: Tokens that these translations begin with, such as a target language; None: those of the stream's
                rules.

        Returns:
            Numbers that identify the sentences.

        Raises:
            RequestError: Tokens or limits do not fit.
        """
        with _reported():
            first = self._native.submit(*_arrays(sources, limits), **_words(words), **_demands(demands), first=prefix)
        return range(first, first + len(sources))

    def finished(self, seconds: float) -> list[tuple[int, list[Translation], str]]:
        """Waits for finished sentences and returns each of them once.

        Args:
            seconds: Timeout.

        Returns:
            (number, translations, error or "") of each sentence; empty after the timeout, and at the end of the stream.
        """
        translations: list[tuple[int, list[Translation], str]] = self._native.finished(seconds)
        return translations

    def cancel(self, number: int) -> None:
        """Cancels a sentence.

        Args:
            number: Number of the sentence.
        """
        self._native.cancel(number)

    def close(self) -> None:
        """Ends the threads within a step; unfinished sentences are lost."""
        self._native.close()


def _arrays(sources: Sequence[NDArray[np.int32]], limits: Sequence[int] | NDArray[np.int64]) -> tuple[Any, ...]:
    """Returns tokens, lengths and limits as arrays; raises RequestError for tokens outside of int32."""
    tokens = np.concatenate([np.asarray(ids).ravel() for ids in sources]) if len(sources) else np.zeros(0, np.int32)
    if tokens.dtype != np.int32:  # the kernels check the range of int32 tokens
        if tokens.dtype.kind not in "iu" or (tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < 2**31):
            raise RequestError(
                f"the native translator takes tokens, integers of 32 bits from 0 on; found others, or {tokens.dtype}"
            )
        tokens = tokens.astype(np.int32)
    lengths = np.array([len(ids) for ids in sources], np.int64)
    return tokens, lengths, np.ascontiguousarray(limits, np.int64)


def _pairs(
    sources: Sequence[NDArray[np.int32]], targets: Sequence[Sequence[int]]
) -> tuple[tuple[NDArray[Any], ...], list[int]]:
    """Returns tokens and lengths of sources and targets, and the lengths of the targets."""
    lengths = [len(target) for target in targets]
    tokens = [np.asarray(target, np.int32) for target in targets]
    return (*_arrays(sources, [])[:2], *_arrays(tokens, [])[:2]), lengths


def _rules(rules: Mapping[str, Any] | None) -> dict[str, Any]:
    native = required().SearchRules()
    for name, value in (rules or {}).items():
        setattr(native, name, str(value) if name == "early_stopping" else value)
    return {"rules": native}


def _demands(demands: Sequence[Any] | None) -> dict[str, Any]:
    if demands is None:
        return {}
    marks = next((demand.marks for demand in demands if demand.phrases), None)  # the same of all
    return {"demands": [(demand.prefix, demand.phrases) for demand in demands], "word_marks": marks}


def _words(words: Sequence[NDArray[np.int32]] | None) -> dict[str, Any]:
    if words is None:
        return {}
    counts = np.array([len(shortlist) for shortlist in words], np.int64)
    return {"words": np.concatenate([np.zeros(0, np.int32), *words]), "word_counts": counts}


def _speculation(speculation: Speculation | None) -> dict[str, Any]:
    return {} if speculation is None else {"speculation": speculation._native}


@contextlib.contextmanager
def _reported() -> Iterator[None]:
    """Context that converts exceptions of the kernels to RequestError and ZooError."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise RequestError(f"the native translator cannot translate this: {one_line(error)}") from error
    except RuntimeError as error:
        raise ZooError(one_line(error)) from error


def _mapped(model: str | Path | ir.Model) -> tuple[EncoderProgram, DecoderProgram]:
    """Maps a frozen graph to its programs; imports onnx and onnxruntime, unlike stored programs."""
    from pipelines.graph import io
    from pipelines.kernels.transformer.mapping.from_graph import programs

    return programs(io.load(model) if isinstance(model, str | Path) else model)
