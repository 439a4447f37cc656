"""Views over real bytes: what torch and NumPy make of a plan, and what a write through one view does to the others."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvpage
from kvpage.errors import KvpageError
from planner import build, comparison, rows, view_oracle
from planner.random_requests import small_request

Json = dict[str, Any]
UNTOUCHED = 0xEE
TORCH_DTYPES = {
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}


def planned(rng: random.Random) -> tuple[Json, Any] | None:
    request = small_request(rng)
    try:
        return request, kvpage.plan(request)
    except KvpageError:
        return None


def blocks_of(view: Any, num_blocks: int) -> Any:
    """The block of each position along a view's block axis, ready to broadcast over the view."""
    extent = view.shape[view.block_axis]
    block = np.arange(extent) // (extent // num_blocks)
    return block.reshape([-1 if axis == view.block_axis else 1 for axis in range(len(view.shape))])


@given(st.randoms(use_true_random=False), st.integers(0, 2**32 - 1))
def test_groups_that_take_different_blocks_never_disturb_each_other(rng: random.Random, seed: int) -> None:
    """Deal the blocks out to the groups, write every layer's share through its views, read all of it back."""
    found = planned(rng)
    if found is None:
        return
    _, plan = found
    values = np.random.default_rng(seed)
    raw = np.full(plan.buffer_size_bytes, UNTOUCHED, dtype=np.uint8)
    owner = values.integers(len(plan.groups) + 1, size=plan.num_blocks)  # the last owner is nobody
    written = []
    for layer in plan.layers.values():
        for view in layer.tensors if layer.kv_sharing_target is None else ():
            array = view_oracle.as_array(view, raw)
            mine = np.broadcast_to(owner[blocks_of(view, plan.num_blocks)] == layer.group, array.shape)
            data = values.integers(np.iinfo(array.dtype).max, size=int(mine.sum()), dtype=array.dtype)
            array[mine] = data
            written.append((array, mine, data))
    for array, mine, data in written:
        assert (array[mine] == data).all()
    payload = sum(data.nbytes for _, _, data in written)
    assert (raw != UNTOUCHED).sum() <= payload  # padding, and blocks of nobody, stayed as they were


@given(st.randoms(use_true_random=False))
def test_padding_bytes_belong_to_no_view(rng: random.Random) -> None:
    """The bytes of one block of one layer: its views cover its real page exactly."""
    found = planned(rng)
    if found is None:
        return
    request, plan = found
    axes = comparison.block_axes(request)
    for layer in plan.layers.values():
        tables = [
            view_oracle.blocks_by_byte(view, axes[layer.name], plan.num_blocks, plan.buffer_size_bytes)
            for view in layer.tensors
        ]
        for block in range(plan.num_blocks):
            assert sum((table == block).sum() for table in tables) == layer.real_page_size_bytes


