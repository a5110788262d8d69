"""The keeper: a process that opens the models and forks a worker wherever the front asks for one.

It starts no thread, so that its children are whole; what it has opened they share, page by page.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
from collections.abc import Sequence
from dataclasses import replace

from pipelines.core.errors import ZooError
from zoo.serving.workers.channel import packed, receive
from zoo.serving.workers.model_loader import Opening
from zoo.serving.workers.worker import told, work

LOADED, FAILED, FORK, LOAD = "loaded", "failed", "fork", "load"

logger = logging.getLogger(__name__)


def start(openings: Sequence[Opening]) -> socket.socket:
    """Fork the keeper; returns the front's end of its channel. Call it before any thread is started."""
    front, own = socket.socketpair()
    if pid := os.fork():
        del pid
        own.close()
        return front
    front.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the front ends it, by closing the channel
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for workers: the front sees their channels close
    try:
        _keep(own, {each.name: each for each in openings})
    finally:
        os._exit(0)


def _keep(channel: socket.socket, openings: dict[str, Opening]) -> None:
    if not _load(channel, openings, list(openings)):
        return
    while True:
        # one byte a request, with the descriptor of the worker's channel where it is for a worker
        head, descriptors, _, _ = socket.recv_fds(channel, 1, 1)
        if not head:
            return
        message = receive(channel)
        if message is None:
            return
        what, *more = message
        if what == LOAD:
            _load(channel, openings, *more)
        elif what == FORK and descriptors:
            theirs = socket.socket(fileno=descriptors[0])
            gc.freeze()  # what is there now stays: no collection of a worker's looks at it, or writes to its pages
            if os.fork() == 0:
                channel.close()
                work(theirs, openings, *more)
            theirs.close()


def _load(channel: socket.socket, openings: dict[str, Opening], names: list[str]) -> bool:
    """Open some models, those that are open anew, and tell the front how that went."""
    try:
        fresh = {}
        for name in names:
            old = openings[name]
            version = str(int(old.version) + 1) if old.opened else old.version
            fresh[name] = replace(old, version=version, _service=None)
            fresh[name].prepare()
    except Exception as error:
        code = error.exit_code if isinstance(error, ZooError) else 1
        channel.sendall(packed((FAILED, told(error), code)))
        return False
    openings.update(fresh)
    channel.sendall(packed((LOADED,)))
    return True
