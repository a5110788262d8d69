"""Scheduling policy of the server's threads."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
NICE = 10  # of work beside requests: a tenth of a core that requests use, and all of an idle one


def set_batch_scheduling(pid: int, enabled: bool) -> None:
    """Sets the scheduling policy of all threads of a process: SCHED_BATCH, or SCHED_OTHER.

    With SCHED_BATCH, a thread that wakes up does not preempt a running thread, so that it finds several requests per
    wakeup and CPU caches stay warm; next to other processes it waits longer. Without permission, the policy is
    unchanged.

    Args:
        pid: Process id.
        enabled: Whether to use SCHED_BATCH.
    """
    policy = os.SCHED_BATCH if enabled else os.SCHED_OTHER
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setscheduler(int(thread.name), policy, os.sched_param(0))


def at_low_priority(function: Callable[[], T]) -> T:
    """Calls a function in a thread of low priority, and returns its result or raises its exception.

    The priority of the calling thread stays, which a process without privileges could not raise again.

    Args:
        function: The function.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
