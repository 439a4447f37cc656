"""What a group keeps in the memory of one slab, piece by piece: data, padding, and what it leaves unused.

A plan's memory of one slab is a row of *cells*: one where slabs are whole, one for each region where every slot has a
region of its own. A group cuts each cell into its blocks. Pieces follow each other without a gap: their sizes add up
to the slab.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from kvpage.drawing.runs import block_runs
from kvpage.plans import GroupPlan, LayerPlan, Plan

What = Literal["data", "padding", "unused", "other"]
WHATS: tuple[What, ...] = ("data", "padding", "unused", "other")
MAX_LOOKS = 24


@dataclass(frozen=True, slots=True)
class Cell:
    """The bytes that one slab has in one place: slab i begins at `start` + i × `size_bytes`."""

    start: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Piece:
    """`count` like pieces of memory that are drawn as one; mostly 1."""

    what: What
    """"unused" by the group; "other" than of the one layer that is shown."""
    size_bytes: int
    layer: str = ""
    """Of several the first; "" for what has none."""
    count: int = 1
    is_alike: bool = True
    """False when pieces of several sizes are drawn as one."""

    @property
    def each_bytes(self) -> int:
        return self.size_bytes // self.count


@dataclass(frozen=True, slots=True)
class Row:
    """Groups that look alike: by cell the pieces of one block, of which a slab has `blocks_per_slab`."""

    groups: tuple[int, ...]
    group: GroupPlan
    layers: tuple[LayerPlan, ...]
    """Of the first group, without those that share another's cache."""
    blocks: tuple[tuple[Piece, ...], ...]


@dataclass(frozen=True, slots=True)
class _Placed:
    """Data of one layer inside a block, with the end of the page it belongs to."""

    start: int
    size_bytes: int
    page_end: int
    layer: str
    count: int


def cells_of(plan: Plan) -> tuple[Cell, ...]:
    """In the order of memory. A tensor that begins inside the cell of another one lies in it."""
    found: list[Cell] = []
    for start, size in sorted({place for index in range(len(plan.groups)) for place in _places(plan, index)}):
        if not found or start >= found[-1].start + found[-1].size_bytes:
            found.append(Cell(start, size))
    return tuple(found)


def rows_of(plan: Plan, cells: Sequence[Cell], max_rows: int) -> tuple[Row, ...]:
    """A row for each look that groups have, at most `max_rows`, in the order of the first group of each.

    Groups without a layer (of another pipeline stage) have nothing to show.
    """
    alike: dict[object, list[int]] = {}
    for index, group in enumerate(plan.groups):
        tensors = tuple(layer.tensors for layer in owners(plan, index))
        if not tensors:
            continue
        look = (group.kind, group.sliding_window, group.attention_chunk_size, group.block_size, group.blocks_per_slab)
        alike.setdefault((look, tensors), []).append(index)
    return tuple(_row(plan, cells, tuple(groups)) for groups in list(alike.values())[:max_rows])


def owners(plan: Plan, group: int) -> tuple[LayerPlan, ...]:
    """Layers of the group that have a cache of their own."""
    layers = (plan.layers[name] for name in plan.groups[group].layers)
    return tuple(layer for layer in layers if layer.kv_sharing_target is None)


def gathered(pieces: Iterable[Piece], blocks: int = 1, *, max_pieces: int = MAX_LOOKS) -> tuple[Piece, ...]:
    """The pieces of `blocks` blocks with like ones as one, at the place of the first.

    If that leaves more than `max_pieces`, all data become one piece, and all padding.
    """
    found: dict[object, list[Piece]] = {}
    for piece in pieces:
        found.setdefault((piece.what, piece.each_bytes if piece.layer else 0), []).append(piece)
    if len(found) > max_pieces:
        found = {what: [p for alike in found.values() for p in alike if p.what == what] for what in WHATS}
    return tuple(_together(alike, blocks) for alike in found.values() if alike)


def _together(alike: Sequence[Piece], blocks: int) -> Piece:
    size = sum(piece.size_bytes for piece in alike) * blocks
    count = 1 if not alike[0].layer else sum(piece.count for piece in alike) * blocks
    return replace(alike[0], size_bytes=size, count=count, is_alike=len({piece.each_bytes for piece in alike}) == 1)


def _places(plan: Plan, index: int) -> Iterable[tuple[int, int]]:
    """Where a slab of the group has memory: start and bytes."""
    blocks_per_slab = plan.groups[index].blocks_per_slab
    for layer in owners(plan, index):
        for view in layer.tensors:
            for plane in block_runs(view).planes:
                yield plane.start, plane.size_bytes * blocks_per_slab


def _row(plan: Plan, cells: Sequence[Cell], groups: tuple[int, ...]) -> Row:
    group, layers = plan.groups[groups[0]], owners(plan, groups[0])
    placed: list[list[_Placed]] = [[] for _ in cells]
    for layer in layers:
        for cell, data in _placed(layer, cells):
            placed[cell].append(data)
    sizes = [cell.size_bytes // group.blocks_per_slab for cell in cells]
    blocks = tuple(tuple(_filled(data, size)) for data, size in zip(placed, sizes, strict=True))
    return Row(groups=groups, group=group, layers=layers, blocks=blocks)


def _placed(layer: LayerPlan, cells: Sequence[Cell]) -> Iterable[tuple[int, _Placed]]:
    """The layer's data in block 0, by the index of the cell that it lies in."""
    all_runs = [block_runs(view) for view in layer.tensors]
    page_start = min((plane.start for runs in all_runs for plane in runs.planes), default=0)
    for runs in all_runs:
        for plane in runs.planes:
            cell = _cell_at(cells, plane.start)
            place = plane.start - cells[cell].start
            page = place if runs.num_planes > 1 else page_start - cells[cell].start
            page_end = page + layer.page_size_bytes * plane.count // runs.num_planes
            for run in runs.runs:
                count = run.count * plane.count
                yield cell, _Placed(place + run.start, run.size_bytes * plane.count, page_end, layer.name, count)


def _cell_at(cells: Sequence[Cell], start: int) -> int:
    low, high = 0, len(cells)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cells[middle].start <= start else (low, middle)
    return low


def _filled(placed: Iterable[_Placed], size_bytes: int) -> Iterable[Piece]:
    """The whole block: between data lies padding as far as the page before reaches, and what nobody uses."""
    position = page_end = 0
    layer = ""
    for data in sorted(placed, key=lambda data: (data.start, data.layer)):
        yield from _between(position, max(position, min(data.start, size_bytes)), page_end, layer)
        start = max(position, data.start)  # runs drawn as one may push the next ones along
        size = min(data.size_bytes, size_bytes - start)
        if size > 0:
            yield Piece("data", size, data.layer, data.count)
        position, page_end, layer = start + max(size, 0), data.page_end, data.layer
    yield from _between(position, size_bytes, page_end, layer)


def _between(start: int, end: int, page_end: int, layer: str) -> Iterable[Piece]:
    padding_end = min(max(start, page_end), end)
    if padding_end > start:
        yield Piece("padding", padding_end - start, layer)
    if end > padding_end:
        yield Piece("unused", end - padding_end)
