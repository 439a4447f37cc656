"""What is asked of a model besides its config: ranks, stages, data types, backends, a draft."""

from __future__ import annotations

from typing import Any

import pytest

import kvpage
from kvpage.errors import SpecInvalid
from kvpage.models import read_model
from models.public_configs import CONFIGS, config, kinds, state_bytes, token_bytes


def request(model: Any, **more: Any) -> dict[str, Any]:
    common = {"strategy": "unify", "memory_bytes": 40 << 30, "max_model_len": 8192, "align_hybrid": model.is_hybrid}
    return {"layers": list(model.layers)} | common | more


@pytest.mark.parametrize(("tp", "heads"), [(1, 8), (2, 4), (4, 2), (8, 1), (16, 1), (32, 1)])
def test_kv_heads_are_divided_and_then_replicated(tp: int, heads: int) -> None:
    model = read_model(config("llama-3.1-8b"), tp=tp)
    assert {layer["num_kv_heads"] for layer in model.layers} == {heads}
    assert any(f"kept by {tp // 8} ranks" in note for note in model.notes) == (tp > 8)


@pytest.mark.parametrize(("model", "tp"), [("llama-3.1-8b", 3), ("qwen2.5-7b", 8), ("phi-4", 4), ("deepseek-v3", 3)])
def test_ranks_that_do_not_divide_heads_are_refused(model: str, tp: int) -> None:
    """Neither KV heads nor query heads may be cut."""
    with pytest.raises(SpecInvalid) as caught:
        read_model(config(model), tp=tp)
    assert caught.value.errors[0].pointer == "/tp"
    assert any(name in caught.value.message for name in ("/num_attention_heads", "/num_key_value_heads"))


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_latent_rows_are_the_same_on_every_rank(tp: int) -> None:
    for name in ("deepseek-v3", "deepseek-v3.2", "kimi-k2", "glm-5", "deepseek-v4-flash"):
        assert read_model(config(name), tp=tp).layers == read_model(config(name)).layers


# model, tp -> shapes of one state, as vLLM 0.24.0's MambaStateShapeCalculator gives them
STATES: list[tuple[str, int, list[list[int]]]] = [
    ("qwen3-next-80b-a3b", 1, [[3, 8192], [32, 128, 128]]),
    ("qwen3-next-80b-a3b", 2, [[3, 4096], [16, 128, 128]]),
    ("qwen3-next-80b-a3b", 8, [[3, 1024], [4, 128, 128]]),
    ("kimi-linear-48b", 1, [[3, 12_288], [32, 128, 128]]),
    ("kimi-linear-48b", 4, [[3, 3072], [8, 128, 128]]),
    ("nemotron-h-8b", 1, [[3, 10_240], [128, 64, 128]]),
    ("nemotron-h-8b", 8, [[3, 1280], [16, 64, 128]]),
    ("jamba-1.5-mini", 1, [[3, 8192], [8192, 16]]),
    ("jamba-1.5-mini", 8, [[3, 1024], [1024, 16]]),
    ("minimax-text-01", 1, [[64, 128, 128]]),
    ("minimax-text-01", 8, [[8, 128, 128]]),
]


@pytest.mark.parametrize(("name", "tp", "shapes"), STATES)
def test_states_are_divided_among_ranks(name: str, tp: int, shapes: list[list[int]]) -> None:
    states = [layer for layer in read_model(config(name), tp=tp).layers if layer["kind"] == "mamba"]
    assert [layer["shapes"] for layer in states] == [shapes] * len(states)


