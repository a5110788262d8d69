"""Models of other toolkits as read by the importers, and the renumbering of their tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zoo.translation.data.parallel_text import END, PAD, START, UNKNOWN
from zoo.translation.data.vocabularies import Framing
from zoo.translation.models.config import BARRED, ModelConfig
from zoo.translation.search.beam_search import Rules

FIRST = 1 + max(PAD, UNKNOWN, START, END)  # the token that the original's own begin with


@dataclass(frozen=True)
class Imported:
    """Another toolkit's model for the zoo's `Transformer`.

    `state` is its state dict, as arrays. `framing`, `pieces` and `files` are of its vocabularies
    (`zoo.translation.data.vocabularies`); `pieces` are the texts of the source tokens, and of the target tokens where
    those differ. `max_length` is the maximum number of source tokens. `magnitudes` are {weight of the state dict:
    maximum magnitude of its input}, if the original has them. `about` is for the card.
    """

    form: ModelConfig
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
    """Mapping of original tokens to the zoo's: the unknown token and the end become `UNKNOWN` and `END`, all others
    follow from `FIRST` on in their order. `PAD` and `START` are new.

    Attributes:
        size: Size of the original vocabulary.
        unknown: The original unknown token; -1: none.
        end: The original end token; -1: none.
    """

    size: int
    unknown: int
    end: int

    @property
    def ours(self) -> NDArray[np.int64]:
        """The zoo's token of every original token, int64 [size]."""
        others = np.ones(self.size, bool)
        aliases = {token: ours for token, ours in ((self.unknown, UNKNOWN), (self.end, END)) if token >= 0}
        others[list(aliases)] = False
        found = np.cumsum(others) + FIRST - 1
        for token, ours in aliases.items():
            found[token] = ours
        return found

    @property
    def tokens(self) -> int:
        """Size of the zoo's vocabulary."""
        return int(self.ours.max(initial=FIRST - 1)) + 1

    def table(self, original: NDArray[np.float32], start: int = -1) -> NDArray[np.float32]:
        """Renumbers a table of embeddings.

        Args:
            original: float32 [size, width].
            start: Original token whose row becomes that of `START`; -1: zeros.

        Returns:
            float32 [tokens, width].
        """
        found = np.zeros((self.tokens, original.shape[1]), np.float32)
        found[self.ours] = original
        if start >= 0:
            found[START] = original[start]
        return found

    def bias(self, original: NDArray[np.float32]) -> NDArray[np.float32]:
        """Renumbers the bias of the logits, float32 [size] -> [tokens]; new tokens get `BARRED`."""
        found = np.full(self.tokens, BARRED, np.float32)
        found[self.ours] = original
        return found

    def pieces(self, original: Sequence[str | None]) -> list[str | None]:
        """Renumbers the pieces of tokens; None for no piece."""
        found: list[str | None] = [None] * self.tokens
        for token, piece in zip(self.ours.tolist(), original, strict=False):
            found[token] = piece
        return found
