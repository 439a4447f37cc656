"""A plan request as a search sees it: layers in buckets, the workload, and bounds with what is assumed without them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from kvpage.errors import KvpageError
from kvpage.layers import Layer
from kvpage.planner.align import align_hybrid, is_hybrid
from kvpage.planner.buckets import Bucket, make_buckets, taken_apart
from kvpage.planner.search import Limits
from kvpage.planner.workload import Demand, Kept, Workload, WorkloadPart, default_workload, kept_of
from kvpage.request import PlanRequest
from kvpage.specs import Lengths

DEFAULT_MAX_GROUPS = 16
DEFAULT_MAX_BLOCK_TOKENS = 1024
_MOST_MIXED = 2
"""Buckets of unlike layers of which each is tried whole and taken apart; of more, all whole and all apart."""


@dataclass(frozen=True)
class Problem:
    request: PlanRequest
    layers: tuple[Layer, ...]
    """All of them; those that share a cache, and those without one, hold nothing."""

    @cached_property
    def owners(self) -> tuple[Layer, ...]:
        """Layers with a cache of their own."""
        return tuple(layer for layer in self.layers if layer.spec is not None and layer.kv_sharing_target is None)

    @property
    def lengths(self) -> Lengths:
        return self.request.lengths()

    @cached_property
    def workload(self) -> Workload:
        asked = self.request.workload
        if asked is None:
            return default_workload(self.request.max_model_len)
        return tuple(WorkloadPart(e.shortest_tokens, e.longest_tokens, float(e.weight)) for e in asked)

    def demand_of(self, workload: Workload) -> Demand:
        return Demand(workload, self._kept, self.lengths)

    @cached_property
    def demand(self) -> Demand:
        return self.demand_of(self.workload)

    @cached_property
    def _kept(self) -> tuple[Kept, ...]:
        alike: dict[int, list[Layer]] = {}  # by identity: equal layers share their spec
        for layer in self.owners:
            alike.setdefault(id(layer.spec), []).append(layer)
        return tuple(kept_of(of[0].spec, len(of), self.lengths) for of in alike.values() if of[0].spec is not None)

    @cached_property
    def default_max_block_tokens(self) -> int:
        """1,024, or what hybrid alignment takes where that is more: vLLM's own block is never out of reach."""
        if not is_hybrid(self.owners):
            return DEFAULT_MAX_BLOCK_TOKENS
        try:
            aligned = align_hybrid(self.owners)
        except KvpageError:
            return DEFAULT_MAX_BLOCK_TOKENS
        blocks = (layer.spec.block_size for layer in aligned if layer.spec is not None and layer.spec.is_attention)
        return max(DEFAULT_MAX_BLOCK_TOKENS, *blocks)

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """Raises `SpecInvalid` or `LayoutUnsupported` naming a layer that no search can place."""
        return make_buckets(self.owners, self.request.max_block_size, self.default_max_block_tokens)

    def variants(self) -> Iterator[tuple[Bucket, ...]]:
        """The buckets, and the same with those of unlike layers taken apart, so that block sizes may differ."""
        yield self.buckets
        mixed = [bucket for bucket in self.buckets if len(bucket.kin) > 1]
        if not mixed:
            return
        ways = [self._ways(bucket) for bucket in self.buckets]
        combined = product(*ways) if len(mixed) <= _MOST_MIXED else [[way[-1] for way in ways]]
        for chosen in combined:
            variant = tuple(one for way in chosen for one in way)
            if len(self.buckets) < len(variant) <= self.limits.max_groups:
                yield variant

    def _ways(self, bucket: Bucket) -> list[tuple[Bucket, ...]]:
        whole: list[tuple[Bucket, ...]] = [(bucket,)]
        if not 1 < len(bucket.kin) <= self.limits.max_groups:
            return whole
        return [*whole, taken_apart(bucket, self.request.max_block_size, self.default_max_block_tokens)]

    @cached_property
    def usual_max_groups(self) -> int:
        """What the request allows, or what a search assumes: 16, or one for each life cycle."""
        lives = len({layer.spec.lifecycle for layer in self.owners if layer.spec is not None})
        return self.request.max_groups or max(DEFAULT_MAX_GROUPS, lives)

    @cached_property
    def limits(self) -> Limits:
        request = self.request
        narrow = [
            layer.spec.item_sizes_bytes[0] << 31
            for layer in self.owners
            if layer.spec is not None and layer.backend is not None and layer.backend.index_bits == 32
        ]
        smallest = [bucket.block_sizes[0] for bucket in self.buckets if bucket.spec.is_attention]
        return Limits(
            max_groups=self.usual_max_groups,
            max_block_lcm=request.max_block_lcm or max(self.default_max_block_tokens, *smallest, 0),
            max_block_stride_bytes=request.max_block_stride_bytes,
            max_one_token_bytes=request.max_one_token_bytes,
            pool_bytes=request.memory_bytes,
            addressable_bytes=min(narrow, default=None),
            num_slabs=request.num_blocks,
        )

    @cached_property
    def floor(self) -> float:
        """What pools without any padding or rounding would hold, in the blocks that suit the workload best."""
        return sum(self._floor_of(alike) for alike in self._alike())

    def _alike(self) -> Iterator[Sequence[Layer]]:
        alike: dict[tuple[int, int], list[Layer]] = {}
        for layer in self.owners:
            alike.setdefault((id(layer.spec), id(layer.backend)), []).append(layer)
        yield from alike.values()

    def _floor_of(self, alike: Sequence[Layer]) -> float:
        spec = alike[0].spec
        assert spec is not None
        bare = spec.with_padding(None)
        sized = [bare.with_block_size(size) for size in _least_blocks(alike[0])] if spec.is_attention else [bare]
        return len(alike) * min(one.real_page_size_bytes * self.demand.blocks(one, one.block_size) for one in sized)


def _least_blocks(layer: Layer) -> set[int]:
    """Block sizes of which one holds least: of the multiples of a unit, the unit; and the layer's own."""
    assert layer.spec is not None
    assert layer.backend is not None  # every attention layer has one
    sizes, ratio = layer.backend.kernel_block_sizes, layer.spec.block_size // layer.spec.storage_block_size
    unit = sizes.multiple_of if sizes.listed or sizes.multiple_of is not None else 1
    return {size * ratio for size in (*sizes.listed, unit) if size is not None} | {layer.spec.block_size}
