"""The panel that shows how one layer's pages follow each other: page, padding, and the stride from block to block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvpage.drawing.canvas import Canvas
from kvpage.drawing.pieces import Piece, Row, gathered
from kvpage.drawing.runs import block_runs
from kvpage.drawing.sketch import BARS, BARS_WIDTH, MARGIN, Sketch, draw_pieces
from kvpage.drawing.text import clipped
from kvpage.plans import LayerPlan

MAX_ROWS = 4
_ROW, _BAR, _MAX_PIECES = 102, 40, 24
_SHOWN_BLOCKS = 2


def draw_strides(canvas: Canvas, sketch: Sketch, top: float) -> float:
    """Draws the panel from `top` down; gives where it ends."""
    canvas.text(MARGIN, top + 20, "From block to block in one layer's tensor (each row has its own scale)", 16, "bold")
    y = top + 34
    for row in _unlike(sketch)[:MAX_ROWS]:
        _draw_row(canvas, sketch, row, y)
        y += _ROW
    return y


def _unlike(sketch: Sketch) -> list[Row]:
    """Rows whose first layers differ in what they keep or in their stride."""
    found: dict[object, Row] = {}
    for row in sketch.rows:
        layer = row.layers[0]
        found.setdefault((sketch.hues[layer.name], block_runs(layer.tensors[0]).stride_bytes), row)
    return list(found.values())


def _draw_row(canvas: Canvas, sketch: Sketch, row: Row, y: float) -> None:
    layer = row.layers[0]
    runs = block_runs(layer.tensors[0])
    block = one_layer(row)
    if len(block) > _MAX_PIECES:
        block = gathered(block)
    px_per_byte = BARS_WIDTH / (_SHOWN_BLOCKS * runs.stride_bytes)
    room = BARS - MARGIN - 14
    canvas.text(MARGIN, y + 42, clipped(layer.name, 13, room), 13, "bold mono name")
    canvas.text(MARGIN, y + 59, "block i and block i + 1", 12, "soft")
    canvas.begin_group(panel="stride", layer=str(list(sketch.plan.layers).index(layer.name)))
    for index in range(_SHOWN_BLOCKS):
        x = BARS + index * runs.stride_bytes * px_per_byte
        draw_pieces(canvas, sketch, block, x, y + 24, _BAR, px_per_byte)
    canvas.end_group()
    start = BARS + _first_data(block) * px_per_byte
    end = start + runs.stride_bytes * px_per_byte
    canvas.arrow(start, end, y + 16)
    canvas.text((start + end) / 2, y + 10, f"block stride {runs.stride_bytes:,} bytes", 12, "", "middle")
    canvas.text(BARS, y + 82, clipped("; ".join(_facts(sketch, row, layer)), 12, BARS_WIDTH), 12, "soft")


def _facts(sketch: Sketch, row: Row, layer: LayerPlan) -> Iterator[str]:
    padding = layer.page_size_bytes - layer.real_page_size_bytes
    sums = f" = {layer.real_page_size_bytes:,} of data + {padding:,} of padding" if padding else ""
    yield f"page {layer.page_size_bytes:,} bytes{sums}"
    planes = block_runs(layer.tensors[0]).num_planes
    if planes > 1:
        yield f"in {planes:,} places, of which one is shown: an axis of the tensor lies outside its blocks"
    if row.group.blocks_per_slab > 1:
        yield f"a slab of {sketch.plan.slab_bytes:,} has {row.group.blocks_per_slab:,} such blocks"


def one_layer(row: Row) -> tuple[Piece, ...]:
    """A block of the row's first layer, where that lies first: in one plane, where it has several."""
    name = row.layers[0].name
    runs = block_runs(row.layers[0].tensors[0])
    if runs.planes[0].count > 1:  # drawn as one in the panel above
        data = sum(run.size_bytes for run in runs.runs)
        return tuple(_of_one_layer((Piece("data", data, name), Piece("unused", runs.stride_bytes - data)), name))
    block = next(block for block in row.blocks if any(piece.layer == name for piece in block))
    return tuple(_of_one_layer(block, name))


def _of_one_layer(block: Sequence[Piece], layer: str) -> Iterator[Piece]:
    """The layer's pieces; what lies between belongs to others or to nobody, and is one piece each."""
    between = 0
    for piece in block:
        if piece.layer != layer:
            between += piece.size_bytes
            continue
        if between:
            yield Piece("other", between)
            between = 0
        yield piece
    if between:
        yield Piece("other", between)


def _first_data(block: Sequence[Piece]) -> int:
    """Bytes of the block before the layer's page."""
    return block[0].size_bytes if block[0].what == "other" else 0
