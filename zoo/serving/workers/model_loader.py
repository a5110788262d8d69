"""Opens the models of a server: native models once in the fork server, shared by all workers; others in each worker."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zoo
from pipelines.core import machine
from pipelines.core.errors import RequestError
from pipelines.models.family import Servable
from pipelines.models.hub import CARD, Card
from pipelines.models.pipeline import PRECISIONS, Pipeline, model_file
from zoo.serving.config import Settings, names, read_keys
from zoo.serving.handlers.base import Service

logger = logging.getLogger(__name__)


@dataclass
class Opening:
    """One model of a server. name: what clients call it. model: its name or folder. version: counts what `--watch`
    found.
    """

    name: str
    model: str
    precision: str = "int8"
    engine: str = "auto"
    threads: int = 1
    version: str = "1"
    opened: bool = False
    _service: Service | None = field(default=None, repr=False)

    def prepare(self) -> None:
        """Open the model where it has a native form: forked processes share it, and its results do not depend on who is
        in a batch. Make the files of the others.
        """
        self.opened = True
        if self.engine in ("auto", "native") and self.precision == "int8":
            try:
                self._service = self._made(zoo.pipeline(self.model, self.precision, "native", self.threads))
                return
            except RequestError as error:
                if self.engine == "native":
                    raise
                logger.info("%s has no native form: %s", self.name, error)
        folder = zoo.load(self.model)
        folder.ensure("int8.onnx" if self.precision == "int8" else "rewritten.onnx")

    def service(self) -> Service:
        """The model's service, ready to answer; in the process that calls."""
        if self._service is None:
            self._service = self._made(zoo.pipeline(self.model, self.precision, self.engine, self.threads))
        self._service.warm()
        return self._service

    def _made(self, pipeline: Pipeline) -> Service:
        family = pipeline.folder.entry
        handler = family.handler() if isinstance(family, Servable) else Service
        made: Service = handler(self.name, self.version, pipeline)
        return made


def told(
    models: Sequence[str | Path],
    *,
    precision: str = "int8",
    engine: str = "auto",
    threads: int = 1,
    workers: int | None = None,
    api_key_file: str | Path | None = None,
    cors_origins: Sequence[str] = (),
    certfile: str | Path | None = None,
    keyfile: str | Path | None = None,
    **settings: Any,
) -> tuple[list[Opening], Settings]:
    """See `zoo.api.serving.serve`: validates the options of a server.

    Returns:
        The models to open, and the configuration.
    """
    if not models:
        raise RequestError("found no model to serve; name at least one")
    machine.require_threads(threads)
    model_file(precision, engine)
    wanted = [_named(str(model), precision) for model in models]
    for model, own in wanted:
        zoo.entry_of(model)
        model_file(own, engine)
    called = names([str(each) for each in models], [_called(*each, precision) for each in wanted])
    found = Settings(
        threads=threads,
        workers=max(1, machine.cores() // threads) if workers is None else workers,
        api_keys=frozenset() if api_key_file is None else read_keys(api_key_file),
        certfile=None if certfile is None else Path(certfile),
        keyfile=None if keyfile is None else Path(keyfile),
        origins=frozenset(cors_origins),
        **settings,
    )
    return [Opening(name, *each, engine, threads) for name, each in zip(called, wanted, strict=True)], found


def _named(model: str, precision: str) -> tuple[str, str]:
    """A model's name or folder, and its precision: what is behind an @, if any."""
    base, _, own = model.rpartition("@")
    return (base, own) if base and own in PRECISIONS and not Path(model).exists() else (model, precision)


def _called(model: str, precision: str, usual: str) -> str:
    """What clients call a model; with its precision where that is not the server's."""
    name = Card.read(Path(model) / CARD).name if Path(model).is_dir() else model
    return name if precision == usual else f"{name}@{precision}"
