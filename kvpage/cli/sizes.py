"""Sizes as people write and read them. 1 GiB is 2^30 bytes, 1 GB is 10^9."""

from __future__ import annotations

import re

from kvpage.errors import SpecInvalid, shorten

_UNITS: dict[str, int] = {"": 1, "B": 1, **{f"{p}iB": 2 ** (10 * i) for i, p in enumerate("KMGT", 1)}}
_UNITS |= {f"{p}B": 10 ** (3 * i) for i, p in enumerate("kMGT", 1)}
_SIZE = re.compile(r"\s*(\d{1,18})(?:\.(\d{1,9}))?\s*([A-Za-z]*)\s*")


def parse_bytes(text: str) -> int:
    """`"8GiB"` → 8589934592. Raises `SpecInvalid` naming the units."""
    match = _SIZE.fullmatch(text)
    if match is None or match[3] not in _UNITS:
        raise SpecInvalid(f"size {shorten(text)!r} is not a number with one of the units {', '.join(_UNITS)[2:]}")
    whole, fraction, unit = match[1], match[2] or "", match[3]
    denominator: int = 10 ** len(fraction)
    return int(whole + fraction) * _UNITS[unit] // denominator


def format_bytes(size_bytes: int) -> str:
    """`98304` → `"96 KiB"`; exact bytes where there is no short form."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size_bytes >= 1 << power:
            return f"{size_bytes / (1 << power):.4g} {unit}"
    return f"{size_bytes} B"
