"""How many slabs kernels can address that compute block id times stride in 32-bit integers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvpage.layers import Layer
from kvpage.planner.groups import Grouping

_NARROW_BITS = 32


def most_slabs(grouping: Grouping, layers: Sequence[Layer]) -> tuple[int, str] | None:
    """The most slabs for which every layer's blocks × stride stay below 2^31 elements, and the layer that says so;
    None where all kernels count in 64 bits.

    The end of the last block counts, not its start: an offset inside it must not pass 2^31 either (vLLM PR 47671).
    """
    return min(_limits(grouping, layers), default=None)


def _limits(grouping: Grouping, layers: Sequence[Layer]) -> Iterator[tuple[int, str]]:
    strides = dict(_slab_strides(grouping))
    for layer in layers:
        if layer.backend is not None and layer.backend.index_bits == _NARROW_BITS and layer.name in strides:
            item = grouping.decided[layer.name].spec.item_sizes_bytes[0]
            yield (item << _NARROW_BITS - 1) // strides[layer.name], layer.name


def _slab_strides(grouping: Grouping) -> Iterator[tuple[str, int]]:
    """(layer, bytes from a slab to the next in its tensor)."""
    if grouping.arrangement != "regions":
        yield from ((name, grouping.bytes_per_block) for group in grouping.groups for name in group.layers)
        return
    for names, page in zip(grouping.slots, grouping.slot_page_sizes_bytes, strict=True):
        yield from ((name, page) for name in names)
