"""How many requests fit, how long one may be, and when there is too little memory."""

from __future__ import annotations

import random
from typing import Any

import pytest

import kvpage
from kvpage.errors import KvpageError, NotEnoughMemory
from planner import build, oracle
from planner.random_requests import random_request, small_request

Json = dict[str, Any]


def blocks_for(request: Json, length: int) -> int:
    """Blocks of one request of `length` tokens, from the oracle's own formulas."""
    roomy = {key: value for key, value in request.items() if key not in ("num_blocks", "memory_bytes")}
    return sum(oracle.answer(roomy | {"max_model_len": length, "memory_bytes": 1 << 50})["blocks"])


def longest_by_search(request: Json, usable: int, limit: int) -> int:
    """The longest request that fits in `usable` blocks, found by trying every length up to `limit`."""
    longest = 0
    for length in range(1, limit + 1):
        if blocks_for(request, length) > usable:
            break
        longest = length
    return longest


def growing_cases() -> list[Json]:
    """Small plans with a layer whose demand grows without end, so that there is a longest request."""
    cases: list[Json] = []
    seed = 0
    while len(cases) < 25:
        seed += 1
        request = small_request(random.Random(seed))
        grows = any(layer["kind"] == "full_attention" for layer in request["layers"])
        if grows and "refused" not in oracle.answer(request):
            cases.append(request)
    return cases


@pytest.mark.parametrize("request_", growing_cases())
def test_the_longest_request_is_the_one_a_search_finds(request_: Json) -> None:
    plan = kvpage.plan(request_)
    longest = longest_by_search(request_, plan.num_blocks - 1, 2000)  # block 0 is the null block
    assert longest < 2000
    assert plan.capacity.longest_request_tokens == longest


@pytest.mark.parametrize(
    ("layers", "num_blocks", "longest"),
    [
        ([build.full()], 100, 99 * 16),
        ([build.full(block_size=64)], 100, 99 * 64),
        ([build.full("a"), build.full("b", heads=4)], 100, 99 * 16),
        ([build.mla(block_size=64)], 3, 2 * 64),
        ([build.full("a"), build.sliding("b", window=16)], 300, 169 * 16),
        ([build.full("a.{i}", count=2), build.sliding("b", window=16)], 400, 134 * 16),
        ([build.full("a"), build.chunked("b", chunk=16)], 300, 170 * 16),
        ([build.full("a"), build.state("s", [[65_536]], ["int8"])], 100, 98 * 16),
        ([build.full("a"), build.state("s", [[65_536]], ["int8"], num_speculative_blocks=3)], 100, 95 * 16),
    ],
)
def test_the_longest_request_by_hand(layers: list[Json], num_blocks: int, longest: int) -> None:
    """One block is never handed out; with 2,048 tokens at once a window of 16 takes 130, a chunk of 16 takes 129."""
    plan = kvpage.plan(build.request(*layers, num_blocks=num_blocks, max_model_len=16))
    assert plan.capacity.longest_request_tokens == longest


def test_a_window_alone_does_not_limit_the_length() -> None:
    """When the whole window fits, a request may be of any length."""
    for layer in (build.sliding(window=16), build.chunked(chunk=64), build.state("s", [[4]], ["int8"])):
        plan = kvpage.plan(build.request(layer, num_blocks=1000))
        assert plan.capacity.longest_request_tokens is None


def test_a_window_that_does_not_fit_limits_the_length() -> None:
    """99 blocks of 16 tokens, one of them for a window that begins inside a block; the whole window would take 385."""
    plan = kvpage.plan(build.request(build.sliding(window=4096), memory_bytes=100 * 65_536))
    assert plan.capacity.longest_request_tokens == 98 * 16


def test_without_a_length_there_is_no_request_to_charge() -> None:
    request = build.request(build.full())
    del request["max_model_len"]
    capacity = kvpage.plan(request).capacity
    assert (capacity.request_bytes, capacity.max_concurrency, capacity.blocks_per_request) == (None, None, None)
    assert capacity.longest_request_tokens == (16_384 - 1) * 16


@pytest.mark.parametrize("num_blocks", [193 + 512 + 1, 1000, 1410, 100_000])
def test_concurrency_is_blocks_over_blocks_of_a_request(num_blocks: int) -> None:
    plan = kvpage.plan(build.request(build.full(), build.sliding(), num_blocks=num_blocks))
    assert list(plan.capacity.blocks_per_request or ()) == [512, 193]
    assert plan.capacity.max_concurrency == pytest.approx(num_blocks / 705)
    assert plan.capacity.request_bytes == 705 * 65_536


