"""Does a plan, or a refusal, of kvpage say what the oracle says?"""

from __future__ import annotations

from typing import Any

import kvpage
from kvpage.errors import CannotUnify, InternalError, KvpageError, NotEnoughMemory, SpecInvalid
from planner import layouts, one_layer, oracle, view_oracle

Json = dict[str, Any]
UNIFY_DETAILS = ("layer", "page_size_bytes", "largest_page_size_bytes", "largest_layer")


def compare(request: Json) -> None:
    """Plan `request` and assert that the oracle agrees."""
    expected = oracle.answer(request)
    try:
        plan = kvpage.plan(request)
    except KvpageError as error:
        assert_refusal(error, expected)
    else:
        if not expected.get("arguable"):
            assert "refused" not in expected, f"planned, but should be refused: {expected}"
            assert_plan(plan, expected)
            assert_views(plan, request, expected)
        plan.check()


def assert_refusal(error: KvpageError, expected: Json) -> None:
    why = expected.get("refused")
    assert why is not None, f"refused, but there is a plan: {error!r}"
    if expected["short_of_memory"] and isinstance(error, NotEnoughMemory):
        return  # true as well
    if why == "cannot-unify-page-size":
        assert isinstance(error, CannotUnify), repr(error)
        assert error.details == {key: expected[key] for key in UNIFY_DETAILS if key in expected}
    elif expected["arguable"]:
        assert not isinstance(error, InternalError), repr(error)
    elif why == "not-enough-memory":
        assert isinstance(error, NotEnoughMemory), repr(error)
    elif why == "spec-invalid":
        assert type(error) is SpecInvalid, repr(error)
        assert error.errors, "no pointer to the fault"
    else:
        assert isinstance(error, SpecInvalid), repr(error)


def assert_plan(plan: Any, expected: Json) -> None:
    groups = [
        {"layers": list(group.layers), "block_size": group.block_size, "page_size_bytes": group.page_size_bytes}
        for group in plan.groups
    ]
    assert groups == expected["groups"]
    for key in ("num_blocks", "bytes_per_block", "buffer_size_bytes"):
        assert getattr(plan, key) == expected[key], key
    assert plan.capacity.request_bytes == expected["request_bytes"]
    assert list(plan.capacity.blocks_per_request or ()) == expected["blocks"]
    for name, layer in expected["layers"].items():
        got = plan.layers[name]
        assert got.decision == layer["decision"], name
        assert got.block_size == layer["block_size"], name
        assert got.page_size_bytes == layer["page_size_bytes"], name
        assert got.page_size_padded == layer["page_size_padded"], name
        assert got.reason, name
        assert got.kv_sharing_target == expected["owners"].get(name), name
    for name in expected["no_cache"]:
        got = plan.layers[name]
        assert (got.decision, got.group, got.tensors) == ("no_cache", None, ()), name
    assert plan.layers.keys() == {*expected["layers"], *expected["no_cache"]}


def assert_views(plan: Any, request: Json, expected: Json) -> None:
    """Every view is the one torch makes, at the layer's place."""
    layers = {layer["name"]: layer for layer in one_layer.expand(request)}
    for name in expected["layers"]:
        owner = expected["owners"].get(name, name)
        sizes = {key: expected["layers"][owner][key] for key in ("block_size", "page_size_padded")}
        views = expected_views(layers[owner] | sizes, owner, expected)
        got = [
            {"shape": view.shape, "strides_bytes": view.strides_bytes, "offset_bytes": view.offset_bytes}
            for view in plan.layers[name].tensors
        ]
        assert [used(view) for view in got] == [used(view) for view in views], name
        assert [view.dtype for view in plan.layers[name].tensors] == layers[owner].get(
            "dtypes", [layers[owner].get("dtype")]
        ), name


def expected_views(layer: Json, name: str, expected: Json) -> list[Json]:
    num_blocks, slots = expected["num_blocks"], expected["slots"]
    if expected["sharing"] == "interleaved":
        place = next(place for place, names in enumerate(slots) if name in names)
        return [view_oracle.interleaved_view(layer, num_blocks, place, len(slots))]
    return view_oracle.expected_views(layer, expected["strides"][name], num_blocks, expected["offsets"][name])


def used(view: Json) -> Json:
    """The view without the strides of axes that have one index only."""
    strides = zip(view["shape"], view["strides_bytes"], strict=True)
    return view | {"strides_bytes": tuple(stride if extent > 1 else None for extent, stride in strides)}


def block_axes(request: Json) -> dict[str, int]:
    """The position of the block axis in each layer's views."""
    return {
        layer["name"]: 0 if layer["layout"] is layouts.STATE_LAYOUT else layer["layout"]["shape"].index("num_blocks")
        for layer in one_layer.expand(request)
    }
