"""Caches of latent rows: one row for K and V together (MLA), or one for several tokens. See `specs`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import lcm
from typing import ClassVar

from kvpage.dtypes import item_size_bytes
from kvpage.errors import SpecInvalid
from kvpage.rows import row_bytes
from kvpage.specs import LayerSpec, Lengths


@dataclass(frozen=True, kw_only=True)
class LatentSpec(LayerSpec):
    """One latent row, no V: rows × num_kv_heads × row bytes, the page rounded up to `page_alignment_bytes`.

    With `compress_ratio` r a row stands for r tokens, so that a block of b tokens stores b / r rows.
    """

    num_kv_heads: int = 1
    head_size: int
    dtype: str
    kv_quant: str | None = None
    page_alignment_bytes: int | None = None
    compress_ratio: int = 1

    @property
    def storage_block_size(self) -> int:
        return self.block_size // self.compress_ratio

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one stored row of one head."""
        return row_bytes(self.head_size, self.dtype, self.kv_quant)

    @cached_property
    def real_page_size_bytes(self) -> int:
        return self.storage_block_size * self.num_kv_heads * self.row_bytes

    @cached_property
    def page_alignment(self) -> int:
        return lcm(*self.item_sizes_bytes, self.page_alignment_bytes or 1)

    @cached_property
    def item_sizes_bytes(self) -> tuple[int, ...]:
        return (item_size_bytes(self.dtype),)

    def symbols(self) -> dict[str, int]:
        return {
            "block_size": self.storage_block_size,
            "num_kv_heads": self.num_kv_heads,
            "head_size": self.head_size,
            "row_size": self.row_bytes // item_size_bytes(self.dtype),
        }

    def check(self) -> None:
        if self.block_size % self.compress_ratio:
            raise SpecInvalid(
                f"block_size {self.block_size} is not a multiple of compress_ratio {self.compress_ratio}; "
                f"a block stores whole rows"
            )
        LayerSpec.check(self)


@dataclass(frozen=True, kw_only=True)
class MLAAttentionSpec(LatentSpec):
    """Every token is kept."""

    kind: ClassVar[str] = "mla_attention"

    @cached_property
    def lifecycle(self) -> tuple[object, ...]:
        return ("full",)

    def max_tokens_held(self, lengths: Lengths) -> int:
        return lengths.max_model_len


@dataclass(frozen=True, kw_only=True)
class SlidingWindowMLASpec(LatentSpec):
    kind: ClassVar[str] = "sliding_window_mla"
    sliding_window: int
    """Tokens a query sees, itself included."""

    @property
    def keeps_at_most_tokens(self) -> int | None:
        return self.sliding_window

    @cached_property
    def lifecycle(self) -> tuple[object, ...]:
        return ("sliding_window_mla", self.sliding_window)

    def max_blocks(self, lengths: Lengths) -> int:
        return LayerSpec.max_blocks(self, lengths) + 1

    def max_tokens_held(self, lengths: Lengths) -> int:
        return min(self.sliding_window - 1 + lengths.max_num_batched_tokens, lengths.max_model_len)
