"""Least-loaded dispatch of requests to workers, with dynamic batching of queued requests.

All code of this module runs in the event loop of the router.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from zoo.serving.protocol.responses import JSON, fault
from zoo.serving.workers import worker
from zoo.serving.workers.channel import Answer, Job, packed, taken
from zoo.serving.workers.cpu_scheduling import unhurried

logger = logging.getLogger(__name__)

RETRIES = 1  # times that a request is tried again whose worker died
FAILURES = 5  # workers in a row that died before they were ready, after which it is given up where none is
MANY = 8  # requests on their way that make threads unhurried
LOOK = 0.05  # seconds between two looks at how many there are
PAUSE, LONGEST = 0.1, 10.0  # seconds before the first of them is replaced, doubled each time, and at most


class Full(Exception):
    """The queue has no room."""


class Pending:
    """A request on its way. answered: called with every piece of its answer, the last one with `last`."""

    __slots__ = ("answered", "done", "job", "link", "model", "started", "streams", "tries")

    def __init__(self, model: str, job: Job, answered: Callable[[Answer], None]) -> None:
        self.model, self.job, self.answered = model, job, answered
        self.streams = False  # whether the worker that has it answers it by and by
        self.link: Link | None = None
        self.tries = 0
        self.done = self.started = False  # started: a piece of the answer went out

    def answer(self, answer: Answer) -> None:
        """Hand on a piece of the answer."""
        if not self.done:
            self.done, self.started = answer.last, True
            self.answered(answer)


class Link(asyncio.Protocol):
    """A worker as the front sees it: what it works on, and the channel.

    computing: of the requests it works on, those that it computes at one go. Streaming ones are under way beside them.
    """

    def __init__(self, dispatcher: Dispatcher, index: int, generation: int) -> None:
        self.dispatcher, self.index, self.generation = dispatcher, index, generation
        self.ready = self.retiring = False
        self.pid = 0
        self.working: dict[int, Pending] = {}
        self.computing = 0
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
                self.dispatcher.answered(self, [Answer._make(each) for each in more[0]])
            elif what == worker.READY:
                self.pid, self.ready = more[0], True
                self.dispatcher.joined(self, more[1])
            elif what == worker.BROKEN:
                self.dispatcher.broken(self, *more)

    def connection_lost(self, error: Exception | None) -> None:
        """See asyncio."""
        self.dispatcher.lost(self)

    def send(self, pending: Sequence[Pending], streams: bool) -> None:
        """Sends requests for one model to the worker.

        Args:
            pending: The requests.
            streams: Whether their handler streams results.
        """
        for each in pending:
            each.link, each.streams = self, streams
            self.working[each.job.number] = each
            self.computing += not streams
        self._transport.write(packed((worker.JOBS, pending[0].model, [tuple(each.job) for each in pending])))

    def take(self, number: int) -> Pending | None:
        """A request that it works on no longer."""
        pending = self.working.pop(number, None)
        if pending is not None:
            self.computing -= not pending.streams
        return pending

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
        self._generation = self._opened = 0  # the newest, and the newest of which a worker was ready
        self._failures = 0  # workers since then that died before they were ready
        self._closing = self._many = False
        self._idle = asyncio.Event()

    # --------------------------------------------------------------------------------------------------------- workers

    async def start(self) -> None:
        """Ask for all workers of a new generation; those before it retire as soon as it is ready."""
        self._generation += 1
        for index in range(self.workers):
            await self._spawn(index)

    async def _spawn(self, index: int, pause: float = 0.0) -> None:
        await asyncio.sleep(pause)
        if self._closing:
            return
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
        """Registers a worker that has opened its models.

        Args:
            link: The worker.
            models: Descriptions of its models.
        """
        self.models = {each["name"]: each for each in models}
        self._opened, self._failures = max(self._opened, link.generation), 0
        for old in self.links:
            if old.generation < link.generation and not old.retiring:
                old.retiring = True
                self._retire(old)
        if self._many and link.pid != os.getpid():
            unhurried(link.pid, True)
        self._pull(link)

    def broken(self, link: Link, text: str, code: int) -> None:
        """Handles a worker that could not open its models.

        Args:
            link: The worker.
            text: Error message.
            code: Exit code of the error.
        """
        if link.generation <= self._opened:  # others could: it ends now, and is replaced
            logger.warning("a worker cannot open the models: %s", text)
            return
        link.retiring = True
        if self.ready:  # by files that were there before
            logger.warning("a worker cannot open the models, those open before are served on: %s", text)
        else:
            self._failed(text, code)

    def lost(self, link: Link) -> None:
        """A worker is gone: what it worked on is tried again by another, once; it is replaced."""
        self.links.remove(link)
        lost, link.working, link.computing = list(link.working.values()), {}, 0
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
        newer = any(other.generation > link.generation for other in self.links)  # those take its place
        if not link.retiring and not self._closing and not newer:
            self._replace(link)
        for other in self.links:
            self._pull(other)

    def _replace(self, link: Link) -> None:
        """Ask for another worker: at once, or later and later where they die before they are ready."""
        self._failures += not link.ready
        if self._failures >= FAILURES and not self.ready:
            self._failed(f"{self._failures} workers in a row died before they were ready; see the log of the system", 1)
            return
        pause = min(PAUSE * 2 ** (self._failures - 1), LONGEST) if self._failures else 0.0
        self.restarts += 1
        logger.warning("the worker %d (process %d) died and is replaced", link.index, link.pid)
        task = asyncio.get_running_loop().create_task(self._spawn(link.index, pause))
        task.add_done_callback(_report)

    def _retire(self, link: Link) -> None:
        if not link.working:
            link.close()

    # -------------------------------------------------------------------------------------------------------- requests

    def submit(self, model: str, job: Job, answered: Callable[[Answer], None]) -> Pending:
        """Sends a request to an idle worker, or queues it.

        Args:
            model: Public name of the model.
            job: The request.
            answered: Called with every piece of the response.

        Returns:
            The pending request.

        Raises:
            Full: The queue is full.
        """
        self._number += 1
        pending = Pending(model, job._replace(number=self._number), answered)
        streams = self._streams(model)
        free = [link for link in self.links if self._room(link, streams)]
        if free and not self._queues[model]:  # what waits goes first
            min(free, key=lambda link: len(link.working)).send([pending], streams)
        elif self.waiting < self.most:
            self._queues[model].append(pending)
            self.waiting += 1
        else:
            raise Full
        self._pending[self._number] = pending
        if not self._many and len(self._pending) >= MANY:
            self._look()
        return pending

    def _look(self) -> None:
        """Threads hurry where few requests are on their way, and do not where many are."""
        many = len(self._pending) >= MANY and not self._closing
        if many != self._many:
            self._many = many
            workers = {link.pid for link in self.links if link.ready}
            for pid in set() if os.getpid() in workers else {os.getpid(), *workers}:  # not of a process of others
                unhurried(pid, many)
        if many:
            asyncio.get_running_loop().call_later(LOOK, self._look)

    def drop(self, pending: Pending) -> None:
        """Nobody waits for the answer any more."""
        if pending.done:
            return
        pending.done = True
        self._forget(pending)
        if (link := pending.link) is not None:
            link.cancel(pending.job.number)
            if pending.streams:  # the worker answers it no more; one that is computed at one go it does
                link.take(pending.job.number)
                self._settle(link)
        else:
            with contextlib.suppress(ValueError):
                self._queues[pending.model].remove(pending)
                self.waiting -= 1

    def finish(self, pending: Pending, answer: Answer) -> None:
        """Delivers the last piece of a response.

        Args:
            pending: The request.
            answer: The last piece.
        """
        pending.answer(answer)
        if answer.last:
            self._forget(pending)

    def _forget(self, pending: Pending) -> None:
        self._pending.pop(pending.job.number, None)
        if not self._pending:
            self._idle.set()

    def answered(self, link: Link, found: list[Answer]) -> None:
        """Delivers responses of a worker.

        Args:
            link: The worker.
            found: The responses.
        """
        for answer in found:
            pending = link.take(answer.number) if answer.last else link.working.get(answer.number)
            if pending is not None:
                self.finish(pending, answer)
        self._settle(link)

    def _settle(self, link: Link) -> None:
        """A worker has less to do."""
        if link.retiring:
            self._retire(link)
        else:
            self._pull(link)

    def _streams(self, model: str) -> bool:
        return bool(self.models and self.models[model]["streams"])

    def _room(self, link: Link, streams: bool) -> bool:
        """Whether a worker takes a request: of those computed at one go while there is none, whatever streams."""
        if not link.ready or link.retiring:
            return False
        return len(link.working) - link.computing < self.max_batch if streams else not link.computing

    def _pull(self, link: Link) -> None:
        """Give a worker what waits and it has room for, models in turn."""
        for _ in range(len(self._turns)):
            if not self.waiting:
                return
            model = self._turns[0]
            self._turns.rotate(-1)
            queue, streams = self._queues[model], self._streams(model)
            while queue and self._room(link, streams):
                together = self._together(queue, model, link)
                self.waiting -= len(together)
                link.send(together, streams)

    def _together(self, queue: deque[Pending], model: str, link: Link) -> list[Pending]:
        """The next requests of a queue that go together; one that is tried again goes alone."""
        described = self.models[model]
        under_way = len(link.working) - link.computing
        most = self.max_batch - under_way if described["streams"] else min(self.max_batch, described["gathers"])
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
