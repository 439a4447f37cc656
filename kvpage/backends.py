"""How attention backends lay a layer's cache out: logical shape by axis names, stride orders, kernel block sizes.

Facts: vLLM 0.24.0, `get_kv_cache_shape`, `get_kv_cache_stride_order` and `get_supported_kernel_block_sizes` of each
backend class. Two classes there are called FLASH_ATTN; the one of ROCm AITER is `rocm_aiter_fa` here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Literal

from kvpage.errors import LayoutUnsupported, SpecInvalid, nearest, shorten
from kvpage.strides import inverse, is_permutation

KVCacheLayout = Literal["NHD", "HND"]
SYMBOLS = ("num_blocks", "block_size", "num_kv_heads", "head_size", "head_size_v", "row_size", "row_size_v")
"""`head_size` counts values; `row_size` counts the elements stored for a head and token, inline scales included."""
_TERM = re.compile(r"\s*([a-z_]+|[0-9]{1,18})\s*(?:/\s*([0-9]{1,18}))?\s*")


@dataclass(frozen=True, slots=True)
class Extent:
    """One axis: a sum of terms, each a symbol or a number, over a divisor. `head_size/2 + head_size/16`."""

    text: str
    terms: tuple[tuple[str | int, int], ...]

    def value(self, sizes: dict[str, int]) -> int:
        """The extent for the given sizes. Raises `LayoutUnsupported` where a term does not divide evenly."""
        total = 0
        for term, divisor in self.terms:
            amount = sizes[term] if isinstance(term, str) else term
            if amount % divisor:
                raise LayoutUnsupported(f"axis {self.text!r}: {term} is {amount}, not a multiple of {divisor}")
            total += amount // divisor
        return total


@lru_cache(maxsize=1024)
def parse_extent(axis: str | int) -> Extent:
    """Read an axis of a written-out shape. Raises `SpecInvalid` for unknown symbols, zero and bad syntax."""
    text = str(axis)
    terms: list[tuple[str | int, int]] = []
    for part in text.split("+"):
        match = _TERM.fullmatch(part)
        if match is None:
            raise SpecInvalid(f"axis {shorten(text)!r} is not a sum of symbols, symbol/number and numbers")
        name, divisor = match[1], int(match[2] or 1)
        if not name.isdigit() and name not in SYMBOLS:
            raise SpecInvalid(f"axis {shorten(text)!r} names {shorten(name)!r}; known symbols: {', '.join(SYMBOLS)}")
        if divisor == 0 or name.strip("0") == "":
            raise SpecInvalid(f"axis {shorten(text)!r} holds a zero; extents are at least 1")
        terms.append((int(name) if name.isdigit() else name, divisor))
    return Extent(text, tuple(terms))


@dataclass(frozen=True)
class AttentionLayout:
    """A logical shape and where its axes lie in memory. Valid by construction, else `SpecInvalid`.

    `stride_order[i]` is the logical axis at physical position i, outermost first; None: memory order is logical
    order. `layered_stride_order` is the same with a layers axis put in front of the logical shape (axis 0).
    """

    shape: tuple[Extent, ...]
    stride_order: tuple[int, ...] | None = None
    layered_stride_order: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        rank = len(self.shape)
        names = [axis.text for axis in self.shape]
        if names.count("num_blocks") != 1 or sum("num_blocks" in name for name in names) != 1:
            raise SpecInvalid(f"shape {names} must have exactly one axis 'num_blocks'")
        for what, order, length in (
            ("stride_order", self.stride_order, rank),
            ("layered_stride_order", self.layered_stride_order, rank + 1),
        ):
            if order is not None and (len(order) != length or not is_permutation(order)):
                raise SpecInvalid(
                    f"{what} {shorten(str(list(order)))} is not a permutation of 0 … {length - 1}, "
                    f"which a shape of {rank} axes needs"
                )

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The stride order, spelled out."""
        return self.stride_order if self.stride_order is not None else tuple(range(len(self.shape)))

    @cached_property
    def block_axis(self) -> int:
        """Logical position of the block axis, found by name."""
        return [axis.text for axis in self.shape].index("num_blocks")

    @cached_property
    def axes_outside_blocks(self) -> tuple[int, ...]:
        """Logical axes outside the block axis in memory. With none, or only of extent 1, a page is one piece."""
        return self.order[: inverse(self.order)[self.block_axis]]

    @cached_property
    def indexes_kv_by_block_stride(self) -> bool:
        """vLLM PR 45181: both orders exist, the layered one is one longer and does not begin with the layers axis."""
        if self.stride_order is None or self.layered_stride_order is None:
            return False
        return len(self.layered_stride_order) == len(self.stride_order) + 1 and self.layered_stride_order[0] != 0

    def logical_shape(self, sizes: dict[str, int]) -> tuple[int, ...]:
        """Extents in logical order for `sizes`, a value for each symbol."""
        return tuple(axis.value(sizes) for axis in self.shape)


