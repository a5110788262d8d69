"""Search options of a model, and constraints on a single translation."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from pipelines.core.errors import RequestError
from pipelines.core.plain import from_plain, to_plain
from zoo.translation.search.controls.phrases import PhraseState, contains

KINDS = ("ctranslate2", "transformers", "marian")  # toolkits whose termination rules are followed
MAX_GRAPH_BANNED = 4  # banned tokens for which the graph of the search has candidates to spare
MAX_BEAM = 256  # of the native search
LENGTH_LIMIT = (2, 10)  # (a, b): a translation of n tokens has at most a n + b tokens


class Demands(NamedTuple):
    """Constraints on the translation of one sentence.

    Attributes:
        prefix: Tokens that it begins with, behind `SearchConfig.prefix`; they have no part in its length.
        phrases: Token sequences that it contains.
        texts: Texts of the phrases.
        impossible: Further texts, which no translation can contain.
        marks: Result of `zoo.translation.search.controls.words.word_marks`: phrases match whole words alone. None:
            phrases also match parts of words.
    """

    prefix: tuple[int, ...] = ()
    phrases: tuple[tuple[int, ...], ...] = ()
    texts: tuple[str, ...] = ()
    impossible: tuple[str, ...] = ()
    marks: bytes | None = None

    def state(self, tokens: Sequence[int]) -> PhraseState:
        """Returns the state of the phrases of a translation.

        Args:
            tokens: Its tokens.
        """
        return PhraseState(self.phrases, tokens, self.marks)

    def unmet(self, tokens: Sequence[int]) -> list[str]:
        """Returns the texts that a translation does not contain.

        Args:
            tokens: Its tokens.
        """
        phrases = zip(self.texts, self.phrases, strict=True)
        return [*self.impossible, *(text for text, phrase in phrases if not contains(tokens, phrase, self.marks))]


@dataclass(frozen=True)
class SearchConfig:
    """Search options of the toolkit that a model comes from.

    Attributes:
        kind: Termination rule, one of `KINDS`.
        beam: Default beam size.
        length_penalty: A score is the sum of log probabilities / length ** length_penalty.
        early_stopping: For "transformers": end with `beam` hypotheses (True), or when the likeliest beam cannot reach
            the worst hypothesis at its own length (False) or at the greatest length ("never").
        prefix: Tokens that every translation begins with, of log probability 0; they count in its length.
        banned: Tokens that are never chosen; they keep their share of the probability, see `renormalize`.
        least: Minimum length of a translation, with prefix and end.
        most: Maximum length of a translation, with prefix and end; 0: see `limit`.
        forced_end: Whether the end token follows at the length limit, with log probability 0.
        no_repeat_ngram: No n-gram of this size occurs twice; 0: no restriction.
        growth: Maximum number of tokens for each source token, the end included; 0: see `most`.
        word_penalty: For "marian": subtracted from a score for each token, before the division.
        renormalize: Whether banned, too early and repeated tokens get no share of the probability.
        first_banned: Tokens that are banned at the first position after the prefix.
        bad_words: Token sequences that no translation contains.
        encoder_no_repeat_ngram: No n-gram of this size is one of the source's tokens; 0: no restriction.
        repetition_penalty: Scores of tokens that a translation has are divided by it, negative ones multiplied: log
            probabilities, in greedy search logits.
        sample: Whether tokens are drawn; a beam is a sample.
        temperature: Scores are divided by it before tokens are drawn.
        top_k: Number of most probable tokens to draw from; 0: all.
        top_p: Total probability of the most probable tokens to draw from.
        seed: Seed of the draws.
        groups: Groups of diverse beams.
        diversity_penalty: Subtracted from the score of a token for each time that an earlier group chose it in a step.
        counted: Start tokens that `repetition_penalty` and `no_repeat_ngram` count as part of every translation.
    """

    kind: str = "ctranslate2"
    beam: int = 4
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    prefix: tuple[int, ...] = ()
    banned: tuple[int, ...] = ()
    least: int = 0
    most: int = 0
    forced_end: bool = False
    no_repeat_ngram: int = 0
    growth: float = 0.0
    word_penalty: float = 0.0
    renormalize: bool = False
    first_banned: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    encoder_no_repeat_ngram: int = 0
    repetition_penalty: float = 1.0
    counted: tuple[int, ...] = ()
    sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    groups: int = 1
    diversity_penalty: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Returns the values that differ from the defaults, as plain values."""
        return to_plain(self, changed=True)

    @staticmethod
    def from_json(values: dict[str, Any]) -> SearchConfig:
        """Reads what `to_json` returned.

        Args:
            values: Plain values.

        Returns:
            The rules.

        Raises:
            RequestError: A key or the kind is unknown.
        """
        try:
            plain = from_plain(values)
            plain["bad_words"] = tuple(tuple(word) for word in plain.get("bad_words", ()))
            rules = SearchConfig(**plain)
        except TypeError:
            rules = SearchConfig(kind="")
        if rules.kind not in KINDS:
            raise RequestError(
                f"card.json has the search settings {values}, expected those of zoo import; import the model again"
            )
        return rules

    @property
    def is_default(self) -> bool:
        """Whether beam search in one graph follows this configuration."""
        banned = self.banned if len(self.banned) <= MAX_GRAPH_BANNED else DEFAULT_SEARCH.banned
        default = replace(
            DEFAULT_SEARCH, beam=self.beam, length_penalty=self.length_penalty, most=self.most, banned=banned
        )
        return self == default

    @property
    def native_options(self) -> dict[str, Any]:
        """Options for `NativeTranslator.translate`."""
        elsewhere = ("beam", "length_penalty", "most", "growth")
        return {name: value for name, value in self.to_json().items() if name not in elsewhere}

    @property
    def changes_scores(self) -> bool:
        """Whether scores of tokens are changed, see `zoo.translation.search.controls.score_rules`."""
        return bool(
            self.banned
            or self.first_banned
            or self.bad_words
            or self.least
            or self.forced_end
            or self.no_repeat_ngram
            or self.encoder_no_repeat_ngram
            or self.repetition_penalty != 1
        )

    def limit(self, source: int, positions: int) -> int:
        """Returns the maximum length of a translation, its end included.

        Args:
            source: Number of source tokens.
            positions: Number of the model's target positions.
        """
        most = min(self.most or positions, positions)
        if self.growth:
            return max(min(math.ceil(self.growth * source), most), 1)
        return most if self.most else limit(source, positions)


DEFAULT_SEARCH = SearchConfig()


def limit(source: int, most: int) -> int:
    """Returns the default maximum length of a translation, its end included: 2 * source + 10, at most `most`.

    Args:
        source: Number of source tokens.
        most: Upper bound.
    """
    factor, more = LENGTH_LIMIT
    return min(factor * source + more, most)


def check_beam(beam: int, best: int, words: int | None = None) -> None:
    """Checks the options of a search.

    Args:
        beam: Beam size.
        best: Number of translations of each sentence.
        words: Size of the vocabulary, if known.

    Raises:
        RequestError: `beam` or `best` is not possible.
    """
    if not (isinstance(beam, numbers.Integral) and isinstance(best, numbers.Integral) and 1 <= best <= beam):
        raise RequestError(
            f"found beam {beam!r} and n-best {best!r}; expected a beam of 1 or more, and no more translations than it"
        )
    if words is not None and 2 * beam > words:
        raise RequestError(f"found beam {beam}, expected at most half of the {words} words in the vocabulary")