@given(st.randoms(use_true_random=False))
def test_torch_and_numpy_see_the_same_elements(rng: random.Random) -> None:
    found = planned(rng)
    if found is None:
        return
    _, plan = found
    size = -(-plan.buffer_size_bytes // 4) * 4
    raw = np.random.default_rng(0).integers(255, size=size, dtype=np.uint8)
    storage = torch.from_numpy(raw)
    for layer in plan.layers.values():
        for view in layer.tensors:
            item = rows.ITEM_SIZE_BYTES[view.dtype]
            typed = storage.view(view_oracle.TORCH_DTYPES[item])
            strides = [stride // item for stride in view.strides_bytes]
            tensor = torch.as_strided(typed, view.shape, strides, view.offset_bytes // item)
            assert tensor.data_ptr() == raw.ctypes.data + view.offset_bytes
            words = np.ascontiguousarray(view_oracle.as_array(view, raw))
            assert words.tobytes() == tensor.contiguous().numpy().tobytes()
            assert TORCH_DTYPES[view.dtype].itemsize == item


def test_a_write_is_seen_through_every_view_of_the_same_bytes() -> None:
    """Two groups of equal pages over one buffer: block 3 of both is the same memory."""
    plan = kvpage.plan(build.request(build.full(), build.sliding(), num_blocks=9, max_model_len=16))
    raw = np.zeros(plan.buffer_size_bytes, dtype=np.uint8)
    one, other = (view_oracle.as_array(plan.layers[name].tensors[0], raw) for name in ("full", "sliding"))
    one[3, 15, 7, 255] = 0x1234
    assert other[3, 15, 7, 255] == 0x1234
    assert np.count_nonzero(raw) == 2


def test_heads_outside_tokens_with_a_padded_page() -> None:
    """Strides come from the physical shape; from the logical one the token stride would be 512 elements."""
    backend = {"shape": build.KV_SHAPE, "stride_order": [0, 1, 3, 2, 4], "layered_stride_order": [1, 4, 0, 2, 3, 5]}
    layer = build.full(heads=8, size=64, dtype="float32", backend=backend, page_size_padded=65_792)
    plan = kvpage.plan(build.request(layer, num_blocks=5, max_model_len=16))
    (view,) = plan.layers["full"].tensors
    assert view.shape == (5, 2, 16, 8, 64)
    assert [stride // 4 for stride in view.strides_bytes] == [16_448, 8192, 64, 1024, 1]
    addresses = view_oracle.element_addresses(view) // 4
    assert addresses[1].min() == 16_448
    assert addresses.max() == 82_175 < plan.buffer_size_bytes // 4 == 82_240


# Layouts whose blocks are not one piece: they may not be padded, and may share memory only with their like.
KV_FIRST = {"shape": [2, "num_blocks", "block_size", "num_kv_heads", "head_size"]}


@pytest.mark.parametrize("num_blocks", [2, 3, 4])
def test_k_before_the_blocks_is_dense_or_refused(num_blocks: int) -> None:
    """bf16, 16 tokens, 2 heads of 8: 1,024 bytes; with pages of 1,536 K of page 3 would lie on V of page 0."""
    layer = build.full(heads=2, size=8, backend=KV_FIRST)
    plan = kvpage.plan(build.request(layer, num_blocks=num_blocks, max_model_len=1))
    (view,) = plan.layers["full"].tensors
    assert [stride // 2 for stride in view.strides_bytes] == [256 * num_blocks, 256, 16, 8, 1]
    request = build.request(layer | {"page_size_padded": 1536}, num_blocks=num_blocks, max_model_len=1)
    with pytest.raises(KvpageError) as caught:
        kvpage.plan(request)
    assert caught.value.code == "layout-unsupported"


def test_blocks_outermost_in_memory_but_not_in_the_logical_shape_may_be_padded() -> None:
    """What counts is the order in memory: K and V of one block lie together, wherever the axis stands in the shape."""
    backend = KV_FIRST | {"stride_order": [1, 0, 2, 3, 4], "layered_stride_order": [2, 0, 1, 3, 4, 5]}
    layer = build.full(heads=2, size=8, backend=backend)
    request = build.request(layer | {"page_size_padded": 1536}, num_blocks=5, max_model_len=1)
    (view,) = kvpage.plan(request).layers["full"].tensors
    assert view.shape == (2, 5, 16, 2, 8)
    assert view.strides_bytes == (512, 1536, 32, 16, 2)
    comparison.compare(request)
    beside = build.request(layer, build.state("s", [[1536]], ["int8"]), num_blocks=5, max_model_len=1)
    assert kvpage.plan(beside).layers["full"].tensors[0].strides_bytes == (512, 1536, 32, 16, 2)


def test_regions_begin_where_their_items_can() -> None:
    """Nine blocks of three bytes are 27 bytes; four-byte items begin at 28, and the gap is part of the buffer."""
    layers = [build.state("bytes", [[3]], ["int8"]), build.state("floats", [[2]], ["float32"])]
    request = build.request(*layers, num_blocks=9)
    plan = kvpage.plan(request)
    assert [layer.tensors[0].offset_bytes for layer in plan.layers.values()] == [0, 28]
    assert plan.buffer_size_bytes == 28 + 9 * 8
    assert view_oracle.faults(plan, comparison.block_axes(request)) == set()
    for memory, num_blocks in ((98, 8), (99, 8), (100, 9), (111, 9)):  # 9 x 11 = 99 bytes, and the gap
        found = kvpage.plan(build.request(*layers, memory_bytes=memory))
        assert found.num_blocks == num_blocks
        assert found.buffer_size_bytes <= memory


SHARERS: list[tuple[Json, Json, bool]] = [
    (KV_FIRST, KV_FIRST, True),
    (KV_FIRST, {"shape": build.KV_SHAPE}, False),
    ({"shape": build.KV_SHAPE}, KV_FIRST, False),
    ({"shape": build.KV_SHAPE}, {"shape": build.ROW_SHAPE}, True),
    (KV_FIRST, {**KV_FIRST, "stride_order": [1, 0, 2, 3, 4]}, False),
    ({**KV_FIRST, "stride_order": [1, 0, 2, 3, 4]}, {"shape": build.KV_SHAPE}, True),
    ({"shape": build.KV_SHAPE, "stride_order": [2, 0, 1, 3, 4]}, {"shape": build.KV_SHAPE}, False),
]


@pytest.mark.parametrize(("first", "second", "may_share"), SHARERS)
def test_scattered_blocks_share_memory_only_with_their_like(first: Json, second: Json, may_share: bool) -> None:
    """Full and windowed layers of equal pages share a buffer; with K before the blocks, block 1 is two pieces."""
    layers = [build.full(heads=1, size=8, backend=first), build.sliding(heads=1, size=8, backend=second)]
    request = build.request(*layers, num_blocks=5, max_model_len=1)
    comparison.compare(request)
    if may_share:
        plan = kvpage.plan(request)
        assert view_oracle.faults(plan, comparison.block_axes(request)) == set()
    else:
        with pytest.raises(KvpageError) as caught:
            kvpage.plan(request)
        assert caught.value.code == "layout-unsupported"


@pytest.mark.parametrize(("heads", "block_size"), [(2, 8), (4, 4), (1, 16)])
def test_scattered_blocks_of_equal_pages_but_other_extents(heads: int, block_size: int) -> None:
    """Tokens outside blocks in memory: equal pages are cut into other pieces when the number of tokens differs."""
    tokens_first = {"shape": build.KV_SHAPE, "stride_order": [2, 0, 1, 3, 4]}
    one = build.full(heads=1, size=4, block_size=16, backend=tokens_first)
    other = build.sliding(heads=heads, size=4, block_size=block_size, backend=tokens_first)
    request = build.request(one, other, num_blocks=5, max_model_len=1)
    if (heads, block_size) == (1, 16):
        kvpage.plan(request).check()
        return
    with pytest.raises(KvpageError) as caught:
        kvpage.plan(request)
    assert caught.value.code == "layout-unsupported"


@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 192])
def test_a_block_is_cut_into_kernel_blocks(block_size: int) -> None:
    """flashinfer takes 16, 32 or 64 tokens; a block of 128 is two of 64, one after the other in its page."""
    kernel = 64 if block_size % 64 == 0 else block_size
    layer = build.full(heads=2, size=64, block_size=block_size, backend="flashinfer")
    request = build.request(layer, num_blocks=5, max_model_len=1)
    plan = kvpage.plan(request)
    (view,) = plan.layers["full"].tensors
    assert view.shape == (5 * block_size // kernel, 2, kernel, 2, 64)
    assert view.strides_bytes[0] == 2 * kernel * 2 * 64 * 2
    comparison.compare(request)


def test_a_kernel_block_split_is_not_combined_with_padding() -> None:
    """One head of 64, bf16, 32 tokens in kernel blocks of 16: whole pages of 12,288 bytes have no halves."""
    layer = build.full(heads=1, size=64, block_size=32, kernel_block_sizes=[16])
    assert kvpage.plan(build.request(layer, num_blocks=4, max_model_len=1)).layers["full"].tensors[0].shape[0] == 8
    with pytest.raises(KvpageError) as caught:
        kvpage.plan(build.request(layer | {"page_size_padded": 12_288}, num_blocks=4, max_model_len=1))
    assert caught.value.code == "layout-unsupported"


def test_a_scaled_block_with_a_gap_is_not_split_either() -> None:
    """Pages of 8 bytes padded to 9 are scaled by 32: 128 tokens; kernels of 2 or 4 tokens would split that."""
    layer = build.full(heads=1, size=1, dtype="int8", block_size=4, kernel_block_sizes=[2, 4], page_size_padded=9)
    request = build.request(layer, build.sliding(heads=3, size=3, block_size=8, window=4), num_blocks=4)
    request |= {"max_model_len": 1, "max_num_batched_tokens": 1}
    with pytest.raises(KvpageError) as caught:
        kvpage.plan(request)
    assert caught.value.code in ("layout-unsupported", "cannot-unify-page-size")
