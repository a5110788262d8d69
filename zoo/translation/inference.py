"""Translation pipeline: sentences or text files to translations."""

from __future__ import annotations

import copy
import itertools
import logging
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from pipelines.core import machine
from pipelines.core.batches import Batch, whole_number
from pipelines.core.errors import RequestError
from pipelines.core.progress import progress
from pipelines.data.text_files import STDIN, read_lines
from pipelines.engines.native.translation import NativeTranslator, TranslationStream, store
from pipelines.engines.session import BF16, Session
from pipelines.kernels import extension
from pipelines.kernels.transformer import program_file
from pipelines.models.folder import ModelFolder
from pipelines.models.pipeline import PRECISIONS, Pipeline
from pipelines.models.stages import derived
from zoo.translation.data.lines import EXAMPLES, Line, translation_writer
from zoo.translation.data.parallel_text import (
    END,
    PAD,
    POSITIONS,
    START,
    UNKNOWN,
    Tokens,
    by_tokens,
    decoder_samples,
    padded,
    strange,
    tidy,
)
from zoo.translation.data.sentence_splitting import split_sentences
from zoo.translation.data.text_files import SHOWN, Faults
from zoo.translation.data.vocabularies import open_vocabulary
from zoo.translation.search.beam_search import GROWTH, Hypothesis, Rules, beam_search, hypotheses, naive_step, require
from zoo.translation.search.shortlist import Shortlist

if TYPE_CHECKING:  # onnx, which the native engine does not need
    from zoo.translation.search.step_graph import Cache
from zoo.translation.search.sessions import is_int8, search_session, split_sessions, step_sessions

AVERAGE = 32  # tokens: a batch has no more of them, with padding, than this for each of its sentences
AT_ONCE = 64  # batches that are sorted together in a long file
CHARACTERS = 100  # a token has fewer: what is longer than that for the model's maximum is not looked at
SLOTS = 65536  # most sentences in a batch of the native translator
LONGEST_NAME = 255  # characters; what is longer is no path

logger = logging.getLogger(__name__)


