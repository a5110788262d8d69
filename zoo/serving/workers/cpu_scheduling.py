"""How the threads of a server share their processors."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def unhurried(pid: int, so: bool) -> None:
    """Let no thread of a process interrupt another one as soon as it has work (SCHED_BATCH), or as is usual.

    Unhurried threads find several requests when their turn comes, and the caches of who computes stay its own; beside
    processes of others they wait longer. Where the system does not allow it nothing changes.
    """
    policy = os.SCHED_BATCH if so else os.SCHED_OTHER
    with contextlib.suppress(OSError):
        for each in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setscheduler(int(each.name), policy, os.sched_param(0))
