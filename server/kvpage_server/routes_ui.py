"""`/ui`: the web page, a few files of this package. They are the same for everybody, so no token is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from fastapi import FastAPI, Request
from starlette.responses import RedirectResponse, Response

from kvpage.errors import NotFound, shorten
from kvpage_server.static_headers import STATIC_HEADERS

FOLDER = Path(__file__).with_name("ui")
PAGE = "index.html"
CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
}
"""Written out: what a machine says of endings differs, and a browser runs no script of another type."""


@dataclass(frozen=True, slots=True)
class File:
    content: bytes
    content_type: str
    etag: str


def files() -> dict[str, File]:
    """By name."""
    return {path.name: _read(path) for path in FOLDER.iterdir() if path.suffix in CONTENT_TYPES}


def add_routes(app: FastAPI) -> None:
    found = files()  # together some 100 kB, read once: an upgrade under a running server mixes no versions

    async def get_page(request: Request) -> Response:
        return _answer(request, found[PAGE])

    async def get_file(request: Request, name: str) -> Response:
        if name not in found:
            raise NotFound(f"the page has no file {shorten(repr(name))}; open /ui")
        return _answer(request, found[name])

    async def get_root(request: Request) -> Response:
        return RedirectResponse("ui", headers=STATIC_HEADERS)

    async def get_slash(request: Request) -> Response:
        return RedirectResponse("../ui", headers=STATIC_HEADERS)  # relative: a proxy may have put a path before it

    for path, endpoint in (("/", get_root), ("/ui", get_page), ("/ui/", get_slash), ("/ui/{name}", get_file)):
        app.add_api_route(path, endpoint, methods=["GET", "HEAD"], include_in_schema=False, response_model=None)


def _read(path: Path) -> File:
    content = path.read_bytes()
    return File(content, CONTENT_TYPES[path.suffix], f'"{sha256(content).hexdigest()[:32]}"')


def _answer(request: Request, file: File) -> Response:
    headers = {**STATIC_HEADERS, "ETag": file.etag, "Cache-Control": "no-cache"}  # ask each time, and be told 304
    known = {tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")}
    if known & {file.etag, "*"}:
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers, media_type=file.content_type)
