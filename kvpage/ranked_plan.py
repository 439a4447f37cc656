"""The plans of all ranks of one model: a plan for each, with the same blocks everywhere."""

from __future__ import annotations

from typing import Self

import msgspec

from kvpage.errors import InternalError, SpecInvalid, shorten
from kvpage.plans import Amount, Efficiency, Plan, RejectedStrategy


class RankedPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One scheduler hands out the blocks of all ranks, so a block id means the same tokens on each of them."""

    num_blocks: Amount
    """Of every rank: as many as the rank with the fewest can hold."""
    kv_replicas: Amount | None
    """Ranks that keep the same bytes of every layer, as tensor-parallel ranks do where heads are fewer than ranks; None
    where the request does not say, as it does with a `model`."""
    blocks_that_fit: tuple[Amount | None, ...]
    """What each rank's memory could hold; None for a rank without caches, and where `num_blocks` was asked for."""
    warnings: tuple[str, ...] = ()
    efficiency: Efficiency | None = None
    """Of the whole model's groups and blocks, whatever parts of them a rank keeps."""
    rejected: tuple[RejectedStrategy, ...] = ()
    """What strategy auto weighed for the whole model and did not take."""
    ranks: tuple[Plan, ...]
    """In the order of the request's ranks. Ranks that are alike have the same plan."""

    def check(self) -> None:
        """Prove every plan, and that block ids mean the same on all ranks. Raises `InternalError` naming the rank."""
        for plan in {id(plan): plan for plan in self.ranks}.values():  # alike ranks share one
            plan.check()
        for index, plan in enumerate(self.ranks):
            if _seen_by_scheduler(plan) != _seen_by_scheduler(self.ranks[0]) or plan.num_blocks != self.num_blocks:
                raise InternalError(
                    f"rank {index} has other groups, block sizes or numbers of blocks than rank 0; this is a fault in "
                    f"kvpage, please report the request"
                )

    def to_json(self) -> bytes:
        """All of it as JSON."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """Read the plans and prove them, as `Plan.from_json` does. Raises `SpecInvalid`."""
        try:
            parts = msgspec.json.decode(data, type=_Parts)
            proven = {plan: Plan.from_json(plan) for plan in dict.fromkeys(map(bytes, parts.ranks))}
            ranks = tuple(proven[bytes(plan)] for plan in parts.ranks)
            ranked = cls(**{name: getattr(parts, name) for name in _WITHOUT_RANKS}, ranks=ranks)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise SpecInvalid(f"not the plans of ranks: {shorten(str(error))}") from error
        try:
            ranked.check()
        except InternalError as error:
            raise SpecInvalid(f"the plans of the ranks do not fit together: {error.message}") from error
        return ranked


class _Parts(msgspec.Struct, frozen=True, kw_only=True):
    """A `RankedPlan` whose plans are still to be read, each distinct one once."""

    num_blocks: Amount
    kv_replicas: Amount | None
    blocks_that_fit: tuple[Amount | None, ...]
    warnings: tuple[str, ...]
    efficiency: Efficiency | None = None
    rejected: tuple[RejectedStrategy, ...] = ()
    ranks: tuple[msgspec.Raw, ...]


_WITHOUT_RANKS = tuple(name for name in RankedPlan.__struct_fields__ if name != "ranks")


def _seen_by_scheduler(plan: Plan) -> tuple[object, ...]:
    groups = tuple(
        (group.kind, group.block_size, group.blocks_per_slab, group.sliding_window, group.attention_chunk_size)
        for group in plan.groups
    )
    return (plan.strategy, plan.num_blocks, groups)
