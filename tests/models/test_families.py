"""Every family of models: how many layers of which kind, their sizes, and the bytes they keep."""

from __future__ import annotations

from typing import Any

import pytest

import kvpage
from kvpage.models import read_model
from kvpage.models.registry import FAMILIES, WRAPPERS
from models.public_configs import CONFIGS, config, kinds, state_bytes, token_bytes

FULL, SLIDING, CHUNKED = "full_attention", "sliding_window", "chunked_local_attention"
MLA, WINDOW_MLA, STATE = "mla_attention", "sliding_window_mla", "mamba"

# name, layers by kind, bytes of one token over all layers with a cache of their own, bytes of all recurrent states
EXPECTED: list[tuple[str, dict[str, int], int, int]] = [
    ("llama-3.1-8b", {FULL: 32}, 131_072, 0),  # as published
    ("mistral-7b-v0.1", {SLIDING: 32}, 131_072, 0),
    ("mistral-7b-v0.3", {FULL: 32}, 131_072, 0),
    ("mixtral-8x7b", {FULL: 32}, 131_072, 0),
    ("qwen2.5-7b", {FULL: 28}, 28 * 4 * 2 * 128 * 2, 0),
    ("qwen2-vl-7b", {FULL: 28}, 28 * 4 * 2 * 128 * 2, 0),
    ("qwen3-0.6b", {FULL: 28}, 114_688, 0),
    ("qwen3-30b-a3b", {FULL: 48}, 98_304, 0),
    ("qwen3-omni-30b-a3b", {FULL: 48}, 98_304, 0),
    ("qwen3-next-80b-a3b", {FULL: 12, STATE: 36}, 12 * 2048, 36 * (3 * 8192 * 2 + 32 * 128 * 128 * 2)),
    ("qwen3.5-35b-a3b", {FULL: 10, STATE: 30}, 10 * 2048, 30 * (3 * 8192 * 2 + 32 * 128 * 128 * 4)),
    ("gemma-7b", {FULL: 28}, 28 * 16 * 2 * 256 * 2, 0),
    ("gemma-2-9b", {FULL: 21, SLIDING: 21}, 42 * 8 * 2 * 256 * 2, 0),
    ("gemma-3-27b", {FULL: 10, SLIDING: 52}, 62 * 8192, 0),
    ("gemma-3n-e4b", {FULL: 7, SLIDING: 28}, 20 * 2 * 2 * 256 * 2, 0),
    ("gemma-4-26b-a4b", {FULL: 5, SLIDING: 25}, 5 * 2 * 2 * 512 * 2 + 25 * 8 * 2 * 256 * 2, 0),
    ("gpt-oss-120b", {FULL: 18, SLIDING: 18}, 73_728, 0),
    ("llama-4-scout", {FULL: 12, CHUNKED: 36}, 48 * 4096, 0),
    ("mimo-v2-flash", {FULL: 9, SLIDING: 39}, 9 * 4 * 320 * 2 + 39 * 8 * 320 * 2, 0),
    ("deepseek-v2-lite", {MLA: 27}, 27 * 1152, 0),
    ("deepseek-v3", {MLA: 61}, 70_272, 0),  # as published
    ("deepseek-v3.2", {MLA: 122}, 61 * (1152 + 132), 0),
    ("kimi-k2", {MLA: 61}, 70_272, 0),
    ("kimi-k2.5", {MLA: 61}, 70_272, 0),
    ("kimi-linear-48b", {MLA: 7, STATE: 20}, 7 * 1152, 20 * (3 * 3 * 32 * 128 * 2 + 32 * 128 * 128 * 4)),
    ("glm-4-9b", {FULL: 40}, 40 * 1024, 0),
    ("glm-4-9b-chat", {FULL: 40}, 40 * 1024, 0),
    ("glm-4.5", {FULL: 92}, 92 * 4096, 0),
    ("glm-4.7-flash", {MLA: 47}, 47 * 1152, 0),
    ("glm-5", {MLA: 156}, 78 * (1152 + 132), 0),
    ("nemotron-h-8b", {FULL: 4, STATE: 24}, 4 * 4096, 24 * (3 * 10_240 * 2 + 128 * 64 * 128 * 4)),
    ("nemotron-nas-like", {FULL: 3}, (8 + 4 + 8) * 2 * 128 * 2, 0),
    ("jamba-1.5-mini", {FULL: 4, STATE: 28}, 4 * 4096, 28 * (3 * 8192 * 2 + 8192 * 16 * 2)),
    ("granite-4.0-h-small", {FULL: 4, STATE: 36}, 4 * 4096, 36 * (3 * 8448 * 2 + 128 * 64 * 128 * 2)),
    ("lfm2-1.2b", {FULL: 6, STATE: 10}, 6 * 8 * 2 * 64 * 2, 10 * 2 * 2048 * 2),
    ("step-3", {FULL: 61}, 61 * 1024, 0),
    ("step-3.5-flash", {FULL: 12, SLIDING: 33}, 45 * 4096, 0),
    ("minimax-m2", {FULL: 62}, 62 * 4096, 0),
    ("minimax-text-01", {FULL: 10, STATE: 70}, 10 * 4096, 70 * 64 * 128 * 128 * 2),
    ("minimax-m3-like", {FULL: 60, MLA: 57}, 60 * 2048 + 57 * 256, 0),
    ("phi-2", {FULL: 32}, 32 * 32 * 2 * 80 * 2, 0),
    ("phi-3-mini-4k", {SLIDING: 32}, 32 * 32 * 2 * 96 * 2, 0),
    ("phi-4", {FULL: 40}, 40 * 10 * 2 * 128 * 2, 0),
    ("phi-3.5-moe", {SLIDING: 32}, 131_072, 0),
    ("falcon-h1-0.5b", {FULL: 36, STATE: 36}, 36 * 2 * 2 * 64 * 2, 36 * (3 * 1792 * 2 + 24 * 64 * 128 * 2)),
    ("hunyuan-large", {FULL: 64}, 32 * 8 * 2 * 80 * 2, 0),
    ("llava-1.5-7b", {FULL: 32}, 32 * 32 * 2 * 128 * 2, 0),
]


