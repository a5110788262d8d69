"""Terms with the translation that they are to have."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

WORD = re.compile(r"\w+|[^\w\s]")


class Glossary:
    """Finds terms in sentences, as whole words, in any case; of terms that overlap the first and longest.

    Args:
        terms: {term: its translation}.
    """

    def __init__(self, terms: Mapping[str, str]) -> None:
        self._translations: dict[tuple[str, ...], str] = {}
        for term, translation in terms.items():
            self._translations.setdefault(_words(term), translation)
        self._longest = max(map(len, self._translations), default=0)

    def __len__(self) -> int:
        return len(self._translations)

    def translations(self, text: str) -> list[str]:
        """Returns the translations of the terms in a sentence, each once.

        Args:
            text: The sentence.
        """
        return list(dict.fromkeys(self._found(_words(text))))

    def _found(self, words: tuple[str, ...]) -> Iterator[str]:
        start = 0
        while start < len(words):
            for size in range(min(self._longest, len(words) - start), 0, -1):
                if (translation := self._translations.get(words[start : start + size])) is not None:
                    yield translation
                    start += size
                    break
            else:
                start += 1


def _words(text: str) -> tuple[str, ...]:
    return tuple(WORD.findall(text.casefold()))
