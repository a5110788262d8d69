"""How the models of a server are opened: native forms in the keeper, once for all workers; the rest in each worker."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import zoo
from pipelines.core.errors import RequestError
from pipelines.models.pipeline import Pipeline
from zoo.serving.services import Service

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
        return kind_of(pipeline)(self.name, self.version, pipeline)


def kind_of(pipeline: Any) -> type[Service]:
    """The service of a pipeline's kind; their modules are imported where the family's are."""
    families = {each.__module__ for each in type(pipeline).__mro__}
    if "zoo.clicks.predict" in families:
        from zoo.serving.rows import Rows

        return Rows
    if "zoo.images.predict" in families:
        from zoo.serving.photos import Photos

        return Photos
    if "zoo.transformer_mt.predict" in families:
        from zoo.serving.sentences import Sentences

        return Sentences
    return Service
