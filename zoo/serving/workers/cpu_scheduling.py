"""Scheduling policy of the server's threads."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


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
