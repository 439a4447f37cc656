"""What a browser is told about every file of the web page: load nothing from elsewhere, be framed by nobody.

The page may hold a token while it is open, so nothing that is not ours may run in it.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

# No inline script or style, no form that goes anywhere. Pictures of plans may be blobs, which the page makes itself.
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'self'",
        "img-src 'self' blob: data:",
        "object-src 'none'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",  # no text becomes markup, even by mistake
        "trusted-types 'none'",
    )
)
STATIC_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",  # for browsers that do not know frame-ancestors
}


class StaticHeaders:
    """Wraps the application that serves the files: `app.mount("/ui", StaticHeaders(StaticFiles(...)))`."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self._headers = [(name.lower().encode(), value.encode()) for name, value in STATIC_HEADERS.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *self._headers]
            await send(message)

        await self.app(scope, receive, send_with_headers)
