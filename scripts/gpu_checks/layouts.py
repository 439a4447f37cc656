"""The page layouts whose reading is compared: dense, padded and slab, with block strides from 32 KiB to 4 MiB."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

KIB = 1 << 10
MIB = 1 << 20
NUM_KV_HEADS = 8
ITEM_BYTES = 2  # bfloat16
PASS_BYTES = 128 * MIB
"""Of pages, read in one pass over all layers: more than the L2 cache of today's GPUs (an H200 has 60 MB)."""
MAX_EXTENT_BYTES = 1024 * MIB
NUM_SEQUENCES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where the pages of some layers lie: block b of layer l at `l * layer_stride_bytes + b * block_stride_bytes`."""

    name: str
    head_size: int
    block_size: int
    """Tokens."""
    block_stride_bytes: int
    num_layers: int
    layer_stride_bytes: int
    num_blocks: int
    """Of each layer; a multiple of `NUM_SEQUENCES`."""

    @property
    def page_bytes(self) -> int:
        """Keys and values of one block of one layer."""
        return 2 * self.block_size * NUM_KV_HEADS * self.head_size * ITEM_BYTES

    @property
    def extent_bytes(self) -> int:
        last = (self.num_layers - 1) * self.layer_stride_bytes + (self.num_blocks - 1) * self.block_stride_bytes
        return last + self.page_bytes

    @property
    def num_tokens(self) -> int:
        """Read in one pass over all layers."""
        return self.num_layers * self.num_blocks * self.block_size

    def dense(self) -> Layout:
        """The same pages, one directly behind the other, layer by layer."""
        layer_bytes = self.num_blocks * self.page_bytes
        return replace(self, name="dense", block_stride_bytes=self.page_bytes, layer_stride_bytes=layer_bytes)

    def views(self, buffer: Any) -> list[Any]:
        """For each layer a tensor of shape (blocks, 2, tokens, heads, elements) over `buffer`, a bfloat16 tensor."""
        row, head = NUM_KV_HEADS * self.head_size, self.head_size
        shape = (self.num_blocks, 2, self.block_size, NUM_KV_HEADS, self.head_size)
        strides = (self.block_stride_bytes // ITEM_BYTES, self.block_size * row, row, head, 1)
        start = buffer.storage_offset()  # as_strided counts from the storage's beginning, also in a slice
        return [
            buffer.as_strided(shape, strides, start + layer * self.layer_stride_bytes // ITEM_BYTES)
            for layer in range(self.num_layers)
        ]


def layouts() -> Iterator[Layout]:
    for block_size in (8, 16, 64, 256, 1024):
        yield _padded("padded 4:3", 96, block_size, 128)
    for block_size in (8, 16, 64, 256, 512):
        yield _padded("padded 3:2", 128, block_size, 192)
    for block_stride_bytes in (64 * KIB, 256 * KIB, MIB, 4 * MIB):
        yield _slab(8, block_stride_bytes)
    for block_size in (16, 256):
        yield _slab(block_size, 4 * MIB)


def _padded(name: str, head_size: int, block_size: int, widest_head_size: int) -> Layout:
    """Pages of a layer with narrow heads, padded to those of a layer with wide ones; each layer in its own region."""
    block_stride_bytes = 2 * block_size * NUM_KV_HEADS * widest_head_size * ITEM_BYTES
    layout = Layout(
        name=name,
        head_size=head_size,
        block_size=block_size,
        block_stride_bytes=block_stride_bytes,
        num_layers=4,
        layer_stride_bytes=0,
        num_blocks=0,
    )
    num_blocks = _whole(PASS_BYTES // (layout.num_layers * layout.page_bytes))
    return replace(layout, num_blocks=num_blocks, layer_stride_bytes=num_blocks * block_stride_bytes)


def _slab(block_size: int, block_stride_bytes: int) -> Layout:
    """The pages of many layers side by side in each block; as many of the layers are read as make a pass."""
    layout = Layout(
        name="slab",
        head_size=128,
        block_size=block_size,
        block_stride_bytes=block_stride_bytes,
        num_layers=1,
        layer_stride_bytes=0,
        num_blocks=0,
    )
    num_layers = min(block_stride_bytes // layout.page_bytes, 16)
    num_blocks = _whole(PASS_BYTES // (num_layers * layout.page_bytes))
    return replace(layout, num_layers=num_layers, layer_stride_bytes=layout.page_bytes, num_blocks=num_blocks)


def _whole(num_blocks: int) -> int:
    """As many for every sequence."""
    return num_blocks // NUM_SEQUENCES * NUM_SEQUENCES
