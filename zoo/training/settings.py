"""Settings of trainings: their ranges, and those that fine-tuning takes over from the model it starts from."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pipelines.core.errors import RequestError


class Range(NamedTuple):
    """Allowed values of a training setting.

    Attributes:
        words: Description.
        holds: Whether a value is allowed; called for each item of a tuple.
    """

    words: str
    holds: Callable[[Any], bool]


ABOVE_0 = Range("above 0", lambda value: value > 0)
FROM_0 = Range("0 or more", lambda value: value >= 0)
ROWS = Range("a share below 1, or a whole number of rows", lambda value: 0 < value < 1 or value > 0 == value % 1)
BELOW_1 = Range("0 or more, below 1", lambda value: 0 <= value < 1)
SHARE = Range("0 to 1", lambda value: 0 <= value <= 1)
SEED = Range("0 to 4294967295", lambda value: 0 <= value < 2**32)
PRECISION = Range("auto, fp32 or bf16", lambda value: value in ("auto", "fp32", "bf16"))


def require_settings(settings: Mapping[str, Any], ranges: Mapping[str, Range]) -> None:
    """Checks training settings against their ranges.

    Args:
        settings: {name: value}; all items of a tuple are checked.
        ranges: {name: range}. Numbers without a range must be `ABOVE_0`. All numbers must be finite.

    Raises:
        RequestError: Settings are out of range; the message lists all of them.
    """
    wrong = []
    for name, value in settings.items():
        expected = ranges.get(name, Range("", lambda value: True) if isinstance(value, str | bool) else ABOVE_0)
        values = value if isinstance(value, tuple) else (value,)
        finite = all(not isinstance(number, float) or math.isfinite(number) for number in values)
        if not (values and finite and all(map(expected.holds, values))):
            wrong.append(f"{name} {value} (expected {expected.words}{'' if finite else ', finite'})")
    if wrong:
        raise RequestError(f"found training settings out of range: {', '.join(wrong)}")


def require_kept(name: str, value: Any, expected: Any, model: str = "the model") -> None:
    """Checks a setting that fine-tuning takes over from the model it starts from.

    Args:
        name: Name of the setting.
        value: Value that was asked for.
        expected: Value of the model.
        model: Name of the model.

    Raises:
        RequestError: The two differ.
    """
    if value != expected:
        raise RequestError(
            f"found the setting {name} {value}, but fine-tuning keeps that of {model} ({expected}); leave it out"
        )
