"""`Plan.check()` fires on every broken plan, and agrees with a check that lists every byte."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

import kvpage
from kvpage.errors import InternalError, KvpageError
from planner import build, comparison, view_oracle
from planner.broken import changed, with_layer, with_view
from planner.random_requests import small_request

Json = dict[str, Any]


ONE_SPEC = build.request(
    build.full("a", heads=2, size=4), build.full("b", heads=2, size=4), num_blocks=4, max_model_len=1
)
PADDED = build.request(
    build.full("a", heads=2, size=4), build.sliding("b", heads=2, size=3), num_blocks=4, max_model_len=1
)  # pages of 512 and 384 bytes over the same buffer
GAPS = build.request(
    build.full("a", heads=2, size=1, page_size_padded=512),
    build.sliding("b", heads=2, size=1, page_size_padded=512),
    num_blocks=4,
    max_model_len=1,
)  # 128 bytes of data in pages of 512
STATES = build.request(build.state("s", [[4], [2]], ["bfloat16", "float32"]), num_blocks=4)  # 8 + 8 bytes


PACKED = build.request(
    build.full("a", heads=2, size=4, backend="BLNHC"),
    build.full("b", heads=2, size=2, backend="BLHNC"),
    build.sliding("c", heads=2, size=4, backend="BLNHC"),
    num_blocks=4,
    max_model_len=1,
)  # pages of 512 bytes, b's scaled to that: blocks of 512, a over b over c
BESIDE = build.request(
    build.full("a", heads=2, size=4, backend="BLNHC"),
    build.full("b", heads=2, size=2, backend="BLHNC"),
    num_blocks=4,
    max_model_len=1,
)  # pages of 512 and 256 bytes, side by side in blocks of 768
INTERLEAVED = build.request(
    build.full("a.{i}", count=3, heads=2, size=4, backend="BHLNC"), num_blocks=4, max_model_len=1
)  # a head's 256 bytes of each layer, then the next head's: blocks of 1,536
LAYERED = build.request(
    build.full("a.{i}", count=3, heads=2, size=4, backend=build.pads(build.ROW_SHAPE)),
    num_blocks=4,
    max_model_len=1,
    layered=True,
)  # blocks of 1,536, in each a page of 512 for each layer
SHARED = build.request(
    build.full("a", heads=2, size=4),
    build.full("b", heads=2, size=4),
    build.full("c", heads=2, size=4, kv_sharing_target="b"),
    num_blocks=4,
    max_model_len=1,
)


def test_the_plans_broken_below_are_right_as_they_are() -> None:
    for request in (ONE_SPEC, PADDED, GAPS, STATES, PACKED, BESIDE, INTERLEAVED, LAYERED, SHARED):
        plan = kvpage.plan(request)
        plan.check()
        assert view_oracle.faults(plan, comparison.block_axes(request)) == set()


def assert_broken(plan: Any, request: Json, fault: str) -> None:
    """The slow check names the fault; the plan's own check must fire."""
    assert fault in view_oracle.faults(plan, comparison.block_axes(request))
    with pytest.raises(InternalError):
        plan.check()


def test_a_view_beyond_the_buffer() -> None:
    plan = kvpage.plan(ONE_SPEC)
    view = plan.layers["b"].tensors[0]
    assert_broken(with_view(plan, "b", offset_bytes=view.offset_bytes + 2), ONE_SPEC, "outside")
    assert_broken(with_view(plan, "b", shape=changed(view.shape, 0, 5)), ONE_SPEC, "outside")
    assert_broken(with_view(plan, "b", strides_bytes=changed(view.strides_bytes, 0, 514)), ONE_SPEC, "outside")
    assert_broken(replace(plan, buffer_size_bytes=plan.buffer_size_bytes - 1), ONE_SPEC, "outside")


def test_a_view_before_the_buffer() -> None:
    assert_broken(with_view(kvpage.plan(ONE_SPEC), "a", offset_bytes=-512), ONE_SPEC, "outside")