@pytest.mark.parametrize(("name", "counts", "per_token", "states"), EXPECTED, ids=[row[0] for row in EXPECTED])
def test_the_layers_of_a_model_are_known(name: str, counts: dict[str, int], per_token: int, states: int) -> None:
    layers = read_model(config(name)).layers
    assert kinds(layers) == counts
    assert sum(map(token_bytes, layers)) == per_token
    assert sum(map(state_bytes, layers)) == states
    assert len({layer["name"] for layer in layers}) == len(layers)


def test_every_excerpt_is_expected_somewhere() -> None:
    assert {row[0] for row in EXPECTED} | {"deepseek-v4-flash"} == set(CONFIGS)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_model_is_planned_and_the_plan_holds(name: str) -> None:
    model = read_model(config(name))
    plan = kvpage.plan(request(model))
    plan.check()
    assert set(plan.layers) == {layer["name"] for layer in model.layers}


def request(model: Any, **more: Any) -> dict[str, Any]:
    common = {"strategy": "unify", "memory_bytes": 40 << 30, "max_model_len": 8192, "align_hybrid": model.is_hybrid}
    return {"layers": list(model.layers)} | common | more


def test_every_model_type_in_the_tables_is_one_that_is_read() -> None:
    """A larger model whose inner config may leave its type out names one that there is."""
    assert {wrapper.text_type for wrapper in WRAPPERS.values()} - {None} <= set(FAMILIES)
    assert not set(WRAPPERS) & set(FAMILIES)


NAMES = [
    ("llama-3.1-8b", 0, "model.layers.0.self_attn.attn"),
    ("gpt-oss-120b", 35, "model.layers.35.attn.attn"),
    ("gemma-3-27b", 61, "language_model.model.layers.61.self_attn.attn"),
    ("qwen3-next-80b-a3b", 0, "model.layers.0.linear_attn"),
    ("qwen3-next-80b-a3b", 3, "model.layers.3.self_attn.attn"),
    ("deepseek-v3.2", 1, "model.layers.0.self_attn.indexer.k_cache"),
    ("kimi-linear-48b", 0, "model.layers.0.self_attn"),
    ("nemotron-h-8b", 0, "model.layers.0.mixer"),
    ("nemotron-h-8b", 4, "model.layers.7.mixer.attn"),
    ("jamba-1.5-mini", 4, "model.layers.4.attn"),
    ("nemotron-nas-like", 1, "model.layers.2.self_attn.attn"),
    ("minimax-m3-like", 4, "language_model.model.layers.3.self_attn.attn.index_cache"),
    ("granite-4.0-h-small", 0, "model.layers.0.mixer"),
    ("lfm2-1.2b", 0, "model.layers.0.conv"),
    ("glm-4-9b-chat", 39, "transformer.encoder.layers.39.self_attention.attn"),
    ("deepseek-v4-flash", 1, "model.layers.1.attn.swa_cache"),
    ("falcon-h1-0.5b", 2, "model.layers.1.attn"),
    ("falcon-h1-0.5b", 3, "model.37.mixer"),  # vLLM counts the mixers on after the 36 layers
]


