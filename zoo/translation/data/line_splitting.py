"""Lines cut into sentences that a model can translate, and text that is copied to the translation."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import numpy as np

from pipelines.core.errors import RequestError
from pipelines.data.tokenization import MAX_TOKEN_CHARACTERS
from zoo.translation.data.characters import clean_characters
from zoo.translation.data.known_text import FORMAT
from zoo.translation.data.lines import Line, Piece
from zoo.translation.data.parallel_text import normalize_whitespace
from zoo.translation.data.sentence_splitting import split_sentences
from zoo.translation.data.tokens import UNKNOWN, Tokens

UNKNOWN_SCRIPT = "is in a script or language that the model does not know"
CUT_CHARACTERS = 4  # characters per token of a text with more than `MAX_TOKEN_CHARACTERS`, which is cut before encoding
MAX_WORD = 100  # a longer word of ASCII in a sentence that is too long is an address or data, which is copied
SHOWN_CHARACTERS = 40  # characters of a copied text that are shown

_CLAUSE_END = re.compile(r"[,;:.!?\u2013\u2014]\s|[\u3001\u3002\uff0c\uff1b\uff1a\u060c\u061b]\s?")


@dataclass
class LineSplitter:
    """Cuts one line into the sentences that a model translates and text that is copied.

    Attributes:
        vocabulary: The vocabulary.
        max_length: Maximum number of tokens of a sentence.
        language: Language of the text; "" if it is unknown.
        every: Whether each sentence is translated alone; else only those of a line that is too long or has words to
            copy.
        most: Maximum number of sentences of a line; None: any.
        parts: Tokens of the sentences so far.
        texts: Text of each of `parts`.
        pieces: See `Line`.
        notes: What is left out or copied.
        unknown_words: Whether a word is copied, of the words so far.
        foreign: Whether a copied text has unknown letters.
    """

    vocabulary: Any
    max_length: int
    language: str
    every: bool = False
    most: int | None = None
    parts: list[Tokens] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    notes: dict[str, None] = field(default_factory=dict)
    unknown_words: dict[str, bool] = field(default_factory=dict)
    foreign: bool = False

    def line(self, location: str, text: str) -> Line:
        """Splits a line.

        Args:
            location: Its place, for messages.
            text: The text.

        Returns:
            The line; its fault is `UNKNOWN_SCRIPT` if nothing of it is translated and it has unknown letters.

        Raises:
            RequestError: The line has more sentences than `most`.
        """
        text, notes = clean_characters(text)
        self.notes |= dict.fromkeys(notes)
        self.vocabulary, text = self.vocabulary.addressed(text)  # for all sentences of the line
        if text:
            tokens = self._encode(text)
            copies = tokens is not None and self.vocabulary.copies_words and np.any(tokens == UNKNOWN)
            if self.every or tokens is None or len(tokens) > self.max_length or copies:
                if copies or (tokens is None and self.vocabulary.copies_words):
                    self._are_unknown(text.split(" "))  # all at once
                sentences = split_sentences(text, self.language) or [text]
                if self.most is not None and len(sentences) > self.most:
                    raise RequestError(f"{location} has {len(sentences):,} sentences; expected at most {self.most:,}")
                self._add_all(sentences)
            else:
                self._add(text, tokens)
        fault = UNKNOWN_SCRIPT if self.foreign and not self.parts else ""
        parts, pieces, texts = tuple(self.parts), tuple(self.pieces), tuple(self.texts)
        return Line(location, text, fault, parts, pieces, tuple(self.notes), texts=texts)

    def _encode(self, text: str) -> Tokens | None:
        """Returns the tokens of a text, or None if it has too many characters."""
        if not self._is_short(text):
            return None
        tokens: Tokens = self.vocabulary.encode([text])[0]
        return tokens

    def _add_all(self, sentences: list[str]) -> None:
        """Adds sentences in order, see `_add`."""
        short = [i for i, sentence in enumerate(sentences) if self._is_short(sentence)]
        tokens = dict(zip(short, self.vocabulary.encode([sentences[i] for i in short]), strict=True))
        for i, sentence in enumerate(sentences):
            self._add(sentence, tokens.get(i))

    def _is_short(self, text: str) -> bool:
        """Whether a text has few enough characters to be encoded at once."""
        return len(text) <= MAX_TOKEN_CHARACTERS * self.max_length

    def _add(self, text: str, tokens: Tokens | None = None) -> None:
        """Adds a sentence: unchanged, in pieces if it is too long, or around words that the vocabulary cannot write.

        One without letters and digits is copied: models make words of "-" or "...". So is one without letters where
        unknown words are copied: such models write other numbers.
        """
        if not any(map(str.isalpha if self.vocabulary.copies_words else str.isalnum, text)):
            self._copy(text)
            return
        tokens = self._encode(text) if tokens is None else tokens
        if tokens is None or len(tokens) > self.max_length:
            self._add_pieces(text, None if tokens is None else len(tokens))
        elif not np.count_nonzero(tokens == UNKNOWN):
            self.parts.append(tokens)
            self.texts.append(text)
            self.pieces.append(())
        elif self.vocabulary.copies_words:
            self._add_around_unknown(text, tokens)
        else:
            self._add_known(text, tokens)

    def _add_around_unknown(self, text: str, tokens: Tokens) -> None:
        """Adds a sentence without its unknown words, which are inserted into its translation."""
        words = text.split(" ")
        kinds = self._are_unknown(words)
        known_words = [word for word, is_unknown in zip(words, kinds, strict=True) if not is_unknown]
        if not any(map(_has_words, known_words)):
            self._copy(text)
            return
        if len(known_words) == len(words):
            self._add_known(text, tokens)
            return
        inserted, before = [], 0
        for run, is_unknown in _grouped(words, kinds):
            if is_unknown:
                inserted.append((before / len(known_words), run))
            else:
                before += run.count(" ") + 1
        self._add_known(" ".join(known_words), None, tuple(inserted), text)

    def _add_known(
        self, text: str, tokens: Tokens | None, inserted: tuple[tuple[float, str], ...] = (), whole: str = ""
    ) -> None:
        """Adds a sentence with unknown characters; an import copies `whole` if half of it is unknown."""
        stripped = normalize_whitespace(FORMAT.sub(self._known_format, text))
        if tokens is None or stripped != text:
            tokens = self.vocabulary.encode([stripped])[0]
        unknown = np.count_nonzero(tokens == UNKNOWN)
        if not stripped:
            return
        foreign = not self.vocabulary.copies_words and 2 * unknown >= len(tokens) - self.vocabulary.frame
        if foreign or len(tokens) > self.max_length:
            self._copy(whole or text)
            return
        if unknown:
            self._note_unknown(stripped)
        for _, words in inserted:
            self._note_copy(words)
        self.parts.append(tokens)
        self.texts.append(stripped)
        self.pieces.append(inserted)

    def _known_format(self, match: re.Match[str]) -> str:
        """Returns a format character that the vocabulary knows, or nothing."""
        if match[0] in self.vocabulary.known_text:
            return match[0]
        self.notes[f"U+{ord(match[0]):04X} left out"] = None
        return ""

    def _note_unknown(self, text: str) -> None:
        for char in self.vocabulary.known_text.unknown(text):
            self.notes[f"{char} is not in the vocabulary"] = None

    def _add_pieces(self, text: str, count: int | None) -> None:
        """Cuts a sentence that is too long at clauses, else at blanks, else between characters; copies long words."""
        words = text.split(" ")
        if max(map(len, words)) > MAX_WORD and any(kinds := [self._is_data(word) for word in words]):
            for run, is_copied in _grouped(words, kinds):
                if is_copied:
                    self._copy(run)
                else:
                    self._add(run)
            return
        if len(text) < 2:
            self._copy(text)
            return
        room = max(self.max_length - self.vocabulary.frame, 1)
        count = count or len(text) // CUT_CHARACTERS
        self._add_all(list(_cut(text, max(2, -(-count // room)))))

    def _note_copy(self, text: str) -> None:
        self.notes[f"{text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + '...'} copied"] = None

    def _copy(self, text: str) -> None:
        self._note_copy(text)
        self.pieces.append(text)
        if not self.foreign and not text.isascii():
            self.foreign = any(char > "\x7f" and char.isalpha() for char in self.vocabulary.known_text.unknown(text))

    def _is_data(self, word: str) -> bool:
        """Returns whether a word of a sentence that is too long is copied unseen."""
        return len(word) > MAX_WORD and (
            word.isascii() or (self.vocabulary.copies_words and self._are_unknown([word])[0])
        )

    def _are_unknown(self, words: list[str]) -> list[bool]:
        """Returns whether each word is copied, see `KnownText.unknown_words`."""
        cached = self.unknown_words
        if new := list(dict.fromkeys(word for word in words if word not in cached)):
            cached.update(zip(new, self.vocabulary.known_text.unknown_words(new), strict=True))
        return [cached[word] for word in words]


def _has_words(text: str) -> bool:
    """Returns whether a text has a letter or digit."""
    return any(char.isalnum() for char in text)


def _grouped(words: list[str], kinds: list[bool]) -> Iterator[tuple[str, bool]]:
    """Yields runs of words of one kind, joined by blanks."""
    for kind, run in itertools.groupby(zip(kinds, words, strict=True), itemgetter(0)):
        yield " ".join([word for _, word in run]), kind


def _cut(text: str, count: int) -> Iterator[str]:
    """Yields about `count` pieces of about the same length."""
    start, size = 0, len(text) / count
    for i in range(1, count):
        target, reach = round(i * size), int(size / 3)
        low, high = max(target - reach, start + 1), target + reach
        ends = [match.end() for match in _CLAUSE_END.finditer(text, low, high)]
        ends = ends or [end for end in (text.rfind(" ", low, target), text.find(" ", target, high)) if end >= 0]
        end = min(ends, key=lambda place: abs(place - target)) if ends else max(target, start + 1)
        if piece := text[start:end].strip():
            yield piece
        start = end
    if piece := text[start:].strip():
        yield piece
