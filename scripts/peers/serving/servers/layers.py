"""One native session behind each HTTP layer: `python layers.py PORT LAYER`.

A request is one JSON body of the Open Inference Protocol and is answered on the server's own thread, as soon as it is
read: only the HTTP differs between the layers. `serving.py` starts them, each in an environment that has it.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from typing import Any

from served_model import ROUTE, answer, native


def starlette() -> Any:
    """Starlette, for any ASGI server."""
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    async def infer(request: Request) -> Response:
        return Response(answer(await request.body()), media_type="application/json")

    return Starlette(routes=[Route(ROUTE, infer, methods=["POST"])])


async def asgi(scope: dict[str, Any], receive: Callable[..., Awaitable[Any]], send: Callable[..., Any]) -> None:
    """Returns the minimum of ASGI: the cost of a server itself."""
    if scope["type"] != "http":
        return
    body = b""
    more = True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    reply = answer(body)
    length = str(len(reply)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", length)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": reply})


async def rsgi(scope: Any, protocol: Any) -> None:
    """Granian's own interface."""
    protocol.response_bytes(200, [("content-type", "application/json")], answer(await protocol()))


def uvicorn(port: int, app: Any) -> None:
    """Uvicorn on uvloop and httptools."""
    import uvicorn as server

    native()
    server.run(app, port=port, loop="uvloop", http="httptools", access_log=False, log_level="warning")


def granian(port: int, target: str, interface: str) -> None:
    """Granian, one worker with one thread for the network."""
    from granian import Granian
    from granian.constants import Interfaces, Loops

    Granian(
        f"layers:{target}",
        factory=target == "starlette",
        port=port,
        interface=Interfaces(interface),
        loop=Loops.uvloop,
        log_enabled=False,
    ).serve()


def robyn(port: int) -> None:
    """Robyn: routes in Rust."""
    from robyn import Response, Robyn

    app = Robyn(__file__)
    native()

    @app.post(ROUTE)
    async def infer(request: Any) -> Any:
        body = request.body
        body = body.encode() if isinstance(body, str) else bytes(body)
        return Response(200, {"content-type": "application/json"}, answer(body))

    app.start(host="127.0.0.1", port=port)


def socketify(port: int) -> None:
    """Socketify: uWebSockets by cffi."""
    from socketify import App

    app = App()
    native()

    async def infer(response: Any, request: Any) -> None:
        data = await response.get_data()
        response.write_header("content-type", "application/json").end(answer(data.getvalue()))

    app.post(ROUTE, infer)
    app.listen(port, lambda _: None)
    app.run()


LAYERS: dict[str, Callable[[int], None]] = {
    "uvicorn+starlette": lambda port: uvicorn(port, starlette()),
    "uvicorn": lambda port: uvicorn(port, asgi),
    "granian+starlette": lambda port: granian(port, "starlette", "asgi"),
    "granian-asgi": lambda port: granian(port, "asgi", "asgi"),
    "granian-rsgi": lambda port: granian(port, "rsgi", "rsgi"),
    "robyn": robyn,
    "socketify": socketify,
}

if __name__ == "__main__":
    LAYERS[sys.argv[2]](int(sys.argv[1]))
