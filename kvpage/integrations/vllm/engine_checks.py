"""What must hold before a vLLM engine may keep its cache in a pool. Each check refuses with one sentence."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from kvpage.errors import Conflict, LayoutUnsupported, NotSupported, shorten
from kvpage.plans import Plan, TensorView

TESTED_VERSIONS = ((0, 31), (0, 33))
"""Releases from the first on, and before the second: those of which engines were run (docs/vllm.md)."""
TESTED_RANGE = ">=0.31.0,<0.33.0"
_NUMBERS = re.compile(r"(\d+)\.(\d+)(?:\.|$|[^\d])")


def check_version(version: str) -> None:
    """Raises `NotSupported` outside the releases that were run."""
    found = _NUMBERS.match(version)
    numbers = (int(found[1]), int(found[2])) if found else (0, 0)
    if not TESTED_VERSIONS[0] <= numbers < TESTED_VERSIONS[1]:
        raise NotSupported(
            f"vLLM {shorten(version)} was not tried with kvpage's connector; use {TESTED_RANGE}, or a kvpage that "
            f"knows it",
            details={"version": shorten(version), "tested": TESTED_RANGE},
        )


def check_stays_awake(model_config: Any) -> None:
    """Raises `NotSupported` where the engine would take its memory from an allocator that gives it back asleep."""
    for field in ("enable_sleep_mode", "enable_cumem_allocator"):
        if getattr(model_config, field, False):
            raise NotSupported(
                f"{field} is on: a sleeping engine gives its cache back, which a pool that others hold cannot be; "
                f"start vLLM without it"
            )


@dataclass(frozen=True, slots=True)
class RankAnswer:
    """What one rank says to the others before any of them takes memory."""

    rank: int
    num_blocks: int
    groups: tuple[tuple[str, int], ...]
    """Kind and tokens of a block, by group: what a block id means."""
    refusal: str | None = None
    """Why this rank cannot go on; None: it can."""

    @classmethod
    def of(cls, rank: int, plan: Plan) -> Self:
        return cls(rank, plan.num_blocks, tuple((group.kind, group.block_size) for group in plan.groups))


def check_ranks(answers: Sequence[RankAnswer]) -> None:
    """Raises `Conflict` unless a block id means the same tokens on every rank."""
    for answer in answers:
        if answer.refusal is not None:
            raise Conflict(f"rank {answer.rank} of the engine cannot go on: {answer.refusal}")
    first = answers[0]
    for other in answers[1:]:
        if (other.num_blocks, other.groups) != (first.num_blocks, first.groups):
            raise Conflict(
                f"rank {first.rank} has {first.num_blocks} blocks in {len(first.groups)} groups, rank {other.rank} "
                f"{other.num_blocks} in {len(other.groups)}: one block table could not serve both; set "
                f"--num-gpu-blocks-override"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """A tensor that vLLM has made for a layer: sizes in bytes, `offset_bytes` from the start of the pool's memory."""

    dtype: str
    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    offset_bytes: int

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}, strides {list(self.strides_bytes)}, at byte {self.offset_bytes}"


def check_registered(plan: Plan, registered: Mapping[str, Registered]) -> None:
    """Raises `LayoutUnsupported` unless each layer of the plan has the very tensor that the plan says, and every other
    name stands for one of them."""
    for name, layer in plan.layers.items():
        if not layer.tensors:
            continue
        found = registered.get(name)
        if found is None:
            raise LayoutUnsupported(f"vLLM registered no cache for layer {shorten(name)!r}, which is in the plan")
        planned = _state(layer.tensors, layer.real_page_size_bytes) if layer.kind == "mamba" else _view(*layer.tensors)
        if not _is_same(planned, found):
            raise LayoutUnsupported(f"layer {shorten(name)!r} is {found} in vLLM, and {planned} in the plan")
    known = [registered[name] for name, layer in plan.layers.items() if layer.tensors]
    for name, found in registered.items():
        if name not in plan.layers and found not in known:  # layers that read the cache of another are not planned
            raise LayoutUnsupported(
                f"vLLM registered layer {shorten(name)!r} as {found}, and the plan has no such page"
            )


def _view(view: TensorView) -> Registered:
    return Registered(
        dtype=view.dtype, shape=view.shape, strides_bytes=view.strides_bytes, offset_bytes=view.offset_bytes
    )


def _state(views: Sequence[TensorView], size_bytes: int) -> Registered:
    """vLLM registers all states of a layer as one row of bytes for each block."""
    first = views[0]
    stride = first.strides_bytes[first.block_axis]
    return Registered(
        dtype="int8",
        shape=(first.shape[first.block_axis], 1, 1, size_bytes),
        strides_bytes=(stride, size_bytes, size_bytes, 1),
        offset_bytes=first.offset_bytes,
    )


def _is_same(planned: Registered, found: Registered) -> bool:
    """Strides of axes with one entry are never used, and may be anything."""
    if (planned.dtype, planned.shape, planned.offset_bytes) != (found.dtype, found.shape, found.offset_bytes):
        return False
    used = zip(planned.shape, planned.strides_bytes, found.strides_bytes, strict=True)
    return all(mine == theirs for extent, mine, theirs in used if extent > 1)
