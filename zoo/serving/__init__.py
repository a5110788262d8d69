"""Model server: the models of a zoo over HTTP (`zoo serve`), by the Open Inference Protocol and by task routes.

    http      server: granian, signals, `--watch`; asgi: the application for another HTTP server (`app`); router:
              routes, keys, limits; http_types: requests and responses; request_context: timeouts and cancellation
    workers   dispatcher: queues and dynamic batching; forkserver: opens the models and forks the workers; worker:
              inference processes; cpu_scheduling: scheduling policy of the threads
    handlers  from request bodies to arrays and from outputs to responses: rows, images, translations, texts
    protocol  open_inference: the protocol's bodies; responses: JSON, CSV, Arrow; openapi: API description

No other package imports this one; its libraries are the extra `serve`.
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
