"""What the simulation reads from a plan, and how blocks follow tokens."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvpage
from kvpage.errors import NotSupported, SpecInvalid
from kvpage.simulation.baseline import pools_layout
from kvpage.simulation.layout import Growth, layout_of
from kvpage.simulation.streams import CHAT, SHORT, stream_of_lengths
from planner import build
from simulation.layouts import growths
from simulation.naive import live_tokens


@given(growth=growths(), tokens=st.integers(1, 60))
def test_blocks_are_those_of_the_tokens_that_are_seen(growth: Growth, tokens: int) -> None:
    seen = live_tokens(growth, tokens)
    blocks = {token // growth.block_size for token in seen}
    assert growth.live(tokens) == len(seen)
    assert growth.blocks(tokens) == len(blocks)
    assert blocks == set(range(growth.first_block(tokens), growth.end_block(tokens)))


@given(growth=growths(), tokens=st.integers(1, 60))
def test_nothing_changes_before_the_next_change(growth: Growth, tokens: int) -> None:
    change = growth.next_change(tokens)
    for later in range(tokens, tokens + 40 if change is None else change):
        assert growth.first_block(later) == growth.first_block(tokens)
        assert growth.end_block(later) == growth.end_block(tokens)
        assert growth.live(later) == growth.live(tokens) + growth.live_growth(tokens) * (later - tokens)


def gemma(**more: Any) -> kvpage.Plan:
    layers = [build.full("full.{i}", count=10, heads=16), build.sliding("window.{i}", count=52, heads=16)]
    return kvpage.plan(build.request(*layers, memory_bytes=20 << 30, **more))


def test_gemma_by_vllms_rule() -> None:
    """One group of ten full layers, six of windows in slabs of ten layers: 131,072 bytes a page."""
    layout = layout_of(gemma(), memory_bytes=20 << 30)
    assert (layout.name, layout.memory_bytes) == ("unify", 20 << 30)
    assert [(pool.slabs, pool.slab_bytes) for pool in layout.pools] == [(16_383, 1_310_720)]
    full, window = layout.groups
    assert (full.count, full.growth, full.blocks_per_slab) == (1, Growth(kind="full", block_size=16), 1)
    assert (window.count, window.growth) == (6, Growth(kind="window", block_size=16, reach=1024))
    assert [full.bytes_per_token, window.bytes_per_token] == [Fraction(10 * 8192), Fraction(52 * 8192)]


def test_nested_slabs_keep_the_blocks_of_a_slab_and_the_live_bytes() -> None:
    unify, nested = layout_of(gemma()), layout_of(gemma(strategy="nested"))
    assert any(group.blocks_per_slab > 1 for group in nested.groups)
    assert {g.growth: g.bytes_per_token for g in nested.groups} == {g.growth: g.bytes_per_token for g in unify.groups}


def test_states_chunks_rows_and_shared_caches() -> None:
    layers = [
        build.chunked("chunked", chunk=64),
        build.mla("mla"),
        build.state("state", [[16, 4096]], ["bfloat16"]),
        build.chunked("shares", chunk=64, kv_sharing_target="chunked"),
    ]
    layout = layout_of(kvpage.plan(build.request(*layers, strategy="slab")))
    found = {group.growth.kind: group for group in layout.groups}
    assert found["chunk"].growth.reach == 64
    assert found["chunk"].bytes_per_token == 4096  # once, though two layers read it
    assert found["full"].bytes_per_token == 1152
    assert found["state"].bytes_per_token == 1 << 17
    assert found["state"].growth.blocks(10**6) == 1


def test_cross_attention_is_refused_by_name() -> None:
    cross = build.full("cross") | {"kind": "cross_attention"}
    plan = kvpage.plan(build.request(cross, max_num_encoder_input_tokens=100))
    with pytest.raises(NotSupported, match="'cross' is cross_attention"):
        layout_of(plan)


def test_a_plan_without_a_cache_is_refused() -> None:
    with pytest.raises(SpecInvalid, match="no layer of the plan has a cache"):
        layout_of(kvpage.plan(build.request(build.encoder())))


def test_pools_share_the_memory_by_the_mean_need() -> None:
    """Requests of one length, and layers of one size: as many bytes as tokens, 4 against 1."""
    layers = [build.full("full"), build.sliding("window", window=1600)]
    layout = layout_of(kvpage.plan(build.request(*layers, memory_bytes=1 << 30)))
    stream = stream_of_lengths("6400,1", "'one length'")
    baseline = pools_layout(layout, stream, 1)
    full, window = baseline.pools
    assert full.slab_bytes == window.slab_bytes == 16 * 4096
    assert Fraction(full.slabs, window.slabs) == pytest.approx(401 / 101, rel=1e-3)  # 6,401 tokens, 1,600 of a window
    assert sum(pool.slabs * pool.slab_bytes for pool in baseline.pools) <= layout.memory_bytes


@pytest.mark.parametrize("stream", [SHORT, CHAT], ids=["short", "chat"])
def test_pools_are_the_same_for_every_layout_of_a_model(stream: Any) -> None:
    of_unify = pools_layout(layout_of(gemma()), stream, 1)
    of_nested = pools_layout(layout_of(gemma(strategy="nested"), memory_bytes=of_unify.memory_bytes), stream, 1)
    assert of_unify == of_nested