def test_capacity_is_not_blocks_over_groups() -> None:
    """vLLM issue 40691: 1,487 blocks, three groups of states and one of attention, blocks of 784 tokens."""
    attention = build.full(heads=4, size=256, block_size=784, backend="flash_attn")
    states = [build.state(f"s{i}", [[3_211_264]], ["int8"], page_size_padded=3_211_264) for i in range(3)]
    plan = kvpage.plan(build.request(attention, *states, num_blocks=1487, max_model_len=32_768))
    assert [len(group.layers) for group in plan.groups] == [1] * 4
    assert list(plan.capacity.blocks_per_request or ()) == [42, 1, 1, 1]
    assert plan.capacity.max_concurrency == pytest.approx(33.04, abs=0.01)
    assert int((plan.capacity.max_concurrency or 0) * 32_768) == 1_082_800


def test_a_request_that_does_not_fit_the_memory_still_has_a_plan() -> None:
    plan = kvpage.plan(build.request(build.full(), memory_bytes=10 * 65_536, max_model_len=8192))
    assert plan.num_blocks == 10
    assert plan.capacity.max_concurrency == pytest.approx(10 / 512)
    assert plan.capacity.longest_request_tokens == 9 * 16


@pytest.mark.parametrize("memory", [1, 65_535, 65_536, 131_071])
def test_memory_for_less_than_two_blocks_is_refused(memory: int) -> None:
    with pytest.raises(NotEnoughMemory) as caught:
        kvpage.plan(build.request(build.full(), memory_bytes=memory))
    assert caught.value.details["needed_bytes"] == 131_072
    assert caught.value.details["available_bytes"] == memory


def test_memory_for_two_blocks_is_enough() -> None:
    assert kvpage.plan(build.request(build.full(), memory_bytes=131_072)).num_blocks == 2


@pytest.mark.parametrize("num_blocks", [1, 2, 100, 511])
def test_fewer_blocks_than_one_request_are_refused(num_blocks: int) -> None:
    with pytest.raises(NotEnoughMemory):
        kvpage.plan(build.request(build.full(), num_blocks=num_blocks, max_model_len=8192))


def test_num_blocks_is_taken_as_it_is() -> None:
    plan = kvpage.plan(build.request(build.full(), build.sliding(), num_blocks=706))
    assert (plan.num_blocks, plan.buffer_size_bytes) == (706, 706 * 65_536)


@pytest.mark.parametrize("spare", [0, 1, 65_535])
def test_memory_is_used_to_the_last_whole_block(spare: int) -> None:
    plan = kvpage.plan(build.request(build.full("a.{i}", count=3), memory_bytes=3 * 65_536 * 100 + spare))
    assert plan.num_blocks == 100
    assert plan.buffer_size_bytes == 3 * 65_536 * 100
    assert plan.waste.unallocated_bytes == spare


# --- waste: where the bytes of one request go -------------------------------------------------------


def test_the_waste_of_a_padded_draft() -> None:
    """MiMo 3:2: 577 blocks of five draft layers with 32,768 bytes of padding each, and 17 tokens never filled."""
    layers = [build.full("full.{i}", size=192, count=10), build.sliding("draft.{i}", count=5)]
    request = build.request(*layers, max_model_len=16_384, max_num_batched_tokens=8192, memory_bytes=40 << 30)
    waste = kvpage.plan(request).waste
    assert waste.total_bytes == 1_290_240_000
    assert waste.padding_bytes == 577 * 5 * 32_768
    assert waste.group_rounding_bytes == 0
    assert waste.tail_bytes == 17 * 5 * 4096  # 577 x 16 tokens, of which 1,023 + 8,192 may be held
    assert waste.live_bytes == 10 * 16_384 * 6144 + 5 * 9215 * 4096
    assert waste.unallocated_bytes == (40 << 30) - 87_381 * 491_520


def test_the_waste_of_an_empty_slot() -> None:
    """Nine layers in two groups of five leave one slot: a page of every block of that group."""
    layers = [build.full("full.{i}", count=9), build.sliding("a.{i}", count=5)]
    waste = kvpage.plan(build.request(*layers, max_model_len=8192)).waste
    assert waste.group_rounding_bytes == 512 * 65_536
    assert waste.padding_bytes == 0
    assert waste.total_bytes == (2 * 512 + 193) * 5 * 65_536


@pytest.mark.parametrize("seed", range(100))
def test_waste_and_live_bytes_add_up_to_the_request(seed: int) -> None:
    request = random_request(random.Random(seed))
    try:
        plan = kvpage.plan(request)
    except KvpageError:
        return
    waste = plan.waste
    parts = (waste.live_bytes, waste.padding_bytes, waste.group_rounding_bytes, waste.tail_bytes)
    assert min(parts) >= 0
    assert sum(parts) == waste.total_bytes == sum(plan.capacity.blocks_per_request or ()) * plan.bytes_per_block
    assert waste.unallocated_bytes + plan.buffer_size_bytes == request["memory_bytes"] or not plan.groups
