"""Requests at the ends of what is allowed: bounds that nothing meets, pages of 2^58 bytes, pools of two slabs, models
of thousands of layers. Each has a plan or a sentence that says what to change, in a time a server can give anybody.

No time is measured here; a search that tried everything would not come back from some of these at all.
"""

from __future__ import annotations

from typing import Any

import pytest

import kvpage
from kvpage.errors import KvpageError, SpecInvalid
from kvpage.planner.nested_search import _divisors
from kvpage.planner.search import thinned
from planner import build, search_oracle

Json = dict[str, Any]

SEARCHES = ("slab", "nested")
FULL = build.full("full.{i}", count=10, heads=1, size=128, kernel_block_sizes=[{"multiple_of": 16}])
WINDOW = build.sliding("window.{i}", count=30, heads=1, size=128, kernel_block_sizes=[{"multiple_of": 16}])
STATE = build.state("state.{i}", [[30_000]], ["bfloat16"], count=10)


def refused(strategy: str, *layers: Json, **more: Any) -> KvpageError:
    with pytest.raises(KvpageError) as caught:
        kvpage.plan(build.request(*layers, strategy=strategy, **more))
    return caught.value


# --- cutting slabs evenly -------------------------------------------------------------------------


def test_divisors() -> None:
    for value in range(1, 1000):
        assert _divisors(value) == tuple(count for count in range(1, value + 1) if value % count == 0)


def test_divisors_of_a_huge_number_are_not_searched_for_long() -> None:
    assert {2**43, 2**50, 2**12} <= set(_divisors(2**55))
    assert _divisors(2**61 - 1) == (1, 2**61 - 1)


@pytest.mark.parametrize("strategy", SEARCHES)
def test_pages_of_2_to_the_58_bytes(strategy: str) -> None:
    """Beside blocks of 8 KiB: of those a slab could have 2^46, and they are not counted one by one."""
    huge = build.state("huge.{i}", [[2**57]], ["bfloat16"], count=2)
    more = build.state("more.{i}", [[2**56]], ["bfloat16"], count=3, num_speculative_blocks=1)
    request = build.request(huge, more, FULL | {"count": 3}, strategy=strategy, memory_bytes=2**62, max_model_len=1)
    plan = kvpage.plan(request)
    workload = [{"tokens": 1, "weight": 1.0}]
    assert plan.efficiency is not None
    assert [(part.min_tokens, part.max_tokens) for part in plan.efficiency.workload] == [(1, 1)]
    cost = search_oracle.held_over_live(plan, request, workload)
    assert plan.efficiency.held_over_live == pytest.approx(cost)


# --- more life cycles and sorts of layers than any model has --------------------------------------

ANY_SIZE: Json = {"kernel_block_sizes": [{"multiple_of": 1}]}


@pytest.mark.parametrize("strategy", SEARCHES)
def test_a_group_for_each_life_is_found_among_slabs_that_need_more(strategy: str) -> None:
    """22 lives in 22 groups: only slabs that hold all layers of a life will do, and those look worst, groups aside."""
    layers = [build.full(f"f{i}." + "{i}", count=4, heads=1, size=i + 1, **ANY_SIZE) for i in range(20)]
    for i in range(20):
        window = build.sliding(f"w{i}." + "{i}", count=4, heads=1, size=i + 1, window=i + 100, **ANY_SIZE)
        layers.append(window)
    plan = kvpage.plan(build.request(*layers, STATE, strategy=strategy, memory_bytes=1 << 42, max_groups=22))
    assert len(plan.groups) == 22
    plan.check()


@pytest.mark.parametrize("strategy", ["slab", pytest.param("nested", marks=pytest.mark.long), "auto"])  # it nests too
def test_a_thousand_windows_of_a_thousand_lengths(strategy: str) -> None:
    layers = [build.sliding(f"w{i}", heads=1, size=i + 1, window=i + 1) for i in range(1000)]
    request = build.request(*layers, STATE, strategy=strategy, memory_bytes=1 << 42, allocator="slabs")
    plan = kvpage.plan(request)
    assert len(plan.groups) == 1001
    assert len(plan.front) == 1  # there is no time for others
    plan.check()


@pytest.mark.parametrize("strategy", SEARCHES)
def test_a_thousand_sizes_of_one_life(strategy: str) -> None:
    layers = [build.full(f"f{i}." + "{i}", count=4, heads=1, size=i + 1) for i in range(1000)]
    plan = kvpage.plan(build.request(*layers, STATE, strategy=strategy, memory_bytes=1 << 42))
    assert len(plan.groups) <= 16
    plan.check()


