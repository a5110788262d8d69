"""Model server: models over HTTP (`zoo serve`), by the Open Inference Protocol and by routes of their tasks.

    http      server: granian, signals, `--watch`; asgi: the application for another HTTP server (`app`); router:
              routes, keys, limits; http_types: requests and responses; request_context: timeouts and cancellation
    workers   dispatcher: queues and dynamic batching; forkserver: loads the models and forks the workers; worker:
              inference processes; cpu_scheduling: scheduling policy of the threads
    handlers  from request bodies to arrays and from outputs to responses: rows, images, translations, texts
    protocol  open_inference: the protocol's bodies; responses: JSON, CSV, Arrow; openapi: API description

Only `zoo.api.serving` and `zoo.distributed.ray` import this package; its libraries are the extra `serve`.
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

    Returns:
        The application; it loads the models at startup or at the first request.

    Raises:
        RequestError: An option is invalid.
    """
    from zoo.serving.http.asgi import Application
    from zoo.serving.workers.model_loader import parse_options

    model_list = [models] if isinstance(models, str | Path) else list(models)
    return Application(*parse_options(model_list, **{"workers": 1, **options}))
