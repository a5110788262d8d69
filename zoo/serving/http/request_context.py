"""Context of a request: reading the body and waiting for the response, each with a timeout."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from zoo.serving.http.http_types import Refused, Request
from zoo.serving.protocol.responses import fault
from zoo.serving.workers.channel import Answer
from zoo.serving.workers.dispatcher import Dispatcher, Pending

PATIENCE = 0.25  # seconds after which it is looked whether the client is still there


class Wanted:
    """The answer to one request, which a client waits for until its deadline.

    deadline: seconds from now; patience: seconds in which the body must come. One timer looks after both and after the
    client: most requests are answered before it rings, and a timer costs one of them more than the rest of this.
    """

    __slots__ = (
        "_dispatcher",
        "_end",
        "_future",
        "_late",
        "_loop",
        "_more",
        "_patience",
        "_pending",
        "_problem",
        "_reading",
        "_request",
        "_timer",
        "_watching",
    )

    def __init__(self, dispatcher: Dispatcher, request: Request, deadline: float, patience: float) -> None:
        self._loop = loop = asyncio.get_running_loop()
        now = loop.time()
        self._dispatcher, self._request, self._patience = dispatcher, request, patience
        self._end, self._late = now + deadline, now + patience
        self._future: asyncio.Future[Answer] = loop.create_future()
        self._more: asyncio.Queue[Answer] | None = None
        self._pending: Pending | None = None
        self._reading: asyncio.Task[Any] | None = None  # the task, while it reads the body
        self._problem: Refused | None = None  # why it reads no further
        self._watching: asyncio.Task[None] | None = None
        self._timer = loop.call_at(min(self._end, self._late, now + PATIENCE), self._look)

    async def body(self, most: int) -> bytes:
        """The body of the request. Raises Refused where it does not come in time, Gone and TooLarge."""
        self._reading = task = asyncio.current_task()
        try:
            return await self._request.read(most)
        except asyncio.CancelledError:
            if self._problem is None or task is None:
                raise
            task.uncancel()
            raise self._problem from None
        finally:
            self._reading = None

    async def first(self, pending: Pending) -> Answer:
        """The answer, or its first piece. Raises Refused at the deadline, or where the client leaves."""
        self._pending = pending
        try:
            return await self._future
        except BaseException:
            self._dispatcher.drop(pending)
            raise

    def answered(self, answer: Answer) -> None:
        """A piece of the answer has come."""
        if self._more is not None:
            self._more.put_nowait(answer)
        elif not self._future.done():
            if not answer.last:
                self._more = asyncio.Queue()
            self._future.set_result(answer)

    def close(self) -> None:
        """Look no more after it."""
        self._timer.cancel()
        if self._watching is not None:
            self._watching.cancel()
        if self._future.done() and not self._future.cancelled():
            self._future.exception()  # asyncio complains of one that nobody saw

    async def pieces(self, first: Answer) -> AsyncGenerator[bytes, None]:
        """All pieces of the answer, until nobody takes them any more; at the deadline the last one says so."""
        assert self._more is not None and self._pending is not None
        try:
            yield first.body
            while not first.last:
                try:
                    async with asyncio.timeout_at(self._end):
                        first = await self._more.get()
                except TimeoutError:
                    yield fault("the deadline passed") + b"\n"
                    return
                yield first.body if first.status == 200 else first.body + b"\n"
        finally:
            self._dispatcher.drop(self._pending)

    def _look(self) -> None:
        now = self._loop.time()
        if now >= self._end:
            self._refuse(Refused(504, "the deadline passed"))
        elif self._reading is not None and now >= self._late:
            self._refuse(
                Refused(408, f"the body did not come within {self._patience:g} seconds", ("connection", "close"))
            )
        else:
            if self._reading is None and self._watching is None:
                self._watching = self._loop.create_task(self._watch())
            next_look = self._end if self._reading is None else min(self._end, self._late, now + PATIENCE)
            self._timer = self._loop.call_at(next_look, self._look)

    async def _watch(self) -> None:
        await self._request.gone()
        self._refuse(Refused(499, "the client left"))

    def _refuse(self, problem: Refused) -> None:
        if self._reading is not None:
            self._problem = problem
            self._reading.cancel()
        elif not self._future.done():
            self._future.set_exception(problem)
