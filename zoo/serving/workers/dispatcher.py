"""Least-loaded dispatch of requests to workers, with dynamic batching of queued requests.

All code of this module runs in the event loop of the HTTP server.
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

from zoo.serving.protocol.responses import JSON, error_body
from zoo.serving.workers.channel import Job, JobResult
from zoo.serving.workers.cpu_scheduling import set_batch_scheduling
from zoo.serving.workers.worker_connection import PendingJob, WorkerConnection

logger = logging.getLogger(__name__)

MAX_RETRIES = 1  # of a job whose worker died
MAX_START_FAILURES = 5  # workers in a row that died before they were ready; then a server that was never ready ends
BATCH_SCHEDULING_JOBS = 8  # number of pending jobs from which threads use SCHED_BATCH
SCHEDULING_SECONDS = 0.05  # interval at which that number is checked
RETIRED_SECONDS = 0.005  # interval at which the end of older workers is checked
RESTART_SECONDS, MAX_RESTART_SECONDS = 0.1, 10.0  # pause before a restart, doubled after each failure, and its maximum


class QueueFull(Exception):
    """The queue is full."""


class Dispatcher:
    """Queues of the models, and the workers.

    Args:
        models: Public names of the models.
        workers: Number of workers.
        max_batch: Maximum number of requests in a batch.
        max_queued: Maximum number of queued requests, of all models.
        start_worker: Starts a worker, given the worker's end of its channel, which is closed afterwards, and its index.
        on_failure: Called with a message and an exit code if no worker can be started.

    Attributes:
        models: Descriptions of the models by name (see `Handler.describe`); empty until a worker is ready.
        workers: Connections to the workers.
        queued: Number of queued requests.
        restarts: Number of workers that died and were replaced.
        ready_generation: Newest generation with a worker that was ready; see `start`.
    """

    def __init__(
        self,
        models: Sequence[str],
        workers: int,
        max_batch: int,
        max_queued: int,
        start_worker: Callable[[socket.socket, int], None],
        on_failure: Callable[[str, int], None],
    ) -> None:
        self.max_batch, self.max_queued = max_batch, max_queued
        self.models: dict[str, dict[str, Any]] = {}
        self.workers: list[WorkerConnection] = []
        self.restarts = 0
        self.queued = 0
        self._worker_count, self._start_worker, self._on_failure = workers, start_worker, on_failure
        self._queues: dict[str, deque[PendingJob]] = {name: deque() for name in models}
        self._rotation = deque(models)  # next models to take from the queues
        self._pending: dict[int, PendingJob] = {}
        self._job_id = 0
        self._generation = self.ready_generation = 0
        self._start_failures = 0  # workers in a row that died before they were ready
        self._closing = self._batch_scheduling = False
        self._idle = asyncio.Event()

    # --------------------------------------------------------------------------------------------------------- workers

    async def start(self) -> int:
        """Starts a new generation of workers; older workers retire as soon as one of it is ready.

        Returns:
            Number of the generation.
        """
        self._generation += 1
        generation = self._generation
        for index in range(self._worker_count):
            await self._start_one(index)
        return generation

    async def _start_one(self, index: int, pause: float = 0.0) -> None:
        await asyncio.sleep(pause)
        if self._closing:
            return
        own_end, worker_end = socket.socketpair()
        own_end.setblocking(False)
        with worker_end:
            self._start_worker(worker_end, index)
        connection = WorkerConnection(self, index, self._generation)
        self.workers.append(connection)
        await asyncio.get_running_loop().create_connection(lambda: connection, sock=own_end)

    @property
    def ready(self) -> bool:
        """Whether a worker accepts jobs."""
        return any(connection.ready and not connection.retiring for connection in self.workers)

    @property
    def replaces(self) -> bool:
        """Whether workers of an older generation still answer requests and are to be replaced."""
        return any(worker.ready and worker.generation < self._generation for worker in self.workers)

    def worker_ready(self, connection: WorkerConnection, models: list[dict[str, Any]]) -> None:
        """Registers a worker that has loaded its models.

        Args:
            connection: The worker.
            models: Descriptions of its models.
        """
        self.models = {model["name"]: model for model in models}
        connection.versions = {model["name"]: model["version"] for model in models}
        self.ready_generation, self._start_failures = max(self.ready_generation, connection.generation), 0
        for other in self.workers:
            if other.generation < connection.generation and not other.retiring:
                other.retiring = True
                self._close_if_idle(other)
        if self._batch_scheduling and connection.pid != os.getpid():
            set_batch_scheduling(connection.pid, True)
        self._send_queued(connection)

    async def retired(self, generation: int) -> None:
        """Returns when a worker of a generation is ready and those of older generations have ended.

        Args:
            generation: Number of the generation, see `start`.
        """
        while self.ready_generation < generation or any(worker.generation < generation for worker in self.workers):
            await asyncio.sleep(RETIRED_SECONDS)

    def load_failed(self, connection: WorkerConnection, message: str, code: int) -> None:
        """Handles a worker that cannot load its models.

        Args:
            connection: The worker.
            message: Error message.
            code: Exit code of the error.
        """
        if connection.generation <= self.ready_generation:  # another worker could load them: this one is replaced
            logger.warning("a worker cannot load the models: %s", message)
            return
        connection.retiring = True
        if self.ready:  # with the files of an older generation
            logger.warning("a worker cannot load the models, the server keeps those loaded before: %s", message)
        else:
            self._on_failure(message, code)

    def worker_lost(self, connection: WorkerConnection) -> None:
        """Replaces a worker that died; its jobs are tried again once.

        Args:
            connection: The worker.
        """
        self.workers.remove(connection)
        lost, connection.jobs, connection.batched_jobs = list(connection.jobs.values()), {}, 0
        for pending in lost:
            if pending.done:
                continue
            if pending.tries < MAX_RETRIES and not pending.started:
                pending.tries += 1
                pending.connection = None
                self._queues[pending.model].appendleft(pending)
                self.queued += 1
            else:
                body = error_body("the worker died; try again")
                self._deliver(pending, JobResult(pending.job.job_id, 503, JSON, body))
        newer = any(other.generation > connection.generation for other in self.workers)
        if not connection.retiring and not self._closing and not newer:
            self._restart(connection)
        for other in self.workers:
            self._send_queued(other)

    def _restart(self, connection: WorkerConnection) -> None:
        """Starts a replacement: at once, or with growing pauses if workers die before they are ready."""
        self._start_failures += not connection.ready
        if self._start_failures >= MAX_START_FAILURES and not self.ready_generation:
            message = f"{self._start_failures} workers in a row died before they were ready; see the log of the system"
            self._on_failure(message, 1)
            return
        pause = 0.0
        if self._start_failures:
            pause = min(RESTART_SECONDS * 2 ** min(self._start_failures - 1, 20), MAX_RESTART_SECONDS)
        self.restarts += 1
        logger.warning("the worker %d (process %d) died and is replaced", connection.index, connection.pid)
        task = asyncio.get_running_loop().create_task(self._start_one(connection.index, pause))
        task.add_done_callback(_log_failure)

    def _close_if_idle(self, connection: WorkerConnection) -> None:
        if not connection.jobs:
            connection.close()

    # ------------------------------------------------------------------------------------------------------------ jobs

    def submit(self, model: str, job: Job, deliver: Callable[[JobResult], None]) -> PendingJob:
        """Sends a job to the least loaded worker, or queues it.

        Args:
            model: Public name of the model.
            job: The job; it gets a number.
            deliver: Called with every chunk of the result.

        Returns:
            The pending job.

        Raises:
            QueueFull: The queue is full.
        """
        self._job_id += 1
        pending = PendingJob(model, Job(self._job_id, *job[1:]), deliver)
        streams = self._streams(model)
        available = [connection for connection in self.workers if self._accepts(connection, streams)]
        if available and not self._queues[model]:  # queued jobs go first
            min(available, key=lambda connection: len(connection.jobs)).send([pending], streams)
        elif self.queued < self.max_queued:
            self._queues[model].append(pending)
            self.queued += 1
        else:
            raise QueueFull
        self._pending[self._job_id] = pending
        if not self._batch_scheduling and len(self._pending) >= BATCH_SCHEDULING_JOBS:
            self._update_scheduling()
        return pending

    def _update_scheduling(self) -> None:
        """Uses SCHED_BATCH for all threads while many jobs are pending."""
        enabled = len(self._pending) >= BATCH_SCHEDULING_JOBS and not self._closing
        if enabled != self._batch_scheduling:
            self._batch_scheduling = enabled
            pids = {connection.pid for connection in self.workers if connection.ready}
            if os.getpid() not in pids:  # else workers are threads of an application's process
                for pid in {os.getpid(), *pids}:
                    set_batch_scheduling(pid, enabled)
        if enabled:
            asyncio.get_running_loop().call_later(SCHEDULING_SECONDS, self._update_scheduling)

    def cancel(self, pending: PendingJob) -> None:
        """Cancels a job that is not done.

        Args:
            pending: The job.
        """
        if pending.done:
            return
        pending.done = True
        self._forget(pending)
        if (connection := pending.connection) is not None:
            connection.cancel(pending.job.job_id)
            if pending.streams:  # the worker sends no result; batched jobs are not interrupted and send one
                connection.remove(pending.job.job_id)
                self._jobs_removed(connection)
        else:
            with contextlib.suppress(ValueError):
                self._queues[pending.model].remove(pending)
                self.queued -= 1

    def results_received(self, connection: WorkerConnection, results: list[JobResult]) -> None:
        """Delivers results of a worker.

        Args:
            connection: The worker.
            results: The results.
        """
        for result in results:
            pending = connection.remove(result.job_id) if result.last else connection.jobs.get(result.job_id)
            if pending is not None:
                self._deliver(pending, result)
        self._jobs_removed(connection)

    def _deliver(self, pending: PendingJob, result: JobResult) -> None:
        if not pending.done:
            pending.done, pending.started = result.last, True
            pending.deliver(result)
        if result.last:
            self._forget(pending)

    def _forget(self, pending: PendingJob) -> None:
        self._pending.pop(pending.job.job_id, None)
        if not self._pending:
            self._idle.set()

    def _jobs_removed(self, connection: WorkerConnection) -> None:
        if connection.retiring:
            self._close_if_idle(connection)
        else:
            self._send_queued(connection)

    def _streams(self, model: str) -> bool:
        return bool(self.models and self.models[model]["streams"])

    def _accepts(self, connection: WorkerConnection, streams: bool) -> bool:
        """Whether a worker takes another job: it computes one batch at a time, in parallel with streams."""
        if not connection.ready or connection.retiring:
            return False
        return connection.streamed_jobs < self.max_batch if streams else not connection.batched_jobs

    def _send_queued(self, connection: WorkerConnection) -> None:
        """Sends queued jobs that a worker accepts, models round-robin."""
        for _ in range(len(self._rotation)):
            if not self.queued:
                return
            model = self._rotation[0]
            self._rotation.rotate(-1)
            queue, streams = self._queues[model], self._streams(model)
            while queue and self._accepts(connection, streams):
                batch = self._next_batch(queue, model, connection)
                self.queued -= len(batch)
                connection.send(batch, streams)

    def _next_batch(self, queue: deque[PendingJob], model: str, connection: WorkerConnection) -> list[PendingJob]:
        """The next jobs of a queue that are sent together; a job that is tried again is sent alone."""
        description = self.models[model]
        if description["streams"]:
            max_jobs = self.max_batch - connection.streamed_jobs
        else:
            max_jobs = min(self.max_batch, description["gathers"])
        batch = [queue.popleft()]
        while queue and len(batch) < max_jobs and not batch[0].tries and not queue[0].tries:
            batch.append(queue.popleft())
        return batch

    # -------------------------------------------------------------------------------------------------------- shutdown

    async def drained(self) -> None:
        """Returns when no job is pending."""
        while self._pending:
            self._idle.clear()
            await self._idle.wait()

    def close(self) -> None:
        """Ends all workers."""
        self._closing = True
        for connection in list(self.workers):
            connection.close()

    def state(self) -> Mapping[str, int]:
        """Returns the state for the metrics.

        Returns:
            Numbers of queued requests ("waiting"), requests sent to workers ("working"), ready workers ("workers") and
            "restarts".
        """
        return {
            "waiting": self.queued,
            "working": sum(len(connection.jobs) for connection in self.workers),
            "workers": sum(connection.ready and not connection.retiring for connection in self.workers),
            "restarts": self.restarts,
        }


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.warning("a worker could not be replaced: %s", error)
