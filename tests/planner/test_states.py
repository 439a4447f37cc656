"""Recurrent states: pages of several tensors, and pages that divide the largest page of a hybrid."""

from __future__ import annotations

from typing import Any

import pytest

import kvpage
from kvpage.errors import CannotUnify, SpecInvalid
from planner import build, comparison

PAGE = 65_536  # of the attention layer beside the states: 16 tokens x 8 heads x (128 + 128) x 2 bytes

# shapes, dtypes, bytes of the state, page of all layers, decision for the state,
# decision and block size for the attention layer
BESIDE_ATTENTION: list[tuple[list[list[int]], list[str], int, int, str, str, int]] = [
    ([[32768]], ["bfloat16"], 65_536, PAGE, "keep", "keep", 16),
    ([[3, 8192], [8192]], ["bfloat16", "bfloat16"], 65_536, PAGE, "keep", "keep", 16),
    ([[16384]], ["bfloat16"], 32_768, PAGE, "pad", "keep", 16),
    ([[3, 4096], [4096]], ["bfloat16", "bfloat16"], 32_768, PAGE, "pad", "keep", 16),
    ([[8192]], ["float16"], 16_384, PAGE, "pad", "keep", 16),
    ([[4096]], ["float32"], 16_384, PAGE, "pad", "keep", 16),
    ([[64, 64], [64, 64]], ["bfloat16", "bfloat16"], 16_384, PAGE, "pad", "keep", 16),
    ([[64, 64]], ["bfloat16"], 8192, PAGE, "pad", "keep", 16),
    ([[1024], [2048]], ["float32", "bfloat16"], 8192, PAGE, "pad", "keep", 16),
    ([[3, 1024], [1024]], ["bfloat16", "bfloat16"], 8192, PAGE, "pad", "keep", 16),
    ([[3, 512], [1, 256]], ["bfloat16", "float32"], 4096, PAGE, "pad", "keep", 16),
    ([[16, 8, 8]], ["float32"], 4096, PAGE, "pad", "keep", 16),
    ([[32, 32]], ["float16"], 2048, PAGE, "pad", "keep", 16),
    ([[7, 64], [64]], ["int8", "float8_e4m3fn"], 512, PAGE, "pad", "keep", 16),
    ([[1], [2], [1]], ["float32", "int8", "bfloat16"], 8, PAGE, "pad", "keep", 16),
    ([[1]], ["float32"], 4, PAGE, "pad", "keep", 16),
    ([[2]], ["int8"], 2, PAGE, "pad", "keep", 16),
    ([[1]], ["int8"], 1, PAGE, "pad", "keep", 16),
    ([[65536]], ["bfloat16"], 131_072, 131_072, "keep", "scale", 32),
    ([[131072]], ["bfloat16"], 262_144, 262_144, "keep", "scale", 64),
    ([[3, 16384], [16384]], ["float32", "float32"], 262_144, 262_144, "keep", "scale", 64),
    ([[3, 65536]], ["bfloat16"], 393_216, 393_216, "keep", "scale", 96),
    ([[49152]], ["bfloat16"], 98_304, 98_304, "keep", "pad", 16),
    ([[3, 8192], [32, 128, 128]], ["bfloat16", "float32"], 2_146_304, 2_146_304, "keep", "pad", 16),
]


@pytest.mark.parametrize(("shapes", "dtypes", "size", "page", "state", "attention", "block_size"), BESIDE_ATTENTION)
def test_a_state_whose_page_divides_the_largest_is_padded_and_keeps_its_block(
    shapes: list[list[int]], dtypes: list[str], size: int, page: int, state: str, attention: str, block_size: int
) -> None:
    request = build.request(build.full(), build.state("state", shapes, dtypes))
    plan = kvpage.plan(request)
    got = plan.layers["state"]
    assert (got.decision, got.block_size) == (state, 16)
    assert (got.real_page_size_bytes, got.page_size_bytes) == (size, page)
    assert got.page_size_padded == (page if state == "pad" else None)
    assert (plan.layers["full"].decision, plan.layers["full"].block_size) == (attention, block_size)
    assert {view.strides_bytes[0] for layer in plan.layers.values() for view in layer.tensors} == {page}
    assert plan.num_blocks == (1 << 30) // page
    comparison.compare(request)


