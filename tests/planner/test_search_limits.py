"""Requests at the ends of what is allowed: bounds that nothing meets, pages of 2^58 bytes, pools of two slabs, models of
thousands of layers. Each has a plan or a sentence that says what to change, in a time that a server can give to anybody.

No time is measured here; a search that tried everything would not come back from some of these at all.
"""

from __future__ import annotations

from typing import Any

import pytest

import kvpage
from kvpage.errors import KvpageError
from kvpage.planner.nested_search import _largest_divisor
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


def test_the_largest_divisor_below_a_number() -> None:
    for value in range(1, 400):
        divisors = [count for count in range(1, value + 1) if value % count == 0]
        for most in range(1, value + 1):
            assert _largest_divisor(value, most) == max(count for count in divisors if count <= most)


def test_the_largest_divisor_of_a_huge_number_is_not_searched_for_long() -> None:
    assert _largest_divisor(2**55, 2**50) == 2**50
    assert _largest_divisor(3 * 2**40 + 128, 2**20 + 1) >= 1
    prime = 2**61 - 1
    assert _largest_divisor(prime, 2**40) == 1


@pytest.mark.parametrize("strategy", SEARCHES)
def test_pages_of_2_to_the_58_bytes(strategy: str) -> None:
    """Beside blocks of 8 KiB: of those a slab could have 2^46, and they are not counted one by one."""
    huge = build.state("huge.{i}", [[2**57]], ["bfloat16"], count=2)
    more = build.state("more.{i}", [[2**56]], ["bfloat16"], count=3, num_speculative_blocks=1)
    request = build.request(huge, more, FULL | {"count": 3}, strategy=strategy, memory_bytes=2**62, max_model_len=1)
    plan = kvpage.plan(request)
    workload = [{"tokens": 1, "weight": 1.0}]
    assert [(part.min_tokens, part.max_tokens) for part in plan.efficiency.workload] == [(1, 1)]
    cost = search_oracle.held_over_live(plan, request, workload)
    assert plan.efficiency.held_over_live == pytest.approx(cost)
