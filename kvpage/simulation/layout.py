"""What the simulation needs to know of a page layout: who needs how many blocks when, and how blocks lie in slabs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from kvpage.errors import NotSupported, SpecInvalid
from kvpage.plans import GroupPlan, LayerPlan, Plan

GrowthKind = Literal["full", "window", "chunk", "state"]
_GROWTH: dict[str, GrowthKind] = {
    "full_attention": "full",
    "mla_attention": "full",
    "sliding_window": "window",
    "sliding_window_mla": "window",
    "chunked_local_attention": "chunk",
    "mamba": "state",
}
NULL_SLABS = 1  # slab 0 holds the null block and is never handed out


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Which blocks a group of layers needs for a request of n tokens, the one in flight included.

    The blocks of a request are numbered from its first token; it holds those from `first_block` up to `end_block`.
    """

    kind: GrowthKind
    block_size: int
    """Tokens of one block; not looked at for states."""
    reach: int = 0
    """Tokens of the window, or of a chunk; 0 for the other kinds."""

    def end_block(self, tokens: int) -> int:
        """One past the last block held."""
        return 1 if self.kind == "state" else -(-tokens // self.block_size)

    def first_block(self, tokens: int) -> int:
        """The first block held: earlier ones have left the window or the chunk."""
        return self.first_live_token(tokens) // self.block_size

    def first_live_token(self, tokens: int) -> int:
        """The first token whose data is still needed."""
        if self.kind == "window":
            return max(0, tokens - self.reach)
        return (tokens - 1) // self.reach * self.reach if self.kind == "chunk" else 0

    def blocks(self, tokens: int) -> int:
        """Blocks held."""
        return self.end_block(tokens) - self.first_block(tokens)

    def live(self, tokens: int) -> int:
        """Tokens whose data is needed; 1 for a state."""
        return 1 if self.kind == "state" else tokens - self.first_live_token(tokens)

    def live_growth(self, tokens: int) -> int:
        """By how much `live` grows with each token until the next `change`: 0 or 1."""
        return 0 if self.kind == "state" or (self.kind == "window" and tokens >= self.reach) else 1

    def next_change(self, tokens: int) -> int | None:
        """The least number of tokens above `tokens` with other blocks or another `live_growth`; None if there is none.

        Up to there `live` grows by `live_growth` with each token.
        """
        if self.kind == "state":
            return None
        nearest = self.end_block(tokens) * self.block_size + 1
        if self.kind == "window":
            saturates = self.reach if tokens < self.reach else nearest
            drops = self.reach + (self.first_block(tokens) + 1) * self.block_size
            return min(nearest, saturates, drops)
        if self.kind == "chunk":
            return min(nearest, self.first_live_token(tokens) + self.reach + 1)
        return nearest


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedGroups:
    """Groups that always hold equally many blocks: what is said of one happens to each of them at the same moment."""

    count: int
    growth: Growth
    blocks_per_slab: int
    bytes_per_token: Fraction
    """Live bytes of one token in all layers of all these groups; of one state of each layer for states."""
    pool: int = 0
    """Index into `SimulatedLayout.pools`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedPool:
    """Slabs that its groups share."""

    slabs: int
    """That can be handed out: the null slab is not among them."""
    slab_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedLayout:
    """One layout in a memory of a given size."""

    name: str
    memory_bytes: int
    pools: tuple[SimulatedPool, ...]
    groups: tuple[SimulatedGroups, ...]


def layout_of(plan: Plan, *, memory_bytes: int | None = None, name: str | None = None) -> SimulatedLayout:
    """The layout of a plan of any strategy. `memory_bytes`: memory it was planned for, else the size of its buffer.

    Raises `NotSupported` for cross attention, whose blocks depend on an encoder that the streams do not have, and
    `SpecInvalid` for a plan of no cache.
    """
    if not plan.groups:
        raise SpecInvalid("no layer of the plan has a cache, so any number of requests fits; add layers that have one")
    alike: Counter[tuple[Growth, int]] = Counter()
    live: dict[tuple[Growth, int], Fraction] = {}
    for group in plan.groups:
        key = (_growth(group), group.blocks_per_slab)
        alike[key] += 1
        live[key] = live.get(key, Fraction(0)) + sum(_bytes_per_token(layer) for layer in _owners(plan, group))
    return SimulatedLayout(
        name=plan.strategy if name is None else name,
        memory_bytes=plan.buffer_size_bytes if memory_bytes is None else memory_bytes,
        pools=(SimulatedPool(slabs=max(0, plan.num_blocks - NULL_SLABS), slab_bytes=plan.slab_bytes),),
        groups=tuple(
            SimulatedGroups(count=count, growth=growth, blocks_per_slab=q, bytes_per_token=live[growth, q])
            for (growth, q), count in alike.items()
        ),
    )


def _growth(group: GroupPlan) -> Growth:
    if group.kind not in _GROWTH:
        known = ", ".join(_GROWTH)
        raise NotSupported(f"layer {group.layers[0]!r} is {group.kind}; the simulation knows {known}; leave it out")
    kind = _GROWTH[group.kind]
    reach = {"window": group.sliding_window, "chunk": group.attention_chunk_size}.get(kind)
    return Growth(kind=kind, block_size=1 if kind == "state" else group.block_size, reach=reach or 0)


def _owners(plan: Plan, group: GroupPlan) -> Iterable[LayerPlan]:
    return (plan.layers[name] for name in group.layers if plan.layers[name].kv_sharing_target is None)


def _bytes_per_token(layer: LayerPlan) -> Fraction:
    tokens = 1 if _GROWTH[layer.kind] == "state" else layer.block_size
    return Fraction(layer.real_page_size_bytes, tokens)
