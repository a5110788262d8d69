"""Updater: a process that polls the places of deltas, prepares versions, and names them to the HTTP server.

It prepares a version after the last worker left the version before the last one: no worker reads files while they are
written.
"""

from __future__ import annotations

import fcntl
import gc
import logging
import os
import select
import shutil
import socket
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pipelines.core import settings
from pipelines.core.errors import RequestError
from pipelines.deltas.transport import open_transport
from zoo.serving.deltas.versions import Version, Versions, changed
from zoo.serving.workers.channel import pack, receive
from zoo.serving.workers.cpu_scheduling import NICE
from zoo.serving.workers.lifetime import fork_process
from zoo.serving.workers.model_loader import ServedModel
from zoo.serving.workers.worker import load_error

VERSION, FAILED, SERVED = "version", "failed", "served"
POLL_SECONDS = 0.2
logger = logging.getLogger(__name__)


def start(models: Sequence[ServedModel], deltas: Mapping[str, str]) -> tuple[socket.socket, int]:
    """Forks the updater. Call it before any thread is started.

    Args:
        models: Served models.
        deltas: Places of deltas by the public name of the model.

    Returns:
        The HTTP server's end of the channel, whose end ends the updater, and the process id. The updater sends
        (VERSION, name, folder or "", engine, version, changes) of every model at first and then of every change, or
        (FAILED, message, exit code); after a VERSION it waits for (SERVED, fault or "").
    """

    def run(channel: socket.socket) -> None:
        scratch = ""
        try:
            scratch = _scratch()
            _run(channel, {model.name: model for model in models if model.name in deltas}, deltas, Path(scratch))
        except BaseException as error:
            channel.sendall(pack((FAILED, *load_error(error))))
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    return fork_process(run)


def _scratch() -> str:
    """Makes a folder that is locked while this process runs, and removes the folders of killed processes."""
    place = settings.home() / "versions"
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(
            f"cannot write {place}: {error.strerror or error}; set ZOO_HOME to a folder you may write"
        ) from error
    for folder in place.iterdir():
        with (folder / ".lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                continue
            shutil.rmtree(folder, ignore_errors=True)
    scratch = tempfile.mkdtemp(prefix=f"{os.getppid()}-", dir=place)
    fcntl.flock(os.open(f"{scratch}/.lock", os.O_CREAT | os.O_WRONLY), fcntl.LOCK_EX)
    return scratch


def _run(channel: socket.socket, models: Mapping[str, ServedModel], deltas: Mapping[str, str], scratch: Path) -> None:
    versions = {
        name: Versions(model, open_transport(deltas[name]), scratch / str(number))
        for number, (name, model) in enumerate(models.items())
    }
    for name, series in versions.items():
        if not _serve(channel, models[name], series, series.first()):
            return
    os.nice(NICE)
    for name, series in versions.items():
        if series.prepare():
            _open(replace(models[name], place=series.spare, engine=series.engine))  # so that libraries are loaded
    while not select.select([channel], [], [], POLL_SECONDS)[0]:
        for version in changed(versions):
            if not _serve(channel, models[version.model], versions[version.model], version):
                return
            versions[version.model].prepare()


def _open(model: ServedModel) -> None:
    """Opens a model and runs it once."""
    opened = replace(model, _handler=None)
    opened.prepare()
    opened.handler()
    del opened
    gc.collect()  # so that the files and tables of versions do not add up


def _serve(channel: socket.socket, model: ServedModel, versions: Versions, version: Version) -> bool:
    """Names a version to the server after it was opened and run here; returns False when the server has ended."""
    if version.place is not None:
        try:
            _open(replace(model, place=version.place, engine=version.engine))
        except BaseException as error:  # a panic of a library, too
            versions.served(load_error(error)[0])
            return True
    place = "" if version.place is None else str(version.place)
    channel.sendall(pack((VERSION, version.model, place, version.engine, version.version, version.changes)))
    message = receive(channel)
    if message is None:
        return False
    if version.place is not None:
        versions.served(message[1])
    return True
