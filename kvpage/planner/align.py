"""Hybrid alignment: attention block size and state padding fitted to each other before page sizes are unified.

vLLM 0.24.0 does this when it verifies a hybrid model's config; it must run after kernel block sizes are known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import gcd, lcm

from kvpage.errors import CannotUnify, FieldError, SpecInvalid
from kvpage.latent_specs import LatentSpec
from kvpage.layers import Layer
from kvpage.planner.unify import Decided
from kvpage.plans import Decision
from kvpage.specs import MAX_BYTES, LayerSpec, ceil_div

_OFFER = "vLLM first aligns states and attention: set align_hybrid to true for that"
MLA_MIN_BLOCK = 128  # tokens; vLLM 0.24.0 aligns MLA hybrids to at least this


def align_hybrid(layers: tuple[Layer, ...], *, keep_drafts: bool = False) -> tuple[Layer, ...]:
    """Give every attention layer one block size t, and every state a page of t tokens of the narrowest target layer.

    With S the largest state page and b the fewest bytes per token among the target's attention layers (the draft's
    where there is no other): A = max(smallest kernel block, configured block; MLA: 128), t = A × ⌈S / (A × b)⌉, rounded
    up to the least common multiple of the backends' smallest kernel blocks, never below a configured block size.
    `keep_drafts`: layers of a draft keep their blocks, where there are others; vLLM 0.24.0 aligns them too.
    The very same layers come back when there are no states or no attention.
    """
    attention = [(layer, layer.spec) for layer in layers if layer.spec is not None and layer.spec.is_attention]
    states = [layer.spec for layer in layers if layer.spec is not None and not layer.spec.is_attention]
    if not states or not attention:
        return layers
    _refuse_what_does_not_align(layers)
    target = [pair for pair in attention if not pair[0].draft] or attention
    token_bytes = min(spec.real_page_size_bytes // spec.block_size for _, spec in target)
    block = _aligned_block_size(attention, target, states, token_bytes)
    if block > MAX_BYTES // max(spec.real_page_size_bytes for _, spec in attention):
        detail = "align_hybrid finds no block with a page below 2^62 bytes; use kernel block sizes with more in common"
        raise SpecInvalid(detail, errors=[FieldError("/align_hybrid", detail)])
    kept = {id(layer) for layer in layers if keep_drafts and layer.draft and len(target) < len(attention)}
    return tuple(
        layer
        if id(layer) in kept and layer.spec is not None and layer.spec.is_attention
        else _aligned(layer, block, block * token_bytes)
        for layer in layers
    )


def is_hybrid(layers: Sequence[Layer]) -> bool:
    """Whether there are states beside attention, which vLLM aligns before it plans."""
    return len({layer.spec.is_attention for layer in layers if layer.spec is not None}) == 2


@contextmanager
def alignment_offered(is_unaligned: bool) -> Iterator[None]:
    """`CannotUnify` says what may help where a hybrid was not aligned."""
    try:
        yield
    except CannotUnify as error:
        if not is_unaligned:
            raise
        raise CannotUnify(f"{error.message}; {_OFFER}", details=error.details, errors=error.errors) from None


def with_offer(decided: Mapping[str, Decided]) -> dict[str, Decided]:
    """Where pages had to be changed, the reasons of states also say that alignment could have done it."""
    if all(choice.decision == "keep" for choice in decided.values()):
        return dict(decided)
    return {
        name: choice if choice.spec.is_attention else replace(choice, reason=f"{choice.reason}; {_OFFER}")
        for name, choice in decided.items()
    }


def _refuse_what_does_not_align(layers: Sequence[Layer]) -> None:
    for layer in layers:
        if isinstance(layer.spec, LatentSpec) and layer.spec.compress_ratio > 1:
            detail = (
                f"layer {layer.name!r} has compress_ratio {layer.spec.compress_ratio}; align_hybrid has no rule for it"
            )
            raise SpecInvalid(detail, errors=[layer.fault(detail, "compress_ratio")])
        if layer.spec is not None and layer.spec.page_size_padded is not None:
            detail = (
                f"layer {layer.name!r} asks for page_size_padded {layer.spec.page_size_padded}, but align_hybrid sets "
                f"block and page sizes itself; leave one of the two out"
            )
            raise SpecInvalid(detail, errors=[layer.fault(detail, "page_size_padded")])


def _aligned_block_size(
    attention: Sequence[tuple[Layer, LayerSpec]],
    target: Sequence[tuple[Layer, LayerSpec]],
    states: Sequence[LayerSpec],
    token_bytes: int,
) -> int:
    unit = max(max(_kernel_block(layer), spec.block_size) for layer, spec in target)
    if any(spec.kind == "mla_attention" for _, spec in target):
        unit = max(unit, MLA_MIN_BLOCK)
    block = unit * ceil_div(max(state.page_size_bytes for state in states), unit * token_bytes)
    configured = max(spec.block_size for _, spec in attention)
    kernel = lcm(*(_kernel_block(layer) for layer, _ in attention))
    # The state's page, block × token_bytes, must be a multiple of its item sizes as well.
    alignment = lcm(*(state.page_alignment for state in states))
    step = lcm(kernel, alignment // gcd(alignment, token_bytes))
    return ceil_div(max(block, configured), step) * step


def _kernel_block(layer: Layer) -> int:
    return layer.backend.kernel_block_sizes.smallest if layer.backend else 1


def _aligned(layer: Layer, block_size: int, state_page_bytes: int) -> Layer:
    if layer.spec is None:
        return layer
    if layer.spec.is_attention:
        return replace(layer, spec=layer.spec.with_block_size(block_size))
    return replace(layer, spec=layer.spec.with_padding(state_page_bytes))


def with_alignment(before: LayerSpec, decided: Decided) -> Decided:
    """`decided` for an aligned layer, judged against the spec `before` alignment: what the request asked for."""
    after = decided.spec
    scaled, padded = after.block_size != before.block_size, after.page_size_bytes != after.real_page_size_bytes
    if not scaled and not padded:
        return decided
    decision: Decision = "scale" if not padded else "scale_pad" if scaled else "pad"
    if scaled:
        how = f"block size {before.block_size} → {after.block_size}, so that a page holds the largest state"
    else:
        how = f"page padded from {after.real_page_size_bytes:,} to {after.page_size_bytes:,} bytes, an attention page"
    return Decided(after, decision, f"align_hybrid: {how}; then {decided.decision}: {decided.reason}")
