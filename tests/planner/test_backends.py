"""Every registered backend lays its views out as vLLM's does, and pads exactly when it reads pages by block stride."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest

import kvpage
from kvpage.errors import CannotUnify, KvpageError, LayoutUnsupported, SpecInvalid
from planner import build, comparison, layouts

Json = dict[str, Any]
NAMES = sorted(layouts.BACKENDS)
LAYOUTS = ("NHD", "HND")


def layer_for(name: str, **more: Any) -> Json:
    """A layer that suits the backend: its kind, a head size it has and a block its kernels accept."""
    facts = layouts.BACKENDS[name]
    block_size = next(size["multiple_of"] if isinstance(size, dict) else size for size in facts["kernel_block_sizes"])
    size = (facts["head_sizes"] or [128])[-1]
    if "num_kv_heads" in facts["shape"]:
        return build.full("layer", heads=4, size=size, block_size=max(block_size, 16), backend=name) | more
    if 656 in facts["shape"]:
        return build.mla("layer", size=656, dtype="uint8", block_size=block_size, backend=name) | more
    return build.mla("layer", size=size, block_size=block_size, backend=name) | more


def test_all_backends_of_vllm_are_here() -> None:
    assert len(NAMES) == 23


@pytest.mark.parametrize("kv_cache_layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_a_backend_has_the_shape_and_order_of_vllm(name: str, kv_cache_layout: str) -> None:
    layer = layer_for(name)
    request = build.request(layer, num_blocks=11, max_model_len=1, kv_cache_layout=kv_cache_layout)
    plan = kvpage.plan(request)
    comparison.compare(request)
    (view,) = plan.layers["layer"].tensors
    facts = layouts.BACKENDS[name]
    order = facts["stride_order"][kv_cache_layout] if facts["stride_order"] else list(range(len(view.shape)))
    assert sorted(range(len(view.shape)), key=lambda axis: -view.strides_bytes[axis]) == order
    assert plan.layers["layer"].backend == name


@pytest.mark.parametrize("kv_cache_layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_a_backend_is_padded_only_when_it_reads_pages_by_block_stride(name: str, kv_cache_layout: str) -> None:
    """Beside a state of one and a half pages."""
    layer = layer_for(name)
    alone = kvpage.plan(build.request(layer, kv_cache_layout=kv_cache_layout))
    page = alone.layers["layer"].page_size_bytes
    request = build.request(layer, build.state("state", [[page * 3 // 2]], ["int8"]), kv_cache_layout=kv_cache_layout)
    if layouts.BACKENDS[name]["indexes_kv_by_block_stride"]:
        assert kvpage.plan(request).layers["layer"].decision == "pad"
    else:
        with pytest.raises(CannotUnify) as caught:
            kvpage.plan(request)
        assert caught.value.details["layer"] == "layer"


@pytest.mark.parametrize("name", NAMES)
def test_a_backend_accepts_the_blocks_of_its_kernels(name: str) -> None:
    """A block of several kernel blocks is shown to the kernels as those; other blocks are refused."""
    sizes = layouts.BACKENDS[name]["kernel_block_sizes"]
    listed = [size for size in sizes if isinstance(size, int)]
    for block_size in (1, 16, 24, 32, 48, 64, 96, 128, 192, 256, 1056):
        request = build.request(layer_for(name, block_size=block_size), num_blocks=10, max_model_len=1)
        comparison.compare(request)
        fits = [size for size in listed if block_size % size == 0]
        if fits or any(block_size % size["multiple_of"] == 0 for size in sizes if isinstance(size, dict)):
            (view,) = kvpage.plan(request).layers["layer"].tensors
            assert view.shape[view.block_axis] % 10 == 0
        else:
            with pytest.raises(LayoutUnsupported) as caught:
                kvpage.plan(request)
            assert caught.value.errors[0].pointer.startswith("/layers/0")


def test_an_unknown_backend_is_named_and_the_known_ones_are_listed() -> None:
    with pytest.raises(SpecInvalid) as caught:
        kvpage.plan(build.request(build.full(backend="flash_atn")))
    assert "flash_atn" in caught.value.message
    assert "flash_attn" in caught.value.message
    assert caught.value.errors[0].pointer == "/layers/0/backend"


# --- layouts written out --------------------------------------------------------------------------


def test_every_order_of_a_written_layout_gives_the_view_torch_gives() -> None:
    """All 120 orders of five axes, blocks anywhere: shape and strides as torch makes them."""
    for order in permutations(range(5)):
        backend = {"shape": build.KV_SHAPE, "stride_order": list(order)}
        request = build.request(build.full(heads=3, size=5, backend=backend), num_blocks=6, max_model_len=16)
        comparison.compare(request)


ORDER = [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("stride_order", "layered", "reads_stride"),
    [
        (None, None, False),
        (ORDER, None, False),
        (None, [1, 0, 2, 3, 4], False),
        (ORDER, [0, 1, 2, 3, 4], False),
        (ORDER, [1, 0, 2, 3, 4], True),
        (ORDER, [1, 2, 3, 4, 0], True),
        ([0, 2, 1, 3], [1, 3, 0, 2, 4], True),
        ([0, 2, 1, 3], [0, 1, 3, 2, 4], False),
    ],
)
def test_reading_by_block_stride_is_derived(stride_order: Any, layered: Any, reads_stride: bool) -> None:
    """True when both orders are there and the layers axis is not the outermost of the second."""
    backend = {"shape": build.ROW_SHAPE, "stride_order": stride_order, "layered_stride_order": layered}
    request = build.request(build.full(size=96, backend=backend), build.sliding())
    try:
        decision: str = kvpage.plan(request).layers["full"].decision
    except KvpageError as error:
        decision = error.code
    assert decision == ("pad" if reads_stride else "cannot-unify-page-size")


@pytest.mark.parametrize(
    "backend",
    [
        {"shape": build.ROW_SHAPE, "stride_order": [0, 1, 2]},
        {"shape": build.ROW_SHAPE, "stride_order": [0, 1, 2, 3, 4]},
        {"shape": build.ROW_SHAPE, "stride_order": [0, 1, 2, 2]},
        {"shape": build.ROW_SHAPE, "stride_order": [1, 2, 3, 4]},
        {"shape": build.ROW_SHAPE, "stride_order": []},
        {"shape": build.ROW_SHAPE, "stride_order": ORDER, "layered_stride_order": [0, 1, 2, 3]},
        {"shape": build.ROW_SHAPE, "stride_order": ORDER, "layered_stride_order": [1, 0, 2, 3, 3]},
        {"shape": build.ROW_SHAPE, "stride_order": ORDER, "layered_stride_order": [1, 0, 2, 3, 4, 5]},
        {"shape": ["block_size", "num_kv_heads", "head_size + head_size_v"]},
        {"shape": ["num_blocks", "num_blocks", "block_size", "num_kv_heads", "head_size + head_size_v"]},
        {"shape": ["num_blocks", "block_size", "num_heads", "head_size + head_size_v"]},
        {"shape": ["num_blocks", "block_size", "num_kv_heads", "head size"]},
        {"shape": ["num_blocks", "num_kv_heads", "head_size + head_size_v"]},
        {"shape": ["num_blocks", "block_size", "num_kv_heads", "head_size"]},
        {"shape": ["num_blocks", 3, "block_size", "num_kv_heads", "head_size"]},
        {"shape": ["num_blocks", 2, "block_size", "num_kv_heads", "head_size + head_size_v"]},
        {"shape": ["num_blocks", 2, "block_size", "num_kv_heads", "head_size"], "stride_order": ORDER},
        {"shape": ["num_blocks"]},
        {"shape": []},
        {"shape": build.MLA_SHAPE},
    ],
)
def test_a_written_layout_that_makes_no_sense_is_refused(backend: Json) -> None:
    with pytest.raises(SpecInvalid) as caught:
        kvpage.plan(build.request(build.full("a"), build.full("b", backend=backend)))
    assert caught.value.errors[0].pointer.startswith("/layers/1/backend")


@pytest.mark.parametrize("name", ["flash_attn", "cpu_attn", "rocm_attn"])
def test_mla_layers_need_an_mla_backend(name: str) -> None:
    with pytest.raises(SpecInvalid):
        kvpage.plan(build.request(build.mla(backend=name)))


@pytest.mark.parametrize("name", ["triton_mla", "flashmla_sparse"])
def test_an_mla_backend_needs_mla_layers(name: str) -> None:
    with pytest.raises(SpecInvalid):
        kvpage.plan(build.request(build.full(backend=name, block_size=64)))
