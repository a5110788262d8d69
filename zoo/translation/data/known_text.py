"""Characters and words that a vocabulary can write, many at once."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

FORMAT = re.compile(
    "[\u00ad\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufe00-\ufe0f\ufeff\ufff9-\ufffb\U000e0000-\U000e0fff]"
)
_PLACEHOLDER = re.compile(r"(\{.*\}|<[^<>]+>)\W*")
_PUNCTUATION = frozenset("()[]{}<>\"';:,.!?*")
_SEEN, _KNOWN, _LETTER, _FORMAT, _PUNCT = 1, 2, 4, 8, 16  # flags of a character


class KnownText:
    """Which characters and words a vocabulary can write.

    Args:
        can_write: Returns for texts of one or two characters whether the vocabulary can write them.
    """

    def __init__(self, can_write: Callable[[list[str]], Sequence[bool]]) -> None:
        self._can_write = can_write
        self._by_code = bytearray(0x110000)  # flags by code point; 0: not asked yet
        self._flags = np.frombuffer(self._by_code, np.uint8)

    def __contains__(self, char: str) -> bool:
        return not self.unknown(char)

    def unknown(self, text: str) -> list[str]:
        """Returns the different characters of a text that the vocabulary cannot write, blanks left out, in order.

        Args:
            text: Any text.
        """
        chars = dict.fromkeys(text)
        if any(not self._by_code[ord(char)] for char in chars):
            self._flags_of(_codes("".join(chars)))
        return [char for char in chars if not self._by_code[ord(char)] & _KNOWN and char != " "]

    def unknown_words(self, words: Sequence[str]) -> list[bool]:
        """Tells which words are copied: addresses, and words of at least as many unknown characters as letters.

        A character is also known if the vocabulary writes it behind the one before it.

        Args:
            words: Words without blanks.

        Returns:
            Whether the word is copied, of every word.
        """
        codes = _codes("".join(word + " " for word in words))
        flags = self._flags_of(codes)
        blank = codes == 32
        ends = np.flatnonzero(blank)
        starts = np.concatenate([ends[:0], [0], ends[:-1] + 1])
        unknown = (flags & _KNOWN == 0) & ~blank
        missing = unknown.copy()
        places = np.flatnonzero(missing)
        places = places[(places > 0) & ~blank[places - 1]]
        pairs, inverse = np.unique(codes[places - 1].astype(np.int64) << 32 | codes[places], return_inverse=True)
        texts = [chr(pair >> 32) + chr(pair & 0xFFFFFFFF) for pair in pairs.tolist()]
        if texts:
            missing[places] &= ~np.array(self._can_write(texts), bool)[inverse.ravel()]
        copied: NDArray[np.bool_] = np.logical_or.reduceat(missing, starts)
        copied &= np.logical_or.reduceat((flags & _FORMAT == 0) & ~blank, starts)
        letters = np.add.reduceat((flags & _LETTER != 0) & ~missing, starts, dtype=np.int64)
        many = letters <= _inner_counts(unknown, (flags & _PUNCT == 0) & ~blank, starts)
        certain = copied & ((letters == 0) | many)
        for i in np.flatnonzero(copied & ~certain).tolist():
            word = words[i]
            copied[i] = "@" in word or "://" in word or (word[0] in "{<" and bool(_PLACEHOLDER.fullmatch(word)))
        return [bool(flag) for flag in copied.tolist()]

    def _flags_of(self, codes: NDArray[np.integer]) -> NDArray[np.uint8]:
        """Flags of characters, computed at their first occurrence."""
        flags: NDArray[np.uint8] = self._flags[codes]
        if not flags.all():
            chars = list(map(chr, np.unique(codes[flags == 0]).tolist()))
            for char, is_known in zip(chars, self._can_write(chars), strict=True):
                kinds = _LETTER * char.isalpha() | _FORMAT * bool(FORMAT.match(char)) | _PUNCT * (char in _PUNCTUATION)
                self._flags[ord(char)] = _SEEN | _KNOWN * is_known | kinds
            flags = self._flags[codes]
        return flags


def _codes(text: str) -> NDArray[np.uint32]:
    """Code points of a text."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


def _inner_counts(counted: NDArray[np.bool_], inner: NDArray[np.bool_], starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Counts characters of every word from its first to its last inner one, e.g. without punctuation around it."""
    places = np.arange(len(inner))
    first = np.minimum.reduceat(np.where(inner, places, len(inner)), starts)
    last = np.maximum.reduceat(np.where(inner, places, -1), starts)
    before = np.concatenate([[0], np.cumsum(counted)])
    return np.where(last < 0, 0, before[last + 1] - before[np.minimum(first, len(inner) - 1)])
