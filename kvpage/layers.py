"""A named layer as the planner sees it: what it stores (spec) and how its backend lays that out (layout)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from kvpage.backends import AttentionLayout, KernelBlockSizes
from kvpage.errors import FieldError, LayoutUnsupported
from kvpage.latent_specs import LatentSpec
from kvpage.specs import LayerSpec

Arrangement = Literal["regions", "packed", "interleaved", "slabs"]
"""How layers share the buffer: a region for each; side by side in every block; interleaved among a block's heads; a
group's layers side by side in the blocks of its slabs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendLayout:
    """A backend's layout for one layer: registered under `name`, a named layout, or written out ("custom")."""

    name: str
    layout: AttentionLayout
    kernel_block_sizes: KernelBlockSizes
    is_named_layout: bool = False
    index_bits: int = 64
    """Of the integers in which kernels multiply a block id by a stride in elements."""

    @property
    def arrangement(self) -> Arrangement:
        """Named layouts say where the layers axis lies; others leave it to a region for each layer."""
        if not self.is_named_layout or self.name.startswith("L"):
            return "regions"
        return "packed" if self.name.startswith("BL") else "interleaved"

    @property
    def layers_are_outermost(self) -> bool:
        """The layout says that each layer has memory of its own."""
        return self.is_named_layout and self.arrangement == "regions"

    def row_step_bytes(self, spec: LayerSpec) -> int:
        """Bytes that a block stride must be a multiple of for kernels that count rows from the first page on."""
        return spec.row_bytes if self.is_named_layout and isinstance(spec, LatentSpec) else 1

    def keeps_pages_whole(self, spec: LayerSpec) -> bool:
        """A page is one piece in memory, so it may be followed by padding."""
        if not self.layout.axes_outside_blocks:
            return True
        extents = self.layout.logical_shape({**spec.symbols(), "num_blocks": 1})
        return all(extents[axis] == 1 for axis in self.layout.axes_outside_blocks)

    def can_pad(self, spec: LayerSpec, page_size_bytes: int) -> bool:
        """The backend reads pages that step by `page_size_bytes` and are longer than their data.

        By vLLM's rules: a stride order must say that pages are read by block stride (0.24.0); a named layout is read so
        unless it holds latent rows, of which the page must then be a whole number (0.32 and later).
        """
        if not self.keeps_pages_whole(spec) or not self.kernel_block_sizes.takes_whole(spec.storage_block_size):
            return False
        if not self.is_named_layout:
            return self.layout.indexes_kv_by_block_stride
        return self.steps_by_whole_rows(spec, page_size_bytes)

    def steps_by_whole_rows(self, spec: LayerSpec, stride_bytes: int) -> bool:
        """False when pages of latent rows in a named layout would be a part of a row out of step."""
        return stride_bytes % self.row_step_bytes(spec) == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """`spec` is None for a layer that keeps no cache; `backend` is None for it and for recurrent states."""

    name: str
    kind: str
    spec: LayerSpec | None
    backend: BackendLayout | None
    draft: bool = False
    position: int = 0
    """Index in the request's `layers`, for errors."""
    kv_sharing_target: str | None = None
    """The layer whose cache this one reads instead of having its own."""

    def fault(self, detail: str, field: str = "") -> FieldError:
        """`detail` as an error at this layer, or at one of its fields."""
        return FieldError(f"/layers/{self.position}" + (f"/{field}" if field else ""), detail)


def check_layouts(layers: Sequence[Layer]) -> None:
    """`check_layout` of every layer; raises at the first that fails."""
    checked: set[tuple[int, int]] = set()  # by identity: equal layers share these objects
    for layer in layers:
        key = (id(layer.spec), id(layer.backend))
        if layer.spec is None or layer.backend is None or key in checked:
            continue
        checked.add(key)
        try:
            check_layout(layer.spec, layer.backend)
        except LayoutUnsupported as error:
            fault = layer.fault(error.message, "backend")
            raise LayoutUnsupported(f"{fault.pointer}: {error.message}", errors=[fault]) from None


