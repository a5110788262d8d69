"""The child process of `probe`, in which OpenVINO may crash; it serves several requests and ends when it is idle."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
from typing import Any

logger = logging.getLogger(__name__)

IDLE_SECONDS = 5.0  # seconds until a child ends
REQUEST_SECONDS = 300.0  # seconds for one request
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT)
_START = "import sys; sys.path[:] = {path!r}; from pipelines.engines.openvino.probe import serve; serve({idle})"


class _Child:
    """A running child process."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        code = _START.format(path=[path or os.getcwd() for path in sys.path], idle=IDLE_SECONDS)  # noqa: PTH109
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen([sys.executable, "-c", code], **pipes)

    def ask(self, request: bytes) -> tuple[Any, int]:
        """Sends a request; returns the answer, or None with the exit status of the child."""
        process = self._process
        assert process.stdin and process.stdout
        try:
            process.stdin.write(request)
            process.stdin.flush()
            if select.select([process.stdout], [], [], REQUEST_SECONDS)[0]:
                return pickle.load(process.stdout), 0  # of our own child
            self.end()
            return None, signal.SIGALRM
        except (BrokenPipeError, EOFError, pickle.UnpicklingError):
            return None, process.wait()
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Kills the child."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Closes the pipes, upon which a child that runs ends."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


_running: _Child | None = None
_LOCK = threading.RLock()  # one request at a time
os.register_at_fork(before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release)


def probe(request: dict[str, Any]) -> dict[str, Any] | None:
    """Checks one form of a graph in the child process.

    Args:
        request: {"graph", "form", "batch", "sizes"}, see `probe.check`; {"graph", "form", "opened"}, see
            `probe.check_as_opened`; or {"native", "form", "batch", "others"}, see `native.validation.compare`; and
            "home", the cache folder.

    Returns:
        {"difference": largest difference as a share of an output's power, infinite after a crash; "fault": its
        description; "refused": whether OpenVINO raised an error; "sizes": batch sizes that were compared; "worst":
        that of the largest difference, if there is any}. None if there
        is no reference or no child process.
    """
    with _LOCK:
        return _probe(request)


def _probe(request: dict[str, Any]) -> dict[str, Any] | None:
    global _running
    message = pickle.dumps(request)
    for _ in range(2):  # a child that was idle may just have ended
        if _running is None or _running.owner != os.getpid():
            try:
                _running = _Child()
            except OSError as error:
                logger.info("openvino is not checked: %s", error)
                return None
        answer, status = _running.ask(message)
        if answer is not None:
            return answer if "fault" in answer else None
        _running.close()
        _running = None
        if -status in CRASHES:
            name = signal.Signals(-status).name
            return _failed(f"with {request['form']}, it crashes ({name})")
        if status == signal.SIGALRM:
            return _failed(f"it takes more than {REQUEST_SECONDS:.0f} s")
    logger.info("openvino is not checked: the child process ended with status %d", status)
    return None


def _failed(fault: str) -> dict[str, Any]:
    return {"difference": math.inf, "fault": fault, "refused": False, "sizes": []}
