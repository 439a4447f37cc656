"""vLLM's backends: by name, or written out from what the class answers to sizes it cannot mistake."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

import kvpage
from integrations import vllm_0_24 as old
from integrations import vllm_0_33 as new
from kvpage.backends import BACKENDS, parse_extent
from kvpage.errors import SpecInvalid
from kvpage.integrations.vllm import layers_from_specs
from support.checkout import ROOT

TABLE = json.loads((ROOT / "tests" / "data" / "backends.json").read_text())["backends"]
LATENT = [name for name, row in TABLE.items() if "num_kv_heads" not in row["shape"]]
MULTIPLE_OF_16 = [{"multiple_of": 16}]


def one(spec: Any, **more: Any) -> dict[str, Any]:
    (layer,) = layers_from_specs({"layer": spec}, **more)
    return layer


def refused(spec: Any, **more: Any) -> SpecInvalid:
    with pytest.raises(SpecInvalid) as caught:
        layers_from_specs({"layer": spec}, **more)
    return caught.value


def backend_class(name: str, order: str, width_v: int = 128) -> type:
    """A class that answers what the backend `name` of vLLM 0.24.0 answers, by the project's table."""
    row = TABLE[name]

    def shape(blocks: int, tokens: int, heads: int, width: int, cache_dtype_str: str = "auto") -> tuple[int, ...]:
        sizes = {"num_blocks": blocks, "block_size": tokens, "num_kv_heads": heads, "head_size": width}
        axes = row.get(f"shape_{cache_dtype_str}", row["shape"])
        return tuple(parse_extent(axis).value(sizes | {"head_size_v": width_v}) for axis in axes)

    def stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        found = row["layered_stride_order" if include_num_layers_dimension else "stride_order"]
        if found is None:
            raise NotImplementedError
        return tuple(found[order])

    def sizes() -> list[Any]:
        return [
            old.MultipleOf(size["multiple_of"]) if isinstance(size, dict) else size
            for size in row["kernel_block_sizes"]
        ]

    methods: dict[str, Callable[..., Any]] = {
        "get_name": lambda: name.upper(),
        "get_kv_cache_shape": shape,
        "get_kv_cache_stride_order": stride_order,
        "get_supported_kernel_block_sizes": sizes,
    }
    return type(name, (), {key: staticmethod(method) for key, method in methods.items()})


def spec_for(name: str) -> Any:
    if name in LATENT:
        if name == "flashinfer_mla_sparse_sm120":
            return old.MLAAttentionSpec(64, dtype=old.BYTES, cache_dtype_str="fp8_ds_mla")
        return old.MLAAttentionSpec(128)
    is_joined = "head_size_v" in str(TABLE[name]["shape"])
    return old.FullAttentionSpec(32, head_size=192 if is_joined else 128, head_size_v=128)


@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("name", TABLE)
def test_a_class_gives_the_tensors_of_the_registered_backend(name: str, order: str) -> None:
    spec = spec_for(name)
    layers = [one(spec, backends=given) for given in (backend_class(name, order), name)]
    common = {"strategy": "unify", "num_blocks": 3}
    plans = [kvpage.plan({"layers": [layer], "kv_cache_layout": order} | common) for layer in layers]
    plans.append(kvpage.plan({"layers": layers[:1]} | common))  # the class has said the order; a request need not
    tensors = [plan.layers["layer"].tensors for plan in plans]
    assert tensors[0] == tensors[1] == tensors[2]


@pytest.mark.parametrize("name", TABLE)
def test_a_class_in_the_usual_order_is_called_by_its_name(name: str) -> None:
    if name != "flashinfer_mla_sparse_sm120":  # whose rows are of a format
        assert one(spec_for(name), backends=backend_class(name, "NHD"))["backend"] == name


def test_formats_are_asked_for_by_name() -> None:
    per_token: dict[str, Any] = {"dtype": old.Dtype("int8"), "kv_quant_mode": old.KVQuantMode.INT8_PER_TOKEN_HEAD}
    triton = one(old.FullAttentionSpec(16, **per_token), backends=backend_class("triton_attn", "NHD"))
    assert triton["backend"]["shape"] == ["num_blocks", 2, "block_size", "num_kv_heads", "head_size + 4"]
    nvfp4 = old.FullAttentionSpec(16, dtype=old.BYTES, kv_quant_mode=old.KVQuantMode.NVFP4)
    flashinfer = one(nvfp4, backends=backend_class("flashinfer", "HND"))
    assert flashinfer["backend"]["shape"][-1] == "head_size/2 + head_size/16"
    assert flashinfer["backend"]["stride_order"] == [0, 1, 3, 2, 4]


