"""From pages to tensors: offset, shape and byte strides of every view in the one buffer.

Strides are those of the *physical* shape (the logical one permuted by the stride order), with the stride of the block
axis widened for padded or packed pages, permuted back: vLLM 0.24.0, `_reshape_kv_cache_tensors`.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvpage.dtypes import item_size_bytes
from kvpage.latent_specs import LatentSpec
from kvpage.layers import BackendLayout, Layer, kernel_block_size, logical_shape
from kvpage.planner.groups import Grouping
from kvpage.plans import TensorView
from kvpage.specs import AttentionSpec, LayerSpec, MambaSpec
from kvpage.strides import dense_strides, inverse, permute


@dataclass(frozen=True, slots=True)
class Placement:
    """Where each slot's first page begins, how far its pages are apart, and the size of the buffer that holds all.

    `page_strides_bytes` is empty when layers are interleaved: then heads or tokens lie outside the layers. Slabs have
    no slots.
    """

    slot_offsets_bytes: tuple[int, ...]
    page_strides_bytes: tuple[int, ...]
    buffer_size_bytes: int


def place_slots(grouping: Grouping, num_blocks: int) -> Placement:
    """Packed: blocks one after the other, the slots of each side by side. Else regions one after the other, with a gap
    of a few bytes only where an item size would not divide the offset."""
    pages = grouping.slot_page_sizes_bytes
    if grouping.slab_bytes is not None:
        return Placement((), (), grouping.slab_bytes * num_blocks)
    if grouping.arrangement == "packed":
        strides = (grouping.bytes_per_block,) * len(pages)
        return Placement(grouping.slot_offsets_in_block_bytes, strides, grouping.bytes_per_block * num_blocks)
    offsets, end = [], 0
    for slot, page in enumerate(pages):
        end += -end % grouping.slot_item_sizes(slot)
        offsets.append(end)
        end += page * num_blocks
    return Placement(tuple(offsets), pages if grouping.arrangement == "regions" else (), end)


def fit_num_blocks(grouping: Grouping, memory_bytes: int) -> int:
    """Blocks that `memory_bytes` holds, gaps between regions counted."""
    num_blocks = memory_bytes // grouping.bytes_per_block
    while num_blocks > 0 and place_slots(grouping, num_blocks).buffer_size_bytes > memory_bytes:
        num_blocks -= 1
    return num_blocks


class ViewMaker:
    """Tensors of layers for a number of slabs, each one block where nothing else is said.

    Layers of one spec and layout get the same shapes and strides.
    """

    def __init__(self, num_slabs: int) -> None:
        self._num_blocks = num_slabs
        # By identity: hashing a layout costs more than making its views, and equal layers share these objects.
        self._at_zero: dict[tuple[int, int, int], tuple[TensorView, ...]] = {}

    def views(
        self, layer: Layer, spec: LayerSpec, offset_bytes: int, page_stride_bytes: int, blocks_per_slab: int = 1
    ) -> tuple[TensorView, ...]:
        """The layer's tensors for its final `spec`, pages `page_stride_bytes` apart."""
        key = (id(spec), id(layer.backend), page_stride_bytes)
        if key not in self._at_zero:
            num_blocks = self._num_blocks * blocks_per_slab
            self._at_zero[key] = _views_at_zero(layer.backend, spec, num_blocks, page_stride_bytes)
        return tuple(_moved(view, offset_bytes) for view in self._at_zero[key])

    def interleaved(self, layer: Layer, spec: LayerSpec, place: int, num_layers: int) -> tuple[TensorView, ...]:
        """The view of the `place`-th of `num_layers` equal layers that share every block."""
        assert layer.backend is not None  # check_arrangement
        return (_interleaved_view(layer.backend, spec, self._num_blocks, place, num_layers),)


def _moved(view: TensorView, offset_bytes: int) -> TensorView:
    return TensorView(
        name=view.name,
        dtype=view.dtype,
        shape=view.shape,
        strides_bytes=view.strides_bytes,
        offset_bytes=view.offset_bytes + offset_bytes,
        block_axis=view.block_axis,
        kernel_blocks_per_block=view.kernel_blocks_per_block,
    )


def _views_at_zero(
    backend: BackendLayout | None, spec: LayerSpec, num_blocks: int, page_stride_bytes: int
) -> tuple[TensorView, ...]:
    if isinstance(spec, MambaSpec):
        return _state_views(spec, num_blocks, page_stride_bytes)
    assert backend is not None  # every attention layer has one
    shape = logical_shape(spec, backend, num_blocks)
    order = backend.layout.order
    strides = list(dense_strides(permute(shape, order), _item(spec)))
    if page_stride_bytes != spec.real_page_size_bytes:
        # What lies outside the block axis has extent 1, or check_can_pad would have refused: its stride is never used.
        strides[inverse(order)[backend.layout.block_axis]] = page_stride_bytes
    return (_attention_view(backend, spec, shape, permute(strides, inverse(order)), 0),)


def _interleaved_view(
    backend: BackendLayout, spec: LayerSpec, num_blocks: int, place: int, num_layers: int
) -> TensorView:
    order = backend.layout.layered_stride_order
    assert order is not None  # check_arrangement
    shape = (num_layers, *logical_shape(spec, backend, num_blocks))
    strides = permute(dense_strides(permute(shape, order), _item(spec)), inverse(order))
    return _attention_view(backend, spec, shape[1:], strides[1:], place * strides[0])


def _attention_view(
    backend: BackendLayout, spec: LayerSpec, shape: tuple[int, ...], strides_bytes: tuple[int, ...], offset_bytes: int
) -> TensorView:
    assert isinstance(spec, AttentionSpec | LatentSpec)
    return TensorView(
        name="kv",
        dtype=spec.dtype,
        shape=shape,
        strides_bytes=strides_bytes,
        offset_bytes=offset_bytes,
        block_axis=backend.layout.block_axis,
        kernel_blocks_per_block=spec.storage_block_size // kernel_block_size(spec, backend),
    )


def _item(spec: LayerSpec) -> int:
    return spec.item_sizes_bytes[0]


def _state_views(spec: MambaSpec, num_blocks: int, page_stride_bytes: int) -> tuple[TensorView, ...]:
    """Each state begins where the one before ends, inside the page; its blocks are a whole page apart."""
    return tuple(
        TensorView(
            name=f"state.{index}",
            dtype=dtype,
            shape=(num_blocks, *shape),
            strides_bytes=(page_stride_bytes, *dense_strides(shape, item_size_bytes(dtype))),
            offset_bytes=start,
            block_axis=0,
            kernel_blocks_per_block=1,
        )
        for index, (shape, dtype, start) in enumerate(
            zip(spec.shapes, spec.dtypes, spec.state_offsets_bytes, strict=True)
        )
    )
