"""Where words begin and end among the tokens of a vocabulary."""

from __future__ import annotations

import functools
import unicodedata
from collections.abc import Sequence

from zoo.translation.data.characters import CONTINUOUS

BEGINS, ENDS = 1, 2  # marks of a token: a word begins with it, or it ends one
BLANK, BYTE_BLANK, WORD_END = "▁", "Ġ", "</w>"  # of sentencepiece, of bytes as characters, of byte pairs within words


def word_marks(pieces: Sequence[str], kind: str = "sentencepiece") -> bytes:
    """Tells which tokens begin and which end words.

    Punctuation, characters of scripts without blanks and special tokens do both.

    Args:
        pieces: Piece of each token; "" for special tokens.
        kind: Tokenizer, a key of `zoo.translation.data.tokenizers.TOKENIZERS`.

    Returns:
        A byte for each token: `BEGINS` and `ENDS`, added.
    """
    if kind == "words":
        return bytes([BEGINS | ENDS]) * len(pieces)
    texts: list[str] = [*pieces]
    if kind == "bytes":
        texts = [chr(int(piece[3:5], 16)) if piece.startswith("<0x") else piece for piece in pieces]
        texts = [text if text.isascii() else "a" for text in texts]
    elif not any(piece.startswith(BLANK) for piece in pieces):
        if any(piece.endswith(WORD_END) for piece in pieces):
            texts = [f"{piece.removesuffix(WORD_END)} " if piece.endswith(WORD_END) else piece for piece in pieces]
        elif any(piece.startswith(BYTE_BLANK) for piece in pieces):
            texts = [_of_bytes(piece) for piece in pieces]
    texts = [text.replace(BLANK, " ") for text in texts]
    return bytes(
        (0 if text and _is_letter(text[0]) else BEGINS) | (0 if text and _is_letter(text[-1]) else ENDS)
        for text in texts
    )


def _is_letter(char: str) -> bool:
    """Returns whether a character beside letters is part of their word."""
    return unicodedata.category(char)[0] in "LNM" and not CONTINUOUS.match(char)


def _of_bytes(piece: str) -> str:
    """Returns the text of bytes that are written as characters; a part of a character is a letter."""
    numbers = _byte_numbers()
    if not all(char in numbers for char in piece):
        return piece
    return bytes(numbers[char] for char in piece).decode("utf-8", "replace").replace("\ufffd", "a")


@functools.cache
def _byte_numbers() -> dict[str, int]:
    """Returns the byte that each character stands for (Radford et al. 2019, as in `bytes_to_unicode` of GPT-2)."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {chr(256 + i): byte for i, byte in enumerate(others)}
