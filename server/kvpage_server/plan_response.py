"""One representation of a plan as an HTTP answer."""

from __future__ import annotations

from functools import lru_cache

from starlette.responses import Response

from kvpage_server.plan_cache import Representation
from kvpage_server.planning import Answer

# A plan never changes, so whoever has it need not ask again. It may be forgotten here all the same.
_FOREVER = (b"cache-control", b"max-age=31536000, immutable")
# Its picture is drawn better by another version. It is shown alone in a browser: nothing in it may run or be loaded.
_PICTURE = (
    (b"cache-control", b"max-age=3600"),
    (b"content-security-policy", b"default-src 'none'; style-src 'unsafe-inline'"),
    (b"x-content-type-options", b"nosniff"),
)


class PlanResponse(Response):
    """To a GET with status 200 or 304, to a POST with 200 or 201. Does not make its headers as its parent would: that
    is most of the work of answering from the cache.
    """

    def __init__(self, answer: Answer, status: int, *, is_location_new: bool = False) -> None:
        """`is_location_new`: the caller did not ask for the plan by its id, so it is told."""
        self.status_code = status
        self.background = None
        self.body = b"" if status == 304 else answer.body
        size_bytes = None if status == 304 else len(answer.body)
        self.raw_headers = list(_headers(answer.representation, size_bytes, is_location_new))


@lru_cache(maxsize=1024)
def _headers(
    representation: Representation, size_bytes: int | None, is_location_new: bool
) -> tuple[tuple[bytes, bytes], ...]:
    """`size_bytes`: None for an answer without a body."""
    headers = [(b"etag", representation.etag.encode()), (b"vary", b"Accept-Encoding")]
    is_picture = representation.form == "picture"
    if is_picture:
        headers += _PICTURE
    else:
        headers.append((b"location", f"/v1/plans/{representation.plan_id}".encode()) if is_location_new else _FOREVER)
    if size_bytes is not None:
        content_type = b"image/svg+xml" if is_picture else b"application/json"
        headers += [(b"content-type", content_type), (b"content-length", b"%d" % size_bytes)]
        if representation.encoding == "gzip":
            headers.append((b"content-encoding", b"gzip"))
    return tuple(headers)