def test_one_group_of_a_mamba_2_mixer_is_kept_by_every_rank() -> None:
    """vLLM: conv_dim = (128 × 64 + 2 × 4 groups × 128) / 4."""
    layer = read_model(config("nemotron-h-8b", n_groups=1), tp=4).layers[0]
    assert layer["shapes"] == [[3, (8192 + 2 * 4 * 128) // 4], [32, 64, 128]]
    with pytest.raises(SpecInvalid) as caught:
        read_model(config("nemotron-h-8b", n_groups=2), tp=4)
    assert caught.value.errors[0].pointer == "/tp"
    assert "/n_groups is 2" in caught.value.message


def test_states_keep_room_for_drafted_tokens() -> None:
    """vLLM lengthens the convolution's state of gated delta nets and Mamba-2, and adds a block for each token."""
    for name in ("qwen3-next-80b-a3b", "nemotron-h-8b"):
        layer = next(x for x in read_model(config(name), num_speculative_tokens=3).layers if x["kind"] == "mamba")
        assert (layer["shapes"][0][0], layer["num_speculative_blocks"]) == (6, 3)
    layer = read_model(config("kimi-linear-48b"), num_speculative_tokens=3).layers[0]
    assert (layer["shapes"][0][0], layer["num_speculative_blocks"]) == (3, 3)


@pytest.mark.parametrize(
    ("name", "ssm", "dtypes"),
    [
        ("qwen3-next-80b-a3b", "auto", ["bfloat16", "bfloat16"]),
        ("qwen3-next-80b-a3b", "float32", ["bfloat16", "float32"]),
        ("qwen3.5-35b-a3b", "auto", ["bfloat16", "float32"]),
        ("qwen3.5-35b-a3b", "bfloat16", ["bfloat16", "bfloat16"]),
        ("nemotron-h-8b", "auto", ["bfloat16", "float32"]),
        ("jamba-1.5-mini", "auto", ["bfloat16", "bfloat16"]),
        ("kimi-linear-48b", "bfloat16", ["bfloat16", "float32"]),
    ],
)
def test_dtypes_of_states(name: str, ssm: str, dtypes: list[str]) -> None:
    states = [layer for layer in read_model(config(name), ssm_dtype=ssm).layers if layer["kind"] == "mamba"]
    assert {tuple(layer["dtypes"]) for layer in states} == {tuple(dtypes)}


@pytest.mark.parametrize(
    ("kv_dtype", "per_token"),
    [("auto", 131_072), ("float16", 131_072), ("fp8", 65_536), ("fp8_e5m2", 65_536), ("float32", 262_144)],
)
def test_the_cache_may_have_another_dtype(kv_dtype: str, per_token: int) -> None:
    assert sum(map(token_bytes, read_model(config("llama-3.1-8b"), kv_dtype=kv_dtype).layers)) == per_token


@pytest.mark.parametrize(
    ("name", "kv_dtype", "page"),
    [
        ("gemma-4-26b-a4b", "int8_per_token_head", 16 * 8 * 2 * (256 + 4)),
        ("gpt-oss-120b", "fp8_per_token_head", 16 * 8 * 2 * (64 + 4)),
        ("gpt-oss-120b", "nvfp4", 16 * 8 * 2 * (32 + 4)),
        ("deepseek-v3.2", "fp8", 64 * 656),
        ("deepseek-v3", "fp8", 16 * 576),
    ],
)
def test_quantised_rows_are_planned_with_their_scales(name: str, kv_dtype: str, page: int) -> None:
    plan = kvpage.plan(request(read_model(config(name), kv_dtype=kv_dtype)))
    plan.check()
    assert next(iter(plan.layers.values())).real_page_size_bytes == page


def test_deepseek_v3_2_in_fp8_keeps_48068_bytes_a_token() -> None:
    """61 × (656 + 132), rows of the FP8 format and of the indexer: blocks of 64 tokens, one group, nothing padded."""
    plan = kvpage.plan(request(read_model(config("deepseek-v3.2"), kv_dtype="fp8")))
    assert (plan.bytes_per_block, len(plan.groups)) == (64 * 48_068, 1)


@pytest.mark.parametrize(
    ("quantization", "dtype"),
    [
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}, "float8_e4m3fn"),
        ({"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "NVFP4"}}, "uint8"),
        (
            {"quant_method": "modelopt", "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}},
            "float8_e4m3fn",
        ),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}, "float8_e4m3fn"),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": None}, "bfloat16"),
        ({"quant_method": "fp8"}, "bfloat16"),
    ],
)
def test_auto_is_what_the_checkpoint_was_quantised_for(quantization: Any, dtype: str) -> None:
    model = read_model(config("llama-3.1-8b", quantization_config=quantization))
    assert {layer["dtype"] for layer in model.layers} == {dtype}
    assert any("checkpoint asks" in note for note in model.notes) == (dtype != "bfloat16")
    plain = read_model(config("llama-3.1-8b", quantization_config=quantization), kv_dtype="bfloat16")
    assert {layer["dtype"] for layer in plain.layers} == {"bfloat16"}


@pytest.mark.parametrize(
    ("written", "dtype", "is_noted"),
    [
        ({"torch_dtype": "float16"}, "float16", False),
        ({"dtype": "torch.bfloat16"}, "bfloat16", False),
        ({"dtype": "float32"}, "bfloat16", True),
        ({}, "bfloat16", True),
        ({"dtype": None, "torch_dtype": None}, "bfloat16", True),
    ],
)
def test_the_models_dtype_is_read_or_its_absence_noted(written: Any, dtype: str, is_noted: bool) -> None:
    bare = config("llama-3.1-8b")
    del bare["torch_dtype"]
    model = read_model(bare | written)
    assert {layer["dtype"] for layer in model.layers} == {dtype}
    assert bool(model.notes) == is_noted


def test_defaults_of_the_config_class_are_taken_and_noted() -> None:
    """LLaVA 1.5 names only what differs from LlamaConfig."""
    model = read_model(config("llava-1.5-7b"))
    assert kinds(model.layers) == {"full_attention": 32}
    assert any("/text_config/num_hidden_layers is left out: 32" in note for note in model.notes)
    assert read_model(config("llama-3.1-8b")).notes == ()


def test_a_backend_is_that_of_the_attention_layers_alone() -> None:
    layers = read_model(config("qwen3-next-80b-a3b"), backend="triton_attn").layers
    assert {layer.get("backend") for layer in layers if layer["kind"] != "mamba"} == {"triton_attn"}
    assert {layer.get("backend") for layer in layers if layer["kind"] == "mamba"} == {None}
    sparse = read_model(config("deepseek-v3.2"), backend="flashinfer_mla_sparse", kv_dtype="fp8").layers
    assert (sparse[0]["backend"], sparse[0]["dtype"], "kv_quant" in sparse[0]) == (
        "flashinfer_mla_sparse",
        "float8_e4m3fn",
        False,
    )
    assert sparse[1]["head_size"] == 132
    kvpage.plan(request(read_model(config("mimo-v2-flash"), backend="triton_attn_diffkv"))).check()


def test_a_draft_is_marked_and_named_and_planned_beside_its_target() -> None:
    draft = config("qwen3-0.6b", num_hidden_layers=5)
    model = read_model(config("mimo-v2-flash"), draft=draft)
    drafted = [layer for layer in model.layers if layer.get("draft")]
    assert [layer["name"] for layer in drafted] == [f"draft.model.layers.{i}.self_attn.attn" for i in range(5)]
    assert len(model.layers) == 53
    kvpage.plan(request(model)).check()
    shared = read_model(config("llama-3.1-8b"), draft=config("gemma-3n-e4b")).layers[-1]
    assert shared["kv_sharing_target"].startswith("draft.language_model.model.layers.")


def test_pipeline_stages_take_layers_as_vllm_deals_them() -> None:
    """27 layers in 4 stages: 6, 7, 7, 7 would leave the last stage the most; vLLM gives 7, 7, 7, 6."""
    sizes, names = [], []
    for stage in range(4):
        layers = read_model(config("deepseek-v2-lite"), pp=4, pp_stage=stage).layers
        sizes.append(len(layers))
        names += [layer["name"] for layer in layers]
    assert sizes == [7, 7, 7, 6]
    assert names == [layer["name"] for layer in read_model(config("deepseek-v2-lite")).layers]
    assert [len(read_model(config("glm-4-9b-chat"), pp=3, pp_stage=s).layers) for s in range(3)] == [13, 14, 13]
    assert [len(read_model(config("llama-3.1-8b"), pp=5, pp_stage=s).layers) for s in range(5)] == [6, 6, 7, 7, 6]


def test_a_cache_shared_over_stages_is_refused() -> None:
    read_model(config("gemma-3n-e4b"), pp=2, pp_stage=0)
    with pytest.raises(SpecInvalid) as caught:
        read_model(config("gemma-3n-e4b"), pp=3, pp_stage=2)
    assert caught.value.errors[0].pointer == "/pp"


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("llama-3.1-8b", {"tp": 0}, "/tp"),
    ("llama-3.1-8b", {"tp": True}, "/tp"),
    ("llama-3.1-8b", {"tp": 2.0}, "/tp"),
    ("llama-3.1-8b", {"tp": 4096}, "/tp"),
    ("llama-3.1-8b", {"pp": 2, "pp_stage": 2}, "/pp_stage"),
    ("llama-3.1-8b", {"pp": 33}, "/pp"),
    ("llama-3.1-8b", {"kv_dtype": "fp7"}, "/kv_dtype"),
    ("llama-3.1-8b", {"kv_dtype": 8}, "/kv_dtype"),
    ("llama-3.1-8b", {"kv_dtype": []}, "/kv_dtype"),
    ("llama-3.1-8b", {"ssm_dtype": "fp8"}, "/ssm_dtype"),
    ("llama-3.1-8b", {"ssm_dtype": []}, "/ssm_dtype"),
    ("llama-3.1-8b", {"block_size": 0}, "/block_size"),
    ("llama-3.1-8b", {"num_speculative_tokens": -1}, "/num_speculative_tokens"),
    ("llama-3.1-8b", {"tensor_parallel": 2}, "/tensor_parallel"),
    ("deepseek-v3", {"kv_dtype": "nvfp4"}, "/kv_dtype"),
    ("deepseek-v3.2", {"kv_dtype": "int8_per_token_head"}, "/kv_dtype"),
    ("kimi-linear-48b", {"kv_dtype": "fp8_ds_mla"}, "/kv_dtype"),
    ("deepseek-v4-flash", {"kv_dtype": "float16"}, "/kv_dtype"),
    ("deepseek-v4-flash", {"block_size": 64}, "/block_size"),
    ("deepseek-v4-flash", {"backend": "flashmla"}, "/backend"),
]


