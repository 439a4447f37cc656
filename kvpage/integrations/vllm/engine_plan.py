"""The plan of a pool that is laid out just as a vLLM engine lays out its own buffer, from its `KVCacheConfig`.

Read from `vllm/v1/kv_cache_interface.py` and `vllm/v1/core/kv_cache_utils.py` of vLLM 0.32.0: one buffer of bytes, in
which layer l of a `KVCacheTensor` begins at `offset + l * layer_stride` and its blocks are `block_stride` apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvpage.errors import LayoutUnsupported, NotSupported, shorten
from kvpage.integrations.vllm.importing import layers_from_specs
from kvpage.planner.planner import plan as make_plan
from kvpage.plans import Plan

Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class EnginePlan:
    request: Fields
    """A plan request; its plan is `plan`."""
    plan: Plan


@dataclass(frozen=True, slots=True)
class Page:
    """Where vLLM puts block 0 of a layer, and how far its blocks are apart."""

    offset_bytes: int
    stride_bytes: int


def engine_plan(config: Any, backends: Mapping[str, Any]) -> EnginePlan:
    """`config`: vLLM's `KVCacheConfig`. `backends`: the backend class of each layer, in the model's order.

    Raises as `layers_from_specs` and `kvpage.plan`, and `LayoutUnsupported` where the plan's buffer or a layer's place
    in it is not the engine's.
    """
    specs = specs_of(config, backends)
    if not specs:
        raise NotSupported("the model keeps no KV cache, so there is nothing to put into a pool; leave kvpage out")
    chosen = {name: backends[name] for name, spec in specs.items() if name in backends and not _is_state(spec)}
    layers = layers_from_specs(specs, backends=chosen, kv_cache_layout=config.kv_cache_layout)
    request: Fields = {"layers": layers, "strategy": "unify", "num_blocks": config.num_blocks}
    plan = make_plan(request)
    _check_places(plan, config)
    return EnginePlan(request, plan)


def specs_of(config: Any, order: Sequence[str] | Mapping[str, Any]) -> Fields:
    """Each layer's own spec by name: in `order`, and what is not in it after that."""
    found: Fields = {}
    for group in config.kv_cache_groups:
        held = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        found |= {name: group.kv_cache_spec if held is None else held[name] for name in group.layer_names}
    names = [name for name in order if name in found]
    return {name: found[name] for name in (*names, *(name for name in found if name not in names))}


def _is_state(spec: Any) -> bool:
    return any(owner.__name__ == "MambaSpec" for owner in type(spec).__mro__)


def _check_places(plan: Plan, config: Any) -> None:
    """Raises `LayoutUnsupported` unless every layer begins and steps in the plan's buffer as it does in vLLM's."""
    sizes = {tensor.size for tensor in config.kv_cache_tensors}
    if sizes != {plan.buffer_size_bytes}:
        raise LayoutUnsupported(
            f"vLLM keeps its cache in {_listed(sizes)} bytes, the plan of its layers has {plan.buffer_size_bytes}: "
            f"kvpage lays these layers out in another way; report the model",
            details={"sizes_bytes": sorted(sizes), "planned_bytes": plan.buffer_size_bytes},
        )
    for name, page in _pages(config):
        planned = page_of(plan, name)
        if planned != page:
            raise LayoutUnsupported(
                f"layer {shorten(name)!r} begins at byte {page.offset_bytes} in vLLM, with blocks {page.stride_bytes} "
                f"bytes apart, and in the plan at {planned.offset_bytes}, {planned.stride_bytes} apart: kvpage lays "
                f"these layers out in another way; report the model",
                details={"layer": shorten(name)},
            )


def _listed(sizes: set[int]) -> str:
    return " and ".join(map(str, sorted(sizes))) or "no"


def _pages(config: Any) -> Iterator[tuple[str, Page]]:
    for tensor in config.kv_cache_tensors:
        for place, name in enumerate(tensor.layers):
            yield name, Page(tensor.offset + place * tensor.layer_stride, tensor.block_stride)


def page_of(plan: Plan, layer: str) -> Page:
    """Raises `LayoutUnsupported` for a layer that has no page in the plan."""
    planned = plan.layers.get(layer)
    if planned is None or not planned.tensors:
        raise LayoutUnsupported(f"vLLM keeps a cache for layer {shorten(layer)!r}, the plan keeps none")
    view = planned.tensors[0]
    return Page(view.offset_bytes, view.strides_bytes[view.block_axis] * view.kernel_blocks_per_block)