@pytest.mark.parametrize(
    ("axis", "stride"),
    [(0, 0), (0, 2), (0, 256), (0, 510), (1, 0), (1, 16), (1, 30), (2, 8), (2, 0), (3, 0)],
)
def test_a_view_that_aliases_itself(axis: int, stride: int) -> None:
    """Four blocks of 16 tokens, 2 heads and 8 elements: strides of 512, 32, 16 and 2 bytes."""
    plan = kvpage.plan(ONE_SPEC)
    strides = plan.layers["a"].tensors[0].strides_bytes
    assert strides == (512, 32, 16, 2)
    assert_broken(with_view(plan, "a", strides_bytes=changed(strides, axis, stride)), ONE_SPEC, "aliases itself")


def test_two_views_of_one_group_that_share_bytes() -> None:
    plan = kvpage.plan(ONE_SPEC)
    offset = plan.layers["b"].tensors[0].offset_bytes
    for closer in (2, 16, 512, offset):
        assert_broken(with_view(plan, "b", offset_bytes=offset - closer), ONE_SPEC, "same group")


def test_two_states_of_one_layer_that_share_bytes() -> None:
    plan = kvpage.plan(STATES)
    for offset in (0, 4):
        assert_broken(with_view(plan, "s", 1, offset_bytes=offset), STATES, "same group")


def test_different_blocks_of_two_groups_that_share_bytes() -> None:
    plan = kvpage.plan(PADDED)
    strides = plan.layers["b"].tensors[0].strides_bytes
    assert strides[0] == 512
    assert_broken(with_view(plan, "b", strides_bytes=changed(strides, 0, 384)), PADDED, "other group")
    assert_broken(with_view(plan, "b", strides_bytes=changed(strides, 0, 510)), PADDED, "other group")
    smaller = changed(plan.layers["b"].tensors[0].shape, 0, 3)
    moved = with_view(plan, "b", offset_bytes=512, shape=smaller)
    assert_broken(moved, PADDED, "other group")


def test_two_groups_that_step_over_blocks_by_different_strides() -> None:
    """128 bytes every 256: block 2 lies where the other group has its block 1, though no page is overrun."""
    plan = kvpage.plan(GAPS)
    strides = plan.layers["b"].tensors[0].strides_bytes
    assert strides[0] == 512
    broken = with_view(plan, "b", strides_bytes=changed(strides, 0, 256))
    assert_broken(broken, GAPS, "other group")
    consistent = with_layer(broken, "b", page_size_bytes=256, page_size_padded=256)
    group = replace(plan.groups[1], page_size_bytes=256, block_stride_bytes=256)
    assert_broken(replace(consistent, groups=(plan.groups[0], group)), GAPS, "other group")


def test_a_view_that_reaches_into_the_next_page() -> None:
    """Moved by 144 bytes, the last 16 of its 384 lie in the next block's page."""
    plan = kvpage.plan(PADDED)
    three = changed(plan.layers["b"].tensors[0].shape, 0, 3)
    assert_broken(with_view(plan, "b", offset_bytes=144, shape=three), PADDED, "other group")


@pytest.mark.parametrize(("axis", "stride"), [(0, 511), (0, 513), (1, 25)])
def test_a_stride_that_is_no_multiple_of_the_item_size(axis: int, stride: int) -> None:
    """Strides of 512, 24, 12 and 2 bytes, with room in each page: nothing else is wrong with the view."""
    request = build.request(build.full("a", heads=2, size=3, page_size_padded=512), num_blocks=4, max_model_len=1)
    plan = kvpage.plan(request)
    strides = plan.layers["a"].tensors[0].strides_bytes
    broken = with_view(plan, "a", strides_bytes=changed(strides, axis, stride))
    assert view_oracle.faults(broken, comparison.block_axes(request)) == {"uneven"}
    assert_broken(broken, request, "uneven")


@pytest.mark.parametrize("offset", [1, 3, 127])
def test_an_offset_that_is_no_multiple_of_the_item_size(offset: int) -> None:
    request = build.request(build.full("a", heads=2, size=3, page_size_padded=512), num_blocks=4, max_model_len=1)
    broken = with_view(kvpage.plan(request), "a", offset_bytes=offset)
    assert view_oracle.faults(broken, comparison.block_axes(request)) == {"uneven"}
    assert_broken(broken, request, "uneven")


