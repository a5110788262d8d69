"""Models behind Ray Serve: replicas on any nodes, each the ASGI application of `zoo.serving`, as many as the requests
want.

    serve run zoo.distributed.ray.serving:app models=shop-clicks,multi30k-en-de max_replicas=8
    zoo serve shop-clicks multi30k-en-de --on ray --replicas 1:8

With `max_models` a replica opens a model at its first request, and closes the one that was not asked for longest where
it has so many; requests with the header serve_multiplexed_model_id go to a replica that has theirs open.
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
from zoo.distributed.ray.connection import connect, counts_of, library

MODEL = re.compile(r"/v[12]/models/([^/:]+)")
AT_ONCE = 16  # requests that wait in a replica, on the average, before there is another
COUNTS = {"min_replicas": 1, "max_replicas": 0, "max_models": 0}  # what `app` takes beside the models, and else
NOT_RAYS = ("certfile", "keyfile", "watch")  # of `zoo serve`


def app(arguments: Mapping[str, Any]) -> Any:
    """The application of Ray Serve, for `serve run zoo.distributed.ray.serving:app KEY=VALUE ...` and its config files.

    arguments: "models", a list or with commas between; "min_replicas", "max_replicas"; "max_models" of a replica at
    once (0: all); the others are options of `zoo.serving.app`, such as threads, which are a replica's cores. Raises
    RequestError for what cannot be.
    """
    library()
    from ray import serve
    from starlette.responses import Response

    from zoo.serving.http import asgi
    from zoo.serving.workers.model_loader import told

    given = dict(arguments)
    models = given.pop("models", ())
    listed = [each for each in models.split(",") if each] if isinstance(models, str) else list(models)
    least, most, at_once = (int(given.pop(name, each)) for name, each in COUNTS.items())
    if not 0 < least <= max(most, least) or at_once < 0:
        raise RequestError(f"found {least} to {most} replicas, {at_once} models, wanted 1 or more")
    if wrong := [name for name in NOT_RAYS if given.get(name)]:
        raise RequestError(
            f"found {', '.join(wrong)}: TLS is that of Ray Serve's http_options; folders are not watched"
        )
    whole = {name: int(text) for name, text in given.items() if isinstance(text, str) and text.isdecimal()}
    openings, settings = told(listed, **{**given, **whole, "workers": 1})
    by_name = {each.name: each for each in openings}

    class Answer(Response):  # type: ignore[misc]  # where starlette is not installed
        """What an ASGI application answers, as it comes."""

        def __init__(self, application: Any) -> None:
            self.application = application

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            await self.application(scope, receive, send)

    class Models:
        """A replica."""

        def __init__(self) -> None:
            self.all = None if at_once else asgi.Application(openings, settings)

        @serve.multiplexed(max_num_models_per_replica=at_once or 1)  # type: ignore[untyped-decorator]
        async def opened(self, name: str) -> Any:
            return Opened(asgi.Application([by_name[name]], settings))

        async def __call__(self, request: Any) -> Any:
            if self.all is not None:
                return Answer(self.all)
            named = MODEL.match(request.scope["path"])
            if named and named[1] in by_name:
                return Answer((await self.opened(named[1])).application)
            return Response(f"name one of {', '.join(by_name)}: /v1/models/NAME:run\n", 404, media_type="text/plain")

        async def check_health(self) -> None:
            """Open all models before the replica is given requests. Raises ZooError for one that cannot be opened."""
            if self.all is not None:
                await self.all.opened()

    scaled = {"min_replicas": least, "max_replicas": max(most, least), "target_ongoing_requests": AT_ONCE}
    return serve.deployment(
        Models,
        name="zoo",
        ray_actor_options={"num_cpus": settings.threads},
        max_ongoing_requests=settings.queue,
        autoscaling_config=scaled,
        graceful_shutdown_timeout_s=settings.grace,
    ).bind()


class Opened:
    """An application with one model, closed where Ray Serve takes it out of a replica."""

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
    found = counts_of(replicas or f"1:{max(1, cores // threads)}", "replicas")
    least, most = found if isinstance(found, tuple) else (found, found)
    counts = {"min_replicas": least, "max_replicas": most, "max_models": max_models}
    application = app({"models": [str(each) for each in models], **counts, **options})
    from ray import serve

    ended = threading.Event()
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, lambda *_: ended.set())
    serve.start(http_options={"host": host, "port": port}, logging_config={"log_level": "ERROR"})
    try:
        serve.run(application, name="zoo", route_prefix="/")
        print_line(f"serving {', '.join(map(str, models))} at http://{host}:{port} by Ray Serve")
        ended.wait()
    finally:
        serve.shutdown()
