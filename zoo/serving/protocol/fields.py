"""Fields of a JSON object, read with their types checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pipelines.core.errors import RequestError

T = TypeVar("T")


class Fields:
    """Reads the fields of a JSON object; null is taken as a missing field.

    Args:
        content: The parsed JSON.
        names: Names that the object may have; empty if unknown fields are ignored.

    Raises:
        RequestError: It is no object, or has an unknown field.
    """

    def __init__(self, content: Any, names: Sequence[str] = ()) -> None:
        if not isinstance(content, dict):
            raise RequestError(f"found {_shown(content)} as the body, expected a JSON object")
        if names and (unknown := next((name for name in content if name not in names), None)) is not None:
            raise RequestError(f"found the field {unknown[:40]!r}, expected {', '.join(names)}")
        self._content: Mapping[str, Any] = content

    def value(self, name: str) -> Any:
        """Returns a field that must be there.

        Args:
            name: Name of the field.

        Raises:
            RequestError: It is missing.
        """
        if (value := self._content.get(name)) is None:
            raise RequestError(f"found no {name}, expected this field")
        return value

    def has(self, name: str) -> bool:
        """Returns whether a field is there.

        Args:
            name: Name of the field.
        """
        return self._content.get(name) is not None

    def object(self, name: str) -> Mapping[str, Any]:
        """Returns an object, {} if it is missing.

        Args:
            name: Name of the field.

        Raises:
            RequestError: It is no object.
        """
        value = self._content.get(name)
        if value is not None and not isinstance(value, dict):
            raise RequestError(f"found {name} {_shown(value)}, expected an object")
        return value or {}

    def text(self, name: str, default: T) -> str | T:
        """Returns a text.

        Args:
            name: Name of the field.
            default: Value if it is missing.

        Raises:
            RequestError: It is no text.
        """
        value = self._content.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise RequestError(f"found {name} {_shown(value)}, expected a text")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Returns a boolean.

        Args:
            name: Name of the field.
            default: Value if it is missing.

        Raises:
            RequestError: It is neither true nor false.
        """
        value = self._content.get(name)
        if value is not None and not isinstance(value, bool):
            raise RequestError(f"found {name} {_shown(value)}, expected true or false")
        return default if value is None else value

    def whole(self, name: str, maximum: int, minimum: int = 1) -> int | None:
        """Returns an integer.

        Args:
            name: Name of the field.
            maximum: Largest number.
            minimum: Smallest number.

        Returns:
            The number; None if the field is missing.

        Raises:
            RequestError: It is another value.
        """
        value = self._content.get(name)
        if value is not None and (type(value) is not int or not minimum <= value <= maximum):
            raise RequestError(f"found {name} {_shown(value)}, expected a whole number from {minimum} to {maximum:,}")
        return value

    def choice(self, name: str, choices: Sequence[str], default: str) -> str:
        """Returns one of several texts, whose case does not matter.

        Args:
            name: Name of the field.
            choices: Lower-case texts.
            default: Value if it is missing.

        Raises:
            RequestError: It is another text.
        """
        value = self.text(name, default).lower()
        if value not in choices:
            raise RequestError(f"found {name} {value[:40]!r}, expected {' or '.join(choices)}")
        return value

    def texts(self, name: str) -> list[str]:
        """Returns a list of texts.

        Args:
            name: Name of the field, which must be there.

        Raises:
            RequestError: It is missing or no list of texts.
        """
        value = self.value(name)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise RequestError(f"found {name} {_shown(value)}, expected a list of texts")
        return value


def _shown(value: Any) -> str:
    return "a list" if isinstance(value, list) else "an object" if isinstance(value, dict) else repr(value)[:40]
