"""`scale_then_pad`: the largest page for all, filled by the largest block that fits, then padded (vLLM PR 53499)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import lcm

from kvpage.errors import CannotUnify
from kvpage.layers import Layer
from kvpage.planner.unify import Decided, unify_page_sizes
from kvpage.specs import LayerSpec

DEFAULT_MAX_BLOCK_LCM = 1024
_MOST_TOKENS = 2**20  # of a block chosen for its common multiple
_LEAST_SHARE = 4
"""A block for the sake of the common multiple fills at least this part of the page; a smaller one would save prefix
hits at the price of most of the memory."""


@dataclass(frozen=True, slots=True)
class BlockLimits:
    """Bounds on the block sizes of a plan, in tokens; None: none but those of the rule itself."""

    max_block_size: int | None = None
    max_block_lcm: int | None = None


def scale_then_pad(layers: Sequence[Layer], limits: BlockLimits) -> dict[str, Decided]:
    """Give every layer the largest page size P.

    A smaller page takes the largest block that its kernels read as one and that fits, and is padded for the rest;
    states are padded. Where the common multiple of its block with those of the layers that have the largest page would
    pass 1,024 tokens and both those blocks, the largest block that keeps it lower is taken, if it fills a quarter of
    the page (vLLM PR 53007); with a `max_block_lcm`, whatever it fills. A layer that cannot be padded is left to
    `unify_page_sizes`.

    Raises `CannotUnify` naming the layer.
    """
    specs = [layer.spec for layer in layers if layer.spec is not None]
    largest = max(spec.page_size_bytes for spec in specs)
    anchors = [spec.block_size for spec in specs if spec.is_attention and spec.page_size_bytes == largest]
    fit = _Fit(largest, lcm(*anchors), limits)
    decided: dict[tuple[int, int], Decided | None] = {}  # by identity: equal layers share these objects
    for layer in layers:
        key = (id(layer.spec), id(layer.backend))
        if key not in decided:
            decided[key] = fit.decide(layer)
    result = {layer.name: decided[id(layer.spec), id(layer.backend)] for layer in layers}
    return _with_unified(layers, result)


def _with_unified(layers: Sequence[Layer], decided: Mapping[str, Decided | None]) -> dict[str, Decided]:
    """What was not decided is decided by the rule without scaling to legal blocks, beside the largest page."""
    if all(choice is not None for choice in decided.values()):
        return {name: choice for name, choice in decided.items() if choice is not None}
    widest = max(layers, key=lambda layer: 0 if layer.spec is None else layer.spec.page_size_bytes)
    left = [layer for layer in layers if decided[layer.name] is None]
    unified = unify_page_sizes([*left, widest])
    return {name: choice if choice is not None else unified[name] for name, choice in decided.items()}


@dataclass(frozen=True, slots=True)
class _Fit:
    page: int
    anchor: int
    limits: BlockLimits

    def decide(self, layer: Layer) -> Decided | None:
        spec = layer.spec
        assert spec is not None
        if spec.page_size_bytes == self.page:
            return Decided(spec, "keep", f"page of {self.page:,} bytes is the largest")
        if not spec.is_attention:
            if self.page % spec.page_alignment:
                return None
            return self._padded(spec, spec, "its size is fixed by its states")
        block = self._block(layer, spec)
        return None if block is None else self._padded(spec, *block)

    def _padded(self, before: LayerSpec, after: LayerSpec, why: str) -> Decided:
        gap = self.page - after.real_page_size_bytes
        scaled = after.block_size != before.block_size
        how = f"block size {before.block_size} → {after.block_size}: " if scaled else ""
        if gap == 0:
            return Decided(after, "scale", f"{how}its page fills the largest, {self.page:,} bytes; {why}")
        fill = f"{after.real_page_size_bytes:,} bytes in pages of {self.page:,} ({gap / self.page:.1%} padding)"
        reason = f"{how}{fill}; {why}"
        return Decided(after.with_padding(self.page), "scale_pad" if scaled else "pad", reason)

    def _block(self, layer: Layer, spec: LayerSpec) -> tuple[LayerSpec, str] | None:
        """The layer's spec with the block it gets, and why; None where no page of it may be padded."""
        bare = spec.with_padding(None)
        largest = self._largest(layer, bare)
        if largest is None:
            return None
        common = lcm(largest.block_size, self.anchor)
        bound = self.limits.max_block_lcm or max(DEFAULT_MAX_BLOCK_LCM, self.anchor)
        if common <= max(bound, 0 if self.limits.max_block_lcm else largest.block_size):
            return largest, "the largest block that fits"
        smaller = self._commensurate(layer, bare, largest.block_size, bound)
        if smaller is not None:
            return smaller, (
                f"a block of {largest.block_size} would fit, but has a common multiple of {common:,} tokens with "
                f"blocks of {self.anchor}"
            )
        if self.limits.max_block_lcm is not None:
            detail = (
                f"layer {layer.name!r} has no block with a common multiple of at most {bound} tokens with blocks of "
                f"{self.anchor}; raise max_block_lcm"
            )
            raise CannotUnify(detail, errors=[layer.fault(detail)])
        return largest, f"the largest block that fits; the common multiple of block sizes becomes {common:,} tokens"

    def _largest(self, layer: Layer, bare: LayerSpec) -> LayerSpec | None:
        assert layer.backend is not None  # every attention layer has one
        ratio = bare.block_size // bare.storage_block_size
        most = self.page * bare.block_size // bare.real_page_size_bytes
        rows = layer.backend.kernel_block_sizes.largest_up_to(min(most, self.limits.max_block_size or most) // ratio)
        return None if rows is None else self._fitted(layer, bare, rows * ratio)

    def _commensurate(self, layer: Layer, bare: LayerSpec, largest: int, bound: int) -> LayerSpec | None:
        assert layer.backend is not None
        ratio = bare.block_size // bare.storage_block_size
        most = min(largest - 1, bound, _MOST_TOKENS)
        for rows in reversed(layer.backend.kernel_block_sizes.from_to(1, most // ratio)):
            if lcm(rows * ratio, self.anchor) <= bound:
                fitted = self._fitted(layer, bare, rows * ratio)
                is_full = fitted is not None and fitted.real_page_size_bytes * _LEAST_SHARE >= self.page
                return fitted if is_full or self.limits.max_block_lcm is not None else None
        return None

    def _fitted(self, layer: Layer, bare: LayerSpec, block_size: int) -> LayerSpec | None:
        """With blocks of that size, if their page fills the largest or may be padded to it."""
        sized = bare.with_block_size(block_size)
        if sized.page_size_bytes > self.page:
            return None
        if sized.real_page_size_bytes == self.page:
            return sized
        can = layer.backend is not None and layer.backend.can_pad(sized, self.page)
        return sized if can and self.page % sized.page_alignment == 0 else None
