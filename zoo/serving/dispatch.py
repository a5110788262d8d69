"""The front's side of the workers: who is idle gets a request at once, what waits goes together.

Everything here runs in the front's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from zoo.serving import worker
from zoo.serving.answers import JSON, fault
from zoo.serving.messages import Answer, Job, packed, taken

logger = logging.getLogger(__name__)

RETRIES = 1  # times that a request is tried again whose worker died


class Full(Exception):
    """The queue has no room."""


class Pending:
    """A request on its way. answered: called with every piece of its answer, the last one with `last`."""

    __slots__ = ("answered", "created", "done", "job", "link", "model", "sent", "started", "tries")

    def __init__(self, model: str, job: Job, answered: Callable[[Answer], None]) -> None:
        self.model, self.job, self.answered = model, job, answered
        self.created = time.perf_counter()
        self.sent = 0.0
        self.link: Link | None = None
        self.tries = 0
        self.done = self.started = False  # started: a piece of the answer went out

    def answer(self, answer: Answer) -> None:
        """Hand on a piece of the answer."""
        if not self.done:
            self.done, self.started = answer.last, True
            self.answered(answer)


class Link(asyncio.Protocol):
    """A worker as the front sees it: what it works on, and the channel."""

    def __init__(self, dispatcher: Dispatcher, index: int, generation: int) -> None:
        self.dispatcher, self.index, self.generation = dispatcher, index, generation
        self.ready = self.retiring = False
        self.pid = 0
        self.working: dict[int, Pending] = {}
        self._buffer = bytearray()
        self._transport: Any = None

    def connection_made(self, transport: Any) -> None:
        """See asyncio."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        self._buffer += data
        for what, *more in taken(self._buffer):
            if what == worker.ANSWERS:
                self.dispatcher.answered(self, *more)
            elif what == worker.READY:
                self.pid, self.ready = more[0], True
                self.dispatcher.joined(self, more[1])
            elif what == worker.BROKEN:
                self.dispatcher.broken(self, *more)

    def connection_lost(self, error: Exception | None) -> None:
        """See asyncio."""
        self.dispatcher.lost(self)

    def send(self, pending: Sequence[Pending]) -> None:
        """Give the worker some requests for one model."""
        now = time.perf_counter()
        for each in pending:
            each.link, each.sent = self, now
            self.working[each.job.number] = each
        self._transport.write(packed((worker.JOBS, pending[0].model, [each.job for each in pending])))

    def cancel(self, number: int) -> None:
        """Tell the worker that nobody waits for a request any more."""
        self._transport.write(packed((worker.CANCEL, number)))

    def close(self) -> None:
        """Let the worker end; it has nothing to do."""
        self.retiring = True
        if self._transport is not None:
            self._transport.close()


