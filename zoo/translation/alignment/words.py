"""Alignment of a line and its translation: sentences, copied text, and words that were put into translations."""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zoo.translation.alignment.spans import Span
from zoo.translation.data.characters import CONTINUOUS
from zoo.translation.data.lines import Line

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]
_MARKS = r"\u0300-\u036f\u0483-\u0489\u0591-\u05c7\u0610-\u061a\u064b-\u065f\u0670\u06d6-\u06ed"
_MARKS += r"\u0900-\u0963\u0966-\u0dff\u200c\u200d"  # all of Indic scripts but the danda
# each of these characters, words (with the marks of other scripts and apostrophes within), other characters
_UNIT = re.compile(
    rf"{CONTINUOUS.pattern}|(?:(?!{CONTINUOUS.pattern})(?:[^\W_]|[{_MARKS}])|(?<=[^\W_])['\u2019](?=[^\W_]))+|_+|[^\w\s]"
)
_WORD = re.compile(r"\S+")
TINY = 1e-6
SHARPNESS = 4  # exponent of attention: the source token that is attended to most decides, unless others are near
REACH = 64  # characters that a sentence leaves out one after the other, at most


@dataclass
class Sentence:
    """A translated sentence.

    Attributes:
        source: Its source text.
        source_spans: Characters of each source token.
        target: Its translation.
        target_spans: Characters of each target token.
        attention: float32 [target tokens, source tokens].
        scores: Log probability of each target token, float64; None if they are not asked for.
    """

    source: str
    source_spans: list[Span]
    target: str
    target_spans: list[Span]
    attention: Floats
    scores: NDArray[np.float64] | None = None


@dataclass
class _Block:
    """Tokens of the line and of its translation that are aligned.

    Attributes:
        source: Place in the line of each of its characters, int64.
        source_spans: Tokens, as ranges of these characters, int64 [s, 2].
        target: Place in the translation of each of its characters, int64.
        target_spans: Tokens, as ranges of these characters, int64 [t, 2].
        weights: float32 [t, s], rows of sum 1; None for a copy, whose tokens are aligned one by one.
        scores: float64 [t] or None.
    """

    source: Integers
    source_spans: Integers
    target: Integers
    target_spans: Integers
    weights: Floats | None
    scores: NDArray[np.float64] | None


