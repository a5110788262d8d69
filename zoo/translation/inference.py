"""Translation pipeline: sentences or text files to translations."""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.core.progress import progress
from pipelines.data.text_files import STDIN, read_lines
from pipelines.models.line_pipeline import benchmark_samples
from zoo.translation.data.lines import EXAMPLES, Line, translation_writer
from zoo.translation.data.parallel_text import (
    PAD,
    UNKNOWN,
    Tokens,
    character_error,
    decoder_samples,
    normalize_whitespace,
    pad,
)
from zoo.translation.data.sentence_splitting import split_sentences
from zoo.translation.search.beam_search import Hypothesis
from zoo.translation.translator import Translator

SORT_WINDOW = 64  # batches of a long file that are sorted by length together
MAX_TOKEN_CHARACTERS = 100  # longer sentences, times the maximum number of tokens, are refused unseen

logger = logging.getLogger(__name__)


class TranslationPipeline(Translator):
    """Translates sentences and text files; see `zoo.pipeline`.

    Attributes:
        split_lines: Whether the sentences of a line are translated separately even if the line fits the model.
    """

    CALIBRATION: ClassVar[int] = 256
    ON_ERROR: ClassVar[str] = "skip"
    PARTS: ClassVar[str] = "lines"
    split_lines: bool = False

    def preprocess(self, raw: Any) -> dict[str, NDArray[Any]]:
        """Tokenizes sentences.

        Args:
            raw: A sentence, or an iterable of sentences. Only a `Path` names a file, of a sentence a line.

        Returns:
            {"source": int64 [n, longest]}: tokens with `END` last, padded with `PAD`.

        Raises:
            RequestError: There are no sentences, or one cannot be translated; the message has its number.
        """
        if isinstance(raw, os.PathLike):
            found = list(self._read([str(raw)]))
        else:
            if isinstance(raw, bytes | Mapping) or not isinstance(raw, Iterable):
                raise RequestError(
                    f"found {type(raw).__name__}; expected a text file, a sentence, or a list of sentences"
                )
            texts = [raw] if isinstance(raw, str) else list(raw)
            for i, each in enumerate(texts, 1):
                if not isinstance(each, str):
                    raise RequestError(f"sentence {i} is {type(each).__name__}, expected text")
            found = [self.line(f"sentence {i}", each) for i, each in enumerate(texts, 1)]
        if not found:
            raise RequestError("found no sentences; give at least one")
        if faulty := next((each for each in found if each.fault), None):
            raise RequestError(f"{faulty.where} {faulty.fault}")
        return {"source": pad([each.parts[0] if each.parts else self.vocabulary.encode([""])[0] for each in found])}

    def postprocess(self, out: dict[str, NDArray[Any]]) -> list[dict[str, Any]]:
        """Converts outputs of `predict` to text.

        Args:
            out: {"tokens": int64 [n, best, t], "scores": float32 [n, best]}.

        Returns:
            {"translation", "score"} of each sentence; with `best` above 1 also "others", the same of the further ones.
        """
        results = []
        for tokens, scores in zip(out["tokens"], out["scores"].tolist(), strict=True):
            texts = self.vocabulary.decode([row[row != PAD].tolist() for row in tokens])
            first, *others = ({"translation": text, "score": score} for text, score in zip(texts, scores, strict=True))
            results.append({**first, "others": others} if others else first)
        return results

    # ------------------------------------------------------------------------------------------------------------- text

    def _read(self, inputs: Iterable[str], split: bool = False) -> Iterator[Line]:
        """Yields the lines of text files, plain or .gz, or of stdin ("-")."""
        for name in inputs:
            if name != STDIN and not Path(name).is_file():
                raise RequestError(
                    f"found no file {name}; expected text, one sentence a line, plain or .gz, or - for stdin"
                )
            for number, text in enumerate(read_lines(name), 1):
                yield self.line(f"{'line' if name == STDIN else f'{name}, line'} {number}", text, split)

    def line(self, where: str, text: str | None, split: bool = False) -> Line:
        """Tokenizes a line and checks it.

        Args:
            where: Its place, for messages.
            text: The text; None if it is not UTF-8.
            split: Whether a text that is too long is split into its sentences.

        Returns:
            The line.
        """
        if text is None:
            return Line(where, "", "is not UTF-8", ())
        text = normalize_whitespace(text)
        if not text or (foreign := character_error(text)):
            return Line(where, text, foreign if text else "", ())
        tokens, fault = self._tokenize(text)
        parts = (tokens,)
        if split and (fault or self.split_lines) and len(sentences := split_sentences(text, self._language())) > 1:
            parts, faults = zip(*map(self._tokenize, sentences), strict=True)
            fault = next((f"holds a sentence that {why}" for why in faults if why), "")
        return Line(where, text, fault, () if fault else parts)

    def _language(self) -> str:
        """Returns the language of the text; "" if it is unknown."""
        return self.vocabulary.source_language or str(self.folder.preprocessing.get("languages", "")).partition("-")[0]

    def _tokenize(self, text: str) -> tuple[Tokens, str]:
        """Returns the tokens of a sentence, and the reason why it cannot be translated; "" if it can."""
        if len(text) > MAX_TOKEN_CHARACTERS * self.max_length:
            most = f"has {len(text):,} characters, the model takes {self.max_length} tokens; split it"
            return np.zeros(0, np.int32), most
        tokens = self.vocabulary.encode([text])[0]
        if len(tokens) > self.max_length:
            return tokens, f"has {len(tokens)} tokens, the model takes {self.max_length}; split it"
        unknown = 2 * np.count_nonzero(tokens == UNKNOWN) >= len(tokens) - self.vocabulary.frame
        return tokens, "is in a script or language that the model does not know" if unknown else ""

    def run(
        self,
        inputs: Any,
        output: str | Path,
        on_error: str = "skip",
        *,
        beam: int | None = None,
        n_best: int = 1,
        scores: bool = False,
        source_language: str | None = None,
        target_language: str | None = None,
        max_tokens: int | None = None,
        sentences: bool = False,
        no_repeat_ngram: int | None = None,
        length_penalty: float | None = None,
    ) -> dict[str, Any]:
        """Translates text files, one sentence a line, in constant memory and input order; empty lines stay empty.

        A line longer than the model's maximum is split into its sentences; their translations are joined by a space.
        Lines that cannot be translated (not UTF-8, control characters, a sentence too long, an unknown script) become
        empty lines and are named on stderr.

        Args:
            inputs: A text file or a list of them, plain or .gz, or "-" for stdin.
            output: A text file, or "-" for stdout: a line a translation, after its score and a TAB with `scores`, after
                the line's number and a TAB with `n_best` above 1. A name that ends with .csv(.gz), .jsonl or .parquet:
                a table of line (from 1), translation and score.
            on_error: "skip", or "raise" to stop at the first line that cannot be translated.
            beam: Beam size; None: the model's.
            n_best: Number of translations of each line, at most the beam.
            scores: Whether scores are written.
            source_language: Source language of a multilingual model.
            target_language: Target language of a multilingual model.
            max_tokens: Maximum length of a translation.
            sentences: Whether every line is split into its sentences.
            no_repeat_ngram: No n-gram of this size occurs twice, 0: no restriction; None: the model's.
            length_penalty: A score is the sum of log probabilities / length ** length_penalty; None: the model's.

        Returns:
            {"sentences", "skipped", "seconds", "sentences_per_second", "tokens_per_second" (of the translations),
            "engine", "precision"}.

        Raises:
            RequestError: No line can be translated, or an option is not possible.
        """
        configured = self.with_options(
            beam=beam,
            n_best=n_best,
            source_language=source_language,
            target_language=target_language,
            max_tokens=max_tokens,
            no_repeat_ngram=no_repeat_ngram,
            length_penalty=length_penalty,
        )
        configured.split_lines = sentences
        return configured._run(inputs, output, on_error, scores)

    def _run(self, inputs: Any, output: str | Path, on_error: str, scores: bool) -> dict[str, Any]:
        """Implements `run` with the options of this pipeline."""
        faults, start = Counter[str](), time.perf_counter()
        count: Counter[str] = Counter()
        names = [os.fspath(each) for each in (inputs if isinstance(inputs, list | tuple) else [inputs])]
        with translation_writer(output, scores, self.best > 1) as write, progress("translating lines") as advance:
            found = self._read(names, split=True)
            while window := list(itertools.islice(found, SORT_WINDOW * self.batch_size)):
                self._report_errors(((line.where, line.fault) for line in window), faults, on_error)
                translated = self.translate([part for each in window for part in each.parts])
                ends = list(itertools.accumulate(len(each.parts) for each in window))
                before = self.first_row + count["lines"]
                rows = [
                    (before + i, *self.join_sentences([each[k] for each in translated[end - len(line.parts) : end]]))
                    for i, (line, end) in enumerate(zip(window, ends, strict=True), 1)
                    for k in range(self.best)
                ]
                write(*(list(column) for column in zip(*rows, strict=True)))
                count["lines"] += len(window)
                count["sentences"] += sum(bool(each.parts) for each in window)
                count["tokens"] += sum(len(each[0].tokens) for each in translated)
                advance(len(window))
            if faults and not count["sentences"] and not self.in_parts:
                raise RequestError(
                    f"none of {faults.total():,} lines could be translated; expected sentences, one a line, in UTF-8"
                )
        seconds = time.perf_counter() - start
        if faults.total() > self.MAX_WARNINGS:
            logger.warning("%d lines in all were not translated", faults.total())
        return {
            "sentences": count["sentences"],
            "skipped": faults.total(),
            "seconds": round(seconds, 3),
            "sentences_per_second": round(count["sentences"] / seconds, 2),
            "tokens_per_second": round(count["tokens"] / seconds, 1),
            "engine": self.engine,
            "precision": self.precision,
        }

    def join_sentences(self, parts: Sequence[Hypothesis]) -> tuple[str, float]:
        """Joins the translated sentences of a line.

        Args:
            parts: A hypothesis of each sentence.

        Returns:
            The text, and the mean score of its tokens, ends included.
        """
        lengths = [len(each.tokens) + 1 for each in parts]
        score = sum(each.score * length for each, length in zip(parts, lengths, strict=True)) / max(sum(lengths), 1)
        return " ".join(self.vocabulary.decode([each.tokens for each in parts])), score

    def calibration(self, data: Any, count: int, on_error: str = "raise") -> dict[str, NDArray[Any]]:
        """Translates lines and returns the decoder's inputs, see `decoder_samples`.

        Args:
            data: Text files.
            count: Number of lines.
            on_error: "raise" to stop at the first line that cannot be translated, "skip" to leave it out.

        Returns:
            {"source", "target"}: int64 [n, tokens].

        Raises:
            RequestError: There are no sentences.
        """
        names = [os.fspath(each) for each in (data if isinstance(data, list | tuple) else [data])]
        found = list(itertools.islice((each for each in self._read(names) if each.text or each.fault), count))
        self._report_errors(((line.where, line.fault) for line in found), Counter(), on_error)
        sources = self.vocabulary.encode([each.text for each in found if not each.fault])
        if not sources:
            raise RequestError(f"found no sentences in {', '.join(names)}; calibration needs some")
        return decoder_samples(sources, [each[0].tokens for each in self.translate(sources)])

    def example(self, count: int, data: str | Path | None = None) -> list[str]:
        """Returns sentences for a benchmark.

        Args:
            count: Number of sentences; repeated if there are too few.
            data: A text file; None for English examples.

        Returns:
            The sentences.

        Raises:
            RequestError: The file holds no sentences.
        """
        lines = self._read([os.fspath(data)] if data is not None else [])
        valid = (line.text for line in itertools.islice(lines, count) if line.text and not line.fault)
        return benchmark_samples(EXAMPLES, valid, data, "sentences", count)
