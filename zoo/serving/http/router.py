"""The front: requests to routes, bodies to workers, answers to clients. It knows no HTTP server: see `server` and
`asgi` for what speaks to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import parse_qsl, unquote

import orjson

from zoo.serving.config import Settings, digest
from zoo.serving.handlers.base import INFER, RUN
from zoo.serving.http import static_files
from zoo.serving.http.access_log import AccessLog
from zoo.serving.http.http_types import Gone, Refused, Request, Response, TooLarge
from zoo.serving.http.request_context import Wanted
from zoo.serving.metrics import CONTENT_TYPE, STAGES, Metrics
from zoo.serving.protocol import openapi
from zoo.serving.protocol.content_encoding import ENCODINGS, TAKEN, expanded
from zoo.serving.protocol.responses import JSON, fault
from zoo.serving.workers.channel import Job
from zoo.serving.workers.dispatcher import Dispatcher, Full

EXTENSIONS = ["binary_tensor_data"]
LONGEST = 86_400_000  # milliseconds of a deadline
SHORT = 100_000  # bytes of a body that is read though its request was refused
ROOM = 16  # bodies of the greatest size that may be held at once
SENT = "authorization, content-type, x-api-key, timeout-ms, timing"  # headers that pages may send
HEADER_LENGTH = "inference-header-content-length"


logger = logging.getLogger(__name__)
Handler = Callable[[Request], Awaitable[Response]]


class Front:
    """Answers requests for the models of a dispatcher."""

    def __init__(self, settings: Settings, models: list[str], dispatcher: Dispatcher) -> None:
        self.settings, self.names, self.dispatcher = settings, models, dispatcher
        self.metrics = Metrics(lambda: dispatcher.models, dispatcher.state)
        self.log = AccessLog()
        self.closing = False
        self._held = 0  # bytes of the bodies on their way
        self._free = {"/v2/health/live", "/v2/health/ready", "/openapi.json", "/docs", *static_files.FILES}
        self._routes: dict[str, dict[str, Handler]] = {
            "/v2/health/live": {"GET": self._live},
            "/v2/health/ready": {"GET": self._ready},
            "/v2": {"GET": self._server},
            "/v2/repository/index": {"POST": self._index},
            "/v1/models": {"GET": self._models},
            "/metrics": {"GET": self._metrics},
            "/openapi.json": {"GET": self._openapi},
            "/docs": {"GET": self._docs},
            **{path: {"GET": _static(path)} for path in static_files.FILES},
        }
        for name in models:
            self._routes |= self._of_model(name, f"/v2/models/{name}")
            self._routes[f"/v1/models/{name}:run"] = {"POST": self._computed(name, RUN)}
            self._routes[f"/v1/models/{name}"] = {"GET": self._model(name)}

    def _of_model(self, name: str, base: str) -> dict[str, dict[str, Handler]]:
        return {
            base: {"GET": self._metadata(name)},
            f"{base}/ready": {"GET": self._model_ready(name)},
            f"{base}/infer": {"POST": self._computed(name, INFER)},
        }

    # --------------------------------------------------------------------------------------------------------- requests

    async def answer(self, request: Request) -> Response:
        """The answer to a request; it never raises for what a client sends."""
        begin = time.perf_counter()
        try:
            response = await self._routed(request)
        except Refused as error:
            response = await self._unread(request, error.response)
            self.metrics.refused[response.status] += 1
        except Exception:
            logger.exception("a request for %s failed", request.path)
            response = Response(500, JSON, fault("the server failed"))
            self.metrics.refused[500] += 1
        if self.settings.origins:
            response = self._shared(request, response)
        if not self.settings.access_log:
            return response
        if response.pieces is not None:
            return response._replace(pieces=self._logged(request, response, begin))
        self._log(request, response.status, len(response.body), begin)
        return response

    async def _unread(self, request: Request, response: Response) -> Response:
        """What is answered to a request that was refused: a short body that is still to come is read first, for a
        client in the midst of it would not see the answer; with a longer one the connection ends.
        """
        length = request.header("content-length") or "0"
        if not request.unread or length == "0":
            return response
        if length.isascii() and length.isdigit() and len(length) < len(str(SHORT)):
            with contextlib.suppress(TooLarge, Gone, TimeoutError):
                async with asyncio.timeout(self.settings.read_timeout):
                    await request.read(SHORT)
                    return response
        if any(name == "connection" for name, _ in response.headers):
            return response
        return response._replace(headers=[*response.headers, ("connection", "close")])

    async def _routed(self, request: Request) -> Response:
        methods = self._routes.get(request.path) or self._found(request.path)
        if self.settings.origins and request.method == "OPTIONS" and methods:
            return Response(204, JSON, b"")
        if self.settings.api_keys and request.path not in self._free:
            self._require_key(request)
        if methods is None:
            raise Refused(404, self._unknown(request.path))
        handler = methods.get(request.method)
        if handler is None and request.method == "HEAD" and "GET" in methods:
            return (await methods["GET"](request))._replace(body=b"", pieces=None)
        if handler is None:
            wanted = ", ".join(methods)
            raise Refused(405, f"found {request.method[:20]}, wanted {wanted}", ("allow", wanted))
        return await handler(request)

    def _found(self, path: str) -> dict[str, Handler] | None:
        """The route of a path with escapes or a model's version."""
        path = unquote(path).rstrip("/") or "/"
        head, versions, tail = path.partition("/versions/")
        if versions and head.startswith("/v2/models/"):
            version, _, verb = tail.partition("/")
            about = self.dispatcher.models.get(head.removeprefix("/v2/models/"))
            if about is None or about["version"] != version:
                return None
            path = f"{head}/{verb}" if verb else head
        return self._routes.get(path)

    def _unknown(self, path: str) -> str:
        if path.startswith(("/v1/models/", "/v2/models/")):
            return f"there is nothing at {path[:200]}; the models are {', '.join(self.names)}"
        return f"there is nothing at {path[:200]}; see /docs"

    def _require_key(self, request: Request) -> None:
        given = request.header("authorization") or ""
        key = given[7:].strip() if given[:7].lower() == "bearer " else request.header("x-api-key") or ""
        found = digest(key)
        if not sum(hmac.compare_digest(found, each) for each in self.settings.api_keys):
            raise Refused(401, "wanted a key: Authorization: Bearer KEY", ("www-authenticate", "Bearer"))

    def _shared(self, request: Request, response: Response) -> Response:
        """The response with what lets pages of the named origins read it."""
        origin = request.header("origin")
        if origin is None or not {origin, "*"} & self.settings.origins:
            return response
        headers = [
            ("access-control-allow-origin", origin),
            ("access-control-allow-methods", "GET, POST"),
            ("access-control-allow-headers", f"{SENT}, {HEADER_LENGTH}"),
            ("access-control-expose-headers", f"server-timing, {HEADER_LENGTH}"),
            ("vary", "origin"),
        ]
        return response._replace(headers=[*response.headers, *headers])

    async def _logged(self, request: Request, response: Response, begin: float) -> AsyncGenerator[bytes, None]:
        """The pieces of a response, which is logged at their end."""
        assert response.pieces is not None
        size = 0
        try:
            async with contextlib.aclosing(response.pieces) as pieces:
                async for piece in pieces:
                    size += len(piece)
                    yield piece
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
        self.log.add(line)

    # ----------------------------------------------------------------------------------------------------------- models

    def _computed(self, model: str, verb: str) -> Handler:
        """What answers a request that a worker computes."""
        series = self.metrics.series(model, verb)
        submit, loop_time = self.dispatcher.submit, time.perf_counter

        async def handler(request: Request) -> Response:
            begin = loop_time()
            held, wanted = 0, None
            try:
                held = self._hold(request)
                wanted = Wanted(self.dispatcher, request, self._deadline(request), self.settings.read_timeout)
                body = await self._body(wanted)
                if (encoding := request.header("content-encoding")) is not None:
                    body = await self._expanded(body, encoding.strip().lower())
                    held += self._reserve(len(body))
                read = loop_time() - begin
                job = _job(request, verb, body)
                try:
                    pending = submit(model, job, wanted.answered)
                except Full:
                    found = f"{self.dispatcher.most} requests wait already; try again"
                    raise Refused(429, found, ("retry-after", "1")) from None
                answer = await wanted.first(pending)
            except Refused as error:
                series.add(error.response.status, loop_time() - begin, (), 0, 0)
                return await self._unread(request, error.response)
            finally:
                self._held -= held
                if wanted is not None:
                    wanted.close()
            wait = max(loop_time() - begin - read - sum(answer.split), 0.0)
            split = (read, wait, *answer.split)
            headers = [(HEADER_LENGTH, str(answer.header))] if answer.header >= 0 else []
            if request.header("timing") is not None:
                stages = (f"{name};dur={1e3 * stage:.3f}" for name, stage in zip(STAGES, split, strict=True))
                headers.append(("server-timing", ", ".join(stages)))
            if answer.status == 503:
                headers.append(("retry-after", "1"))
            series.add(answer.status, loop_time() - begin, split, answer.samples, answer.together)
            pieces = None if answer.last else wanted.pieces(answer)
            return Response(answer.status, answer.kind, answer.body, headers, pieces)

        return handler

    def _hold(self, request: Request) -> int:
        """Bytes that a request says it has, which are counted as held. Raises Refused for too many."""
        length = request.header("content-length")
        if length is None:  # where a body in chunks ends early, the HTTP server does not say so
            raise Refused(411, "wanted the Content-Length of the body", ("connection", "close"))
        size = int(length) if length.isascii() and length.isdigit() and len(length) < 19 else -1
        if size < 0:
            raise Refused(400, f"found Content-Length {length[:40]!r}, wanted a whole number")
        if size > self.settings.max_body:
            raise self._too_large(size)
        return self._reserve(size)

    def _reserve(self, size: int) -> int:
        if self._held + size > ROOM * self.settings.max_body:
            raise Refused(429, "too many bytes of other requests are held; try again", ("retry-after", "1"))
        self._held += size
        return size

    def _too_large(self, size: int | None = None) -> Refused:
        found = "more" if size is None else f"{size:,}"
        return Refused(413, f"found {found} bytes, wanted at most {self.settings.max_body:,}", ("connection", "close"))

    async def _body(self, wanted: Wanted) -> bytes:
        try:
            return await wanted.body(self.settings.max_body)
        except TooLarge:
            raise self._too_large() from None
        except Gone:
            raise Refused(400, "the body ended before its Content-Length") from None

    async def _expanded(self, body: bytes, encoding: str) -> bytes:
        """A body as it was before its Content-Encoding."""
        if encoding == "identity":
            return body
        if encoding not in TAKEN:
            found = f"found Content-Encoding {encoding[:40]!r}, wanted one of {', '.join(ENCODINGS)}"
            raise Refused(415, found, ("accept-encoding", ", ".join(ENCODINGS)))
        try:
            content = await asyncio.to_thread(expanded, body, self.settings.max_body)
        except ValueError as error:
            raise Refused(400, f"the body cannot be read as {encoding}: {error}") from None
        if len(content) > self.settings.max_body:
            raise self._too_large()
        return content

    def _deadline(self, request: Request) -> float:
        """Seconds that a request may take."""
        given = request.header("timeout-ms")
        if given is None:
            return self.settings.deadline
        if not (given.isascii() and given.isdigit() and len(given) < 19 and 1 <= int(given) <= LONGEST):
            raise Refused(400, f"found timeout-ms {given[:40]!r}, wanted whole milliseconds, 1 to {LONGEST:,}")
        return int(given) / 1e3

    # ----------------------------------------------------------------------------------------------------- what is told

    async def _live(self, request: Request) -> Response:
        return _json({"live": True})

    async def _ready(self, request: Request) -> Response:
        self._require_ready()
        return _json({"ready": True})

    def _model_ready(self, name: str) -> Handler:
        async def handler(request: Request) -> Response:
            self._require_ready()
            return _json({"name": name, "ready": True})

        return handler

    def _require_ready(self) -> None:
        if self.closing or not self.dispatcher.ready:
            found = "the server ends" if self.closing else "the models are not open yet"
            raise Refused(503, found, ("retry-after", "1"))

    async def _server(self, request: Request) -> Response:
        return _json({"name": "int8-zoo", "version": openapi.VERSION, "extensions": EXTENSIONS})

    async def _index(self, request: Request) -> Response:
        state = "READY" if self.dispatcher.ready else "UNAVAILABLE"
        return _json(
            [
                {"name": name, "version": self._about(name).get("version", ""), "state": state, "reason": ""}
                for name in self.names
            ]
        )

    def _about(self, name: str) -> Mapping[str, Any]:
        return self.dispatcher.models.get(name, {})

    async def _models(self, request: Request) -> Response:
        return _json({"models": [self._about(name) or {"name": name} for name in self.names]})

    def _model(self, name: str) -> Handler:
        async def handler(request: Request) -> Response:
            return _json(self._opened(name))

        return handler

    def _metadata(self, name: str) -> Handler:
        async def handler(request: Request) -> Response:
            about = self._opened(name)
            return _json(
                {
                    "name": name,
                    "versions": [about["version"]],
                    "platform": f"int8-zoo_{about['engine']}",
                    "inputs": about["inputs"],
                    "outputs": about["outputs"],
                }
            )

        return handler

    def _opened(self, name: str) -> Mapping[str, Any]:
        if not (about := self._about(name)):
            raise Refused(503, f"{name} is not open yet; try again", ("retry-after", "1"))
        return about

    async def _metrics(self, request: Request) -> Response:
        return Response(200, CONTENT_TYPE, self.metrics.text())

    async def _openapi(self, request: Request) -> Response:
        return _json(openapi.described([self._about(name) or {"name": name} for name in self.names]))

    async def _docs(self, request: Request) -> Response:
        about = [self._about(name) or {"name": name} for name in self.names]
        return Response(200, "text/html; charset=utf-8", openapi.page(openapi.described(about)), static_files.HEADERS)


def _job(request: Request, verb: str, body: bytes) -> Job:
    content = request.header("content-type") or ""
    options = dict(parse_qsl(request.query, keep_blank_values=True)) if request.query else {}
    header = request.header(HEADER_LENGTH)
    length = -1
    if header is not None:
        if not (header.isascii() and header.isdigit() and len(header) < 19):
            raise Refused(400, f"found Inference-Header-Content-Length {header[:40]!r}, wanted a whole number")
        length = int(header)
    kind = content.partition(";")[0].strip().lower()
    if kind.startswith("multipart/"):
        kind = content  # with the boundary, as it is
    return Job(0, verb, kind, request.header("accept") or "", options, length, body)


def _json(value: Any) -> Response:
    return Response(200, JSON, orjson.dumps(value))


def _static(path: str) -> Handler:
    kind, content = static_files.FILES[path]

    async def handler(request: Request) -> Response:
        return Response(200, kind, content, static_files.HEADERS)

    return handler
