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
from pipelines.data.tokenization import MAX_TOKEN_CHARACTERS
from pipelines.models.line_pipeline import benchmark_samples
from zoo.translation.alignment.results import line_results
from zoo.translation.data.characters import clean_characters
from zoo.translation.data.line_splitting import UNKNOWN_SCRIPT, LineSplitter
from zoo.translation.data.lines import EXAMPLES, Line, Translation, translation_writer
from zoo.translation.data.markup import Markup, read_markup
from zoo.translation.data.parallel_text import decoder_samples
from zoo.translation.data.tokens import PAD, UNKNOWN, Tokens, pad
from zoo.translation.search.beam_search import Hypothesis
from zoo.translation.search.config import Demands
from zoo.translation.search.options import file_options
from zoo.translation.translator import Translator

SORT_WINDOW = 64  # batches of a long file that are sorted by length together

logger = logging.getLogger(__name__)


class TranslationPipeline(Translator):
    """Translates sentences and text files; see `zoo.pipeline`.

    Attributes:
        split_lines: Whether the sentences of a line are translated separately even if the line fits the model.
        target_prefixes: Whether the beginning of its translation follows each line of a file, behind a TAB.
    """

    CALIBRATION: ClassVar[int] = 256
    ON_ERROR: ClassVar[str] = "skip"
    PARTS: ClassVar[str] = "lines"
    split_lines: bool = False
    target_prefixes: bool = False

    def preprocess(self, raw: Any) -> dict[str, NDArray[Any]]:
        """Tokenizes sentences.

        Args:
            raw: A sentence, or an iterable of sentences. Only a `Path` names a file, of a sentence a line.

        Returns:
            {"source": int64 [n, longest]}: tokens with `END` last, padded with `PAD`.

        Raises:
            RequestError: There are no sentences, or one cannot be translated; the message has its number.
        """
        lines = self._lines(raw)
        if faulty := next((line for line in lines if line.fault), None):
            raise RequestError(f"{faulty.where} {faulty.fault}")
        return {"source": pad([line.parts[0] if line.parts else self.vocabulary.encode([""])[0] for line in lines])}

    def __call__(self, raw: Any, **options: Any) -> Any:
        """Translates sentences; a long one is translated in pieces.

        Args:
            raw: See `preprocess`.
            **options: See `with_options`; without any, those of this pipeline.

        Returns:
            Results of `postprocess`. "unmet" names the forced words that a translation does not contain. Where
            characters were left out or text was copied, "untranslated" says which; the
            result of a text that cannot be translated has "error", too.

        Raises:
            RequestError: There are no sentences, or none can be translated.
        """
        if options:
            return self.with_options(**options)(raw)
        lines = self._lines(raw, split=True)
        faulty = next((line for line in lines if line.fault), None)
        if faulty and all(line.fault or not line.pieces for line in lines):
            raise RequestError(f"{faulty.where} {faulty.fault}")
        translated, unmet = self.translate_lines(lines)
        results = []
        for line, translations, missing in zip(lines, self.results(lines, translated), unmet, strict=True):
            first, *others = (translation.columns() for translation in translations)
            more: dict[str, Any] = {"others": others} if others else {}
            if line.notes:
                more["untranslated"] = line.untranslated
            if missing:
                more["unmet"] = missing
            results.append({**first, **more, **({"error": line.fault} if line.fault else {})})
        return results

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

    def _lines(self, raw: Any, split: bool = False) -> list[Line]:
        """Returns the lines of raw input. Raises RequestError if there are none."""
        if isinstance(raw, os.PathLike):
            lines = list(self._read([str(raw)], split))
        else:
            if isinstance(raw, bytes | Mapping) or not isinstance(raw, Iterable):
                raise RequestError(
                    f"found {type(raw).__name__}; expected a text file, a sentence, or a list of sentences"
                )
            texts = [raw] if isinstance(raw, str) else list(raw)
            for i, text in enumerate(texts, 1):
                if not isinstance(text, str):
                    raise RequestError(f"sentence {i} is {type(text).__name__}, expected text")
            lines = self.prefixed([self.line(f"sentence {i}", text, split) for i, text in enumerate(texts, 1)])
        if not lines:
            raise RequestError("found no sentences; give at least one")
        return lines

    def _read(self, inputs: Iterable[str], split: bool = False) -> Iterator[Line]:
        """Yields the lines of text files, plain or .gz, or of stdin ("-")."""
        for name in inputs:
            if name != STDIN and not Path(name).is_file():
                place = f"the folder {name}" if Path(name).is_dir() else f"no file {name}"
                raise RequestError(f"found {place}; expected text, one sentence a line, plain or .gz, or - for stdin")
            for number, text in enumerate(read_lines(name), 1):
                where = f"{'line' if name == STDIN else f'{name}, line'} {number}"
                prefix = str(self.target_prefix)
                if self.target_prefixes and text is not None:
                    text, _, prefix = text.partition("\t")
                yield self.line(where, text, split)._replace(prefix=prefix)

    def line(self, location: str, text: str | None, split: bool = False, max_sentences: int | None = None) -> Line:
        """Tokenizes a line and checks it.

        Args:
            location: Its place, for messages.
            text: The text; None if it is not UTF-8.
            split: Whether the text is translated in pieces where it must be, see `LineSplitter`; else whole or not.
            max_sentences: Maximum number of its sentences; None: any.

        Returns:
            The line.

        Raises:
            RequestError: It has more sentences.
        """
        if text is None:
            return Line(location, "", "is not UTF-8", ())
        if split and self.tag_handling != "none":
            text, notes = clean_characters(text)
            try:
                line = self.marked_line(location, read_markup(text, self.tag_handling), max_sentences)
            except RequestError as error:
                return Line(location, text, str(error), ())
            return line._replace(notes=(*notes, *line.notes))
        if split:
            return self._splitter(max_sentences).line(location, text)
        text, notes = clean_characters(text)
        tokens, fault = self._tokenize(text) if text else (None, "")
        parts = () if fault or tokens is None else (tokens,)
        return Line(location, text, fault, parts, ((),) * len(parts), tuple(notes), texts=(text,) * len(parts))

    def prefixed(self, lines: Sequence[Line]) -> list[Line]:
        """Returns the lines with the texts that their translations begin with.

        Args:
            lines: The lines of texts.

        Raises:
            RequestError: `target_prefix` has another number of texts.
        """
        prefixes = self.target_prefix
        if isinstance(prefixes, str):
            prefixes = (prefixes,) * len(lines)
        if len(prefixes) != len(lines):
            raise RequestError(f"found {len(prefixes)} texts of target-prefix for {len(lines)} sentences")
        return [line._replace(prefix=prefix) for line, prefix in zip(lines, prefixes, strict=True)]

    def demands(self, lines: Sequence[Line]) -> list[Demands] | None:
        """Returns the constraints on the translations of the `parts` of lines; None for no constraints.

        Args:
            lines: The lines.

        Raises:
            RequestError: The vocabulary cannot write a prefix.
        """
        tokens = {text: self.target_tokens(text) for text in {line.prefix for line in lines} if text.strip()}
        if not (tokens or self.forces_words):
            return None
        return [
            self._phrases(
                (*(self.forced_words if not k else ()), *self.glossary.translations(text)),
                part,
                tokens.get(line.prefix, ()) if not k else (),
            )
            for line in lines
            for k, (part, text) in enumerate(zip(line.parts, line.texts, strict=True))
        ]

    def translate_lines(self, lines: Sequence[Line]) -> tuple[list[list[Hypothesis]], list[list[str]]]:
        """Translates the `parts` of lines.

        Args:
            lines: The lines.

        Returns:
            The hypotheses of each part; and for each line the forced words that its best translation does not contain.
        """
        demands = self.demands(lines)
        translated = self.translate([part for line in lines for part in line.parts], demands)
        return translated, unmet_words(lines, demands, [hypotheses[0] for hypotheses in translated])

    def marked_line(self, location: str, markup: Markup, max_sentences: int | None = None) -> Line:
        """Tokenizes a text without its tags and placeholders.

        Args:
            location: Its place, for messages.
            markup: The text and the markup removed from it.
            max_sentences: Maximum number of its sentences; None: any.

        Returns:
            The line.

        Raises:
            RequestError: It has more sentences.
        """
        return self._splitter(max_sentences).line(location, markup.text)._replace(text=markup.text, markup=markup)

    def _splitter(self, most: int | None) -> LineSplitter:
        return LineSplitter(self.vocabulary, self.max_length, self._language(), self.split_lines, most)

    def _language(self) -> str:
        """Returns the language of the text; "" if it is unknown."""
        return self.vocabulary.source_language or str(self.folder.preprocessing.get("languages", "")).partition("-")[0]

    def _tokenize(self, text: str) -> tuple[Tokens, str]:
        """Returns the tokens of a sentence, and the reason why it cannot be translated entirely; "" if it can."""
        if len(text) > MAX_TOKEN_CHARACTERS * self.max_length:
            most = f"has {len(text):,} characters, the model takes {self.max_length} tokens; split it"
            return np.zeros(0, np.int32), most
        tokens = self.vocabulary.encode([text])[0]
        if len(tokens) > self.max_length:
            return tokens, f"has {len(tokens)} tokens, the model takes {self.max_length}; split it"
        unknown = 2 * np.count_nonzero(tokens == UNKNOWN) >= len(tokens) - self.vocabulary.frame
        return tokens, UNKNOWN_SCRIPT if unknown else ""

    def run(
        self,
        inputs: Any,
        output: str | Path,
        on_error: str = "skip",
        *,
        scores: bool = False,
        sentences: bool = False,
        target_prefixes: bool = False,
        **options: Any,
    ) -> dict[str, Any]:
        """Translates text files, one sentence a line, in constant memory and input order; empty lines stay empty.

        A line longer than the model's maximum is split into its sentences, and a sentence longer than it at clauses or
        words; the translations are joined by a space. Controls and private-use characters are left out; words and
        sentences that the vocabulary cannot write are copied; both are counted and named on stderr, as are lines that
        are not UTF-8, which become empty lines.

        Args:
            inputs: A text file or a list of them, plain or .gz, or "-" for stdin.
            output: A text file, or "-" for stdout: a line a translation, after its score and a TAB with `scores`, after
                the line's number and a TAB with `n_best` above 1, before a TAB and its alignment or scores of words if
                asked for. A name that ends with .csv(.gz), .jsonl or .parquet: a table of line (from 1), translation,
                score and these.
            on_error: "skip", or "raise" to stop at the first line that cannot be translated.
            scores: Whether scores are written.
            sentences: Whether every line is split into its sentences.
            target_prefixes: Whether the beginning of its translation follows each line, behind a TAB.
            **options: See `with_options`; a text names the file of a list.

        Returns:
            {"sentences", "skipped" (lines that are not UTF-8 or in an unknown script), "untranslated" (lines of which
            something was left out or copied), "unmet" (number of forced words that translations do not
            contain), "seconds", "sentences_per_second", "tokens_per_second" (of the
            translations), "engine", "precision"}.

        Raises:
            RequestError: No line can be translated, or an option is not possible.
        """
        configured = self.with_options(**file_options(options))
        if not isinstance(configured.target_prefix, str):
            raise RequestError("target-prefix is one text for all lines; --target-prefixes reads one behind each line")
        configured.split_lines, configured.target_prefixes = sentences, target_prefixes
        return configured._run(inputs, output, on_error, scores)

    def _run(self, inputs: Any, output: str | Path, on_error: str, scores: bool) -> dict[str, Any]:
        """Implements `run` with the options of this pipeline."""
        faults, start = Counter[str](), time.perf_counter()
        count: Counter[str] = Counter()
        names = [os.fspath(path) for path in (inputs if isinstance(inputs, list | tuple) else [inputs])]
        options = (scores, self.best > 1, self.alignments, self.word_scores)
        with translation_writer(output, *options) as write, progress("translating lines") as advance:
            lines = self._read(names, split=True)
            while window := list(itertools.islice(lines, SORT_WINDOW * self.batch_size)):
                self.report_errors(((line.where, line.fault) for line in window), faults, on_error)
                translated, unmet = self.translate_lines(window)
                self._log_unmet(window, unmet, count)
                results = self.results(window, translated)
                before = self.first_row + count["lines"]
                numbers = [before + i for i, translations in enumerate(results, 1) for _ in translations]
                write(numbers, list(itertools.chain.from_iterable(results)))
                count["lines"] += len(window)
                count["sentences"] += sum(bool(line.pieces) and not line.fault for line in window)
                self._log_notes(window, count)
                count["tokens"] += sum(len(hypotheses[0].tokens) for hypotheses in translated)
                advance(len(window))
            if faults and not count["sentences"] and not self.in_parts:
                raise RequestError(
                    f"none of {faults.total():,} lines could be translated; expected sentences, one a line, in UTF-8"
                )
        seconds = time.perf_counter() - start
        for kind, total in (("not translated", faults.total()), ("not translated completely", count["untranslated"])):
            if total > self.MAX_WARNINGS:
                logger.warning("%d lines in total were %s", total, kind)
        return {
            "sentences": count["sentences"],
            "skipped": faults.total(),
            "untranslated": count["untranslated"],
            **({"unmet": count["unmet"]} if self.forces_words else {}),
            "seconds": round(seconds, 3),
            "sentences_per_second": round(count["sentences"] / seconds, 2),
            "tokens_per_second": round(count["tokens"] / seconds, 1),
            "engine": self.engine,
            "precision": self.precision,
        }

    def _log_notes(self, lines: Iterable[Line], count: Counter[str]) -> None:
        """Counts lines with omitted or copied text, and logs the first ones."""
        for line in lines:
            if line.notes:
                count["untranslated"] += 1
                if count["untranslated"] <= self.MAX_WARNINGS:
                    logger.warning("%s: %s", line.where, line.untranslated)

    def _log_unmet(self, lines: Iterable[Line], unmet: Iterable[list[str]], count: Counter[str]) -> None:
        """Counts forced words that translations do not contain, and logs the first ones."""
        for line, missing in zip(lines, unmet, strict=True):
            if missing and count["unmet"] < self.MAX_WARNINGS:
                logger.warning("%s: the translation does not contain %s", line.where, ", ".join(missing))
            count["unmet"] += len(missing)

    def results(self, lines: Sequence[Line], translated: Sequence[Sequence[Hypothesis]]) -> list[list[Translation]]:
        """Makes text of translated lines: joins their sentences and copied text.

        Args:
            lines: The lines.
            translated: Hypotheses of the `parts` of all lines, in order.

        Returns:
            The translations of each line, the best first. Their score is the mean of their tokens, ends included.
        """
        return line_results(self, lines, translated)

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
        names = [os.fspath(path) for path in (data if isinstance(data, list | tuple) else [data])]
        lines = list(itertools.islice((line for line in self._read(names) if line.text or line.fault), count))
        self.report_errors(((line.where, line.fault) for line in lines), Counter(), on_error)
        sources = self.vocabulary.encode([line.text for line in lines if not line.fault])
        if not sources:
            raise RequestError(f"found no sentences in {', '.join(names)}; calibration needs some")
        return decoder_samples(sources, [hypotheses[0].tokens for hypotheses in self.translate(sources)])

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


def unmet_words(
    lines: Iterable[Line], demands: Sequence[Demands] | None, translations: Sequence[Hypothesis]
) -> list[list[str]]:
    """Finds forced words that translations do not contain.

    Args:
        lines: The lines.
        demands: What the translations of their parts are to have.
        translations: These translations.

    Returns:
        The words of each line.
    """
    if demands is None:
        return [[] for _ in lines]
    parts = iter(zip(demands, translations, strict=True))
    return [
        [
            text
            for asked, hypothesis in itertools.islice(parts, len(line.parts))
            for text in asked.unmet(hypothesis.tokens)
        ]
        for line in lines
    ]
