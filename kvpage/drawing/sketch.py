"""What a picture shows of a plan, and the sizes that its panels share."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from kvpage.drawing.canvas import Canvas
from kvpage.drawing.pieces import Cell, Piece, Row, cells_of, owners, rows_of
from kvpage.drawing.style import HUES
from kvpage.drawing.text import first_that_fits
from kvpage.errors import printable
from kvpage.plans import GroupPlan, Plan

WIDTH, MARGIN = 1200, 36
BARS = 300  # where bars begin; left of it are their labels
BARS_WIDTH = WIDTH - MARGIN - BARS
MAX_ROWS = 8
_LABEL_PX = (11, 9)  # no smaller: it could not be read
_INSET = 4
_NUMBER = re.compile(r"[0-9]+")
_LOOKS = {"padding": "pad", "unused": "free", "other": "other"}


@dataclass(frozen=True)
class Sketch:
    """A plan with the memory of one of its slabs."""

    plan: Plan

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        return cells_of(self.plan)

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        return rows_of(self.plan, self.cells, MAX_ROWS)

    @property
    def num_hidden_groups(self) -> int:
        shown = sum(len(row.groups) for row in self.rows)
        return sum(1 for index in range(len(self.plan.groups)) if owners(self.plan, index)) - shown

    @property
    def has_slabs(self) -> bool:
        """Whether a slab is more than one block."""
        return any(group.blocks_per_slab > 1 for group in self.plan.groups)

    @property
    def unit(self) -> str:
        return "slab" if self.has_slabs else "block"

    @cached_property
    def hues(self) -> dict[str, int]:
        """The colour of each layer in the rows: like caches have one."""
        found: dict[object, int] = {}
        return {
            layer.name: found.setdefault(_look(row.group, layer.kind, layer.real_page_size_bytes), len(found))
            for row in self.rows
            for layer in row.layers
        }

    def look(self, piece: Piece) -> str:
        """The class of the piece's rectangle."""
        if piece.what == "data":
            return f"h{self.hues[piece.layer] % len(HUES)}"
        return _LOOKS[piece.what]


def _look(group: GroupPlan, kind: str, real_page_size_bytes: int) -> object:
    return (kind, group.sliding_window, group.attention_chunk_size, real_page_size_bytes)


def kind_of(group: GroupPlan) -> str:
    """ "sliding window 1,024"."""
    size = group.sliding_window or group.attention_chunk_size
    return group.kind.replace("_", " ") + (f" {size:,}" if size else "")


def draw_pieces(
    canvas: Canvas, sketch: Sketch, pieces: Sequence[Piece], x: float, y: float, height: float, px_per_byte: float
) -> None:
    """The pieces side by side, each as wide as its bytes, labelled where there is room."""
    start = 0
    for piece in pieces:
        left, width = x + start * px_per_byte, piece.size_bytes * px_per_byte
        canvas.rect(left, y, width, height, sketch.look(piece), piece.size_bytes)
        _label(canvas, piece, left + width / 2, y + height / 2, width - 2 * _INSET)
        start += piece.size_bytes


def _label(canvas: Canvas, piece: Piece, x: float, y: float, room_px: float) -> None:
    """What it is and how many bytes it has, on two lines; only the bytes, or nothing, where it is narrow."""
    size = piece.each_bytes if piece.is_alike else piece.size_bytes
    font_px, sized = fitting((f"{size:,} bytes", f"{size:,}"), room_px)
    name_px, named = fitting(_names(piece), room_px) if sized else (font_px, "")
    canvas.text(x, y - 3, named, name_px, "mono name", "middle")
    canvas.text(x, y + (12 if named else 4), sized, font_px, "mono", "middle")


def fitting(texts: Iterable[str], room_px: float) -> tuple[float, str]:
    """The first of `texts` that has room in the larger of two sizes, or in the smaller; the size and the text."""
    choices = tuple(texts)
    for font_px in _LABEL_PX:
        found = first_that_fits(choices, font_px, room_px)
        if found:
            return font_px, found
    return _LABEL_PX[-1], ""


def _names(piece: Piece) -> Iterator[str]:
    if piece.what != "data" and piece.count == 1:
        yield piece.what
    elif piece.count > 1:
        yield f"{piece.count:,} {'×' if piece.is_alike else 'pages'}"
    else:
        yield printable(piece.layer)
        numbers = _NUMBER.findall(piece.layer)
        if len(numbers) == 1:
            yield f"layer {numbers[0]}"


def names_of(row: Row) -> tuple[str, ...]:
    """Ways to name the layers of a row, the longest first."""
    first, last = printable(row.layers[0].name), printable(row.layers[-1].name)
    if first == last:
        return (first,)
    patterns = {_NUMBER.sub("*", first), _NUMBER.sub("*", last)}
    return (f"{first} … {last}", *(patterns if len(patterns) == 1 else ()))
