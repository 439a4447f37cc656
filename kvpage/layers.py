"""A named layer as the planner sees it: what it stores (spec) and how its backend lays that out (layout)."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from kvpage.backends import AttentionLayout, KernelBlockSizes
from kvpage.errors import FieldError, LayoutUnsupported
from kvpage.specs import LayerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendLayout:
    """A backend's layout for one layer: registered under `name`, or written out ("custom")."""

    name: str
    layout: AttentionLayout
    kernel_block_sizes: KernelBlockSizes

    def can_pad(self, block_size: int) -> bool:
        """The backend reads padded pages: by block stride, each page one piece in memory, not split by the kernel."""
        layout = self.layout
        return (
            layout.indexes_kv_by_block_stride
            and layout.has_outermost_blocks
            and not self.kernel_block_sizes.splits(block_size)
        )


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

    def fault(self, detail: str, field: str = "") -> FieldError:
        """`detail` as an error at this layer, or at one of its fields."""
        return FieldError(f"/layers/{self.position}" + (f"/{field}" if field else ""), detail)


def check_page_fits_layout(spec: LayerSpec, backend: BackendLayout) -> None:
    """Raises `LayoutUnsupported` unless one block of the layout holds exactly the bytes the spec needs, or when a
    padded page would have to lie inside other data or be split by the kernel."""
    try:
        page = backend.layout.logical_shape({**spec.symbols(), "num_blocks": 1})
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
    if not backend.layout.has_outermost_blocks:
        raise LayoutUnsupported(
            f"page padded from {spec.real_page_size_bytes} to {spec.page_size_bytes} bytes, but in the layout of "
            f"backend {backend.name} blocks are not the outermost axis in memory, so a page is not one piece; use a "
            f"layout with num_blocks outermost, or no padding"
        )
    if backend.kernel_block_sizes.splits(spec.block_size):
        kernel = backend.kernel_block_sizes.largest_within(spec.block_size)
        raise LayoutUnsupported(
            f"page padded from {spec.real_page_size_bytes} to {spec.page_size_bytes} bytes, but backend "
            f"{backend.name} splits a block of {spec.block_size} tokens into kernel blocks of {kernel}; use "
            f"block_size {kernel}, or no padding"
        )
