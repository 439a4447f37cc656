"""Whether the blocks of a pool can be leased: what its worker must know of its plan, which it does not judge."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from kvpage.errors import KvpageError, shorten
from kvpage.plans import Plan

FREE_STATE_BYTES = 64 << 20
STATE_SHARE = 8
"""Of a pool: its block state may have an eighth of its bytes, or 64 MiB. That of an honest plan has less than a
hundredth; that of another could have more than there is."""


class BlockPlan(NamedTuple):
    plan: Plan | None
    state_bytes: int
    """Of its block state; 0 where there is no plan."""
    why_not: str


def read_block_plan(data: bytes, buffer_size_bytes: int) -> BlockPlan:
    """Of the plan that a pool of so many bytes was made with."""
    try:
        plan = msgspec.json.decode(data, type=Plan)
        from kvpage_server.worker_blocks import block_state_bytes  # NumPy: not for a plan that is none

        state_bytes = block_state_bytes(plan)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KvpageError) as error:
        return BlockPlan(None, 0, f"its plan names no blocks that could be leased: {shorten(str(error))}")
    limit_bytes = max(FREE_STATE_BYTES, buffer_size_bytes // STATE_SHARE)
    if state_bytes > limit_bytes:
        return BlockPlan(
            None, 0, f"the state of its blocks would have {state_bytes} bytes, at most {limit_bytes} may be"
        )
    return BlockPlan(plan, state_bytes, "")
