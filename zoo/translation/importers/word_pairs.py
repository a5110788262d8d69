"""Byte pairs within words (Sennrich et al. 2016) as the tokenizer.json of the library tokenizers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pipelines.core.errors import RequestError, catch_panics, one_line, requires
from zoo.translation.data.tokenizers import WORD_END

NAME = "merges.txt"
SPACES = {"type": "WhitespaceSplit"}
# Blenderbot-small: lower case; punctuation begins a word, an apostrophe is one, and so is the end of a line
BLENDERBOT: dict[str, Any] = {
    "normalizer": {
        "type": "Sequence",
        "normalizers": [
            {"type": "Replace", "pattern": {"Regex": r"(?<=[^\s'])\n"}, "content": " __newln__ "},
            {"type": "Lowercase"},
        ],
    },
    "pre_tokenizer": {
        "type": "Sequence",
        "pretokenizers": [
            SPACES,
            {"type": "Split", "pattern": {"Regex": "[.,!?()]"}, "behavior": "MergedWithNext", "invert": False},
            {"type": "Split", "pattern": {"String": "'"}, "behavior": "Isolated", "invert": False},
        ],
    },
}


def word_pairs(pieces: Sequence[str | None], merges: bytes, unknown: str, form: Mapping[str, Any]) -> bytes:
    """Makes a tokenizer of words in pieces.

    Args:
        pieces: The piece of every token, `WORD_END` behind those that end a word; None: no piece.
        merges: Content of merges.txt: a pair of pieces a line, the first merges first.
        unknown: Piece of other characters.
        form: Normalizer and pre-tokenizer as in tokenizer.json.

    Returns:
        Content of tokenizer.json. Merged pieces that are no tokens have numbers behind all tokens.

    Raises:
        RequestError: The merges are damaged.
    """
    with requires(NAME, "int8-zoo[import]"):
        import tokenizers
    lines = [line.split() for line in merges.decode("utf-8", "replace").split("\n") if not line.startswith("#version")]
    pairs = [(line[0], line[1]) for line in lines if len(line) >= 2]
    numbers = {piece: token for token, piece in enumerate(pieces) if piece is not None}
    for piece in (part for a, b in pairs for part in (a, b, a + b)):
        numbers.setdefault(piece, len(pieces) + len(numbers))
    try:
        with catch_panics(quiet=True):
            model = tokenizers.models.BPE(numbers, pairs, unk_token=unknown, end_of_word_suffix=WORD_END)
            made = json.loads(tokenizers.Tokenizer(model).to_str())
            made |= {**form, "decoder": {"type": "BPEDecoder", "suffix": WORD_END}}
            return tokenizers.Tokenizer.from_str(json.dumps(made)).to_str().encode()
    except Exception as error:  # errors of the library have no class of their own
        raise RequestError(f"{NAME} is damaged ({one_line(error)})") from error
