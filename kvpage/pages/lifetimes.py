"""Which blocks a sequence needs in each group of a plan, and for how long.

Blocks of a sequence are numbered from its first token. What is said of n tokens holds while token n, the next, is yet
to be computed: it looks back to `first_block(n)`, and blocks up to `end_block(n)` have tokens in them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kvpage.errors import NotSupported, SpecInvalid
from kvpage.plans import GroupPlan, Plan

Kind = Literal["full", "window", "chunk", "state", "encoder"]
_KINDS: dict[str, Kind] = {
    "full_attention": "full",
    "mla_attention": "full",
    "sliding_window": "window",
    "sliding_window_mla": "window",
    "chunked_local_attention": "chunk",
    "mamba": "state",
    "cross_attention": "encoder",
}
Lengths = npt.NDArray[np.int64]
FOR_EVER = 2**62
"""More tokens than any sequence has."""


def ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetime:
    """Of the blocks of one group."""

    kind: Kind
    block_size: int
    """Tokens of one block. For states: the tokens after which a state may be kept for others, and multiples of them."""
    reach: int = 0
    """Tokens of the window, the one computed included, or of a chunk; 0 for the other kinds."""
    num_speculative_blocks: int = 0
    """States beside the one that is settled."""

    def __post_init__(self) -> None:
        needs_reach = self.kind in ("window", "chunk")
        if self.block_size < 1 or self.num_speculative_blocks < 0 or (self.reach > 0) != needs_reach:
            raise SpecInvalid(
                f"a {self.kind} group of blocks of {self.block_size} tokens, a reach of {self.reach} tokens and "
                f"{self.num_speculative_blocks} speculative blocks has no meaning; blocks have at least a token, and "
                f"windows and chunks, only they, a reach"
            )

    @property
    def grows(self) -> bool:
        """Whether longer sequences have more blocks, or other ones."""
        return self.kind in ("full", "window", "chunk")

    def first_block(self, num_tokens: int) -> int:
        """The first block that token `num_tokens` looks back to; equal to `end_block` when it looks back to none."""
        if self.kind == "window":
            return max(0, num_tokens - self.reach + 1) // self.block_size
        if self.kind == "chunk":
            return num_tokens // self.reach * self.reach // self.block_size
        return 0

    def unchanged_until(self, num_tokens: int) -> int:
        """Up to so many tokens `first_block` stays as it is."""
        if self.kind == "window":
            return (self.first_block(num_tokens) + 1) * self.block_size + self.reach - 2
        return (num_tokens // self.reach + 1) * self.reach - 1 if self.kind == "chunk" else FOR_EVER

    def end_block(self, num_tokens: int) -> int:
        return ceil_div(num_tokens, self.block_size)

    def fixed_blocks(self, encoder_tokens: int) -> int:
        """Blocks that a sequence holds from its start to its end."""
        if self.kind == "state":
            return 1 + self.num_speculative_blocks
        return ceil_div(encoder_tokens, self.block_size) if self.kind == "encoder" else 0

    def first_prefix_blocks(self, lengths: Lengths) -> Lengths:
        """For prefixes of these many whole blocks' tokens: the first block that must be cached for the prefix to be of
        use; all from it to the prefix's end must be."""
        if self.kind == "window":
            return np.maximum(0, lengths - self.reach + 1) // self.block_size
        if self.kind == "chunk":
            return lengths // self.reach * self.reach // self.block_size
        if self.kind == "state":
            return np.maximum(0, lengths // self.block_size - 1)
        return np.zeros_like(lengths)

    def most_blocks(self, num_tokens: int, step_tokens: int, encoder_tokens: int = 0) -> int:
        """Most blocks held while growing to `num_tokens` in steps of at most `step_tokens`. The plan charges as many;
        one less where a chunk is no multiple of the block size, as vLLM counts."""
        if not self.grows:
            return self.fixed_blocks(encoder_tokens)
        if self.kind == "full":
            return ceil_div(num_tokens, self.block_size)
        if self.kind == "window":  # + 1: it need not start at the first token of a block
            return ceil_div(min(self.reach - 1 + step_tokens, num_tokens), self.block_size) + 1
        begins_inside = self.reach % self.block_size > 0  # a chunk may begin in the middle of a block: one block more
        return ceil_div(min(self.reach + step_tokens, num_tokens), self.block_size) + begins_inside


def lifetimes_of(
    plan: Plan, *, num_speculative_blocks: int | None = None, state_step_tokens: int | None = None
) -> tuple[Lifetime, ...]:
    """By group. `num_speculative_blocks`: states beside the settled one; None: as many as the plan counts for a
    request, which it does when made for a `max_model_len`. `state_step_tokens`: states may be kept for others after
    multiples of it; None: of the group's block size.

    Raises `NotSupported` for a kind of layer without a rule here, and `SpecInvalid` where states have no known number.
    """
    return tuple(
        _lifetime(plan, index, group, num_speculative_blocks, state_step_tokens)
        for index, group in enumerate(plan.groups)
    )


def _lifetime(plan: Plan, index: int, group: GroupPlan, speculative: int | None, step_tokens: int | None) -> Lifetime:
    kind = _KINDS.get(group.kind)
    if kind is None:
        known = ", ".join(_KINDS)
        raise NotSupported(f"group {index} is of kind {group.kind!r}; sequences know {known}; keep its blocks yourself")
    if kind != "state":
        # A window of full attention is only a mask: its blocks stay.
        reaches: Mapping[str, Any] = {"window": group.sliding_window, "chunk": group.attention_chunk_size}
        return Lifetime(kind=kind, block_size=group.block_size, reach=reaches.get(kind) or 0)
    blocks = plan.capacity.blocks_per_request
    if speculative is None and blocks is None:
        raise SpecInvalid(
            f"group {index} keeps states, and the plan, made without max_model_len, does not say how many a request "
            f"has; pass num_speculative_blocks"
        )
    if speculative is None and blocks is not None:
        speculative = blocks[index] - 1
    return Lifetime(kind=kind, block_size=step_tokens or group.block_size, num_speculative_blocks=speculative or 0)