_FINE_MULTIPLES = 128


@dataclass(frozen=True, slots=True)
class KernelBlockSizes:
    """Block sizes, in tokens, that a backend's kernels accept: those listed, and multiples of `multiple_of` up to
    `at_most`."""

    listed: tuple[int, ...] = ()
    multiple_of: int | None = None
    at_most: int | None = None

    @property
    def smallest(self) -> int:
        return min((*self.listed, *(() if self.multiple_of is None else (self.multiple_of,))), default=1)

    def smallest_from(self, tokens: int) -> int:
        """The smallest accepted size of at least `tokens`; the largest accepted one where all are smaller."""
        multiples = () if self.multiple_of is None else (-(-tokens // self.multiple_of) * self.multiple_of,)
        largest = self._largest_multiple
        multiple = [size for size in multiples if largest is None or size <= largest]
        from_there = (*(size for size in self.listed if size >= tokens), *multiple)
        ends = (*self.listed, *(() if largest is None else (largest,)))
        return min(from_there, default=max(ends, default=tokens))

    def largest_within(self, block_size: int) -> int | None:
        """The largest accepted size that divides `block_size` evenly; None when there is none."""
        if not self.listed and self.multiple_of is None:
            return block_size  # nothing is known against it
        return max(
            (size for size in (*self.listed, *self._dividing(block_size)) if block_size % size == 0), default=None
        )

    def takes_whole(self, block_size: int) -> bool:
        """True when the kernel reads a block of `block_size` tokens as one, and not as several smaller ones."""
        return self.largest_within(block_size) == block_size

    def largest_up_to(self, most: int) -> int | None:
        """The largest accepted size of at most `most` tokens."""
        unit = self.multiple_of if self.listed or self.multiple_of is not None else 1
        end = most if self.at_most is None else min(most, self.at_most)
        multiple = 0 if unit is None else end // unit * unit
        return max((size for size in (*self.listed, multiple) if 0 < size <= most), default=None)

    def from_to(self, least: int, most: int) -> tuple[int, ...]:
        """Accepted sizes from `least` to `most` tokens, ascending; where all are smaller than `least`, the largest.

        Multiples in steps of at least `least`, and, from the 128th on, of at least 1/64 of what they are.
        """
        sizes = {*self.listed, *self._multiples(least, most)}
        return tuple(sorted(size for size in sizes if least <= size <= most)) or tuple(
            size for size in (self.smallest_from(least),) if size <= most
        )

    def _multiples(self, least: int, most: int) -> Iterator[int]:
        unit = self.multiple_of if self.listed or self.multiple_of is not None else 1
        if unit is None:
            return
        step, count = -(-least // unit) * unit, 1
        end = most if self.at_most is None else min(most, self.at_most)
        while count * step <= end:
            yield count * step
            count += 1 if count < _FINE_MULTIPLES else count // 64

    @property
    def _largest_multiple(self) -> int | None:
        if self.multiple_of is None or self.at_most is None:
            return None
        return self.at_most // self.multiple_of * self.multiple_of

    def _dividing(self, block_size: int) -> tuple[int, ...]:
        """Multiples that may divide `block_size`."""
        if self.multiple_of is None or block_size % self.multiple_of:
            return ()
        if self.at_most is None:
            return (block_size,)
        return tuple(range(self.multiple_of, min(self.at_most, block_size) + 1, self.multiple_of))


@dataclass(frozen=True)
class Backend:
    """A registered backend: its layout for each value of `kv_cache_layout`, and for each inline quantisation."""

    name: str
    layouts: dict[str, AttentionLayout] = field(compare=False)
    kernel_block_sizes: KernelBlockSizes = KernelBlockSizes()
    quantised: dict[str, dict[str, AttentionLayout]] = field(default_factory=dict, compare=False)

    def layout(self, kv_cache_layout: KVCacheLayout, kv_quant: str | None) -> AttentionLayout:
        """Raises `LayoutUnsupported` when the backend has no layout for `kv_quant`."""
        if kv_quant is None:
            return self.layouts[kv_cache_layout]
        if kv_quant not in self.quantised:
            able = sorted(name for name, backend in BACKENDS.items() if kv_quant in backend.quantised)
            raise LayoutUnsupported(
                f"backend {self.name} has no layout for kv_quant {kv_quant!r}; "
                f"use one of {', '.join((*able, *NAMED_LAYOUTS))}, or write the layout out"
            )
        return self.quantised[kv_quant][kv_cache_layout]


_Orders = tuple[tuple[int, ...], tuple[int, ...]] | None
_KV_PAIR = ("num_blocks", 2, "block_size", "num_kv_heads", "head_size")
_KV_FIRST = (2, "num_blocks", "block_size", "num_kv_heads", "head_size")
_KV_JOINED = ("num_blocks", "block_size", "num_kv_heads", "head_size + head_size_v")
_ROWS = ("num_blocks", "block_size", "head_size")


def _layouts(shape: tuple[str | int, ...], nhd: _Orders = None, hnd: _Orders = None) -> dict[str, AttentionLayout]:
    extents = tuple(parse_extent(axis) for axis in shape)
    return {"NHD": AttentionLayout(extents, *(nhd or ())), "HND": AttentionLayout(extents, *(hnd or ()))}


def _multiple(tokens: int) -> KernelBlockSizes:
    return KernelBlockSizes(multiple_of=tokens)


def _listed(*tokens: int) -> KernelBlockSizes:
    return KernelBlockSizes(listed=tokens)


_PAIR_NHD = ((0, 1, 2, 3, 4), (1, 0, 2, 3, 4, 5))
_PAIR_HND = ((0, 1, 3, 2, 4), (1, 4, 0, 2, 3, 5))
_JOINED_NHD = ((0, 1, 2, 3), (1, 0, 2, 3, 4))
_JOINED_HND = ((0, 2, 1, 3), (1, 3, 0, 2, 4))
_FLEX = ((0, 2, 1, 3, 4), (1, 0, 3, 2, 4, 5))
_FLASHINFER_HND = ((0, 1, 3, 2, 4), (1, 2, 4, 0, 3, 5))
_ROWS_BLOCKS_FIRST = ((0, 1, 2), (1, 0, 2, 3))
_ROWS_LAYERS_FIRST = ((0, 1, 2), (0, 1, 2, 3))
_SCALED_PAIR = ("num_blocks", 2, "block_size", "num_kv_heads", "head_size + 4")
_NVFP4_PAIR = ("num_blocks", 2, "block_size", "num_kv_heads", "head_size/2 + head_size/16")
_CPU_JOINED = ("num_blocks", "num_kv_heads", "block_size", "head_size + head_size_v")


def _pair(shape: tuple[str | int, ...]) -> dict[str, AttentionLayout]:
    return _layouts(shape, _PAIR_NHD, _PAIR_HND)


def _rows(orders: _Orders = None, row: str | int = "head_size") -> dict[str, AttentionLayout]:
    return _layouts(("num_blocks", "block_size", row), orders, orders)


BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend("flash_attn", _pair(_KV_PAIR), _multiple(16)),
        Backend("cpu_attn", _layouts(_CPU_JOINED), _multiple(16)),
        Backend("flash_attn_diffkv", _layouts(_KV_JOINED, _JOINED_NHD, _JOINED_HND), _multiple(16)),
        Backend(
            "triton_attn",
            _pair(_KV_PAIR),
            _multiple(16),
            {"int8_per_token_head": _pair(_SCALED_PAIR), "fp8_per_token_head": _pair(_SCALED_PAIR)},
        ),
        Backend("triton_attn_diffkv", _layouts(_KV_JOINED, _JOINED_NHD, _JOINED_HND), _multiple(16)),
        Backend("flex_attention", _layouts(_KV_PAIR, _FLEX, _FLEX), _multiple(16)),
        Backend("rocm_aiter_fa", _layouts(_KV_PAIR), _listed(16, 32)),
        Backend("rocm_aiter_unified_attn", _layouts(_KV_PAIR), _multiple(16)),
        Backend("rocm_attn", _layouts(_KV_FIRST), _multiple(16)),
        Backend("flashmla", _rows(_ROWS_BLOCKS_FIRST), _listed(64)),
        Backend("flashmla_sparse", _rows(), _listed(64), {"fp8_ds_mla": _rows(row="row_size")}),
        Backend("xpu_mla_sparse", _rows(), _multiple(1)),
        Backend("flashinfer_mla_sparse", _rows(), _listed(32, 64)),
        Backend("flashinfer_mla_sparse_sm120", _rows(row=656), _listed(64, 256), {"fp8_ds_mla": _rows(row="row_size")}),
        Backend("rocm_aiter_mla", _rows(_ROWS_LAYERS_FIRST), _multiple(1)),
        Backend("triton_mla", _rows(_ROWS_BLOCKS_FIRST), _multiple(16)),
        Backend("rocm_aiter_mla_sparse", _rows(), _listed(1, 64)),
        Backend("aiter_triton_mla", _rows(_ROWS_LAYERS_FIRST), _multiple(1)),
        Backend("tokenspeed_mla", _rows(_ROWS_LAYERS_FIRST), _listed(32, 64)),
        Backend(
            "flashinfer",
            _layouts(_KV_PAIR, _PAIR_NHD, _FLASHINFER_HND),
            _listed(16, 32, 64),
            {"nvfp4": _layouts(_NVFP4_PAIR, _PAIR_NHD, _FLASHINFER_HND)},
        ),
        Backend("flash_attn_mla", _rows(_ROWS_BLOCKS_FIRST), _multiple(16)),
        Backend("cutlass_mla", _rows(_ROWS_BLOCKS_FIRST), _listed(128)),
        Backend("flashinfer_mla", _rows(_ROWS_BLOCKS_FIRST), _listed(32, 64)),
    )
}


NAMED_LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
"""Permutations of [layers, blocks, heads, tokens, content]: vLLM 0.32 and later, `KVCacheLayout`. K and V of a token
lie one after the other in the content axis."""


def named_layout(name: str, *, has_v: bool) -> AttentionLayout:
    """The layout called `name`; `has_v`: the content is a K row and a V row, not one latent row."""
    order = tuple("LBHNC".index(letter) for letter in name)
    content = "row_size + row_size_v" if has_v else "row_size"
    shape = tuple(parse_extent(axis) for axis in ("num_blocks", "num_kv_heads", "block_size", content))
    return AttentionLayout(shape, tuple(axis - 1 for axis in order if axis > 0), order)


def backend_named(name: str) -> Backend:
    """Raises `SpecInvalid`, listing the registered names."""
    try:
        return BACKENDS[name]
    except KeyError:
        known = ", ".join((*sorted(BACKENDS), *NAMED_LAYOUTS))
        meant = nearest(name, (*BACKENDS, *NAMED_LAYOUTS))
        raise SpecInvalid(
            f"backend {shorten(name)!r} is not known; use one of {known}, or write it out{meant}"
        ) from None


def default_backend(kind: str, *, same_widths: bool, kv_quant: str | None) -> Backend:
    """The backend assumed when a layer names none; the plan says which one it was."""
    if kind in ("mla_attention", "sliding_window_mla"):
        return BACKENDS["triton_mla" if kv_quant is None else "flashmla_sparse"]
    if kv_quant is not None:
        return BACKENDS["flashinfer" if kv_quant == "nvfp4" else "triton_attn"]
    return BACKENDS["flash_attn" if same_widths else "flash_attn_diffkv"]
