"""The door of the planner: a request in, a proven plan out. Pure: no files, no server, no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvpage.errors import FieldError, NotEnoughMemory, SpecInvalid
from kvpage.layers import Layer, check_layouts
from kvpage.planner.align import align_hybrid, alignment_offered, is_hybrid, with_alignment, with_offer
from kvpage.planner.arrangement import arrange
from kvpage.planner.assemble import assemble
from kvpage.planner.demand import blocks_per_request, longest_request_tokens
from kvpage.planner.grouping import group_layers
from kvpage.planner.groups import Grouping
from kvpage.planner.placement import fit_num_blocks
from kvpage.plans import Plan
from kvpage.request import PlanRequest
from kvpage.request_model import faults_at_model
from kvpage.specs import MAX_BYTES

NULL_BLOCKS = 1  # block 0 is never handed out


def plan(request: Mapping[str, Any] | PlanRequest) -> Plan:
    """Compute the page layout for `request` (docs/layout.md has the format; `model` may stand for its layers).

    Raises `SpecInvalid` for a request that cannot be right, `NotSupported` for what kvpage does not do yet,
    `CannotUnify` and `LayoutUnsupported` where the layers' pages cannot live together, `NotEnoughMemory`.
    """
    with faults_at_model(request):
        return _plan(PlanRequest.parse(request))


def _plan(parsed: PlanRequest) -> Plan:
    layers, grouping = group_request(parsed)
    return assemble(parsed, layers, grouping, num_blocks_of(parsed, grouping))


def group_request(parsed: PlanRequest) -> tuple[tuple[Layer, ...], Grouping]:
    """All layers of a model, those without a cache too, and how they are grouped: what does not depend on memory."""
    asked = parsed.expand()
    layers = align_hybrid(asked) if parsed.align_hybrid else asked
    check_layouts(layers)
    owners = [layer for layer in layers if layer.kv_sharing_target is None]
    is_unaligned = not parsed.align_hybrid and is_hybrid(layers)
    with alignment_offered(is_unaligned):
        grouping = arrange(group_layers(owners), owners, layered=parsed.layered)
    if layers is not asked:
        grouping = _explained(grouping, asked, layers)
    elif is_unaligned:
        grouping = replace(grouping, decided=with_offer(grouping.decided))
    return layers, grouping


def _explained(grouping: Grouping, asked: Sequence[Layer], aligned: Sequence[Layer]) -> Grouping:
    """The same grouping; decisions and reasons cover the alignment before it as well."""
    decided = dict(grouping.decided)
    for before, after in zip(asked, aligned, strict=True):
        if before.spec is not None and before.spec != after.spec and before.name in decided:
            decided[before.name] = with_alignment(before.spec, decided[before.name])
    return replace(grouping, decided=decided)


def num_blocks_of(request: PlanRequest, grouping: Grouping) -> int:
    """Blocks that the request's memory holds, or that it names. Raises `NotEnoughMemory` or `SpecInvalid`."""
    if not grouping.groups:
        return 1  # vLLM 0.24.0: no layers, no groups, one block
    if request.memory_bytes is not None:
        return _num_blocks_in(request.memory_bytes, grouping)
    assert request.num_blocks is not None  # the request's validator
    if request.num_blocks * grouping.bytes_per_block > MAX_BYTES:
        detail = f"num_blocks {request.num_blocks} of {grouping.bytes_per_block} bytes pass 2^62 bytes; lower it"
        raise SpecInvalid(detail, errors=[FieldError("/num_blocks", detail)])
    if request.max_model_len is not None:
        _check_override(request, grouping, request.num_blocks)
    return request.num_blocks


def _num_blocks_in(memory_bytes: int, grouping: Grouping) -> int:
    num_blocks = fit_num_blocks(grouping, memory_bytes)
    needed = (NULL_BLOCKS + 1) * grouping.bytes_per_block
    if num_blocks <= NULL_BLOCKS:
        raise NotEnoughMemory(
            f"memory_bytes is {memory_bytes}; the null block and one block, of {grouping.bytes_per_block} bytes each, "
            f"need {needed}",
            details={"needed_bytes": needed, "available_bytes": memory_bytes, "longest_request_tokens": 0},
        )
    return num_blocks


def _check_override(request: PlanRequest, grouping: Grouping, num_blocks: int) -> None:
    """A number of blocks set by hand must hold one request of the length set by hand, counted as vLLM counts."""
    lengths = request.lengths()
    needed = sum(blocks_per_request(grouping.groups, lengths))
    if num_blocks < needed:
        longest = longest_request_tokens(grouping.groups, num_blocks, lengths)
        detail = (
            f"num_blocks is {num_blocks}, but one request of max_model_len {lengths.max_model_len} tokens needs "
            f"{needed}; the longest request that fits beside the null block has {longest} tokens"
        )
        raise NotEnoughMemory(
            detail,
            details={
                "needed_bytes": needed * grouping.bytes_per_block,
                "available_bytes": num_blocks * grouping.bytes_per_block,
                "longest_request_tokens": longest,
            },
            errors=[FieldError("/num_blocks", detail)],
        )
