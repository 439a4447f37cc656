"""Short ways to write plan requests in tests. Values are not typed: many tests pass wrong ones, or unpack them."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]

KV_SHAPE = ["num_blocks", 2, "block_size", "num_kv_heads", "head_size"]
ROW_SHAPE = ["num_blocks", "block_size", "num_kv_heads", "head_size + head_size_v"]
MLA_SHAPE = ["num_blocks", "block_size", "head_size"]


def pads(shape: list[Any]) -> Json:
    """A backend that reads pages through the stride of the block axis, so a gap between pages is fine."""
    axes = list(range(len(shape)))
    return {"shape": shape, "stride_order": axes, "layered_stride_order": [1, 0, *range(2, len(shape) + 1)]}


def dense(shape: list[Any]) -> Json:
    """A backend that needs its pages back to back."""
    return {"shape": shape}


def full(name: Any = "full", heads: Any = 8, size: Any = 128, dtype: Any = "bfloat16", **more: Any) -> Json:
    layer: Json = {"name": name, "kind": "full_attention", "block_size": 16, "num_kv_heads": heads, "head_size": size}
    return layer | {"dtype": dtype, "backend": pads(ROW_SHAPE)} | more


def sliding(name: str = "sliding", window: Any = 1024, **more: Any) -> Json:
    return full(name, **more) | {"kind": "sliding_window", "sliding_window": window}


def chunked(name: str = "chunked", chunk: Any = 8192, **more: Any) -> Json:
    return full(name, **more) | {"kind": "chunked_local_attention", "attention_chunk_size": chunk}


def mla(name: str = "mla", size: Any = 576, dtype: Any = "bfloat16", **more: Any) -> Json:
    layer: Json = {"name": name, "kind": "mla_attention", "block_size": 16, "head_size": size, "dtype": dtype}
    return layer | {"backend": pads(MLA_SHAPE)} | more


def state(name: str, shapes: Any, dtypes: Any, **more: Any) -> Json:
    return {"name": name, "kind": "mamba", "block_size": 16, "shapes": shapes, "dtypes": dtypes} | more


def encoder(name: str = "encoder", **more: Any) -> Json:
    layer: Json = {"name": name, "kind": "encoder_only_attention", "num_kv_heads": 8, "head_size": 64}
    return layer | {"dtype": "bfloat16"} | more


def request(*layers: Json, **more: Any) -> Json:
    common: Json = {"strategy": "unify", "max_model_len": 8192, "max_num_batched_tokens": 2048}
    if "num_blocks" not in more:
        common["memory_bytes"] = 1 << 30
    return {"layers": list(layers)} | common | more