@pytest.mark.parametrize(("model", "position", "name"), NAMES)
def test_layers_have_the_names_that_vllm_gives_them(model: str, position: int, name: str) -> None:
    assert read_model(config(model)).layers[position]["name"] == name


def layer(model: str, position: int, **options: Any) -> dict[str, Any]:
    return dict(read_model(config(model), **options).layers[position])


def test_windows_chunks_and_widths_of_v_are_read() -> None:
    assert layer("gemma-2-9b", 0)["sliding_window"] == 4096
    assert "sliding_window" not in layer("gemma-2-9b", 1)
    assert layer("llama-4-scout", 0)["attention_chunk_size"] == 8192
    assert "attention_chunk_size" not in layer("llama-4-scout", 3)
    assert layer("mimo-v2-flash", 0) | {"name": ""} == {
        "name": "",
        "kind": FULL,
        "dtype": "bfloat16",
        "num_kv_heads": 4,
        "head_size": 192,
        "head_size_v": 128,
    }
    assert (layer("mimo-v2-flash", 1)["sliding_window"], layer("mimo-v2-flash", 1)["num_kv_heads"]) == (128, 8)


def test_attention_in_both_directions_over_an_image_keeps_a_cache() -> None:
    """PaliGemma: a prompt's image is read both ways, what follows is generated. Alone such a Gemma is an encoder."""
    text = config("gemma-7b", use_bidirectional_attention=True)
    layers = read_model({"model_type": "paligemma", "text_config": text}).layers
    alone = read_model(config("gemma-7b")).layers
    assert [layer | {"name": ""} for layer in layers] == [layer | {"name": ""} for layer in alone]
    with pytest.raises(kvpage.KvpageError) as caught:
        read_model(text)
    assert [fault.pointer for fault in caught.value.errors] == ["/use_bidirectional_attention"]


@pytest.mark.parametrize("model_type", ["lfm2_vl", "lfm2-vl"])
def test_the_language_model_of_lfm2_vl_is_found(model_type: str) -> None:
    text = config("lfm2-1.2b")
    del text["model_type"]  # as some checkpoints have it
    layers = read_model({"model_type": model_type, "text_config": text, "dtype": "bfloat16"}).layers
    assert kinds(layers) == {FULL: 6, STATE: 10}
    assert layers[0]["name"] == "language.model.layers.0.conv"


def test_heads_of_step_3_5_that_are_left_out_are_those_of_its_class() -> None:
    written = config("step-3.5-flash")
    published = read_model(written).layers
    groups = written.pop("num_attention_groups")
    assert groups == 8
    assert read_model(written).layers == published
    assert read_model(written | {"num_key_value_heads": 4}).layers[0]["num_kv_heads"] == 4


def test_shared_layers_of_gemma_3n_name_the_last_of_their_type() -> None:
    """35 layers, the last 15 shared: full ones read layer 19, windows layer 18."""
    layers = read_model(config("gemma-3n-e4b")).layers
    owner = "language_model.model.layers.{}.self_attn.attn"
    targets = [layer.get("kv_sharing_target") for layer in layers]
    assert targets[:20] == [None] * 20
    assert targets[20:] == [owner.format(19 if (index + 1) % 5 == 0 else 18) for index in range(20, 35)]


def test_gemma_4_shares_by_type_where_it_does() -> None:
    text = config("gemma-4-26b-a4b")["text_config"] | {"num_kv_shared_layers": 12}
    layers = read_model({"model_type": "gemma4", "dtype": "bfloat16", "text_config": text}).layers
    targets = {layer.get("kv_sharing_target") for layer in layers[18:]}
    assert targets == {f"language_model.model.layers.{index}.self_attn.attn" for index in (16, 17)}
    kvpage.plan(request(read_model({"model_type": "gemma4", "text_config": text, "dtype": "bfloat16"}))).check()


def saved_by_transformers(**more: Any) -> dict[str, Any]:
    """A Gemma 4 as transformers 5.24 saves it: four layers, of which the second and the last see everything."""
    sizes = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
    types = ["sliding_attention", "full_attention"] * 2
    own = {"1": {"head_dim": 64, "num_key_value_heads": 2}, "3": {"head_dim": 64, "num_key_value_heads": 2}}
    rest = {"layer_types": types, "sliding_window": 128, "per_layer_config": own, "dtype": "bfloat16"}
    return {"model_type": "gemma4_text", "num_kv_shared_layers": 1, "attention_k_eq_v": True} | sizes | rest | more


