"""Settings in dataclasses as plain values for JSON, which has lists for tuples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any


def to_plain(settings: Any, *, changed: bool = False) -> dict[str, Any]:
    """{field: value} of a dataclass, tuples as lists. changed: of those alone that differ from their defaults."""
    values = {each.name: getattr(settings, each.name) for each in fields(settings)}
    kept = [each.name for each in fields(settings) if not changed or values[each.name] != each.default]
    return {name: list(values[name]) if isinstance(values[name], tuple) else values[name] for name in kept}


def from_plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a dataclass out of what `to_plain` made: lists as tuples."""
    return {name: tuple(each) if isinstance(each, list) else each for name, each in values.items()}