@pytest.mark.parametrize(("model", "options", "pointer"), BAD)
def test_options_that_cannot_be_met_are_refused(model: str, options: dict[str, Any], pointer: str) -> None:
    with pytest.raises(SpecInvalid) as caught:
        read_model(config(model), **options)
    assert [fault.pointer for fault in caught.value.errors] == [pointer]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("tp", [2, 4, 8])
def test_a_rank_keeps_its_share_or_the_split_is_refused(name: str, tp: int) -> None:
    """Never less than the whole divided by the ranks; more only by heads and groups that several keep."""
    whole = read_model(config(name))
    try:
        mine = read_model(config(name), tp=tp)
    except SpecInvalid:
        return  # which ones: the last test here
    for all_heads, rank in zip(whole.layers, mine.layers, strict=True):
        assert all_heads["name"] == rank["name"]
        assert token_bytes(rank) * tp >= token_bytes(all_heads)
        assert state_bytes(rank) * tp >= state_bytes(all_heads)
    kvpage.plan(request(mine)).check()


def test_which_models_eight_ranks_cannot_share() -> None:
    refused = set()
    for name in CONFIGS:
        try:
            read_model(config(name), tp=8)
        except SpecInvalid:
            refused.add(name)
    assert refused == {"qwen2.5-7b", "qwen2-vl-7b", "phi-4", "glm-4.7-flash"}  # 28, 28 and 20 query heads; 10 KV heads


