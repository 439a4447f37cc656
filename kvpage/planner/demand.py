"""Blocks and bytes that a request needs: capacity and waste of a grouping."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from kvpage.errors import FieldError, SpecInvalid
from kvpage.planner.groups import Group, Grouping
from kvpage.plans import Capacity, Waste
from kvpage.specs import MAX_BYTES, LayerSpec, Lengths, ceil_div


def blocks_per_request(groups: Sequence[Group], lengths: Lengths) -> tuple[int, ...]:
    """Most blocks one request of `lengths.max_model_len` tokens holds, group by group."""
    return tuple(group.spec.max_blocks(lengths) for group in groups)


def slabs_per_request(groups: Sequence[Group], lengths: Lengths) -> int:
    """Slabs that one request alone takes: of each group as many as hold its blocks."""
    return sum(ceil_div(group.spec.max_blocks(lengths), group.blocks_per_slab) for group in groups)


def longest_request_tokens(groups: Sequence[Group], num_blocks: int, lengths: Lengths) -> int | None:
    """Longest request that fits into `num_blocks` slabs of which one holds the null block; None when all lengths do.

    `lengths.max_model_len` is not looked at.
    """
    alike = Counter((group.spec, group.blocks_per_slab) for group in groups)

    def fits(tokens: int) -> bool:
        tried = replace(lengths, max_model_len=tokens)
        taken = (count * ceil_div(spec.max_blocks(tried), q) for (spec, q), count in alike.items())
        return sum(taken) < num_blocks

    if fits(MAX_BYTES):
        return None
    low, high = 0, 1  # low fits, or nothing does; high does not after the first loop
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def capacity(grouping: Grouping, num_blocks: int, lengths: Lengths, *, named_length: bool) -> Capacity:
    """What fits into `num_blocks` blocks. `named_length`: whether the request named a `max_model_len`.

    Raises `SpecInvalid` when a request's bytes pass 2^62.
    """
    blocks = request_bytes = concurrency = None
    if named_length:
        blocks = blocks_per_request(grouping.groups, lengths)
        request_bytes = _request_bytes(grouping, blocks)
        if request_bytes > MAX_BYTES:
            detail = f"one request of max_model_len {lengths.max_model_len} tokens needs more than 2^62 bytes; lower it"
            raise SpecInvalid(detail, errors=[FieldError("/max_model_len", detail)])
        slabs = sum(Fraction(n, group.blocks_per_slab) for n, group in zip(blocks, grouping.groups, strict=True))
        concurrency = float(num_blocks / slabs) if slabs else None
    return Capacity(
        max_model_len=lengths.max_model_len if named_length else None,
        max_num_batched_tokens=lengths.max_num_batched_tokens,
        blocks_per_request=blocks,
        request_bytes=request_bytes,
        max_concurrency=concurrency,
        longest_request_tokens=longest_request_tokens(grouping.groups, num_blocks, lengths),
        bytes_per_token=math.fsum(
            grouping.block_bytes(group) / group.spec.block_size for group in grouping.groups if _grows_for_ever(group)
        ),
        fixed_request_bytes=_fixed_bytes(grouping, lengths),
    )


def _request_bytes(grouping: Grouping, blocks: Sequence[int]) -> int:
    if grouping.slab_bytes is None:
        return sum(blocks) * grouping.charged_bytes_per_block
    return sum(n * grouping.block_bytes(group) for n, group in zip(blocks, grouping.groups, strict=True))


def _grows_for_ever(group: Group) -> bool:
    return group.spec.grows_with_request and group.spec.keeps_at_most_tokens is None


def _fixed_bytes(grouping: Grouping, lengths: Lengths) -> int:
    """Of the groups that stop growing, once they have."""
    longest = replace(lengths, max_model_len=MAX_BYTES)
    stopping = (group for group in grouping.groups if not _grows_for_ever(group))
    return min(MAX_BYTES, sum(group.spec.max_blocks(longest) * grouping.block_bytes(group) for group in stopping))


def waste(grouping: Grouping, lengths: Lengths | None, unallocated_bytes: int) -> Waste:
    """Split the bytes of one request of `lengths`, or of one block of each group without any."""
    live = padding = rounding = tail = 0
    for group in grouping.groups:
        blocks = 1 if lengths is None else group.spec.max_blocks(lengths)
        specs = [grouping.decided[name].spec for name in group.layers]
        pages = sum(spec.page_size_bytes for spec in specs)
        real = sum(spec.real_page_size_bytes for spec in specs)
        unfilled = sum(_unfilled_bytes(spec, blocks, lengths) for spec in specs)
        padding += blocks * (pages - real)
        rounding += blocks * (grouping.block_bytes(group) - pages)
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


def _unfilled_bytes(spec: LayerSpec, blocks: int, lengths: Lengths | None) -> int:
    """Rows of `blocks` blocks that the request does not fill."""
    if lengths is None or not spec.is_attention:
        return 0
    rows_needed = ceil_div(spec.max_tokens_held(lengths) * spec.storage_block_size, spec.block_size)
    return (blocks * spec.storage_block_size - rows_needed) * (spec.real_page_size_bytes // spec.storage_block_size)
