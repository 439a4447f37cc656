"""What a browser is told about every file of the web page: load nothing from elsewhere, be framed by nobody.

The page may hold a token while it is open, so nothing that is not ours may run in it.
"""

from __future__ import annotations

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
