"""Blocks written and read through the views of a pool, beside memcpy of as many bytes."""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import kvpage
from attaching import create, worker
from measure import Effort, Row, Runs, beside, compare, take_turns
from report import Pair, Subject, main_of

ROUNDS, WARM_UP = 30, 3
MEMORY_BYTES = 96 << 20
NUM_GATHERED = 64
MEMCPY, OF_ONE = "memcpy of as many bytes", "the same of a tensor of its own"
DENSE, PADDED, NESTED = "dense", "padded", "nested"
KINDS = (DENSE, PADDED, NESTED)
ABOUT = f"""
`benchmarks/memory_views.py`. All blocks of one layer are written from a tensor, or read into one, through the view that
an attached pool of {MEMORY_BYTES >> 20} MiB has of it, on one thread. Beside it: `memmove` of as many bytes between two
buffers of this process. *Dense*: the pages of the layer follow on each other. *Padded*: each page is padded to one
half again as large. *Nested*: groups cut slabs into one page or three, and between those of the layer lie others.
*Gathered*: {NUM_GATHERED} blocks, in no order, by the ids of a block table, beside the same of a contiguous tensor that
torch has allocated.
"""


def request(kind: str) -> dict[str, Any]:
    """The layer `x`, whose rows are the same in all of them, and what its memory is shared with."""
    attention = {"block_size": 16, "num_kv_heads": 8, "dtype": "bfloat16", "backend": "flash_attn"}
    full = attention | {"kind": "full_attention"}
    window = attention | {"kind": "sliding_window", "sliding_window": 1024, "head_size": 128}
    wide = full | {"name": "wide", "head_size": 192}
    layers: dict[str, list[dict[str, Any]]] = {
        DENSE: [full | {"name": "x", "head_size": 128}],
        PADDED: [wide, window | {"name": "x"}],
        NESTED: [
            wide | {"name": "wide.{i}", "count": 4},
            window | {"name": "x"},
            window | {"name": "y.{i}", "count": 7},
        ],
    }
    strategy = "nested" if kind == NESTED else "unify"
    return {"strategy": strategy, "memory_bytes": MEMORY_BYTES, "layers": layers[kind]}


def measure(effort: Effort) -> list[Row]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [row for kind in KINDS for row in _of_kind(kind, effort.rounds(ROUNDS))]
    finally:
        torch.set_num_threads(num_threads)


def _of_kind(kind: str, rounds: int) -> list[Row]:
    plan = kvpage.plan(request(kind))
    with tempfile.TemporaryDirectory(prefix="kvpage-bench-") as folder, worker(folder):
        create(folder, plan)
        with kvpage.attach("bench", run_dir=folder) as kv:
            view = kv.tensor("x")
            _check(kind, plan, view)
            blocks = view.movedim(plan.layers["x"].tensors[0].block_axis, 0)
            return _copies(kind, blocks, rounds) + _gathered(kind, blocks, rounds)


def _check(kind: str, plan: kvpage.Plan, view: torch.Tensor) -> None:
    """That the layout is what the row says."""
    layer = plan.layers["x"]
    is_padded = layer.page_size_bytes > layer.real_page_size_bytes
    blocks_per_slab = plan.groups[layer.group or 0].blocks_per_slab
    assert (is_padded, blocks_per_slab > 1) == (kind == PADDED, kind == NESTED), (kind, layer, blocks_per_slab)
    assert view.is_contiguous() == (kind == DENSE)


def _copies(kind: str, blocks: torch.Tensor, rounds: int) -> list[Row]:
    own = torch.ones(blocks.shape, dtype=blocks.dtype)
    other = torch.zeros_like(own)
    size_bytes = own.numel() * own.element_size()
    copy = partial(ctypes.memmove, other.data_ptr(), own.data_ptr(), size_bytes)
    sides: dict[str, Callable[[], object]] = {
        MEMCPY: copy,
        _written(kind): lambda: blocks.copy_(own),
        _read(kind): lambda: own.copy_(blocks),
    }
    return beside(MEMCPY, take_turns(sides, rounds=rounds, warm_up=WARM_UP))


def _gathered(kind: str, blocks: torch.Tensor, rounds: int) -> list[Row]:
    alone = torch.zeros(blocks.shape, dtype=blocks.dtype)
    order = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(0))[:NUM_GATHERED]
    sides: dict[str, Callable[[], object]] = {OF_ONE: lambda: alone[order], _gathered_name(kind): lambda: blocks[order]}
    timed: dict[str, Runs] = take_turns(sides, rounds=10 * rounds, warm_up=WARM_UP)
    return [compare(timed[_gathered_name(kind)], timed[OF_ONE])]


def _written(kind: str) -> str:
    return f"all blocks written, {kind}"


def _read(kind: str) -> str:
    return f"all blocks read, {kind}"


def _gathered_name(kind: str) -> str:
    return f"{NUM_GATHERED} blocks gathered, {kind}"


def _pairs() -> tuple[Pair, ...]:
    return tuple(
        pair
        for kind in KINDS
        for pair in ((_written(kind), MEMCPY), (_read(kind), MEMCPY), (_gathered_name(kind), OF_ONE))
    )


SUBJECT = Subject(
    title="Memory",
    about=ABOUT,
    pairs=_pairs(),
    measure=measure,
    in_short=((_written(PADDED), MEMCPY), (_read(NESTED), MEMCPY)),
)

if __name__ == "__main__":
    main_of(SUBJECT)
