"""Published cases of several ranks, with their figures."""

from __future__ import annotations

import random
from typing import Any

import pytest

import kvpage
from kvpage.errors import SpecInvalid
from kvpage.models import read_model
from models.public_configs import CONFIGS, config
from planner import build

Json = dict[str, Any]
GIB = 1 << 30
LLAMA: Json = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "max_position_embeddings": 8192, "torch_dtype": "bfloat16",
}  # fmt: skip


def of_model(config_: Json, memory_bytes: int = 8 * GIB, **model: Any) -> kvpage.RankedPlan:
    plans = kvpage.plan_ranks({"strategy": "unify", "memory_bytes": memory_bytes, "model": {"config": config_} | model})
    plans.check()
    return plans


def stages(*counts: int) -> list[Json]:
    ends = [sum(counts[: index + 1]) for index in range(len(counts))]
    return [{"layers": {"start": end - count, "end": end}} for end, count in zip(ends, counts, strict=True)]


# --- blocks and bytes ------------------------------------------------------------------------------------------------


def test_x15a_the_smallest_number_of_blocks_holds_for_all() -> None:
    page = 16 * 8 * 256 * 2
    layers = [build.full("layer.{i}", count=4)]
    ranks = [{"memory_bytes": 4 * page * 100 + 1}, {"memory_bytes": 4 * page * 63 + 7}]
    plans = kvpage.plan_ranks({"strategy": "unify", "layers": layers, "ranks": ranks})
    assert (plans.blocks_that_fit, plans.num_blocks) == ((100, 63), 63)
    assert [plan.buffer_size_bytes for plan in plans.ranks] == [4 * page * 63] * 2
    assert [plan.waste.unallocated_bytes for plan in plans.ranks] == [4 * page * 37 + 1, 7]
    assert len({plan.plan_id for plan in plans.ranks}) == 2
    alone = kvpage.plan({"strategy": "unify", "layers": layers, "num_blocks": 63})
    assert plans.ranks[0].layers["layer.3"].tensors == alone.layers["layer.3"].tensors


def test_x15b_each_stage_is_charged_for_its_own_layers() -> None:
    """vllm#34076: 48 layers of 2,048 bytes a token, 262,144 tokens: 8 and 16 GiB, not 24."""
    layer = build.full("layer.{i}", heads=4, count=48)
    request = {"strategy": "unify", "layers": [layer], "max_model_len": 262_144}
    plans = kvpage.plan_ranks(request | {"memory_bytes": 16 * GIB, "ranks": stages(16, 32)})
    assert [plan.capacity.request_bytes for plan in plans.ranks] == [8 * GIB, 16 * GIB]
    small = kvpage.plan_ranks(request | {"memory_bytes": int(3.18 * GIB), "ranks": stages(16, 32)})
    assert small.blocks_that_fit[0] is not None
    assert small.blocks_that_fit[0] * 16 == 104_192
    assert small.num_blocks * 16 == 104_192 // 2


def hybrid() -> kvpage.RankedPlan:
    attention = build.full("full", heads=2, size=256)
    states = build.state("gdn", [[3, 8192], [32, 128, 128]], ["bfloat16", "float32"])
    layers = [(attention if (index + 1) % 4 == 0 else states) | {"name": f"layer.{index}"} for index in range(48)]
    request = {"strategy": "unify", "layers": layers, "align_hybrid": True, "memory_bytes": 8 * GIB}
    return kvpage.plan_ranks(request | {"ranks": stages(2, 16, 16, 14)})


def test_p17_x15c_a_rank_without_a_layer_of_a_group_keeps_the_group_and_makes_no_tensor() -> None:
    plans = hybrid()
    plans.check()
    first = plans.ranks[0]
    assert list(first.layers) == ["layer.0", "layer.1"]
    kinds = [group.kind for group in first.groups]
    assert sorted(set(kinds)) == ["full_attention", "mamba"]
    assert [group.layers for group in first.groups if group.kind == "full_attention"] == [()] * kinds.count(
        "full_attention"
    )
    assert {view.name for layer in first.layers.values() for view in layer.tensors} == {"state.0", "state.1"}
    assert len({tuple(group.block_size for group in plan.groups) for plan in plans.ranks}) == 1
    assert len({plan.num_blocks for plan in plans.ranks}) == 1


def test_p17_alignment_is_that_of_the_whole_model_on_every_rank() -> None:
    """A rank of states alone would not be aligned by itself."""
    plans = hybrid()
    block_sizes = {layer.block_size for plan in plans.ranks for layer in plan.layers.values() if layer.kind != "mamba"}
    pages = {layer.page_size_bytes for plan in plans.ranks for layer in plan.layers.values()}
    assert len(block_sizes) == len(pages) == 1
    assert pages == {block_sizes.pop() * 2048}


def test_layers_of_a_stage_spread_over_the_groups() -> None:
    """vllm#23974: slices of consecutive layers would leave a group of each stage empty."""
    layers: list[Json] = []
    for index in range(2):
        layers += [build.full(f"full.{index}"), build.sliding(f"sw.{2 * index}"), build.sliding(f"sw.{2 * index + 1}")]
    plans = kvpage.plan_ranks({"strategy": "unify", "layers": layers, "num_blocks": 9, "ranks": stages(3, 3)})
    assert [[list(group.layers) for group in plan.groups] for plan in plans.ranks] == [
        [["full.0"], ["sw.0"], ["sw.1"]],
        [["full.1"], ["sw.2"], ["sw.3"]],
    ]
    assert [plan.bytes_per_block for plan in plans.ranks] == [65_536, 65_536]


