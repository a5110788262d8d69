"""Router of the server: requests to routes, bodies to workers, responses to clients.

It is independent of the HTTP server; `rsgi` and `asgi` adapt it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import parse_qsl, unquote

import orjson

from zoo.serving.config import ServerConfig, key_digest
from zoo.serving.handlers.base import INFER, RUN
from zoo.serving.handlers.ranking import RANK
from zoo.serving.http import static_files
from zoo.serving.http.access_log import AccessLog
from zoo.serving.http.http_types import BodyTooLarge, ClientDisconnect, Hold, HTTPException, Request, Response
from zoo.serving.http.request_context import RequestContext
from zoo.serving.http.text_routes import Choose, TextRoutes
from zoo.serving.metrics import CONTENT_TYPE, NO_SECONDS, STAGES, Metrics
from zoo.serving.protocol import openapi
from zoo.serving.protocol.content_encoding import ACCEPTED, ENCODINGS, decompress
from zoo.serving.protocol.responses import JSON, error_body
from zoo.serving.protocol.text_apis import HEALTH
from zoo.serving.workers.channel import Job
from zoo.serving.workers.dispatcher import Dispatcher, QueueFull

EXTENSIONS = ["binary_tensor_data"]
MAX_TIMEOUT_MS = 86_400_000
MAX_DRAIN_BYTES = 100_000  # size up to which the body of a rejected request is read
MAX_HELD_BODIES = 16  # total size of the bodies in memory, in multiples of `max_body`
JSON_LENGTH = "inference-header-content-length"
VERSION = "model-version"  # of the model that computed a response
CORS_HEADERS = [
    ("access-control-allow-methods", "GET, POST"),
    ("access-control-allow-headers", f"authorization, content-type, x-api-key, timeout-ms, timing, {JSON_LENGTH}"),
    ("access-control-expose-headers", f"retry-after, server-timing, {JSON_LENGTH}, {VERSION}"),
    ("vary", "origin"),
]
_HOST = re.compile(r"[\w.~!$&'()*+,;=:%\[\]-]*")

logger = logging.getLogger(__name__)
Endpoint = Callable[[Request], Awaitable[Response]]


class Router:
    """Handles the requests for the models of a dispatcher.

    Args:
        config: Configuration of the server.
        models: Public names of the models.
        dispatcher: Dispatcher of the workers.

    Attributes:
        metrics: Metrics of the server.
        access_log: Access log; used if the configuration enables it.
        closing: Set to True when the server shuts down: it is no longer ready, and responses close their connections.
        requests: Number of requests so far.
    """

    def __init__(self, config: ServerConfig, models: list[str], dispatcher: Dispatcher) -> None:
        self.config, self.names, self.dispatcher = config, models, dispatcher
        self.metrics = Metrics(lambda: dispatcher.models, dispatcher.state)
        self.access_log = AccessLog()
        self.closing, self.requests = False, 0
        self._held_bytes = 0  # of request bodies in memory
        self._public = {"/v2/health/live", "/v2/health/ready", HEALTH, "/openapi.json", "/docs", *static_files.FILES}
        self._texts = TextRoutes(config, models, lambda: dispatcher.models)
        self._routes: dict[str, dict[str, Endpoint]] = {
            "/v2/health/live": {"GET": self._live},
            "/v2/health/ready": {"GET": self._ready},
            "/v2": {"GET": self._server_metadata},
            "/v2/repository/index": {"POST": self._repository_index},
            "/v1/models": {"GET": self._list_models},
            "/metrics": {"GET": self._metrics},
            HEALTH: {"GET": self._health},
            "/openapi.json": {"GET": self._openapi},
            "/docs": {"GET": self._docs},
            **{path: {"GET": _static(path)} for path in static_files.FILES},
        }
        for name in models:
            self._routes |= {
                f"/v1/models/{name}": {"GET": self._description(name)},
                f"/v1/models/{name}:run": {"POST": self._inference(name, RUN)},
                f"/v1/models/{name}:rank": {"POST": self._inference(name, RANK)},
                f"/v2/models/{name}": {"GET": self._model_metadata(name)},
                f"/v2/models/{name}/ready": {"GET": self._model_ready(name)},
                f"/v2/models/{name}/infer": {"POST": self._inference(name, INFER)},
            }
        for path, choose in self._texts.targets().items():
            self._routes.setdefault(path, {})["POST"] = self._inference("", "", choose)
        for path, info in self._texts.infos().items():
            self._routes[path] = {"GET": _computed(info)}

    # --------------------------------------------------------------------------------------------------------- requests

    async def handle(self, request: Request) -> Response:
        """Handles a request.

        Args:
            request: The request.

        Returns:
            The response; errors are responses, too.
        """
        begin = time.perf_counter()
        self.requests += 1
        try:
            response = await self._route(request)
        except HTTPException as error:
            response = await self._drain(request, error.response)
            self.metrics.rejected[response.status] += 1
        except Exception:
            logger.exception("a request for %s failed", request.path)
            response = Response(500, JSON, error_body("the server failed"))
            self.metrics.rejected[500] += 1
        if response.status >= 400:
            response = self._texts.error(request.method, request.path, response)
        if self.config.cors_origins:
            response = self._with_cors(request, response)
        if self.closing:
            response = _last(response)
        if not self.config.access_log:
            return response
        if response.chunks is not None:
            return response._replace(chunks=self._logged_chunks(request, response, begin))
        self._log(request, response.status, len(response.body), begin)
        return response

    async def _drain(self, request: Request, response: Response) -> Response:
        """The response to a rejected request, after reading its body.

        A client that is still sending would not see the response. With a large body, the connection is closed instead.
        """
        is_chunked = request.header("transfer-encoding") is not None
        length = request.header("content-length") or "0"
        if not request.unread or (length == "0" and not is_chunked):
            return response
        if length.isascii() and length.isdigit() and len(length) < len(str(MAX_DRAIN_BYTES)):
            with contextlib.suppress(BodyTooLarge, ClientDisconnect, TimeoutError):
                async with asyncio.timeout(self.config.read_timeout):
                    await request.read(MAX_DRAIN_BYTES, (lambda size: None) if is_chunked else None)
                    return response
        return _last(response)

    async def _route(self, request: Request) -> Response:
        _require_host(request)
        methods = self._routes.get(request.path) or self._match(request.path)
        if self.config.cors_origins and request.method == "OPTIONS" and methods:
            return Response(204, JSON, b"")
        if self.config.api_keys and (request.path not in self._public or request.method == "POST"):
            self._authenticate(request)
        if methods is None:
            raise HTTPException(404, self._not_found(request.path))
        endpoint = methods.get(request.method)
        if endpoint is None and request.method == "HEAD" and "GET" in methods:
            return (await methods["GET"](request))._replace(body=b"", chunks=None)
        if endpoint is None:
            allowed = ", ".join(methods)
            raise HTTPException(405, f"found {request.method[:20]}, expected {allowed}", ("allow", allowed))
        return await endpoint(request)

    def _match(self, path: str) -> dict[str, Endpoint] | None:
        """The route of a path with escapes or with the version of a model."""
        path = unquote(path).rstrip("/") or "/"
        model_path, separator, tail = path.partition("/versions/")
        if separator and model_path.startswith("/v2/models/"):
            version, _, verb = tail.partition("/")
            model = self.dispatcher.models.get(model_path.removeprefix("/v2/models/"))
            if model is None or model["version"] != version:
                return None
            path = f"{model_path}/{verb}" if verb else model_path
        return self._routes.get(path)

    def _not_found(self, path: str) -> str:
        if path.startswith(("/v1/models/", "/v2/models/")):
            return f"there is nothing at {path[:200]}; the models are {', '.join(self.names)}"
        return f"there is nothing at {path[:200]}; see /docs"

    def _authenticate(self, request: Request) -> None:
        authorization = request.header("authorization") or ""
        is_bearer = authorization[:7].lower() == "bearer "
        digest = key_digest(authorization[7:].strip() if is_bearer else request.header("x-api-key") or "")
        if not sum(hmac.compare_digest(digest, valid) for valid in self.config.api_keys):
            raise HTTPException(401, "expected an API key: Authorization: Bearer KEY", ("www-authenticate", "Bearer"))

    def _with_cors(self, request: Request, response: Response) -> Response:
        """The response with CORS headers if the origin of the request is allowed. All vary by origin, for caches."""
        origin = request.header("origin")
        if origin is None or not {origin, "*"} & self.config.cors_origins:
            return response._replace(headers=[*response.headers, ("vary", "origin")])
        headers = dict(CORS_HEADERS)
        if requested := request.header("access-control-request-headers"):  # such as x-stainless-os of OpenAI's client
            headers["access-control-allow-headers"] += f", {requested}"
        return response._replace(headers=[*response.headers, ("access-control-allow-origin", origin), *headers.items()])

    async def _logged_chunks(self, request: Request, response: Response, begin: float) -> AsyncGenerator[bytes, None]:
        """The chunks of a response, which is logged after the last one."""
        assert response.chunks is not None
        size = 0
        try:
            async with contextlib.aclosing(response.chunks) as chunks:
                async for chunk in chunks:
                    size += len(chunk)
                    yield chunk
        finally:
            self._log(request, response.status, size, begin)

    def _log(self, request: Request, status: int, size: int, begin: float) -> None:
        line = {
            "time": round(time.time(), 3),
            "client": request.client,
            "method": request.method,
            "path": request.path,
            "status": status,
            "bytes": size,
            "ms": round(1e3 * (time.perf_counter() - begin), 3),
        }
        self.access_log.add(line)

    # -------------------------------------------------------------------------------------------------------- inference

    def _inference(self, name: str, kind: str, choose: Choose | None = None) -> Endpoint:
        """Endpoint of requests that a worker computes, for a model and a verb, or those that `choose` returns."""
        submit, clock = self.dispatcher.submit, time.perf_counter
        if name:
            self.metrics.series(name, kind)  # shown from the start

        async def endpoint(request: Request) -> Response:
            begin, model, verb = clock(), name, kind
            held_bytes, context = 0, None

            def hold(size: int) -> None:
                nonlocal held_bytes
                held_bytes += self._hold(size)

            try:
                length = self._length(request)
                hold(length or 0)
                context = RequestContext(self.dispatcher, request, self._timeout(request), self.config.read_timeout)
                body = await self._read_body(context, hold if length is None else None)
                received = 0
                if (encoding := request.header("content-encoding")) is not None:
                    received = len(body)
                    body = await self._decompress(body, encoding.strip().lower())
                    hold(len(body))
                read = clock() - begin
                if choose is not None:
                    model, verb = choose(body)
                job = _job(request, verb, body, received)
                try:
                    pending = submit(model, job, context.deliver)
                except QueueFull:
                    message = f"{self.dispatcher.max_queued} requests wait already; try again"
                    raise HTTPException(429, message, ("retry-after", "1")) from None
                result = await context.result(pending)
            except HTTPException as error:
                if not model:
                    raise
                self.metrics.series(model, verb).add(error.response.status, clock() - begin, NO_SECONDS, 0, 0)
                return await self._drain(request, error.response)
            finally:
                self._held_bytes -= held_bytes
                if context is not None:
                    context.close()
            wait = max(clock() - begin - read - sum(result.stage_seconds), 0.0)
            stage_seconds = (read, wait, *result.stage_seconds)
            headers = [] if pending.connection is None else [(VERSION, pending.connection.versions[model])]
            if result.json_length >= 0:
                headers.append((JSON_LENGTH, str(result.json_length)))
            if request.header("timing") is not None:
                stages = (f"{name};dur={1e3 * stage:.3f}" for name, stage in zip(STAGES, stage_seconds, strict=True))
                headers.append(("server-timing", ", ".join(stages)))
            if result.status == 503:
                headers.append(("retry-after", "1"))
            seconds = clock() - begin
            self.metrics.series(model, verb).add(
                result.status, seconds, stage_seconds, result.samples, result.batch_size
            )
            chunks = None if result.last else context.chunks(pending, result)
            return Response(result.status, result.content_type, result.body, headers, chunks)

        return endpoint

    def _length(self, request: Request) -> int | None:
        """The size of the body in bytes; None for a chunked one."""
        if request.header("transfer-encoding") is not None:
            return None
        length = request.header("content-length")
        if length is None:
            raise HTTPException(411, "expected a body with its Content-Length, or chunked", ("connection", "close"))
        size = _parse_digits(length)
        if size is None:
            raise HTTPException(400, f"found Content-Length {length[:40]!r}, expected a whole number")
        if size > self.config.max_body:
            raise self._body_too_large(f"{size:,}")
        return size

    def _hold(self, size: int) -> int:
        if self._held_bytes + size > MAX_HELD_BODIES * self.config.max_body:
            raise HTTPException(429, "too many bytes of other requests are held; try again", ("retry-after", "1"))
        self._held_bytes += size
        return size

    def _body_too_large(self, size: str = "more") -> HTTPException:
        message = f"found {size} bytes, expected at most {self.config.max_body:,}"
        return HTTPException(413, message, ("connection", "close"))

    async def _read_body(self, context: RequestContext, hold: Hold | None) -> bytes:
        try:
            return await context.read_body(self.config.max_body, hold)
        except BodyTooLarge:
            raise self._body_too_large() from None
        except ClientDisconnect:
            raise HTTPException(400, "the body ended early") from None

    async def _decompress(self, body: bytes, encoding: str) -> bytes:
        if encoding == "identity":
            return body
        if encoding not in ACCEPTED:
            message = f"found Content-Encoding {encoding[:40]!r}, expected one of {', '.join(ENCODINGS)}"
            raise HTTPException(415, message, ("accept-encoding", ", ".join(ENCODINGS)))
        try:
            content = await asyncio.to_thread(decompress, body, self.config.max_body, encoding)
        except ValueError as error:
            raise HTTPException(400, f"the body cannot be read as {encoding}: {error}") from None
        if len(content) > self.config.max_body:
            raise self._body_too_large()
        return content

    def _timeout(self, request: Request) -> float:
        """Request timeout in seconds."""
        header = request.header("timeout-ms")
        if header is None:
            return self.config.deadline
        milliseconds = _parse_digits(header)
        if milliseconds is None or not 1 <= milliseconds <= MAX_TIMEOUT_MS:
            message = f"found timeout-ms {header[:40]!r}, expected whole milliseconds, 1 to {MAX_TIMEOUT_MS:,}"
            raise HTTPException(400, message)
        return milliseconds / 1e3

    # --------------------------------------------------------------------------------------------- health and metadata

    async def _live(self, request: Request) -> Response:
        return _json({"live": True})

    async def _ready(self, request: Request) -> Response:
        self._require_ready()
        return _json({"ready": True})

    async def _health(self, request: Request) -> Response:
        self._require_ready()
        return Response(200, JSON, b"")

    def _model_ready(self, name: str) -> Endpoint:
        async def endpoint(request: Request) -> Response:
            self._require_ready()
            return _json({"name": name, "ready": True})

        return endpoint

    def _require_ready(self) -> None:
        if self.closing or not self.dispatcher.ready:
            message = "the server shuts down" if self.closing else "the models are not loaded yet"
            raise HTTPException(503, message, ("retry-after", "1"))

    async def _server_metadata(self, request: Request) -> Response:
        return _json({"name": "int8-zoo", "version": openapi.VERSION, "extensions": EXTENSIONS})

    async def _repository_index(self, request: Request) -> Response:
        state = "READY" if self.dispatcher.ready else "UNAVAILABLE"
        return _json(
            [
                {"name": model["name"], "version": model.get("version", ""), "state": state, "reason": ""}
                for model in self._descriptions()
            ]
        )

    def _descriptions(self) -> list[Mapping[str, Any]]:
        """Descriptions of the models; their names alone before they are loaded."""
        return [self.dispatcher.models.get(name) or {"name": name} for name in self.names]

    async def _list_models(self, request: Request) -> Response:
        descriptions = self._descriptions()
        return _json({"object": "list", "data": [*map(self._texts.listed, descriptions)], "models": descriptions})

    def _description(self, name: str) -> Endpoint:
        async def endpoint(request: Request) -> Response:
            description = self._loaded(name)
            return _json({**self._texts.listed(description), **description})

        return endpoint

    def _model_metadata(self, name: str) -> Endpoint:
        async def endpoint(request: Request) -> Response:
            model = self._loaded(name)
            return _json(
                {
                    "name": name,
                    "versions": [model["version"]],
                    "platform": f"int8-zoo_{model['engine']}",
                    "inputs": model["inputs"],
                    "outputs": model["outputs"],
                }
            )

        return endpoint

    def _loaded(self, name: str) -> Mapping[str, Any]:
        """The description of a model; 503 before it is loaded."""
        if (model := self.dispatcher.models.get(name)) is None:
            raise HTTPException(503, f"{name} is not loaded yet; try again", ("retry-after", "1"))
        return model

    async def _metrics(self, request: Request) -> Response:
        return Response(200, CONTENT_TYPE, self.metrics.text())

    async def _openapi(self, request: Request) -> Response:
        return _json(openapi.document(self._descriptions()))

    async def _docs(self, request: Request) -> Response:
        page = openapi.html_page(openapi.document(self._descriptions()))
        return Response(200, "text/html; charset=utf-8", page, static_files.HEADERS)


def _job(request: Request, verb: str, body: bytes, received: int) -> Job:
    header = request.header("content-type") or ""
    pairs = parse_qsl(request.query, keep_blank_values=True) if request.query else []
    options = dict(pairs)
    if len(options) < len(pairs):
        raise HTTPException(400, "an option is given twice; expected each once")
    json_length = -1
    if (length := request.header(JSON_LENGTH)) is not None:
        size = _parse_digits(length)
        if size is None:
            message = f"found Inference-Header-Content-Length {length[:40]!r}, expected a whole number"
            raise HTTPException(400, message)
        json_length = size
    content_type = header.partition(";")[0].strip().lower()
    if content_type.startswith("multipart/"):
        content_type = header  # with the boundary
    return Job(0, verb, content_type, request.header("accept") or "", options, json_length, body, received)


def _require_host(request: Request) -> None:
    """Checks that there is one Host, which HTTP/1.0 may omit (RFC 9112, 3.2)."""
    hosts = request.values("host")
    if len(hosts) != 1 and (hosts or request.version == "1.1"):
        raise HTTPException(400, f"found {len(hosts) or 'no'} Host header{'s' * (len(hosts) > 1)}, expected one")
    if hosts and not _HOST.fullmatch(hosts[0]):
        raise HTTPException(400, f"found the Host {hosts[0][:100]!r}, expected a name or address, and maybe a port")


def _parse_digits(text: str) -> int | None:
    """A number below 10^18, or None."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None


def _json(value: Any) -> Response:
    return Response(200, JSON, orjson.dumps(value))


def _computed(value: Callable[[], Any]) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        return _json(value())

    return endpoint


def _static(path: str) -> Endpoint:
    content_type, content = static_files.FILES[path]

    async def endpoint(request: Request) -> Response:
        return Response(200, content_type, content, static_files.HEADERS)

    return endpoint


def _last(response: Response) -> Response:
    """The response as the last one of its connection."""
    if any(name == "connection" for name, _ in response.headers):
        return response
    return response._replace(headers=[*response.headers, ("connection", "close")])
