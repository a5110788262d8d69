"""Templates of rerankers that are language models: a prompt with places for a query and a document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from pipelines.core.errors import RequestError
from zoo.texts.data.tokenizer import Tokenizer, Tokens

PLAIN, INSTRUCTED = "plain", "instructed"  # templates of a card: without and with an instruction
QUERY, DOCUMENT, INSTRUCTION = "query", "document", "instruction"  # places
FILLERS = ("0", "1 2 3 4")  # tokens that both have at the end are the template's


class TemplateTokenizer(Tokenizer):
    """Tokenizes pairs of a query and a document as one text, which a template makes of them.

    The end of a text over the token limit is cut, and the tokens of the template behind the document then replace the
    last ones, as in sentence-transformers 6.2.
    """

    SPECIAL_TOKENS: ClassVar[bool] = False  # the template has them

    def __init__(
        self, path: Path, vocabulary: int, max_length: int, lower: bool, templates: Mapping[str, Sequence[Any]]
    ) -> None:
        """Opens a tokenizer.

        Args:
            path: The tokenizer.json.
            vocabulary: Rows of the model's token embedding.
            max_length: Maximum number of tokens of a text.
            lower: Whether texts are lowercased first.
            templates: Texts of a template, and between them the names of what stands there, `QUERY`, `DOCUMENT` or
                `INSTRUCTION`; by `PLAIN` and, of a model that takes instructions, `INSTRUCTED`.

        Raises:
            RequestError: The file is damaged, belongs to another model, or the templates are not as expected.
        """
        super().__init__(path, vocabulary, max_length, lower)
        self._templates = {name: list(parts) for name, parts in templates.items()}
        for parts in self._templates.values():
            if not {QUERY, DOCUMENT} <= {*parts[1::2]} <= {QUERY, DOCUMENT, INSTRUCTION} or len(parts) % 2 == 0:
                raise RequestError(f"the card has the template {parts!r:.80}; import the model again")
        self._ends: dict[str, list[int]] = {}

    def prompted(self, texts: Sequence[str], prompt: str) -> Any:
        """See `Tokenizer.prompted`: the prompt is an instruction of the template.

        Args:
            texts: A query and a document.
            prompt: The instruction; "" for that of the template.
        """
        if prompt and INSTRUCTED not in self._templates:
            raise RequestError("found a prompt, but the template of the model has no place for an instruction")
        return (*texts, prompt)

    def __call__(
        self,
        texts: Sequence[Any],
        max_length: int | None = None,
        direction: str | None = None,
        offsets: bool = False,
    ) -> Tokens:
        """See `Tokenizer.__call__`.

        Args:
            texts: Results of `prompted`.
            max_length: Maximum number of tokens; None for that of the model.
            direction: It is not used: the end is cut.
            offsets: See `Tokenizer.__call__`.
        """
        tokens = super().__call__([self._filled(*parts) for parts in texts], max_length, "right", offsets)
        stops = np.cumsum(tokens.lengths)
        for i in np.flatnonzero(tokens.truncated):
            end = self._end(texts[int(i)][2])[-int(tokens.lengths[i]) :]
            tokens.ids[stops[i] - len(end) : stops[i]] = end
        return tokens

    def _filled(self, query: str, document: str, instruction: str = "") -> str:
        """Returns the text of a pair."""
        places = {QUERY: query, DOCUMENT: document, INSTRUCTION: instruction}
        parts = self._templates[INSTRUCTED if instruction else PLAIN]
        return "".join(places[part] if i % 2 else part for i, part in enumerate(parts))

    def _end(self, instruction: str) -> list[int]:
        """Returns the tokens behind the document."""
        ends = self._ends
        if instruction not in ends:
            one, other = (self.encode(self._filled(text, text, instruction), False).ids for text in FILLERS)
            pairs = enumerate(zip(reversed(one), reversed(other), strict=False))
            count = next((i for i, (token, another) in pairs if token != another), 0)
            ends = self._ends = {instruction: one[len(one) - count :]}
        return ends[instruction]
