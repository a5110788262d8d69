"""Tokens of queries and documents: prompts, markers, lengths, query expansion and skipped tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from zoo.texts.data.prompts import Prompts
from zoo.texts.data.tokenizer import Tokenizer, Tokens

QUERY, DOCUMENT = "query", "document"
ROLES = (QUERY, DOCUMENT)


class Roles:
    """Tokenizes queries and documents.

    A marker is a token behind the special tokens that texts begin with. Query expansion fills queries up to a length
    with a token, in general [MASK], whose vectors take part in MaxSim; other tokens attend to them only if the model
    says so.

    Args:
        features: Features of the model's card, see `LateInteraction.features`.
        tokenizer: Tokenizer of the model.

    Raises:
        RequestError: The card or the tokenizer lacks what the other names.
    """

    def __init__(self, features: Mapping[str, Any], tokenizer: Tokenizer) -> None:
        self._tokenizer, prompts = tokenizer, Prompts(features)
        self._splits, self._unknown = bool(features.get("splits_skipped")), str(features.get("unknown") or "")
        try:
            self._settings: Mapping[str, Mapping[str, Any]] = {role: features["roles"][role] for role in ROLES}
            self._expansion: Mapping[str, Any] = features["expansion"] or {}
            self._skipped = {role: self._numbers(features["skipped"][role]) for role in ROLES}
        except KeyError as error:
            raise RequestError(f"the card lacks {error}; import the model again") from error
        self._markers: dict[str, int | None] = {}
        self._prompts: dict[str, str] = {}
        for role in ROLES:
            self._markers[role], text = self._marker(str(self._settings[role]["marker"]))
            self._prompts[role] = text + prompts.role(role)
        self._filler = 0
        if self._expansion:
            filler = tokenizer.number(str(self._expansion["token"]))
            if filler is None:
                raise RequestError(f"the tokenizer has no {self._expansion['token']!r}; import the model again")
            self._filler = filler

    def _numbers(self, words: Sequence[str]) -> NDArray[np.int64]:
        """Returns the ids of words, or of their first tokens; a word that is no token has that of the unknown one."""
        if self._splits:
            numbers = [next(iter(self._tokenizer.encode(word, special_tokens=False).ids), None) for word in words]
        else:
            numbers = [self._tokenizer.number(word) for word in words]
            unknown = self._tokenizer.number(self._unknown)
            numbers = [unknown if number is None else number for number in numbers]
        return np.array([number for number in numbers if number is not None], np.int64)

    def _marker(self, text: str) -> tuple[int | None, str]:
        """Returns the id of a marker, or else the text that stands for it, as sentence-transformers does."""
        for name in dict.fromkeys((text, *text.split()[:1])):
            if name and (number := self._tokenizer.number(name)) is not None:
                return number, ""
        return None, text

    def length(self, role: str) -> int:
        """Returns the maximum number of tokens of a text.

        Args:
            role: One of `ROLES`.
        """
        return min(int(self._settings[role]["length"]), self._tokenizer.require_length(None, False))

    def require(self, role: Any) -> str:
        """Returns a role.

        Args:
            role: One of `ROLES`.

        Raises:
            RequestError: It is none of them.
        """
        if role not in ROLES:
            raise RequestError(f"found the role {role!r:.40}; expected {' or '.join(ROLES)}")
        return str(role)

    def tokens(self, texts: Sequence[str], role: str, max_length: int | None = None) -> Tokens:
        """Tokenizes texts.

        Args:
            texts: The texts.
            role: One of `ROLES`.
            max_length: Maximum number of tokens, marker included; None for that of the role.

        Returns:
            The tokens; those of an expansion are beyond `attended` if other tokens do not attend to them.
        """
        marker, most = self._markers[role], max_length or self.length(role)
        tokens = self._tokenizer([self._prompts[role] + text for text in texts], most - (marker is not None))
        if marker is not None:
            starts = np.cumsum(tokens.lengths) - tokens.lengths + len(self._tokenizer.frame[0])
            tokens = tokens._replace(
                ids=np.insert(tokens.ids, starts, marker),
                types=np.insert(tokens.types, starts, 0),
                lengths=tokens.lengths + 1,
            )
        tokens = tokens._replace(attended=tokens.lengths, context=None)
        if role != QUERY or not self.expands:
            return tokens
        return self._expanded(tokens, min(most, int(self._expansion["length"])))

    @property
    def expands(self) -> bool:
        """Whether queries are filled up to a length."""
        return bool(self._expansion)

    def _expanded(self, tokens: Tokens, length: int) -> Tokens:
        """Fills the texts up to a length."""
        missing = np.maximum(length - tokens.lengths, 0)
        ends = np.repeat(np.cumsum(tokens.lengths), missing)
        lengths = tokens.lengths + missing
        return tokens._replace(
            ids=np.insert(tokens.ids, ends, self._filler),
            types=np.insert(tokens.types, ends, 0),
            lengths=lengths,
            attended=lengths if self._expansion["attend"] else tokens.lengths,
        )

    def kept(self, ids: NDArray[Any], role: str) -> NDArray[np.bool_]:
        """Returns which tokens take part in MaxSim.

        Args:
            ids: Token ids.
            role: One of `ROLES`.

        Returns:
            bool, of the shape of `ids`.
        """
        return ~np.isin(ids, self._skipped[role])
