"""The door of the planner: a request in, a proven plan out. Pure: no files, no server, no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvpage.errors import FieldError, NotEnoughMemory, SpecInvalid
from kvpage.layers import Layer
from kvpage.planner.addressing import most_slabs
from kvpage.planner.assemble import assemble
from kvpage.planner.demand import longest_request_tokens, slabs_per_request
from kvpage.planner.groups import Grouping
from kvpage.planner.placement import fit_num_blocks
from kvpage.planner.strategies import group_by_strategy
from kvpage.plans import Plan
from kvpage.request import PlanRequest
from kvpage.request_faults import faults_at_model
from kvpage.request_model import written_out
from kvpage.specs import MAX_BYTES

NULL_BLOCKS = 1  # block 0 is never handed out


def plan(request: Mapping[str, Any] | PlanRequest) -> Plan:
    """Compute the page layout for `request` (docs/layout.md has the format; `model` may stand for its layers).

    Raises `SpecInvalid` for a request that cannot be right, `NotSupported` for what kvpage does not do yet,
    `CannotUnify` and `LayoutUnsupported` where the layers' pages cannot live together, `NotEnoughMemory`.
    """
    with faults_at_model(request):
        written, notes = written_out(request)
        found = _plan(PlanRequest.parse(written))
    return msgspec.structs.replace(found, notes=notes) if notes else found


def _plan(parsed: PlanRequest) -> Plan:
    layers, grouping = group_request(parsed)
    return assemble(parsed, layers, grouping, num_blocks_of(parsed, grouping, layers))


def group_request(parsed: PlanRequest) -> tuple[tuple[Layer, ...], Grouping]:
    """All layers of a model, those without a cache too, and how they are grouped."""
    layers = parsed.expand()
    return layers, group_by_strategy(parsed, layers)


def num_blocks_of(request: PlanRequest, grouping: Grouping, layers: Sequence[Layer]) -> int:
    """Slabs that the request's memory holds and `layers` can address, or that it names.

    Raises `NotEnoughMemory`, or `SpecInvalid` for a number of blocks that passes what can be addressed.
    """
    if not grouping.groups:
        return 1  # vLLM 0.24.0: no layers, no groups, one block
    addressable = most_slabs(grouping, layers)
    if request.memory_bytes is not None:
        fitting = _num_blocks_in(request.memory_bytes, grouping)
        return fitting if addressable is None else _within(fitting, *addressable)
    if addressable is not None and request.num_blocks is not None and request.num_blocks > addressable[0]:
        most, name = addressable
        detail = (
            f"num_blocks is {request.num_blocks}, but the kernels of layer {name!r} compute block id times stride in "
            f"32-bit integers, which end at {most} blocks; lower num_blocks, or choose a strategy with smaller strides"
        )
        raise SpecInvalid(detail, errors=[FieldError("/num_blocks", detail)])
    assert request.num_blocks is not None  # the request's validator
    if request.num_blocks * grouping.bytes_per_block > MAX_BYTES:
        detail = f"num_blocks {request.num_blocks} of {grouping.bytes_per_block} bytes pass 2^62 bytes; lower it"
        raise SpecInvalid(detail, errors=[FieldError("/num_blocks", detail)])
    if request.max_model_len is not None:
        _check_override(request, grouping, request.num_blocks)
    return request.num_blocks


def _within(fitting: int, most: int, name: str) -> int:
    if most <= NULL_BLOCKS:
        detail = (
            f"the kernels of layer {name!r} compute block id times stride in 32-bit integers, which do not reach the "
            f"second block; choose a smaller block size or a strategy with smaller strides"
        )
        raise SpecInvalid(detail)
    return min(fitting, most)


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
    needed = slabs_per_request(grouping.groups, lengths)
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
