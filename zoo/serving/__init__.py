"""Serving: the models of a zoo over HTTP (`zoo serve`), by the Open Inference Protocol and by the tasks' own road.

    server    granian before a front, signals, `--watch`; asgi: the front for another HTTP server (`app`)
    front     routes, keys, limits; exchange: requests and responses; wanted: what a client waits for, and how long
    dispatch  queues, idle workers, what goes together; scheduling: how threads share their processors
    keeper    opens the models and forks the workers; worker: bodies to arrays to answers by a service (`rows`,
              `photos`, `sentences`, `texts`)
    inference the protocol's bodies; answers: JSON, CSV, Arrow; metrics, openapi, static (the page)

Nothing else imports this package; its libraries are the extra `serve`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zoo.serving.http.asgi import Application


def app(models: Sequence[str | Path] | str | Path, **options: Any) -> Application:
    """Returns an ASGI application that runs models in its own process, for any HTTP server or Ray Serve.

    Args:
        models: Names or folders: one, or several.
        **options: Options of `zoo.serve`, except host, port, certificates and watch.

    Raises:
        RequestError: An option is invalid. A model that cannot be opened fails at startup or at the first request.
    """
    from zoo.serving.http.asgi import Application
    from zoo.serving.workers.model_loader import told

    listed = [models] if isinstance(models, str | Path) else list(models)
    openings, settings = told(listed, **{"workers": 1, **options})
    return Application(openings, settings)