class TranslationPipeline(Pipeline):
    """Translates sentences; see `zoo.pipeline`.

    The engine "native" computes int8 in native code; "auto" takes it where the kernels are built, else onnxruntime, and
    for bf16 OpenVINO. A batch has at most `batch_size` sentences, fewer where they are long.

    Attributes:
        beam: Beam size; 1 is greedy search.
        best: Number of translations of each sentence.
        length_penalty: 0 to 1, see `zoo.translation.search.beam_search.beam_search`.
        apart: Whether the sentences of a line are translated separately even if the line fits the model.
    """

    BATCH_SIZE: ClassVar[int] = 32
    CALIBRATION: ClassVar[int] = 256
    ON_ERROR: ClassVar[str] = "skip"
    PARTS: ClassVar[str] = "lines"
    ENGINES: ClassVar[tuple[str, ...]] = ("onnxruntime", "native")  # that `zoo benchmark` times unless told
    TUNED: ClassVar[tuple[str, ...]] = ("native", "onnxruntime") if extension.isas() else ("onnxruntime",)
    beam: int = 4
    best: int = 1
    length_penalty: float = 1.0
    apart: bool = False  # the sentences of a line are translated one by one, even where the model takes them at once

    def __init__(self, folder: ModelFolder, *arguments: Any, **options: Any) -> None:
        self.rules = Rules.from_json(folder.preprocessing.get("search", {}))
        self.beam, self.length_penalty = self.rules.beam, self.rules.length_penalty
        super().__init__(folder, *arguments, **options)
        self.vocabulary = open_vocabulary(folder.path, folder.preprocessing, folder.verify)
        self.max_length = int(folder.preprocessing["max_length"])
        self.shortlist: Shortlist | None = None
        if name := folder.preprocessing.get("shortlist"):
            self.shortlist = Shortlist.from_bytes(folder.verify(name).read_bytes())
            if self._native is not None and self.shortlist.first:
                self._native.share_words(self.shortlist.everywhere.astype(np.int32))
        self.positions = (folder.preprocessing.get("form", {}).get("positions") or [POSITIONS])[-1]

    def _open(self, engine: str, model: Path | None) -> None:
        """The native translator; else the beam search in one graph, where engine and decoder have that; else sessions
        of the naive graph.
        """
        self._search_session: Session | None = None
        self._native: NativeTranslator | None = None
        self._stepping: tuple[Session, Session, list[Cache]] | None = None
        self._engine = engine if engine != "auto" else "openvino" if self.precision == BF16 else "onnxruntime"
        if engine == "native" or (engine == "auto" and self.precision == "int8" and model is None and extension.isas()):
            try:
                self._native = self._translator(model)
                self._engine = "native"
                machine.trim()
                return
            except RequestError as error:
                if engine == "native" and model is None:
                    raise
                if model is None:
                    self.folder.ensure(PRECISIONS[self.precision])  # what is missing there is missing in any engine
                self._engine = "onnxruntime"
                logger.warning("%s; onnxruntime translates instead", error)
        own = self.rules.own and "shortlist" not in self.folder.preprocessing
        if not own and self._engine == "onnxruntime":
            self._stepping = step_sessions(self.folder, model, self._engine, self.threads, self.precision)
            machine.trim()
            return
        if self._engine == "onnxruntime":
            try:
                self._search_session = search_session(self.folder, model, self._engine, self.threads, self.precision)
                machine.trim()
                return
            except RequestError as error:
                logger.warning("%s; all tokens are computed anew in every step, which takes many times as long", error)
        path = model or self.folder.ensure(PRECISIONS[self.precision])
        self._encoder, self._decoder = split_sessions(path, self._engine, self.threads, self.precision)

    def _translator(self, model: Path | None) -> NativeTranslator:
        """The native translator. Raises RequestError for a graph that it cannot map, a float one among them."""
        if model is None:
            source = PRECISIONS[self.precision]
            model = derived(self.folder, source, "native", program_file.VERSION, store, program_file.SUFFIX)
        elif not is_int8(model):
            raise RequestError(f"the native kernels compute int8, and {model.name} is float")
        return NativeTranslator(model, self.threads)

    @property
    def engine(self) -> str:
        """The engine in use."""
        return self._engine

    @property
    def input_ports(self) -> dict[str, tuple[np.dtype[Any], Sequence[int | None]]]:
        """One input: source, int64 [n, longest]."""
        return {"source": (np.dtype(np.int64), (None, None))}

    def preprocess(self, raw: Any) -> dict[str, NDArray[Any]]:
        """Tokenizes sentences.

        Args:
            raw: A text file of a sentence a line (a path, or a str where that file exists), a sentence, or a list of
                sentences.

        Returns:
            {"source": int64 [n, longest]}: tokens with `END` last, padded with `PAD`.

        Raises:
            RequestError: There are no sentences, or one cannot be translated; the message has its number.
        """
        if isinstance(raw, str) and len(raw) < LONGEST_NAME and Path(raw).is_file():
            raw = Path(raw)
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
        return {"source": padded([each.parts[0] if each.parts else self.vocabulary.encode([""])[0] for each in found])}

    def predict(self, batch: Batch) -> dict[str, NDArray[Any]]:
        """Translates tokens.

        Args:
            batch: {"source": int64 [n, s]}, padded with `PAD`.

        Returns:
            {"tokens": int64 [n, best, t], padded with `PAD`, "scores": float32 [n, best]}, the best first. A score is
            the mean log probability of a token for a length penalty of 1. Rows without tokens are not computed.

        Raises:
            RequestError: The batch has another form, or the beam is not possible.
        """
        self._check(batch)
        source, words = batch["source"], self.vocabulary.sources
        if (wrong := source[(source < 0) | (source >= words)]).size:  # before they become int32
            raise RequestError(f"found token {wrong[0]}, expected 0 to {words - 1}")
        found = self.translate([row[row != PAD].astype(np.int32) for row in source])
        tokens = padded([one.tokens for each in found for one in each])
        tokens = tokens.reshape(len(found), self.best, tokens.shape[1])
        return {"tokens": tokens, "scores": np.array([[one.score for one in each] for each in found], np.float32)}

    def postprocess(self, out: dict[str, NDArray[Any]]) -> list[dict[str, Any]]:
        """Converts outputs of `predict` to text.

        Returns:
            {"translation", "score"} of each sentence; with `best` above 1 also "others", the same of the further ones.
        """
        results = []
        for tokens, scores in zip(out["tokens"], out["scores"].tolist(), strict=True):
            texts = self.vocabulary.decode([row[row != PAD].tolist() for row in tokens])
            first, *others = ({"translation": text, "score": score} for text, score in zip(texts, scores, strict=True))
            results.append({**first, "others": others} if others else first)
        return results

    def translate(self, sentences: Sequence[Tokens]) -> list[list[Hypothesis]]:
        """Translates tokenized sentences, int32; sentences of similar length share a batch.

        Returns:
            The `best` hypotheses of each sentence, in order.
        """
        found: list[list[Hypothesis]] = [[Hypothesis([], 0.0)] * self.best for _ in sentences]
        full = [i for i, each in enumerate(sentences) if len(each) > self.vocabulary.frame]
        order = sorted(full, key=lambda i: len(sentences[i]))
        if self._native is not None:
            return self._translated(self._native, sentences, order[::-1], found)
        for a, b in by_tokens([len(sentences[i]) for i in order], AVERAGE * self.batch_size, self.batch_size):
            for i, each in zip(order[a:b], self._search([sentences[i] for i in order[a:b]]), strict=True):
                found[i] = each
        return found

    def _translated(
        self, native: NativeTranslator, sentences: Sequence[Tokens], order: Sequence[int], found: list[list[Hypothesis]]
    ) -> list[list[Hypothesis]]:
        """All at once, in this order, the longest first: a sentence that is done makes room for the next."""
        chosen = [sentences[i] for i in order]
        limits, words = self._bounds(chosen)
        options = self._options(max(len(order), 1))
        for i, each in zip(order, native.translate(chosen, limits, words=words, **options), strict=True):
            found[i] = [Hypothesis(tokens, score) for tokens, score in each]
        return found

    def _options(self, most: int) -> dict[str, Any]:
        """What the native translator must know for all sentences; most: how many there are at once."""
        require(self.beam, self.best, len(self.vocabulary))
        return {
            "start": START,
            "end": END,
            "beam": self.beam,
            "best": self.best,
            "length_penalty": self.length_penalty,
            "slots": min(self.batch_size, most, SLOTS),
            "rules": self._rules().native,
        }

    def _bounds(self, sentences: Sequence[Tokens]) -> tuple[list[int], list[Tokens] | None]:
        """How many tokens each translation may have, and which."""
        limits = [self.rules.limit(len(each), self.positions) for each in sentences]
        if self.shortlist is None:
            return limits, None
        return limits, [self.shortlist.allowed(each.tolist()).astype(np.int32) for each in sentences]

    def stream(self) -> TranslationStream:
        """Starts native threads that translate sentences as they arrive, `batch_size` at once; see `submit`.

        Raises:
            RequestError: The engine is not native.
        """
        if self._native is None:
            raise RequestError(f"translations come as a stream from the engine native, not from {self.engine}")
        return self._native.stream(**self._options(SLOTS))

    def submit(self, stream: TranslationStream, sentences: Sequence[Tokens]) -> range:
        """Adds tokenized sentences, int32 and not empty, to a stream; returns their numbers there."""
        return stream.submit(sentences, *self._bounds(sentences))

    def _search(self, sentences: Sequence[Tokens]) -> list[list[Hypothesis]]:
        source = padded(sentences)
        require(self.beam, self.best, len(self.vocabulary))
        if self._search_session is not None:
            batch = {
                "source": source,
                "beam": np.array([self.beam]),
                "best": np.array([self.best]),
                "growth": np.array((0, self.rules.most) if self.rules.most else GROWTH),
            }
            found = self._search_session.run({**batch, "length_penalty": np.array([self.length_penalty], np.float32)})
            return hypotheses(found["tokens"], found["scores"])
        limits = np.array([self.rules.limit(len(each), self.positions) for each in sentences])
        if self._stepping is not None:
            from zoo.translation.search.kv_cache import cached_step

            encoder, decoder, caches = self._stepping
            step = cached_step(decoder, encoder.run({"source": source}), caches)
        else:
            step = naive_step(self._decoder, source, self._encoder.run({"source": source})["memory"])
        allowed = [self.shortlist.allowed(each.tolist()) for each in sentences] if self.shortlist else None
        options = {"beam": self.beam, "length_penalty": self.length_penalty, "best": self.best, "rules": self._rules()}
        options["allowed"] = allowed
        return beam_search(step, limits, start=START, end=END, **options)  # type: ignore[arg-type]

    def _rules(self) -> Rules:
        """Of the search, with the language that is asked for."""
        return replace(self.rules, prefix=self.vocabulary.prefix or self.rules.prefix)

    # ------------------------------------------------------------------------------------------------------------- text

    def _read(self, inputs: Iterable[str], split: bool = False) -> Iterator[Line]:
        """The lines of text files, plain or .gz, or of stdin ("-"); see `line`."""
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
        text = tidy(text)
        if not text or (foreign := strange(text)):
            return Line(where, text, foreign if text else "", ())
        tokens, fault = self._cut(text)
        parts = (tokens,)
        if split and (fault or self.apart) and len(sentences := split_sentences(text, self._language())) > 1:
            parts, faults = zip(*map(self._cut, sentences), strict=True)
            fault = next((f"holds a sentence that {why}" for why in faults if why), "")
        return Line(where, text, fault, () if fault else parts)

    def _language(self) -> str:
        """That of the text, "" where nobody said."""
        return self.vocabulary.source_language or str(self.folder.preprocessing.get("languages", "")).partition("-")[0]

    def _cut(self, text: str) -> tuple[Tokens, str]:
        """The tokens of a sentence, and why the model cannot translate it, "" if it can."""
        if len(text) > CHARACTERS * self.max_length:
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
    ) -> dict[str, Any]:
        """Translates text files of any size, one sentence a line, in constant memory and input order; empty lines stay
        empty.

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

        Returns:
            {"sentences", "skipped", "seconds", "sentences_per_second", "tokens_per_second" (of the translations),
            "engine", "precision"}.

        Raises:
            RequestError: No line can be translated, or an option is not possible.
        """
        chosen = copy.copy(self)  # for the options hold for this call alone
        chosen.beam, chosen.best, chosen.apart = self.rules.beam if beam is None else beam, n_best, sentences
        chosen.vocabulary = self.vocabulary.choose(source_language or "", target_language or "")
        if max_tokens is not None:
            chosen.rules = replace(self.rules, most=whole_number("max tokens", max_tokens))
        return chosen._run(inputs, output, on_error, scores)

    def _run(self, inputs: Any, output: str | Path, on_error: str, scores: bool) -> dict[str, Any]:
        """`run` with the options that this pipeline has."""
        faults, start = Faults(), time.perf_counter()
        count: Counter[str] = Counter()
        names = [os.fspath(each) for each in (inputs if isinstance(inputs, list | tuple) else [inputs])]
        with translation_writer(output, scores, self.best > 1) as write, progress("translating lines") as advance:
            found = self._read(names, split=True)
            while window := list(itertools.islice(found, AT_ONCE * self.batch_size)):
                self._note(window, faults, on_error)
                translated = self.translate([part for each in window for part in each.parts])
                ends = list(itertools.accumulate(len(each.parts) for each in window))
                before = self.first_row + count["lines"]
                rows = [
                    (before + i, *self.joined([each[k] for each in translated[end - len(line.parts) : end]]))
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
        if faults.total() > SHOWN:
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

    def joined(self, parts: Sequence[Hypothesis]) -> tuple[str, float]:
        """Returns the text of a line's translated sentences, and the mean score of their tokens, ends included."""
        lengths = [len(each.tokens) + 1 for each in parts]
        score = sum(each.score * length for each, length in zip(parts, lengths, strict=True)) / max(sum(lengths), 1)
        return " ".join(self.vocabulary.decode([each.tokens for each in parts])), score

    def _note(self, found: Iterable[Line], faults: Faults, on_error: str) -> None:
        """Name what is wrong, or stop there."""
        for each in found:
            if each.fault and on_error == "raise":
                raise RequestError(f"{each.where} {each.fault}")
            if each.fault:
                faults.add(each.fault)
                if faults.total() <= SHOWN:
                    logger.warning("%s %s", each.where, each.fault)

    def calibration(self, data: Any, count: int, on_error: str = "raise") -> dict[str, NDArray[Any]]:
        """Translates the first `count` lines of text files and returns the decoder's inputs, see `decoder_samples`.

        Returns:
            {"source", "target"}: int64 [n, tokens].

        Raises:
            RequestError: There are no sentences.
        """
        names = [os.fspath(each) for each in (data if isinstance(data, list | tuple) else [data])]
        found = list(itertools.islice((each for each in self._read(names) if each.text or each.fault), count))
        self._note(found, Faults(), on_error)
        sources = self.vocabulary.encode([each.text for each in found if not each.fault])
        if not sources:
            raise RequestError(f"found no sentences in {', '.join(names)}; calibration needs some")
        return decoder_samples(sources, [each[0].tokens for each in self.translate(sources)])

    def example(self, count: int, data: str | Path | None = None) -> list[str]:
        """Returns `count` sentences of the text file `data`, or built-in English ones, repeated if needed."""
        some = list(EXAMPLES)
        if data is not None:
            some = [
                each.text
                for each in itertools.islice(self._read([os.fspath(data)]), count)
                if each.text and not each.fault
            ]
            if not some:
                raise RequestError(f"found no sentences in {data}")
        return list(itertools.islice(itertools.cycle(some), count))
