"""Cross attention keeps the encoder's output, whatever the length of the request."""

from __future__ import annotations

from typing import Any

import pytest

import kvpage
from kvpage.errors import NotEnoughMemory, SpecInvalid
from planner import build, comparison

Json = dict[str, Any]


def cross(name: str = "cross", **more: Any) -> Json:
    return build.full(name, **more) | {"kind": "cross_attention"}


# tokens of a block, encoder tokens, heads, size, dtype -> page, blocks
DEMAND = [
    (16, 1500, 6, 64, "bfloat16", 24_576, 94),
    (16, 1500, 12, 64, "bfloat16", 49_152, 94),
    (16, 1500, 20, 64, "bfloat16", 81_920, 94),
    (16, 1500, 20, 64, "float16", 81_920, 94),
    (16, 1500, 20, 64, "float32", 163_840, 94),
    (16, 1500, 20, 64, "float8_e4m3fn", 40_960, 94),
    (32, 1500, 20, 64, "bfloat16", 163_840, 47),
    (64, 1500, 20, 64, "bfloat16", 327_680, 24),
    (128, 1500, 20, 64, "bfloat16", 655_360, 12),
    (16, 1, 20, 64, "bfloat16", 81_920, 1),
    (16, 16, 20, 64, "bfloat16", 81_920, 1),
    (16, 17, 20, 64, "bfloat16", 81_920, 2),
    (16, 448, 8, 128, "bfloat16", 65_536, 28),
    (16, 1504, 8, 128, "bfloat16", 65_536, 94),
    (16, 6404, 8, 128, "bfloat16", 65_536, 401),
    (16, 4100, 8, 128, "bfloat16", 65_536, 257),
    (16, 30000, 1, 80, "bfloat16", 5120, 1875),
    (1, 1500, 2, 64, "bfloat16", 512, 1500),
    (1500, 1500, 2, 64, "bfloat16", 768_000, 1),
    (2048, 1500, 2, 64, "bfloat16", 1_048_576, 1),
    (48, 1500, 3, 96, "float32", 110_592, 32),
    (16, 1048576, 8, 128, "bfloat16", 65_536, 65536),
]


@pytest.mark.parametrize("length", [1, 448, 131_072])
@pytest.mark.parametrize(("tokens", "encoder", "heads", "size", "dtype", "page", "blocks"), DEMAND)
def test_the_encoder_decides_how_many_blocks(
    tokens: int, encoder: int, heads: int, size: int, dtype: str, page: int, blocks: int, length: int
) -> None:
    layer = cross("cross.{i}", count=2, heads=heads, size=size, dtype=dtype, block_size=tokens)
    request = build.request(layer, num_blocks=blocks, max_model_len=length, max_num_encoder_input_tokens=encoder)
    plan = kvpage.plan(request)
    assert plan.layers["cross.1"].page_size_bytes == page
    assert plan.capacity.blocks_per_request == (blocks,)
    assert plan.capacity.request_bytes == 2 * page * blocks
    if blocks > 1:
        with pytest.raises(NotEnoughMemory):
            kvpage.plan(request | {"num_blocks": blocks - 1})
    comparison.compare(request)


def test_whisper() -> None:
    """Large v3: 32 layers that attend to the text so far, 32 to the 1,500 places of 30 s of sound; 20 heads of 64."""
    text = build.full("self.{i}", count=32, heads=20, size=64, backend="flash_attn")
    sound = cross("cross.{i}", count=32, heads=20, size=64, backend="flash_attn")
    request = build.request(
        text, sound, build.encoder(), max_model_len=448, max_num_encoder_input_tokens=1500, memory_bytes=10 << 30
    )
    plan = kvpage.plan(request)
    assert [(group.kind, len(group.layers)) for group in plan.groups] == [
        ("full_attention", 32),
        ("cross_attention", 32),
    ]
    assert plan.bytes_per_block == 32 * 81_920
    assert plan.capacity.blocks_per_request == (28, 94)
    assert plan.num_blocks == (10 << 30) // (32 * 81_920) == 4096
    comparison.compare(request)


def test_pages_of_cross_attention_are_scaled_and_padded_like_others() -> None:
    text, sound = build.full(heads=8, size=128), cross(heads=8, size=64)
    plan = kvpage.plan(build.request(text, sound, max_num_encoder_input_tokens=1500))
    assert (plan.layers["cross"].decision, plan.layers["cross"].block_size) == ("scale", 32)
    assert plan.capacity.blocks_per_request == (512, 47)
    padded = kvpage.plan(build.request(text, cross(heads=8, size=96), max_num_encoder_input_tokens=1500))
    assert (padded.layers["cross"].decision, padded.layers["cross"].block_size) == ("pad", 16)
    assert padded.capacity.blocks_per_request == (512, 94)


def test_cross_attention_of_unlike_layers_is_one_group() -> None:
    request = build.request(cross("a"), cross("b", size=80), max_num_encoder_input_tokens=1500)
    plan = kvpage.plan(request)
    assert [group.layers for group in plan.groups] == [("a", "b")]
    assert plan.bytes_per_block == 65_536 + 40_960
    assert plan.capacity.longest_request_tokens is None
    comparison.compare(request)


def test_the_encoder_length_is_needed_with_cross_attention_only() -> None:
    kvpage.plan(build.request(build.full()))
    kvpage.plan(build.request(build.full(), max_num_encoder_input_tokens=1500))
    with pytest.raises(SpecInvalid) as caught:
        kvpage.plan(build.request(cross()))
    assert "max_num_encoder_input_tokens" in caught.value.message
