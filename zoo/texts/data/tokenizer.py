"""Tokenization by the tokenizer.json of a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import RequestError, one_line, requires

FILE = "tokenizer.json"
CHARACTERS = 100  # a token has fewer: what is behind so many for each token of a text is not looked at
FEWEST = 0.97  # of the embeddings' rows, that a tokenizer's vocabulary has at least: some are padded to a round number
Ints = NDArray[np.int32]


class Tokens(NamedTuple):
    """Texts as tokens: ids and types, int32 [n] of all texts one after the other; lengths, int64 [texts]; cut, bool
    [texts]: whether a text was longer than the limit.
    """

    ids: Ints
    types: Ints
    lengths: NDArray[np.int64]
    cut: NDArray[np.bool_]


class Tokenizer:
    """The tokenizer of a model; a call returns the `Tokens` of texts, or of pairs of texts.

    vocabulary: rows of the model's embeddings. longest: tokens of a text, special ones included, at most. lower: texts
    are lowered first; spaces at their ends stay: sentence-transformers stripped them once, 6.2 does not. Raises
    RequestError where the file is broken, or of another model.
    """

    def __init__(self, path: Path, vocabulary: int, longest: int, lower: bool = False) -> None:
        with requires("tokenization", "int8-zoo[texts]"):
            import tokenizers
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises Exception itself
            raise RequestError(f"cannot read {path} ({one_line(error)}); copy it from the model again") from error
        size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        largest = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        if largest >= vocabulary or size < FEWEST * vocabulary:
            raise RequestError(
                f"{path} is of another model: it has {size:,} tokens, the largest {largest:,}, the model embeddings of "
                f"{vocabulary:,}"
            )
        self.longest, self._lower = longest, lower
        self._tokenizer.no_padding()
        try:
            self._tokenizer.enable_truncation(longest)
        except Exception as error:  # its special tokens alone are more
            raise RequestError(f"{path} cannot cut texts to {longest} tokens ({one_line(error)})") from error

    @property
    def special(self) -> int:
        """Tokens that an empty text has."""
        return int(self._tokenizer.num_special_tokens_to_add(is_pair=False))

    def __call__(self, texts: Sequence[str] | Sequence[tuple[str, str]]) -> Tokens:
        """The tokens of texts, or of pairs of them, of which the longer one is cut first."""
        found = self._tokenizer.encode_batch([self._trimmed(each) for each in texts])
        lengths = np.array([len(each.ids) for each in found], np.int64)
        flat: list[NDArray[Any]] = [
            np.fromiter((i for each in found for i in each.ids), np.int32, int(lengths.sum())),
            np.fromiter((i for each in found for i in each.type_ids), np.int32, int(lengths.sum())),
        ]
        longer = [bool(each.overflowing) or self._trims(text) for each, text in zip(found, texts, strict=True)]
        cut = np.array(longer, np.bool_)
        return Tokens(flat[0], flat[1], lengths, cut)

    def _trims(self, text: str | Sequence[str]) -> bool:
        parts = [text] if isinstance(text, str) else text
        return any(each[CHARACTERS * self.longest + 1 :].strip() for each in parts)

    def _trimmed(self, text: str | tuple[str, str]) -> str | tuple[str, str]:
        if not isinstance(text, str):
            return tuple(self._trimmed(each) for each in text)  # type: ignore[return-value]
        text = text[: CHARACTERS * self.longest + 1]
        return text.lower() if self._lower else text
