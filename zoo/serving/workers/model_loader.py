"""Loads the models of a server: native models once in the fork server, shared by all workers; others in each worker."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zoo
from pipelines.core import machine
from pipelines.core.errors import RequestError
from pipelines.core.files import is_onnx
from pipelines.engines.catalog import base_engine
from pipelines.kernels.recommenders.steps.base import unread_tables
from pipelines.models.family import Servable
from pipelines.models.folder import ModelFolder, open_folder
from pipelines.models.hub import CARD, Card
from pipelines.models.pipeline import PRECISIONS, Pipeline, model_file
from zoo.registry import NETWORK_OPTIONS
from zoo.serving.config import ServerConfig, read_api_keys, require_unique
from zoo.serving.handlers.base import Handler

logger = logging.getLogger(__name__)


class FixedFolder(ModelFolder):
    """Folder of a version, whose files are complete: no file is built."""

    @classmethod
    def open(cls, path: Path) -> FixedFolder:
        """Opens a folder.

        Args:
            path: The folder.
        """
        folder = open_folder(path, zoo.entry)
        return cls(folder.path, folder.card, folder.entry)

    def ensure(self, name: str) -> Path:
        """See `ModelFolder.ensure`."""
        return self.verify(name)


@dataclass
class ServedModel:
    """One model of a server.

    Attributes:
        name: Public name.
        model: Name of a pretrained model, path of a model folder, or path of an .onnx file.
        precision: "int8", "fp32" or "bf16".
        engine: Inference engine, or "auto".
        threads: Number of intra-op threads.
        version: Number of the served version; every reload by `--watch` increments it.
        items: File of the items that a recommender ranks; None for none.
        place: Folder of a version of the model, see `zoo.serving.deltas`; None for the model itself.
        options: Options of an .onnx file, see `zoo.pipeline`.
        loaded: Whether `prepare` was called.
    """

    name: str
    model: str
    precision: str = "int8"
    engine: str = "auto"
    threads: int = 1
    version: str = "1"
    items: Path | None = None
    place: Path | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    loaded: bool = False
    _handler: Handler | None = field(default=None, repr=False)

    def prepare(self) -> None:
        """Loads a native model, to be shared by forked processes; builds missing files of other models.

        Results of native models do not depend on the other samples of a batch.

        Raises:
            RequestError: The engine is "native" and the model has no native form.
        """
        self.loaded = True
        native = "native" if self.engine == "auto" else self.engine
        if base_engine(native) == "native" and self.precision == "int8":
            try:
                self._handler = self._make_handler(self._open(native))
                return
            except RequestError as error:
                if self.engine != "auto":
                    raise
                logger.info("%s has no native form: %s", self.name, error)
        folder = zoo.load(self.model, **self.options) if self.place is None else FixedFolder.open(self.place)
        folder.ensure("int8.onnx" if self.precision == "int8" else "rewritten.onnx")

    @property
    def is_native(self) -> bool:
        """Whether `prepare` opened the model in native kernels."""
        return self._handler is not None

    def _open(self, engine: str) -> Pipeline:
        """Opens the pipeline of the model, or of a version of it."""
        if self.place is None:
            return zoo.pipeline(self.model, self.precision, engine, self.threads, **self.options)
        folder = FixedFolder.open(self.place)
        with unread_tables():  # which were checked as the models of the deltas were built
            return folder.entry.pipeline()(folder, self.precision, engine, self.threads)

    def handler(self) -> Handler:
        """Returns the handler of the model, warmed up in the calling process."""
        if self._handler is None:
            self._handler = self._make_handler(self._open(self.engine))
        self._handler.warm_up()
        return self._handler

    def _make_handler(self, pipeline: Pipeline) -> Handler:
        family = pipeline.folder.entry
        handler_type = family.handler() if isinstance(family, Servable) else Handler
        handler: Handler = handler_type(self.name, self.version, pipeline)
        handler.load_items(self.items)
        return handler


def parse_options(
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
    items: Sequence[str] = (),
    deltas: Sequence[str] = (),
    **options: Any,
) -> tuple[list[ServedModel], ServerConfig]:
    """Validates the options of a server.

    Args:
        models: Names or folders; MODEL@fp32 serves a model in that precision.
        precision: Precision of models without a precision in their name.
        engine: Inference engine, or "auto".
        threads: Number of intra-op threads of a worker.
        workers: Number of inference processes; None for cores / threads.
        api_key_file: File of API keys; None for no authentication.
        cors_origins: Allowed CORS origins.
        certfile: TLS certificate, PEM.
        keyfile: TLS private key, PEM.
        items: Files of the items that recommenders rank: MODEL=FILE each, or the FILE of a single model.
        deltas: Places of deltas (see `pipelines.deltas.transport`): MODEL=PLACE each, or the PLACE of a single model.
        **options: Other fields of `ServerConfig`, and options of the models that are .onnx files, for all of them alike
            (see `zoo.pipeline`).

    Returns:
        The models to load, and the configuration.

    Raises:
        RequestError: An option is invalid, or a model does not exist.
    """
    if not models:
        raise RequestError("found no model to serve; name at least one")
    machine.require_threads(threads)
    model_file(precision, engine)
    requested = [_split_precision(str(model), precision) for model in models]
    requested = [(str(zoo.located(model)), own_precision) for model, own_precision in requested]
    network = {name: value for name in NETWORK_OPTIONS if (value := options.pop(name, None)) is not None}
    own_options = {model: network for model, _ in requested if is_onnx(model)}
    if network and not own_options:
        raise RequestError(f"--{next(iter(network))} is for .onnx files; found none to serve, leave the option out")
    for model, own_precision in requested:
        if model in own_options:
            zoo.load(model, **own_options[model])  # raises before the server starts
        zoo.entry_of(model)
        model_file(own_precision, engine)
    names = [_public_name(*model, precision) for model in requested]
    require_unique(names, [str(model) for model in models])
    config = ServerConfig(
        threads=threads,
        workers=max(1, machine.cores() // threads) if workers is None else workers,
        api_keys=frozenset() if api_key_file is None else read_api_keys(api_key_file),
        certfile=None if certfile is None else Path(certfile),
        keyfile=None if keyfile is None else Path(keyfile),
        cors_origins=frozenset(cors_origins),
        deltas=_by_model(deltas, names, "deltas", "PLACE"),
        **options,
    )
    catalogues = {name: Path(file) for name, file in _by_model(items, names, "items", "FILE").items()}
    for name, catalogue in catalogues.items():
        if not catalogue.exists():
            raise RequestError(f"found no file {catalogue}, expected the items of {name}")
    return [
        ServedModel(name, *model, engine, threads, items=catalogues.get(name), options=own_options.get(model[0], {}))
        for name, model in zip(names, requested, strict=True)
    ], config


def _by_model(texts: Sequence[str], names: Sequence[str], what: str, value: str) -> dict[str, str]:
    """Values of an option NAME=VALUE, or VALUE of a single model, by the public name of their model."""
    values: dict[str, str] = {}
    for text in texts:
        name, equals, own = text.partition("=")
        if not equals or name not in names:
            if len(names) > 1:
                raise RequestError(f"found the {what} {text}, expected NAME={value} with one of {', '.join(names)}")
            name, own = names[0], text
        if name in values:
            raise RequestError(f"found the {what} {values[name]} and {own} of {name}, expected one {value.lower()}")
        values[name] = own
    return values


def _split_precision(model: str, precision: str) -> tuple[str, str]:
    """A model's name or folder, and its precision: the part after an @, if any."""
    base, _, own_precision = model.rpartition("@")
    has_precision = base and own_precision in PRECISIONS and not Path(model).exists()
    return (base, own_precision) if has_precision else (model, precision)


def _public_name(model: str, precision: str, default_precision: str) -> str:
    name = model
    if is_onnx(model):
        name = zoo.load(model).card.name
    elif Path(model).is_dir():
        name = Card.read(Path(model) / CARD).name
    return name if precision == default_precision else f"{name}@{precision}"
