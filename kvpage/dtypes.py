"""Data types of cache elements: names and item sizes, without torch.

Names are torch's (`torch.bfloat16` is "bfloat16"), which are also what engines print and what vLLM's configs hold.
"""

from __future__ import annotations

from kvpage.errors import SpecInvalid, shorten

ITEM_SIZE_BYTES: dict[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "float32": 4,
    "int64": 8,
    "float64": 8,
}


def item_size_bytes(dtype: str) -> int:
    """Bytes of one element of `dtype`. Raises `SpecInvalid` for a name that is not in the table."""
    try:
        return ITEM_SIZE_BYTES[dtype]
    except KeyError:
        known = ", ".join(ITEM_SIZE_BYTES)
        raise SpecInvalid(f"dtype {shorten(dtype)!r} is not known; use one of {known}") from None
