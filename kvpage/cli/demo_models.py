"""The two models of `kvpage demo`, as plan requests."""

from __future__ import annotations

from typing import Any


def target_and_draft(memory_bytes: int) -> dict[str, Any]:
    """MiMo with a narrower draft: pages of 98,304 and 65,536 bytes, 3:2, which scaling alone cannot unify.

    Head widths and the page ratio: the motive of vLLM PR 45181; layer counts are illustrative.
    """
    return {
        "strategy": "unify",
        "memory_bytes": memory_bytes,
        "max_model_len": 8192,
        "max_num_batched_tokens": 2048,
        "layers": [
            {
                "name": "target.{i}",
                "count": 10,
                "kind": "full_attention",
                "num_kv_heads": 8,
                "head_size": 192,
                "dtype": "bfloat16",
                "backend": "flash_attn",
            },
            {
                "name": "draft.{i}",
                "count": 5,
                "kind": "sliding_window",
                "sliding_window": 1024,
                "num_kv_heads": 8,
                "head_size": 128,
                "dtype": "bfloat16",
                "backend": "flash_attn",
                "draft": True,
            },
        ],
    }


def hybrid(memory_bytes: int) -> dict[str, Any]:
    """Qwen3-Next 80B (public config): 12 full attention layers and 36 recurrent states of two tensors each."""
    return {
        "strategy": "unify",
        "align_hybrid": True,
        "memory_bytes": memory_bytes,
        "max_model_len": 8192,
        "max_num_batched_tokens": 2048,
        "layers": [
            {
                "name": "attention.{i}",
                "count": 12,
                "kind": "full_attention",
                "num_kv_heads": 2,
                "head_size": 256,
                "dtype": "bfloat16",
                "backend": "flash_attn",
            },
            {
                "name": "state.{i}",
                "count": 36,
                "kind": "mamba",
                "shapes": [[3, 8192], [32, 128, 128]],
                "dtypes": ["bfloat16", "float32"],
            },
        ],
    }
