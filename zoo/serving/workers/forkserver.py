"""Fork server: a process that loads the models and forks a worker whenever the HTTP server asks for one.

It starts no thread, so that forking is safe; the workers share the memory of its models copy-on-write.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
from collections.abc import Sequence
from dataclasses import replace

from zoo.serving.workers.channel import pack, receive
from zoo.serving.workers.model_loader import ServedModel
from zoo.serving.workers.worker import load_error, run_process

LOADED, FAILED, FORK, LOAD = "loaded", "failed", "fork", "load"


def start(models: Sequence[ServedModel]) -> socket.socket:
    """Forks the fork server. Call it before any thread is started.

    Args:
        models: Models to load.

    Returns:
        The HTTP server's end of the channel; closing it ends the fork server. The first message is LOADED or FAILED.
    """
    parent_end, child_end = socket.socketpair()
    if os.fork():
        child_end.close()
        return parent_end
    parent_end.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the HTTP server ends it by closing the channel
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # workers are not awaited: their channels close
    try:
        _run(child_end, {model.name: model for model in models})
    finally:
        os._exit(0)


def _run(channel: socket.socket, models: dict[str, ServedModel]) -> None:
    if not _load(channel, models, list(models)):
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
            _load(channel, models, *content)
        elif kind == FORK and descriptors:
            worker_end = socket.socket(fileno=descriptors[0])
            gc.freeze()  # garbage collection in workers must not write to shared pages
            if os.fork() == 0:
                channel.close()
                run_process(worker_end, models, *content)
            worker_end.close()


def _load(channel: socket.socket, models: dict[str, ServedModel], names: list[str]) -> bool:
    """Loads or reloads models, and sends LOADED or FAILED."""
    try:
        loaded = {}
        for name in names:
            old = models[name]
            version = str(int(old.version) + 1) if old.loaded else old.version
            loaded[name] = replace(old, version=version, _handler=None)
            loaded[name].prepare()
    except BaseException as error:  # a panic of a library, too
        channel.sendall(pack((FAILED, *load_error(error))))
        return False
    models.update(loaded)
    channel.sendall(pack((LOADED,)))
    return True
