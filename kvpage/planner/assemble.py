"""From a grouping and a number of blocks to the finished, proven plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from kvpage.latent_specs import SlidingWindowMLASpec
from kvpage.layers import Layer
from kvpage.planner.demand import capacity, waste
from kvpage.planner.groups import Group, Grouping
from kvpage.planner.placement import Placement, ViewMaker, place_slots
from kvpage.plans import GroupPlan, LayerPlan, Plan, TensorView, canonical_id
from kvpage.request import PlanRequest
from kvpage.specs import ChunkedLocalAttentionSpec, FullAttentionSpec, SlidingWindowSpec

NO_CACHE_REASON = "keeps no cache: attends to the prompt only"


def assemble(request: PlanRequest, layers: Sequence[Layer], grouping: Grouping, num_blocks: int) -> Plan:
    """The plan of `layers` (the owners of caches, those that share one, those without), checked and named."""
    placement = place_slots(grouping, num_blocks)
    tensors = dict(_tensors(layers, grouping, placement, num_blocks))
    group_of = {name: index for index, group in enumerate(grouping.groups) for name in group.layers}
    plans: dict[str, LayerPlan] = {}
    for layer in layers:
        if layer.spec is None:
            plans[layer.name] = _without_cache(layer)
        elif layer.kv_sharing_target is None:
            plans[layer.name] = _layer_plan(layer, grouping, group_of[layer.name], tensors[layer.name])
    for layer in layers:
        if layer.kv_sharing_target is not None:
            plans[layer.name] = _sharing(layer, plans[layer.kv_sharing_target])
    ordered = {layer.name: plans[layer.name] for layer in layers}
    sharing: list[list[str]] = [[] for _ in grouping.groups]
    for name, plan in ordered.items():
        if plan.kv_sharing_target is not None and plan.group is not None:
            sharing[plan.group].append(name)
    named_length = request.max_model_len is not None
    verdict = grouping.verdict
    bare = Plan(
        plan_id="",
        strategy=_strategy(request) if verdict is None else verdict.strategy,
        num_blocks=num_blocks,
        bytes_per_block=grouping.bytes_per_block,
        slab_bytes=grouping.bytes_per_block,
        buffer_size_bytes=placement.buffer_size_bytes,
        groups=tuple(_group_plan(group, ordered, sharing[index]) for index, group in enumerate(grouping.groups)),
        layers={name: msgspec.structs.replace(layer, reason="") for name, layer in ordered.items()},
        waste=waste(
            grouping,
            request.lengths() if named_length else None,
            0 if request.memory_bytes is None else request.memory_bytes - placement.buffer_size_bytes,
        ),
        capacity=capacity(grouping, num_blocks, request.lengths(), named_length=named_length),
    )
    bare.check()
    # The id is of the plan without its prose, so that rewording a reason changes no id.
    named = msgspec.structs.replace(bare, plan_id=canonical_id(bare), layers=ordered)
    if verdict is None:
        return named
    return msgspec.structs.replace(named, efficiency=verdict.efficiency, front=verdict.front, rejected=verdict.rejected)


def _strategy(request: PlanRequest) -> str:
    """Where nothing is cached there is nothing to choose, and the rule has the plan."""
    return "unify" if request.strategy == "auto" else request.strategy


def _tensors(
    layers: Sequence[Layer], grouping: Grouping, placement: Placement, num_blocks: int
) -> Iterator[tuple[str, tuple[TensorView, ...]]]:
    by_name = {layer.name: layer for layer in layers}
    make = ViewMaker(num_blocks)
    for group in grouping.groups if grouping.slab_bytes is not None else ():
        stride = grouping.block_bytes(group)
        for name, offset in zip(group.layers, group.offsets_in_block_bytes, strict=True):
            spec = grouping.decided[name].spec
            yield name, make.views(by_name[name], spec, offset, stride, group.blocks_per_slab)
    for slot, names in enumerate(grouping.slots):
        for name in names:
            spec = grouping.decided[name].spec
            if grouping.arrangement == "interleaved":
                yield name, make.interleaved(by_name[name], spec, slot, len(grouping.slots))
            else:
                offset, stride = placement.slot_offsets_bytes[slot], placement.page_strides_bytes[slot]
                yield name, make.views(by_name[name], spec, offset, stride)


def _layer_plan(layer: Layer, grouping: Grouping, group: int, tensors: tuple[TensorView, ...]) -> LayerPlan:
    chosen = grouping.decided[layer.name]
    return LayerPlan(
        name=layer.name,
        kind=layer.kind,
        decision=chosen.decision,
        reason=chosen.reason,
        backend=layer.backend.name if layer.backend else None,
        block_size=chosen.spec.block_size,
        real_page_size_bytes=chosen.spec.real_page_size_bytes,
        page_size_bytes=chosen.spec.page_size_bytes,
        page_size_padded=chosen.spec.page_size_padded,
        kv_sharing_target=None,
        group=group,
        tensors=tensors,
    )


def _sharing(layer: Layer, owner: LayerPlan) -> LayerPlan:
    return msgspec.structs.replace(
        owner,
        name=layer.name,
        decision="share",
        reason=f"reads the cache of layer {owner.name!r}; costs nothing",
        kv_sharing_target=owner.name,
    )


def _without_cache(layer: Layer) -> LayerPlan:
    return LayerPlan(
        name=layer.name,
        kind=layer.kind,
        decision="no_cache",
        reason=NO_CACHE_REASON,
        backend=None,
        block_size=0,
        real_page_size_bytes=0,
        page_size_bytes=0,
        page_size_padded=None,
        kv_sharing_target=None,
        group=None,
        tensors=(),
    )


def _group_plan(group: Group, layers: Mapping[str, LayerPlan], sharing: Sequence[str]) -> GroupPlan:
    spec = group.spec
    windowed = SlidingWindowSpec | SlidingWindowMLASpec | FullAttentionSpec
    chunked = ChunkedLocalAttentionSpec | FullAttentionSpec
    strides = {_block_stride(view) for name in group.layers for view in layers[name].tensors}
    return GroupPlan(
        layers=(*group.layers, *sharing),
        kind=spec.kind,
        sliding_window=spec.sliding_window if isinstance(spec, windowed) else None,
        attention_chunk_size=spec.attention_chunk_size if isinstance(spec, chunked) else None,
        block_size=spec.block_size,
        blocks_per_slab=group.blocks_per_slab,
        page_size_bytes=group.page_size_bytes,
        block_stride_bytes=strides.pop() if len(strides) == 1 else 0,
    )


def _block_stride(view: TensorView) -> int:
    return view.strides_bytes[view.block_axis] * view.kernel_blocks_per_block
