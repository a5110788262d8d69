"""The verb that answers over the network: serve."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zoo
from pipelines.core import machine
from pipelines.core.errors import RequestError
from pipelines.models.pipeline import PRECISIONS, model_file
from zoo.paths import Model


def serve(
    models: Sequence[Model],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    precision: str = "int8",
    engine: str = "auto",
    threads: int = 1,
    workers: int | None = None,
    max_batch: int = 64,
    api_key_file: str | Path | None = None,
    cors_origins: Sequence[str] = (),
    certfile: str | Path | None = None,
    keyfile: str | Path | None = None,
    **settings: Any,
) -> None:
    """Answer requests for some models over HTTP until SIGTERM or SIGINT; see docs/serve.md.

    models: names or folders; MODEL@fp32 is a model in that precision in place of `precision`: a server can have both.
    workers: processes that compute; None: one for each so many `threads` of the machine's cores. settings: the others
    of `zoo.serving.settings.Settings`. Raises RequestError for models, keys, certificates or an address that cannot
    be.
    """
    try:
        from zoo.serving import server
        from zoo.serving.opening import Opening
        from zoo.serving.settings import Settings, names, read_keys
    except ModuleNotFoundError as error:
        raise RequestError(
            f"serving needs {error.name}, which is not installed; run: pip install 'int8-zoo[serve]'"
        ) from error
    if not models:
        raise RequestError("found no model to serve; name at least one")
    machine.require_threads(threads)
    model_file(precision, engine)
    wanted = [_named(str(model), precision) for model in models]
    for model, each in wanted:
        zoo.entry_of(model)
        model_file(each, engine)
    found = Settings(
        host=host,
        port=port,
        threads=threads,
        workers=max(1, machine.cores() // threads) if workers is None else workers,
        max_batch=max_batch,
        api_keys=frozenset() if api_key_file is None else read_keys(api_key_file),
        certfile=None if certfile is None else Path(certfile),
        keyfile=None if keyfile is None else Path(keyfile),
        origins=frozenset(cors_origins),
        **settings,
    )
    called = names([str(each) for each in models], [_called(*each, precision) for each in wanted])
    openings = [Opening(name, *each, engine, threads) for name, each in zip(called, wanted, strict=True)]
    server.serve(found, openings)


def _named(model: str, precision: str) -> tuple[str, str]:
    """A model's name or folder, and its precision: what is behind an @, if any."""
    base, _, own = model.rpartition("@")
    return (base, own) if base and own in PRECISIONS and not Path(model).exists() else (model, precision)


def _called(model: str, precision: str, usual: str) -> str:
    """What clients call a model; with its precision where that is not the server's."""
    from pipelines.models.hub import CARD, Card

    name = Card.read(Path(model) / CARD).name if Path(model).is_dir() else model
    return name if precision == usual else f"{name}@{precision}"
