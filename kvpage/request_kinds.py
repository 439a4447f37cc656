"""Latent rows and recurrent states in a plan request, and the union of all kinds of layers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, StrictInt, StrictStr, field_validator

from kvpage.dtypes import item_size_bytes
from kvpage.errors import SpecInvalid
from kvpage.latent_specs import MLAAttentionSpec, SlidingWindowMLASpec
from kvpage.request_backends import MAX_RANK, Size
from kvpage.request_layers import (
    AttentionEntry,
    ChunkedLocalAttentionLayer,
    CrossAttentionLayer,
    EncoderOnlyAttentionLayer,
    FullAttentionLayer,
    LayerEntry,
    SlidingWindowLayer,
)
from kvpage.rows import DS_MLA_ROW_BYTES
from kvpage.specs import MambaSpec


class _LatentBase(AttentionEntry):
    page_alignment_bytes: Size | None = None
    compress_ratio: Size = 1

    def check_fields(self) -> None:
        super().check_fields()
        if self.kv_quant == "fp8_ds_mla" and self.head_size not in DS_MLA_ROW_BYTES:
            raise SpecInvalid(f"fp8_ds_mla rows exist for head_size {list(DS_MLA_ROW_BYTES)}, not {self.head_size}")
        if self.compress_ratio > 1 and self.block_size is None:
            raise SpecInvalid("give block_size with compress_ratio: a multiple of it, in tokens")

    def _sizes(self, block_size: int) -> dict[str, Any]:
        return {
            "block_size": block_size,
            "page_size_padded": self.page_size_padded,
            "num_kv_heads": self.num_kv_heads,
            "head_size": self.head_size,
            "dtype": self.dtype,
            "kv_quant": self.kv_quant,
            "page_alignment_bytes": self.page_alignment_bytes,
            "compress_ratio": self.compress_ratio,
        }


class SlidingWindowMLALayer(_LatentBase):
    kind: Literal["sliding_window_mla"]
    sliding_window: Size

    def spec(self, block_size: int) -> SlidingWindowMLASpec:
        return SlidingWindowMLASpec(**self._sizes(block_size), sliding_window=self.sliding_window)


class MLAAttentionLayer(_LatentBase):
    kind: Literal["mla_attention"]

    def spec(self, block_size: int) -> MLAAttentionSpec:
        return MLAAttentionSpec(**self._sizes(block_size))


StateShape = Annotated[tuple[Size, ...], Field(max_length=MAX_RANK, fail_fast=True)]


class MambaLayer(LayerEntry):
    """Any recurrent state: its tensors lie one after the other in a page."""

    kind: Literal["mamba"]
    shapes: Annotated[tuple[StateShape, ...], Field(min_length=1, max_length=64, fail_fast=True)]
    dtypes: Annotated[tuple[StrictStr, ...], Field(min_length=1, max_length=64, fail_fast=True)]
    num_speculative_blocks: Annotated[StrictInt, Field(ge=0, le=1024)] = 0

    @field_validator("dtypes")
    @classmethod
    def _dtypes_are_known(cls, dtypes: tuple[str, ...]) -> tuple[str, ...]:
        for dtype in dtypes:
            item_size_bytes(dtype)
        return dtypes

    def check_fields(self) -> None:
        if len(self.shapes) != len(self.dtypes):
            raise SpecInvalid(
                f"shapes has {len(self.shapes)} entries, dtypes {len(self.dtypes)}; give one dtype per state"
            )

    def spec(self, block_size: int) -> MambaSpec:
        return MambaSpec(
            block_size=block_size,
            page_size_padded=self.page_size_padded,
            shapes=self.shapes,
            dtypes=self.dtypes,
            num_speculative_blocks=self.num_speculative_blocks,
        )


AnyLayer = Annotated[
    FullAttentionLayer
    | SlidingWindowLayer
    | ChunkedLocalAttentionLayer
    | MLAAttentionLayer
    | SlidingWindowMLALayer
    | CrossAttentionLayer
    | MambaLayer
    | EncoderOnlyAttentionLayer,
    Discriminator("kind"),
]
