"""Hybrid alignment: one attention block whose page just holds the largest state, and states padded to that page."""

from __future__ import annotations

from typing import Any

import pytest

import kvpage
from kvpage.errors import CannotUnify, LayoutUnsupported, SpecInvalid
from planner import build, comparison

Json = dict[str, Any]

# Attention layers by their bytes per token.
BF16_8192 = {"heads": 8, "size": 256, "backend": "flash_attn"}
BF16_4096 = {"heads": 4, "size": 256, "backend": "flash_attn"}
BF16_2048 = {"heads": 2, "size": 256, "backend": "flash_attn"}
BF16_1024 = {"heads": 1, "size": 256, "backend": "flash_attn"}
BF16_512 = {"heads": 1, "size": 128, "backend": "flash_attn"}
FP8 = {"dtype": "float8_e4m3fn", "backend": "flash_attn"}
FP8_2048, FP8_1024, FP8_512 = ({"heads": heads, "size": 256} | FP8 for heads in (4, 2, 1))
FP8_256 = {"heads": 1, "size": 128} | FP8
INT8_2080 = {"heads": 4, "size": 256, "dtype": "int8", "kv_quant": "int8_per_token_head", "backend": "triton_attn"}
NVFP4_1152 = {"heads": 4, "size": 256, "dtype": "uint8", "kv_quant": "nvfp4", "backend": "flashinfer"}


def kernel(tokens: int) -> Json:
    return {"kernel_block_sizes": [{"multiple_of": tokens}]}


