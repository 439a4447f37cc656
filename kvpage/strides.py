"""Stride arithmetic: permutations, dense strides, spans. Units are whatever the caller counts in (bytes here).

A *stride order* is `order[i]` = the logical axis at physical position `i`, outermost first. Example: logical shape
(blocks 5, kv 2, tokens 16, heads 8, size 64) with order (0, 1, 3, 2, 4) lies in memory as (5, 2, 8, 16, 64); dense
strides of that are (16384, 8192, 1024, 64, 1), and back in logical order (16384, 8192, 64, 1024, 1).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod


def is_permutation(order: Sequence[int]) -> bool:
    """True when `order` holds each of 0 … len(order) - 1 once."""
    return sorted(order) == list(range(len(order)))


def inverse(order: Sequence[int]) -> tuple[int, ...]:
    """The permutation that undoes `order`: `inverse(order)[axis]` is the physical position of a logical axis."""
    positions = [0] * len(order)
    for position, axis in enumerate(order):
        positions[axis] = position
    return tuple(positions)


def permute(values: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """`values` reordered so that position i holds `values[order[i]]`."""
    return tuple(values[axis] for axis in order)


def dense_strides(shape: Sequence[int], item: int = 1) -> tuple[int, ...]:
    """Row-major strides of `shape` in units where one element is `item` long."""
    strides = [item] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return tuple(strides)


def span(shape: Sequence[int], strides: Sequence[int], item: int = 1) -> int:
    """Distance from the first byte of the first element to just past the last byte of the last one; 0 when empty."""
    if prod(shape) == 0:
        return 0
    return item + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))


def is_nested(shape: Sequence[int], strides: Sequence[int], item: int = 1) -> bool:
    """True when, from the smallest stride up, each stride steps over all that lies below it.

    Then no two index tuples share an address. The reverse does not hold for every strided view, but it does for
    every permutation of a dense array with widened strides, which is all that kvpage makes.
    """
    reach = item
    for stride, extent in sorted((s, n) for n, s in zip(shape, strides, strict=True) if n > 1):
        if stride < reach:
            return False
        reach += (extent - 1) * stride
    return True


def joined(axes: Iterable[tuple[int, int]], item: int = 1) -> tuple[int, list[tuple[int, int]]]:
    """Length of one contiguous run, and the axes (stride, extent) that repeat it."""
    size = item
    outer: list[tuple[int, int]] = []
    for stride, extent in sorted(axes):
        if stride == size and not outer:
            size *= extent
        else:
            outer.append((stride, extent))
    return size, outer
