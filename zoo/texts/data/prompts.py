"""Prompts: prefixes of texts, by the names that a model's card gives them, as in sentence-transformers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pipelines.core.errors import RequestError

# prompts of a role, as `encode_query` and `encode_document` of sentence-transformers name them
ROLES = {"query": ("query",), "document": ("document", "passage", "corpus")}
_NAME = re.compile(r"[\w./-]+")  # a text that is put before others has a blank or a colon


class Prompts:
    """Prompts of a model.

    Args:
        features: Features of its card.

    Attributes:
        texts: Prefix by name.
        default: Prefix of texts without another prompt; "" for none.
    """

    def __init__(self, features: Mapping[str, Any]) -> None:
        self.texts: dict[str, str] = dict(features.get("prompts", {}))
        self._unpooled = bool(features.get("unpooled_prompts"))
        self.default = str(self.texts.get(features.get("prompt", ""), ""))

    def resolve(self, prompt: str | None) -> str:
        """Returns the prefix that a prompt stands for.

        Args:
            prompt: Name of a prompt, or a prefix, which has a blank or a colon; "" for none; None for the default.

        Raises:
            RequestError: The model has no prompt of this name.
        """
        if prompt is None:
            return self.default
        if not isinstance(prompt, str):
            raise RequestError(f"found the prompt {prompt!r:.60}; expected a name or a prefix")
        if prompt in self.texts:
            return self.texts[prompt]
        if _NAME.fullmatch(prompt):
            names = ", ".join(self.texts) or "none"
            raise RequestError(
                f"found no prompt {prompt:.60}; the model has {names}; a prefix of your own has a blank or a colon"
            )
        return prompt

    def prefix(self, prompt: str | None) -> str:
        """Returns the prefix of texts.

        Args:
            prompt: The prefix; None for the default.

        Raises:
            RequestError: There is one, and the model's pooling leaves prompts out, which is not supported.
        """
        prefix = self.default if prompt is None else prompt
        if prefix and self._unpooled:
            raise RequestError(
                f"found the prompt {prefix!r:.60}, which the model's pooling leaves out (include_prompt); expected none"
            )
        return prefix

    def role(self, name: str) -> str:
        """Returns the prefix of a role.

        Args:
            name: "query" or "document", a key of `ROLES`.

        Returns:
            The first prompt of the role that is not empty; "", not the default, if the model has none of them.
        """
        return next((self.texts[key] for key in ROLES[name] if self.texts.get(key)), "")
