"""One page size for all layers: keep, scale the block size, pad the page, or refuse (vLLM PR 45181, as in 0.24.0)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvpage.errors import CannotUnify
from kvpage.layers import Layer
from kvpage.plans import Decision
from kvpage.specs import LayerSpec


@dataclass(frozen=True, slots=True)
class Decided:
    """A layer's spec after a decision, and why."""

    spec: LayerSpec
    decision: Decision
    reason: str


def unify_page_sizes(layers: Sequence[Layer]) -> dict[str, Decided]:
    """Give every layer the largest page size.

    For a page p below the largest page P, in this order (vLLM 0.24.0, `unify_kv_cache_spec_page_size`):
    P mod p = 0: the block size times P / p; where 0.24.0 does this to recurrent states too, whose page does not grow,
    the state's page is padded and its block kept. Else an attention layer whose backend reads pages by block stride is
    padded to P. Else `CannotUnify`, naming the first such layer.
    """
    widest = max(layers, key=lambda layer: _spec(layer).page_size_bytes)
    largest = _spec(widest).page_size_bytes
    decided: dict[tuple[int, int], Decided] = {}  # by identity: equal layers share these objects
    result: dict[str, Decided] = {}
    for layer in layers:
        key = (id(layer.spec), id(layer.backend))
        if key not in decided:
            decided[key] = _decide(layer, largest, widest)
        result[layer.name] = decided[key]
    return result


def _spec(layer: Layer) -> LayerSpec:
    assert layer.spec is not None  # layers without a cache are taken out before
    return layer.spec


def _decide(layer: Layer, largest: int, widest: Layer) -> Decided:
    spec = _spec(layer)
    page = spec.page_size_bytes
    if page == largest:
        return Decided(spec, "keep", f"page of {page:,} bytes is the largest")
    if largest % page == 0:
        return _scale(spec, largest) if spec.is_attention else _pad(spec, largest, "its size is fixed by its states")
    if (
        spec.is_attention
        and largest % spec.page_alignment == 0
        and layer.backend
        and layer.backend.can_pad(spec, largest)
    ):
        why = f"{largest:,} is not a multiple of {page:,} and {layer.backend.name} reads pages by block stride"
        return _pad(spec, largest, why)
    raise _cannot_unify(layer, largest, widest)


def _scale(spec: LayerSpec, largest: int) -> Decided:
    ratio = largest // spec.page_size_bytes
    scaled = spec.with_padding(None).with_block_size(spec.block_size * ratio)
    why = (
        f"{ratio} pages of {spec.page_size_bytes:,} bytes make the largest, {largest:,}: "
        f"block size {spec.block_size} → {scaled.block_size}"
    )
    if scaled.page_size_bytes == largest:
        return Decided(scaled, "scale", why)
    # A page that was padded or aligned before leaves a gap behind the larger block's data.
    gap = largest - scaled.real_page_size_bytes
    return Decided(scaled.with_padding(largest), "scale_pad", f"{why}, {gap:,} bytes of each page are padding")


def _pad(spec: LayerSpec, largest: int, why: str) -> Decided:
    gap = largest - spec.real_page_size_bytes
    share = gap / largest
    reason = f"page padded from {spec.real_page_size_bytes:,} to {largest:,} bytes ({share:.1%} padding): {why}"
    return Decided(spec.with_padding(largest), "pad", reason)


def _cannot_unify(layer: Layer, largest: int, widest: Layer) -> CannotUnify:
    spec = _spec(layer)
    detail = (
        f"layer {layer.name!r} has pages of {spec.page_size_bytes} bytes, the largest (layer {widest.name!r}) has "
        f"{largest}, not a multiple, and the pages cannot be padded: {_why_not_padded(layer, largest)}"
    )
    return CannotUnify(
        detail,
        details={
            "layer": layer.name,
            "page_size_bytes": spec.page_size_bytes,
            "largest_layer": widest.name,
            "largest_page_size_bytes": largest,
        },
        errors=[layer.fault(detail)],
    )


def _why_not_padded(layer: Layer, largest: int) -> str:
    spec, backend = _spec(layer), layer.backend
    if backend is None:
        return (
            f"a recurrent state is padded by this rule only when its page divides the largest; "
            f"set align_hybrid to true, or page_size_padded to {largest}"
        )
    if backend.can_pad(spec, largest):
        alignment = spec.page_alignment
        return f"{largest} is not a multiple of this layer's alignment of {alignment} bytes; change page sizes"
    rows = spec.storage_block_size
    if not backend.kernel_block_sizes.takes_whole(rows):
        return (
            f"the kernels of backend {backend.name} do not read a block of {rows} rows as one; "
            f"use block_size {backend.kernel_block_sizes.smallest}"
        )
    if not backend.keeps_pages_whole(spec):
        return f"in the layout of backend {backend.name} a page is not one piece; choose one with num_blocks outermost"
    return (
        f"backend {backend.name} does not read pages through the stride of the block axis; choose one that does "
        f"(such as flash_attn or triton_mla), or sizes whose pages divide {largest}"
    )
