"""Translation of tokenized sentences: engines, batches, and beam search."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from pipelines.core import machine
from pipelines.core.batches import Batch
from pipelines.core.errors import RequestError
from pipelines.engines.native import translation_check as check
from pipelines.engines.native.translation import NativeTranslator, Speculation, TranslationStream, store
from pipelines.engines.native.validation import NativeModel
from pipelines.engines.session import Session
from pipelines.kernels import extension
from pipelines.models.folder import ModelFolder
from pipelines.models.line_pipeline import LinePipeline
from pipelines.models.npz import read_arrays
from pipelines.models.pipeline import PRECISIONS
from zoo.translation.alignment.forced import ForcedDecoder
from zoo.translation.data.lines import EXAMPLES
from zoo.translation.data.tokens import END, PAD, POSITIONS, START, UNKNOWN, Tokens, batch_by_tokens, pad
from zoo.translation.data.vocabularies import in_languages, open_vocabulary
from zoo.translation.search.beam_search import Hypothesis, beam_search, hypotheses, naive_step
from zoo.translation.search.config import LENGTH_LIMIT, Demands, SearchConfig, check_beam
from zoo.translation.search.controls.glossary import Glossary
from zoo.translation.search.controls.variants import search_variant
from zoo.translation.search.controls.words import BEGINS, word_marks
from zoo.translation.search.options import checked_options
from zoo.translation.search.scores import expected
from zoo.translation.search.sessions import is_int8, search_session, split_sessions, step_sessions
from zoo.translation.search.shortlist import Shortlist

if TYPE_CHECKING:  # onnx, which the native engine does not need
    from zoo.translation.search.step_graph import Cache

MEAN_TOKENS = 32  # a padded batch has at most MEAN_TOKENS * batch_size tokens
MAX_SLOTS = 65536  # maximum batch of the native translator
DIVERSITY = 0.5  # default penalty of diverse beams
EXAMPLE_SENTENCES, LONGEST = 3, 96  # sentences and tokens of the batch that native code is validated on

logger = logging.getLogger(__name__)


class Translator(LinePipeline[NativeTranslator]):
    """Translates tokenized sentences.

    The engine "native" computes int8 in native code; "auto" takes it where the kernels are built, else onnxruntime, and
    for bf16 OpenVINO. A batch has at most `batch_size` sentences, fewer where they are long.

    Attributes:
        beam: Beam size; 1 is greedy search.
        best: Number of translations of each sentence.
        length_penalty: 0 to 1, see `zoo.translation.search.beam_search.beam_search`.
        rules: Search options of the model.
        vocabulary: See `zoo.translation.data.vocabularies.open_vocabulary`.
        max_length: Maximum number of tokens of a source.
        shortlist: Tokens that a translation may have; None: all.
        positions: Maximum number of tokens of a translation.
        draft: Speculative decoding of greedy search in the engine "native": "auto" for the model's draft, or without
            one for copies of source tokens where source and target share a vocabulary; "off"; or a draft's file.
            Results are the same.
        target_prefix: Text that translations begin with, or one for each text.
        alignments: Whether results have an alignment of words.
        word_scores: Whether results have scores of words.
        tag_handling: Markup of the texts: "html", "xml" or "none".
        placeholders: Texts that a translation keeps, see `zoo.translation.data.markup.PLACEHOLDERS`.
        forced: Attention and log probabilities of given translations.
        forced_words: Texts that every translation contains.
        glossary: Terms with the translations that sentences with them contain.
    """

    BATCH_SIZE: ClassVar[int] = 32
    ENGINES: ClassVar[tuple[str, ...]] = ("onnxruntime", "native")  # default engines of `zoo benchmark`
    TUNED: ClassVar[tuple[str, ...]] = ("native", "onnxruntime") if extension.isas() else ("onnxruntime",)
    beam: int = 4
    best: int = 1
    length_penalty: float = 1.0
    draft: str = "auto"
    target_prefix: str | tuple[str, ...] = ""
    alignments: bool = False
    word_scores: bool = False
    tag_handling: str = "none"
    placeholders: str = "auto"
    forced_words: tuple[str, ...] = ()
    glossary: Glossary = Glossary({})

    def __init__(self, folder: ModelFolder, *arguments: Any, **options: Any) -> None:
        self.rules = SearchConfig.from_json(folder.preprocessing.get("search", {}))
        if "vocabulary" not in folder.preprocessing:  # own models; imports decode as their toolkit does
            self.rules = replace(self.rules, banned=tuple(dict.fromkeys((*self.rules.banned, UNKNOWN))))
        self.beam, self.length_penalty = self.rules.beam, self.rules.length_penalty
        super().__init__(folder, *arguments, **options)
        self.vocabulary = open_vocabulary(folder.path, folder.preprocessing, folder.verify)
        kind = folder.preprocessing.get("vocabulary", {}).get("kind", "sentencepiece")
        self._word_marks = functools.cache(lambda: word_marks(self.vocabulary.pieces, kind))
        self.max_length = int(folder.preprocessing["max_length"])
        self.shortlist: Shortlist | None = None
        if name := folder.preprocessing.get("shortlist"):
            self.shortlist = Shortlist.from_bytes(folder.verify(name).read_bytes())
            if self._native is not None and self.shortlist.first:
                self._native.share_words(self.shortlist.common_tokens.astype(np.int32))
        if self._unvalidated is not None:
            self._validate(self._validation_example)
        self._speculations: dict[str, Speculation] = {}  # by the draft; shared by copies with other options
        self.positions = (folder.preprocessing.get("form", {}).get("positions") or [POSITIONS])[-1]
        self.forced = ForcedDecoder(
            folder, options.get("model"), self.threads, self.precision, len(self.vocabulary), self._native
        )

    def _open_stock(self, model: Path | None) -> None:
        """Opens beam search in one graph, else step by step, else without KV caches."""
        self._search_session: Session | None = None
        self._stepping: tuple[Session, Session, list[Cache]] | None = None
        # shared by copies with other options, which the graph of the search may not support
        self._open_steps = functools.cache(
            lambda: step_sessions(self.folder, model, self._engine, self.threads, self.precision)
        )
        is_default = self.rules.is_default and "shortlist" not in self.folder.preprocessing
        if not is_default and self._engine == "onnxruntime":
            self._stepping = self._open_steps()
            machine.trim()
            return
        if self._engine == "onnxruntime":
            try:
                self._search_session = search_session(
                    self.folder, model, self._engine, self.threads, self.precision, self.rules.banned
                )
                machine.trim()
                return
            except RequestError as error:
                logger.warning("%s; falling back to decoding without KV caches, which is many times slower", error)
        path = model or self.folder.ensure(PRECISIONS[self.precision])
        self._encoder, self._decoder = split_sessions(path, self._engine, self.threads, self.precision)

    def _open_native(self, model: Path | None) -> NativeTranslator:
        """Opens the native translator. Raises RequestError for an unsupported or float graph."""
        if model is not None and not is_int8(model):
            raise RequestError(f"the native kernels compute int8, and {model.name} is float")
        path = model or self._program(store)
        if model is None:
            reference = self.folder.path / PRECISIONS[self.precision]
            tokens = (START, END, PAD)
            self._unvalidated = NativeModel(check.unvalidated, path, reference, self.threads, tokens, expected)
        return NativeTranslator(path, self.threads)

    def _validation_example(self) -> Batch:
        """Returns the sentences that native code is validated on, with their shortlists."""
        longest = min(self.max_length, LONGEST)
        vocabulary = in_languages(self.vocabulary, 1)[0]
        batch = check.example(vocabulary.encode(list(EXAMPLES[:EXAMPLE_SENTENCES])), longest, PAD)
        if self.shortlist is not None:
            words = np.zeros((len(batch["source"]), len(self.shortlist.order)), bool)
            for row, source in zip(words, batch["source"], strict=True):
                row[self.shortlist.allowed(source[source != PAD].tolist())] = True
            batch = {**batch, "words": words}
        return batch

    @property
    def input_ports(self) -> dict[str, tuple[np.dtype[Any], Sequence[int | None]]]:
        """One input: source, int64 [n, longest]."""
        return {"source": (np.dtype(np.int64), (None, None))}

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
        self.check(batch)
        source, words = batch["source"], self.vocabulary.sources
        if (wrong := source[(source < 0) | (source >= words)]).size:  # before the conversion to int32
            raise RequestError(f"found token {wrong[0]}, expected 0 to {words - 1}")
        results = self.translate([row[row != PAD].astype(np.int32) for row in source])
        tokens = pad([one.tokens for ranked in results for one in ranked])
        tokens = tokens.reshape(len(results), self.best, tokens.shape[1])
        return {"tokens": tokens, "scores": np.array([[one.score for one in ranked] for ranked in results], np.float32)}

    def translate(
        self, sentences: Sequence[Tokens], demands: Sequence[Demands] | None = None
    ) -> list[list[Hypothesis]]:
        """Translates tokenized sentences; sentences of similar length share a batch.

        Args:
            sentences: Tokens of each sentence, int32.
            demands: Constraints on each translation; None: no constraints.

        Returns:
            The `best` hypotheses of each sentence, in order.
        """
        results: list[list[Hypothesis]] = [[Hypothesis([], 0.0)] * self.best for _ in sentences]
        full = [i for i, sentence in enumerate(sentences) if len(sentence) > self.vocabulary.frame]
        order = sorted(full, key=lambda i: len(sentences[i]))
        if self._native is not None:
            order.reverse()  # a finished sentence is replaced by the next
            translated = self._translate_native(self._native, *_chosen(sentences, demands, order))
            for i, ranked in zip(order, translated, strict=True):
                results[i] = ranked
            return results
        for group in _by_prefix(order, demands):
            lengths = [len(sentences[i]) for i in group]
            for a, b in batch_by_tokens(lengths, MEAN_TOKENS * self.batch_size, self.batch_size):
                batch = group[a:b]
                for i, ranked in zip(batch, self._search(*_chosen(sentences, demands, batch)), strict=True):
                    results[i] = ranked
        return results

    def _translate_native(
        self, native: NativeTranslator, sentences: Sequence[Tokens], demands: Sequence[Demands] | None
    ) -> list[list[Hypothesis]]:
        """Translates sentences in native code."""
        limits, words = self._limits(sentences, demands)
        options = self._options(max(len(sentences), 1))
        translations = native.translate(sentences, limits, words=words, demands=demands, **options)
        return [[Hypothesis(tokens, score) for tokens, score in ranked] for ranked in translations]

    def _options(self, most: int) -> dict[str, Any]:
        """Returns the options of the native translator. most: maximum number of sentences at once."""
        check_beam(self.beam, self.best, len(self.vocabulary) - len(self.rules.banned))
        return {
            "start": START,
            "end": END,
            "beam": self.beam,
            "best": self.best,
            "length_penalty": self.length_penalty,
            "slots": min(self.batch_size, most, MAX_SLOTS),
            "rules": self._rules().native_options,
            "speculation": self._speculation(),
        }

    def _speculation(self) -> Speculation | None:
        """Returns the proposals of greedy search; opened at the first use, since they are timed."""
        if self.draft == "off" or self.beam > 1 or self.rules.sample or self._native is None:
            return None
        if self.draft not in self._speculations:
            own = self.folder.preprocessing.get("draft") if self.draft == "auto" else None
            path = self.folder.verify(own) if own else None if self.draft == "auto" else Path(self.draft)
            arrays = None if path is None else read_arrays(path)
            copies = path is None and self.vocabulary.source_pieces == self.vocabulary.pieces
            self._speculations[self.draft] = self._native.speculation(copies, arrays)
        return self._speculations[self.draft]

    def _limits(
        self, sentences: Sequence[Tokens], demands: Sequence[Demands] | None
    ) -> tuple[list[int], list[Tokens] | None]:
        """Returns the maximum length and the shortlist of each translation."""
        limits = [self.rules.limit(len(sentence), self.positions) for sentence in sentences]
        before = len(self._rules().prefix) if demands else 0
        for i, need in enumerate(demands or ()):
            if need.prefix and not self.rules.most:
                limits[i] = min(limits[i] + len(need.prefix), self.positions)
            if limits[i] <= len(need.prefix) + before:
                raise RequestError(
                    f"found a target prefix of {len(need.prefix)} tokens; expected fewer than the {limits[i]} of a "
                    "translation"
                )
        if self.shortlist is None:
            return limits, None
        words = [self.shortlist.allowed(sentence.tolist()).astype(np.int32) for sentence in sentences]
        for i, need in enumerate(demands or ()):
            if need.phrases:
                words[i] = np.union1d(words[i], [token for phrase in need.phrases for token in phrase]).astype(np.int32)
        return limits, words

    def stream(self) -> TranslationStream:
        """Starts native threads that translate sentences as they arrive, `batch_size` at once; see `submit`.

        Raises:
            RequestError: The engine is not native.
        """
        if self._native is None:
            raise RequestError(f"found the engine {self.engine}, expected native: the other engines have no streams")
        return self._native.stream(**self._options(MAX_SLOTS))

    def submit(
        self, stream: TranslationStream, sentences: Sequence[Tokens], demands: Sequence[Demands] | None = None
    ) -> range:
        """Adds tokenized sentences to a stream.

        Args:
            stream: Result of `stream`, of this pipeline or of one that differs in its languages alone.
            sentences: Tokens of each sentence, int32, not empty.
            demands: Constraints on each translation; None: no constraints.

        Returns:
            Numbers of the sentences in the stream.
        """
        return stream.submit(sentences, *self._limits(sentences, demands), demands, self._rules().prefix)

    def _search(self, sentences: Sequence[Tokens], demands: Sequence[Demands] | None) -> list[list[Hypothesis]]:
        source = pad(sentences)
        check_beam(self.beam, self.best, len(self.vocabulary) - len(self.rules.banned))
        if self._search_session is not None and self._rules().is_default and not demands:
            batch = {
                "source": source,
                "beam": np.array([self.beam]),
                "best": np.array([self.best]),
                "growth": np.array((0, self.rules.most) if self.rules.most else LENGTH_LIMIT),
            }
            outputs = self._search_session.run({**batch, "length_penalty": np.array([self.length_penalty], np.float32)})
            return hypotheses(outputs["tokens"], outputs["scores"])
        limits, allowed = self._limits(sentences, demands)
        stepping = self._stepping if self._search_session is None else self._open_steps()
        if stepping is not None:
            from zoo.translation.search.kv_cache import cached_step

            encoder, decoder, caches = stepping
            step = cached_step(decoder, encoder.run({"source": source}), caches)
        else:
            step = naive_step(self._decoder, source, self._encoder.run({"source": source})["memory"])
        search = search_variant if self.rules.sample or self.rules.groups > 1 else beam_search
        return search(
            step,
            np.array(limits),
            start=START,
            end=END,
            beam=self.beam,
            length_penalty=self.length_penalty,
            best=self.best,
            rules=self._rules(),
            allowed=allowed,  # type: ignore[arg-type]
            sources=[sentence.tolist() for sentence in sentences],
            demands=demands,
        )

    def with_options(self, *, draft: str | None = None, **options: Any) -> Self:
        """Returns a pipeline with other options over the same sessions.

        Args:
            draft: "auto", "off" or a file, see the class; None: as before.
            **options: Options of `zoo.translation.search.options.OPTIONS`; None, or an option that is not
                named: the model's.

        Raises:
            RequestError: An option is not possible.
        """
        values, changed = checked_options(options), copy.copy(self)
        changed.alignments = values.get("alignments", False)
        changed.word_scores = values.get("word_scores", False)
        changed.tag_handling = values.get("tag_handling", "none")
        changed.placeholders = values.get("placeholders", "auto")
        if draft is not None:
            changed.draft = draft
            if draft not in ("auto", "off") and self._native is None:
                raise RequestError(f"found the draft {draft} for the engine {self.engine}; drafts need --engine native")
        changed.rules = self._changed_rules(values)
        changed.beam, changed.length_penalty = changed.rules.beam, changed.rules.length_penalty
        changed.best = values.get("n_best", 1)
        check_beam(changed.beam, changed.best, len(self.vocabulary) - len(changed.rules.banned))
        languages = (values.get(f"{side}_language", "") for side in ("source", "target"))
        changed.vocabulary = self.vocabulary.choose(*languages, values.get("prompt"))
        changed.target_prefix = values.get("target_prefix", "")
        changed.forced_words = values.get("forced_words", ())
        changed.glossary = Glossary(values.get("glossary", {}))
        if changed.forces_words and (changed.rules.sample or changed.rules.groups > 1):
            raise RequestError("forced words and a glossary are for beam search, not for samples or groups of beams")
        if changed.beam < 2 and changed.forces_words:
            raise RequestError("found beam 1; forced words and a glossary need --beam 2 or more")
        return changed

    @property
    def forces_words(self) -> bool:
        """Whether translations must contain words."""
        return bool(self.forced_words or len(self.glossary))

    def _changed_rules(self, values: Mapping[str, Any]) -> SearchConfig:
        """Returns the model's rules with checked options."""
        same = {field.name for field in dataclasses.fields(SearchConfig)}
        names = {**{name: name for name in values if name in same}, "max_tokens": "most", "beam_groups": "groups"}
        rules: dict[str, Any] = {names[name]: value for name, value in values.items() if name in names}
        rules.pop("bad_words", None)
        rules["sample"] = "temperature" in values or (self.rules.sample and "beam" not in values)
        if rules["sample"]:
            if values.get("beam", 1) > 1 or values.get("beam_groups", 1) > 1:
                raise RequestError("found a beam and a temperature; samples have neither beams nor groups")
            rules |= {"beam": values.get("n_best", 1), "groups": 1}
        elif alone := [name for name in ("top_k", "top_p", "seed") if name in values]:
            raise RequestError(f"found {alone[0].replace('_', '-')} without a temperature; samples need --temperature")
        elif (groups := values.get("beam_groups", self.rules.groups)) > 1:
            rules |= {"diversity_penalty": values.get("diversity_penalty", DIVERSITY)}
            if values.get("beam", self.rules.beam) % groups:
                raise RequestError(f"found {groups} beam-groups; expected a beam that is a multiple of them")
        elif "diversity_penalty" in values:
            raise RequestError("found diversity-penalty without groups; diverse beams need --beam-groups 2 or more")
        if "min_tokens" in values:  # the end counts
            rules["least"] = values["min_tokens"] and values["min_tokens"] + 1
        if "bad_words" in values:
            forms = [form(text) for text in values["bad_words"] for form in (self.target_tokens, self._phrase)]
            rules["bad_words"] = tuple(dict.fromkeys((*self.rules.bad_words, *forms)))
        changed = replace(self.rules, **rules)
        if changed.encoder_no_repeat_ngram and self.vocabulary.source_pieces != self.vocabulary.pieces:
            raise RequestError("encoder-no-repeat-ngram needs one vocabulary for both languages; this model has two")
        return changed

    def _phrases(self, texts: Iterable[str], source: Tokens, prefix: tuple[int, ...]) -> Demands:
        """Returns the constraints on a translation; texts that it cannot contain are `impossible`."""
        rules, possible, impossible = self._rules(), {}, []
        room = rules.limit(len(source), self.positions) - len(rules.prefix) - 1
        room -= len(prefix) if rules.most else 0
        for text in dict.fromkeys(texts):
            tokens: tuple[int, ...] = ()
            with contextlib.suppress(RequestError):
                tokens = self._phrase(text)
            parts = {tokens[i:j] for i in range(len(tokens)) for j in range(i + 1, len(tokens) + 1)}
            if not tokens or len(tokens) > room or parts & {*rules.bad_words, *((token,) for token in rules.banned)}:
                impossible.append(text)
            else:
                possible[text] = tokens
                room -= len(tokens)
        return Demands(prefix, tuple(possible.values()), tuple(possible), tuple(impossible), self._word_marks())

    def _phrase(self, text: str) -> tuple[int, ...]:
        """Tokenizes text within a translation, whose first token has the blank before it in vocabularies of bytes."""
        tokens, marks = self.target_tokens(text), self._word_marks()
        if not marks[tokens[0]] & BEGINS:
            behind = self.target_tokens(f" {text}")
            return behind if marks[behind[0]] & BEGINS else tokens
        return tokens

    def target_tokens(self, text: str) -> tuple[int, ...]:
        """Tokenizes text of a translation.

        Args:
            text: The text.

        Returns:
            Its tokens, without the end.

        Raises:
            RequestError: The vocabulary cannot write it.
        """
        tokens: list[int] = self.vocabulary.encode_target([text])[0][:-1].tolist()
        if not tokens or UNKNOWN in tokens:
            raise RequestError(
                f"found {text!r:.60}, which the target vocabulary cannot write; expected text in its language"
            )
        return tuple(tokens)

    def token_scores(self, sources: Sequence[Tokens], targets: Sequence[Sequence[int]]) -> list[NDArray[np.float64]]:
        """Computes the log probabilities of the tokens of translations, as the search has them.

        Args:
            sources: Source tokens of each sentence, int32.
            targets: Tokens of each translation.

        Returns:
            For each translation float64 [tokens]; 0 for tokens that every translation begins with.
        """
        rules = self._rules()
        allowed = [self.shortlist.allowed(source.tolist()) for source in sources] if self.shortlist else None
        results = self.forced.scores(sources, targets, allowed, rules.banned if rules.renormalize else ())
        for scores in results:
            scores[: len(rules.prefix)] = 0
        return results

    def _rules(self) -> SearchConfig:
        """Returns the search options with the prefix of the chosen target language."""
        return replace(self.rules, prefix=self.vocabulary.prefix or self.rules.prefix)


def _chosen(
    sentences: Sequence[Tokens], demands: Sequence[Demands] | None, order: Sequence[int]
) -> tuple[list[Tokens], list[Demands] | None]:
    """Returns the sentences of a batch, and the constraints on their translations."""
    return [sentences[i] for i in order], [demands[i] for i in order] if demands else None


def _by_prefix(order: Sequence[int], demands: Sequence[Demands] | None) -> list[list[int]]:
    """Groups sentences by the length of their prefix."""
    groups: dict[int, list[int]] = {}
    for i in order:
        groups.setdefault(len(demands[i].prefix) if demands else 0, []).append(i)
    return list(groups.values())
