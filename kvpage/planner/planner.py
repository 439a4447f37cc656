"""The door of the planner: a request in, a proven plan out. Pure: no files, no server, no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from kvpage.errors import FieldError, NotEnoughMemory, SpecInvalid
from kvpage.layers import Layer, check_layouts
from kvpage.planner.align import align_hybrid, with_alignment
from kvpage.planner.demand import blocks_per_request, capacity, longest_request_tokens, waste
from kvpage.planner.grouping import Group, Grouping, group_layers
from kvpage.planner.placement import ViewMaker, check_sharing, fit_num_blocks, place_slots
from kvpage.plans import GroupPlan, LayerPlan, Plan, canonical_id
from kvpage.request import PlanRequest
from kvpage.specs import MAX_BYTES, ChunkedLocalAttentionSpec, FullAttentionSpec, SlidingWindowSpec

NULL_BLOCKS = 1  # block 0 is never handed out


def plan(request: Mapping[str, Any] | PlanRequest) -> Plan:
    """Compute the page layout for `request` (docs/layout.md has the format).

    Raises `SpecInvalid` for a request that cannot be right, `NotSupported` for what kvpage does not do yet,
    `CannotUnify` and `LayoutUnsupported` where the layers' pages cannot live together, `NotEnoughMemory`.
    """
    parsed = PlanRequest.parse(request)
    asked = parsed.expand()
    layers = align_hybrid(asked) if parsed.align_hybrid else asked
    check_layouts(layers)
    grouping = group_layers(layers)
    if layers is not asked:
        grouping = _explained(grouping, asked, layers)
    by_name = {layer.name: layer for layer in layers}
    check_sharing(grouping, by_name)
    num_blocks = _num_blocks(parsed, grouping)
    return _assemble(parsed, layers, grouping, num_blocks)


def _explained(grouping: Grouping, asked: Sequence[Layer], aligned: Sequence[Layer]) -> Grouping:
    """The same grouping; decisions and reasons cover the alignment before it as well."""
    decided = dict(grouping.decided)
    for before, after in zip(asked, aligned, strict=True):
        if before.spec is not None and before.spec != after.spec:
            decided[before.name] = with_alignment(before.spec, decided[before.name])
    return replace(grouping, decided=decided)


def _num_blocks(request: PlanRequest, grouping: Grouping) -> int:
    if not grouping.groups:
        return 1  # vLLM 0.24.0: no layers, no groups, one block
    if request.memory_bytes is not None:
        return _num_blocks_in(request.memory_bytes, grouping)
    assert request.num_blocks is not None  # the request's validator
    if request.num_blocks * grouping.bytes_per_block > MAX_BYTES:
        detail = f"num_blocks {request.num_blocks} of {grouping.bytes_per_block} bytes pass 2^62 bytes; lower it"
        raise SpecInvalid(detail, errors=[FieldError("/num_blocks", detail)])
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
    """A number of blocks set by hand must hold one request of the length set by hand."""
    if request.max_model_len is None:
        return
    needed = NULL_BLOCKS + sum(
        blocks_per_request(grouping.groups, request.max_model_len, request.max_num_batched_tokens)
    )
    if num_blocks < needed:
        longest = longest_request_tokens(grouping.groups, num_blocks, request.max_num_batched_tokens)
        raise NotEnoughMemory(
            f"num_blocks is {num_blocks}, but one request of max_model_len {request.max_model_len} tokens and the null "
            f"block need {needed}; the longest request that fits has {longest} tokens",
            details={
                "needed_bytes": needed * grouping.bytes_per_block,
                "available_bytes": num_blocks * grouping.bytes_per_block,
                "longest_request_tokens": longest,
            },
        )


def _assemble(request: PlanRequest, layers: Sequence[Layer], grouping: Grouping, num_blocks: int) -> Plan:
    placement = place_slots(grouping, num_blocks)
    offsets = {
        name: offset
        for names, offset in zip(grouping.slots, placement.slot_offsets_bytes, strict=True)
        for name in names
    }
    group_of = {name: index for index, group in enumerate(grouping.groups) for name in group.layers}
    make = ViewMaker(num_blocks)
    plans: dict[str, LayerPlan] = {}
    reasons: dict[str, str] = {}
    for layer in layers:
        if layer.spec is None:
            plans[layer.name], reasons[layer.name] = _without_cache(layer), "keeps no cache: attends to the prompt only"
            continue
        chosen = grouping.decided[layer.name]
        reasons[layer.name] = chosen.reason
        plans[layer.name] = LayerPlan(
            name=layer.name,
            kind=layer.kind,
            decision=chosen.decision,
            reason="",
            backend=layer.backend.name if layer.backend else None,
            block_size=chosen.spec.block_size,
            real_page_size_bytes=chosen.spec.real_page_size_bytes,
            page_size_bytes=chosen.spec.page_size_bytes,
            page_size_padded=chosen.spec.page_size_padded,
            group=group_of[layer.name],
            tensors=make.views(layer, chosen.spec, offsets[layer.name]),
        )
    unallocated = 0 if request.memory_bytes is None else request.memory_bytes - placement.buffer_size_bytes
    bare = Plan(
        plan_id="",
        strategy=request.strategy,
        num_blocks=num_blocks,
        bytes_per_block=grouping.bytes_per_block,
        slab_bytes=grouping.bytes_per_block,
        buffer_size_bytes=placement.buffer_size_bytes,
        groups=tuple(_group_plan(group, grouping) for group in grouping.groups),
        layers=plans,
        waste=waste(grouping, request.max_model_len, request.max_num_batched_tokens, unallocated),
        capacity=capacity(grouping, num_blocks, request.max_model_len, request.max_num_batched_tokens),
    )
    bare.check()
    return _with_prose(bare, reasons)


def _with_prose(bare: Plan, reasons: Mapping[str, str]) -> Plan:
    """The id is of the plan without its prose, so that rewording a reason changes no id."""
    layers = {name: msgspec.structs.replace(layer, reason=reasons[name]) for name, layer in bare.layers.items()}
    return msgspec.structs.replace(bare, plan_id=canonical_id(bare), layers=layers)


def _without_cache(layer: Layer) -> LayerPlan:
    return LayerPlan(
        name=layer.name,
        kind=layer.kind,
        decision="no_cache",
        reason="",
        backend=None,
        block_size=0,
        real_page_size_bytes=0,
        page_size_bytes=0,
        page_size_padded=None,
        group=None,
        tensors=(),
    )


def _group_plan(group: Group, grouping: Grouping) -> GroupPlan:
    strides = {grouping.decided[name].spec.page_size_bytes for name in group.layers}
    spec = group.spec
    window = spec.sliding_window if isinstance(spec, SlidingWindowSpec | FullAttentionSpec) else None
    chunk = spec.attention_chunk_size if isinstance(spec, ChunkedLocalAttentionSpec | FullAttentionSpec) else None
    return GroupPlan(
        layers=group.layers,
        kind=spec.kind,
        sliding_window=window,
        attention_chunk_size=chunk,
        block_size=spec.block_size,
        blocks_per_slab=1,
        page_size_bytes=group.page_size_bytes,
        block_stride_bytes=strides.pop() if len(strides) == 1 else 0,
    )