def sizes(model: dict[str, Any], **options: Any) -> list[tuple[int, int, int | None]]:
    read = read_model(model, **options).layers
    return [(one["num_kv_heads"], one["head_size"], one.get("sliding_window")) for one in read]


def test_gemma_4_as_transformers_saves_it_has_its_sizes_layer_by_layer() -> None:
    assert sizes(saved_by_transformers()) == [(4, 32, 128), (2, 64, None)] * 2
    assert sizes(saved_by_transformers(), tp=4) == [(1, 32, 128), (1, 64, None)] * 2
    assert sizes(saved_by_transformers(per_layer_config={})) == [(4, 32, 128), (4, 32, None)] * 2
    assert sizes(saved_by_transformers(per_layer_config=None)) == [(4, 32, 128), (4, 32, None)] * 2
    old = saved_by_transformers(global_head_dim=64, num_global_key_value_heads=2)
    del old["per_layer_config"]
    assert sizes(old) == sizes(saved_by_transformers())
    assert not [note for note in read_model(saved_by_transformers()).notes if "head_dim" in note]
    kvpage.plan(request(read_model(saved_by_transformers()))).check()


def test_other_models_may_have_layers_of_their_own_sizes_too() -> None:
    llama = config("llama-3.1-8b") | {"per_layer_config": {"7": {"head_dim": 64}, "9": {"num_key_value_heads": 2}}}
    assert set(enumerate(sizes(llama))) - {(i, (8, 128, None)) for i in range(32)} == {
        (7, (8, 64, None)),
        (9, (2, 128, None)),
    }


def test_compressed_layers_of_deepseek_v4() -> None:
    """Window rows in all 43 layers; 21 layers of ratio 4, 20 of ratio 128; pages as vLLM aligns them."""
    model = read_model(config("deepseek-v4-flash"))
    assert kinds(model.layers) == {WINDOW_MLA: 43 + 21 + 20 + 21, MLA: 21 + 20 + 21}
    plan = kvpage.plan(request(model))
    pages = {
        name: (plan.layers[f"model.layers.{name}"].real_page_size_bytes, plan.layers[f"model.layers.{name}"].block_size)
        for name in (
            "0.attn.swa_cache",
            "2.attn",
            "2.attn.compressor.state_cache",
            "2.attn.indexer.k_cache",
            "2.attn.indexer.compressor.state_cache",
            "3.attn",
            "3.attn.compressor.state_cache",
        )
    }
    assert pages == {
        "0.attn.swa_cache": (64 * 584, 64),
        "2.attn": (64 * 584, 256),
        "2.attn.compressor.state_cache": (4 * 2048 * 4, 4),
        "2.attn.indexer.k_cache": (64 * 132, 256),
        "2.attn.indexer.compressor.state_cache": (4 * 512 * 4, 4),
        "3.attn": (2 * 584, 256),
        "3.attn.compressor.state_cache": (8 * 1024 * 4, 8),
    }
    assert plan.bytes_per_block == 22 * 37_440 + 21 * 8640 + 20 * 1728


def test_layer_types_of_deepseek_v4_mean_what_ratios_mean() -> None:
    written = config("deepseek-v4-flash")
    names = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
    types = [names[ratio] for ratio in written.pop("compress_ratios")[:43]]
    assert read_model(written | {"layer_types": types}).layers == read_model(config("deepseek-v4-flash")).layers
    rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}  # as transformers writes it
    both = written | {"layer_types": types, "compress_rates": rates}
    assert read_model(both).layers == read_model(config("deepseek-v4-flash")).layers
    with pytest.raises(kvpage.KvpageError) as caught:
        read_model(both | {"compress_rates": rates | {"compressed_sparse_attention": 8}})
    assert [fault.pointer for fault in caught.value.errors] == ["/compress_rates"]


@pytest.mark.parametrize(
    ("changes", "indexers"),
    [
        ({"index_topk_freq": 4}, [0, 1, 5, 9]),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 0}, [3, 7]),
        ({"index_topk_pattern": "FSSSFFSSSS"}, [0, 4, 5]),
        ({"indexer_types": ["shared"] * 9 + ["full"]}, [9]),
    ],
)
def test_layers_that_use_what_another_found_keep_no_indexer_rows(changes: Any, indexers: list[int]) -> None:
    layers = read_model(config("glm-5", num_hidden_layers=10, **changes)).layers
    found = [layer["name"] for layer in layers if "indexer" in layer["name"]]
    assert found == [f"model.layers.{index}.self_attn.indexer.k_cache" for index in indexers]


