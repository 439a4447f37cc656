"""Objects that cannot be right are refused in words; none becomes a traceback, or a layer with another page."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest

import kvpage
from integrations import vllm_0_24 as old
from integrations.test_vllm_specs import KINDS
from kvpage.errors import SpecInvalid
from kvpage.integrations.vllm import layers_from_specs

WRONG: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    1.5,
    float("nan"),
    10**400,
    2**64,
    "",
    "16",
    b"16",
    [],
    (1,),
    ((1, "2"),),
    {},
    {"a": 1},
    object(),
    lambda: 16,
    int,
)


@pytest.mark.parametrize("position", range(len(KINDS)))
def test_a_wrong_value_in_any_field_is_refused_or_makes_the_page_that_it_says(position: int) -> None:
    spec, _ = KINDS[position]
    for field in dataclasses.fields(spec):
        for wrong in WRONG:
            changed = copy.copy(spec)
            object.__setattr__(changed, field.name, wrong)
            check(changed)


def check(spec: Any) -> None:
    layers = taken({"layer": spec})
    if layers is None:
        return
    if layers[0]["kind"] == "encoder_only_attention":
        return
    request = {"layers": layers, "strategy": "unify", "num_blocks": 3, "max_num_encoder_input_tokens": 64}
    plan = kvpage.plan(request)
    plan.check()
    assert plan.layers["layer"].page_size_bytes == spec.page_size_bytes


def taken(specs: Any, **options: Any) -> list[dict[str, Any]] | None:
    """The layers, or None when they are refused as promised."""
    try:
        return layers_from_specs(specs, **options)
    except SpecInvalid as caught:
        error = caught
    assert error.errors, error.message
    assert len(error.message) < 2000
    return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asserting(old.FullAttentionSpec):
    """vLLM's property checks the padding by an assertion."""

    @property
    def page_size_bytes(self) -> int:
        raise AssertionError


@pytest.mark.parametrize(
    "specs",
    [
        {"layer": Asserting(16)},
        {"group": old.UniformTypeKVCacheSpecs(16, kv_cache_specs=[])},  # type: ignore[arg-type]
        {"group": old.UniformTypeKVCacheSpecs(16, kv_cache_specs=None)},  # type: ignore[arg-type]
        {"group": old.UniformTypeKVCacheSpecs(16, kv_cache_specs={"layer": 16})},  # type: ignore[dict-item]
        {"": old.FullAttentionSpec(16)},
        {"\ud800": old.FullAttentionSpec(16)},
        {"layer": old.FullAttentionSpec},
        {"layer{i}": old.FullAttentionSpec(16), "layer0": old.FullAttentionSpec(16)},
    ],
    ids=range(8),
)
def test_specs_that_cannot_be_are_refused(specs: Any) -> None:
    with pytest.raises(SpecInvalid) as caught:
        layers_from_specs(specs)
    assert len(caught.value.message) < 2000


ANSWERS: tuple[Any, ...] = (
    None,
    5,
    "NHD",
    [],
    [None] * 5,
    [2.5] * 5,
    (0, 0, 1, 2, 3),
    (9, 8, 7, 6, 5),
    {"a": 1},
    object(),
)
METHODS = (
    "get_name",
    "get_kv_cache_shape",
    "get_kv_cache_stride_order",
    "get_supported_kernel_block_sizes",
)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("answer", ANSWERS, ids=range(len(ANSWERS)))
def test_a_class_may_answer_anything(method: str, answer: Any) -> None:
    odd = type("Odd", (old.FlashAttention,), {method: staticmethod(lambda *_, **__: answer)})
    layers = taken({"layer": old.FullAttentionSpec(16)}, backends=odd)
    if layers is not None:
        kvpage.plan({"layers": layers, "strategy": "unify", "num_blocks": 3}).check()


OPTIONS = [value for value in WRONG if value not in (None, {})]


@pytest.mark.parametrize("wrong", OPTIONS, ids=range(len(OPTIONS)))
def test_options_may_be_anything(wrong: Any) -> None:
    for name in ("backends", "kernel_block_sizes", "kv_cache_layout"):
        options: dict[str, Any] = {name: wrong}
        taken({"layer": old.FullAttentionSpec(16)}, **options)