# --- heads -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tp", "heads", "replicas"), [(1, 8, 1), (2, 4, 1), (8, 1, 1), (16, 1, 2), (32, 1, 4)])
def test_heads_are_divided_or_kept_by_several(tp: int, heads: int, replicas: int) -> None:
    plans = of_model(LLAMA, tp=tp)
    assert len(plans.ranks) == tp
    assert len({plan.plan_id for plan in plans.ranks}) == 1
    (view,) = plans.ranks[-1].layers["model.layers.0.self_attn.attn"].tensors
    assert view.shape[3] == heads
    assert plans.kv_replicas == replicas


def test_heads_that_ranks_do_not_divide_are_refused() -> None:
    with pytest.raises(SpecInvalid) as caught:
        of_model(LLAMA | {"num_key_value_heads": 6, "num_attention_heads": 36, "hidden_size": 4608}, tp=4)
    fault = caught.value.errors[0]
    assert fault.pointer == "/model/tp"
    assert "num_key_value_heads" in fault.detail


def test_latent_rows_are_whole_on_every_rank() -> None:
    plans = of_model(config("deepseek-v3"), tp=8)
    assert plans.kv_replicas == 8
    alone = of_model(config("deepseek-v3"))
    assert {plan.plan_id for plan in plans.ranks} == {alone.ranks[0].plan_id}


def test_replicas_are_what_all_layers_have_in_common() -> None:
    """Heads on every second rank, states divided among all: nothing is kept twice as a whole."""
    assert of_model(config("qwen3-next-80b-a3b"), memory_bytes=32 * GIB, tp=4).kv_replicas == 1
    draft = LLAMA | {"num_hidden_layers": 2, "num_key_value_heads": 2}
    assert of_model(LLAMA | {"num_key_value_heads": 4}, tp=16, draft=draft).kv_replicas == 4  # of 4 and 8


def test_p43_the_budget_is_of_the_heads_that_a_rank_keeps() -> None:
    page = 16 * 8 * 256 * 2 * 32
    memory = 814 * page + page // 2
    whole, divided = of_model(LLAMA, memory), of_model(LLAMA, memory, tp=4)
    assert whole.num_blocks == 814
    assert divided.num_blocks == 3258
    assert 3.99 <= divided.num_blocks / whole.num_blocks <= 4.01


def test_p44_ranks_that_attend_to_their_own_requests_keep_all_heads() -> None:
    narrow = LLAMA | {"head_dim": 64}
    alone = of_model(narrow, tp=8, attention_dp=8, block_size=32)
    layer = alone.ranks[7].layers["model.layers.0.self_attn.attn"]
    assert (layer.tensors[0].shape[3], layer.page_size_bytes) == (8, 65_536)
    assert alone.kv_replicas == 1
    divided = of_model(narrow, tp=8, block_size=32)
    assert divided.ranks[7].layers["model.layers.0.self_attn.attn"].page_size_bytes == 8192
    grouped = of_model(narrow, tp=32, attention_dp=2, block_size=32)  # 16 ranks share 8 heads
    assert grouped.kv_replicas == 2


def test_ranks_that_cannot_form_groups_for_attention_are_refused() -> None:
    with pytest.raises(SpecInvalid) as caught:
        of_model(LLAMA, tp=8, attention_dp=3)
    assert caught.value.errors[0].pointer == "/model/attention_dp"


# --- stages of a model -----------------------------------------------------------------------------------------------


def test_the_ranks_of_a_model_are_its_stages_times_its_tensor_parallel_ranks() -> None:
    plans = of_model(LLAMA, tp=2, pp=3)
    assert [len(plan.layers) for plan in plans.ranks] == [11, 11, 11, 11, 10, 10]
    for rank, plan in enumerate(plans.ranks):
        stage = read_model(LLAMA, tp=2, pp=3, pp_stage=rank // 2).layers
        assert list(plan.layers) == [layer["name"] for layer in stage]


def test_a_draft_lies_whole_on_the_last_stage() -> None:
    """Its two layers are not dealt out to four stages, which could not be."""
    plans = of_model(LLAMA, pp=4, draft=LLAMA | {"num_hidden_layers": 2})
    drafted = [[name for name in plan.layers if name.startswith("draft.")] for plan in plans.ranks]
    assert [len(names) for names in drafted] == [0, 0, 0, 2]
    assert not [layer for layer in read_model(LLAMA, pp=4, pp_stage=0, draft=LLAMA).layers if layer.get("draft")]


def test_each_rank_of_a_model_may_have_its_own_memory() -> None:
    model = {"config": LLAMA, "tp": 2}
    ranks = [{"memory_bytes": 8 * GIB}, {"memory_bytes": 5 * GIB}]
    plans = kvpage.plan_ranks({"strategy": "unify", "model": model, "ranks": ranks})
    assert plans.num_blocks == plans.blocks_that_fit[1] == 5 * GIB // plans.ranks[1].bytes_per_block
    assert "rank 1 holds only" in plans.warnings[0]
    assert "38%" in plans.warnings[0]


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_every_public_model_is_planned_on_all_ranks(name: str) -> None:
    """Whatever the model, stages of it have the groups of the whole."""
    whole = of_model(config(name), memory_bytes=200 * GIB)
    rng = random.Random(name)
    pp = rng.choice((2, 3))
    try:
        plans = of_model(config(name), memory_bytes=200 * GIB, pp=pp)
    except SpecInvalid as error:
        if "another pipeline stage" in error.message:  # a cache that layers of two stages share
            return
        raise
    merged = [
        sorted(name for plan in plans.ranks for name in plan.groups[index].layers)
        for index in range(len(whole.ranks[0].groups))
    ]
    assert merged == [sorted(group.layers) for group in whole.ranks[0].groups]