@pytest.mark.parametrize("num_blocks", [1, 3])
def test_a_view_with_fewer_blocks_than_the_plan(num_blocks: int) -> None:
    """Harmless bytes, but a block id of the plan would be out of the tensor's range."""
    plan = kvpage.plan(ONE_SPEC)
    shape = changed(plan.layers["a"].tensors[0].shape, 0, num_blocks)
    with pytest.raises(InternalError):
        with_view(plan, "a", shape=shape).check()


def test_two_views_of_one_group_with_k_before_the_blocks() -> None:
    backend = {"shape": [2, "num_blocks", "block_size", "num_kv_heads", "head_size"]}
    layers = [build.full(name, heads=2, size=4, backend=backend) for name in "ab"]
    request = build.request(*layers, num_blocks=4, max_model_len=1)
    assert_broken(with_view(kvpage.plan(request), "b", offset_bytes=0), request, "same group")


def test_a_kernel_split_over_whole_pages() -> None:
    """Kernel blocks that step by the whole page run out of the buffer."""
    layer = build.full("a", heads=1, size=64, block_size=32, kernel_block_sizes=[16])
    request = build.request(layer, num_blocks=4, max_model_len=1)
    plan = kvpage.plan(request)
    (view,) = plan.layers["a"].tensors
    assert (view.shape[0], view.strides_bytes[0]) == (8, 4096)
    assert_broken(with_view(plan, "a", strides_bytes=changed(view.strides_bytes, 0, 8192)), request, "outside")


def test_k_before_the_blocks_with_the_strides_vllm_gives_two_blocks() -> None:
    """In bounds, no self-alias: only that block 1 lies inside page 0 is wrong, and two groups notice."""
    backend = {"shape": [2, "num_blocks", "block_size", "num_kv_heads", "head_size"]}
    full, window = build.full(heads=2, size=4, backend=backend), build.sliding(heads=2, size=4, backend=backend)
    request = build.request(full, window, num_blocks=4, max_model_len=1)
    plan = kvpage.plan(request)
    strides = plan.layers["full"].tensors[0].strides_bytes
    assert strides[:2] == (1024, 256)
    wrong = with_view(plan, "full", strides_bytes=(256, 512, *strides[2:]))
    assert_broken(wrong, request, "other group")


# --- layers inside each other's blocks ------------------------------------------------------------


@pytest.mark.parametrize("offset", [0, 2, 256, 510])
def test_packed_layers_that_lie_over_each_other(offset: int) -> None:
    plan = kvpage.plan(BESIDE)
    assert [plan.layers[name].tensors[0].offset_bytes for name in "ab"] == [0, 512]
    assert {plan.layers[name].tensors[0].strides_bytes[0] for name in "ab"} == {768}
    assert_broken(with_view(plan, "b", offset_bytes=offset), BESIDE, "same group")


def test_a_packed_layer_whose_page_reaches_into_the_next_block() -> None:
    plan = kvpage.plan(BESIDE)
    three = changed(plan.layers["b"].tensors[0].shape, 0, 3)
    assert_broken(with_view(plan, "b", offset_bytes=600, shape=three), BESIDE, "same group")


@pytest.mark.parametrize("stride", [512, 256, 1024])
def test_packed_layers_that_step_by_their_own_pages(stride: int) -> None:
    """Backends that do not read the block stride would do this."""
    plan = kvpage.plan(BESIDE)
    strides = plan.layers["b"].tensors[0].strides_bytes
    broken = with_view(plan, "b", strides_bytes=changed(strides, 0, stride))
    assert_broken(broken, BESIDE, "outside" if stride == 1024 else "same group")


def test_groups_over_packed_blocks_that_step_differently() -> None:
    plan = kvpage.plan(PACKED)
    strides = plan.layers["c"].tensors[0].strides_bytes
    assert strides[0] == 512
    assert_broken(with_view(plan, "c", strides_bytes=changed(strides, 0, 528)), PACKED, "outside")
    assert_broken(with_view(plan, "c", offset_bytes=512), PACKED, "outside")


