"""Fork server: a process that loads the models and forks workers on request of the HTTP server.

It forks while it has no other thread, so that forking is safe; the workers share the memory of its models
copy-on-write.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from zoo.serving.workers.channel import pack, receive, unpack
from zoo.serving.workers.cpu_scheduling import NICE, at_low_priority
from zoo.serving.workers.lifetime import end_with_parent, fork_process, kill
from zoo.serving.workers.model_loader import ServedModel
from zoo.serving.workers.worker import load_error, run_process

LOADED, FAILED, FORK, LOAD, VERSION = "loaded", "failed", "fork", "load", "version"
END_SECONDS = 1.0  # in which the fork server ends by itself


def start(models: Sequence[ServedModel]) -> tuple[socket.socket, int]:
    """Forks the fork server. Call it before any thread is started.

    Args:
        models: Models to load.

    Returns:
        The HTTP server's end of the channel, and the process id. Closing the channel ends the fork server, and the end
        of the fork server ends its workers. The first message is LOADED or FAILED.
    """

    def run(channel: socket.socket) -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # workers are not awaited: their channels close
        _run(channel, {model.name: model for model in models})

    return fork_process(run)


def end(pid: int) -> None:
    """Waits for the end of the fork server, whose channel is closed; one that does not end is killed, with its workers.

    Args:
        pid: Its process id.
    """
    deadline = time.monotonic() + END_SECONDS
    with contextlib.suppress(ChildProcessError):  # where SIGCHLD is ignored
        while os.waitpid(pid, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                kill(pid)
            time.sleep(0.01)


def _run(channel: socket.socket, models: dict[str, ServedModel]) -> None:
    pa.array([""])  # it imports pandas, where that is installed: once here, and not in every worker
    if not _load(channel, models, models):
        return
    while True:
        # every request begins with one byte; a FORK request sends the descriptor of the worker's channel with it
        head, descriptors, _, _ = socket.recv_fds(channel, 1, 1)
        if not head:
            return
        message = receive(channel)
        if message is None:
            return
        kind, *content = message
        if kind == LOAD:
            _reload(channel, models, *content)
        elif kind == VERSION:
            name, place, engine, version = content
            changed = replace(models[name], place=Path(place) if place else None, engine=engine, version=version)
            at_low_priority(functools.partial(_load, channel, models, {name: changed}))
        elif kind == FORK and descriptors:
            worker_end = socket.socket(fileno=descriptors[0])
            cpus, replaces = content
            gc.freeze()  # garbage collection in workers must not write to shared pages
            own = os.getpid()
            if os.fork() == 0:
                channel.close()
                run_process(worker_end, models, cpus, replaces, own)
            worker_end.close()


def _reload(channel: socket.socket, models: dict[str, ServedModel], names: list[str]) -> None:
    """Reloads models after another process has opened and run them, as a broken model may crash a process."""
    reader, writer = os.pipe()
    own = os.getpid()
    if os.fork() == 0:
        end_with_parent(own)
        os.nice(NICE)
        fault = b""
        try:
            for name in names:
                replace(models[name], _handler=None).handler()
        except BaseException as error:
            fault = pack((FAILED, *load_error(error)))
        with os.fdopen(writer, "wb") as file:
            file.write(fault or pack((LOADED,)))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        outcome = unpack(bytearray(file.read()))
    if not outcome:
        message = f"the process that opened {', '.join(names)} died; see the log of the system"
        channel.sendall(pack((FAILED, message, 1)))
    elif outcome[0][0] == FAILED:
        channel.sendall(pack(outcome[0]))
    else:
        changed = {name: replace(models[name], version=_next(models[name].version)) for name in names}
        at_low_priority(functools.partial(_load, channel, models, changed))


def _next(version: str) -> str:
    return str(int(version) + 1)


def _load(channel: socket.socket, models: dict[str, ServedModel], changed: Mapping[str, ServedModel]) -> bool:
    """Loads or reloads models, and sends LOADED or FAILED."""
    try:
        loaded = {name: replace(model, _handler=None) for name, model in changed.items()}
        for model in loaded.values():
            model.prepare()
    except BaseException as error:  # a panic of a library, too
        channel.sendall(pack((FAILED, *load_error(error))))
        return False
    models.update(loaded)
    channel.sendall(pack((LOADED,)))
    gc.unfreeze()  # the models before, which a fork froze
    gc.collect()
    return True