def test_patterns_of_nemotron_h_may_be_words() -> None:
    written = config("nemotron-h-8b")
    pattern = written.pop("hybrid_override_pattern")
    words = [{"M": "mamba", "*": "attention", "-": "mlp"}[letter] for letter in pattern]
    assert read_model(written | {"layers_block_type": words}).layers == read_model(config("nemotron-h-8b")).layers


def test_a_puzzle_of_nemotron_h_keeps_what_nemotron_h_keeps() -> None:
    """vLLM runs both by one class; `block_configs` are about experts."""
    written = config("nemotron-h-8b")
    pattern = written.pop("hybrid_override_pattern")
    words = [{"M": "mamba", "*": "attention", "-": "moe"}[letter] for letter in pattern]
    puzzle = written | {"model_type": "nemotron_h_puzzle", "layers_block_type": words, "head_dim": 128}
    puzzle |= {"block_configs": [{"block_type": word} for word in words]}
    assert (
        read_model(puzzle | {"mamba_ssm_cache_dtype": "float32"}).layers == read_model(config("nemotron-h-8b")).layers
    )


def test_heads_of_the_sliding_layers_of_step_3_5_are_their_own() -> None:
    other = {"attention_type": "sliding_attention", "num_attention_groups": 4, "head_dim": 64}
    layers = read_model(config("step-3.5-flash", attention_other_setting=other)).layers
    assert [(layer["num_kv_heads"], layer["head_size"]) for layer in layers[:2]] == [(8, 128), (4, 64)]


def test_sparse_layers_of_minimax_m3_may_be_written_by_type() -> None:
    """As transformers writes the config; the published one has flags."""
    published = config("minimax-m3-like")
    text = published["text_config"]
    flags = text.pop("sparse_attention_config")["sparse_attention_freq"]
    types = ["minimax_m3_sparse" if flag else "full_attention" for flag in flags]
    text |= {"model_type": "minimax_m3_vl_text", "layer_types": types, "index_head_dim": 128}
    assert read_model(published).layers == read_model(config("minimax-m3-like")).layers


def test_heads_of_granite_4_may_be_automatic_and_must_fill_the_width() -> None:
    assert read_model(config("granite-4.0-h-small", mamba_d_head="auto")) == read_model(config("granite-4.0-h-small"))
    with pytest.raises(kvpage.KvpageError) as caught:
        read_model(config("granite-4.0-h-small", mamba_d_head=32))
    assert [fault.pointer for fault in caught.value.errors] == ["/mamba_d_head"]


def test_layers_of_lfm2_may_be_named_by_type() -> None:
    written = config("lfm2-1.2b")
    full = written.pop("full_attn_idxs")
    types = ["full_attention" if index in full else "conv" for index in range(16)]
    assert read_model(written | {"layer_types": types}).layers == read_model(config("lfm2-1.2b")).layers


def test_full_layers_of_llama_4_by_interval_and_by_type() -> None:
    """An empty list, as published configs have it, means every fourth layer."""
    ways: list[dict[str, Any]] = [{"no_rope_layers": []}, {"no_rope_layers": None, "layer_types": FOURTH}]
    for written in ways:
        text = config("llama-4-scout")["text_config"] | written
        layers = read_model(config("llama-4-scout", text_config=text)).layers
        assert layers == read_model(config("llama-4-scout")).layers


FOURTH = (["chunked_attention"] * 3 + ["full_attention"]) * 12


def test_windows_of_mimo_v2_by_type() -> None:
    written = config("mimo-v2-flash")
    types = ["sliding_attention" if flag else "full_attention" for flag in written.pop("hybrid_layer_pattern")]
    assert read_model(written | {"layer_types": types}).layers == read_model(config("mimo-v2-flash")).layers


def test_step_3_5_without_types_slides_in_every_second_layer() -> None:
    written = config("step-3.5-flash")
    del written["layer_types"], written["attention_other_setting"]
    assert [layer["kind"] for layer in read_model(written).layers[:4]] == [SLIDING, FULL, SLIDING, FULL]
    assert kinds(read_model(written | {"sliding_window": None}).layers) == {FULL: 45}


def test_fp8_rows_of_deepseek_v4_may_be_asked_for_by_either_name() -> None:
    rows = read_model(config("deepseek-v4-flash")).layers
    for kv_dtype in ("fp8", "fp8_ds_mla"):
        assert read_model(config("deepseek-v4-flash"), kv_dtype=kv_dtype).layers == rows
    plain = read_model(config("deepseek-v4-flash"), kv_dtype="bfloat16")
    assert plain.layers[0]["dtype"] == "bfloat16"
    kvpage.plan(request(plain)).check()
