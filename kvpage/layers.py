"""A named layer as the planner sees it: what it stores (spec) and how its backend lays that out (layout)."""

from __future__ import annotations

from collections.abc import Sequence
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
            and self.kernel_block_sizes.takes_whole(block_size)
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
    split = spec.block_size // kernel
    return backend.layout.logical_shape({**spec.symbols(), "block_size": kernel, "num_blocks": num_blocks * split})


def kernel_block_size(spec: LayerSpec, backend: BackendLayout) -> int:
    """Tokens of the blocks that the kernel sees: the largest accepted size that divides the block evenly."""
    kernel = backend.kernel_block_sizes.largest_within(spec.block_size)
    if kernel is None:
        sizes = backend.kernel_block_sizes
        accepted = [*map(str, sizes.listed), *([f"multiples of {sizes.multiple_of}"] if sizes.multiple_of else [])]
        raise LayoutUnsupported(
            f"block_size {spec.block_size} is no multiple of a block that the kernels of backend {backend.name} accept "
            f"({', '.join(accepted)} tokens); use {sizes.smallest_from(spec.block_size)}"
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
    if not backend.layout.has_outermost_blocks:
        raise LayoutUnsupported(
            f"page padded from {spec.real_page_size_bytes} to {spec.page_size_bytes} bytes, but in the layout of "
            f"backend {backend.name} blocks are not the outermost axis in memory, so a page is not one piece; use a "
            f"layout with num_blocks outermost, or no padding"
        )
    if not backend.kernel_block_sizes.takes_whole(spec.block_size):
        raise LayoutUnsupported(
            f"page padded from {spec.real_page_size_bytes} to {spec.page_size_bytes} bytes, but the kernels of backend "
            f"{backend.name} do not read a block of {spec.block_size} tokens as one; use block_size "
            f"{backend.kernel_block_sizes.smallest}, or no padding"
        )
