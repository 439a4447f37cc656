"""Configs that cannot be right are refused in words, by JSON pointer; none becomes a traceback or a guess."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import pytest

import kvpage
from kvpage.errors import NotSupported, SpecInvalid
from kvpage.models import read_model
from models.public_configs import CONFIGS, config

Path = tuple[str | int, ...]
WRONG: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1.5,
    float("nan"),
    float("inf"),
    2**70,
    10**400,
    "",
    "8",
    "full",
    [],
    [1],
    {},
    {"a": 1},
)
SEEDS = range(40)
BIDIRECTIONAL, SPARSE, FLAGS = "use_bidirectional_attention", "sparse_attention_config", "sparse_attention_freq"


def paths(value: Any, here: Path = ()) -> Iterator[Path]:
    """Every field and entry inside `value`."""
    steps = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, inner in steps:
        yield (*here, step)
        yield from paths(inner, (*here, step))


def changed(written: Any, path: Path, value: Any) -> Any:
    """`written`, which is changed, with `value` at `path`; an `Ellipsis` takes the field away."""
    inner = written
    for step in path[:-1]:
        inner = inner[step]
    if value is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = copy.deepcopy(value)  # an array put into itself would have no end
    return written


def read_and_plan(written: Any, **options: Any) -> str:
    """Read and plan, or be refused as promised. Says which it was."""
    try:
        model = read_model(written, **options)
        layers = {"layers": list(model.layers), "strategy": "unify", "align_hybrid": model.is_hybrid}
        kvpage.plan(layers | {"num_blocks": 3}).check()
    except SpecInvalid as caught:
        error = caught
    else:
        assert model.max_model_len is None or model.max_model_len >= 1
        return "planned"
    assert error.errors, error.message
    assert all(fault.detail for fault in error.errors)
    assert len(error.message) < 2000
    return "refused"


@pytest.mark.parametrize("name", CONFIGS)
def test_one_wrong_value_anywhere_is_refused_or_makes_a_sound_plan(name: str) -> None:
    rng = random.Random(name)
    outcomes = set()
    for path in paths(CONFIGS[name]):
        if rng.random() < 0.15 or len(path) == 1:
            outcomes.add(read_and_plan(changed(config(name), path, rng.choice((*WRONG, ...)))))
    assert "refused" in outcomes


@pytest.mark.parametrize("seed", SEEDS)
def test_several_wrong_values_are_refused_or_make_a_sound_plan(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(20):
        written = config(rng.choice(list(CONFIGS)))
        for _ in range(rng.randint(1, 4)):
            path = rng.choice(list(paths(written)))
            changed(written, path, rng.choice((*WRONG, ...)))
        read_and_plan(written, tp=rng.choice((1, 2, 8)), kv_dtype=rng.choice(("auto", "fp8", "nvfp4")))


FIELDS = [
    ("llama-3.1-8b", "num_hidden_layers", 100_000),
    ("llama-3.1-8b", "num_hidden_layers", 32.0),
    ("llama-3.1-8b", "num_attention_heads", "32"),
    ("llama-3.1-8b", "num_key_value_heads", 0),
    ("llama-3.1-8b", "num_key_value_heads", -8),
    ("llama-3.1-8b", "max_position_embeddings", float("nan")),
    ("llama-3.1-8b", "torch_dtype", "float13"),
    ("llama-3.1-8b", "torch_dtype", 16),
    ("llama-3.1-8b", "layer_types", ["full_attention"] * 31),
    ("llama-3.1-8b", "layer_types", "full_attention"),
    ("llama-3.1-8b", "layer_types", ["linear_attention"] * 32),
    ("llama-3.1-8b", "quantization_config", "fp8"),
    ("llama-3.1-8b", "rope_scaling", 8),
    ("mistral-7b-v0.1", "sliding_window", float("inf")),
    ("gemma-7b", "use_bidirectional_attention", True),
    ("llama-3.1-8b", "per_layer_config", []),
    ("llama-3.1-8b", "per_layer_config", {"32": {}}),
    ("llama-3.1-8b", "per_layer_config", {"x": {}}),
    ("llama-3.1-8b", "per_layer_config", {"0": None}),
    ("llama-3.1-8b", "per_layer_config", {"0": {"head_dim": "64"}}),
    ("llama-3.1-8b", "per_layer_config", {"0": {"num_key_value_heads": 0}}),
    ("llama-3.1-8b", "per_layer_config", {"0": {"skip": ["attention"]}}),
    ("deepseek-v3", "per_layer_config", {"0": {"kv_lora_rank": 64}}),
    ("mimo-v2-flash", "hybrid_layer_pattern", [0] * 47),
    ("mimo-v2-flash", "swa_head_dim", None),
    ("deepseek-v3", "kv_lora_rank", None),
    ("deepseek-v3.2", "index_head_dim", 100),
    ("glm-5", "index_topk_pattern", "FX"),
    ("glm-5", "indexer_types", ["full"]),
    ("deepseek-v4-flash", "compress_ratios", [0] * 42),
    ("jamba-1.5-mini", "mamba_d_conv", 1),
    ("jamba-1.5-mini", "attn_layer_offset", 8),
    ("nemotron-h-8b", "hybrid_override_pattern", "MM"),
    ("nemotron-h-8b", "hybrid_override_pattern", "X" * 52),
    ("nemotron-h-8b", "mamba_ssm_cache_dtype", "int8"),
    ("nemotron-nas-like", "block_configs", None),
    ("minimax-text-01", "attn_type_list", [1]),
    ("kimi-linear-48b", "num_hidden_layers", 28),
    ("qwen3-next-80b-a3b", "full_attention_interval", 0),
    ("step-3.5-flash", "att_impl_type", "MLA"),
    ("minimax-text-01", "layer_types", ["sliding_attention"] * 80),
    ("qwen3-next-80b-a3b", "layer_types", ["sliding_attention"] * 48),
    ("qwen3-next-80b-a3b", "linear_conv_kernel_dim", 1),
    ("glm-4-9b-chat", "kv_channels", 64),
    ("granite-4.0-h-small", "layer_types", None),
    ("lfm2-1.2b", "full_attn_idxs", [16]),
    ("deepseek-v4-flash", "compress_ratios", None),
]


@pytest.mark.parametrize(("name", "field", "value"), FIELDS)
def test_a_field_that_cannot_be_is_named(name: str, field: str, value: Any) -> None:
    with pytest.raises(SpecInvalid) as caught:
        read_model(config(name, **{field: value}))
    pointers = [fault.pointer for fault in caught.value.errors]
    inside = {"kimi-linear-48b": ["/linear_attn_config/kda_layers"], "minimax-text-01": ["/attn_type_list"]}
    assert pointers in ([f"/{field}"], inside.get(name)) or pointers[0].startswith(f"/{field}/")


@pytest.mark.parametrize(
    ("name", "path", "value", "pointer"),
    [
        ("gemma-3-27b", ("text_config", "head_dim"), "128", "/text_config/head_dim"),
        ("gemma-3-27b", ("text_config",), ..., "/text_config"),
        ("gemma-3-27b", ("text_config",), [], "/text_config"),
        ("qwen3-omni-30b-a3b", ("thinker_config", "text_config"), None, "/thinker_config/text_config"),
        ("qwen3.5-35b-a3b", ("text_config", "layer_types", 7), "mamba", "/text_config/layer_types/7"),
        ("deepseek-v4-flash", ("compress_ratios", 3), 64, "/compress_ratios/3"),
        ("deepseek-v4-flash", ("compress_ratios", 3), [], "/compress_ratios/3"),
        ("nemotron-nas-like", ("block_configs", 0), 1, "/block_configs/0"),
        ("nemotron-nas-like", ("block_configs", 0, "attention"), ..., "/block_configs/0/attention"),
        (
            "nemotron-nas-like",
            ("block_configs", 0, "attention", "n_heads_in_group"),
            7,
            "/block_configs/0/attention/n_heads_in_group",
        ),
        ("gemma-3n-e4b", ("text_config", "num_kv_shared_layers"), 35, "/text_config/num_kv_shared_layers"),
        ("gemma-3n-e4b", ("text_config", "num_kv_shared_layers"), 31, "/text_config/num_kv_shared_layers"),
        ("gemma-4-26b-a4b", ("text_config", BIDIRECTIONAL), "all", f"/text_config/{BIDIRECTIONAL}"),
        ("step-3", ("text_config", "num_attention_groups"), 2, "/text_config/num_attention_groups"),
        ("minimax-m3-like", ("text_config", SPARSE), ..., f"/text_config/{SPARSE}"),
        ("minimax-m3-like", ("text_config", SPARSE, FLAGS), ..., f"/text_config/{SPARSE}/{FLAGS}"),
        ("nemotron-h-8b", ("hybrid_override_pattern",), ..., "/hybrid_override_pattern"),
        ("lfm2-1.2b", ("full_attn_idxs",), ..., "/layer_types"),
        ("kimi-linear-48b", ("linear_attn_config", "kda_layers"), ..., "/linear_attn_config/kda_layers"),
        ("kimi-linear-48b", ("linear_attn_config", "num_heads"), ..., "/linear_attn_config/num_heads"),
        ("llama-3.1-8b", ("rope_scaling", "factor"), "8", "/rope_scaling/factor"),
        (
            "step-3.5-flash",
            ("attention_other_setting", "attention_type"),
            "x",
            "/attention_other_setting/attention_type",
        ),
    ],
)
def test_a_fault_deep_inside_is_named_where_it_is(name: str, path: Path, value: Any, pointer: str) -> None:
    written = changed(config(name), path, value)
    if name == "llama-3.1-8b":
        written["rope_scaling"]["rope_type"] = "linear"  # whose factor counts
    with pytest.raises(SpecInvalid) as caught:
        read_model(written)
    assert [fault.pointer for fault in caught.value.errors] == [pointer]


def test_faults_of_a_draft_point_into_the_draft() -> None:
    with pytest.raises(SpecInvalid) as caught:
        read_model(config("llama-3.1-8b"), draft=config("qwen3-0.6b", head_dim=0))
    assert caught.value.errors[0].pointer == "/draft/head_dim"


@pytest.mark.parametrize("model_type", ["gpt5", "", "LLAMA", "mllama", "x" * 5000])
def test_unknown_model_types_are_refused_with_what_to_do(model_type: str) -> None:
    with pytest.raises(NotSupported) as caught:
        read_model({"model_type": model_type, "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2})
    assert [fault.pointer for fault in caught.value.errors] == ["/model_type"]
    assert "write the layers out" in caught.value.message
    assert len(caught.value.message) < 1000


def test_an_unknown_wrapper_says_that_its_inside_may_be_known() -> None:
    with pytest.raises(NotSupported) as caught:
        read_model({"model_type": "new_vl", "text_config": config("llama-3.1-8b")})
    assert "/text_config alone" in caught.value.message


@pytest.mark.parametrize("written", [{}, {"model_type": None}, {"model_type": 5}, {"model_type": ["llama"]}])
def test_a_config_without_a_model_type_is_refused(written: Any) -> None:
    with pytest.raises(SpecInvalid) as caught:
        read_model(written)
    assert [fault.pointer for fault in caught.value.errors] == ["/model_type"]


def test_rates_beside_types_of_deepseek_v4_are_not_guessed_at() -> None:
    written = config("deepseek-v4-flash", layer_types=["compressed_sparse_attention"] * 43, compress_rates={})
    del written["compress_ratios"]
    with pytest.raises(SpecInvalid) as caught:
        read_model(written)
    assert [fault.pointer for fault in caught.value.errors] == ["/compress_rates"]


def test_a_pattern_of_thousands_of_layers_is_refused() -> None:
    written = config("nemotron-h-8b", num_hidden_layers=None, layers_block_type=["mamba"] * 5000)
    del written["hybrid_override_pattern"]
    with pytest.raises(SpecInvalid) as caught:
        read_model(written)
    assert [fault.pointer for fault in caught.value.errors] == ["/layers_block_type"]


def test_a_larger_model_whose_inside_may_be_anything_must_name_it() -> None:
    with pytest.raises(SpecInvalid) as caught:
        read_model({"model_type": "internvl_chat", "llm_config": {"hidden_size": 8}})
    assert [fault.pointer for fault in caught.value.errors] == ["/llm_config/model_type"]


def test_a_family_without_published_defaults_wants_every_field() -> None:
    written = config("mimo-v2-flash")
    needed = ("num_hidden_layers", "num_key_value_heads", "head_dim", "swa_num_key_value_heads", "hybrid_layer_pattern")
    for name in needed:
        with pytest.raises(SpecInvalid) as caught:
            read_model({key: value for key, value in written.items() if key != name})
        assert [fault.pointer for fault in caught.value.errors] == [f"/{name}"]
