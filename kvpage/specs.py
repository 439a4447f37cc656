"""What the planner knows about one layer: its kind, its sizes, and the bytes of a page for any block size.

Formulas: vLLM 0.24.0, `v1/kv_cache_interface.py`. A spec answers questions; the planner never asks for its class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import lcm, prod
from typing import ClassVar, Self

from kvpage.dtypes import item_size_bytes
from kvpage.errors import SpecInvalid
from kvpage.rows import row_bytes

MAX_BYTES = 2**62  # no size, offset or buffer is larger, so every sum of two fits a signed 64-bit integer


def ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """The tokens that decide how many blocks a request may hold."""

    max_model_len: int
    max_num_batched_tokens: int
    """Tokens scheduled at once, over all requests."""
    max_num_encoder_input_tokens: int = 0
    """Tokens of the encoder's output that cross attention keeps."""


@dataclass(frozen=True, kw_only=True)  # no slots: derived sizes are cached
class LayerSpec:
    """One layer's cache. `page_size_bytes` is the padded page where one is set, else the real page."""

    kind: ClassVar[str]
    is_attention: ClassVar[bool] = True

    block_size: int
    """Tokens of one block."""
    page_size_padded: int | None = None
    """Bytes from one page to the next when padding is wanted; None for a dense page."""
    indexes_kv_by_block_stride: bool = False
    """The backend reads pages through the runtime stride of the block axis, so a gap between pages is fine."""

    @cached_property
    def real_page_size_bytes(self) -> int:
        """Bytes that the data of one block needs."""
        raise NotImplementedError

    @cached_property
    def page_alignment(self) -> int:
        """Bytes that every page stride of this layer must be a multiple of."""
        return lcm(*self.item_sizes_bytes)

    @cached_property
    def page_size_bytes(self) -> int:
        """Bytes from one page to the next: the padding asked for, else the data rounded up to the alignment."""
        if self.page_size_padded is not None:
            return self.page_size_padded
        return ceil_div(self.real_page_size_bytes, self.page_alignment) * self.page_alignment

    @cached_property
    def item_sizes_bytes(self) -> tuple[int, ...]:
        """Item sizes of the layer's tensors; every page stride must be a multiple of each."""
        raise NotImplementedError

    @cached_property
    def lifecycle(self) -> tuple[object, ...]:
        """Layers with equal values need the same token slots for the same time."""
        raise NotImplementedError

    @property
    def storage_block_size(self) -> int:
        """Rows that a page stores: `block_size`, or fewer where a row stands for several tokens."""
        return self.block_size

    def symbols(self) -> dict[str, int]:
        """Sizes by the names that a written-out layout uses, in elements and rows."""
        return {"block_size": self.block_size}

    @property
    def keeps_at_most_tokens(self) -> int | None:
        """Tokens of a request whose data the layer keeps, at most; None: of all of them."""
        return None

    @property
    def grows_with_request(self) -> bool:
        """Whether a longer request may hold more blocks."""
        return self.is_attention

    def max_blocks(self, lengths: Lengths) -> int:
        """Most blocks one request holds."""
        return ceil_div(self.max_tokens_held(lengths), self.block_size)

    def max_tokens_held(self, lengths: Lengths) -> int:
        """Most tokens of one request whose data this layer needs at one time (for states: 0, they are not counted)."""
        raise NotImplementedError

    @classmethod
    def merge(cls, specs: Sequence[LayerSpec]) -> LayerSpec | None:
        """One spec that stands for all of `specs` (same class, at least one), or None when they differ."""
        return specs[0] if len(set(specs)) == 1 else None

    def with_block_size(self, block_size: int) -> Self:
        return replace(self, block_size=block_size)

    def with_padding(self, page_size_padded: int | None) -> Self:
        return replace(self, page_size_padded=page_size_padded)

    def check(self) -> None:
        """Raises `SpecInvalid` when a page is too large, or the padding asked for too small or not aligned."""
        if self.real_page_size_bytes > MAX_BYTES // 2:
            raise SpecInvalid("the page of one block is larger than 2^61 bytes; lower block_size or the layer's sizes")
        padded = self.page_size_padded
        if padded is None:
            return
        if padded < self.real_page_size_bytes:
            raise SpecInvalid(
                f"page_size_padded is {padded} bytes, less than the {self.real_page_size_bytes} bytes the data of one "
                f"block needs; use at least that, or leave it out"
            )
        if padded % self.page_alignment:
            raise SpecInvalid(
                f"page_size_padded is {padded} bytes, not a multiple of the {self.page_alignment} bytes that the item "
                f"size and page alignment ask for; use {padded + -padded % self.page_alignment}"
            )


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(LayerSpec):
    """K and V rows: block_size × num_kv_heads × (K row + V row) bytes a page."""

    num_kv_heads: int
    head_size: int
    head_size_v: int
    dtype: str
    kv_quant: str | None = None

    @cached_property
    def real_page_size_bytes(self) -> int:
        k = row_bytes(self.head_size, self.dtype, self.kv_quant)
        v = row_bytes(self.head_size_v, self.dtype, self.kv_quant)
        return self.block_size * self.num_kv_heads * (k + v)

    @cached_property
    def item_sizes_bytes(self) -> tuple[int, ...]:
        return (item_size_bytes(self.dtype),)

    def symbols(self) -> dict[str, int]:
        item = item_size_bytes(self.dtype)
        return {
            "block_size": self.block_size,
            "num_kv_heads": self.num_kv_heads,
            "head_size": self.head_size,
            "head_size_v": self.head_size_v,
            "row_size": row_bytes(self.head_size, self.dtype, self.kv_quant) // item,
            "row_size_v": row_bytes(self.head_size_v, self.dtype, self.kv_quant) // item,
        }