@pytest.mark.parametrize(
    ("name", "skipped", "kept"),
    [
        ("llama-3.1-8b", ["0", "31"], {0, 31}),
        ("gemma-2-9b", ["sliding_window"], set(range(0, 42, 2))),
        ("gemma-2-9b", ["sliding_window", "1"], {1, *range(0, 42, 2)}),
        ("llama-3.1-8b", ["sliding_window"], set()),
        ("llama-3.1-8b", [], set()),
    ],
)
def test_layers_that_are_skipped_keep_the_dtype_of_the_model(name: str, skipped: list[str], kept: set[int]) -> None:
    """vLLM's --kv-cache-dtype-skip-layers."""
    layers = read_model(config(name), kv_dtype="fp8", kv_dtype_skip_layers=skipped).layers
    assert {index for index, layer in enumerate(layers) if layer["dtype"] == "bfloat16"} == kept
    assert {layer["dtype"] for layer in layers} <= {"bfloat16", "float8_e4m3fn"}
    model = {"config": config(name), "kv_dtype": "fp8", "kv_dtype_skip_layers": skipped}
    kvpage.plan({"strategy": "unify", "model": model, "memory_bytes": 40 << 30}).check()


def test_skipped_layers_lose_the_scales_too() -> None:
    layers = read_model(config("llama-3.1-8b"), kv_dtype="int8_per_token_head", kv_dtype_skip_layers=["3"]).layers
    assert [("kv_quant" in layer, layer["dtype"]) for layer in layers[2:4]] == [(True, "int8"), (False, "bfloat16")]


