"""Plan requests for tests that are not about planning."""

from __future__ import annotations

from typing import Any

MEMORY_BYTES = 4 << 20


def small_request(**changes: Any) -> dict[str, Any]:
    """A target with a narrower draft: pages of 3:2, of which the smaller one is padded. 15 layers in 4 MiB."""
    request: dict[str, Any] = {
        "layers": [
            {
                "name": "target.{i}", "count": 10, "kind": "full_attention", "block_size": 16, "num_kv_heads": 1,
                "head_size": 192, "dtype": "bfloat16", "backend": "flash_attn",
            },
            {
                "name": "draft.{i}", "count": 5, "kind": "sliding_window", "sliding_window": 1024, "block_size": 16,
                "num_kv_heads": 1, "head_size": 128, "dtype": "bfloat16", "backend": "flash_attn", "draft": True,
            },
        ],
        "strategy": "unify",
        "memory_bytes": MEMORY_BYTES,
        "max_model_len": 256,
    }  # fmt: skip
    return {**request, **changes}


def wide_request(num_layers: int = 300) -> dict[str, Any]:
    """A plan whose JSON is large enough to be worth compressing."""
    layer = {"kind": "full_attention", "num_kv_heads": 1, "head_size": 64, "dtype": "bfloat16", "backend": "flash_attn"}
    layers = [{"name": "layers.{i}.self_attn.attn", "count": num_layers, "block_size": 16, **layer}]
    return {"layers": layers, "strategy": "unify", "num_blocks": 2}
