"""Sizes as people write them."""

from __future__ import annotations

import pytest

from kvpage.cli.sizes import format_bytes, parse_bytes
from kvpage.errors import SpecInvalid


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("0", 0), ("5", 5), ("7B", 7), ("1KiB", 1024), ("1.5 GiB", 3 << 29), ("2MB", 2_000_000), (" 1TiB ", 1 << 40)],
)
def test_sizes_are_read(text: str, size_bytes: int) -> None:
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1 gib", "1e9", "1.2.3", "9" * 30])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(SpecInvalid, match="GiB"):
        parse_bytes(text)


@pytest.mark.parametrize(("size_bytes", "text"), [(0, "0 B"), (98304, "96 KiB"), (3 << 29, "1.5 GiB")])
def test_sizes_are_written(size_bytes: int, text: str) -> None:
    assert format_bytes(size_bytes) == text