@pytest.mark.parametrize("request_", [INTERLEAVED, LAYERED], ids=["BHLNC", "layered"])
def test_interleaved_layers_that_meet(request_: Json) -> None:
    plan = kvpage.plan(request_)
    offsets = [plan.layers[f"a.{i}"].tensors[0].offset_bytes for i in range(3)]
    assert offsets == ([0, 256, 512] if request_ is INTERLEAVED else [0, 512, 1024])
    for offset in (0, 2, offsets[1], offsets[2] - 2, offsets[2] - 16):
        assert_broken(with_view(plan, "a.2", offset_bytes=offset), request_, "same group")
    assert_broken(with_view(plan, "a.2", offset_bytes=offsets[2] + 16), request_, "outside")


def test_interleaved_layers_whose_heads_are_a_page_apart() -> None:
    """As if each layer had the block to itself: heads step by 256 bytes and not by 768."""
    plan = kvpage.plan(INTERLEAVED)
    strides = plan.layers["a.0"].tensors[0].strides_bytes
    assert strides == (1536, 768, 16, 2)
    assert_broken(with_view(plan, "a.0", strides_bytes=changed(strides, 1, 256)), INTERLEAVED, "same group")


def test_a_layer_that_shares_a_cache_but_lies_elsewhere() -> None:
    plan = kvpage.plan(SHARED)
    assert plan.layers["c"].tensors == plan.layers["b"].tensors
    assert_broken(with_view(plan, "c", offset_bytes=0), SHARED, "share")
    assert_broken(with_layer(plan, "c", kv_sharing_target="a"), SHARED, "share")
    assert_broken(with_layer(plan, "c", kv_sharing_target="d"), SHARED, "share")


# --- numbers that must agree with each other ------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"num_blocks": 5},
        {"num_blocks": 3},
        {"bytes_per_block": 1000},
        {"buffer_size_bytes": 10},
    ],
)
def test_totals_that_contradict_the_views(changes: Json) -> None:
    with pytest.raises(InternalError):
        replace(kvpage.plan(ONE_SPEC), **changes).check()


def test_a_layer_that_lost_its_group_or_views() -> None:
    plan = kvpage.plan(PADDED)
    for broken in (
        with_layer(plan, "b", group=7),
        with_layer(plan, "b", tensors=()),
        with_layer(plan, "b", page_size_bytes=100),
        with_layer(plan, "b", real_page_size_bytes=10_000),
    ):
        with pytest.raises(InternalError):
            broken.check()


# --- random damage --------------------------------------------------------------------------------


def damage(rng: random.Random, plan: Any) -> Any:
    """The plan with one to three numbers of its views changed."""
    for _ in range(rng.randint(1, 3)):
        name = rng.choice(list(plan.layers))
        position = rng.randrange(len(plan.layers[name].tensors))
        view = plan.layers[name].tensors[position]
        axis = rng.randrange(len(view.shape))
        step = rng.choice((-64, -4, -2, -1, 1, 2, 4, 8, 64))
        change: Json = rng.choice(
            (
                {"offset_bytes": view.offset_bytes + step},
                {"strides_bytes": changed(view.strides_bytes, axis, max(0, view.strides_bytes[axis] + step))},
                {"strides_bytes": changed(view.strides_bytes, axis, view.strides_bytes[axis] * 2)},
                {"strides_bytes": tuple(rng.sample(view.strides_bytes, len(view.strides_bytes)))},
            )
        )
        plan = with_view(plan, name, position, **change)
    return plan


@given(st.randoms(use_true_random=False))
def test_no_damage_that_matters_goes_unnoticed(rng: random.Random) -> None:
    """Whatever the slow check finds, `check()` finds. It may also refuse what happens to do no harm."""
    request = small_request(rng)
    try:
        plan = kvpage.plan(request)
    except KvpageError:
        return
    broken = damage(rng, plan)
    if view_oracle.faults(broken, comparison.block_axes(request)):
        with pytest.raises(InternalError):
            broken.check()


def test_random_damage_is_mostly_harmful() -> None:
    """Guards the test above: it would prove nothing if damaged plans were mostly still right."""
    harmful = 0
    for seed in range(200):
        rng = random.Random(seed)
        request = small_request(rng)
        try:
            plan = kvpage.plan(request)
        except KvpageError:
            continue
        harmful += bool(view_oracle.faults(damage(rng, plan), comparison.block_axes(request)))
    assert harmful >= 20
