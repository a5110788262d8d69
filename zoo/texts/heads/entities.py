"""Tokens with scores of labels to entities: the aggregation strategies of transformers' token classification."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

STRATEGIES = ("none", "simple", "first", "average", "max")
Floats = NDArray[np.float32]
Join = Callable[[Sequence[str]], str]  # texts of tokens to readable text


class Piece(NamedTuple):
    """A token of a text.

    Attributes:
        word: Text of the token, such as ##ing.
        scores: Score of every label, float32 [labels].
        start: Offset of its first character.
        end: Offset after its last character.
        position: Number in its window.
        is_subword: Whether it continues the word of the token before.
    """

    word: str
    scores: Floats
    start: int
    end: int
    position: int
    is_subword: bool


def aggregate(pieces: Sequence[Piece], names: Sequence[str], strategy: str, join: Join) -> list[dict[str, Any]]:
    """Labels tokens, and merges those of one entity.

    Args:
        pieces: Tokens of a text, or of a window of it.
        names: Labels in the order of the scores.
        strategy: "none" for a result a token; "simple" to merge tokens of one label; "first", "average" or "max" to
            give the tokens of a word the label of its first token, of their mean scores or of the highest score before.
        join: Joins the texts of tokens to readable text.

    Returns:
        Without merging {"entity", "score", "index", "word", "start", "end"} of each token, otherwise {"entity_group",
        "score", "word", "start", "end"} of each entity.
    """
    if strategy in ("none", "simple"):
        labelled = [
            {
                "entity": names[int(piece.scores.argmax())],
                "score": piece.scores.max(),
                "index": piece.position,
                "word": piece.word,
                "start": piece.start,
                "end": piece.end,
            }
            for piece in pieces
        ]
        if strategy == "none":
            return [{**token, "score": float(token["score"])} for token in labelled]
    else:
        labelled = [_label_word(word, names, strategy, join) for word in _words(pieces)]
    return [_merge(group, join) for group in _groups(labelled)]


def merge_windows(entities: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Removes entities that overlap: of two the longer one is kept, of equal length the one with the higher score.

    Args:
        entities: Entities of the windows of a text.

    Returns:
        Entities by their start.
    """
    merged: list[dict[str, Any]] = []
    for entity in sorted(entities, key=lambda x: x["start"]):
        last = merged[-1] if merged else None
        if last is None or not last["start"] <= entity["start"] < last["end"]:
            merged.append(entity)
        elif _rank(entity) > _rank(last):
            merged[-1] = entity
    return merged


def _rank(entity: dict[str, Any]) -> tuple[int, float]:
    return entity["end"] - entity["start"], entity["score"]


def _words(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Groups the tokens of each word."""
    word: list[Piece] = []
    for piece in pieces:
        if word and not piece.is_subword:
            yield word
            word = []
        word.append(piece)
    if word:
        yield word


def _label_word(word: Sequence[Piece], names: Sequence[str], strategy: str, join: Join) -> dict[str, Any]:
    if strategy == "average":
        scores = np.nanmean(np.stack([piece.scores for piece in word]), axis=0)
    else:
        scores = (word[0] if strategy == "first" else max(word, key=lambda piece: piece.scores.max())).scores
    best = int(scores.argmax())
    return {
        "entity": names[best],
        "score": scores[best],
        "word": join([piece.word for piece in word]),
        "start": word[0].start,
        "end": word[-1].end,
    }


def split_tag(label: str) -> tuple[str, str]:
    """Splits a BIO label; a label of another form continues an entity of its name.

    Args:
        label: A label, such as B-PER.

    Returns:
        "B" or "I", and the type of the entity.
    """
    return (label[0], label[2:]) if label.startswith(("B-", "I-")) else ("I", label)


def _groups(labelled: Sequence[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Groups adjacent tokens or words of one entity; B- begins another one."""
    group: list[dict[str, Any]] = []
    for token in labelled:
        begin, tag = split_tag(token["entity"])
        if group and (begin == "B" or tag != split_tag(group[-1]["entity"])[1]):
            yield group
            group = []
        group.append(token)
    if group:
        yield group


def _merge(group: Sequence[dict[str, Any]], join: Join) -> dict[str, Any]:
    return {
        "entity_group": group[0]["entity"].split("-", 1)[-1],
        "score": float(np.nanmean([token["score"] for token in group])),
        "word": join([token["word"] for token in group]),
        "start": group[0]["start"],
        "end": group[-1]["end"],
    }
