"""Access log: one JSON line per request on stdout, written by its own thread."""

from __future__ import annotations

import logging
import queue
import sys
import threading
from typing import Any

import orjson

MAX_QUEUED = 65536  # lines; further lines are dropped

logger = logging.getLogger(__name__)


class AccessLog:
    """Writes lines in the background; a slow or closed stdout does not delay requests."""

    def __init__(self) -> None:
        self._lines: queue.Queue[dict[str, Any] | None] = queue.Queue(MAX_QUEUED)
        self._thread: threading.Thread | None = None

    def add(self, line: dict[str, Any]) -> None:
        """Queues a line.

        Args:
            line: Fields of the line.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._write, name="zoo-access-log", daemon=True)
            self._thread.start()
        if self._thread.is_alive() and not self._lines.full():
            self._lines.put_nowait(line)

    def close(self, timeout: float) -> None:
        """Writes the queued lines.

        Args:
            timeout: Maximum duration, in seconds.
        """
        if self._thread is not None:
            if not self._lines.full():
                self._lines.put_nowait(None)
            self._thread.join(timeout)

    def _write(self) -> None:
        out = sys.stdout.buffer
        try:
            while (line := self._lines.get()) is not None:
                out.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
                if self._lines.empty():
                    out.flush()
        except (OSError, ValueError) as error:  # ValueError: it is closed
            logger.warning("the access log stops: stdout is closed (%s)", getattr(error, "strerror", "") or error)