@pytest.mark.parametrize(
    ("shapes", "dtypes", "size"),
    [
        ([[3, 8192]], ["bfloat16"], 49_152),
        ([[3, 1024]], ["bfloat16"], 6144),
        ([[3]], ["int8"], 3),
        ([[3], [3]], ["bfloat16", "float16"], 12),
        ([[10_000]], ["int8"], 10_000),
        ([[40, 1024]], ["int8"], 40_960),
        ([[3, 2048], [16, 16]], ["bfloat16", "bfloat16"], 12_800),
        ([[65_535]], ["int8"], 65_535),
    ],
)
def test_a_state_that_does_not_divide_the_largest_page_is_refused(
    shapes: list[list[int]], dtypes: list[str], size: int
) -> None:
    with pytest.raises(CannotUnify) as caught:
        kvpage.plan(build.request(build.full(), build.state("state", shapes, dtypes)))
    expected = {"layer": "state", "page_size_bytes": size, "largest_page_size_bytes": PAGE, "largest_layer": "full"}
    assert caught.value.details == expected


def test_the_padding_a_user_gave_a_state_counts_as_its_page() -> None:
    small = build.state("state", [[4096]], ["bfloat16"], page_size_padded=16_384)
    plan = kvpage.plan(build.request(build.full(), small))
    assert (plan.layers["state"].decision, plan.layers["state"].page_size_padded) == ("pad", PAGE)
    with pytest.raises(CannotUnify):
        kvpage.plan(build.request(build.full(), small | {"page_size_padded": 20_480}))


def test_a_padded_state_shares_a_bucket_with_an_equal_one() -> None:
    """After padding, a state padded by the user to the same page is of the same spec: one group of four, width 2."""
    layers = [build.full("a.{i}", count=2), build.state("s.{i}", [[8192]], ["bfloat16"], count=2)]
    layers.append(build.state("t.{i}", [[8192]], ["bfloat16"], count=2, page_size_padded=PAGE))
    plan = kvpage.plan(build.request(*layers))
    assert [list(group.layers) for group in plan.groups] == [["a.0", "a.1"], ["s.0", "t.0"], ["s.1", "t.1"]]


# --- several tensors in a page --------------------------------------------------------------------