def logical_shape(spec: LayerSpec, backend: BackendLayout, num_blocks: int) -> tuple[int, ...]:
    """The backend's shape for `num_blocks` blocks, in kernel blocks where those are smaller than `spec.block_size`.

    vLLM 0.24.0: a block of b tokens reaches a kernel of k tokens as b / k blocks, so block i is kernel blocks
    i × b / k … of the view. Raises `LayoutUnsupported` when b is a multiple of no kernel block size.
    """
    kernel = kernel_block_size(spec, backend)
    split = spec.storage_block_size // kernel
    return backend.layout.logical_shape({**spec.symbols(), "block_size": kernel, "num_blocks": num_blocks * split})


def kernel_block_size(spec: LayerSpec, backend: BackendLayout) -> int:
    """Rows of the blocks that the kernel sees: the largest accepted size that divides the block evenly."""
    kernel = backend.kernel_block_sizes.largest_within(spec.storage_block_size)
    if kernel is None:
        sizes = backend.kernel_block_sizes
        accepted = [*map(str, sizes.listed), *([f"multiples of {sizes.multiple_of}"] if sizes.multiple_of else [])]
        raise LayoutUnsupported(
            f"a block of {spec.storage_block_size} rows is no multiple of a block that the kernels of backend "
            f"{backend.name} accept "
            f"({', '.join(accepted)}); use {sizes.smallest_from(spec.storage_block_size)}"
        )
    return kernel


def check_layout(spec: LayerSpec, backend: BackendLayout) -> None:
    """Raises `LayoutUnsupported` unless one block of the layout holds exactly the bytes the spec needs, in whole kernel
    blocks, and a padded page is one piece."""
    try:
        page = logical_shape(spec, backend, 1)
    except KeyError as missing:
        raise LayoutUnsupported(
            f"layout of backend {backend.name} needs {missing}, which {spec.kind} has not"
        ) from None
    held = prod(page) * spec.item_sizes_bytes[0]
    if held != spec.real_page_size_bytes:
        raise LayoutUnsupported(
            f"layout {[axis.text for axis in backend.layout.shape]} of backend {backend.name} holds {held} bytes a "
            f"block, but the rows of this {spec.kind} layer need {spec.real_page_size_bytes}; choose a backend whose "
            f"rows have these widths (for K and V of different width one that joins them: head_size + head_size_v)"
        )
    if spec.page_size_bytes != spec.real_page_size_bytes:
        check_can_pad(spec, backend)


def check_can_pad(spec: LayerSpec, backend: BackendLayout) -> None:
    """Raises `LayoutUnsupported` when pages of this layout cannot be followed by padding."""
    if not backend.keeps_pages_whole(spec):
        raise LayoutUnsupported(
            f"page padded from {spec.real_page_size_bytes} to {spec.page_size_bytes} bytes, but in the layout of "
            f"backend {backend.name} blocks are not the outermost axis in memory, so a page is not one piece; use a "
            f"layout with num_blocks outermost, or no padding"
        )
    if not backend.steps_by_whole_rows(spec, spec.page_size_bytes):
        raise LayoutUnsupported(
            f"page padded from {spec.real_page_size_bytes} to {spec.page_size_bytes} bytes, but kernels of the named "
            f"layout {backend.name} address latent rows by number; use a multiple of the row"
        )
    if not backend.kernel_block_sizes.takes_whole(spec.storage_block_size):
        raise LayoutUnsupported(
            f"page padded from {spec.real_page_size_bytes} to {spec.page_size_bytes} bytes, but the kernels of backend "
            f"{backend.name} do not read a block of {spec.storage_block_size} rows as one; use block_size "
            f"{backend.kernel_block_sizes.smallest}, or no padding"
        )
