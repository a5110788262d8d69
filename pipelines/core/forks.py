"""What a forked child process must know: only the thread that forked lives on in it."""

from __future__ import annotations

import os
import weakref
from typing import Any

_OBJECTS: weakref.WeakSet[Any] = weakref.WeakSet()


def tell(thing: Any) -> None:
    """Call `thing.forked()` in every child process that is forked from now on, as long as `thing` lives."""
    _OBJECTS.add(thing)


def _in_child() -> None:
    for thing in list(_OBJECTS):
        thing.forked()


os.register_at_fork(after_in_child=_in_child)
