"""Attention over pages read by their strides is attention over dense tensors: padded, slab and nested, in any order."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

import kvpage
from kvpage.client.attachment import Tensors
from kvpage.client.paging import Pages, kv_pages
from kvpage.client.views import BufferViews, PlannedViews
from kvpage.errors import NotSupported, SpecInvalid
from kvpage.plans import LayerPlan, Plan

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""What flex attention may differ by from SDPA: it sums in another order, and rounds the weights to the dtype."""
HEADS, KV_HEADS, BATCH, LENGTH, BLOCK_SIZE = 4, 2, 2, 70, 16


class Layout(NamedTuple):
    strategy: str
    backend: str
    head_size: int
    head_size_v: int | None
    other_size: int
    """Width of the heads of other layers, which makes pages differ."""
    kv_cache_layout: str | None = None
    is_dense: bool = False


LAYOUTS = {
    "dense": Layout("unify", "flash_attn", 32, None, 32, is_dense=True),
    "padded 3:2": Layout("unify", "flash_attn", 32, None, 48),
    "padded, heads first": Layout("unify", "flash_attn", 32, None, 48, "HND"),
    "padded, K and V of other widths": Layout("unify", "flash_attn_diffkv", 32, 16, 48),
    "slab": Layout("slab", "flash_attn", 32, None, 48),
    "nested": Layout("nested", "flash_attn", 32, None, 48),
    "scaled, then padded": Layout("scale_then_pad", "flash_attn", 32, None, 48),
    "named": Layout("unify", "BLHNC", 32, 16, 48),
}


