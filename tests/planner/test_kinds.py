"""Life cycles: which layers share a group, and how many blocks a request holds in each."""

from __future__ import annotations

from typing import Any

import pytest

import kvpage
from planner import build, comparison

Json = dict[str, Any]


def groups_of(*layers: Json, **more: Any) -> list[tuple[str, ...]]:
    request = build.request(*layers, **more)
    comparison.compare(request)
    return [group.layers for group in kvpage.plan(request).groups]


# --- full attention that remembers a window or a chunk --------------------------------------------

W1, W2 = {"sliding_window": 1024}, {"sliding_window": 4096}
C1, C2 = {"attention_chunk_size": 8192}, {"attention_chunk_size": 2048}
WIDE = {"heads": 16}

# what each of two full attention layers carries; is it one spec (else one type, with a buffer each)?; bytes per block
WINDOWED: list[tuple[Json, Json, bool, int]] = [
    ({}, {}, True, 131_072),
    (W1, {}, True, 131_072),
    ({}, W1, True, 131_072),
    (W1, W1, True, 131_072),
    (W1, W2, False, 131_072),
    (W2, W1, False, 131_072),
    (C1, {}, True, 131_072),
    ({}, C1, True, 131_072),
    (C1, C1, True, 131_072),
    (C1, C2, False, 131_072),
    (C2, C1, False, 131_072),
    (W1, C1, False, 131_072),
    (C1, W1, False, 131_072),
    (W1, {"head_size_v": 64}, False, 65_536 + 49_152),
    (W1, W1 | {"head_size_v": 64}, False, 65_536 + 49_152),
    (W1, WIDE, False, 65_536 + 131_072),
    (W1 | WIDE, W2, False, 131_072 + 65_536),
    (C1 | WIDE, C1, False, 131_072 + 65_536),
    (C1, W1 | WIDE, False, 65_536 + 131_072),
    (W1, W1 | {"dtype": "float16"}, False, 131_072),
    (C1, C1 | {"page_size_padded": 98_304}, False, 65_536 + 98_304),
    (W1, W1 | {"backend": build.dense(build.ROW_SHAPE)}, False, 131_072),
]


