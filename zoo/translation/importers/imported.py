"""Models of other toolkits as read by the importers, and the renumbering of their tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zoo.translation.data.tokens import END, PAD, START, UNKNOWN
from zoo.translation.data.vocabularies import Framing
from zoo.translation.models.config import EXCLUDED_LOGIT, ModelConfig
from zoo.translation.search.config import SearchConfig

FIRST = 1 + max(PAD, UNKNOWN, START, END)  # first token of the original's other tokens


@dataclass(frozen=True)
class ImportedModel:
    """A model of another toolkit, converted for `Transformer`.

    Attributes:
        config: Configuration of the network.
        pre_norm: Whether layers are pre-LN.
        state: State dict, float32.
        framing: Special tokens around sentences, see `zoo.translation.data.vocabularies`.
        pieces: Pieces of the source tokens, and of the target tokens if those differ.
        files: Content of the vocabulary's files by name.
        rules: Search options.
        max_length: Maximum number of source tokens.
        languages: "source-target", such as "en-de".
        about: Facts for the card.
        magnitudes: Maximum magnitude of the input of a weight, if the original has them.
        alignment: Values of `zoo.translation.alignment.forced.AttentionHeads`, if the original names them.
    """

    config: ModelConfig
    pre_norm: bool
    state: Mapping[str, NDArray[np.float32]]
    framing: Framing
    pieces: tuple[Sequence[str | None], ...]
    files: Mapping[str, bytes]
    rules: SearchConfig
    max_length: int
    languages: str = ""
    about: Mapping[str, Any] = field(default_factory=dict)
    magnitudes: Mapping[str, float] = field(default_factory=dict)
    alignment: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Renumbering:
    """Mapping of original tokens to the zoo's.

    The unknown token and the end become `UNKNOWN` and `END`; all others follow from `FIRST` on in their order. `PAD`
    and `START` are new.

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
        numbers = np.cumsum(others) + FIRST - 1
        for token, ours in aliases.items():
            numbers[token] = ours
        return numbers

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
        table = np.zeros((self.tokens, original.shape[1]), np.float32)
        table[self.ours] = original
        if start >= 0:
            table[START] = original[start]
        return table

    def bias(self, original: NDArray[np.float32]) -> NDArray[np.float32]:
        """Renumbers the bias of the logits.

        Args:
            original: float32 [size].

        Returns:
            float32 [tokens]; new tokens get `EXCLUDED_LOGIT`.
        """
        bias = np.full(self.tokens, EXCLUDED_LOGIT, np.float32)
        bias[self.ours] = original
        return bias

    def pieces(self, original: Sequence[str | None]) -> list[str | None]:
        """Renumbers the pieces of tokens.

        Args:
            original: Piece of each original token.

        Returns:
            Piece of each token; None for no piece.
        """
        pieces: list[str | None] = [None] * self.tokens
        for token, piece in zip(self.ours.tolist(), original, strict=False):
            pieces[token] = piece
        return pieces