class Dispatcher:
    """Queues and workers. fork: asks for a worker of an index, whose channel's other end it takes.

    max_batch: requests that go together, at most. most: requests that wait, of all models.
    """

    def __init__(
        self,
        models: Sequence[str],
        workers: int,
        max_batch: int,
        most: int,
        fork: Callable[[socket.socket, int], None],
        failed: Callable[[str, int], None],
    ) -> None:
        self.workers, self.max_batch, self.most = workers, max_batch, most
        self.models: dict[str, dict[str, Any]] = {}  # what ready workers said of them
        self.links: list[Link] = []
        self.restarts = 0
        self.waiting = 0
        self._fork, self._failed = fork, failed
        self._queues: dict[str, deque[Pending]] = {name: deque() for name in models}
        self._turns = deque(models)
        self._pending: dict[int, Pending] = {}
        self._number = 0
        self._generation = 0
        self._closing = False
        self._idle = asyncio.Event()

    # --------------------------------------------------------------------------------------------------------- workers

    async def start(self) -> None:
        """Ask for all workers of a new generation; those before it retire as soon as it is ready."""
        self._generation += 1
        for index in range(self.workers):
            await self._spawn(index)

    async def _spawn(self, index: int) -> None:
        own, theirs = socket.socketpair()
        own.setblocking(False)
        with theirs:
            self._fork(theirs, index)
        link = Link(self, index, self._generation)
        self.links.append(link)
        await asyncio.get_running_loop().create_connection(lambda: link, sock=own)

    @property
    def ready(self) -> bool:
        """Whether a worker can answer."""
        return any(link.ready and not link.retiring for link in self.links)

    def joined(self, link: Link, models: list[dict[str, Any]]) -> None:
        """A worker has opened its models."""
        self.models = {each["name"]: each for each in models}
        for old in self.links:
            if old.generation < link.generation and not old.retiring:
                old.retiring = True
                self._retire(old)
        self._pull(link)

    def broken(self, link: Link, text: str, code: int) -> None:
        """A worker could not open its models."""
        link.retiring = True
        if self.ready:  # by files that were there before
            logger.warning("a worker cannot open the models, those open before are served on: %s", text)
        else:
            self._failed(text, code)

    def lost(self, link: Link) -> None:
        """A worker is gone: what it worked on is tried again by another, once; it is replaced."""
        self.links.remove(link)
        lost, link.working = list(link.working.values()), {}
        for each in lost:
            if each.done:
                continue
            if each.tries < RETRIES and not each.started:
                each.tries += 1
                each.link = None
                self._queues[each.model].appendleft(each)
                self.waiting += 1
            else:
                self.finish(each, Answer(each.job.number, 503, JSON, fault("the worker died; try again")))
        if not link.retiring and not self._closing:
            self.restarts += 1
            logger.warning("the worker %d (process %d) died and is replaced", link.index, link.pid)
            task = asyncio.get_running_loop().create_task(self._spawn(link.index))
            task.add_done_callback(_report)
        for other in self.links:
            self._pull(other)

    def _retire(self, link: Link) -> None:
        if not link.working:
            link.close()

    # -------------------------------------------------------------------------------------------------------- requests

    def submit(self, model: str, job: Job, answered: Callable[[Answer], None]) -> Pending:
        """Give a request to an idle worker, or let it wait. Raises Full where too many wait."""
        self._number += 1
        pending = Pending(model, job._replace(number=self._number), answered)
        for link in self.links:
            if self._room(link, model):
                link.send([pending])
                break
        else:
            if self.waiting >= self.most:
                raise Full
            self._queues[model].append(pending)
            self.waiting += 1
        self._pending[self._number] = pending
        return pending

    def drop(self, pending: Pending) -> None:
        """Nobody waits for the answer any more."""
        if pending.done:
            return
        pending.done = True
        self._forget(pending)
        if pending.link is not None:
            pending.link.cancel(pending.job.number)
        else:
            with contextlib.suppress(ValueError):
                self._queues[pending.model].remove(pending)
                self.waiting -= 1

    def finish(self, pending: Pending, answer: Answer) -> None:
        """Hand on the last piece of an answer."""
        pending.answer(answer)
        if answer.last:
            self._forget(pending)

    def _forget(self, pending: Pending) -> None:
        self._pending.pop(pending.job.number, None)
        if not self._pending:
            self._idle.set()

    def answered(self, link: Link, found: list[Answer]) -> None:
        """A worker has answered."""
        for answer in found:
            working = link.working
            pending = working.pop(answer.number, None) if answer.last else working.get(answer.number)
            if pending is not None:
                self.finish(pending, answer)
        if link.retiring:
            self._retire(link)
        else:
            self._pull(link)

    def _room(self, link: Link, model: str) -> bool:
        if not link.ready or link.retiring:
            return False
        if self.models[model]["streams"]:
            return len(link.working) < self.max_batch
        return not link.working

    def _pull(self, link: Link) -> None:
        """Give a worker what waits and it has room for, models in turn."""
        for _ in range(len(self._turns)):
            if not self.waiting:
                return
            model = self._turns[0]
            self._turns.rotate(-1)
            queue = self._queues[model]
            while queue and self._room(link, model):
                together = self._together(queue, model, link)
                self.waiting -= len(together)
                link.send(together)

    def _together(self, queue: deque[Pending], model: str, link: Link) -> list[Pending]:
        """The next requests of a queue that go together; one that is tried again goes alone."""
        described = self.models[model]
        most = self.max_batch - len(link.working) if described["streams"] else min(self.max_batch, described["gathers"])
        found = [queue.popleft()]
        while queue and len(found) < most and not found[0].tries and not queue[0].tries:
            found.append(queue.popleft())
        return found

    # ------------------------------------------------------------------------------------------------------------- end

    async def drained(self) -> None:
        """Returns when nothing is on its way."""
        while self._pending:
            self._idle.clear()
            await self._idle.wait()

    def close(self) -> None:
        """Let all workers end."""
        self._closing = True
        for link in list(self.links):
            link.close()

    def state(self) -> Mapping[str, int]:
        """Figures for the metrics."""
        return {
            "waiting": self.waiting,
            "working": sum(len(link.working) for link in self.links),
            "workers": sum(link.ready and not link.retiring for link in self.links),
            "restarts": self.restarts,
        }


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.warning("a worker could not be replaced: %s", error)
