"""Command that serves models over HTTP: serve."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

from pipelines.core.errors import not_installed
from zoo.api.paths import Model

LIBRARIES = ("granian", "orjson", "prometheus_client", "uvloop")


def serve(models: Sequence[Model], **options: Any) -> None:
    """Serves models over HTTP until SIGTERM or SIGINT; see docs/serve.md.

    Args:
        models: Names or folders. MODEL@fp32 serves a model in that precision.
        **options: `precision`, `engine`, `threads`; `workers`: number of inference processes, None for cores / threads;
            `api_key_file`, `cors_origins`, `certfile`, `keyfile`; and the fields of `zoo.serving.config.ServerConfig`.

    Raises:
        RequestError: A model, key file, certificate or address is invalid, or the extra `serve` is not installed.
    """
    if missing := [name for name in LIBRARIES if importlib.util.find_spec(name) is None]:
        raise not_installed("serving", ", ".join(missing), "int8-zoo[serve]")
    from zoo.serving.http import server
    from zoo.serving.workers.model_loader import parse_options

    served, config = parse_options(models, **options)
    server.serve(config, served)
