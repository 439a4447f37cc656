"""Layers that predict further tokens: planned beside the model where vLLM 0.24.0 runs them, and only when asked for."""

from __future__ import annotations

from typing import Any

import pytest

import kvpage
from kvpage.errors import SpecInvalid
from kvpage.models import read_model
from kvpage.models.registry import FAMILIES
from models.public_configs import config

Fields = dict[str, Any]
NEXT = {"num_nextn_predict_layers": 1}
MLA, FULL, SLIDING, WINDOW_MLA = "mla_attention", "full_attention", "sliding_window", "sliding_window_mla"
QWEN_3_5 = {"kind": FULL, "num_kv_heads": 2, "head_size": 256}
INDEXER = {"kind": MLA, "head_size": 132, "dtype": "uint8"}

# excerpt, fields of its (inner) config, and by name what vLLM adds: deepseek_mtp.py, glm4_moe_mtp.py, mimo_v2_mtp.py …
CASES: list[tuple[str, Fields, dict[str, Fields]]] = [
    ("deepseek-v3", NEXT, {"model.layers.61.self_attn.attn": {"kind": MLA, "head_size": 576}}),
    (
        "deepseek-v3.2",
        NEXT,
        {
            "model.layers.61.self_attn.attn": {"kind": MLA, "head_size": 576, "backend": "flashmla_sparse"},
            "model.layers.61.self_attn.indexer.k_cache": INDEXER,
        },
    ),
    (
        "glm-5",
        NEXT | {"index_topk_pattern": "F" + "S" * 77},  # a pattern of the model's own layers
        {
            "model.layers.78.self_attn.attn": {"kind": MLA, "head_size": 576},
            "model.layers.78.self_attn.indexer.k_cache": INDEXER,
        },
    ),
    ("glm-4.7-flash", NEXT, {"model.layers.47.self_attn.attn": {"kind": MLA, "head_size": 576}}),
    ("glm-4.5", NEXT, {"model.layers.92.self_attn.attn": {"kind": FULL, "num_kv_heads": 8, "head_size": 128}}),
    (
        "deepseek-v4-flash",
        NEXT,
        {"model.layers.43.attn.swa_cache": {"kind": WINDOW_MLA, "sliding_window": 128, "head_size": 512}},
    ),
    (
        "mimo-v2-flash",
        {"sliding_window_size": 128},
        {
            "model.mtp.layers.0.self_attn.attn": {
                "kind": SLIDING,
                "sliding_window": 128,
                "num_kv_heads": 8,
                "head_size": 192,
                "head_size_v": 128,
            }
        },
    ),
    ("qwen3-next-80b-a3b", {}, {"mtp.layers.0.self_attn.attn": QWEN_3_5}),  # one where the config does not say
    (
        "qwen3.5-35b-a3b",
        {"mtp_num_hidden_layers": 2},
        {"mtp.layers.0.self_attn.attn": QWEN_3_5, "mtp.layers.1.self_attn.attn": QWEN_3_5},
    ),
    (
        "nemotron-h-8b",
        NEXT,
        {"mtp.layers.0.mixer.attn": {"kind": FULL, "num_kv_heads": 8, "head_size": 128}},
    ),
    (
        "nemotron-h-8b",
        NEXT | {"mtp_hybrid_override_pattern": "E*"},
        {"mtp.layers.1.mixer.attn": {"kind": FULL, "num_kv_heads": 8, "head_size": 128}},
    ),
    (
        "nemotron-h-8b",
        NEXT | {"mtp_layers_block_type": ["moe", "full_attention"]},
        {"mtp.layers.1.mixer.attn": {"kind": FULL, "num_kv_heads": 8, "head_size": 128}},
    ),
    (
        "minimax-m3-like",
        {"num_mtp_modules": 1},
        {
            "model.layers.60.self_attn.attn": {"kind": FULL, "num_kv_heads": 4},
            "model.layers.60.self_attn.attn.index_cache": {"kind": MLA, "head_size": 128},
        },
    ),
    (
        "qwen3-0.6b",
        {"model_type": "mimo"} | NEXT,
        {"model.layers.28.self_attn.attn": {"kind": FULL, "num_kv_heads": 8, "head_size": 128}},
    ),
    (
        "qwen3-0.6b",
        {"model_type": "ernie4_5_moe"} | NEXT,
        {"model.layers.28.self_attn.attn": {"kind": FULL, "num_kv_heads": 8, "head_size": 128}},
    ),
]


def changed(name: str, changes: Fields) -> Fields:
    """The excerpt, with the fields of its language model changed."""
    written = config(name)
    written.get("text_config", written).update(changes)
    return written


@pytest.mark.parametrize(("name", "changes", "expected"), CASES, ids=[f"{i}-{row[0]}" for i, row in enumerate(CASES)])
def test_predictors_are_planned_as_a_draft_of_the_model(
    name: str, changes: Fields, expected: dict[str, Fields]
) -> None:
    written = changed(name, changes)
    alone, both = read_model(written), read_model(written, mtp=True)
    added = both.layers[len(alone.layers) :]
    assert [layer["name"] for layer in both.layers[: len(alone.layers)]] == [layer["name"] for layer in alone.layers]
    assert not any("draft" in layer for layer in alone.layers)
    assert [layer["name"] for layer in added] == list(expected)
    for layer in added:
        assert layer["draft"] is True
        assert layer.items() >= expected[layer["name"]].items()
    request = {"strategy": "unify", "num_blocks": 3, "align_hybrid": both.is_hybrid}
    kvpage.plan({"layers": list(both.layers)} | request).check()


