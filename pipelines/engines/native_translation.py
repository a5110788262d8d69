"""The native Transformer for users: tokens to translations."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipelines.core import machine
from pipelines.core.errors import RequestError, ZooError, one_line
from pipelines.kernels.extension import required
from pipelines.kernels.transformer import native, program_file
from pipelines.kernels.transformer.program import DecoderProgram, EncoderProgram

if TYPE_CHECKING:
    import onnx_ir as ir

Translation = tuple[list[int], float]  # tokens without the end, and the score


def store(source: Path, path: Path) -> None:
    """Write the programs of an ONNX file to `path`, for `NativeTranslator`. Raises RequestError for a graph that cannot
    be mapped.
    """
    program_file.save(path, _mapped(source))


class NativeTranslator:
    """Translates tokens: encoder and beam search over the decoder of a frozen graph, in native code (see
    `transformer`).

    path: a file that `store` wrote, an ONNX file or a model. threads: so many batches are translated side by side, over
    one copy of the weights. isa: see `kernels`. Raises RequestError for a graph that cannot be mapped, or without
    kernels.
    """

    def __init__(self, path: str | Path | ir.Model, threads: int = 1, isa: str = "") -> None:
        machine.require_threads(threads)
        known = isinstance(path, str | Path) and Path(path).suffix == program_file.SUFFIX
        encoder, decoder = program_file.load(path) if known else _mapped(path)  # type: ignore[arg-type]
        self.threads = threads
        self.longest, self.positions = encoder.positions, decoder.positions
        self._decoder = native.compile_program(decoder, isa)
        self._encoder = native.compile_program(encoder, isa, (decoder, self._decoder))

    @property
    def isa(self) -> str:
        """The instruction set in use."""
        return str(self._decoder.isa)

    def share_words(self, words: NDArray[np.int32]) -> None:
        """Get ready for sentences whose `words` have all of these, int32, in order: their logits are computed for all
        sentences of a batch at once. Results stay those of each sentence alone. Raises RequestError for words that do
        not fit.
        """
        with _reported():
            self._decoder.share_words(words.tolist())

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
    ) -> list[list[Translation]]:
        """The `best` translations of each sentence, the highest score first, as
        `zoo.translation.search.beam_search.beam_search`
        finds them.

        sources: tokens of each, integers [1 to `longest`]. limits: most tokens of each translation, its end included,
        at most `positions`. end: None lets all go on to their limit. slots: sentences in the batch of a thread; one
        that is done leaves it, the next one, in the order given, takes its place: results depend on neither. rules:
        kind, early_stopping, prefix, banned, least, forced_end, no_repeat_ngram and word_penalty of
        `zoo.translation.search.beam_search.Rules`, where they are not its defaults. words: of each sentence the tokens
        that its
        translation may have, int32, in order, `end` among them: only their logits are computed. Python runs on
        meanwhile; Ctrl-C ends it within a step. Raises RequestError for tokens or options that do not fit, ZooError for
        results that are no numbers.
        """
        arrays, last = _arrays(sources, limits), -1 if end is None else end
        others = {**_rules(rules), **_words(words)}
        with _reported():
            found: list[list[Translation]] = self._decoder.translate(
                self._encoder, *arrays, start, last, beam, best, float(length_penalty), slots, self.threads, **others
            )
        return found

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
    ) -> TranslationStream:
        """Threads that translate sentences as they come, with the options of `translate` and its results."""
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
            )
        return TranslationStream(native)


class TranslationStream:
    """Translates sentences that come at any time, from any thread: they join the batch of those under way between two
    steps. See `NativeTranslator.stream`.
    """

    def __init__(self, native: Any) -> None:
        self._native = native

    def submit(
        self,
        sources: Sequence[NDArray[np.int32]],
        limits: Sequence[int] | NDArray[np.int64],
        words: Sequence[NDArray[np.int32]] | None = None,
    ) -> range:
        """Give it sentences, see `NativeTranslator.translate`; returns the numbers that name them."""
        with _reported():
            first = self._native.submit(*_arrays(sources, limits), **_words(words))
        return range(first, first + len(sources))

    def finished(self, seconds: float) -> list[tuple[int, list[Translation], str]]:
        """The sentences that are done and were not told yet: number, translations, and what went wrong, "" where
        nothing did. Waits for one so long; none come back at the end of that time, and of the stream.
        """
        found: list[tuple[int, list[Translation], str]] = self._native.finished(seconds)
        return found

    def cancel(self, number: int) -> None:
        """Compute a sentence no further."""
        self._native.cancel(number)

    def close(self) -> None:
        """End its threads within a step; sentences under way are lost."""
        self._native.close()


def _arrays(sources: Sequence[NDArray[np.int32]], limits: Sequence[int] | NDArray[np.int64]) -> tuple[Any, ...]:
    """Tokens, lengths and limits. Raises RequestError for others than integers of 32 bits."""
    tokens = np.concatenate([np.asarray(each).ravel() for each in sources]) if len(sources) else np.zeros(0, np.int32)
    if tokens.dtype != np.int32:  # of those the kernels check the range
        if tokens.dtype.kind not in "iu" or (tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < 2**31):
            raise RequestError(
                f"the native translator takes tokens, integers of 32 bits from 0 on; found others, or {tokens.dtype}"
            )
        tokens = tokens.astype(np.int32)
    lengths = np.array([len(each) for each in sources], np.int64)
    return tokens, lengths, np.ascontiguousarray(limits, np.int64)


def _rules(rules: Mapping[str, Any] | None) -> dict[str, Any]:
    others = dict(rules or {})
    if "early_stopping" in others:
        others["early_stopping"] = str(others["early_stopping"])
    return others


def _words(words: Sequence[NDArray[np.int32]] | None) -> dict[str, Any]:
    if words is None:
        return {}
    counts = np.array([len(each) for each in words], np.int64)
    return {"words": np.concatenate([np.zeros(0, np.int32), *words]), "word_counts": counts}


@contextlib.contextmanager
def _reported() -> Iterator[None]:
    """What the kernels raise, as errors of ours."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise RequestError(f"the native translator cannot translate this: {one_line(error)}") from error
    except RuntimeError as error:
        raise ZooError(one_line(error)) from error


def _mapped(model: str | Path | ir.Model) -> tuple[EncoderProgram, DecoderProgram]:
    """The programs of a frozen graph. Needs onnx and onnxruntime, which a stored one does not."""
    from pipelines.graph import io
    from pipelines.kernels.transformer.mapping.from_graph import programs

    return programs(io.load(model) if isinstance(model, str | Path) else model)