@dataclass(frozen=True, kw_only=True)
class FullAttentionSpec(AttentionSpec):
    """Every token is kept. A window or chunk here is only masked, not freed (vLLM with its hybrid manager off)."""

    kind: ClassVar[str] = "full_attention"
    sliding_window: int | None = None
    attention_chunk_size: int | None = None

    @classmethod
    def merge(cls, specs: Sequence[LayerSpec]) -> LayerSpec | None:
        """Layers that differ only in their masks merge, with at most one window or one chunk size among them."""
        full = [spec for spec in specs if isinstance(spec, FullAttentionSpec)]
        windows = {spec.sliding_window for spec in full} - {None}
        chunks = {spec.attention_chunk_size for spec in full} - {None}
        if len(full) < len(specs) or len(windows) + len(chunks) > 1:
            return None
        unmasked = {replace(spec, sliding_window=None, attention_chunk_size=None) for spec in full}
        if len(unmasked) > 1:
            return None
        return replace(full[0], sliding_window=next(iter(windows), None), attention_chunk_size=next(iter(chunks), None))

    @cached_property
    def lifecycle(self) -> tuple[object, ...]:
        return ("full",)

    def max_tokens_held(self, lengths: Lengths) -> int:
        return lengths.max_model_len


@dataclass(frozen=True, kw_only=True)
class SlidingWindowSpec(AttentionSpec):
    kind: ClassVar[str] = "sliding_window"
    sliding_window: int
    """Tokens a query sees, itself included."""

    @property
    def keeps_at_most_tokens(self) -> int | None:
        return self.sliding_window

    @cached_property
    def lifecycle(self) -> tuple[object, ...]:
        return ("sliding_window", self.sliding_window)

    def max_blocks(self, lengths: Lengths) -> int:
        # + 1: the window need not start at the first token of a block.
        return LayerSpec.max_blocks(self, lengths) + 1

    def max_tokens_held(self, lengths: Lengths) -> int:
        return min(self.sliding_window - 1 + lengths.max_num_batched_tokens, lengths.max_model_len)


@dataclass(frozen=True, kw_only=True)
class ChunkedLocalAttentionSpec(AttentionSpec):
    kind: ClassVar[str] = "chunked_local_attention"
    attention_chunk_size: int
    """Tokens of one chunk; a query sees its own chunk only."""

    @property
    def keeps_at_most_tokens(self) -> int | None:
        return self.attention_chunk_size

    @cached_property
    def lifecycle(self) -> tuple[object, ...]:
        return ("chunked_local_attention", self.attention_chunk_size)

    def max_tokens_held(self, lengths: Lengths) -> int:
        return min(self.attention_chunk_size + lengths.max_num_batched_tokens, lengths.max_model_len)


@dataclass(frozen=True, kw_only=True)
class CrossAttentionSpec(AttentionSpec):
    """Keeps the encoder's output: as many tokens as that has, whatever the request's length."""

    kind: ClassVar[str] = "cross_attention"

    @property
    def grows_with_request(self) -> bool:
        return False

    @cached_property
    def lifecycle(self) -> tuple[object, ...]:
        return ("cross_attention",)

    def max_tokens_held(self, lengths: Lengths) -> int:
        return lengths.max_num_encoder_input_tokens


@dataclass(frozen=True, kw_only=True)
class MambaSpec(LayerSpec):
    """A recurrent state: several tensors, one after the other in a page whose bytes do not grow with the block size."""

    kind: ClassVar[str] = "mamba"
    is_attention: ClassVar[bool] = False
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    num_speculative_blocks: int = 0

    @cached_property
    def state_sizes_bytes(self) -> tuple[int, ...]:
        return tuple(prod(s) * item_size_bytes(d) for s, d in zip(self.shapes, self.dtypes, strict=True))

    @cached_property
    def real_page_size_bytes(self) -> int:
        return sum(self.state_sizes_bytes)

    @cached_property
    def item_sizes_bytes(self) -> tuple[int, ...]:
        return tuple(item_size_bytes(dtype) for dtype in self.dtypes)

    @cached_property
    def state_offsets_bytes(self) -> tuple[int, ...]:
        """Where each state begins in the page."""
        return tuple(accumulate(self.state_sizes_bytes, initial=0))[:-1]

    def check(self) -> None:
        LayerSpec.check(self)
        for index, (offset, item) in enumerate(zip(self.state_offsets_bytes, self.item_sizes_bytes, strict=True)):
            if offset % item:
                raise SpecInvalid(
                    f"state {index} ({self.dtypes[index]}) would begin {offset} bytes into the page, not a multiple of "
                    f"its item size of {item} bytes; put states with larger items first"
                )

    @cached_property
    def lifecycle(self) -> tuple[object, ...]:
        return ("mamba", self.num_speculative_blocks)

    def max_blocks(self, lengths: Lengths) -> int:
        return 1 + self.num_speculative_blocks

    def max_tokens_held(self, lengths: Lengths) -> int:
        return 0
