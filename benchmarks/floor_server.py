"""The least a server can do: read the body and answer, with nothing or with as many bytes as a header asks for.

    python benchmarks/floor_server.py SOCKET bare|fastapi

`bare`: nothing but the HTTP server, with the settings of `kvpage serve`. `fastapi`: two endpoints of FastAPI that read
the body and answer with nothing, at the paths of plans. Writes a line to standard output when it listens.
"""

from __future__ import annotations

import socket
import sys

import uvicorn
from fastapi import FastAPI, Request, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from kvpage_server.serve import KEEP_ALIVE_S

SIZE_HEADER = "x-answer-bytes"
_BYTES = b"x" * (1 << 20)


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    while (await receive()).get("more_body"):
        pass
    size_bytes = dict(scope["headers"]).get(SIZE_HEADER.encode(), b"0")
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", size_bytes)]})
    await send({"type": "http.response.body", "body": _BYTES[: int(size_bytes)]})


def fastapi_app() -> FastAPI:
    app = FastAPI(openapi_url=None)

    @app.post("/v1/plans")
    async def post(request: Request) -> Response:
        await request.body()
        return Response()

    @app.get("/v1/plans/{plan_id}")
    async def get(plan_id: str) -> Response:
        return Response()

    return app


def main() -> None:
    app: ASGIApp = fastapi_app() if sys.argv[2] == "fastapi" else answer
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(sys.argv[1])
        listener.listen()
        config = uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            loop="uvloop",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        print("ready", flush=True)
        uvicorn.Server(config).run([listener])


if __name__ == "__main__":
    main()
