"""Bytes of the row that a cache keeps for one token and head, by dtype and inline quantisation."""

from __future__ import annotations

from kvpage.dtypes import item_size_bytes

SCALE_BYTES = 4  # a float32 scale per token and head, inside the row (vLLM 0.24.0, kv_quant_utils)
DS_MLA_ROW_BYTES = {576: 656, 512: 584}
"""Bytes of an fp8_ds_mla row by head size: DeepSeek V3.2, and V4 (448 NoPE + 128 RoPE + 8 scales); vLLM 0.24.0."""
VALUES_PER_SCALE = {"int4": 0, "nvfp4": 16, "mxfp4": 32}
"""4-bit formats; 0: the scales are kept elsewhere."""


def row_bytes(head_size: int, dtype: str, kv_quant: str | None) -> int:
    """Bytes of one head's row of one token, scales included; `head_size` must be a multiple of what shares a scale.

    4-bit values are packed two a byte: int4 without scales, nvfp4 with one scale byte for 16 values, mxfp4 for 32.
    int8 and fp8 per token and head keep a float32 scale at the end of the row.
    """
    if kv_quant == "fp8_ds_mla":
        return DS_MLA_ROW_BYTES[head_size]
    if kv_quant in VALUES_PER_SCALE:
        values = VALUES_PER_SCALE[kv_quant]
        return head_size // 2 + (head_size // values if values else 0)
    scale = SCALE_BYTES if kv_quant else 0
    return head_size * item_size_bytes(dtype) + scale
