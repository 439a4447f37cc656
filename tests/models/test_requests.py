"""`model` in a plan request: what follows from it, and where its faults point."""

from __future__ import annotations

from typing import Any

import pytest

import kvpage
from kvpage.errors import CannotUnify, LayoutUnsupported, NotSupported, SpecInvalid
from kvpage.models import read_model
from models.public_configs import config

GIB40 = 40 << 30


def request(name: str, *, memory_bytes: int | None = GIB40, more: dict[str, Any] | None = None, **model: Any) -> Any:
    asked: dict[str, Any] = {"strategy": "unify", "model": {"config": config(name)} | model}
    if memory_bytes is not None:
        asked["memory_bytes"] = memory_bytes
    return asked | (more or {})


def test_a_model_is_planned_as_its_layers_are() -> None:
    written = {"layers": list(read_model(config("gpt-oss-120b")).layers), "strategy": "unify"}
    plan = kvpage.plan(written | {"memory_bytes": GIB40, "max_model_len": 131_072})
    of_model = kvpage.plan(request("gpt-oss-120b"))
    assert of_model.bare() == plan.bare()
    assert of_model.plan_id == plan.plan_id
    assert list(of_model.layers) == list(plan.layers)


def test_what_was_assumed_of_a_model_stands_in_its_plan_and_changes_neither_id_nor_bare_plan() -> None:
    plan = kvpage.plan(request("gpt-oss-120b"))
    assert plan.notes == read_model(config("gpt-oss-120b")).notes
    assert plan.plan_id == plan.computed_id() == plan.bare().computed_id()
    assert b"notes" not in plan.bare().to_json()
    assert kvpage.Plan.from_json(plan.to_json()) == plan
    longer = kvpage.plan(request("llama-3.1-8b", more={"max_model_len": 200_000}))
    assert longer.notes == ("max_model_len 200000 is more than the 131072 tokens that the model is made for",)
    nothing_assumed = kvpage.plan(request("llama-3.1-8b"))
    assert not nothing_assumed.notes
    assert nothing_assumed.bare() is nothing_assumed
    assert b"notes" not in nothing_assumed.to_json()


def test_a_hybrid_is_aligned_unless_the_request_says_otherwise() -> None:
    """Qwen3-Next in 8 ranks, float32 states: [3, 1024] bfloat16 and [4, 128, 128] float32 are 268,288 bytes."""
    plan = kvpage.plan(request("qwen3-next-80b-a3b", tp=8, ssm_dtype="float32"))
    assert plan.layers["model.layers.0.linear_attn"].real_page_size_bytes == 268_288
    assert plan.layers["model.layers.3.self_attn.attn"].block_size == 272  # 16 × ⌈268,288 / (16 × 1024)⌉
    unaligned = request("qwen3-next-80b-a3b", more={"align_hybrid": False})
    with pytest.raises(CannotUnify) as caught:
        kvpage.plan(unaligned | {"model": unaligned["model"] | {"backend": "rocm_attn"}})
    assert [fault.pointer for fault in caught.value.errors] == ["/model"]


def test_what_the_request_says_itself_is_taken() -> None:
    assert kvpage.plan(request("llama-3.1-8b")).capacity.max_model_len == 131_072
    assert kvpage.plan(request("llama-3.1-8b", more={"max_model_len": 4096})).capacity.max_model_len == 4096
    few = request("llama-3.1-8b", memory_bytes=None, more={"num_blocks": 3})
    assert kvpage.plan(few).num_blocks == 3  # too few for 131,072 tokens, which nobody asked for


def test_a_draft_stands_in_the_model() -> None:
    plan = kvpage.plan(request("mimo-v2-flash", draft=config("qwen3-0.6b", num_hidden_layers=5)))
    assert sum(name.startswith("draft.") for name in plan.layers) == 5


