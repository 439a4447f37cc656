"""Each clause of `Plan.check()` fires, and says so in its own words, on a plan that breaks it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

import kvpage
from kvpage.errors import InternalError
from planner import build
from planner.broken import changed, with_layer, with_view

Json = dict[str, Any]
Damage = Callable[[Any], Any]

KV_FIRST = {"shape": [2, "num_blocks", "block_size", "num_kv_heads", "head_size"]}
SMALL: Json = {"num_blocks": 4, "max_model_len": 1}
TWO = build.request(build.full("a", heads=2, size=4), build.full("b", heads=2, size=4), **SMALL)
GROUPS = build.request(build.full("a", heads=2, size=4), build.sliding("b", heads=2, size=3), **SMALL)
HALVES = build.request(
    build.full("a", heads=2, size=4, backend=KV_FIRST), build.sliding("b", heads=2, size=4, backend=KV_FIRST), **SMALL
)
THREE_HALVES = build.request(
    *(HALVES["layers"]), build.sliding("c", heads=2, size=4, window=16, backend=KV_FIRST), num_blocks=6, max_model_len=1
)
THREE = build.request(build.full("a.{i}", count=3, heads=2, size=4, backend="BHLNC"), **SMALL)
BESIDE = build.request(
    build.full("a", heads=2, size=4, backend="BLNHC"), build.full("b", heads=2, size=2, backend="BLNHC"), **SMALL
)
NESTED = build.request(
    build.full("a.{i}", count=2, heads=2, size=4),
    build.state("b.{i}", [[384]], ["bfloat16"], count=3),
    strategy="nested",
    workload=[{"tokens": 4096}],
    **SMALL,
)  # slabs of 9,216 bytes: 9 blocks of two pages of 512, or 4 blocks of three pages of 768
SHARED = build.request(
    build.full("a", heads=2, size=4), build.full("b", heads=2, size=4, kv_sharing_target="a"), **SMALL
)


def view(name: str, **changes: Any) -> Damage:
    return lambda plan: with_view(plan, name, **changes)


def layer(name: str, **changes: Any) -> Damage:
    return lambda plan: with_layer(plan, name, **changes)


def whole(**changes: Any) -> Damage:
    return lambda plan: replace(plan, **changes)


def group(index: int, **changes: Any) -> Damage:
    def apply(plan: Any) -> Any:
        groups = list(plan.groups)
        groups[index] = replace(groups[index], **changes)
        return replace(plan, groups=tuple(groups))

    return apply


def stride(name: str, axis: int, value: int) -> Damage:
    return lambda plan: with_view(
        plan, name, strides_bytes=changed(plan.layers[name].tensors[0].strides_bytes, axis, value)
    )


def blocks_of_three(name: str, **changes: Any) -> Damage:
    """One block less in the view, so that it can move without leaving the buffer, and in the plan."""

    def apply(plan: Any) -> Any:
        for other in plan.layers:
            shape = plan.layers[other].tensors[0].shape
            plan = with_view(plan, other, shape=changed(shape, plan.layers[other].tensors[0].block_axis, 3))
        bytes_per_block = plan.buffer_size_bytes // 3
        sizes = {"bytes_per_block": bytes_per_block, "slab_bytes": bytes_per_block}
        return with_view(replace(plan, num_blocks=3, **sizes), name, **changes)

    return apply


CLAUSES: list[tuple[str, Json, Damage, str]] = [
    ("a layer in no group", TWO, group(0, layers=("a",)), "do not hold each layer with a cache once"),
    ("a layer in a group twice", TWO, group(0, layers=("a", "b", "b")), "do not hold each layer with a cache once"),
    ("a layer of another group", GROUPS, layer("b", group=0), "is listed in group 1 but names another"),
    ("another name", TWO, lambda plan: with_layer(plan, "a", name="c"), "listed under another name"),
    ("no blocks", TWO, whole(num_blocks=0), "bytes for 0 blocks"),
    ("a buffer too small for its blocks", TWO, whole(bytes_per_block=1025, slab_bytes=1025), "bytes for 4 blocks"),
    ("two sizes of a slab", TWO, whole(slab_bytes=1025), "stated as two numbers"),
    ("a buffer with room to spare", TWO, whole(buffer_size_bytes=4096 + 15), "bytes for 4 blocks"),
    ("a sharer of nothing", SHARED, layer("b", kv_sharing_target="c"), "shares the cache of 'c'"),
    ("a sharer of a sharer", SHARED, layer("a", kv_sharing_target="b"), "shares the cache of"),
    ("a sharer with other blocks", SHARED, layer("b", block_size=7), "shares the cache of 'a' but differs"),
    ("a sharer that lies elsewhere", SHARED, view("b", offset_bytes=2), "shares the cache of 'a' but differs"),
    ("a group without tensors", TWO, layer("b", tensors=()), "has a group or tensors, not both"),
    ("a page smaller than its data", TWO, layer("b", page_size_bytes=511), "pages of 511 bytes for 512 of data"),
    ("data of less than nothing", TWO, layer("b", real_page_size_bytes=-1), "bytes for -1 of data"),
    ("padding to another page", TWO, layer("b", page_size_padded=1024), "padded to others"),
    ("data that the views have not", TWO, layer("b", real_page_size_bytes=500), "keeps 512 bytes a block"),
    ("an uneven offset", TWO, view("b", offset_bytes=2049), "offset 2049, not a multiple of 2"),
    ("a view before the buffer", TWO, view("a", offset_bytes=-2), "outside the buffer"),
    ("a view behind the buffer", TWO, view("b", offset_bytes=2050), "outside the buffer"),
    ("a stride too few", TWO, view("a", strides_bytes=(512, 32, 16)), "ranks that differ"),
    ("no such axis", TWO, view("a", block_axis=4), "ranks that differ"),
    ("an axis before the first", TWO, view("a", block_axis=-1), "ranks that differ"),
    ("an empty axis", TWO, view("a", shape=(4, 0, 2, 8)), "empty axis"),
    ("a stride of zero", TWO, stride("a", 3, 0), "not positive multiples"),
    ("a stride backwards", TWO, stride("a", 0, -512), "not positive multiples"),
    ("an uneven stride", TWO, stride("a", 0, 513), "not positive multiples"),
    ("too few blocks", TWO, view("a", shape=(3, 16, 2, 8)), "does not have 4 blocks of 1 kernel blocks"),
    ("a split of blocks that is none", TWO, view("a", kernel_blocks_per_block=2), "does not have 4 blocks of 2"),
    ("no kernel blocks", TWO, view("a", kernel_blocks_per_block=0), "blocks of 0 kernel blocks"),
    ("an alias", TWO, stride("a", 1, 16), "one address by two index tuples"),
    ("halves at other places", HALVES, blocks_of_three("b", offset_bytes=64), "differ in layout"),
    ("halves in one group", THREE_HALVES, lambda plan: one_group(plan), "of one group share bytes"),
    ("other strides", GROUPS, stride("b", 0, 528), "by different strides"),
    ("pages longer than their distance", GROUPS, stride("b", 0, 400), "more than its blocks are apart"),
    ("a page over the next", GROUPS, blocks_of_three("b", offset_bytes=144), "slab i of one meets slab i + 1"),
    ("uneven distances", THREE, view("a.1", offset_bytes=128), "at uneven distances"),
    ("even distances, too close", THREE, lambda plan: closer(plan, 128), "share bytes"),
    ("no blocks in a slab", NESTED, group(0, blocks_per_slab=0), "has 0 blocks in a slab"),
    ("a slab cut unevenly", NESTED, group(0, block_stride_bytes=512), "blocks of 512"),
    ("blocks that are no part of a slab", NESTED, stride("a.0", 0, 1022), "steps by 1022 bytes"),
    ("a block behind its slab", NESTED, lambda plan: spilled(plan), "in its first slab"),
    ("layers of a group over each other", NESTED, view("a.1", offset_bytes=256), "of one group share bytes"),
    ("packed pages over each other", BESIDE, view("b", offset_bytes=510), "views a/kv and b/kv of one group share"),
]


def spilled(plan: Any) -> Any:
    """A layer two bytes later than it may be, in a buffer that has room behind its last slab."""
    return with_view(replace(plan, buffer_size_bytes=plan.buffer_size_bytes + 7), "a.1", offset_bytes=514)


def one_group(plan: Any) -> Any:
    """c moved to the group of b, over the same bytes; a is of another group."""
    plan = with_layer(plan, "c", group=1)
    return replace(plan, groups=(plan.groups[0], replace(plan.groups[1], layers=("b", "c"))))


def closer(plan: Any, step: int) -> Any:
    for place in range(3):
        plan = with_view(plan, f"a.{place}", offset_bytes=place * step)
    return plan


@pytest.mark.parametrize(("what", "request_", "damage", "words"), CLAUSES, ids=[clause[0] for clause in CLAUSES])
def test_a_clause_fires(what: str, request_: Json, damage: Damage, words: str) -> None:
    plan = kvpage.plan(request_)
    plan.check()
    with pytest.raises(InternalError) as caught:
        damage(plan).check()
    assert words in caught.value.message
