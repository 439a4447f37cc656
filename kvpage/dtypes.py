"""Data types of cache elements: names and item sizes, without torch.

Names are torch's (`torch.bfloat16` is "bfloat16"), which are also what engines print and what vLLM's configs hold.
"""

from __future__ import annotations

from kvpage.errors import SpecInvalid, nearest, shorten

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

# What people call them elsewhere. Never accepted: a plan would then not say what it was asked.
_MEANT = {
    "bf16": "bfloat16", "fp16": "float16", "f16": "float16", "half": "float16", "fp32": "float32", "f32": "float32",
    "float": "float32", "double": "float64", "fp64": "float64", "fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2", "byte": "uint8", "char": "int8", "int": "int32", "long": "int64",
}  # fmt: skip


def item_size_bytes(dtype: str) -> int:
    """Bytes of one element of `dtype`. Raises `SpecInvalid` for a name that is not in the table."""
    try:
        return ITEM_SIZE_BYTES[dtype]
    except KeyError:
        known = ", ".join(ITEM_SIZE_BYTES)
        meant = (
            f"; did you mean {_MEANT[dtype.lower()]!r}?" if dtype.lower() in _MEANT else nearest(dtype, ITEM_SIZE_BYTES)
        )
        raise SpecInvalid(f"dtype {shorten(dtype)!r} is not known; use one of {known}{meant}") from None
