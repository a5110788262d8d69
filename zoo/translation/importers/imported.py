"""What every reader of a toolkit's files gives, and how original tokens become the zoo's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zoo.translation.data.parallel_text import END, PAD, START, UNKNOWN
from zoo.translation.data.vocabularies import Framing
from zoo.translation.models.config import BARRED, Form
from zoo.translation.search.beam_search import Rules

FIRST = 1 + max(PAD, UNKNOWN, START, END)  # the token that the original's own begin with


@dataclass(frozen=True)
class Imported:
    """A model of another toolkit as the zoo's `Transformer`.

    state: its state dict, as arrays. framing, pieces, files: of its vocabularies
    (`zoo.translation.data.vocabularies`); pieces are the texts of the tokens of the source, and of the target where
    that
    is another vocabulary. max_length: tokens of a source. magnitudes: {weight of the state dict: greatest magnitude of
    what it is multiplied with} where the original tells it. about: for the card.
    """

    form: Form
    pre_norm: bool
    state: Mapping[str, NDArray[np.float32]]
    framing: Framing
    pieces: tuple[Sequence[str | None], ...]
    files: Mapping[str, bytes]
    rules: Rules
    max_length: int
    languages: str = ""
    about: Mapping[str, Any] = field(default_factory=dict)
    magnitudes: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Renumbering:
    """Original tokens to the zoo's: the unknown one and the end are `UNKNOWN` and `END`, all others follow from `FIRST`
    in their order. `PAD` and `START` are new.

    size: of the original vocabulary. unknown, end: of the original, -1: it has none.
    """

    size: int
    unknown: int
    end: int

    @property
    def ours(self) -> NDArray[np.int64]:
        """int64 [size]: the zoo's token of every original one."""
        others = np.ones(self.size, bool)
        aliases = {token: ours for token, ours in ((self.unknown, UNKNOWN), (self.end, END)) if token >= 0}
        others[list(aliases)] = False
        found = np.cumsum(others) + FIRST - 1
        for token, ours in aliases.items():
            found[token] = ours
        return found

    @property
    def tokens(self) -> int:
        """Tokens of the zoo's vocabulary."""
        return int(self.ours.max(initial=FIRST - 1)) + 1

    def table(self, original: NDArray[np.float32], start: int = -1) -> NDArray[np.float32]:
        """Embeddings [size, width] -> [tokens, width]; `START` is that of the original token `start`, else zeros."""
        found = np.zeros((self.tokens, original.shape[1]), np.float32)
        found[self.ours] = original
        if start >= 0:
            found[START] = original[start]
        return found

    def bias(self, original: NDArray[np.float32]) -> NDArray[np.float32]:
        """Biases of the output [size] -> [tokens]: those of tokens that the original has not are `BARRED`."""
        found = np.full(self.tokens, BARRED, np.float32)
        found[self.ours] = original
        return found

    def pieces(self, original: Sequence[str | None]) -> list[str | None]:
        """Texts of the original tokens -> those of the zoo's; None where there is none."""
        found: list[str | None] = [None] * self.tokens
        for token, piece in zip(self.ours.tolist(), original, strict=False):
            found[token] = piece
        return found
