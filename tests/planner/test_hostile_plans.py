"""Plans from anybody: `Plan.from_json` refuses what is unsound or absurd, always with `SpecInvalid`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

import kvpage
from kvpage.errors import MAX_ECHO_CHARS, LayoutUnsupported, SpecInvalid
from kvpage.plans import GroupPlan, Plan
from planner import build

PLAN = kvpage.plan(build.request(build.full("a"), build.sliding("b"), num_blocks=800))
HUGE = int("9" * 4000)


def signed(plan: Plan) -> bytes:
    """As a forger would write it: the id fits the content."""
    return replace(plan, plan_id=plan.computed_id()).to_json()


def group(plan: Plan, **changes: int) -> Plan:
    first: GroupPlan = replace(plan.groups[0], **changes)
    return replace(plan, groups=(first, *plan.groups[1:]))


def layer(plan: Plan, **changes: int) -> Plan:
    return replace(plan, layers=plan.layers | {"a": replace(plan.layers["a"], **changes)})


FORGED: list[tuple[str, Callable[[Plan], Plan]]] = [
    ("another version", lambda plan: replace(plan, version=999)),
    ("two blocks in a slab", lambda plan: group(plan, blocks_per_slab=2)),
    ("no block in a slab", lambda plan: group(plan, blocks_per_slab=0)),
    ("blocks of no tokens", lambda plan: group(plan, block_size=0)),
    ("a group page of nothing", lambda plan: group(plan, page_size_bytes=0)),
    ("a negative stride", lambda plan: group(plan, block_stride_bytes=-1)),
    ("pages longer than their distance", lambda plan: layer(plan, page_size_bytes=655_360)),
    ("a negative block size", lambda plan: layer(plan, block_size=-7)),
]


@pytest.mark.parametrize(("forge"), [forge for _, forge in FORGED], ids=[name for name, _ in FORGED])
def test_a_forged_plan_is_refused(forge: Callable[[Plan], Plan]) -> None:
    assert Plan.from_json(signed(PLAN)) == PLAN
    with pytest.raises(SpecInvalid):
        Plan.from_json(signed(forge(PLAN)))


@pytest.mark.parametrize("field", ["offset_bytes", "block_axis"])
def test_numbers_of_thousands_of_digits_are_no_sizes(field: str) -> None:
    data = PLAN.to_json().replace(f'"{field}":0'.encode(), f'"{field}":{HUGE}'.encode(), 1)
    assert str(HUGE).encode() in data
    with pytest.raises(SpecInvalid) as caught:
        Plan.from_json(data)
    assert len(caught.value.message) < 2 * MAX_ECHO_CHARS


@pytest.mark.parametrize("depth", [200, 5_000, 200_000])
def test_deep_nesting_in_an_unknown_field_is_refused_or_passed_over(depth: int) -> None:
    data = PLAN.to_json()[:-1] + b',"zz":' + b"[" * depth + b"]" * depth + b"}"
    try:
        assert Plan.from_json(data) == PLAN
    except SpecInvalid:
        assert depth > 200


@pytest.mark.parametrize("shape", [["num_blocks", 16, 256], ["num_blocks", "block_size + 16", 128]], ids=str)
def test_a_layout_that_fits_one_block_size_is_refused_for_the_scaled_block(shape: list[str | int]) -> None:
    """2,048 values a block of 16 tokens, and as many as two such blocks in the layer beside it."""
    small = build.full("small", heads=1, size=128, block_size=16, backend={"shape": shape})
    large = build.sliding("large", heads=4, size=128)
    with pytest.raises(LayoutUnsupported):
        kvpage.plan(build.request(small, large))


def test_kernel_blocks_with_nothing_in_common_are_not_aligned() -> None:
    primes = (2**61 - 1, 2**31 - 1, 2**19 - 1, 2**17 - 1)
    layers = [
        build.full(f"a{prime}", heads=1, size=1, dtype="int8", block_size=1, kernel_block_sizes=[prime])
        for prime in primes
    ]
    with pytest.raises(SpecInvalid) as caught:
        kvpage.plan(build.request(*layers, build.state("s", [[4]], ["int8"]), align_hybrid=True))
    assert [fault.pointer for fault in caught.value.errors] == ["/align_hybrid"]