@pytest.mark.parametrize("strategy", [*SEARCHES, "scale_then_pad", "auto"])
def test_4096_layers(strategy: str) -> None:
    layers = [FULL | {"count": 1365}, WINDOW | {"count": 1365}, STATE | {"count": 1366}]
    plan = kvpage.plan(build.request(*layers, strategy=strategy, memory_bytes=1 << 42))
    assert len(plan.layers) == 4096
    assert len(plan.groups) <= 16


def test_work_is_bounded_by_an_even_choice() -> None:
    """Of 10,000 slabs for 1,000 options each 250 are looked at, the largest among them; of few slabs all."""
    assert thinned({3, 1, 2}, [2, 2]) == [1, 2, 3]
    chosen = thinned(range(1, 10_001), [400, 600])
    assert len(chosen) <= 251
    assert chosen == sorted(chosen)
    assert chosen[-1] == 10_000


# --- bounds that nothing meets --------------------------------------------------------------------

BOUNDS = ("max_groups", "max_block_size", "max_block_stride_bytes", "max_one_token_bytes")


@pytest.mark.parametrize("strategy", [*SEARCHES, "auto"])
@pytest.mark.parametrize("bound", BOUNDS)
def test_a_bound_that_nothing_meets(bound: str, strategy: str) -> None:
    error = refused(strategy, FULL, WINDOW, **{bound: 1})
    assert error.code in ("cannot-unify-page-size", "layout-unsupported")
    words = {"max_groups": "1 groups", "max_one_token_bytes": "1 bytes for a request of one token"}
    wanted = (bound, words.get(bound, ""), "block strides of 1 bytes" if bound == "max_block_stride_bytes" else bound)
    assert any(word and word in error.message for word in wanted), error.message


@pytest.mark.parametrize("strategy", SEARCHES)
def test_padding_asked_for_is_refused_where_the_search_places_pages(strategy: str) -> None:
    error = refused(strategy, FULL | {"page_size_padded": 16_384}, WINDOW)
    assert error.code == "spec-invalid"
    assert [fault.pointer for fault in error.errors] == ["/layers/0/page_size_padded"]
    assert kvpage.plan(build.request(FULL | {"page_size_padded": 16_384}, WINDOW, strategy="auto")).strategy == "unify"


@pytest.mark.parametrize("strategy", [*SEARCHES, "scale_then_pad"])
def test_one_buffer_of_layers_alike_is_nothing_for_a_search(strategy: str) -> None:
    assert refused(strategy, FULL, layered=True).code == "spec-invalid"
    assert kvpage.plan(build.request(FULL, strategy="auto", layered=True)).strategy == "unify"


@pytest.mark.parametrize("strategy", [*SEARCHES, "scale_then_pad", "auto"])
def test_nothing_cached_at_all(strategy: str) -> None:
    plan = kvpage.plan(build.request(build.encoder(), strategy=strategy))
    assert (plan.groups, plan.slab_bytes, plan.num_blocks) == ((), 0, 1)


# --- little memory, and kernels that reach little of it -------------------------------------------


@pytest.mark.parametrize("strategy", [*SEARCHES, "scale_then_pad", "auto"])
@pytest.mark.parametrize("memory_bytes", [1, 1 << 10, 1 << 14])
def test_too_little_memory_is_said_to_be_memory(memory_bytes: int, strategy: str) -> None:
    """Not one slab, or only one: what is needed is named, and is enough."""
    error = refused(strategy, FULL, WINDOW, memory_bytes=memory_bytes)
    assert error.code == "not-enough-memory"
    assert error.details["available_bytes"] == memory_bytes
    enough = build.request(FULL, WINDOW, strategy=strategy, memory_bytes=error.details["needed_bytes"])
    assert kvpage.plan(enough).num_blocks >= 2


@pytest.mark.parametrize("strategy", SEARCHES)
def test_kernels_that_do_not_reach_a_second_slab(strategy: str) -> None:
    """32-bit integers count 2^31 elements of 2 bytes; the state alone has 2^34."""
    huge = build.state("huge", [[2**33]], ["bfloat16"])
    error = refused(strategy, huge, FULL | {"index_bits": 32}, memory_bytes=1 << 45)
    assert "32-bit" in error.message
    assert "full.0" in error.message