@pytest.mark.parametrize(("first", "second", "one_spec", "per_block"), WINDOWED)
def test_full_attention_merges_over_one_window_or_one_chunk(
    first: Json, second: Json, one_spec: bool, per_block: int
) -> None:
    request = build.request(build.full("a", **first), build.full("b", **second), max_model_len=131_072)
    plan = kvpage.plan(request)
    (group,) = plan.groups
    assert group.layers == ("a", "b")
    assert plan.bytes_per_block == per_block
    assert group.page_size_bytes == (per_block // 2 if one_spec else per_block)
    assert plan.capacity.request_bytes == 8192 * per_block  # a full layer keeps every token, window or not
    comparison.compare(request)


def test_the_merged_group_carries_the_window() -> None:
    plan = kvpage.plan(build.request(build.full("a"), build.full("b", **W1)))
    assert plan.groups[0].sliding_window == 1024
    plan = kvpage.plan(build.request(build.full("a", **C1), build.full("b")))
    assert plan.groups[0].attention_chunk_size == 8192


def test_a_full_layer_with_a_window_is_not_a_sliding_window_layer() -> None:
    assert groups_of(build.full("a", **W1), build.sliding("b")) == [("a",), ("b",)]


def test_beside_others_full_layers_with_and_without_a_window_are_two_buckets() -> None:
    assert groups_of(build.full("a"), build.full("b", **W1), build.sliding("c")) == [("a",), ("b",), ("c",)]


def test_blocks_of_two_sizes_are_never_one_type() -> None:
    layers = [build.full("a"), build.full("b", block_size=32)]
    plan = kvpage.plan(build.request(*layers))
    assert (plan.layers["a"].decision, plan.layers["a"].block_size) == ("scale", 32)
    assert groups_of(*layers) == [("a", "b")]  # after scaling they are equal: one bucket


# --- chunked local attention beside others --------------------------------------------------------

# blocks of one request of L tokens with T scheduled at once, chunk C, block size 16: ceil(min(C + T, L) / 16)
CHUNKS = [
    # C, T, L, blocks
    (8192, 2048, 16_384, 640),
    (8192, 2048, 8192, 512),
    (8192, 2048, 10_240, 640),
    (8192, 2048, 10_239, 640),
    (8192, 8192, 131_072, 1024),
    (1024, 8192, 131_072, 576),
    (1024, 1, 131_072, 65),
    (1024, 16, 131_072, 65),
    (1024, 17, 131_072, 66),
    (16, 1, 131_072, 2),
    (16, 1, 1, 1),
    (1, 1, 131_072, 1),
    (1, 15, 131_072, 1),
    (1, 16, 131_072, 2),
    (8192, 100_000, 50_000, 3125),
    (2048, 2048, 2048, 128),
    (2048, 2048, 2049, 129),
    (2048, 2048, 4096, 256),
    (2048, 2048, 4097, 256),
    (100, 28, 1000, 8),
    (100, 29, 1000, 9),
]


@pytest.mark.parametrize(("chunk", "batched", "length", "blocks"), CHUNKS)
def test_blocks_of_chunked_local_attention(chunk: int, batched: int, length: int, blocks: int) -> None:
    request = build.request(
        build.chunked(chunk=chunk), build.full(heads=4), max_model_len=length, max_num_batched_tokens=batched
    )
    plan = kvpage.plan(request)
    full_blocks = -(-length // 32)  # scaled to 32 tokens
    assert list(plan.capacity.blocks_per_request or ()) == [blocks, full_blocks]
    assert plan.capacity.request_bytes == (blocks + full_blocks) * 65_536
    comparison.compare(request)


# layers -> groups
BESIDE_CHUNKED: list[tuple[list[Json], list[tuple[str, ...]]]] = [
    ([build.chunked("a"), build.chunked("b")], [("a", "b")]),
    ([build.chunked("a"), build.chunked("b", chunk=1024)], [("a",), ("b",)]),
    ([build.chunked("a"), build.chunked("b", heads=16)], [("a", "b")]),
    ([build.chunked("a"), build.chunked("b", size=96)], [("a", "b")]),
    ([build.chunked("a"), build.full("b")], [("a",), ("b",)]),
    ([build.chunked("a"), build.sliding("b")], [("a",), ("b",)]),
    ([build.chunked("a"), build.sliding("b", window=8192)], [("a",), ("b",)]),
    ([build.chunked("a"), build.full("b", **C1)], [("a",), ("b",)]),
    ([build.full("b"), build.chunked("a"), build.sliding("c")], [("b",), ("a",), ("c",)]),
    ([build.chunked("a"), build.mla("m")], [("a",), ("m",)]),
    ([build.chunked("a"), build.state("s", [[4096]], ["bfloat16"])], [("a",), ("s",)]),
    ([build.chunked("a"), build.state("s", [[65_536]], ["bfloat16"])], [("a",), ("s",)]),
    ([build.chunked("a.{i}", count=3), build.full("b")], [("a.0",), ("a.1",), ("a.2",), ("b",)]),
    (
        [build.chunked("a.{i}", count=4), build.full("b.{i}", count=3)],
        [("a.0", "a.1", "a.2", "a.3"), ("b.0", "b.1", "b.2")],
    ),
    ([build.chunked("a.{i}", count=3), build.full("b.{i}", count=2)], [("a.0", "a.2"), ("a.1",), ("b.0", "b.1")]),
    (
        [build.full("b.{i}", count=2), build.chunked("a.{i}", count=5)],
        [("b.0", "b.1"), ("a.0", "a.3"), ("a.1", "a.4"), ("a.2",)],
    ),
    ([build.chunked("a", block_size=32), build.chunked("b")], [("a", "b")]),
    ([build.chunked("a", block_size=32, heads=4), build.chunked("b")], [("a",), ("b",)]),
    ([build.encoder(), build.chunked("a"), build.chunked("b")], [("a", "b")]),
    ([build.chunked("a"), build.encoder(), build.full("b")], [("a",), ("b",)]),
]


@pytest.mark.parametrize(("layers", "groups"), BESIDE_CHUNKED)
def test_chunked_layers_beside_others(layers: list[Json], groups: list[tuple[str, ...]]) -> None:
    assert groups_of(*layers) == groups


def test_llama_4_scout() -> None:
    """12 full and 36 chunked layers: width 12, four groups, 54,613 blocks, 4,096 blocks a request."""
    layers = [build.full("full.{i}", count=12), build.chunked("chunked.{i}", count=36)]
    plan = kvpage.plan(build.request(*layers, memory_bytes=40 << 30, max_model_len=16_384, max_num_batched_tokens=8192))
    assert [len(group.layers) for group in plan.groups] == [12] * 4
    assert (plan.num_blocks, plan.bytes_per_block) == (54_613, 786_432)
    assert plan.capacity.request_bytes == 3_221_225_472


# --- layers without a cache -----------------------------------------------------------------------

CACHED: list[list[Json]] = [
    [build.full()],
    [build.sliding()],
    [build.chunked()],
    [build.mla()],
    [build.state("s", [[3, 64], [8]], ["bfloat16", "float32"])],
    [build.full("a"), build.full("b")],
    [build.full("a"), build.full("b", heads=4)],
    [build.full("a"), build.full("b", head_size_v=64)],
    [build.full("a"), build.sliding("b")],
    [build.full("a"), build.sliding("b", heads=4)],
    [build.full("a"), build.sliding("b", size=96)],
    [build.full("a"), build.chunked("b")],
    [build.full("a"), build.mla("b")],
    [build.mla("a"), build.mla("b", size=512)],
    [build.mla("a"), build.sliding("b")],
    [build.full("a"), build.state("s", [[8192]], ["bfloat16"])],
    [build.full("a"), build.state("s", [[3, 65536]], ["bfloat16"])],
    [build.full("a.{i}", count=3), build.sliding("b.{i}", count=7)],
    [build.full("a.{i}", count=4), build.sliding("b.{i}", count=5)],
    [build.full("a", page_size_padded=98_304), build.sliding("b")],
    [build.full("a", dtype="float8_e4m3fn"), build.sliding("b")],
]


@pytest.mark.parametrize("layers", CACHED)
def test_a_layer_without_a_cache_changes_nothing(layers: list[Json]) -> None:
    """Encoder-only layers before, between and behind the others: the same plan, and they hold nothing."""
    plain = kvpage.plan(build.request(*layers))
    mixed = [build.encoder("e0"), layers[0], build.encoder("e1"), *layers[1:], build.encoder("e2.{i}", count=2)]
    request = build.request(*mixed)
    plan = kvpage.plan(request)
    assert plan.groups == plain.groups
    assert (plan.num_blocks, plan.buffer_size_bytes) == (plain.num_blocks, plain.buffer_size_bytes)
    assert plan.capacity == plain.capacity
    for name, layer in plain.layers.items():
        assert plan.layers[name].tensors == layer.tensors
    for name in ("e0", "e1", "e2.0", "e2.1"):
        layer = plan.layers[name]
        assert (layer.kind, layer.decision, layer.group) == ("encoder_only_attention", "no_cache", None)
        assert layer.tensors == ()
        assert layer.page_size_bytes == 0
    comparison.compare(request)


def test_only_layers_without_a_cache_need_no_memory() -> None:
    plan = kvpage.plan(build.request(build.encoder("e.{i}", count=3)))
    assert plan.groups == ()
    assert (plan.num_blocks, plan.bytes_per_block, plan.buffer_size_bytes) == (1, 0, 0)
    assert plan.capacity.request_bytes == 0
    plan.check()
