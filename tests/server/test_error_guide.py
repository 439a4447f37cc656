"""Every error code is explained, once, in the same words everywhere."""

from __future__ import annotations

import re

import httpx
import pytest

from kvpage.errors import ERRORS_BY_CODE
from kvpage_server.error_guide import GUIDES, as_markdown, codes_in_order
from support.checkout import ROOT

DOCUMENT = ROOT / "docs" / "errors.md"


def sections(markdown: str) -> dict[str, str]:
    """The text under each second-level heading."""
    parts = re.split(r"^## (.+)$", markdown, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_every_code_has_a_section_with_its_status_meaning_and_remedy() -> None:
    found = sections(DOCUMENT.read_text())
    assert found.keys() == ERRORS_BY_CODE.keys()
    for code, text in found.items():
        kind = ERRORS_BY_CODE[code]
        assert f"HTTP {kind.http_status}," in text
        assert (", retryable" in text) == kind.retryable
        assert all(f"- {part}: " in text for part in ("What it means", "When", "What to do"))


def test_the_section_check_fires() -> None:
    assert sections("# Errors\n\n## a\n\none\n\n## b\n\ntwo\n") == {"a": "\n\none\n\n", "b": "\n\ntwo\n"}


def test_the_document_is_what_the_guide_prints() -> None:
    assert DOCUMENT.read_text() == as_markdown(), "run python -m kvpage_server.error_guide > docs/errors.md"


def test_the_order_is_by_status() -> None:
    statuses = [ERRORS_BY_CODE[code].http_status for code in codes_in_order()]
    assert statuses == sorted(statuses)
    assert len(statuses) == len(GUIDES)


@pytest.mark.anyio
async def test_a_server_shows_the_page_that_problem_types_point_at(api: httpx.AsyncClient) -> None:
    page = await api.get("/errors")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    for code in ERRORS_BY_CODE:
        assert f'<section id="{code}">' in page.text