def delta(heads: int, width: int, speculative: int, dtype: str, tp: int = 1) -> Json:
    """State of a gated delta rule on one of `tp` ranks: a convolution of `width` channels, matrices of 128 x 128."""
    return {"shapes": [[3 + speculative, width // tp], [heads // tp, 128, 128]], "dtypes": ["bfloat16", dtype]}


def bytes_of(size: int) -> Json:
    return {"shapes": [[size]], "dtypes": ["int8"]}


FLOAT32 = {"dtypes": ["bfloat16", "float32"]}  # of a convolution and the recurrent state
NEMOTRON = {"shapes": [[3, 12_288], [128, 80, 128]], "dtypes": ["bfloat16", "bfloat16"]}
NEMOTRON_8B = {"shapes": [[3, 10_240], [128, 64, 128]], "dtypes": ["bfloat16", "bfloat16"]}
JAMBA = {"shapes": [[3, 8192], [8192, 16]], "dtypes": ["bfloat16", "bfloat16"]}

# attention, state, bytes of the state, aligned block size, page
TABLE: list[tuple[str, Json, Json, int, int, int]] = [
    ("qwen3.6-35b", BF16_2048, delta(32, 8192, 0, "float32"), 2_146_304, 1056, 2_162_688),
    ("qwen3.8-27b tp2", FP8_1024, delta(48, 10_240, 0, "float32", 2), 1_603_584, 1568, 1_605_632),
    # one family of models: TP, bytes of a state item, speculative tokens, bytes per token
    ("tp1 bf16 spec15 4096", BF16_4096, delta(48, 10_240, 15, "bfloat16"), 1_941_504, 480, 1_966_080),
    ("tp1 bf16 spec7 2080", INT8_2080, delta(48, 10_240, 7, "bfloat16"), 1_777_664, 864, 1_797_120),
    ("tp1 bf16 spec7 4096", BF16_4096, delta(48, 10_240, 7, "bfloat16"), 1_777_664, 448, 1_835_008),
    ("tp1 bf16 spec3 2048", FP8_2048, delta(48, 10_240, 3, "bfloat16"), 1_695_744, 832, 1_703_936),
    ("tp1 bf16 spec7 1152", NVFP4_1152, delta(48, 10_240, 7, "bfloat16"), 1_777_664, 1552, 1_787_904),
    ("tp2 f32 spec8 1024", FP8_1024, delta(48, 10_240, 8, "float32", 2), 1_685_504, 1648, 1_687_552),
    ("tp4 f32 spec3 512", FP8_512, delta(48, 10_240, 3, "float32", 4), 817_152, 1600, 819_200),
    ("tp1 f32 spec0 4096", BF16_4096, delta(48, 10_240, 0, "float32"), 3_207_168, 784, 3_211_264),
    # kernels that want multiples
    ("kernel 16", BF16_1024 | kernel(16), bytes_of(533_504), 533_504, 528, 540_672),
    ("kernel 32", BF16_1024 | kernel(32), bytes_of(533_504), 533_504, 544, 557_056),
    ("kernel 16, narrower", BF16_512 | kernel(16), bytes_of(533_504), 533_504, 1056, 540_672),
    ("kernel 64, narrower", BF16_512 | kernel(64), bytes_of(533_504), 533_504, 1088, 557_056),
    ("kernel 32 tp1", FP8_512 | kernel(32), bytes_of(2_134_016), 2_134_016, 4192, 2_146_304),
    ("kernel 32 tp2", FP8_256 | kernel(32), bytes_of(1_067_008), 1_067_008, 4192, 1_073_152),
    ("kernel 32 tp4", FP8_256 | kernel(32), bytes_of(533_504), 533_504, 2112, 540_672),
    ("nemotron bf16", BF16_4096, NEMOTRON, 2_695_168, 672, 2_752_512),
    ("nemotron f32", BF16_4096, NEMOTRON | FLOAT32, 5_316_608, 1312, 5_373_952),
    ("jamba", {}, JAMBA, 311_296, 80, 327_680),
    ("nemotron-h-8b", {}, NEMOTRON_8B | FLOAT32, 4_255_744, 1040, 4_259_840),
    ("exact", BF16_1024, delta(32, 8192, 0, "bfloat16"), 1_097_728, 1072, 1_097_728),
    # configured blocks
    ("block 32", BF16_2048 | {"block_size": 32}, delta(32, 8192, 0, "float32"), 2_146_304, 1056, 2_162_688),
    ("block 64", BF16_2048 | {"block_size": 64}, delta(32, 8192, 0, "float32"), 2_146_304, 1088, 2_228_224),
    ("block 2048", BF16_2048 | {"block_size": 2048}, delta(32, 8192, 0, "float32"), 2_146_304, 2048, 4_194_304),
    ("a small state", BF16_2048, bytes_of(1000), 1000, 16, 32_768),
    ("just above a step", BF16_2048, bytes_of(32_769), 32_769, 32, 65_536),
]  # fmt: skip


@pytest.mark.parametrize(
    ("attention", "state", "size", "block_size", "page"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE]
)
def test_attention_and_states_fit_each_other(
    attention: Json, state: Json, size: int, block_size: int, page: int
) -> None:
    layers = [build.full("full.{i}", count=4, **attention), build.state("state.{i}", count=12, **state)]
    request = build.request(*layers, align_hybrid=True, kv_cache_layout="HND", memory_bytes=40 << 30)
    plan = kvpage.plan(request)
    got = plan.layers["full.0"]
    assert (got.block_size, got.real_page_size_bytes, got.page_size_bytes) == (block_size, page, page)
    assert got.page_size_padded is None
    got = plan.layers["state.0"]
    assert (got.real_page_size_bytes, got.page_size_bytes) == (size, page)
    assert (got.page_size_padded or size) == page
    assert [len(group.layers) for group in plan.groups] == [4] * 4
    assert plan.bytes_per_block == 4 * page
    comparison.compare(request)


@pytest.mark.parametrize("block_size", [528, 16, 48, 1000])
def test_a_block_no_kernel_accepts_is_refused(block_size: int) -> None:
    """528 tokens are 16.5 blocks of a kernel of 32 tokens (vLLM issue 39810)."""
    layer = build.full(block_size=block_size, kernel_block_sizes=[{"multiple_of": 32}])
    with pytest.raises(LayoutUnsupported) as caught:
        kvpage.plan(build.request(layer))
    assert caught.value.errors[0].pointer.startswith("/layers/0")


def aligned(*layers: Json, **more: Any) -> Any:
    request = build.request(*layers, align_hybrid=True, memory_bytes=40 << 30, **more)
    comparison.compare(request)
    return kvpage.plan(request)


def test_1056_tokens_and_2619_blocks() -> None:
    """vLLM issue 40244: 10 full layers and 30 states in 56,661,356,052 bytes."""
    layers = [
        build.full("full.{i}", count=10, **BF16_2048),
        build.state("s.{i}", count=30, **delta(32, 8192, 0, "float32")),
    ]
    plan = kvpage.plan(build.request(*layers, align_hybrid=True, memory_bytes=56_661_356_052))
    assert (plan.bytes_per_block, plan.num_blocks) == (21_626_880, 2619)
    assert 56_661_356_052 - plan.buffer_size_bytes == 20_557_332
    assert [len(group.layers) for group in plan.groups] == [10] * 4


def test_1568_tokens_and_208_blocks() -> None:
    """A public boot log: 16 full layers and 48 states, two blocks a state; 84 + 3 x 2 = 90 for 131,072 tokens."""
    state = build.state("s.{i}", count=48, num_speculative_blocks=1, **delta(48, 10_240, 0, "float32", 2))
    layers = [build.full("full.{i}", count=16, **FP8_1024), state]
    for length, blocks in ((131_072, 84), (262_144, 168)):
        request = build.request(*layers, align_hybrid=True, memory_bytes=5_357_971_701, max_model_len=length)
        plan = kvpage.plan(request)
        assert (plan.bytes_per_block, plan.num_blocks) == (25_690_112, 208)
        assert list(plan.capacity.blocks_per_request or ()) == [blocks, 2, 2, 2]
        assert plan.capacity.max_concurrency == pytest.approx(208 / (blocks + 6))


def test_qwen3_next() -> None:
    layers = [
        build.full("full.{i}", count=12, **BF16_2048),
        build.state("s.{i}", count=36, **delta(32, 8192, 0, "float32")),
    ]
    plan = aligned(*layers)
    assert {layer.page_size_bytes for layer in plan.layers.values()} == {2_162_688}
    state = plan.layers["s.0"]
    assert state.page_size_bytes - state.real_page_size_bytes == 16_384
    conv, recurrent = state.tensors
    assert (conv.strides_bytes[0], conv.offset_bytes) == (2_162_688, 0)
    assert (recurrent.strides_bytes[0], recurrent.offset_bytes) == (2_162_688, 49_152)


def test_a_state_is_padded_and_the_target_scaled_when_the_draft_is_wider() -> None:
    """vLLM issue 43626: the draft does not take part in choosing the block, then its page is the largest by two."""
    layers = [
        build.full("main.{i}", count=2, **BF16_1024),
        build.state("s.{i}", count=2, **delta(32, 8192, 0, "bfloat16")),
        build.full("draft", draft=True, **BF16_2048),
    ]
    plan = aligned(*layers)
    main, state, draft = (plan.layers[name] for name in ("main.0", "s.0", "draft"))
    assert (main.decision, main.block_size, main.page_size_bytes) == ("scale", 2144, 2_195_456)
    assert (state.decision, state.block_size, state.page_size_bytes) == ("pad", 16, 2_195_456)
    assert (draft.decision, draft.block_size, draft.page_size_bytes) == ("scale", 1072, 2_195_456)


def test_a_draft_of_other_width_is_aligned_and_then_padded() -> None:
    """1,568 tokens of 1,536 bytes are 2,408,448 bytes: three halves of the target's page."""
    layers = [
        build.full("main", **FP8_1024),
        build.state("s", **delta(48, 10_240, 0, "float32", 2)),
        build.full("draft", heads=3, size=128, draft=True, backend="flash_attn"),
    ]
    request = build.request(*layers, align_hybrid=True, memory_bytes=40 << 30)
    comparison.compare(request)
    with pytest.raises(kvpage.KvpageError) as caught:
        kvpage.plan(request)
    assert (
        caught.value.details["layer"] == "s"
    )  # a state that does not divide the largest page is not padded by this rule


# main attention, other attention, tokens: the block is a multiple of what every kernel wants, the draft's too
KERNELS = [
    (kernel(16), kernel(16), 528),
    (kernel(16), kernel(32), 544),
    (kernel(16), kernel(64), 576),
    (kernel(16), kernel(128), 640),
    (kernel(16), kernel(36), 576),
    (kernel(16), kernel(100), 800),
    (kernel(16), kernel(48), 528),
    (kernel(16), kernel(24), 528),
    (kernel(16), kernel(80), 560),
    (kernel(32), kernel(48), 576),
    (kernel(64), kernel(16), 576),
    (kernel(64), kernel(96), 576),
    (kernel(16), {"kernel_block_sizes": [16, 32, 64]}, 528),
    (kernel(16), {"kernel_block_sizes": [64]}, 576),
    ({"kernel_block_sizes": [32, 64]}, kernel(16), 544),
]


@pytest.mark.parametrize(("main", "draft", "tokens"), KERNELS)
def test_every_kernel_can_cut_the_aligned_block(main: Json, draft: Json, tokens: int) -> None:
    layers = [
        build.full("main", **BF16_1024 | main),
        build.state("s", **bytes_of(533_504)),
        build.full("draft", draft=True, **BF16_1024 | draft),
    ]
    plan = aligned(*layers)
    assert plan.layers["main"].block_size == plan.layers["draft"].block_size == tokens
    assert plan.layers["s"].page_size_bytes == tokens * 1024


@pytest.mark.parametrize(("configured", "tokens"), [(16, 528), (512, 528), (528, 528), (544, 544), (1000, 1008)])
def test_a_larger_block_configured_for_the_draft_is_kept(configured: int, tokens: int) -> None:
    layers = [
        build.full("main", **BF16_1024),
        build.state("s", **bytes_of(533_504)),
        build.full("draft", draft=True, block_size=configured, **BF16_1024),
    ]
    plan = aligned(*layers)
    assert plan.layers["main"].block_size == plan.layers["draft"].block_size == tokens


@pytest.mark.parametrize("position", [0, 1])
def test_padding_by_the_user_and_alignment_exclude_each_other(position: int) -> None:
    layers = [build.full("full", **BF16_2048), build.state("s", **bytes_of(1000))]
    layers[position] |= {"page_size_padded": 1 << 20}
    with pytest.raises(SpecInvalid) as caught:
        kvpage.plan(build.request(*layers, align_hybrid=True))
    assert caught.value.errors[0].pointer == f"/layers/{position}/page_size_padded"


@pytest.mark.parametrize(
    ("size", "dtype", "state", "tokens"),
    [
        (576, "bfloat16", 2_146_304, 1920),
        (656, "uint8", 1_097_728, 1792),
        (512, "float16", 131_072, 128),
        (512, "float16", 131_073, 256),
        (576, "bfloat16", 1, 128),
    ],
)
def test_mla_blocks_are_aligned_in_steps_of_128_tokens(size: int, dtype: str, state: int, tokens: int) -> None:
    plan = aligned(build.mla(size=size, dtype=dtype, backend="triton_mla"), build.state("s", **bytes_of(state)))
    assert plan.layers["mla"].block_size == tokens
    assert plan.layers["s"].page_size_bytes == plan.layers["mla"].page_size_bytes


def test_every_state_is_padded_to_the_page_that_holds_the_largest() -> None:
    states = [build.state("small", **bytes_of(4096)), build.state("large", **delta(32, 8192, 0, "float32"))]
    plan = aligned(build.full("full", **BF16_2048), *states)
    assert {layer.page_size_bytes for layer in plan.layers.values()} == {2_162_688}


def test_the_narrowest_layer_decides() -> None:
    """A page of the narrowest attention layer holds the state; the wider layer's page is then the largest."""
    plan = aligned(
        build.full("wide", **BF16_4096), build.full("narrow", **BF16_2048), build.state("s", **bytes_of(2_146_304))
    )
    assert plan.layers["wide"].block_size == 1056
    assert (plan.layers["narrow"].decision, plan.layers["narrow"].block_size) == ("scale", 2112)
    assert (plan.layers["s"].decision, plan.layers["s"].page_size_bytes) == ("pad", 4_325_376)


@pytest.mark.parametrize(
    "layers",
    [
        [build.full("a"), build.sliding("b")],
        [build.full("a", heads=16), build.full("b")],
        [build.full("a"), build.sliding("b", heads=4)],
        [build.full("a"), build.sliding("b", size=96)],
        [build.sliding("a", heads=8), build.mla("b", size=320, page_alignment_bytes=65_536)],
        [build.full("a"), build.mla("b", size=132, dtype="uint8", page_alignment_bytes=4096)],
        [build.state("s", [[3, 64]], ["bfloat16"])],
        [build.state("s", [[3, 64]], ["bfloat16"]), build.state("t", [[5, 7]], ["bfloat16"])],
        [build.encoder(), build.mla()],
    ],
)
def test_without_both_kinds_there_is_nothing_to_align(layers: list[Json]) -> None:
    plain = kvpage.plan(build.request(*layers))
    assert kvpage.plan(build.request(*layers, align_hybrid=True)).layers == plain.layers
    assert kvpage.plan(build.request(*layers, align_hybrid=False)).plan_id == plain.plan_id


def test_compressed_rows_are_not_aligned() -> None:
    rows = build.mla("rows", size=132, dtype="uint8", block_size=256, compress_ratio=4)
    request = build.request(rows, build.state("state", [[4096]], ["bfloat16"]), align_hybrid=True)
    with pytest.raises(SpecInvalid) as caught:
        kvpage.plan(request)
    assert [fault.pointer for fault in caught.value.errors] == ["/layers/0/compress_ratio"]


# --- hybrids that are not aligned -------------------------------------------------------------------------------------

OFFER = "set align_hybrid to true"


def hybrid(state_width: int, **changes: Any) -> dict[str, Any]:
    """Attention pages of 1,024 bytes, and states of `state_width` float32."""
    attention = {"name": "a", "kind": "full_attention", "num_kv_heads": 1, "head_size": 16, "dtype": "bfloat16"}
    state = {"name": "s", "kind": "mamba", "shapes": [[state_width]], "dtypes": ["float32"]}
    return {"strategy": "unify", "num_blocks": 4, "layers": [attention | {"block_size": 16}, state], **changes}


def test_a_hybrid_that_cannot_be_unified_is_told_of_alignment() -> None:
    uneven = hybrid(300)
    uneven["layers"][0]["backend"] = "rocm_aiter_unified_attn"  # does not read pages by block stride
    with pytest.raises(CannotUnify, match=OFFER):
        kvpage.plan(uneven)
    del uneven["layers"][1]
    window = {"name": "b", "kind": "sliding_window", "sliding_window": 32, "head_size": 24}
    uneven["layers"].append({**uneven["layers"][0], **window})
    with pytest.raises(CannotUnify) as caught:
        kvpage.plan(uneven)
    assert OFFER not in str(caught.value)


def test_the_reason_of_a_state_says_that_it_was_not_aligned() -> None:
    plain, aligned = kvpage.plan(hybrid(512)), kvpage.plan(hybrid(512, align_hybrid=True))
    assert OFFER in plain.layers["s"].reason
    assert all(OFFER not in layer.reason for layer in (plain.layers["a"], *aligned.layers.values()))
    assert OFFER not in kvpage.plan(hybrid(256)).layers["s"].reason  # the pages were alike


def test_the_offer_is_prose_and_changes_no_id() -> None:
    plan = kvpage.plan(hybrid(512))
    assert kvpage.Plan.from_json(plan.to_json().replace(OFFER.encode(), b"do as you like")).plan_id == plan.plan_id
