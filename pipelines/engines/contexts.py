"""Asynchronous calls of one opened model: several contexts compute at once and share its weights.

A session's `run` may be called by many threads, so a context is a thread and what a call needs, no second model. Calls
begin in the order they were submitted; nothing is locked while they compute.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from numpy.typing import NDArray

from pipelines.core import forks, machine
from pipelines.core.batches import Batch
from pipelines.core.errors import RequestError

WAITING = 4  # calls that wait for a context, for each: further ones make `submit` wait
Result = dict[str, NDArray[Any]]
_STARTING = threading.Lock()
os.register_at_fork(  # the child must not find it taken by a thread that it does not have
    before=_STARTING.acquire, after_in_parent=_STARTING.release, after_in_child=_STARTING.release
)


class Asynchronous:
    """What a session has beside `run`. contexts: calls that compute at once; to be set before the first of them, 0 for
    as many as the machine has cores for. Raises RequestError, when submitted to, for a number below 0.
    """

    threads: int
    contexts: int = 0
    _contexts: tuple[ThreadPoolExecutor, threading.BoundedSemaphore, int] | None = None

    def run(self, batch: Batch) -> Result:
        """The outputs for a batch, see `Session`."""
        raise NotImplementedError

    def submit(self, batch: Batch) -> Future[Result]:
        """`run` in a context of its own: at once, or after the calls submitted before. The batch must stay as it is
        until the future is done; what is wrong with it the future raises.
        """
        pool, room, _ = self._contexts or self._start()
        room.acquire()
        try:
            future = pool.submit(self.run, batch)
        except BaseException:
            room.release()
            raise
        future.add_done_callback(lambda _: room.release())
        return future

    def map(self, batches: Iterable[Batch]) -> Iterator[Result]:
        """The outputs for batches, in their order, as many under way as there are contexts, and one more."""
        under_way: list[Future[Result]] = []
        _, _, count = self._contexts or self._start()
        for batch in batches:
            under_way.append(self.submit(batch))
            if len(under_way) > count:
                yield under_way.pop(0).result()
        for each in under_way:
            yield each.result()

    def _start(self) -> tuple[ThreadPoolExecutor, threading.BoundedSemaphore, int]:
        with _STARTING:
            if self._contexts is None:
                if self.contexts < 0:
                    raise RequestError(f"contexts is {self.contexts}; wanted 0 or more")
                count = self.contexts or max(1, machine.cores() // self.threads)
                pool = ThreadPoolExecutor(count, thread_name_prefix="context")
                self._contexts = pool, threading.BoundedSemaphore((1 + WAITING) * count), count
                forks.tell(self)
            return self._contexts

    def forked(self) -> None:
        """The contexts' threads are the parent's; the next call makes others."""
        self._contexts = None
