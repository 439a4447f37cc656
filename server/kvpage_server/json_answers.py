"""Answers of JSON that nobody keeps."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from starlette.responses import Response


def json_answer(value: msgspec.Struct, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    all_headers = {"Cache-Control": "no-store", **(headers or {})}
    return Response(msgspec.json.encode(value), status, all_headers, "application/json")
