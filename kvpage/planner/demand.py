"""Blocks and bytes that a request needs: capacity and waste of a grouping."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvpage.errors import FieldError, SpecInvalid
from kvpage.planner.grouping import Group, Grouping
from kvpage.plans import Capacity, Waste
from kvpage.specs import MAX_BYTES, LayerSpec


def blocks_per_request(groups: Sequence[Group], max_model_len: int, max_num_batched_tokens: int) -> tuple[int, ...]:
    """Most blocks one request of `max_model_len` tokens holds, group by group."""
    return tuple(group.spec.max_blocks(max_model_len, max_num_batched_tokens) for group in groups)


def longest_request_tokens(groups: Sequence[Group], num_blocks: int, max_num_batched_tokens: int) -> int | None:
    """Longest request that fits into `num_blocks` blocks of which one is the null block; None when all lengths do."""
    num_groups = Counter(group.spec for group in groups)

    def fits(tokens: int) -> bool:
        blocks = sum(count * spec.max_blocks(tokens, max_num_batched_tokens) for spec, count in num_groups.items())
        return blocks < num_blocks

    if fits(MAX_BYTES):
        return None
    low, high = 0, 1  # low fits (0 always does), high does not after the first loop
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def capacity(grouping: Grouping, num_blocks: int, max_model_len: int | None, max_num_batched_tokens: int) -> Capacity:
    """What fits into `num_blocks` blocks. Raises `SpecInvalid` when a request's bytes pass 2^62."""
    blocks = request_bytes = concurrency = None
    if max_model_len is not None:
        blocks = blocks_per_request(grouping.groups, max_model_len, max_num_batched_tokens)
        request_bytes = sum(blocks) * grouping.bytes_per_block
        if request_bytes > MAX_BYTES:
            detail = f"one request of max_model_len {max_model_len} tokens needs more than 2^62 bytes; lower it"
            raise SpecInvalid(detail, errors=[FieldError("/max_model_len", detail)])
        concurrency = num_blocks / sum(blocks) if sum(blocks) else None
    return Capacity(
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        blocks_per_request=blocks,
        request_bytes=request_bytes,
        max_concurrency=concurrency,
        longest_request_tokens=longest_request_tokens(grouping.groups, num_blocks, max_num_batched_tokens),
    )


def waste(grouping: Grouping, max_model_len: int | None, max_num_batched_tokens: int, unallocated_bytes: int) -> Waste:
    """Split the bytes of one request of `max_model_len` tokens, or of one block of each group without a length."""
    live = padding = rounding = tail = 0
    for group in grouping.groups:
        blocks = 1 if max_model_len is None else group.spec.max_blocks(max_model_len, max_num_batched_tokens)
        specs = [grouping.decided[name].spec for name in group.layers]
        pages = sum(spec.page_size_bytes for spec in specs)
        real = sum(spec.real_page_size_bytes for spec in specs)
        unfilled = sum(_unfilled_bytes(spec, blocks, max_model_len, max_num_batched_tokens) for spec in specs)
        padding += blocks * (pages - real)
        rounding += blocks * (grouping.bytes_per_block - pages)
        tail += unfilled
        live += blocks * real - unfilled
    return Waste(
        total_bytes=live + padding + rounding + tail,
        live_bytes=live,
        padding_bytes=padding,
        group_rounding_bytes=rounding,
        tail_bytes=tail,
        unallocated_bytes=unallocated_bytes,
    )


def _unfilled_bytes(spec: LayerSpec, blocks: int, max_model_len: int | None, max_num_batched_tokens: int) -> int:
    if max_model_len is None or not spec.is_attention:
        return 0
    tokens = spec.max_tokens_held(max_model_len, max_num_batched_tokens)
    return (blocks * spec.block_size - tokens) * (spec.real_page_size_bytes // spec.block_size)
