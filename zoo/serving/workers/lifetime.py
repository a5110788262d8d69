"""The end of the server's processes: none outlives the process that forked it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent(parent: int) -> None:
    """Lets the kernel kill the calling process when its parent's thread that forked it ends, however it ends.

    Args:
        parent: Process id of the parent; if it has ended already, so does this process.
    """
    with contextlib.suppress(OSError, AttributeError):  # no Linux
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def kill(pid: int) -> None:
    """Kills a process.

    Args:
        pid: Process id; 0 and the calling process are left alone.
    """
    if pid and pid != os.getpid():
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
