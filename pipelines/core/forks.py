"""Notification of objects in forked child processes, which keep only the thread that forked."""

from __future__ import annotations

import os
import weakref
from typing import Any

_OBJECTS: weakref.WeakSet[Any] = weakref.WeakSet()


def register(thing: Any) -> None:
    """Calls `thing.forked()` in every child process that is forked from now on.

    Args:
        thing: Object with the method `forked`; it is referenced weakly.
    """
    _OBJECTS.add(thing)


def _in_child() -> None:
    for thing in list(_OBJECTS):
        thing.forked()


os.register_at_fork(after_in_child=_in_child)
