"""The layouts that the GPU report compares, and how they are read, in host memory."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from gpu_checks.layouts import KIB, MAX_EXTENT_BYTES, NUM_SEQUENCES, PASS_BYTES, layouts
from gpu_checks.strides import Scene, gather_and_attend, same


def test_the_sweep_has_all_layouts_with_strides_from_32_kib_to_4_mib() -> None:
    strides_bytes = {layout.block_stride_bytes for layout in layouts()}
    assert (min(strides_bytes), max(strides_bytes)) == (32 * KIB, 4096 * KIB)
    ratios = {layout.name: layout.block_stride_bytes / layout.page_bytes for layout in layouts()}
    assert ratios["padded 4:3"] == pytest.approx(4 / 3)
    assert ratios["padded 3:2"] == pytest.approx(3 / 2)
    assert {layout.name for layout in layouts()} == {"padded 4:3", "padded 3:2", "slab"}


def test_layouts_fit_the_memory_of_the_sweep_and_no_two_pages_overlap() -> None:
    for layout in layouts():
        for one in (layout, layout.dense()):
            assert one.num_blocks >= NUM_SEQUENCES
            assert one.num_blocks % NUM_SEQUENCES == 0
            assert one.num_layers * one.num_blocks * one.page_bytes > PASS_BYTES / 2
            starts = sorted(
                layer * one.layer_stride_bytes + block * one.block_stride_bytes
                for layer in range(one.num_layers)
                for block in range(one.num_blocks)
            )
            assert all(end - start >= one.page_bytes for start, end in pairwise(starts))
            assert one.extent_bytes == starts[-1] + one.page_bytes
        assert layout.extent_bytes <= MAX_EXTENT_BYTES
        assert layout.dense().extent_bytes <= PASS_BYTES


@pytest.mark.parametrize("name", ["padded 4:3", "slab"])
def test_gathering_reads_the_same_values_through_strides_and_from_dense_pages(name: str) -> None:
    """And other values once a page differs, so that the sweep's own comparison can fail."""
    layout = next(layout for layout in layouts() if layout.name == name)
    layout = replace(
        layout,
        num_blocks=16,
        num_layers=2,
        layer_stride_bytes=layout.page_bytes if name == "slab" else 16 * layout.block_stride_bytes,
    )
    scene = Scene(
        torch, torch.zeros(MAX_EXTENT_BYTES // 64 + PASS_BYTES // 64, dtype=torch.uint8), MAX_EXTENT_BYTES // 64
    )
    read = gather_and_attend(scene, layout)
    strided, dense = scene.views(layout), scene.dense_views(layout)
    for layer in range(layout.num_layers):
        assert same(read(strided[layer]), read(dense[layer]))
    assert not same(read(strided[0]), read(strided[1]))
    strided[1][5, 1, 3, 2, 1] += 100
    assert not same(read(strided[1]), read(dense[1]))
