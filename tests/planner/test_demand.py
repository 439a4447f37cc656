"""Blocks a request needs, checked by walking a request through its steps and counting the blocks it touches.

A step schedules some tokens; to compute them the layer reads the tokens its mask lets them see, and all of those must
be in memory at once. Nothing of the formulas is used here.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

import kvpage
from planner import build

Json = dict[str, Any]


def steps(length: int, batched: int) -> Iterator[tuple[int, int]]:
    """Every step a request may take: tokens `start` up to, not including, `end` are scheduled at once."""
    for start in range(length):
        for end in range(start + 1, min(start + batched, length) + 1):
            yield start, end


def most_touched(block_size: int, length: int, batched: int, first_seen: Any) -> int:
    """Most blocks that hold a token between the first one the step's first token sees and the step's last."""
    most = 0
    for start, end in steps(length, batched):
        tokens = range(first_seen(start), end)
        most = max(most, len({token // block_size for token in tokens}))
    return most


def planned_blocks(layer: Json, length: int, batched: int) -> int:
    request = build.request(layer, max_model_len=length, max_num_batched_tokens=batched, memory_bytes=1 << 40)
    plan = kvpage.plan(request)
    (blocks,) = plan.capacity.blocks_per_request or ()
    assert plan.capacity.request_bytes == blocks * plan.bytes_per_block
    return int(blocks)


def small_cases(seed: int, count: int) -> list[tuple[int, int, int, int]]:
    """(block size, window or chunk, tokens at once, length)"""
    rng = random.Random(seed)
    return [(rng.randint(1, 9), rng.randint(1, 24), rng.randint(1, 12), rng.randint(1, 64)) for _ in range(count)]


@pytest.mark.parametrize(("block_size", "window", "batched", "length"), small_cases(1, 60))
def test_a_sliding_window_never_touches_more_blocks_than_planned(
    block_size: int, window: int, batched: int, length: int
) -> None:
    touched = most_touched(block_size, length, batched, lambda token: max(0, token - window + 1))
    planned = planned_blocks(build.sliding(window=window, block_size=block_size), length, batched)
    assert touched <= planned <= touched + 2
    span = window - 1 + batched  # tokens that must be there at once
    if length >= span + block_size and span % block_size != 1 % block_size:
        assert planned == touched  # the window reaches the worst position, and the formula is exact


def test_the_sliding_window_formula_is_often_exact() -> None:
    """Guards the test above: its exact branch is taken, and the bound is not trivially loose."""
    exact = [
        case
        for case in small_cases(1, 60)
        if case[3] >= case[1] - 1 + case[2] + case[0] and (case[1] - 1 + case[2]) % case[0] != 1 % case[0]
    ]
    assert len(exact) >= 10


@pytest.mark.parametrize(
    ("block_size", "window", "batched", "length", "blocks"),
    [
        (16, 1024, 2048, 8192, 193),
        (16, 1024, 8192, 131_072, 577),
        (16, 128, 8192, 16_384, 521),
        (32, 1024, 8192, 131_072, 289),
        (16, 1024, 8192, 4096, 257),
        (16, 1, 1, 131_072, 2),
        (16, 1, 16, 131_072, 2),
        (16, 1, 17, 131_072, 3),
        (16, 16, 1, 131_072, 2),
        (16, 17, 1, 131_072, 3),
        (16, 18, 1, 131_072, 3),
        (16, 34, 1, 131_072, 4),
        (1, 8, 1, 131_072, 9),
        (1, 1, 1, 1, 2),
        (64, 512, 8192, 2048, 33),
        (8, 128, 16_384, 1_000_000, 2065),
        (4, 8, 16_384, 1_000_000, 4099),
        (16, 4096, 8192, 262_144, 769),
        (16, 4097, 8192, 262_144, 769),
        (16, 4098, 8192, 262_144, 770),
        (1056, 4096, 8192, 262_144, 13),
    ],
)
def test_blocks_of_a_sliding_window(block_size: int, window: int, batched: int, length: int, blocks: int) -> None:
    layer = build.sliding(window=window, block_size=block_size)
    assert planned_blocks(layer, length, batched) == blocks


@pytest.mark.parametrize(("block_size", "chunks", "batched", "length"), small_cases(2, 60))
def test_a_chunk_of_whole_blocks_never_touches_more_than_planned(
    block_size: int, chunks: int, batched: int, length: int
) -> None:
    """A chunk that is not a multiple of the block may begin inside a block; vLLM's formula does not count that one."""
    chunk = block_size * (1 + chunks % 4)
    touched = most_touched(block_size, length, batched, lambda token: token // chunk * chunk)
    planned = planned_blocks(build.chunked(chunk=chunk, block_size=block_size), length, batched)
    assert touched <= planned <= touched + 1
    if length >= 2 * chunk + batched and (chunk - 1 + batched) % block_size:
        assert planned == touched


@pytest.mark.parametrize(("block_size", "ignored", "batched", "length"), small_cases(3, 40))
def test_full_attention_touches_every_block(block_size: int, ignored: int, batched: int, length: int) -> None:
    touched = most_touched(block_size, length, batched, lambda token: 0)
    for layer in (build.full(block_size=block_size), build.mla(block_size=block_size)):
        assert planned_blocks(layer, length, batched) == touched


@pytest.mark.parametrize("kind", [build.full, build.sliding, build.chunked, build.mla])
def test_demand_never_shrinks_when_requests_grow(kind: Any) -> None:
    layer = kind(block_size=16)
    by_length = [planned_blocks(layer, length, 2048) for length in (1, 15, 16, 17, 1000, 1024, 8192, 131_072)]
    assert by_length == sorted(by_length)
    by_batch = [planned_blocks(layer, 131_072, batched) for batched in (1, 16, 17, 2048, 8192, 131_072)]
    assert by_batch == sorted(by_batch)
