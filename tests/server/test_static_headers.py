"""What a browser is told about the files of the web page."""

from __future__ import annotations

from kvpage_server.static_headers import CONTENT_SECURITY_POLICY


def test_nothing_is_loaded_from_elsewhere_and_nothing_inline_runs() -> None:
    assert "unsafe" not in CONTENT_SECURITY_POLICY
    assert "http" not in CONTENT_SECURITY_POLICY
    assert "*" not in CONTENT_SECURITY_POLICY
    assert "frame-ancestors 'none'" in CONTENT_SECURITY_POLICY
