"""Characters of a text that each token stands for."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Any

Span = tuple[int, int]  # first character, and that behind the last; equal for a token without characters
BLANK = "▁"  # sentencepiece's mark of a blank


def source_spans(vocabulary: Any, text: str) -> list[Span]:
    """Finds the characters of source tokens.

    Args:
        vocabulary: See `zoo.translation.data.vocabularies.open_vocabulary`.
        text: A source text.

    Returns:
        The span of each token of `vocabulary.encode`; empty for special tokens and those of a prompt.
    """
    prompt, before, pieces, after = vocabulary.split_source(text)
    whole = vocabulary.join_source(pieces)
    spans = piece_spans(pieces, whole, vocabulary.join_source)
    places = _places(whole, prompt + text)
    moved = [(places[a] - len(prompt), places[b] - len(prompt)) for a, b in spans]
    return [(0, 0)] * before + [(max(a, 0), max(b, 0)) for a, b in moved] + [(0, 0)] * after


def target_spans(vocabulary: Any, tokens: Sequence[int], text: str) -> list[Span]:
    """Finds the characters of target tokens.

    Args:
        vocabulary: See `zoo.translation.data.vocabularies.open_vocabulary`.
        tokens: Tokens of a translation.
        text: What `vocabulary.decode` makes of them.

    Returns:
        The span of each token; empty for special tokens.
    """
    pieces = [vocabulary.target_piece(token) for token in tokens]

    def decode(prefix: Sequence[str]) -> str:
        return str(vocabulary.decode([tokens[: len(prefix)]])[0])

    return piece_spans(pieces, text, decode)


def piece_spans(pieces: Sequence[str], text: str, join: Callable[[Sequence[str]], str]) -> list[Span]:
    """Finds the characters of pieces.

    Args:
        pieces: Pieces of a text.
        text: The text.
        join: Returns the text of the first pieces.

    Returns:
        The span of each piece, without blanks around it.
    """
    joined = "".join(pieces).replace(BLANK, " ")
    if joined.strip() == text:
        leading, total, ends = len(joined) - len(joined.lstrip()), 0, []
        for piece in pieces:
            total += len(piece)
            ends.append(min(max(total - leading, 0), len(text)))
    else:
        ends = [_common(join(pieces[:count]), text) for count in range(1, len(pieces))] + [len(text)]
    spans, begin = [], 0
    for end in ends[: len(pieces)]:
        part = text[begin:end] if end > begin else ""
        start = begin + len(part) - len(part.lstrip())
        spans.append((start, start + len(part.strip())))
        begin = max(begin, end)
    return spans


def _common(one: str, other: str) -> int:
    """Returns the length of the common prefix of two texts."""
    if other.startswith(one):
        return len(one)
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _places(normalized: str, text: str) -> list[int]:
    """Returns the place in a text of each place, 0 to len, in its normalized form."""
    if normalized == text:
        return list(range(len(text) + 1))
    places = [len(text)] * (len(normalized) + 1)
    for kind, a, b, c, d in difflib.SequenceMatcher(None, normalized, text, autojunk=False).get_opcodes():
        for i in range(a, b):
            places[i] = c + (i - a if kind == "equal" else (i - a) * (d - c) // (b - a))
    return places
