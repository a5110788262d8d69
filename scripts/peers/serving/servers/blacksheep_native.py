"""BlackSheep under uvicorn before the native session."""

import sys

from blacksheep import Application, Content, Request, Response
from layers import uvicorn
from served_model import ROUTE, answer

app = Application()


@app.router.post(ROUTE)
async def infer(request: Request) -> Response:
    return Response(200, content=Content(b"application/json", answer(await request.read() or b"")))


if __name__ == "__main__":
    uvicorn(int(sys.argv[1]), app)
