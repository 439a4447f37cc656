"""Elements of an SVG picture as text. Units are pixels of the picture."""

from __future__ import annotations

from collections.abc import Iterable

from kvpage.drawing.style import css
from kvpage.drawing.text import escaped

_SCOPE = "kvpage"


def number(value: float) -> str:
    """Hundredths of a pixel, without zeros at the end."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


class Canvas:
    """Collects elements. `mark`: letters and digits that tell the ids of this picture from another's on one page."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._parts: list[str] = []

    def __repr__(self) -> str:
        return f"<Canvas {len(self._parts)} elements>"

    def rect(self, x: float, y: float, width: float, height: float, look: str, size_bytes: int | None = None) -> None:
        """`size_bytes`: what the width stands for, kept in the picture for those who measure it."""
        striped = f' fill="url(#hatch-{self._mark})"' if look == "pad" else ""
        data = "" if size_bytes is None else f' data-bytes="{size_bytes}"'
        place = f'x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"'
        self._parts.append(f'<rect class="{look}" {place}{striped}{data}/>')

    def text(self, x: float, y: float, text: str, font_px: float, look: str = "", anchor: str = "start") -> None:
        """`y` is the base line; `anchor` is start, middle or end."""
        if not text:
            return
        named = f' class="{look}"' if look else ""
        place = f'x="{number(x)}" y="{number(y)}" font-size="{number(font_px)}"'
        anchored = "" if anchor == "start" else f' text-anchor="{anchor}"'
        self._parts.append(f"<text{named} {place}{anchored}>{escaped(text)}</text>")

    def arrow(self, start: float, end: float, y: float) -> None:
        """From left to right, with a bar at its start and a tip at its end."""
        tip = min(7.0, (end - start) / 2)
        self._parts.append(
            f'<path class="line" d="M{number(start)} {number(y - 4)}v8m0-4H{number(end - tip)}"/>'
            f'<path class="tip" d="M{number(end)} {number(y)}l-{number(tip)}-4v8z"/>'
        )

    def bracket(self, start: float, end: float, y: float) -> None:
        """A line over what is below it."""
        self._parts.append(f'<path class="line" d="M{number(start)} {number(y + 5)}v-5H{number(end)}v5"/>')

    def ticks(self, places: Iterable[float], y: float) -> None:
        """Short lines down from `y`."""
        lines = "".join(f"M{number(x)} {number(y)}v6" for x in places)
        self._parts.append(f'<path class="line" d="{lines}"/>')

    def begin_group(self, **data: str) -> None:
        attributes = "".join(f' data-{name}="{escaped(value)}"' for name, value in data.items())
        self._parts.append(f"<g{attributes}>")

    def end_group(self) -> None:
        self._parts.append("</g>")

    def document(self, width: float, height: float, title: str, description: Iterable[str]) -> str:
        """The whole picture. `title` and `description` are what a screen reader says."""
        mark, size = self._mark, (number(width), number(height))
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="{_SCOPE}" width="{size[0]}" height="{size[1]}"',
            f'  viewBox="0 0 {size[0]} {size[1]}" role="img" aria-labelledby="title-{mark} desc-{mark}">',
            f'<title id="title-{mark}">{escaped(title)}</title>',
            f'<desc id="desc-{mark}">{escaped(" ".join(description))}</desc>',
            f"<style>{css(_SCOPE)}</style>",
            f'<defs><pattern id="hatch-{mark}" width="7" height="7" patternUnits="userSpaceOnUse"',
            '  patternTransform="rotate(45)"><path class="stripe" d="M0 0V7"/></pattern></defs>',
            f'<rect class="paper" width="{size[0]}" height="{size[1]}"/>',
        )
        return "\n".join((*head, *self._parts, "</svg>", ""))
