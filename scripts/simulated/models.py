"""Layers of the models in docs/planning.md: sizes of public configs, on one rank. Draft models are assumed shapes."""

from __future__ import annotations

from typing import Any

Layers = list[dict[str, Any]]
LAYOUT = "BLNHC"  # pages in one piece, read through the stride of the block axis


def _full(count: int, heads: int, size: int, **more: Any) -> dict[str, Any]:
    layer = {"name": "full.{i}", "kind": "full_attention", "count": count, "num_kv_heads": heads, "head_size": size}
    return layer | {"dtype": "bfloat16", "backend": LAYOUT} | more


def _window(count: int, heads: int, size: int, window: int, **more: Any) -> dict[str, Any]:
    return _full(count, heads, size, name="window.{i}", kind="sliding_window", sliding_window=window) | more


def _state(count: int, shapes: list[list[int]], *dtypes: str) -> dict[str, Any]:
    return {"name": "state.{i}", "kind": "mamba", "count": count, "shapes": shapes, "dtypes": list(dtypes)}


BF16, FP32 = "bfloat16", "float32"
NVFP4 = {"dtype": "uint8", "kv_quant": "nvfp4"}
INT8 = {"dtype": "int8", "kv_quant": "int8_per_token_head"}
DELTA = [[3, 8192], [32, 128, 128]]  # gated delta net, 16 key and 32 value heads
WIDE_K = {"head_size_v": 128}


def _draft(layer: dict[str, Any], name: str) -> dict[str, Any]:
    return layer | {"name": name, "draft": True}


MODELS: dict[str, Layers] = {
    "gemma-3-27b": [_full(10, 16, 128), _window(52, 16, 128, 1024)],
    "gemma-4-26b int8": [_full(5, 2, 512, **INT8), _window(25, 8, 256, 1024, **INT8)],
    "gpt-oss-120b nvfp4": [_full(18, 8, 64, **NVFP4), _window(18, 8, 64, 128)],
    "qwen3-next-80b": [_full(12, 2, 256), _state(36, DELTA, BF16, FP32)],
    "qwen3.5-35b": [_full(10, 2, 256), _state(30, DELTA, BF16, FP32)],
    "qwen3.6-35b + draft": [
        _full(10, 2, 256),
        _state(30, DELTA, BF16, BF16),
        _draft(_window(5, 8, 128, 4096), "draft.window.{i}"),
        _draft(_full(1, 8, 128), "draft.full.{i}"),
    ],
    "qwen3.8-27b nvfp4 + draft": [
        _full(16, 4, 256, **NVFP4),
        _state(48, [[3, 10_240], [48, 128, 128]], BF16, BF16),
        _draft(_window(5, 4, 256, 4096), "draft.{i}"),
    ],
    "mimo-v2-flash": [_full(9, 4, 192, **WIDE_K), _window(39, 8, 192, 128, **WIDE_K)],
    "mimo-v2-flash + draft": [
        _full(9, 4, 192, **WIDE_K),
        _window(39, 8, 192, 128, **WIDE_K),
        _draft(_window(5, 8, 128, 1024), "draft.{i}"),
    ],
    "mimo 3:2": [_full(10, 8, 192), _draft(_window(5, 8, 128, 1024), "draft.{i}")],
    "jamba-1.5-mini": [_full(4, 8, 128), _state(28, [[3, 8192], [8192, 16]], BF16, BF16)],
    "nemotron-h-8b": [_full(4, 8, 128), _state(24, [[3, 10_240], [128, 64, 128]], BF16, FP32)],
}


def request(model: str, memory_bytes: int) -> dict[str, Any]:
    """A plan request without a strategy. States are aligned to blocks where a strategy needs one page size."""
    layers = MODELS[model]
    has_states = any(layer["kind"] == "mamba" for layer in layers)
    return {"layers": layers, "memory_bytes": memory_bytes, "align_hybrid": has_states}
