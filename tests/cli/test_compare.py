"""`kvpage plan --compare`: each strategy's own plan side by side, refusals as rows with their reason."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

import kvpage
from kvpage.cli import compare
from kvpage.cli.compare import Comparison, Refusal, Result
from kvpage.errors import CannotUnify, SpecInvalid
from planner import build
from support.checkout import ROOT
from support.command_line import run_here
from support.plan_requests import small_request

WORKLOAD = [{"tokens": 100, "weight": 3}, {"min_tokens": 10, "max_tokens": 250, "weight": 1.5}]


def run(*arguments: str, stdin: object = None, columns: int = 200) -> subprocess.CompletedProcess[str]:
    return run_here(*arguments, stdin=json.dumps(stdin), COLUMNS=str(columns))


def hybrid() -> dict[str, Any]:
    """Not aligned: its state is larger than a page of attention, and no multiple of it."""
    request: dict[str, Any] = json.loads((ROOT / "examples" / "qwen3-next.json").read_text())
    return {**request, "align_hybrid": False, "memory_bytes": 8 << 30}


def not_unifiable() -> dict[str, Any]:
    """Pages of 3:2, of which neither may be padded."""
    return build.request(
        build.full("wide", size=192, backend=build.dense(build.ROW_SHAPE)),
        build.sliding("[red]\u00e9[/]", size=128, backend=build.dense(build.ROW_SHAPE)),
    )


def result_of(comparison: Comparison, name: str) -> Result:
    [result] = [result for result in comparison.results if result.name == name]
    return result


@pytest.mark.parametrize("strategy", compare.STRATEGIES)
def test_a_row_is_the_plan_of_its_strategy(strategy: str) -> None:
    request = small_request(workload=WORKLOAD)
    row = result_of(compare.compare(request), strategy)
    allocator = {"allocator": "slabs"} if strategy == "nested" else {}
    plan = kvpage.plan({**request, "strategy": strategy, **allocator})
    judged = plan.efficiency
    assert judged is not None
    assert row.plan_id == plan.plan_id
    assert row.strategy == plan.strategy
    assert (row.num_groups, row.slab_bytes, row.num_slabs) == (len(plan.groups), plan.slab_bytes, plan.num_blocks)
    assert row.block_sizes == tuple(group.block_size for group in plan.groups)
    assert row.blocks_per_slab == tuple(group.blocks_per_slab for group in plan.groups)
    assert row.max_block_stride_bytes == max(group.block_stride_bytes for group in plan.groups)
    assert (row.held_over_live, row.floor_over_live) == (judged.held_over_live, judged.floor_over_live)
    assert (row.block_lcm_tokens, row.one_token_bytes) == (judged.block_lcm_tokens, judged.one_token_bytes)
    assert row.request_bytes == plan.capacity.request_bytes
    assert row.max_concurrency == plan.capacity.max_concurrency


def test_all_rows_are_judged_by_one_workload() -> None:
    comparison = compare.compare(small_request())
    named = [msgspec.structs.asdict(share) for share in comparison.workload]
    again = compare.compare(small_request(workload=named))
    assert again == comparison
    assert all(result.held_over_live is not None for result in comparison.results)
    other = compare.compare(small_request(workload=WORKLOAD))
    assert [share.weight for share in other.workload] == [3, 1.5]
    assert other.least_held != comparison.least_held


def test_all_rows_have_the_same_memory_also_where_blocks_were_asked_for() -> None:
    request = small_request(memory_bytes=None, num_blocks=64)
    own = kvpage.plan(request)
    comparison = compare.compare(request)
    assert comparison.memory_bytes == own.buffer_size_bytes
    assert comparison == compare.compare(small_request(memory_bytes=own.buffer_size_bytes))
    for result in comparison.results:
        assert result.num_slabs is not None
        assert result.slab_bytes is not None
        left = comparison.memory_bytes - result.num_slabs * result.slab_bytes
        assert 0 <= left < result.slab_bytes


def test_a_model_without_a_cache_is_compared() -> None:
    comparison = compare.compare(build.request(build.encoder(), num_blocks=1))
    assert [result.slab_bytes for result in comparison.results] == [0] * len(comparison.results)


def test_vllm_aligns_a_hybrid_first() -> None:
    comparison = compare.compare(hybrid())
    vllm = result_of(comparison, compare.VLLM)
    assert vllm.plan_id == kvpage.plan(hybrid() | {"strategy": "unify", "align_hybrid": True}).plan_id
    assert vllm.plan_id != result_of(comparison, "unify").plan_id
    assert vllm.block_sizes is not None
    assert sorted(set(vllm.block_sizes)) == [0, 1056]


def test_vllm_aligns_nothing_without_states() -> None:
    comparison = compare.compare(small_request(align_hybrid=True))
    assert result_of(comparison, compare.VLLM).plan_id == result_of(comparison, "unify").plan_id


def test_a_refusal_is_a_row_with_its_reason() -> None:
    comparison = compare.compare(not_unifiable())
    with pytest.raises(CannotUnify) as refused:
        kvpage.plan(not_unifiable())
    for name in ("unify", compare.VLLM):
        row = result_of(comparison, name)
        assert row.refusal == Refusal(code="cannot-unify-page-size", message=refused.value.message)
        assert row.slab_bytes is None


@pytest.mark.parametrize("columns", [200, 60])
def test_refusals_are_printed_whole(columns: int) -> None:
    done = run("plan", "-", "--compare", stdin=not_unifiable(), columns=columns)
    with pytest.raises(CannotUnify) as refused:
        kvpage.plan(not_unifiable())
    assert "[red]\u00e9[/]" in refused.value.message
    assert f"vLLM 0.24 refuses, cannot-unify-page-size: {refused.value.message}" in done.stdout
    assert "refused" in done.stdout


def test_when_nothing_has_a_plan_the_exit_status_says_so() -> None:
    refused = run("plan", "-", "--compare", stdin=small_request(memory_bytes=1000))
    assert refused.returncode == 1
    assert refused.stdout.count(" refuses, ") == len(compare.STRATEGIES) + 1
    assert run("plan", "-", "--compare", stdin=small_request()).returncode == 0


@pytest.mark.parametrize("request_", [{"layers": 7}, {**small_request(), "unknown": 1}, [1], None])
def test_what_no_strategy_can_read_is_one_error(request_: object) -> None:
    with pytest.raises(SpecInvalid):
        compare.compare(request_)
    done = run("plan", "-", "--compare", stdin=request_)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error spec-invalid")


def test_json_is_the_comparison() -> None:
    done = run("plan", "-", "--compare", "--json", stdin=small_request())
    assert done.returncode == 0, done.stderr
    assert msgspec.json.decode(done.stdout, type=Comparison) == compare.compare(small_request())


@pytest.mark.parametrize("columns", [60, 100, 200])
def test_no_number_is_broken_however_narrow_the_terminal(columns: int) -> None:
    done = run("plan", "-", "--compare", stdin=small_request(), columns=columns)
    assert done.returncode == 0, done.stderr
    for result in compare.compare(small_request()).results:
        assert result.name in done.stdout
        for value in (result.slab_bytes, result.request_bytes, result.one_token_bytes, result.max_block_stride_bytes):
            assert f"{value:,}" in done.stdout
    assert "512" not in done.stdout  # the workload ends at max_model_len


def test_a_model_is_compared_too(tmp_path: Path) -> None:
    configs = json.loads((ROOT / "tests/data/models/configs.json").read_text())["configs"]
    (tmp_path / "config.json").write_text(json.dumps(configs["llama-3.1-8b"]))
    done = run("plan", "--model", str(tmp_path), "--memory", "40GiB", "--compare", "--json")
    assert done.returncode == 0, done.stderr
    names = [result.name for result in msgspec.json.decode(done.stdout, type=Comparison).results]
    assert names == [*compare.STRATEGIES, compare.VLLM]
