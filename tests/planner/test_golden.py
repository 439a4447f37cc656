"""kvpage plans what vLLM 0.24.0 plans, to the byte, on every recorded case."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import kvpage
from kvpage.errors import CannotUnify, LayoutUnsupported
from planner import golden

PLANS = golden.plan_cases()
VIEWS = golden.view_cases()
ITEM_SIZE_BYTES = {"float32": 4, "bfloat16": 2, "float8_e4m3fn": 1, "int8": 1}


def test_no_case_is_missing() -> None:
    assert len({case.id for case in PLANS}) == 300
    assert len({case.id for case in VIEWS}) == 300
    assert sum("plan_error" in case.facts for case in PLANS) == 72
    assert sum(case.facts["strides"] == "padding_unsupported" for case in VIEWS) == 19


@pytest.mark.parametrize("case", PLANS, ids=lambda case: case.id)
def test_a_recorded_plan_is_reproduced(case: golden.PlanCase) -> None:
    if "plan_error" in case.facts:
        with pytest.raises(CannotUnify) as caught:
            kvpage.plan(case.request)
        assert caught.value.details == _refusal(case)
        return
    plan = kvpage.plan(case.request)
    expected = case.facts["plan"]
    assert _groups(plan) == expected["groups"]
    assert plan.num_blocks == expected["num_blocks"]
    assert plan.bytes_per_block == sum(buffer["size_bytes"] for buffer in expected["buffers"]) // plan.num_blocks
    assert plan.buffer_size_bytes == sum(buffer["size_bytes"] for buffer in expected["buffers"])
    assert plan.capacity.request_bytes == expected["request_bytes"]
    assert {name: layer.tensors[0].offset_bytes for name, layer in plan.layers.items()} == dict(_offsets(expected))
    assert _sizes(plan) == dict(_expected_sizes(case))
    plan.check()


def _refusal(case: golden.PlanCase) -> dict[str, Any]:
    """The refused layer, and the sizes that do not fit, from the recorded pages alone."""
    pages = {name: page for run, page in zip(case.runs, case.facts["pages"], strict=True) for name in run}
    largest = max(pages, key=lambda name: pages[name])
    name = case.facts["plan_error"]
    return {
        "layer": name,
        "page_size_bytes": pages[name],
        "largest_page_size_bytes": pages[largest],
        "largest_layer": largest,
    }


def _groups(plan: Any) -> list[dict[str, Any]]:
    return [
        {"block_size": group.block_size, "page_size_bytes": group.page_size_bytes, "layers": list(group.layers)}
        for group in plan.groups
    ]


def _offsets(expected: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """vLLM's buffers one after the other: layers that share a buffer share the offset."""
    offset = 0
    for buffer in expected["buffers"]:
        for name in buffer["layers"]:
            yield name, offset
        offset += buffer["size_bytes"]


def _sizes(plan: Any) -> dict[str, tuple[int, int, int | None]]:
    return {
        name: (layer.block_size, layer.page_size_bytes, layer.page_size_padded) for name, layer in plan.layers.items()
    }


def _expected_sizes(case: golden.PlanCase) -> Iterator[tuple[str, tuple[int, int, int | None]]]:
    """Sizes after unification, or as requested where the plan is of one type and needs none."""
    one_type = len(case.facts["plan"]["groups"]) == 1 and len(case.facts["plan"]["buffers"]) == sum(
        len(run) for run in case.runs
    )
    pages = dict(zip((run[0] for run in case.runs), case.facts["pages"], strict=True))
    unified = case.facts.get("unify")
    keeps_sizes = one_type and case.facts["plan"]["groups"][0]["page_size_bytes"] == sum(
        pages[run[0]] * len(run) for run in case.runs
    )
    requested = {layer["name"]: layer for layer in case.request["layers"]}
    for number, run in enumerate(case.runs):
        if unified is None or keeps_sizes:
            first = requested[run[0]]
            size = (first["block_size"], pages[run[0]], first.get("page_size_padded"))
        else:
            block_size, page, padded = unified[number]
            size = (block_size, page, padded)
        yield from ((name, size) for name in run)


@pytest.mark.parametrize("case", VIEWS, ids=lambda case: case.id)
def test_a_recorded_view_is_reproduced(case: golden.ViewCase) -> None:
    if case.facts["strides"] == "padding_unsupported":
        with pytest.raises(LayoutUnsupported):
            kvpage.plan(case.request)
        return
    plan = kvpage.plan(case.request)
    (view,) = plan.layers["layer"].tensors
    item = ITEM_SIZE_BYTES[case.facts["dtype"]]
    axis = 1 if case.facts["backend"] == "rocm_attn" else 0  # K and V come first there
    assert list(view.shape) == case.facts["shape"]
    assert list(view.strides_bytes) == [stride * item for stride in case.facts["strides"]]
    assert view.strides_bytes[axis] == case.facts["block1_offset"] * item
    assert view.offset_bytes == 0
    assert plan.buffer_size_bytes == case.facts["page_size_bytes"] * case.facts["num_blocks"]
    assert plan.layers["layer"].page_size_bytes == case.facts["page_size_bytes"]
    plan.check()
