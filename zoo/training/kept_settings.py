"""Settings that fine-tuning takes over from the model it starts from."""

from __future__ import annotations

from typing import Any

from pipelines.core.errors import RequestError


def require_kept(name: str, given: Any, kept: Any, model: str = "the model") -> None:
    """Checks a setting that fine-tuning takes over from the model it starts from.

    Args:
        name: Name of the setting.
        given: Value that was asked for.
        kept: Value of the model.
        model: Name of the model.

    Raises:
        RequestError: The two differ.
    """
    if given != kept:
        raise RequestError(
            f"found the setting {name} {given}, but fine-tuning keeps that of {model} ({kept}); leave it out"
        )
