"""Connections of the HTTP server to its workers, and the jobs that they compute.

All code of this module runs in the event loop of the HTTP server.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from zoo.serving.workers import worker
from zoo.serving.workers.channel import Job, JobResult, pack, unpack
from zoo.serving.workers.lifetime import kill

if TYPE_CHECKING:
    from zoo.serving.workers.dispatcher import Dispatcher

logger = logging.getLogger(__name__)

DROPPED_SECONDS = 10.0  # a worker that still computes a dropped job after this time is killed


class PendingJob:
    """A job that is queued or computed.

    Args:
        model: Public name of the model.
        job: The job.
        deliver: Called with every chunk of the result; `last` marks the last one.

    Attributes:
        connection: Worker that has the job; None in the queue.
        streams: Whether the worker runs it in a stream (continuous batching).
        tries: Number of workers that died with it.
        done: Whether the last chunk was delivered, or the job was canceled.
        started: Whether a chunk was delivered.
    """

    __slots__ = ("connection", "deliver", "done", "job", "model", "started", "streams", "tries")

    def __init__(self, model: str, job: Job, deliver: Callable[[JobResult], None]) -> None:
        self.model, self.job, self.deliver = model, job, deliver
        self.connection: WorkerConnection | None = None
        self.tries = 0
        self.streams = self.done = self.started = False


class WorkerConnection(asyncio.Protocol):
    """Connection to a worker.

    Args:
        dispatcher: Dispatcher of the worker.
        index: Index of the worker; its CPUs depend on it.
        generation: Number of the loaded files; see `Dispatcher.start`.

    Attributes:
        ready: Whether the worker has loaded its models.
        retiring: Whether the worker gets no more jobs and ends when it is idle.
        pid: Process id; 0 until the worker is ready.
        versions: Versions of its models by public name.
        jobs: Jobs of the worker by number.
        batched_jobs: Number of jobs that it computes as one batch; the others are in streams.
    """

    def __init__(self, dispatcher: Dispatcher, index: int, generation: int) -> None:
        self.dispatcher, self.index, self.generation = dispatcher, index, generation
        self.ready = self.retiring = False
        self.pid = 0
        self.versions: dict[str, str] = {}
        self.jobs: dict[int, PendingJob] = {}
        self.batched_jobs = 0
        self._buffer = bytearray()
        self._transport: Any = None
        self._timers: dict[int, asyncio.TimerHandle] = {}  # of canceled jobs that the worker may still compute

    @property
    def streamed_jobs(self) -> int:
        """Number of jobs in streams."""
        return len(self.jobs) - self.batched_jobs

    def connection_made(self, transport: Any) -> None:
        """See `asyncio.Protocol`."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self._buffer += data
        for kind, *content in unpack(self._buffer):
            if kind == worker.RESULTS:
                self.dispatcher.results_received(self, [JobResult._make(result) for result in content[0]])
            elif kind == worker.READY:
                self.pid, self.ready = content[0], True
                self.dispatcher.worker_ready(self, content[1])
            elif kind == worker.CANCELED:
                self._stop_timer(content[0])
            elif kind == worker.LOAD_FAILED:
                self.dispatcher.load_failed(self, *content)

    def connection_lost(self, error: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        for job_id in list(self._timers):
            self._stop_timer(job_id)
        self.dispatcher.worker_lost(self)

    def send(self, pending: Sequence[PendingJob], streams: bool) -> None:
        """Sends jobs of one model to the worker.

        Args:
            pending: The jobs.
            streams: Whether the worker runs them in a stream.
        """
        for job in pending:
            job.connection, job.streams = self, streams
            self.jobs[job.job.job_id] = job
            self.batched_jobs += not streams
        self._transport.write(pack((worker.JOBS, pending[0].model, [tuple(job.job) for job in pending])))

    def remove(self, job_id: int) -> PendingJob | None:
        """Removes a job from the jobs of the worker.

        Args:
            job_id: Number of the job.

        Returns:
            The job; None if the worker does not have it.
        """
        pending = self.jobs.pop(job_id, None)
        if pending is not None:
            self.batched_jobs -= not pending.streams
        return pending

    def cancel(self, job_id: int) -> None:
        """Sends the cancellation of a job; a worker that does not confirm it in `DROPPED_SECONDS` is killed.

        Args:
            job_id: Number of the job.
        """
        self._transport.write(pack((worker.CANCEL, job_id)))
        self._timers[job_id] = asyncio.get_running_loop().call_later(DROPPED_SECONDS, self._kill, job_id)

    def _kill(self, job_id: int) -> None:
        self._stop_timer(job_id)
        message = "the worker %d (process %d) is killed: it still computes a request that was dropped %g seconds ago"
        logger.warning(message, self.index, self.pid, DROPPED_SECONDS)
        kill(self.pid)

    def _stop_timer(self, job_id: int) -> None:
        if (timer := self._timers.pop(job_id, None)) is not None:
            timer.cancel()

    def close(self) -> None:
        """Closes the channel, which ends the worker."""
        self.retiring = True
        if self._transport is not None:
            self._transport.close()
