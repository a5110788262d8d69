"""Worker process: answers the requests of its channel in order until the router closes it."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Mapping
from typing import Any

from pipelines.core.errors import ZooError, one_line
from zoo.serving.handlers.base import Service, failed
from zoo.serving.workers.channel import Answer, Job, packed, receive
from zoo.serving.workers.model_loader import Opening

READY, JOBS, ANSWERS, CANCEL, BROKEN = "ready", "jobs", "answers", "cancel", "broken"


class Worker:
    """Answers jobs with the models of `openings`, the last of which it opens itself."""

    def __init__(self, channel: socket.socket, openings: Mapping[str, Opening]) -> None:
        self._channel, self._openings = channel, openings
        self._services: dict[str, Service] = {}
        self._sending = threading.Lock()

    def run(self) -> None:
        """Open what is not open, say so, and answer jobs; returns where the front is gone."""
        try:
            self._services = {name: opening.service() for name, opening in self._openings.items()}
        except Exception as error:
            code = error.exit_code if isinstance(error, ZooError) else 1
            self._send((BROKEN, told(error), code))
            return
        self._send((READY, os.getpid(), [each.describe() for each in self._services.values()]))
        while (message := receive(self._channel)) is not None:
            what, *more = message
            if what == JOBS:
                self._answer(*more)
            elif what == CANCEL:
                for service in self._services.values():
                    service.cancel(*more)

    def _answer(self, model: str, found: list[tuple[Any, ...]]) -> None:
        service, jobs = self._services[model], [Job._make(each) for each in found]
        try:
            if service.streams:
                service.begin(jobs, self._send_answers)
            else:
                self._send_answers(service.answer(jobs))
        except OSError:
            raise  # the channel's
        except Exception as error:
            self._send_answers([failed(job, error) for job in jobs])

    def _send_answers(self, found: list[Answer]) -> None:
        self._send((ANSWERS, [tuple(each) for each in found]))

    def _send(self, message: tuple[Any, ...]) -> None:
        data = packed(message)
        with self._sending:
            self._channel.sendall(data)


def told(error: Exception) -> str:
    """Why something could not be opened, in one line."""
    return one_line(error) if isinstance(error, ZooError) else f"{type(error).__name__}: {one_line(error)}"


def work(channel: socket.socket, openings: Mapping[str, Opening], cpus: set[int]) -> None:
    """Runs a forked worker process.

    Args:
        channel: Channel to the router.
        openings: Models by public name.
        cpus: CPUs to pin the process to.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the front ends workers, by closing their channels
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if cpus:
        os.sched_setaffinity(0, cpus)
    try:
        Worker(channel, openings).run()
    except (BrokenPipeError, ConnectionResetError):
        pass
    finally:
        os._exit(0)
