"""The panel that shows, group by group, what lies in the memory of one slab."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from kvpage.drawing.canvas import Canvas
from kvpage.drawing.pieces import Piece, Row, gathered
from kvpage.drawing.sketch import BARS, BARS_WIDTH, MARGIN, Sketch, draw_pieces, fitting, kind_of, names_of
from kvpage.drawing.text import clipped, first_that_fits

ROW, BAR = 70, 46
_GAP = 10  # between regions
_FEW_CELLS = 12  # that are drawn one by one, however thin
_MIN_CELL, _MIN_BLOCK, _MIN_PAGE = 24, 14, 6  # pixels, below which like things are drawn as one
_MAX_PIECES = 140  # of one row, so that a picture stays small
_FEW = 3  # pieces that a block can always be gathered into
_ROOM = BARS - MARGIN - 14


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A cell, or all cells as one (`cell` is None)."""

    cell: int | None
    x: float
    size_bytes: int


@dataclass(frozen=True, slots=True)
class _Room:
    """For one cell of one row."""

    y: float
    px_per_byte: float
    max_pieces: int


class _Scale:
    """Bytes to pixels, the same in all rows of the panel."""

    def __init__(self, sketch: Sketch) -> None:
        sizes = [cell.size_bytes for cell in sketch.cells]
        gaps = _GAP * (len(sizes) - 1)
        self.px_per_byte = (BARS_WIDTH - gaps) / sum(sizes)
        self.cells: list[_Drawn] = []
        x = float(BARS)
        for cell, size in enumerate(sizes):
            self.cells.append(_Drawn(cell, x, size))
            x += size * self.px_per_byte + _GAP
        if len(sizes) > _FEW_CELLS and min(sizes) * self.px_per_byte < _MIN_CELL:
            self.px_per_byte = BARS_WIDTH / sum(sizes)
            self.cells = [_Drawn(None, BARS, sum(sizes))]


def draw_slabs(canvas: Canvas, sketch: Sketch, top: float) -> float:
    """Draws the panel from `top` down; gives where it ends."""
    scale = _Scale(sketch)
    canvas.text(MARGIN, top + 20, _heading(sketch), 16, "bold")
    for drawn in scale.cells:
        width = drawn.size_bytes * scale.px_per_byte
        canvas.bracket(drawn.x, drawn.x + width, top + 56)
        font_px, label = fitting(_cell_labels(sketch, drawn), width)
        canvas.text(drawn.x + width / 2, top + 49, label, font_px, "", "middle")
    y = top + 70
    for row in sketch.rows:
        _draw_labels(canvas, row, y)
        canvas.begin_group(panel="slab", groups=" ".join(map(str, row.groups)))
        for drawn in scale.cells:
            room = _Room(y, scale.px_per_byte, _MAX_PIECES // len(scale.cells))
            _draw_cell(canvas, sketch, row, drawn, room)
        canvas.end_group()
        y += ROW
    if sketch.num_hidden_groups:
        canvas.text(MARGIN, y + 10, f"and {sketch.num_hidden_groups:,} groups more, of other looks", 12, "soft")
        y += 24
    return y


def _heading(sketch: Sketch) -> str:
    regions, sizes = len(sketch.cells), {cell.size_bytes for cell in sketch.cells}
    where = "in one piece" if regions == 1 else f"a part in each of {regions:,} regions"
    if regions > 1 and len(sizes) == 1:
        where = f"{sizes.pop():,} bytes in each of {regions:,} regions"
    return f"The memory of one {sketch.unit}, {where}: what each group keeps there (to scale)"


def _cell_labels(sketch: Sketch, drawn: _Drawn) -> Iterator[str]:
    size = f"{drawn.size_bytes:,}"
    if drawn.cell is None:
        yield f"{size} bytes in {len(sketch.cells):,} regions, drawn as one"
    elif len(sketch.cells) > 1:
        yield f"region {drawn.cell}: {size} bytes"
    else:
        yield f"{sketch.unit} of {size} bytes"
    yield f"{size} bytes"
    yield size


def _draw_labels(canvas: Canvas, row: Row, y: float) -> None:
    canvas.text(MARGIN, y + 12, clipped(kind_of(row.group), 14, _ROOM), 14, "bold")
    for below, font_px, look, texts in ((29, 12, "soft", _sizes(row)), (44, 11, "soft mono name", names_of(row))):
        text = first_that_fits(texts, font_px, _ROOM) or clipped(texts[-1], font_px, _ROOM)
        canvas.text(MARGIN, y + below, text, font_px, look)


def _sizes(row: Row) -> tuple[str, ...]:
    """How many of what, the wordier first."""
    layers, groups, blocks = len(row.layers), len(row.groups), row.group.blocks_per_slab
    kept = "one state" if row.group.kind == "mamba" else f"{row.group.block_size:,} tokens"
    many = f"{layers:,} layers" if layers > 1 else "1 layer"
    long = (
        f"{groups:,} groups of {many}" if groups > 1 else many,
        f"{blocks:,} blocks of {kept}" if blocks > 1 else kept,
    )
    short = (f"{groups:,} × {many}" if groups > 1 else many, f"{blocks:,} × {kept}" if blocks > 1 else kept)
    return ", ".join(long), ", ".join(short)


def _draw_cell(canvas: Canvas, sketch: Sketch, row: Row, drawn: _Drawn, room: _Room) -> None:
    blocks = row.group.blocks_per_slab
    block = row.blocks[drawn.cell] if drawn.cell is not None else gathered(chain(*row.blocks))
    block_px = drawn.size_bytes / blocks * room.px_per_byte
    if blocks > 1 and (block_px < _MIN_BLOCK or blocks * min(len(block), _FEW) > room.max_pieces):
        block, blocks, block_px = gathered(block, blocks, max_pieces=room.max_pieces), 1, block_px * blocks
    if _is_thin(block, room.px_per_byte) or len(block) * blocks > room.max_pieces:
        block = gathered(block, max_pieces=room.max_pieces // blocks)
    for index in range(blocks):
        x = drawn.x + index * block_px
        draw_pieces(canvas, sketch, block, x, room.y, BAR, room.px_per_byte)
    canvas.rect(drawn.x, room.y, drawn.size_bytes * room.px_per_byte, BAR, "slab")
    if blocks > 1:
        canvas.ticks([drawn.x + index * block_px for index in range(blocks + 1)], room.y + BAR)


def _is_thin(block: tuple[Piece, ...], px_per_byte: float) -> bool:
    """Whether some layer has so little in the block that it could hardly be seen."""
    sizes: Counter[str] = Counter()
    for piece in block:
        if piece.what == "data":
            sizes[piece.layer] += piece.size_bytes
    return len(sizes) > 1 and min(sizes.values()) * px_per_byte < _MIN_PAGE