def test_names_are_those_of_the_registry_in_lower_case() -> None:
    assert one(old.FullAttentionSpec(16), backends="FLASH_ATTN")["backend"] == "flash_attn"
    assert one(old.FullAttentionSpec(16), backends={"layer": "BLHNC"})["backend"] == "BLHNC"
    assert {name.upper().lower() for name in BACKENDS} == set(BACKENDS)


def test_layers_may_have_backends_of_their_own() -> None:
    specs = {"a": old.FullAttentionSpec(16), "b": old.FullAttentionSpec(16), "c": old.MambaSpec(16)}
    layers = layers_from_specs(specs, backends={"b": old.FlashAttention}, kernel_block_sizes={"a": [16]})
    assert [layer.get("backend") for layer in layers] == [None, "flash_attn", None]
    assert [layer.get("kernel_block_sizes") for layer in layers] == [[16], MULTIPLE_OF_16, None]


def test_kernel_blocks_of_compressed_rows_are_counted_in_rows() -> None:
    """vLLM 0.24, DeepseekV4IndexerBackend: 256 tokens, of which four share a row."""
    spec = old.MLAAttentionSpec(256, head_size=132, dtype=old.BYTES, compress_ratio=4)
    assert "no kernel block of [30] tokens is of whole rows" in refused(spec, kernel_block_sizes=[30]).message
    sizes = ([256, 30], [old.MultipleOf(256)], [old.MultipleOf(1)], [{"multiple_of": 64}])
    found = [one(spec, kernel_block_sizes=given)["kernel_block_sizes"] for given in sizes]
    assert found == [[64], [{"multiple_of": 64}], [{"multiple_of": 1}], [{"multiple_of": 16}]]
    plan = kvpage.plan({"layers": [one(spec, kernel_block_sizes=[256])], "strategy": "unify", "num_blocks": 3})
    assert plan.layers["layer"].tensors[0].shape == (3, 64, 132)


def test_classes_of_vllm_0_33_take_named_layouts() -> None:
    class AnyLayout:
        @staticmethod
        def supported_kv_cache_layouts() -> tuple[new.KVCacheLayout, ...] | None:
            return None

        get_supported_kernel_block_sizes = staticmethod(lambda: [new.MultipleOf(16)])

    class HeadsFirst(AnyLayout):
        @staticmethod
        def supported_kv_cache_layouts() -> tuple[new.KVCacheLayout, ...] | None:
            return (new.KVCacheLayout.LBHNC, new.KVCacheLayout.BLHNC)

    class BySpec(AnyLayout):
        @staticmethod
        def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
            return [64] if kv_cache_spec is None else [kv_cache_spec.block_size]

    spec = new.FullAttentionSpec(16)
    assert one(spec, backends=BySpec)["kernel_block_sizes"] == [16]
    assert one(spec, backends=AnyLayout)["backend"] == "LBNHC"
    assert one(spec, backends=AnyLayout)["kernel_block_sizes"] == MULTIPLE_OF_16
    assert one(spec, backends=HeadsFirst)["backend"] == "LBHNC"
    assert one(spec, backends=HeadsFirst, kv_cache_layout="BLHNC")["backend"] == "BLHNC"
    assert one(spec, kv_cache_layout="BLNHC")["backend"] == "BLNHC"
    assert "LBNHC" in refused(spec, backends=HeadsFirst, kv_cache_layout="LBNHC").message


@dataclass(frozen=True, kw_only=True)
class CountingSpec(old.FullAttentionSpec):
    """As in vLLM 0.28: the spec counts its bytes, the backends still have shapes and orders of their own."""

    state_content_bytes: int | None = None

    @property
    def state_content_size_bytes(self) -> int:
        return self.state_content_bytes or 2 * self.head_size * self.dtype.itemsize

    @property
    def page_size_bytes(self) -> int:
        return self.block_size * self.num_kv_heads * self.state_content_size_bytes

    @property
    def real_page_size_bytes(self) -> int:
        return self.page_size_bytes


