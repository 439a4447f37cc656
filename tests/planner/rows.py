"""Bytes of items and rows, for the oracles."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]

ITEM_SIZE_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}
LATENT_KINDS = ("mla_attention", "sliding_window_mla")


def row_bytes(layer: Json, elements: int) -> int:
    """Bytes one head stores of one token's K, V or latent row of `elements` elements, scales included."""
    quant = layer.get("kv_quant")
    if quant == "fp8_ds_mla":
        return 448 + 64 * 2 + 8 if elements == 512 else 512 + 4 * 4 + 64 * 2
    if quant == "int4":
        return elements // 2
    if quant == "nvfp4":
        return elements // 2 + elements // 16
    if quant == "mxfp4":
        return elements // 2 + elements // 32
    if quant in ("int8_per_token_head", "fp8_per_token_head"):
        return elements + 4
    return elements * ITEM_SIZE_BYTES[layer["dtype"]]


def stored_rows(layer: Json) -> int:
    """Rows a block keeps: one for each token, or for several where rows are compressed."""
    return int(layer["block_size"] // layer.get("compress_ratio", 1))


def is_latent(layer: Json) -> bool:
    return layer["kind"] in LATENT_KINDS
