"""Text in pictures: how wide it may get in whatever font the reader has, and names that cannot break out."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable

from kvpage.errors import printable

_ESCAPES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;"})
_NARROW_EM, _WIDE_EM = 0.62, 1.1
"""Advance of a character: monospace fonts have 0.6 em and less, full-width characters 1 em."""


def escaped(text: str) -> str:
    """`text` as the content of an XML element or attribute."""
    return text.translate(_ESCAPES)


def width_px(text: str, font_px: float) -> float:
    """Rather too much than too little."""
    return font_px * sum(_WIDE_EM if _is_wide(char) else _NARROW_EM for char in text)


def _is_wide(char: str) -> bool:
    return char > "\u02ff" and (unicodedata.east_asian_width(char) in "WFA" or unicodedata.category(char) == "So")


def clipped(text: str, font_px: float, room_px: float) -> str:
    """`text` as printable characters, its end cut off where there is no room for it; "" when there is for nothing."""
    text = printable(text)
    if width_px(text, font_px) <= room_px:
        return text
    room_px -= width_px("…", font_px)
    kept = 0
    for char in text:
        room_px -= width_px(char, font_px)
        if room_px < 0:
            break
        kept += 1
    return text[:kept] + "…" if kept else ""


def first_that_fits(texts: Iterable[str], font_px: float, room_px: float) -> str:
    """The first of `texts` that has room; "" when none has."""
    return next((text for text in texts if width_px(text, font_px) <= room_px), "")
