"""The verb that answers over the network: serve."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

from pipelines.core.errors import not_installed
from zoo.api.paths import Model

LIBRARIES = ("granian", "orjson", "prometheus_client", "uvloop")


def serve(models: Sequence[Model], **options: Any) -> None:
    """Answer requests for some models over HTTP until SIGTERM or SIGINT; see docs/serve.md.

    models: names or folders, MODEL@fp32 in that precision whatever `precision` says.
    options: precision, engine, threads; workers: processes that compute, None for one for each so many `threads` of the
    machine's cores; api_key_file, cors_origins, certfile, keyfile; and those of `zoo.serving.config.Settings`. Raises
    RequestError for models, keys, certificates or an address that cannot be, or without the extra `serve`.
    """
    if missing := [name for name in LIBRARIES if importlib.util.find_spec(name) is None]:
        raise not_installed("serving", ", ".join(missing), "int8-zoo[serve]")
    from zoo.serving.http import server
    from zoo.serving.workers.model_loader import told

    openings, settings = told(models, **options)
    server.serve(settings, openings)
