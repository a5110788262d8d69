"""Context of a request: reading the body and waiting for the response, each with a timeout."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from zoo.serving.http.http_types import Hold, HTTPException, Request
from zoo.serving.protocol.responses import error_body
from zoo.serving.workers.channel import JobResult
from zoo.serving.workers.dispatcher import Dispatcher
from zoo.serving.workers.worker_connection import PendingJob

CHECK_SECONDS = 0.25  # after which a disconnect of the client is noticed


class RequestContext:
    """Waits for the response to one request, until its deadline or the client disconnects.

    One timer covers the timeouts and the disconnect: most requests are answered before it fires, and timers are
    expensive.

    Args:
        dispatcher: Dispatcher of the job.
        request: The request.
        timeout: Request timeout, in seconds.
        read_timeout: Timeout for reading the body, in seconds.
    """

    __slots__ = (
        "_chunks",
        "_deadline",
        "_disconnect_task",
        "_dispatcher",
        "_error",
        "_future",
        "_loop",
        "_read_deadline",
        "_read_task",
        "_read_timeout",
        "_request",
        "_timer",
    )

    def __init__(self, dispatcher: Dispatcher, request: Request, timeout: float, read_timeout: float) -> None:
        self._loop = loop = asyncio.get_running_loop()
        now = loop.time()
        self._dispatcher, self._request, self._read_timeout = dispatcher, request, read_timeout
        self._deadline, self._read_deadline = now + timeout, now + read_timeout
        self._future: asyncio.Future[JobResult] = loop.create_future()
        self._chunks: asyncio.Queue[JobResult] | None = None
        self._read_task: asyncio.Task[Any] | None = None  # the current task while it reads the body
        self._error: HTTPException | None = None  # why reading was canceled
        self._disconnect_task: asyncio.Task[None] | None = None
        self._timer = loop.call_at(min(self._deadline, self._read_deadline, now + CHECK_SECONDS), self._check)

    async def read_body(self, max_bytes: int, hold: Hold | None) -> bytes:
        """Reads the body of the request.

        Args:
            max_bytes: See `Request.read`.
            hold: See `Request.read`.

        Returns:
            The body.

        Raises:
            HTTPException: A timeout passed.
            BodyTooLarge: The body is larger than `max_bytes`.
            ClientDisconnect: The body ends before its length.
        """
        self._read_task = task = asyncio.current_task()
        try:
            return await self._request.read(max_bytes, hold)
        except asyncio.CancelledError:
            if self._error is None or task is None:
                raise
            task.uncancel()
            raise self._error from None
        finally:
            self._read_task = None

    async def result(self, pending: PendingJob) -> JobResult:
        """Waits for the result of the job, or for its first chunk.

        Args:
            pending: The submitted job; it is canceled if this fails.

        Returns:
            The result.

        Raises:
            HTTPException: The deadline passed, or the client disconnected.
        """
        try:
            return await self._future
        except BaseException:
            self._dispatcher.cancel(pending)
            raise

    def deliver(self, result: JobResult) -> None:
        """Receives a result, or a chunk, from the dispatcher.

        Args:
            result: The result.
        """
        if self._chunks is not None:
            self._chunks.put_nowait(result)
        elif not self._future.done():
            if not result.last:
                self._chunks = asyncio.Queue()
            self._future.set_result(result)

    def close(self) -> None:
        """Stops the timer."""
        self._timer.cancel()
        if self._disconnect_task is not None:
            self._disconnect_task.cancel()
        if self._future.done() and not self._future.cancelled():
            self._future.exception()  # else asyncio logs that it was never retrieved

    async def chunks(self, pending: PendingJob, first: JobResult) -> AsyncGenerator[bytes, None]:
        """Yields the chunks of a streamed response; after the deadline, an error as the last chunk.

        Args:
            pending: The submitted job.
            first: The first chunk, from `result`.
        """
        assert self._chunks is not None
        result = first
        try:
            yield result.body
            while not result.last:
                try:
                    async with asyncio.timeout_at(self._deadline):
                        result = await self._chunks.get()
                except TimeoutError:
                    yield error_body("the deadline passed") + b"\n"
                    return
                yield result.body if result.status == 200 else result.body + b"\n"
        finally:
            self._dispatcher.cancel(pending)

    def _check(self) -> None:
        now = self._loop.time()
        if now >= self._deadline:
            self._fail(HTTPException(504, "the deadline passed"))
        elif self._read_task is not None and now >= self._read_deadline:
            message = f"the body did not come within {self._read_timeout:g} seconds"
            self._fail(HTTPException(408, message, ("connection", "close")))
        else:
            if self._read_task is None and self._disconnect_task is None:
                self._disconnect_task = self._loop.create_task(self._watch_disconnect())
            next_check = (
                self._deadline
                if self._read_task is None
                else min(self._deadline, self._read_deadline, now + CHECK_SECONDS)
            )
            self._timer = self._loop.call_at(next_check, self._check)

    async def _watch_disconnect(self) -> None:
        await self._request.disconnected()
        self._fail(HTTPException(499, "the client disconnected"))

    def _fail(self, error: HTTPException) -> None:
        if self._read_task is not None:
            self._error = error
            self._read_task.cancel()
        elif not self._future.done():
            self._future.set_exception(error)
