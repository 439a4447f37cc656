"""kvpage plans latent windows, cross attention and packed blocks as vLLM 0.24.0 does, to the byte."""

from __future__ import annotations

from typing import Any

import pytest

import kvpage
from kvpage.errors import CannotUnify, KvpageError, LayoutUnsupported
from planner import golden_kinds, oracle

LATENT = golden_kinds.cases("golden_latent.json")
CROSS = golden_kinds.cases("golden_cross.json")
PACKED = golden_kinds.cases("golden_packed.json")
ALL = LATENT + CROSS + PACKED
PLANNED = [case for case in ALL if not case.is_refused]


def test_no_case_is_missing() -> None:
    assert [sum(not case.is_refused for case in cases) for cases in (LATENT, CROSS, PACKED)] == [100, 58, 60]
    assert sum(case.is_refused for case in ALL) == 32
    assert sum(case.facts["block_stride"] > 0 for case in PLANNED if case in LATENT) >= 95
    assert len({case.id for case in ALL}) == len(ALL)


@pytest.mark.parametrize("case", PLANNED, ids=lambda case: case.id)
def test_a_recorded_plan_is_reproduced(case: golden_kinds.Case) -> None:
    plan = kvpage.plan(case.request)
    facts = case.facts
    assert _groups(plan) == case.groups()
    assert plan.num_blocks == facts["result_blocks"]
    assert plan.buffer_size_bytes == facts["buffer_bytes"]
    assert plan.bytes_per_block * plan.num_blocks == facts["buffer_bytes"]
    assert plan.capacity.request_bytes == facts["request_bytes"]
    assert {name: layer.tensors[0].offset_bytes for name, layer in plan.layers.items()} == case.offsets()
    for name, layer in plan.layers.items():
        assert layer.page_size_bytes == case.of_run("pages", name), name
        assert layer.block_size == case.of_run("block_sizes", name), name
        if facts["block_stride"]:
            shape, strides = case.of_run("views", name)
            assert list(layer.tensors[0].shape) == shape, name
            assert list(layer.tensors[0].strides_bytes) == strides, name
            assert strides[0] == facts["block_stride"]
    plan.check()


def _groups(plan: Any) -> list[dict[str, Any]]:
    return [
        {"block_size": group.block_size, "page_size_bytes": group.page_size_bytes, "layers": list(group.layers)}
        for group in plan.groups
    ]


@pytest.mark.parametrize("case", [case for case in ALL if case.is_refused], ids=lambda case: case.id)
def test_what_vllm_fails_on_is_refused_with_a_reason(case: golden_kinds.Case) -> None:
    """Failed assertions, and layers that vLLM leaves out without a word."""
    with pytest.raises(KvpageError) as caught:
        kvpage.plan(case.request)
    assert isinstance(caught.value, LayoutUnsupported | CannotUnify), repr(caught.value)
    assert caught.value.errors
    assert caught.value.errors[0].pointer.startswith("/layers/")
    if case.facts["refused"] == "dropped":
        assert "is of kind" in caught.value.message


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.id)
def test_the_oracle_knows_the_recorded_plans(case: golden_kinds.Case) -> None:
    facts = oracle.answer(case.request)
    assert ("refused" in facts) == case.is_refused
    if case.is_refused:
        return
    assert facts["groups"] == case.groups()
    assert facts["num_blocks"] == case.facts["result_blocks"]
    assert facts["request_bytes"] == case.facts["request_bytes"]
    assert facts["buffer_size_bytes"] == case.facts["buffer_bytes"]
    assert facts["offsets"] == case.offsets()