# shapes, dtypes, page in bytes, offset of each tensor inside the page
IN_ONE_PAGE: list[tuple[list[list[int]], list[str], int, list[int]]] = [
    ([[3, 8192], [32, 128, 128]], ["bfloat16", "float32"], 2_146_304, [0, 49_152]),
    ([[3, 8192], [32, 128, 128]], ["bfloat16", "bfloat16"], 1_097_728, [0, 49_152]),
    ([[3, 10240], [128, 64, 128]], ["bfloat16", "float32"], 4_255_744, [0, 61_440]),
    ([[3, 10240], [48, 128, 128]], ["bfloat16", "bfloat16"], 1_634_304, [0, 61_440]),
    ([[3, 8192], [8192, 16]], ["bfloat16", "bfloat16"], 311_296, [0, 49_152]),
    ([[8192, 16], [3, 8192]], ["bfloat16", "bfloat16"], 311_296, [0, 262_144]),
    ([[3, 4096], [16, 64, 64]], ["bfloat16", "float32"], 286_720, [0, 24_576]),
    ([[4], [4]], ["bfloat16", "float32"], 24, [0, 8]),
    ([[2], [1]], ["bfloat16", "float32"], 8, [0, 4]),
    ([[8], [4], [2]], ["int8", "bfloat16", "float32"], 24, [0, 8, 16]),
    ([[3]], ["int8"], 3, [0]),
    ([[3], [5]], ["bfloat16", "float16"], 16, [0, 6]),
    ([[2, 3], [3, 2], [6]], ["float32", "float32", "float32"], 72, [0, 24, 48]),
    ([[1, 1, 1, 4]], ["float32"], 16, [0]),
    ([[128], [64, 2], [16]], ["uint8", "float16", "float32"], 448, [0, 128, 384]),
    ([[5, 4], [8]], ["bfloat16", "float32"], 72, [0, 40]),
    ([[6], [2], [4]], ["bfloat16", "float32", "int8"], 24, [0, 12, 20]),
    ([[4], [6], [2]], ["int8", "bfloat16", "float32"], 24, [0, 4, 16]),
    ([[16], [16], [16], [16]], ["float8_e4m3fn", "bfloat16", "float32", "int8"], 128, [0, 16, 48, 112]),
    ([[2, 2, 2], [2, 2]], ["float32", "bfloat16"], 40, [0, 32]),
    # the last bytes do not fill an item of the widest type: the page does, or the next block would begin inside one
    ([[1], [1]], ["float32", "int8"], 8, [0, 4]),
    ([[1], [3]], ["float32", "bfloat16"], 12, [0, 4]),
    ([[7], [1]], ["float32", "bfloat16"], 32, [0, 28]),
]


@pytest.mark.parametrize(("shapes", "dtypes", "page", "starts"), IN_ONE_PAGE)
def test_the_tensors_of_a_state_lie_one_after_the_other_in_its_page(
    shapes: list[list[int]], dtypes: list[str], page: int, starts: list[int]
) -> None:
    request = build.request(build.state("state", shapes, dtypes), num_blocks=5)
    plan = kvpage.plan(request)
    views = plan.layers["state"].tensors
    assert plan.layers["state"].page_size_bytes == page
    assert [view.offset_bytes for view in views] == starts
    assert [view.shape for view in views] == [(5, *shape) for shape in shapes]
    assert [view.dtype for view in views] == dtypes
    assert {view.strides_bytes[0] for view in views} == {page}
    assert len({view.name for view in views}) == len(views)
    comparison.compare(request)


@pytest.mark.parametrize(
    ("shapes", "dtypes"),
    [
        ([[1], [1]], ["int8", "bfloat16"]),
        ([[1], [1]], ["bfloat16", "float32"]),
        ([[3], [1]], ["bfloat16", "float32"]),
        ([[3, 5], [2]], ["int8", "float32"]),
        ([[4], [1], [1]], ["float32", "int8", "float16"]),
    ],
)
def test_a_state_that_would_begin_inside_an_item_is_refused(shapes: list[list[int]], dtypes: list[str]) -> None:
    with pytest.raises(SpecInvalid) as caught:
        kvpage.plan(build.request(build.state("state", shapes, dtypes)))
    assert caught.value.errors[0].pointer.startswith("/layers/0")


@pytest.mark.parametrize("speculative", [0, 1, 3, 8])
def test_a_request_holds_one_block_of_a_state_and_one_per_speculative_token(speculative: int) -> None:
    layer: dict[str, Any] = build.state("state", [[1024]], ["float32"], num_speculative_blocks=speculative)
    plan = kvpage.plan(build.request(layer, max_model_len=1_000_000))
    assert plan.capacity.request_bytes == (1 + speculative) * 4096
    assert list(plan.capacity.blocks_per_request or ()) == [1 + speculative]


def test_states_with_different_numbers_of_speculative_blocks_are_of_different_life() -> None:
    layers = [
        build.state("a", [[1024]], ["float32"]),
        build.state("b", [[1024]], ["float32"], num_speculative_blocks=2),
    ]
    plan = kvpage.plan(build.request(*layers))
    assert [group.layers for group in plan.groups] == [("a",), ("b",)]
    assert plan.capacity.request_bytes == (1 + 3) * 4096
