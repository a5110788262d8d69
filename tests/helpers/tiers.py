"""Which parameters of a test are in the fast tier."""

from collections.abc import Iterable
from typing import Any

import pytest


def one_in(count: int, values: Iterable[Any]) -> list[Any]:
    """Returns values, or tuples of them, as parameters; one in `count` is in the fast tier, the first among them.

    Of a product of lists it samples all of them if `count` has no common factor with their lengths.
    """
    rows = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*row, marks=[pytest.mark.slow] if i % count else []) for i, row in enumerate(rows)]
