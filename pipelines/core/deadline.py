"""A time limit on a block of code: long loops check it where they report progress."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextvars import ContextVar

_end: ContextVar[float | None] = ContextVar("end", default=None)


class TimeIsUp(Exception):
    """The time limit has passed; the work inside is abandoned."""


@contextlib.contextmanager
def limit(end: float) -> Iterator[None]:
    """Context in which `check` raises TimeIsUp after a time.

    Args:
        end: End of the limit, in seconds of `time.monotonic`.
    """
    token = _end.set(end)
    try:
        yield
    finally:
        _end.reset(token)


def check() -> None:
    """Checks the limit around the caller, if there is one.

    Raises:
        TimeIsUp: The limit has passed.
    """
    end = _end.get()
    if end is not None and time.monotonic() > end:
        raise TimeIsUp