class Alignment:
    """Alignment of a line and its translation.

    Attributes:
        source: The line.
        target: Its translation.
        units: Words of the translation and characters beside them, as ranges of characters; placeholders are whole.
    """

    def __init__(self, line: Line, sentences: Iterable[Sentence], placeholders: re.Pattern[str] | None = None) -> None:
        """Aligns a line.

        Args:
            line: The line.
            sentences: Its sentences, one for each of its `parts`.
            placeholders: What is one unit.
        """
        self.source, self.target = line.text, ""
        self._blocks: list[_Block] = []
        self._cursor = 0  # in the line
        following = iter(sentences)
        for piece in line.pieces:
            if isinstance(piece, str):
                self._copy(self._consume(piece), self._append(piece), piece)
            else:
                self._add(next(following), piece)
        pattern = _UNIT if placeholders is None else re.compile(f"{placeholders.pattern}|{_UNIT.pattern}")
        self.units = [match.span() for match in pattern.finditer(self.target)]
        self._starts = [start for start, _ in self.units]

    def shares(self, begin: int, end: int) -> Floats:
        """Tells how much of each unit of the translation is aligned to a range of the line.

        Args:
            begin: First character of the range.
            end: Character behind the range.

        Returns:
            float32 [units], 0 to 1.
        """
        total, count = np.zeros((2, len(self.units)), np.float64)
        for block in self._blocks if self.units else ():
            inside = np.concatenate([[0], np.cumsum((block.source >= begin) & (block.source < end))])
            sizes = np.diff(block.source_spans, axis=1)[:, 0]
            shares = (inside[block.source_spans[:, 1]] - inside[block.source_spans[:, 0]]) / sizes
            if block.weights is not None:
                sharp = block.weights**SHARPNESS
                shares = sharp @ shares / sharp.sum(axis=1)
            sizes = np.diff(block.target_spans, axis=1)[:, 0]  # a token counts in a unit by its characters
            characters = np.concatenate([np.arange(*span) for span in block.target_spans])
            units = np.searchsorted(self._starts, block.target[characters], "right") - 1
            np.add.at(total, np.maximum(units, 0), np.repeat(shares, sizes))
            np.add.at(count, np.maximum(units, 0), 1)
        return (total / np.maximum(count, 1)).astype(np.float32)

    def pairs(self) -> list[tuple[int, int]]:
        """Aligns words between blanks: a word has the words of the source tokens that its tokens attend to most.

        Returns:
            Pairs of source word and target word, counted from 0, in order.
        """
        sources, targets = ([match.start() for match in _WORD.finditer(text)] for text in (self.source, self.target))
        links = set()
        for block in self._blocks:
            first = block.source[block.source_spans[:, 0]]
            first = first if block.weights is None else first[block.weights.argmax(axis=1)]
            both = zip(first.tolist(), block.target[block.target_spans[:, 0]].tolist(), strict=True)
            links |= {(bisect.bisect(sources, a) - 1, bisect.bisect(targets, b) - 1) for a, b in both}
        return sorted(links, key=lambda pair: pair[::-1])

    def word_scores(self) -> list[float]:
        """Returns the log probability of each word between blanks, the sum of its tokens'; 0 for copied words."""
        starts = [match.start() for match in _WORD.finditer(self.target)]
        scores = [0.0] * len(starts)
        for block in self._blocks:
            if block.scores is not None:
                for place, score in zip(block.target[block.target_spans[:, 0]], block.scores.tolist(), strict=True):
                    scores[bisect.bisect(starts, int(place)) - 1] += score
        return scores

    # ------------------------------------------------------------------------------------------------------- building

    def _add(self, sentence: Sentence, inserted: Sequence[tuple[float, str]]) -> None:
        """Adds a sentence and the words that are inserted into its translation, as `Line.join` does."""
        source_words, words = sentence.source.split(" "), sentence.target.split(" ")
        copies = [text for _, text in inserted]
        source = _with(source_words, [round(place * len(source_words)) for place, _ in inserted], copies)
        target = _with(words, [round(place * len(words)) for place, _ in inserted], copies)
        source_places = self._consume(" ".join(text for text, _ in source))
        target_places = self._append(" ".join(text for text, _ in target))
        own_source, copied_source = _split(source, source_places)
        own_target, copied_target = _split(target, target_places)
        for text, one, other in zip(copies, copied_source, copied_target, strict=True):
            self._copy(one, other, text)
        usable, written = (
            np.array([i for i, (a, b) in enumerate(spans) if b > a], np.int64)
            for spans in (sentence.source_spans, sentence.target_spans)
        )
        if not len(usable) or not len(written):
            return
        weights = sentence.attention[np.ix_(written, usable)]
        total = weights.sum(axis=1, keepdims=True)
        weights = np.where(total > TINY, weights / np.maximum(total, TINY), np.float32(1 / len(usable)))
        spans = [np.array(spans, np.int64) for spans in (sentence.source_spans, sentence.target_spans)]
        scores = None
        # the score of a token without characters goes to the next token, at the end to the last one
        if sentence.scores is not None:
            owners = np.minimum(np.searchsorted(written, np.arange(len(sentence.scores))), len(written) - 1)
            scores = np.bincount(owners, sentence.scores, len(written)).astype(np.float64)
        self._blocks.append(_Block(own_source, spans[0][usable], own_target, spans[1][written], weights, scores))

    def _copy(self, source: Integers, target: Integers, text: str) -> None:
        places = np.array([i for i, char in enumerate(text) if not char.isspace()], np.int64)
        spans = np.stack([places, places + 1], axis=1)
        self._blocks.append(_Block(source, spans, target, spans, None, None))

    def _append(self, text: str) -> Integers:
        """Appends text to the translation; returns the place of each of its characters."""
        first = len(self.target) + 1 if self.target else 0
        self.target += f" {text}" if self.target else text
        return np.arange(first, first + len(text))

    def _consume(self, text: str) -> Integers:
        """Returns the place in the line of each character of its next text; the line may have more characters."""
        places = np.zeros(len(text), np.int64)
        for i, char in enumerate(text):
            places[i] = min(self._cursor, max(len(self.source) - 1, 0))
            if not char.isspace():
                place = self.source.find(char, self._cursor, self._cursor + REACH)
                if place >= 0:
                    places[i], self._cursor = place, place + 1
        return places


def _with(words: Sequence[str], places: Sequence[int], copies: Sequence[str]) -> list[tuple[str, bool]]:
    """Inserts texts into words; returns each text and whether it is inserted."""
    texts = [(word, False) for word in words]
    for place, copied in reversed(list(zip(places, copies, strict=True))):
        texts.insert(place, (copied, True))
    return texts


def _split(texts: Sequence[tuple[str, bool]], places: Integers) -> tuple[Integers, list[Integers]]:
    """Splits the places of joined texts: those of the texts that are not inserted, joined, and of each inserted one."""
    own, copied, start = [np.zeros(0, np.int64)], [], 0
    for text, is_inserted in texts:
        end = start + len(text)
        if is_inserted:
            copied.append(places[start:end])
        else:
            own.append(places[start : end + 1])  # with the blank behind it
        start = end + 1
    return np.concatenate(own), copied
