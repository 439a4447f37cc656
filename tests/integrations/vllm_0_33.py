"""Stand-ins with the names, fields and page sizes of vLLM 0.33.0's spec classes, written for these tests.

A spec counts its bytes itself: heads (or slots of them) × states × bytes of one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, IntEnum
from fractions import Fraction
from typing import Any

from integrations.vllm_0_24 import BF16, BYTES, Dtype, MultipleOf

__all__ = ["BF16", "BYTES", "MultipleOf"]


class KVQuantMode(IntEnum):
    NONE = 0
    FP8_PER_TENSOR = 1
    INT8_PER_TOKEN_HEAD = 2
    FP8_PER_TOKEN_HEAD = 3
    INT4_PER_TOKEN_HEAD = 4
    NVFP4 = 5
    TURBOQUANT_4BIT_NC = 7
    NVFP4_DS_MLA = 10


class KVCacheLayout(Enum):
    LBHNC = (0, 1, 2, 3, 4)
    LBNHC = (0, 1, 3, 2, 4)
    BLHNC = (1, 0, 2, 3, 4)


@dataclass(frozen=True)
class KVCacheSpec:
    block_size: int
    dcp_sharded: bool = field(default=False, kw_only=True)
    block_stride_alignment: Any = field(default=None, kw_only=True)
    is_draft: bool = field(default=False, kw_only=True, compare=False)


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(KVCacheSpec):
    dcp_sharded: bool = True
    max_tp_shards: int | None = None
    num_kv_heads: int = 8
    head_size: int = 128
    dtype: Dtype = BF16
    head_size_v: int | None = None
    kv_quant_mode: KVQuantMode = KVQuantMode.NONE
    page_size_padded: int | None = None
    num_head_slots: int | None = None
    state_content_bytes: int | None = None
    tokens_per_state: int | Fraction = 1

    @property
    def state_content_size_bytes(self) -> int:
        width_v = self.head_size if self.head_size_v is None else self.head_size_v
        return self.state_content_bytes or (self.head_size + width_v) * self.dtype.itemsize

    @property
    def real_page_size_bytes(self) -> int:
        states = int(self.block_size // self.tokens_per_state)
        return (self.num_head_slots or self.num_kv_heads) * states * self.state_content_size_bytes

    @property
    def page_size_bytes(self) -> int:
        return self.page_size_padded or self.real_page_size_bytes


@dataclass(frozen=True, kw_only=True)
class FullAttentionSpec(AttentionSpec):
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    non_causal: bool = False


@dataclass(frozen=True, kw_only=True)
class RSWASpec(FullAttentionSpec):
    rswa_window: int


@dataclass(frozen=True, kw_only=True)
class SlidingWindowSpec(AttentionSpec):
    sliding_window: int
    extra_retained_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class CircularBufferSpec(AttentionSpec):
    pass


@dataclass(frozen=True, kw_only=True)
class MLAAttentionSpec(FullAttentionSpec):
    num_kv_heads: int = 1
    head_size: int = 576
    head_size_v: int | None = 0
    cache_dtype_str: str | None = None
    topk_buffer_width: int | None = None
    alignment: int | None = None
    model_version: str | None = None
    is_index_group_leader: bool = False