class Case(NamedTuple):
    """Sequences in pages, and the same in dense tensors."""

    plan: Plan
    layer: LayerPlan
    tensor: torch.Tensor
    keys: Pages
    values: Pages
    table: torch.Tensor
    dense_keys: torch.Tensor
    dense_values: torch.Tensor
    queries: torch.Tensor

    def gathered(self, start: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(pages.gather(self.table, start, LENGTH) for pages in (self.keys, self.values))  # type: ignore[return-value]


def case(name: str, dtype: torch.dtype, seed: int = 0) -> Case:
    layout, element = LAYOUTS[name], str(dtype).removeprefix("torch.")
    common: dict[str, Any] = {"kind": "full_attention", "block_size": BLOCK_SIZE, "dtype": element}
    common |= {"num_kv_heads": KV_HEADS, "backend": layout.backend, "head_size_v": layout.head_size_v}
    layers = [{"name": name, "head_size": layout.head_size} | common for name in ("c", "d", "a")]
    window = {"kind": "sliding_window", "sliding_window": 64, "head_size": layout.other_size}
    layers.append({"name": "b.{i}", "count": 3} | common | window)
    request = {"strategy": layout.strategy, "allocator": "slabs", "num_blocks": 40, "layers": layers}
    plan = kvpage.plan(request | {"kv_cache_layout": layout.kv_cache_layout})
    buffer = torch.full((plan.buffer_size_bytes,), 255, dtype=torch.uint8)  # no number, where nothing is written
    tensor = Tensors(PlannedViews(plan), BufferViews(buffer))["a"][0]
    keys, values = kv_pages(plan.layers["a"], tensor, layout.head_size)
    blocks = random.Random(seed).sample(range(1, tensor.shape[0]), BATCH * -(-LENGTH // keys.block_size))
    table = torch.tensor(blocks).view(BATCH, -1)
    random_ = torch.Generator().manual_seed(seed)
    dense = [
        torch.randn(BATCH, KV_HEADS, LENGTH, pages.rows.shape[-1], generator=random_).to(dtype)
        for pages in (keys, values)
    ]
    slots = keys.slots(table, 0, LENGTH)
    for pages, rows in zip((keys, values), dense, strict=True):
        pages.write(slots, rows)
    queries = torch.randn(BATCH, HEADS, 8, layout.head_size, generator=random_).to(dtype)
    return Case(plan, plan.layers["a"], tensor, keys, values, table, dense[0], dense[1], queries)


def causal(window: int | None) -> torch.Tensor:
    """Which tokens each of the last queries may look at."""
    last = torch.arange(LENGTH - 8, LENGTH)[:, None]
    tokens = torch.arange(LENGTH)
    return (tokens <= last) & (tokens > last - (window or LENGTH))


def attention(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int | None) -> torch.Tensor:
    mask = causal(window)
    return scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)


# --- pages against plain indexing -------------------------------------------------------------------------------------


def test_the_layouts_are_what_their_names_say() -> None:
    strides = {name: case(name, torch.float32) for name in LAYOUTS}
    for name, one in strides.items():
        dense = one.tensor[0].numel() * one.tensor.element_size()
        assert (one.tensor.stride(0) * one.tensor.element_size() == dense) == LAYOUTS[name].is_dense, name
    assert [group.blocks_per_slab for group in strides["nested"].plan.groups] != [1, 1]
    assert strides["padded 3:2"].layer.page_size_padded is not None
    assert all(one.table.flatten().tolist() != sorted(one.table.flatten().tolist()) for one in strides.values())


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_gathered_rows_are_those_of_plain_indexing(name: str, dtype: torch.dtype) -> None:
    one = case(name, dtype)
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]
    for pages, dense in ((one.keys, one.dense_keys), (one.values, one.dense_values)):
        size = pages.block_size
        expected = [
            torch.stack([pages.rows[row[token // size], token % size].view(bits) for token in range(LENGTH)], dim=1)
            for row in one.table.tolist()
        ]
        assert torch.equal(pages.gather(one.table, 0, LENGTH).view(bits), torch.stack(expected))
        assert torch.equal(pages.gather(one.table, 0, LENGTH).view(bits), dense.view(bits))
        assert torch.equal(pages.gather(one.table, 37, 61).view(bits), dense[:, :, 37:61].view(bits))


def test_blocks_of_several_kernel_blocks_are_read_as_one() -> None:
    layer = {"name": "a", "kind": "full_attention", "block_size": 128, "num_kv_heads": 2, "head_size": 16}
    layer |= {"dtype": "float32", "backend": "flashinfer"}
    plan = kvpage.plan({"strategy": "unify", "num_blocks": 6, "layers": [layer]})
    tensor = Tensors(PlannedViews(plan), BufferViews(torch.zeros(plan.buffer_size_bytes, dtype=torch.uint8)))["a"][0]
    assert plan.layers["a"].tensors[0].kernel_blocks_per_block == 2
    keys, _ = kv_pages(plan.layers["a"], tensor, 16)
    table, rows = torch.tensor([[4, 2]]), torch.randn(1, 2, 200, 16)
    keys.write(keys.slots(table, 0, 200), rows)
    assert torch.equal(keys.gather(table, 0, 200), rows)
    assert torch.equal(tensor[9, 0, 3], rows[0, :, 64 + 3])


def test_what_does_not_fit_is_refused() -> None:
    one = case("padded 3:2", torch.float32)
    with pytest.raises(SpecInvalid, match="not in a table"):
        one.keys.gather(one.table, 0, 200)
    with pytest.raises(SpecInvalid, match="do not fit"):
        one.keys.write(one.keys.slots(one.table, 0, 4), torch.zeros(BATCH, KV_HEADS, 4, 8))
    with pytest.raises(SpecInvalid, match="bfloat16"):
        one.keys.write(one.keys.slots(one.table, 0, 4), torch.zeros(BATCH, KV_HEADS, 4, 32, dtype=torch.bfloat16))
    with pytest.raises(SpecInvalid, match="32 to 32 elements, not 31"):
        kv_pages(one.layer, one.tensor, 31)
    with pytest.raises(SpecInvalid, match="axes"):
        kv_pages(one.layer, one.tensor[0], 32)
    with pytest.raises(SpecInvalid, match="kernel block"):
        Pages(one.keys.rows, 24)


def test_a_layout_that_was_written_out_needs_the_names_of_its_axes() -> None:
    axes = ["num_blocks", "block_size", 2, "num_kv_heads", "head_size"]
    layer = {"name": "a", "kind": "full_attention", "block_size": 5, "num_kv_heads": 3, "head_size": 8}
    layer |= {"dtype": "float32", "backend": {"shape": axes}}
    plan = kvpage.plan({"strategy": "unify", "num_blocks": 6, "layers": [layer]})
    tensor = Tensors(PlannedViews(plan), BufferViews(torch.zeros(plan.buffer_size_bytes, dtype=torch.uint8)))["a"][0]
    with pytest.raises(NotSupported, match="names"):
        kv_pages(plan.layers["a"], tensor, 8)
    _, values = kv_pages(plan.layers["a"], tensor, 8, axes=[str(axis) for axis in axes])
    values.write(torch.tensor([[17]]), torch.ones(1, 3, 1, 8))
    assert bool((tensor[3, 2, 1] == 1).all())
    assert int(tensor.sum()) == 24


# --- attention --------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(12)
@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_sdpa_over_pages_is_sdpa_over_dense_tensors_to_the_last_bit(
    name: str, dtype: torch.dtype, window: int | None
) -> None:
    one = case(name, dtype)
    expected = attention(one.queries, one.dense_keys, one.dense_values, window)
    assert torch.equal(attention(one.queries, *one.gathered(), window), expected)


def test_of_a_window_only_its_blocks_are_read() -> None:
    one, start = case("nested", torch.float32), LENGTH - 8 - 23
    expected = attention(one.queries, one.dense_keys, one.dense_values, 24)
    table = one.table.clone()
    table[:, : start // BLOCK_SIZE] = 0  # given back: the null block, which is no number here
    keys, values = (pages.gather(table, start, LENGTH) for pages in (one.keys, one.values))
    mask = causal(24)[:, start:]
    found = scaled_dot_product_attention(one.queries, keys, values, attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.sampled(6)
@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_flex_attention_over_gathered_pages_is_that_over_dense_tensors(
    name: str, dtype: torch.dtype, window: int | None
) -> None:
    one = case(name, dtype)
    seen = causal(window)
    mask = create_block_mask(lambda _b, _h, query, token: seen[query, token], None, None, 8, LENGTH, device="cpu")
    found = flex_attention(one.queries, *one.gathered(), block_mask=mask, enable_gqa=True)
    assert torch.equal(
        found, flex_attention(one.queries, one.dense_keys, one.dense_values, block_mask=mask, enable_gqa=True)
    )
    expected = attention(one.queries, one.dense_keys, one.dense_values, window)
    torch.testing.assert_close(found, expected, atol=TOLERANCE[dtype], rtol=0)


def rows_in_place(pages: Pages) -> torch.Tensor:
    """All rows of the pool one after the other, those too that lie in padding and in K or V: [1, heads, rows, width].

    Flex attention reads them where they are, and the mask says which are whose. Only where pages step by whole rows."""
    blocks, tokens, heads, width = pages.rows.shape
    step, row = pages.rows.stride(0), pages.rows.stride(1)
    assert step % row == 0
    count = (blocks - 1) * (step // row) + tokens
    return pages.rows.as_strided((1, heads, count, width), (0, pages.rows.stride(2), row, 1))


def paged_mask(one: Case, window: int | None) -> BlockMask:
    """Over physical rows: each belongs to a block and a place in it, and through the table to a token, or to none."""
    step = one.keys.rows.stride(0) // one.keys.rows.stride(1)
    count = (one.keys.rows.shape[0] - 1) * step + BLOCK_SIZE
    token_of = torch.full((BATCH, count), -1)
    for row, blocks in enumerate(one.table.tolist()):
        for token in range(LENGTH):
            token_of[row, blocks[token // BLOCK_SIZE] * step + token % BLOCK_SIZE] = token
    seen = causal(window)

    def mask(batch: torch.Tensor, _head: torch.Tensor, query: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        token = token_of[batch, place]
        return (token >= 0) & seen[query, token.clamp(min=0)]

    return create_block_mask(mask, BATCH, None, 8, count, device="cpu")


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.sampled(5)
@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["dense", "padded 3:2", "slab", "nested"])
def test_flex_attention_reads_pages_where_they_lie(name: str, dtype: torch.dtype, window: int | None) -> None:
    """Nothing is gathered: a mask over the rows of the pool stands for the block table."""
    one = case(name, dtype)
    keys, values = (rows_in_place(pages).nan_to_num_(7.0) for pages in (one.keys, one.values))  # a mask hides numbers
    assert keys.untyped_storage().data_ptr() == one.tensor.untyped_storage().data_ptr()
    keys, values = (rows.expand(BATCH, -1, -1, -1) for rows in (keys, values))
    found = flex_attention(one.queries, keys, values, block_mask=paged_mask(one, window), enable_gqa=True)
    expected = attention(one.queries, one.dense_keys, one.dense_values, window)
    torch.testing.assert_close(found, expected, atol=TOLERANCE[dtype], rtol=0)


# --- the checks fire --------------------------------------------------------------------------------------------------


def wrong_strides(one: Case) -> Iterator[tuple[str, Pages]]:
    """The keys, as somebody would read them who takes one stride for another."""
    rows, size = one.keys.rows, one.keys.block_size
    dense = rows[0].numel() * (2 if one.tensor.dim() == 5 else 1)
    yield "pages dense", Pages(rows.as_strided(rows.shape, (dense, *rows.stride()[1:])), size)
    swapped = (rows.stride(0), rows.stride(2), rows.stride(1), rows.stride(3))
    yield "tokens for heads", Pages(rows.as_strided(rows.shape, swapped), size)
    yield "a page further", Pages(rows.as_strided(rows.shape, rows.stride(), rows.storage_offset() + 1), size)


@pytest.mark.parametrize("name", ["padded 3:2", "slab", "nested"])
def test_wrong_strides_are_seen(name: str) -> None:
    one = case(name, torch.float32)
    expected = attention(one.queries, one.dense_keys, one.dense_values, None)
    for what, keys in wrong_strides(one):
        found = attention(one.queries, keys.gather(one.table, 0, LENGTH), one.gathered()[1], None)
        assert not torch.equal(found, expected), what
        assert not bool((found - expected).abs().max() < 1e-3), what


def test_a_table_in_the_wrong_order_is_seen() -> None:
    one = case("nested", torch.float32)
    expected = attention(one.queries, one.dense_keys, one.dense_values, 24)
    table = one.table.flip(1)
    keys, values = (pages.gather(table, 0, LENGTH) for pages in (one.keys, one.values))
    assert not torch.equal(attention(one.queries, keys, values, 24), expected)
