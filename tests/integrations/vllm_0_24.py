"""Stand-ins with the names, fields and page sizes of vLLM 0.24.0's spec classes, written for these tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from math import prod
from typing import Any

ITEMS = {"uint8": 1, "int8": 1, "float8_e4m3fn": 1, "bfloat16": 2, "float16": 2, "float32": 4}


class Dtype:
    """Says its name as a torch dtype does."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __str__(self) -> str:
        return f"torch.{self.name}"

    @property
    def itemsize(self) -> int:
        return ITEMS[self.name]


BF16, BYTES = Dtype("bfloat16"), Dtype("uint8")


class KVQuantMode(IntEnum):
    NONE = 0
    FP8_PER_TENSOR = 1
    INT8_PER_TOKEN_HEAD = 2
    FP8_PER_TOKEN_HEAD = 3
    NVFP4 = 4


@dataclass(frozen=True)
class KVCacheSpec:
    block_size: int


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(KVCacheSpec):
    num_kv_heads: int = 8
    head_size: int = 128
    dtype: Dtype = BF16
    kv_quant_mode: KVQuantMode = KVQuantMode.NONE
    page_size_padded: int | None = None
    indexes_kv_by_block_stride: bool = False

    @property
    def page_size_bytes(self) -> int:
        scales = 8 * self.block_size * self.num_kv_heads if self.kv_quant_mode in (2, 3) else 0
        return self.page_size_padded or self.real_page_size_bytes + scales

    @property
    def real_page_size_bytes(self) -> int:
        width = self.row(self.head_size) + self.row(getattr(self, "head_size_v", None) or self.head_size)
        return self.block_size * self.num_kv_heads * width * self.dtype.itemsize

    def row(self, width: int) -> int:
        return width // 2 + width // 16 if self.kv_quant_mode is KVQuantMode.NVFP4 else width


@dataclass(frozen=True, kw_only=True)
class FullAttentionSpec(AttentionSpec):
    head_size_v: int | None = None
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    non_causal: bool = False


@dataclass(frozen=True, kw_only=True)
class TQFullAttentionSpec(FullAttentionSpec):
    tq_slot_size: int = 0

    @property
    def real_page_size_bytes(self) -> int:
        return self.block_size * self.num_kv_heads * self.tq_slot_size


@dataclass(frozen=True, kw_only=True)
class SinkFullAttentionSpec(FullAttentionSpec):
    sink_len: int | None = None


@dataclass(frozen=True, kw_only=True)
class SlidingWindowSpec(AttentionSpec):
    sliding_window: int
    head_size_v: int | None = None


@dataclass(frozen=True, kw_only=True)
class ChunkedLocalAttentionSpec(AttentionSpec):
    attention_chunk_size: int


@dataclass(frozen=True, kw_only=True)
class CrossAttentionSpec(AttentionSpec):
    pass


@dataclass(frozen=True, kw_only=True)
class EncoderOnlyAttentionSpec(AttentionSpec):
    pass


@dataclass(frozen=True, kw_only=True)
class MLAAttentionSpec(FullAttentionSpec):
    num_kv_heads: int = 1
    head_size: int = 576
    cache_dtype_str: str | None = None
    alignment: int | None = None
    compress_ratio: int = 1
    model_version: str | None = None

    def __post_init__(self) -> None:
        align(self)

    @property
    def real_page_size_bytes(self) -> int:
        if self.cache_dtype_str == "fp8_ds_mla":
            is_v4 = self.model_version == "deepseek_v4"
            return self.block_size // self.compress_ratio * 584 if is_v4 else self.block_size * 656
        return self.block_size // self.compress_ratio * self.num_kv_heads * self.head_size * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class HiddenStateCacheSpec(MLAAttentionSpec):
    pass


@dataclass(frozen=True, kw_only=True)
class SlidingWindowMLASpec(SlidingWindowSpec):
    num_kv_heads: int = 1
    head_size: int = 512
    cache_dtype_str: str | None = None
    alignment: int | None = None
    compress_ratio: int = 1
    model_version: str | None = None

    def __post_init__(self) -> None:
        align(self)

    @property
    def real_page_size_bytes(self) -> int:
        rows = self.block_size // self.compress_ratio
        if self.model_version == "deepseek_v4" and self.cache_dtype_str == "fp8_ds_mla":
            return rows * 584
        return rows * self.num_kv_heads * self.head_size * self.dtype.itemsize


def align(spec: MLAAttentionSpec | SlidingWindowMLASpec) -> None:
    """The padded page is set when a spec is made, by the alignment."""
    if spec.alignment is not None and spec.real_page_size_bytes % spec.alignment:
        padded = -(-spec.real_page_size_bytes // spec.alignment) * spec.alignment
        object.__setattr__(spec, "page_size_padded", padded)


@dataclass(frozen=True, kw_only=True)
class MambaSpec(KVCacheSpec):
    shapes: tuple[tuple[int, ...], ...] = ((3, 8192), (32, 128, 128))
    dtypes: tuple[Dtype, ...] = (BF16, Dtype("float32"))
    page_size_padded: int | None = None
    mamba_type: str = "mamba2"
    mamba_cache_mode: str = "none"
    num_speculative_blocks: int = 0

    @property
    def page_size_bytes(self) -> int:
        sizes = (prod(shape) * dtype.itemsize for shape, dtype in zip(self.shapes, self.dtypes, strict=True))
        return self.page_size_padded or sum(sizes)


@dataclass(frozen=True, kw_only=True)
class UniformTypeKVCacheSpecs(KVCacheSpec):
    kv_cache_specs: Mapping[str, KVCacheSpec]


@dataclass(frozen=True)
class MultipleOf:
    base: int


class FlashAttention:
    """A backend class: what it answers depends on the order of data that the engine has settled on."""

    order = "NHD"

    @staticmethod
    def get_name() -> str:
        return "FLASH_ATTN"

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        del cache_dtype_str
        if block_size % 16:
            raise ValueError("Block size must be a multiple of 16.")
        return (num_blocks, 2, block_size, num_kv_heads, head_size)

    @classmethod
    def get_kv_cache_stride_order(cls, include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        if cls.order == "NHD":
            return (1, 0, 2, 3, 4, 5) if include_num_layers_dimension else (0, 1, 2, 3, 4)
        return (1, 4, 0, 2, 3, 5) if include_num_layers_dimension else (0, 1, 3, 2, 4)

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[Any]:
        return [MultipleOf(16)]
