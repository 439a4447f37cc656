"""A name that is nearly one is refused, never taken, and the right one is offered."""

from __future__ import annotations

import pytest

import kvpage
from kvpage.errors import SpecInvalid

LAYER = {"name": "a", "kind": "full_attention", "num_kv_heads": 1, "head_size": 16, "dtype": "float16"}


@pytest.mark.parametrize(
    ("field", "written", "meant"),
    [
        ("dtype", "bf16", "bfloat16"),
        ("dtype", "BFloat16", "bfloat16"),
        ("dtype", "half", "float16"),
        ("dtype", "fp8", "float8_e4m3fn"),
        ("dtype", "float_16", "float16"),
        ("backend", "FLASH_ATTN ", "flash_attn"),
        ("backend", "flash-infer", "flashinfer"),
        ("backend", "lbnhc", "LBNHC"),
        ("kind", "full", "full_attention"),
        ("kind", "sliding-window", "sliding_window"),
        ("kind", "Mamba", "mamba"),
    ],
)
def test_the_right_name_is_offered(field: str, written: str, meant: str) -> None:
    with pytest.raises(SpecInvalid) as caught:
        kvpage.plan({"strategy": "unify", "num_blocks": 2, "layers": [{**LAYER, field: written}]})
    assert caught.value.errors[0].pointer == f"/layers/0/{field}"
    assert caught.value.errors[0].detail.endswith(f"; did you mean {meant!r}?")


@pytest.mark.parametrize("field", ["dtype", "backend", "kind"])
@pytest.mark.parametrize("written", ["zzzzzz", "", "x" * 100_000, "\u00e9"])
def test_nothing_is_offered_for_what_is_like_nothing(field: str, written: str) -> None:
    with pytest.raises(SpecInvalid) as caught:
        kvpage.plan({"strategy": "unify", "num_blocks": 2, "layers": [{**LAYER, field: written}]})
    assert "did you mean" not in caught.value.message
