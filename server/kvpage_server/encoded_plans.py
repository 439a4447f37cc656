"""Plans as they are sent: JSON within the bounds of what is served."""

from __future__ import annotations

from dataclasses import dataclass

from kvpage.errors import TooLarge
from kvpage.plans import Plan
from kvpage.ranked_plan import RankedPlan
from kvpage.wire.messages import MAX_PLAN_BYTES

MAX_RANKS_BYTES = 32 << 20  # of one answer with the plans of all ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPlan:
    """A plan as it is sent and handed to workers."""

    plan_id: str
    buffer_size_bytes: int
    json: bytes
    """Without what its search says of itself, which is another's for another request that leads to the same plan."""
    answer: bytes
    """With that: for who asked for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedRanks:
    """The plans of all ranks, and all of them in one answer."""

    plans: tuple[EncodedPlan, ...]
    """One for each rank; ranks that are alike share one."""
    json: bytes


def encoded(plan: Plan) -> EncodedPlan:
    """Raises `TooLarge`."""
    answer = plan.to_json()
    if len(answer) > MAX_PLAN_BYTES:
        raise TooLarge(
            f"the plan has {len(answer)} bytes as JSON; no more than {MAX_PLAN_BYTES} are served. Shorten layer "
            f"names, or plan fewer layers.",
            details={"size_bytes": len(answer), "limit_bytes": MAX_PLAN_BYTES},
        )
    bare = plan.bare()
    json = answer if bare == plan else bare.to_json()
    return EncodedPlan(plan_id=plan.plan_id, buffer_size_bytes=plan.buffer_size_bytes, json=json, answer=answer)


def encoded_ranks(ranked: RankedPlan) -> EncodedRanks:
    """Raises `TooLarge`."""
    made = {plan.plan_id: encoded(plan) for plan in ranked.ranks}
    plans = tuple(made[plan.plan_id] for plan in ranked.ranks)
    size_bytes = sum(len(plan.json) for plan in plans)
    if size_bytes > MAX_RANKS_BYTES:
        raise TooLarge(
            f"the plans of {len(plans)} ranks have {size_bytes} bytes as JSON; no more than {MAX_RANKS_BYTES} are "
            f"served at once. Plan with kvpage.plan_ranks, which has no such bound.",
            details={"size_bytes": size_bytes, "limit_bytes": MAX_RANKS_BYTES},
        )
    return EncodedRanks(plans=plans, json=ranked.to_json())
