"""Plans whose tensors are shown to LMCache, and what it has to find out about them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import kvpage
from kvpage.backends import NAMED_LAYOUTS
from kvpage.dtypes import item_size_bytes
from kvpage.plans import Plan

Json = dict[str, Any]
Outcome = Literal["recovered", "misread", "refused"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    layout: str
    """The backend of every layer."""
    pages: Literal["full", "padded 3:2", "padded by hand", "slab", "nested", "cut for the kernels", "one KV head"]
    outcome: Outcome
    """What comes of it in LMCache 0.5.6."""
    says: str = "NHD"
    """`kv_layout`, which the engine tells LMCache."""

    @property
    def name(self) -> str:
        return f"{self.layout} {self.says}, {self.pages}"


def _cases(outcome: Outcome, layouts: str, *pages: Any) -> list[Case]:
    return [
        Case(layout=layout, says=says, pages=page, outcome=outcome)
        for layout, _, says in (one.partition("/") for one in layouts.split())
        for page in pages
    ]


CASES: Mapping[str, Case] = {
    case.name: case
    for case in (
        *_cases("recovered", "LBNHC/NHD LBHNC/HND", "full", "padded 3:2", "one KV head"),
        *_cases("recovered", "BLNHC/BLNHC BLHNC/BLHNC", "full", "padded 3:2", "slab", "nested", "one KV head"),
        *_cases("recovered", "flash_attn/NHD flash_attn/HND rocm_attn/NHD flashmla/NHD", "full"),
        *_cases("recovered", "flash_attn/NHD", "cut for the kernels"),
        *_cases("recovered", "flashmla/NHD", "padded by hand"),
        *_cases("refused", "flash_attn/NHD flash_attn/HND", "padded 3:2"),
        *_cases("refused", "BHLNC/HND", "full"),
        *_cases("misread", "LHBNC/HND", "full"),
        *_cases("misread", "LBNHC/NHD", "padded by hand"),
    )
}


def plan_of(case: Case) -> Plan:
    if case.layout == "flashmla":
        layers = [_latent("a.{i}", count=2, block_size=64)]
        if case.pages == "padded by hand":
            layers[0] |= {"page_size_padded": 80 * 576 * 2}
    elif case.pages in ("padded 3:2", "slab", "nested"):
        layers = [_layer(case, "a.{i}", count=2, head_size=96), _window(case, "b.{i}", count=2)]
    elif case.pages == "padded by hand":
        layers = [_layer(case, "a.{i}", count=2), _layer(case, "b", page_size_padded=32768)]
    elif case.pages == "cut for the kernels":
        layers = [_layer(case, "a.{i}", count=2, block_size=64, kernel_block_sizes=[16])]
    else:
        layers = [_layer(case, "a.{i}", count=3)]
    if case.pages == "nested":  # a state makes a slab of several blocks
        layers.append({"name": "s", "kind": "mamba", "shapes": [[8, 128, 64]], "dtypes": ["float32"]})
    strategy = case.pages if case.pages in ("slab", "nested") else "unify"
    named = {} if case.layout in NAMED_LAYOUTS else {"kv_cache_layout": case.says}
    size = {"num_blocks": 6} if strategy == "unify" else {"memory_bytes": 3 << 20}
    searches: dict[str, Json] = {"slab": {"max_groups": 2}, "nested": {"allocator": "slabs"}}
    more = searches.get(strategy, {})
    return kvpage.plan({"layers": layers, "strategy": strategy, "max_model_len": 16} | named | size | more)


def _layer(case: Case, name: str, **more: Any) -> Json:
    heads = 1 if case.pages == "one KV head" else 4
    layer = {"name": name, "kind": "full_attention", "block_size": 16, "num_kv_heads": heads, "head_size": 64}
    return layer | {"dtype": "bfloat16", "backend": case.layout} | more


def _window(case: Case, name: str, **more: Any) -> Json:
    return _layer(case, name, **more) | {"kind": "sliding_window", "sliding_window": 1024}


def _latent(name: str, **more: Any) -> Json:
    layer = {"name": name, "kind": "mla_attention", "head_size": 576, "dtype": "bfloat16", "backend": "flashmla"}
    return layer | more


def attention(plan: Plan) -> list[str]:
    """Layers that are shown: those with keys and values, in plan order."""
    return [name for name, layer in plan.layers.items() if layer.kind != "mamba"]


def shown(plan: Plan) -> dict[str, list[Any]]:
    """By layer: dtype, shape, strides and offset of its tensor, in bytes."""
    views = {name: plan.layers[name].tensors[0] for name in attention(plan)}
    return {
        name: [view.dtype, list(view.shape), list(view.strides_bytes), view.offset_bytes]
        for name, view in views.items()
    }


def geometry(plan: Plan, case: Case) -> dict[str, Json]:
    """By layer: what LMCache has to say of it, read from the plan. Sizes are elements, as LMCache counts.

    `kv_size` is 1 where K and V are one row, and `head_size` then the width of that row.
    """
    return {name: _geometry(plan, name, case) for name in attention(plan)}


def _geometry(plan: Plan, name: str, case: Case) -> Json:
    layer, view = plan.layers[name], plan.layers[name].tensors[0]
    item = item_size_bytes(view.dtype)
    is_split, is_latent = 2 in view.shape and len(view.shape) == 5, len(view.shape) == 3
    return {
        "num_blocks": view.shape[view.block_axis],
        "block_size": layer.block_size // view.kernel_blocks_per_block,
        "num_kv_heads": 1 if is_latent else view.shape[1 if case.layout in NAMED_LAYOUTS else 3],
        "head_size": view.shape[-1],
        "kv_size": 2 if is_split else 1,
        "item_size_bytes": item,
        "block_stride": None if is_split else view.strides_bytes[view.block_axis] // item,
        "offset_bytes": view.offset_bytes,
        "group": layer.group,
    }
