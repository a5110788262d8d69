"""Notification of objects in forked child processes, which keep only the thread that forked."""

from __future__ import annotations

import os
import weakref
from typing import Any

_OBJECTS: weakref.WeakSet[Any] = weakref.WeakSet()


def register(instance: Any) -> None:
    """Calls `thing.forked()` in every child process that is forked from now on.

    Args:
        instance: Object with the method `forked`; it is referenced weakly.
    """
    _OBJECTS.add(instance)


def _in_child() -> None:
    for instance in list(_OBJECTS):
        instance.forked()


os.register_at_fork(after_in_child=_in_child)
