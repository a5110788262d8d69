"""Start and end of the server's processes: none outlives the process that forked it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
from collections.abc import Callable

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def fork_process(run: Callable[[socket.socket], None]) -> tuple[socket.socket, int]:
    """Forks a process that ends after `run`. Call it before any thread is started.

    The process ignores SIGINT and SIGTERM: its parent ends it by closing the channel.

    Args:
        run: Takes the process's end of the channel.

    Returns:
        The parent's end of the channel, and the process id.
    """
    parent_end, child_end = socket.socketpair()
    parent = os.getpid()
    if pid := os.fork():
        child_end.close()
        return parent_end, pid
    end_with_parent(parent)
    parent_end.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        run(child_end)
    finally:
        os._exit(0)


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