def test_a_number_of_no_layer_is_worth_a_note() -> None:
    notes = read_model(config("llama-3.1-8b"), kv_dtype="fp8", kv_dtype_skip_layers=["32"]).notes
    assert "kv_dtype_skip_layers: the model keeps nothing in a layer 32" in notes


@pytest.mark.parametrize(
    "skipped", [None, "0", 0, [0], ["00"], ["-1"], ["512"], ["9" * 5000], ["full"], ["²"], {"0": 1}]
)
def test_layers_to_skip_are_numbers_in_quotes(skipped: Any) -> None:
    with pytest.raises(SpecInvalid) as caught:
        read_model(config("llama-3.1-8b"), kv_dtype_skip_layers=skipped)
    assert [fault.pointer for fault in caught.value.errors] == ["/kv_dtype_skip_layers"]
    assert len(caught.value.message) < 300


def test_latent_rows_are_never_skipped() -> None:
    """vLLM 0.24.0 does not look at the option there."""
    with pytest.raises(SpecInvalid) as caught:
        read_model(config("deepseek-v3"), kv_dtype="fp8", kv_dtype_skip_layers=["5"])
    assert [fault.pointer for fault in caught.value.errors] == ["/kv_dtype_skip_layers"]
    assert len(read_model(config("deepseek-v3"), kv_dtype="fp8", kv_dtype_skip_layers=["sliding_window"]).layers) == 61


def test_a_draft_has_a_backend_of_its_own() -> None:
    """vLLM 0.24.0 never takes the model's: it chooses anew unless told."""
    options: dict[str, Any] = {"backend": "triton_attn", "draft": config("qwen3-0.6b")}
    for chosen in (None, "flash_attn"):
        layers = read_model(config("llama-3.1-8b"), **options, draft_backend=chosen).layers
        assert {layer.get("backend") for layer in layers if "draft" in layer} == {chosen}
        assert {layer.get("backend") for layer in layers if "draft" not in layer} == {"triton_attn"}


@pytest.mark.parametrize("mtp", [None, 1, "true"])
def test_mtp_is_true_or_false(mtp: Any) -> None:
    with pytest.raises(SpecInvalid) as caught:
        read_model(config("llama-3.1-8b"), mtp=mtp)
    assert [fault.pointer for fault in caught.value.errors] == ["/mtp"]


def test_layers_of_hunyuan_share_with_the_one_before() -> None:
    layers = read_model(config("hunyuan-large")).layers
    targets = [layer.get("kv_sharing_target") for layer in layers[:4]]
    assert targets == [None, "model.layers.0.self_attn.attn", None, "model.layers.2.self_attn.attn"]
    alone = read_model(config("hunyuan-large", use_cla=False)).layers
    assert not any("kv_sharing_target" in layer for layer in alone)
    older = config("hunyuan-large", attention_head_dim=128)
    assert read_model(older).layers[0]["head_size"] == 128
    assert read_model(older | {"head_dim": 64}).layers[0]["head_size"] == 64


def test_mixers_of_falcon_h1_fill_their_width() -> None:
    auto = config("falcon-h1-0.5b", mamba_d_head="auto")
    assert read_model(auto).layers == read_model(config("falcon-h1-0.5b")).layers
    expanded = config("falcon-h1-0.5b", mamba_d_ssm=None, mamba_d_head="auto", mamba_n_heads=32)
    assert read_model(expanded).layers[1]["shapes"] == [[3, 2048 + 256], [32, 64, 128]]
    for wrong in ({"mamba_d_head": 32}, {"mamba_n_heads": 23}, {"mamba_d_head": "wide"}):
        with pytest.raises(SpecInvalid) as caught:
            read_model(config("falcon-h1-0.5b", **wrong))
        assert [fault.pointer for fault in caught.value.errors] == ["/mamba_d_head"]