def test_backends_have_shapes_before_the_engine_has_named_layouts() -> None:
    assert "backend" not in one(CountingSpec(16))
    assert one(CountingSpec(16), backends=old.FlashAttention)["backend"] == "flash_attn"
    per_token: dict[str, Any] = {"dtype": old.Dtype("int8"), "kv_quant_mode": old.KVQuantMode.INT8_PER_TOKEN_HEAD}
    scaled = one(CountingSpec(16, state_content_bytes=2 * 128 + 8, **per_token))
    assert (scaled["kv_quant"], "backend" in scaled) == ("int8_per_token_head", False)


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC"])
def test_slots_of_heads_are_an_axis_of_the_tensor(layout: str) -> None:
    """vLLM 0.33: nvfp4 has a slot for K and one for V of each head; some ROCm kernels one for all K, one for all V."""
    nvfp4 = new.FullAttentionSpec(
        16, dtype=new.BYTES, kv_quant_mode=new.KVQuantMode.NVFP4, num_head_slots=16, state_content_bytes=72
    )
    pair = new.FullAttentionSpec(16, num_head_slots=2, state_content_bytes=8 * 128 * 2)
    for spec, slots, content in ((nvfp4, 16, 72), (pair, 2, 1024)):
        layer = one(spec, kv_cache_layout=layout)
        plan = kvpage.plan({"layers": [layer], "strategy": "unify", "num_blocks": 3})
        (tensor,) = plan.layers["layer"].tensors
        assert tensor.shape == (3, slots, 16, content)
        inner = (16 * content, content) if layout == "LBHNC" else (content, slots * content)
        item = 1 if spec is nvfp4 else 2
        assert tensor.strides_bytes == (spec.page_size_bytes, *(item * step for step in inner), item)
        assert f"{slots} head slots" in refused(spec, kv_cache_layout="BLHNC").message


class Broken(old.FlashAttention):
    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        raise ValueError(f"no {cache_dtype_str} cache of {(num_blocks, block_size, num_kv_heads, head_size)}")


class Flat(old.FlashAttention):
    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        del cache_dtype_str
        return (num_blocks, 2, block_size * num_kv_heads * head_size)


class Fixed(old.FlashAttention):
    """Takes blocks of 128 tokens only, which is also the width of its heads."""

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        del cache_dtype_str
        assert (block_size, head_size) == (128, 128)
        return (num_blocks, 2, block_size, num_kv_heads, head_size)


class BadSizes(old.FlashAttention):
    get_supported_kernel_block_sizes = staticmethod(lambda: ["16"])


class NoOrder(old.FlashAttention):
    @classmethod
    def get_kv_cache_stride_order(cls, include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        raise RuntimeError(f"no engine ({include_num_layers_dimension})")


class WrongLayout(old.FlashAttention):
    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        del cache_dtype_str
        return (num_blocks, 2, block_size, num_kv_heads, head_size + 8)


FAULTS = [
    (Broken, "Broken.get_kv_cache_shape raised ValueError: no auto cache of (1000003, 128, 8, 128)"),
    (Flat, "an axis of Flat is"),
    (Fixed, "axes block_size and head_size of Fixed have one size, 128"),
    (BadSizes, "'16' is no number of tokens"),
    (NoOrder, "NoOrder.get_kv_cache_stride_order raised RuntimeError: no engine"),
    (WrongLayout, "holds 557056 bytes a block, but"),
    ("FLASH_ATTN_9", "backend 'FLASH_ATTN_9' is not registered"),
]


@pytest.mark.parametrize(("backend", "told"), FAULTS, ids=[str(row[1])[:20] for row in FAULTS])
def test_a_class_that_does_not_say_its_layout_is_refused(backend: Any, told: str) -> None:
    assert told in refused(old.FullAttentionSpec(128), backends=backend).message


@pytest.mark.parametrize(
    "more", [{"backends": {"other": "flash_attn"}}, {"kernel_block_sizes": {"other": [16]}}, {"kv_cache_layout": "NHD"}]
)
def test_names_of_nothing_are_refused(more: dict[str, Any]) -> None:
    error = refused(old.FullAttentionSpec(16), **more)
    assert "other" in error.message or "NHD" in error.message
