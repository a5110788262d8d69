"""The verb that answers over the network: serve."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zoo
from pipelines.core import machine
from pipelines.core.errors import RequestError
from pipelines.models.pipeline import model_file
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

    workers: processes that compute; None: one for each so many `threads` of the machine's cores. settings: the others
    of `zoo.serving.settings.Settings`. Raises RequestError for models, keys, certificates or an address that cannot be.
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
    for model in models:
        zoo.entry_of(model)
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
    paths = [str(each) for each in models]
    called = names(paths, [_name(each) for each in models])
    openings = [Opening(*each, precision, engine, threads) for each in zip(called, paths, strict=True)]
    server.serve(found, openings)


def _name(model: Model) -> str:
    from pipelines.models.hub import CARD, Card

    return Card.read(Path(model) / CARD).name if Path(model).is_dir() else str(model)
