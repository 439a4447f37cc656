"""A plan as a picture: totals, the memory of one slab, and one layer's stride, each to scale."""

from __future__ import annotations

import re
from collections.abc import Iterator

from kvpage.drawing.canvas import Canvas
from kvpage.drawing.sketch import MARGIN, WIDTH, Sketch, kind_of
from kvpage.drawing.slab_panel import draw_slabs
from kvpage.drawing.stride_panel import draw_strides, one_layer
from kvpage.drawing.style import HUES
from kvpage.drawing.text import clipped, width_px
from kvpage.errors import printable
from kvpage.plans import Plan

_ROOM = WIDTH - 2 * MARGIN
_CHIP = 14


def layout_svg(plan: Plan) -> str:
    """`plan` as an SVG document of less than 200 KB. It has a light and a dark look, no script, and loads nothing.

    Widths are bytes; like pages that would be too thin are drawn as one, with their number.
    """
    sketch = Sketch(plan)
    canvas = Canvas(re.sub(r"[^0-9a-z]", "", plan.plan_id[-8:].lower()) or "0")
    y = _draw_header(canvas, sketch)
    if sketch.rows:
        y = draw_slabs(canvas, sketch, y + 18)
        y = draw_strides(canvas, sketch, y + 10)
        y = _draw_keys(canvas, y + 8, _keys(sketch))
    else:
        canvas.text(MARGIN, y + 30, "No layer keeps a cache.", 16)
        y += 40
    title = f"Page layout by strategy {printable(plan.strategy[:64])}"
    return canvas.document(WIDTH, y + 16, title, _description(sketch))


def _draw_header(canvas: Canvas, sketch: Sketch) -> float:
    plan = sketch.plan
    canvas.text(MARGIN, 48, clipped(f"Page layout: {plan.strategy}", 26, 700), 26, "bold")
    canvas.text(WIDTH - MARGIN, 48, clipped(plan.plan_id, 11, 400), 11, "soft mono", "end")
    canvas.text(MARGIN, 76, clipped(_totals(sketch), 14, _ROOM), 14)
    canvas.text(MARGIN, 97, clipped(_request(plan), 14, _ROOM), 14)
    waste = plan.waste
    if not waste.total_bytes:
        return 105
    parts = (
        ("live", waste.live_bytes, "live"),
        ("padding", waste.padding_bytes, "pad"),
        ("group rounding", waste.group_rounding_bytes, "free"),
        ("tail", waste.tail_bytes, "tail"),
    )
    x = float(MARGIN)
    canvas.begin_group(panel="waste")
    for _, size, look in parts:
        width = _ROOM * size / waste.total_bytes
        canvas.rect(x, 110, width, _CHIP, look, size)
        x += width
    canvas.end_group()
    keys = [(look, f"{name} {size / waste.total_bytes:.1%}") for name, size, look in parts if size]
    return _draw_keys(canvas, 130, keys)


def _totals(sketch: Sketch) -> str:
    plan = sketch.plan
    layers, groups = len(plan.layers), len(plan.groups)
    return (
        f"{plan.num_blocks:,} {sketch.unit}s of {plan.slab_bytes:,} bytes, buffer {plan.buffer_size_bytes:,} bytes; "
        f"{layers:,} layer{'s' * (layers != 1)} in {groups:,} group{'s' * (groups != 1)}"
    )


def _request(plan: Plan) -> str:
    capacity = plan.capacity
    if capacity.request_bytes is None:
        return "Of the bytes of one block of every group:"
    fits = "" if capacity.max_concurrency is None else f" {capacity.max_concurrency:,.2f} fit at once."
    size = f"{capacity.max_model_len:,} tokens takes {capacity.request_bytes:,} bytes"
    return f"One request of {size}.{fits} Of its bytes:"


def _keys(sketch: Sketch) -> Iterator[tuple[str, str]]:
    """Looks that occur, with what they mean."""
    shown: set[int] = set()
    for row in sketch.rows:
        for layer in row.layers:
            hue = sketch.hues[layer.name]
            if hue not in shown and hue < len(HUES):
                shown.add(hue)
                yield f"h{hue}", f"{kind_of(row.group)}, {layer.real_page_size_bytes:,} bytes a page"
    whats = {piece.what for row in sketch.rows for block in row.blocks for piece in block}
    if "padding" in whats:
        yield "pad", "padding of a page"
    if "unused" in whats:
        yield "free", "unused by the group"
    if any(piece.what == "other" for row in sketch.rows for piece in one_layer(row)):
        yield "other", "other layers of the block, or unused"


def _draw_keys(canvas: Canvas, top: float, keys: Iterator[tuple[str, str]] | list[tuple[str, str]]) -> float:
    """Chips with their meaning, in as many lines as they need; gives where they end."""
    x, y = float(MARGIN), top
    for look, text in keys:
        text = clipped(text, 12, _ROOM - _CHIP - 6)
        width = _CHIP + 6 + width_px(text, 12) + 14
        if x > MARGIN and x + width > WIDTH - MARGIN:
            x, y = float(MARGIN), y + 22
        canvas.rect(x, y, _CHIP, _CHIP, look)
        canvas.text(x + _CHIP + 6, y + 11, text, 12)
        x += width
    return y + 22


def _description(sketch: Sketch) -> Iterator[str]:
    """Sentences for those who cannot see the picture."""
    yield _totals(sketch) + "."
    for row in sketch.rows:
        blocks = row.group.blocks_per_slab
        pages = sum(layer.page_size_bytes for layer in row.layers) * blocks
        real = sum(layer.real_page_size_bytes for layer in row.layers) * blocks
        yield (
            f"{len(row.groups):,} × {printable(kind_of(row.group))} with {len(row.layers):,} layers and "
            f"{blocks:,} blocks of {row.group.block_size:,} tokens in a {sketch.unit}: {real:,} bytes "
            f"of data, {pages - real:,} of padding, {sketch.plan.slab_bytes - pages:,} not used."
        )
