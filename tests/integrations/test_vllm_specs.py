"""vLLM's spec objects become layers with vLLM's pages, or are refused in words."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import pytest

import kvpage
from integrations import vllm_0_24 as old
from integrations import vllm_0_33 as new
from kvpage.errors import NotSupported, SpecInvalid
from kvpage.integrations.vllm import layers_from_specs

Fields = dict[str, Any]
BLOCKS = ("num_blocks", "block_size")


def one(spec: Any, **more: Any) -> Fields:
    """The layer that `spec` becomes, without its name."""
    (layer,) = layers_from_specs({"layer": spec}, **more)
    assert layer.pop("name") == "layer"
    return layer


def refused(spec: Any, **more: Any) -> SpecInvalid:
    with pytest.raises(SpecInvalid) as caught:
        layers_from_specs({"model.0": spec}, **more)
    assert "model.0" in caught.value.message
    assert caught.value.errors
    return caught.value


def plain(kind: str, **more: Any) -> Fields:
    return {"kind": kind, "block_size": 16, "num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16"} | more


def rows(kind: str, **more: Any) -> Fields:
    return {"kind": kind, "block_size": 64, "num_kv_heads": 1, "head_size": 576, "dtype": "bfloat16"} | more


FULL, SLIDING, MLA = "full_attention", "sliding_window", "mla_attention"
PER_TOKEN: Fields = {"dtype": old.Dtype("int8"), "kv_quant_mode": old.KVQuantMode.INT8_PER_TOKEN_HEAD}
KINDS: list[tuple[Any, Fields]] = [
    (old.FullAttentionSpec(16), plain(FULL)),
    (
        old.FullAttentionSpec(16, sliding_window=1024, head_size_v=64, page_size_padded=65_536),
        plain(FULL, sliding_window=1024, head_size_v=64, page_size_padded=65_536),
    ),
    (old.SinkFullAttentionSpec(16, sink_len=16), plain(FULL)),
    (old.SlidingWindowSpec(16, sliding_window=128), plain(SLIDING, sliding_window=128)),
    (
        old.ChunkedLocalAttentionSpec(16, attention_chunk_size=8192),
        plain("chunked_local_attention", attention_chunk_size=8192),
    ),
    (old.CrossAttentionSpec(16), plain("cross_attention")),
    (old.EncoderOnlyAttentionSpec(16), {"kind": "encoder_only_attention"}),
    (old.FullAttentionSpec(16, **PER_TOKEN), plain(FULL, dtype="int8", kv_quant="int8_per_token_head")),
    (
        old.SlidingWindowSpec(16, sliding_window=8, dtype=old.BYTES, kv_quant_mode=old.KVQuantMode.NVFP4),
        plain(SLIDING, sliding_window=8, dtype="uint8", kv_quant="nvfp4"),
    ),
    (
        old.FullAttentionSpec(16, dtype=old.Dtype("float8_e4m3fn"), kv_quant_mode=old.KVQuantMode.FP8_PER_TENSOR),
        plain(FULL, dtype="float8_e4m3fn"),
    ),
    (
        old.TQFullAttentionSpec(16, dtype=old.BYTES, tq_slot_size=132),
        plain(MLA, head_size=132, dtype="uint8", backend={"shape": [*BLOCKS, "num_kv_heads", "head_size"]}),
    ),
    (old.MLAAttentionSpec(64), rows(MLA)),
    (
        old.MLAAttentionSpec(64, dtype=old.BYTES, cache_dtype_str="fp8_ds_mla"),
        rows(MLA, dtype="uint8", kv_quant="fp8_ds_mla"),
    ),
    (old.MLAAttentionSpec(64, head_size=132, dtype=old.BYTES), rows(MLA, head_size=132, dtype="uint8")),
    (old.HiddenStateCacheSpec(64, head_size=4096), rows(MLA, head_size=4096)),
    (
        old.HiddenStateCacheSpec(64, num_kv_heads=3),
        rows(MLA, num_kv_heads=3, backend={"shape": [*BLOCKS, "num_kv_heads", "row_size"]}),
    ),
    (
        old.SlidingWindowMLASpec(64, sliding_window=4, cache_dtype_str="fp8_ds_mla"),
        rows("sliding_window_mla", sliding_window=4, head_size=512, backend={"shape": [*BLOCKS, "row_size"]}),
    ),
    (
        old.MambaSpec(4096, num_speculative_blocks=2, page_size_padded=2_200_000),
        {
            "kind": "mamba",
            "block_size": 4096,
            "shapes": [[3, 8192], [32, 128, 128]],
            "dtypes": ["bfloat16", "float32"],
            "num_speculative_blocks": 2,
            "page_size_padded": 2_200_000,
        },
    ),
    (new.FullAttentionSpec(16, is_draft=True), plain(FULL, draft=True, backend="LBNHC")),
    (
        new.SlidingWindowSpec(16, sliding_window=128, extra_retained_tokens=3),
        plain(SLIDING, sliding_window=131, backend="LBNHC"),
    ),
    (
        new.MLAAttentionSpec(64, dtype=new.BYTES, cache_dtype_str="fp8_ds_mla", state_content_bytes=656),
        rows(MLA, dtype="uint8", kv_quant="fp8_ds_mla", backend="LBNHC"),
    ),
    (
        new.MLAAttentionSpec(256, head_size=512, tokens_per_state=4),
        rows(MLA, block_size=256, head_size=512, compress_ratio=4, backend="LBNHC"),
    ),
    (
        new.MLAAttentionSpec(64, kv_quant_mode=new.KVQuantMode.NVFP4_DS_MLA, state_content_bytes=352),
        rows(MLA, head_size=352, dtype="uint8", backend="LBNHC"),
    ),
    (
        new.FullAttentionSpec(16, kv_quant_mode=new.KVQuantMode.TURBOQUANT_4BIT_NC, state_content_bytes=136),
        plain(MLA, head_size=136, dtype="uint8", backend="LBNHC"),
    ),
    (new.MLAAttentionSpec(64, block_stride_alignment=1152), rows(MLA, backend="LBNHC")),
    (
        new.MLAAttentionSpec(64, block_stride_alignment=new.MultipleOf(64)),
        rows(MLA, backend="LBNHC", kernel_block_sizes=[64]),
    ),
    (
        new.MLAAttentionSpec(16, block_stride_alignment=new.MultipleOf(64)),
        rows(MLA, block_size=16, backend="LBNHC", kernel_block_sizes=[16, 32, 64]),
    ),
    (
        new.MLAAttentionSpec(256, tokens_per_state=4, block_stride_alignment=new.MultipleOf(256)),
        rows(MLA, block_size=256, compress_ratio=4, backend="LBNHC", kernel_block_sizes=[64]),
    ),
    (
        new.MLAAttentionSpec(64, block_stride_alignment=new.MultipleOf(32)),
        rows(MLA, backend="LBNHC", kernel_block_sizes=[32]),
    ),
]


@pytest.mark.parametrize(("spec", "expected"), KINDS, ids=range(len(KINDS)))
def test_a_spec_is_read_by_the_name_of_its_class(spec: Any, expected: Fields) -> None:
    assert one(spec) == expected


@pytest.mark.parametrize("spec", [row[0] for row in KINDS if "spec" not in row[1]], ids=range(len(KINDS)))
def test_every_layer_is_planned_with_the_page_that_vllm_has(spec: Any) -> None:
    layers = layers_from_specs({"layer": spec})
    plan = kvpage.plan({"layers": layers, "strategy": "unify", "num_blocks": 3, "max_num_encoder_input_tokens": 64})
    plan.check()
    if layers[0]["kind"] != "encoder_only_attention":
        assert plan.layers["layer"].page_size_bytes == spec.page_size_bytes


def test_rows_of_deepseek_v4_are_aligned_as_vllm_aligns_them() -> None:
    """64 × 584 = 37,376 bytes become 37,440: that follows from the alignment and is no padding of its own."""
    kind: Fields = {"dtype": old.BYTES, "cache_dtype_str": "fp8_ds_mla", "model_version": "deepseek_v4"}
    kind |= {"alignment": 576, "indexes_kv_by_block_stride": True}
    window = old.SlidingWindowMLASpec(64, sliding_window=128, **kind)
    latent = old.MLAAttentionSpec(256, head_size=512, compress_ratio=4, **kind)
    more = {"head_size": 512, "dtype": "uint8", "kv_quant": "fp8_ds_mla", "page_alignment_bytes": 576}
    more["backend"] = {"shape": [*BLOCKS, "row_size"], "stride_order": [0, 1, 2], "layered_stride_order": [1, 0, 2, 3]}
    assert one(window) == rows("sliding_window_mla", sliding_window=128, **more)
    assert one(latent) == rows(MLA, block_size=256, compress_ratio=4, **more)
    assert window.page_size_bytes == latent.page_size_bytes == 37_440
    padded = old.MLAAttentionSpec(256, head_size=512, compress_ratio=4, **kind, page_size_padded=42_048)
    object.__setattr__(padded, "page_size_padded", 42_048)
    assert one(padded)["page_size_padded"] == 42_048


@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC"])
def test_aligned_rows_of_later_versions_step_by_the_aligned_page(layout: str) -> None:
    """vLLM 0.33: 64 rows of 584 bytes, 37,440 apart. That is no whole number of rows."""
    rows_584: Fields = {"dtype": new.BYTES, "cache_dtype_str": "fp8_ds_mla", "state_content_bytes": 584}
    spec = new.MLAAttentionSpec(64, head_size=512, alignment=576, page_size_padded=37_440, **rows_584)
    plan = kvpage.plan(
        {"layers": layers_from_specs({"a": spec}, kv_cache_layout=layout), "strategy": "unify", "num_blocks": 3}
    )
    (tensor,) = plan.layers["a"].tensors
    assert (tensor.shape, tensor.strides_bytes[0]) == ((3, 1, 64, 584), 37_440)


def test_states_that_a_request_keeps_beside_its_last_are_counted() -> None:
    """vLLM, mamba_cache_mode align: 2 + speculative blocks a request."""
    aligned = one(old.MambaSpec(16, mamba_cache_mode="align", num_speculative_blocks=3))
    assert aligned["num_speculative_blocks"] == 4
    assert "mamba_cache_mode" in refused(old.MambaSpec(16, mamba_cache_mode="all")).errors[0].pointer


def test_layers_of_one_type_are_taken_out_of_their_wrapper_in_order() -> None:
    inner = {"a": old.FullAttentionSpec(16), "b": old.FullAttentionSpec(16, num_kv_heads=4)}
    specs = {"group": old.UniformTypeKVCacheSpecs(16, kv_cache_specs=inner), "c": old.FullAttentionSpec(16)}
    assert [layer["name"] for layer in layers_from_specs(specs)] == ["a", "b", "c"]
    with pytest.raises(SpecInvalid, match="twice"):
        layers_from_specs({"c": old.FullAttentionSpec(16), "group": specs["group"], "a": old.FullAttentionSpec(16)})


def test_a_hybrid_model_becomes_one_plan() -> None:
    specs: Fields = {f"attention.{index}": old.FullAttentionSpec(16) for index in range(2)}
    specs |= {f"window.{index}": old.SlidingWindowSpec(16, sliding_window=64) for index in range(4)}
    plan = kvpage.plan({"layers": layers_from_specs(specs), "strategy": "unify", "num_blocks": 8})
    plan.check()
    assert [len(group.layers) for group in plan.groups] == [2, 2, 2]


def test_neither_vllm_nor_torch_is_imported() -> None:
    code = "import sys; import kvpage.integrations.vllm; print({'vllm', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "set()\n"


# What must not be guessed


class Unheard:
    block_size = 16
    page_size_bytes = 4096


@dataclass(frozen=True, kw_only=True)
class OtherFields(old.FullAttentionSpec):
    group_scale: int = 1
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class OtherPage(old.FullAttentionSpec):
    @property
    def page_size_bytes(self) -> int:
        return 65_536 + 512


@dataclass(frozen=True, kw_only=True)
class OtherData(old.FullAttentionSpec):
    page_size_padded: int | None = 69_632

    @property
    def real_page_size_bytes(self) -> int:
        return 65_536 + 512


@dataclass(frozen=True, kw_only=True)
class OtherHoldings(old.FullAttentionSpec):
    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        raise NotImplementedError


class NoPage(old.AttentionSpec):
    page_size_bytes = None  # type: ignore[assignment]


NO_PAGE = type("FullAttentionSpec", (NoPage,), {})

WRONG: Any = old.FullAttentionSpec  # to be given values of other types
UNKNOWN: list[tuple[Any, str, type[SpecInvalid]]] = [
    (Unheard(), "Unheard", NotSupported),
    (object(), "object", NotSupported),
    (None, "NoneType", NotSupported),
    (old.AttentionSpec(16), "AttentionSpec", NotSupported),
    (OtherFields(16, group_scale=32), "group_scale", NotSupported),
    (OtherFields(16, tags=("a",)), "tags", NotSupported),
    (OtherPage(16), "65536 bytes here, but OtherPage has 66048", SpecInvalid),
    (OtherData(16), "65536 bytes here, but OtherData has 66048", SpecInvalid),
    (OtherHoldings(16), "max_memory_usage_bytes", NotSupported),
    (NO_PAGE(16), "page_size_bytes", SpecInvalid),
    (WRONG(16, dtype="float4"), "float4", NotSupported),
    (WRONG(16, kv_quant_mode=4), "kv_quant_mode", SpecInvalid),
    (WRONG(16, head_size="128"), "head_size", SpecInvalid),
    (old.FullAttentionSpec(16, num_kv_heads=0), "num_kv_heads", SpecInvalid),
    (old.MLAAttentionSpec(64, **PER_TOKEN), "INT8_PER_TOKEN_HEAD", NotSupported),  # vLLM keeps two scales, K's and V's
    (old.MLAAttentionSpec(64, sliding_window=128), "sliding_window", NotSupported),
    (new.RSWASpec(16, rswa_window=128), "RSWASpec", NotSupported),
    (new.CircularBufferSpec(16), "CircularBufferSpec", NotSupported),
    (new.FullAttentionSpec(16, kv_quant_mode=new.KVQuantMode.INT4_PER_TOKEN_HEAD), "INT4_PER_TOKEN_HEAD", NotSupported),
    (new.FullAttentionSpec(16, tokens_per_state=Fraction(1, 2)), "tokens_per_state", NotSupported),
    (new.FullAttentionSpec(16, tokens_per_state=2), "tokens_per_state", NotSupported),
    (new.MLAAttentionSpec(64, tokens_per_state=Fraction(1, 2)), "tokens_per_state", NotSupported),
    (new.MLAAttentionSpec(64, block_stride_alignment=512), "block_stride_alignment", NotSupported),
    (
        new.SlidingWindowSpec(
            16, sliding_window=8, kv_quant_mode=new.KVQuantMode.TURBOQUANT_4BIT_NC, state_content_bytes=136
        ),
        "packed",
        NotSupported,
    ),
    (
        new.FullAttentionSpec(
            16, sliding_window=8, kv_quant_mode=new.KVQuantMode.TURBOQUANT_4BIT_NC, state_content_bytes=136
        ),
        "packed",
        NotSupported,
    ),
]


@pytest.mark.parametrize(("spec", "named", "kind"), UNKNOWN, ids=range(len(UNKNOWN)))
def test_what_is_not_known_is_refused_and_named(spec: Any, named: str, kind: type[SpecInvalid]) -> None:
    error = refused(spec)
    assert type(error) is kind
    assert named in error.message + error.errors[0].pointer


def test_unknown_fields_at_their_default_say_nothing() -> None:
    assert one(OtherFields(16)) == plain(FULL)


@pytest.mark.parametrize("specs", [None, [old.FullAttentionSpec(16)], {1: old.FullAttentionSpec(16)}])
def test_specs_are_a_mapping_of_names(specs: Any) -> None:
    with pytest.raises(SpecInvalid, match="specs"):
        layers_from_specs(specs)
