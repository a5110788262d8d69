"""Asynchronous calls of one session: several contexts compute at once and share its weights.

Threads may share a session's `run`, so a context is a thread with its call, not a second model. Calls start in the
order of submission; nothing is locked while they compute.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from pipelines.core import forks, machine
from pipelines.core.batches import Batch
from pipelines.core.errors import RequestError

if TYPE_CHECKING:
    from pipelines.engines.session import PrecomputedItems
    from pipelines.kernels.recommenders.native import SharedInputs

WAITING = 4  # queued calls per context; `submit` blocks beyond
Result = dict[str, NDArray[Any]]
_STARTING = threading.Lock()
os.register_at_fork(  # a child process must not inherit a held lock
    before=_STARTING.acquire, after_in_parent=_STARTING.release, after_in_child=_STARTING.release
)


class Asynchronous:
    """Asynchronous calls of a session that implements `run`.

    Attributes:
        threads: Intra-op threads of a call.
        contexts: Number of calls that compute at once; set it before the first call. 0: as many as the cores allow. A
            negative number raises RequestError at the first call.
    """

    threads: int
    contexts: int = 0
    _contexts: tuple[ThreadPoolExecutor, threading.BoundedSemaphore, int] | None = None

    def run(self, batch: Batch) -> Result:
        """Computes the outputs of a batch, see `Runnable.run`."""
        raise NotImplementedError

    def run_shared(self, batch: Batch, shared: SharedInputs) -> Result:
        """Computes the outputs of a batch whose samples have some inputs in common; engines may compute these once.

        Args:
            batch: Inputs.
            shared: The inputs that are the same in all samples.

        Returns:
            The outputs of `run`, bit for bit.
        """
        return self.run(batch)

    def precompute(
        self, count: int, batches: Iterable[Batch], shared: SharedInputs, limit: int
    ) -> PrecomputedItems | None:
        """Precomputes the part of the model that depends on the inputs of items alone, for all users.

        Args:
            count: Number of items.
            batches: Inputs of the items in order; the shared inputs are not read.
            shared: The inputs that are not those of items.
            limit: Bytes that the items may take.

        Returns:
            The items; None if the engine precomputes nothing, or if they take more.
        """
        return None

    def submit(self, batch: Batch) -> Future[Result]:
        """Runs a batch in a context of its own, after earlier submissions; blocks while too many calls wait.

        Args:
            batch: Inputs; they must not change until the future is done.

        Returns:
            Future of the outputs, or of the exception of `run`.
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
        """Runs batches in all contexts and yields the outputs in order.

        Args:
            batches: Inputs; at most one more than there are contexts are in flight.

        Yields:
            Outputs of each batch.
        """
        under_way: list[Future[Result]] = []
        _, _, count = self._contexts or self._start()
        for batch in batches:
            under_way.append(self.submit(batch))
            if len(under_way) > count:
                yield under_way.pop(0).result()
        for future in under_way:
            yield future.result()

    def _start(self) -> tuple[ThreadPoolExecutor, threading.BoundedSemaphore, int]:
        with _STARTING:
            if self._contexts is None:
                if self.contexts < 0:
                    raise RequestError(f"contexts is {self.contexts}; expected 0 or more")
                count = self.contexts or max(1, machine.cores() // self.threads)
                pool = ThreadPoolExecutor(count, thread_name_prefix="context")
                self._contexts = pool, threading.BoundedSemaphore((1 + WAITING) * count), count
                forks.register(self)
            return self._contexts

    def forked(self) -> None:
        """Drops the threads of the parent process; the next call starts new ones."""
        self._contexts = None