FAULTS: list[tuple[Any, str]] = [
    ({"model": 5}, "/model"),
    ({"model": []}, "/model"),
    ({"model": {}}, "/model/config"),
    ({"model": {"config": None}}, "/model/config"),
    ({"model": {"config": "llama"}}, "/model/config"),
    ({"model": {"config": {}}}, "/model/config/model_type"),
    ({"model": {"config": {"model_type": "gpt5"}}}, "/model/config/model_type"),
    ({"model": {"config": config("llama-3.1-8b", num_key_value_heads=0)}}, "/model/config/num_key_value_heads"),
    ({"model": {"config": config("llama-3.1-8b"), "tp": 0}}, "/model/tp"),
    ({"model": {"config": config("llama-3.1-8b"), "tp": 3}}, "/model/tp"),
    ({"model": {"config": config("llama-3.1-8b", num_key_value_heads=6), "tp": 4}}, "/model/tp"),
    ({"model": {"config": config("llama-3.1-8b"), "pp": 40}}, "/model/pp"),
    ({"model": {"config": config("nemotron-h-8b"), "tp": 3}}, "/model/tp"),
    ({"model": {"config": config("llama-3.1-8b"), "kv_dtype": "fp8_ds_mla"}}, "/model/kv_dtype"),
    ({"model": {"config": config("qwen3.5-35b-a3b"), "kv_dtype": "fp8_ds_mla"}}, "/model/kv_dtype"),
    ({"model": {"config": config("llama-3.1-8b", head_dim=72), "kv_dtype": "nvfp4"}}, "/model/kv_dtype"),
    ({"model": {"config": config("llama-3.1-8b"), "kv_dtype": "nvfp4"}, "kv_cache_layout": "NHD"}, "/model/kv_dtype"),
    ({"model": {"config": config("llama-3.1-8b"), "kv_dtype": "fp7"}}, "/model/kv_dtype"),
    ({"model": {"config": config("llama-3.1-8b"), "size": 8}}, "/model/size"),
    ({"model": {"config": config("llama-3.1-8b"), "at": ""}}, "/model/at"),
    ({"model": {"config": config("llama-3.1-8b"), "draft": {}}}, "/model/draft/model_type"),
    ({"model": {"config": config("llama-3.1-8b"), "draft": 3}}, "/model/draft"),
    ({"model": {"config": config("llama-3.1-8b"), "backend": "fastest"}}, "/model/backend"),
    ({"model": {"config": config("llama-3.1-8b"), "backend": {"shape": 3}}}, "/model/backend"),
    ({"model": {"config": config("phi-2"), "kv_dtype": "nvfp4", "backend": "flash_attn"}}, "/model/backend"),
    ({"model": {"config": config("llama-3.1-8b")}, "layers": []}, "/model"),
    ({"model": {"config": config("llama-3.1-8b")}, "kv_cache_layout": "XYZ"}, "/kv_cache_layout"),
    ({"model": None}, "/layers"),
    ({"model": config("llama-3.1-8b")}, "/model"),
]


@pytest.mark.parametrize(("changes", "pointer"), FAULTS)
def test_faults_point_into_the_request_as_it_was_sent(changes: Any, pointer: str) -> None:
    with pytest.raises(SpecInvalid) as caught:
        kvpage.plan({"strategy": "unify", "memory_bytes": GIB40} | changes)
    assert {fault.pointer for fault in caught.value.errors} == {pointer}
    assert pointer in caught.value.message


@pytest.mark.parametrize("strategy", ["auto", "unify", "slab"])
def test_what_is_wrong_with_all_layers_is_told_once_and_names_none_that_the_caller_did_not_write(strategy: str) -> None:
    wrong: list[dict[str, Any]] = [{"kv_dtype": "fp8_ds_mla"}, {"backend": "flashmla"}]
    for options in wrong:
        with pytest.raises(SpecInvalid) as caught:
            kvpage.plan(request("llama-3.1-8b", **options) | {"strategy": strategy})
        assert len(caught.value.errors) == 1
        assert "more)" not in caught.value.message
        assert "/layers/" not in f"{caught.value.message} {caught.value.errors[0].detail}"


def test_layers_that_are_sound_and_do_not_go_together_are_a_fault_of_the_model() -> None:
    with pytest.raises(SpecInvalid) as caught:
        kvpage.plan(request("gemma-3-27b", backend="cpu_attn") | {"strategy": "slab"})
    assert {fault.pointer for fault in caught.value.errors} == {"/model"}


@pytest.mark.parametrize("more", [{}, {"strategy": "auto"}, {"memory_bytes": GIB40, "strategy": "unify"}])
def test_a_config_in_the_place_of_a_request_is_told_where_it_belongs(more: dict[str, Any]) -> None:
    with pytest.raises(SpecInvalid) as caught:
        kvpage.plan(config("llama-3.1-8b") | more)
    assert "a model's config.json" in caught.value.message
    assert "--model" in caught.value.message
    assert len(caught.value.errors) == 1


def test_the_kind_of_a_fault_is_kept() -> None:
    with pytest.raises(NotSupported):
        kvpage.plan(request("llama-3.1-8b") | {"model": {"config": {"model_type": "gpt5"}}})
    with pytest.raises(LayoutUnsupported):
        kvpage.plan(request("mimo-v2-flash", backend="flash_attn"))


def test_configs_may_hold_more_than_a_request_does() -> None:
    """Arrays, keys and depths beyond the limits of a request are nobody's business while no layer depends on them."""
    deep: Any = 1
    for _ in range(20):
        deep = [deep]
    odd = {f"field_{number}": [deep] * 100 for number in range(200)} | {"unused": "\ud800"}
    assert kvpage.plan(request("llama-3.1-8b")) == kvpage.plan(
        request("llama-3.1-8b") | {"model": {"config": config("llama-3.1-8b") | odd}}
    )