def test_every_family_with_predictors_is_in_a_case() -> None:
    types = {changed(name, changes)["model_type"] for name, changes, _ in CASES}
    types |= {changed(name, changes).get("text_config", {}).get("model_type") for name, changes, _ in CASES}
    twins = {
        "qwen3_5_text",
        "mimo_v2",
        "minimax_m3_text",
        "minimax_m3_vl_text",
        "nemotron_h_puzzle",
        "step3p5",
    }  # step3p5 is below
    assert {name for name, family in FAMILIES.items() if family.mtp is not None} <= types | twins


def test_predictors_of_step_3_5_are_of_the_types_that_go_on() -> None:
    written = config("step-3.5-flash", num_nextn_predict_layers=3)
    added = read_model(written, mtp=True).layers[45:]
    assert [layer["name"] for layer in added] == [
        f"model.layers.{index}.mtp_block.self_attn.attn" for index in (45, 46, 47)
    ]
    assert {layer["kind"] for layer in added} == {SLIDING}
    with pytest.raises(SpecInvalid) as caught:
        read_model(written | {"layer_types": written["layer_types"][:46]}, mtp=True)
    assert [fault.pointer for fault in caught.value.errors] == ["/layer_types"]


def test_states_keep_room_for_what_is_predicted() -> None:
    """As many tokens as there are predictors, unless more are asked for: a multiple then, as in vLLM."""
    written = changed("qwen3.5-35b-a3b", {"mtp_num_hidden_layers": 2})

    def state(**options: Any) -> Fields:
        return dict(next(layer for layer in read_model(written, **options).layers if layer["kind"] == "mamba"))

    assert "num_speculative_blocks" not in state()
    assert state(mtp=True)["num_speculative_blocks"] == 2
    assert state(mtp=True, num_speculative_tokens=4)["num_speculative_blocks"] == 4
    assert state(mtp=True, num_speculative_tokens=1)["num_speculative_blocks"] == 1
    with pytest.raises(SpecInvalid) as caught:
        state(mtp=True, num_speculative_tokens=3)
    assert [fault.pointer for fault in caught.value.errors] == ["/num_speculative_tokens"]


def test_predictors_lie_on_the_last_stage_with_a_backend_of_their_own() -> None:
    written = changed("glm-4.5", NEXT)
    stages = [read_model(written, pp=2, pp_stage=stage, mtp=True, backend="triton_attn").layers for stage in (0, 1)]
    assert [any("draft" in layer for layer in stage) for stage in stages] == [False, True]
    assert "backend" not in stages[1][-1]
    chosen = read_model(written, mtp=True, backend="triton_attn", draft_backend="flash_attn").layers
    assert [layer["backend"] for layer in chosen[-2:]] == ["triton_attn", "flash_attn"]


REFUSED: list[tuple[str, Fields, str]] = [
    ("llama-3.1-8b", {}, "/mtp"),
    ("kimi-k2", NEXT, "/mtp"),  # vLLM loads them of DeepSeek's own types
    ("kimi-k2.5", NEXT, "/mtp"),
    ("deepseek-v3", {"num_nextn_predict_layers": 0}, "/num_nextn_predict_layers"),
    ("deepseek-v3", {"num_nextn_predict_layers": None}, "/num_nextn_predict_layers"),
    ("deepseek-v3", {"num_nextn_predict_layers": 17}, "/num_nextn_predict_layers"),
    ("glm-4.5", {"num_nextn_predict_layers": "1"}, "/num_nextn_predict_layers"),
    ("nemotron-h-8b", {"num_nextn_predict_layers": 2}, "/num_nextn_predict_layers"),
    ("nemotron-h-8b", NEXT | {"mtp_hybrid_override_pattern": "*M"}, "/mtp_hybrid_override_pattern"),
    ("nemotron-h-8b", NEXT | {"mtp_hybrid_override_pattern": None}, "/mtp_hybrid_override_pattern"),
    ("nemotron-h-8b", NEXT | {"mtp_layers_block_type": ["mamba"]}, "/mtp_layers_block_type/0"),
]


@pytest.mark.parametrize(("name", "changes", "pointer"), REFUSED, ids=range(len(REFUSED)))
def test_models_without_predictors_are_refused(name: str, changes: Fields, pointer: str) -> None:
    with pytest.raises(SpecInvalid) as caught:
        read_model(changed(name, changes), mtp=True)
    assert [fault.pointer for fault in caught.value.errors] == [pointer]


def test_tokens_are_drafted_by_one_of_the_two() -> None:
    model = {"config": changed("deepseek-v3", NEXT), "draft": config("qwen3-0.6b"), "mtp": True}
    with pytest.raises(SpecInvalid) as caught:
        kvpage.plan({"strategy": "unify", "model": model, "memory_bytes": 40 << 30})
    assert [fault.pointer for fault in caught.value.errors] == ["/model/mtp"]
