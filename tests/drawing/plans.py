"""Plans to draw: of every arrangement that the planner makes, and written by hand where that shows more."""

from __future__ import annotations

from typing import Any

import msgspec

import kvpage
from kvpage.plans import GroupPlan, LayerPlan, Plan, TensorView, Waste
from planner import build

Json = dict[str, Any]


def planned(*layers: Json, **more: Any) -> Plan:
    return kvpage.plan(build.request(*layers, **{"num_blocks": 1000, "max_model_len": 1000} | more))


def arrangements() -> dict[str, Plan]:
    """Small enough that every byte can be walked."""
    small = {"heads": 1, "size": 8, "dtype": "float16"}

    def two(backend: str, **more: Any) -> tuple[Json, Json]:
        wide = build.full("wide.{i}", count=3, backend=backend, **small | {"size": 12} | more)
        return wide, build.sliding("narrow.{i}", count=4, window=64, backend=backend, **small | more)

    alike = {**small, "heads": 2}
    return {
        "regions": planned(*two("flash_attn")),
        "packed": planned(*two("BLHNC")),
        "kernel blocks": planned(build.full("a.{i}", count=2, backend="flashinfer", **small | {"block_size": 128})),
        "planes": planned(build.full("a.{i}", count=3, backend="rocm_attn", **small)),
        "heads outside": planned(build.full("a.{i}", count=3, backend="LHBNC", **alike)),
        "blocks innermost": planned(
            build.full(
                "a.{i}", count=3, **small | {"backend": {"shape": build.ROW_SHAPE, "stride_order": [1, 2, 3, 0]}}
            )
        ),
        "interleaved": planned(build.full("a.{i}", count=5, backend="BHLNC", **alike)),
        "states": planned(
            build.full("a.{i}", count=2, backend="flash_attn", **small),
            build.state("s.{i}", [[3, 8], [5, 8]], ["bfloat16", "float32"], count=3),
            align_hybrid=True,
        ),
        "shared": planned(
            build.full("a.{i}", count=2, backend="flash_attn", **small),
            build.full("b", backend="flash_attn", kv_sharing_target="a.0", **small),
        ),
        "nothing": planned(build.encoder()),
        "nested": nested(num_layers=3, page_bytes=64, blocks_per_slab=7, slab_bytes=1540),
        "one slab": nested(num_layers=1, page_bytes=64, blocks_per_slab=1, slab_bytes=64),
    }


def nested(
    *, num_layers: int, page_bytes: int, blocks_per_slab: int, slab_bytes: int, num_slabs: int = 5, num_groups: int = 2
) -> Plan:
    """Like groups that cut a slab into blocks. Of group g a block has g layers fewer, and its stride stays."""
    layers: dict[str, LayerPlan] = {}
    groups = []
    for index in range(num_groups):
        names = tuple(f"group.{index}.layer.{place}" for place in range(max(1, num_layers - index)))
        for place, name in enumerate(names):
            layers[name] = _layer(
                name, index, place, page_bytes, slab_bytes // blocks_per_slab, num_slabs * blocks_per_slab
            )
        groups.append(
            GroupPlan(
                layers=names, kind="full_attention", sliding_window=index or None, attention_chunk_size=None,
                block_size=16, blocks_per_slab=blocks_per_slab, page_size_bytes=page_bytes,
                block_stride_bytes=slab_bytes // blocks_per_slab,
            )
        )  # fmt: skip
    any_plan = planned(build.full(backend="flash_attn"))
    return msgspec.structs.replace(
        any_plan, plan_id="sha256:" + "0123456789abcdef" * 4, strategy="nested", num_blocks=num_slabs,
        bytes_per_block=slab_bytes, slab_bytes=slab_bytes, buffer_size_bytes=num_slabs * slab_bytes,
        groups=tuple(groups), layers=layers,
        waste=Waste(
            total_bytes=100, live_bytes=70, padding_bytes=20, group_rounding_bytes=6, tail_bytes=4, unallocated_bytes=0
        ),
    )  # fmt: skip


def _layer(name: str, group: int, place: int, page_bytes: int, stride_bytes: int, num_blocks: int) -> LayerPlan:
    view = TensorView(
        name="kv", dtype="uint8", shape=(num_blocks, page_bytes), strides_bytes=(stride_bytes, 1),
        offset_bytes=place * page_bytes, block_axis=0, kernel_blocks_per_block=1,
    )  # fmt: skip
    return LayerPlan(
        name=name, kind="full_attention", decision="keep", reason="", backend="custom", block_size=16,
        real_page_size_bytes=page_bytes, page_size_bytes=page_bytes, page_size_padded=None, kv_sharing_target=None,
        group=group, tensors=(view,),
    )  # fmt: skip


def renamed(plan: Plan, names: list[str]) -> Plan:
    """The plan with its first layers under other names."""
    new = dict(zip(plan.layers, names, strict=False))
    layers = {
        new.get(name, name): msgspec.structs.replace(layer, name=new.get(name, name))
        for name, layer in plan.layers.items()
    }
    groups = tuple(
        msgspec.structs.replace(group, layers=tuple(new.get(name, name) for name in group.layers))
        for group in plan.groups
    )
    return msgspec.structs.replace(plan, layers=layers, groups=groups)
