"""Dataclasses of settings as plain JSON values, with lists for tuples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any


def to_plain(settings: Any, *, changed: bool = False) -> dict[str, Any]:
    """Converts a dataclass to plain JSON values.

    Args:
        settings: Dataclass.
        changed: Only fields that differ from their defaults.

    Returns:
        Value by field, tuples as lists.
    """
    values = {field.name: getattr(settings, field.name) for field in fields(settings)}
    kept = [field.name for field in fields(settings) if not changed or values[field.name] != field.default]
    return {name: list(values[name]) if isinstance(values[name], tuple) else values[name] for name in kept}


def from_plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Converts plain JSON values to arguments of a dataclass.

    Args:
        values: Result of `to_plain`.

    Returns:
        Arguments of the dataclass; lists become tuples.
    """
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
