"""Worker process: answers the requests of its channel in order until the HTTP server closes it."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Mapping
from typing import Any

from pipelines.core.errors import ZooError, one_line
from zoo.serving.handlers.base import Handler, error_result
from zoo.serving.workers.channel import Job, JobResult, pack, receive
from zoo.serving.workers.cpu_scheduling import NICE, at_low_priority
from zoo.serving.workers.lifetime import end_with_parent
from zoo.serving.workers.model_loader import ServedModel

READY, JOBS, RESULTS, LOAD_FAILED = "ready", "jobs", "results", "load failed"
CANCEL, CANCELED = "cancel", "canceled"  # the answer to CANCEL comes when the worker is free to read it


class Worker:
    """Runs the jobs of a channel.

    Args:
        channel: Channel to the dispatcher, blocking.
        models: Models by public name; `run` loads those that are not loaded yet.
        replaces: Whether workers answer requests that this one replaces; it then starts at a low priority.
    """

    def __init__(self, channel: socket.socket, models: Mapping[str, ServedModel], replaces: bool = False) -> None:
        self._channel, self._models, self._replaces = channel, models, replaces
        self._handlers: dict[str, Handler] = {}
        self._sending = threading.Lock()

    def run(self) -> None:
        """Loads the models, reports READY or LOAD_FAILED, and runs jobs until the channel is closed."""
        try:
            descriptions = at_low_priority(self._start) if self._replaces else self._start()
        except BaseException as error:  # a panic of a library, too
            self._send((LOAD_FAILED, *load_error(error)))
            return
        self._send((READY, os.getpid(), descriptions))
        while (message := receive(self._channel)) is not None:
            kind, *content = message
            if kind == JOBS:
                self._run_jobs(*content)
            elif kind == CANCEL:
                for handler in self._handlers.values():
                    handler.cancel(*content)
                self._send((CANCELED, *content))

    def _start(self) -> list[dict[str, Any]]:
        """Loads the models, and returns their descriptions."""
        self._handlers = {name: model.handler() for name, model in self._models.items()}
        for handler in self._handlers.values():
            handler.connect(self._handlers)
        return [handler.describe() for handler in self._handlers.values()]

    def _run_jobs(self, model: str, packed_jobs: list[tuple[Any, ...]]) -> None:
        handler, jobs = self._handlers[model], [Job._make(packed_job) for packed_job in packed_jobs]
        try:
            if handler.streams:
                handler.submit(jobs, self._send_results)
            else:
                self._send_results(handler.run(jobs))
        except OSError:
            raise  # the channel is broken
        except BaseException as error:  # a panic of a library, too
            self._send_results([error_result(job, error) for job in jobs])

    def _send_results(self, results: list[JobResult]) -> None:
        self._send((RESULTS, [tuple(result) for result in results]))

    def _send(self, message: tuple[Any, ...]) -> None:
        data = pack(message)
        with self._sending:
            self._channel.sendall(data)


def load_error(error: BaseException) -> tuple[str, int]:
    """Describes why a model cannot be loaded.

    Args:
        error: The exception.

    Returns:
        Message in one line, and exit code.
    """
    if isinstance(error, ZooError):
        return one_line(error), error.exit_code
    return f"{type(error).__name__}: {one_line(error)}", 1


def run_process(
    channel: socket.socket, models: Mapping[str, ServedModel], cpus: set[int], replaces: bool, parent: int
) -> None:
    """Runs a forked worker process; does not return.

    Args:
        channel: Channel to the dispatcher.
        models: Models by public name.
        cpus: CPUs to pin the process to; empty for all.
        replaces: See `Worker`.
        parent: Process id of the fork server, which the worker does not outlive.
    """
    end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the HTTP server ends workers by closing their channels
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if cpus:
        os.sched_setaffinity(0, cpus)
    try:
        Worker(channel, models, replaces).run()
    except (BrokenPipeError, ConnectionResetError):
        pass
    finally:
        os.nice(NICE)  # the system frees its memory beside the requests of others
        os._exit(0)
