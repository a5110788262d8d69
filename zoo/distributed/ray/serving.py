"""Serving on Ray Serve: autoscaled replicas, each an ASGI application of `zoo.serving`.

    serve run zoo.distributed.ray.serving:app models=shop-clicks,multi30k-en-de max_replicas=8
    zoo serve shop-clicks multi30k-en-de --on ray --replicas 1:8

With `max_models` a replica loads a model at its first request, and releases the least recently used one of more than
`max_models`. Requests with the header serve_multiplexed_model_id go to a replica that has loaded their model.
"""

from __future__ import annotations

import asyncio
import re
import signal
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from pipelines.core import machine
from pipelines.core.console import print_line
from pipelines.core.errors import RequestError
from zoo.api.paths import Model
from zoo.distributed.ray.connection import connect, import_ray, parse_count

MODEL_PATH = re.compile(r"/v[12]/models/([^/:]+)")
TARGET_REQUESTS = 16  # average number of requests in a replica from which replicas are added
COUNTS = {"min_replicas": 1, "max_replicas": 0, "max_models": 0}  # options of `app`, and their defaults
UNSUPPORTED = ("certfile", "keyfile", "watch", "deltas")  # options of `zoo serve`


def app(arguments: Mapping[str, Any]) -> Any:
    """Builds the application for `serve run zoo.distributed.ray.serving:app KEY=VALUE ...` and its config files.

    Args:
        arguments: "models", a list or text separated by commas; "min_replicas" and "max_replicas"; "max_models", the
            maximum number of loaded models per replica, 0 for all; other options of `zoo.serving.app`, such as
            "threads", the number of cores of a replica.

    Returns:
        The application of Ray Serve.

    Raises:
        RequestError: An option is invalid, or Ray is not installed.
    """
    import_ray()
    from ray import serve

    from zoo.serving.workers.model_loader import parse_options

    options = dict(arguments)
    models = options.pop("models", ())
    model_list = [name for name in models.split(",") if name] if isinstance(models, str) else list(models)
    min_replicas, max_replicas, max_models = (int(options.pop(name, default)) for name, default in COUNTS.items())
    if min_replicas < 1 or max_models < 0:
        raise RequestError(f"found {min_replicas} to {max_replicas} replicas, {max_models} models, expected 1 or more")
    if wrong := [name for name in UNSUPPORTED if options.get(name)]:
        raise RequestError(f"found {', '.join(wrong)}: TLS is that of Ray Serve's http_options; models are not updated")
    numbers = {name: int(text) for name, text in options.items() if isinstance(text, str) and text.isdecimal()}
    served, config = parse_options(model_list, **{**options, **numbers, "workers": 1})
    return serve.deployment(
        _replica_type(served, config, max_models),
        name="zoo",
        ray_actor_options={"num_cpus": config.threads},
        max_ongoing_requests=config.queue,
        autoscaling_config={
            "min_replicas": min_replicas,
            "max_replicas": max(max_replicas, min_replicas),
            "target_ongoing_requests": TARGET_REQUESTS,
        },
        graceful_shutdown_timeout_s=config.grace,
    ).bind()


def _replica_type(served: Sequence[Any], config: Any, max_models: int) -> type:
    """Returns the class of the deployment's replicas.

    Args:
        served: Models.
        config: Configuration of the application.
        max_models: Maximum number of loaded models; 0 for one application with all.
    """
    from ray import serve
    from starlette.responses import Response

    from zoo.serving.http import asgi

    by_name = {model.name: model for model in served}

    class ASGIResponse(Response):  # type: ignore[misc]  # if starlette is not installed
        """Response of an ASGI application."""

        def __init__(self, application: Any) -> None:
            self.application = application

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            await self.application(scope, receive, send)

    class Replica:
        """A replica: one application with all models, or one for each loaded model."""

        def __init__(self) -> None:
            self.all_models = None if max_models else asgi.Application(served, config)

        @serve.multiplexed(max_num_models_per_replica=max_models or 1)  # type: ignore[untyped-decorator]
        async def load(self, name: str) -> Any:
            return MultiplexedModel(asgi.Application([by_name[name]], config))

        async def __call__(self, request: Any) -> Any:
            if self.all_models is not None:
                return ASGIResponse(self.all_models)
            path = MODEL_PATH.match(request.scope["path"])
            if path and path[1] in by_name:
                return ASGIResponse((await self.load(path[1])).application)
            return Response(f"name one of {', '.join(by_name)}: /v1/models/NAME:run\n", 404, media_type="text/plain")

        async def check_health(self) -> None:
            """Loads all models before the replica gets requests. Raises ZooError if one cannot be loaded."""
            if self.all_models is not None:
                await self.all_models.start()

    return Replica


class MultiplexedModel:
    """An application with one model, closed when Ray Serve releases it.

    Args:
        application: The application (`zoo.serving.http.asgi.Application`).
    """

    def __init__(self, application: Any) -> None:
        self.application, self._loop, self._closed = application, asyncio.get_running_loop(), False

    def __del__(self) -> None:
        if not self._closed and not self._loop.is_closed():
            self._closed = True
            asyncio.run_coroutine_threadsafe(self.application.close(), self._loop)


def serve_on_ray(
    models: Sequence[Model],
    *,
    address: str | None = None,
    replicas: str | int | None = None,
    max_models: int = 0,
    host: str = "127.0.0.1",
    port: int = 8000,
    **options: Any,
) -> None:
    """Serves models on a Ray cluster until SIGTERM or SIGINT; see `zoo.serve`.

    Args:
        models: Names or folders.
        address: Cluster address or "auto"; None for a local cluster.
        replicas: Number of replicas, or "MIN:MAX" to autoscale; None for 1 to cores / `threads`.
        max_models: Maximum number of open models per replica; 0 for all.
        host: Address that the proxy of Ray Serve binds on every node.
        port: Port of the proxy.
        **options: Options of `zoo.serve`.

    Raises:
        RequestError: An option is invalid.
    """
    threads = int(options.get("threads", 1))
    machine.require_threads(threads)
    ray = connect(address)
    cores = int(ray.cluster_resources().get("CPU", 1))
    count = parse_count(replicas or f"1:{max(1, cores // threads)}", "replicas")
    min_replicas, max_replicas = count if isinstance(count, tuple) else (count, count)
    counts = {"min_replicas": min_replicas, "max_replicas": max_replicas, "max_models": max_models}
    application = app({"models": [str(model) for model in models], **counts, **options})
    from ray import serve

    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    serve.start(http_options={"host": host, "port": port}, logging_config={"log_level": "ERROR"})
    try:
        serve.run(application, name="zoo", route_prefix="/")
        print_line(f"serving {', '.join(map(str, models))} at http://{host}:{port} by Ray Serve")
        stopped.wait()
    finally:
        serve.shutdown()
