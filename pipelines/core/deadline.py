"""A time limit on all that runs inside it: long loops check it where they say how far they are (`progress`)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextvars import ContextVar

_end: ContextVar[float | None] = ContextVar("end", default=None)


class TimeIsUp(Exception):
    """The limit has passed; what was under way is given up."""


@contextlib.contextmanager
def limit(end: float) -> Iterator[None]:
    """Let `check` raise TimeIsUp inside the context from `end` on, in seconds of `time.monotonic`."""
    token = _end.set(end)
    try:
        yield
    finally:
        _end.reset(token)


def check() -> None:
    """Raise TimeIsUp where the limit around the caller has passed; without one nothing happens."""
    end = _end.get()
    if end is not None and time.monotonic() > end:
        raise TimeIsUp