def test_a_page_for_each_region_is_what_narrow_kernels_step_by() -> None:
    """Regions of wide groups hold more for kernels that count in 32 bits: each layer has 4 GiB of its own."""
    narrow = [
        build.full("f.{i}", count=20, heads=1, size=1024, index_bits=32),
        build.sliding("w.{i}", count=30, heads=1, size=1024),
    ]
    request = build.request(*narrow, memory_bytes=1 << 40, strategy="scale_then_pad")
    plan = kvpage.plan(request)
    rule = kvpage.plan(request | {"strategy": "unify", "workload": [{"tokens": 4096}]})
    assert plan.slab_bytes >= rule.slab_bytes
    assert plan.buffer_size_bytes >= rule.buffer_size_bytes


# --- workloads ------------------------------------------------------------------------------------

WORKLOADS: tuple[list[Json], ...] = (
    [{"tokens": 1, "weight": 1.0}],
    [{"tokens": 2**31, "weight": 1.0}],
    [{"tokens": 5, "weight": 1e-9}, {"tokens": 70_000, "weight": 1e9}],
    [{"min_tokens": 1, "max_tokens": 4_000, "weight": 1e9}, {"tokens": 2**31, "weight": 1e-9}],
)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("strategy", [*SEARCHES, "auto"])
@pytest.mark.parametrize("workload", WORKLOADS)
def test_workloads_at_the_ends(workload: list[Json], strategy: str) -> None:
    request = build.request(FULL, WINDOW, STATE, strategy=strategy, memory_bytes=1 << 42, workload=workload)
    plan = kvpage.plan(request)
    assert plan.efficiency is not None
    cost = search_oracle.held_over_live(plan, request, workload)
    assert plan.efficiency.held_over_live == pytest.approx(cost, rel=1e-9)


def test_every_length_up_to_2_to_the_31() -> None:
    """Long ranges are sampled: close to what the same requests hold when counted in a coarser way."""
    workload = [{"min_tokens": 1, "max_tokens": 2**31, "weight": 1.0}]
    request = build.request(FULL, WINDOW, STATE, strategy="slab", memory_bytes=1 << 42, workload=workload)
    plan = kvpage.plan(request)
    assert plan.efficiency is not None
    some = [{"tokens": tokens, "weight": 1.0} for tokens in range(1, 2**31, 2**21 - 1)]
    assert plan.efficiency.held_over_live == pytest.approx(search_oracle.held_over_live(plan, request, some), rel=0.01)


@pytest.mark.parametrize(
    ("strategy", "field", "bound"),
    [
        ("nested", "max_block_lcm", 1),
        ("nested", "max_block_size", 8),
        ("scale_then_pad", "max_block_stride_bytes", 1),
        ("scale_then_pad", "max_block_lcm", 1),
        ("scale_then_pad", "max_block_size", 8),
        ("slab", "max_one_token_bytes", 1),
    ],
)
@pytest.mark.parametrize("one_life", [False, True])
def test_what_is_bounded_is_kept_or_refused_by_name(strategy: str, field: str, bound: int, one_life: bool) -> None:
    """Also where a strategy has nothing to search."""
    layers = [build.full("a.{i}", count=4, heads=2), build.sliding("b.{i}", count=8, heads=2, window=1024)]
    request = build.request(*layers[: 1 if one_life else 2], strategy=strategy)
    kvpage.plan(request)
    with pytest.raises(SpecInvalid) as caught:
        kvpage.plan(request | {field: bound})
    assert field in caught.value.message


@pytest.mark.parametrize("strategy", ["slab", "nested", "auto"])
def test_a_number_of_blocks_that_is_named_is_within_reach_of_narrow_kernels(strategy: str) -> None:
    """Kernels that count in 32 bits: 100,000 slabs of at most 2^31 elements together."""
    layers = [
        build.full("a.{i}", count=4, heads=1, size=64, index_bits=32),
        build.sliding("b.{i}", count=3, heads=3, size=64, window=128, index_bits=32),
    ]
    request = build.request(*layers, strategy=strategy, num_blocks=100_000, max_model_len=1, allocator="slabs")
    plan = kvpage.plan(request)
    assert plan.num_blocks == 100_000
    assert plan.slab_bytes * plan.num_blocks <= 2**31 * 2
    with pytest.raises(KvpageError) as caught:
        kvpage.plan(request | {"num_blocks": 10_000_000})
    assert caught.value.errors
