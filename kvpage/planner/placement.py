"""From pages to tensors: offset, shape and byte strides of every view in the one buffer.

Strides are those of the *physical* shape (the logical one permuted by the stride order), with the stride of the block
axis widened for padded pages, permuted back: vLLM 0.24.0, `_reshape_kv_cache_tensors`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import lcm

from kvpage.dtypes import item_size_bytes
from kvpage.errors import LayoutUnsupported
from kvpage.layers import BackendLayout, Layer, check_can_pad, kernel_block_size, logical_shape
from kvpage.planner.grouping import Grouping
from kvpage.plans import TensorView
from kvpage.specs import AttentionSpec, LayerSpec, MambaSpec, MLAAttentionSpec
from kvpage.strides import dense_strides, inverse, permute


@dataclass(frozen=True, slots=True)
class Placement:
    """Where each slot begins, and the size of the buffer that holds them all."""

    slot_offsets_bytes: tuple[int, ...]
    buffer_size_bytes: int


def place_slots(grouping: Grouping, num_blocks: int) -> Placement:
    """Regions one after the other; a gap of a few bytes only where an item size would not divide the offset."""
    offsets: list[int] = []
    end = 0
    for names, page in zip(grouping.slots, grouping.slot_page_sizes_bytes, strict=True):
        items = lcm(*(item for name in names for item in grouping.decided[name].spec.item_sizes_bytes))
        end += -end % items
        offsets.append(end)
        end += page * num_blocks
    return Placement(tuple(offsets), end)


def fit_num_blocks(grouping: Grouping, memory_bytes: int) -> int:
    """Blocks that `memory_bytes` holds, gaps between regions counted."""
    num_blocks = memory_bytes // grouping.bytes_per_block
    while num_blocks > 0 and place_slots(grouping, num_blocks).buffer_size_bytes > memory_bytes:
        num_blocks -= 1
    return num_blocks


def check_sharing(grouping: Grouping, layers: Mapping[str, Layer]) -> None:
    """Raises `LayoutUnsupported` when a layer whose blocks are not outermost shares memory with another layout."""
    for names in grouping.slots:
        inside = [name for name in names if not _is_outermost(layers[name])]
        if not inside:
            continue
        first = layers[inside[0]]
        for name in names:
            if _pattern(layers[name], grouping) != _pattern(first, grouping):
                detail = (
                    f"layer {first.name!r} keeps K and V of all blocks apart in memory, so it can share memory only "
                    f"with layers of the same layout and page size, not with layer {name!r}; choose a backend with "
                    f"num_blocks outermost"
                )
                raise LayoutUnsupported(detail, errors=[first.fault(detail, "backend")])


def _is_outermost(layer: Layer) -> bool:
    return layer.backend is None or layer.backend.layout.has_outermost_blocks


def _pattern(layer: Layer, grouping: Grouping) -> tuple[object, ...]:
    spec = grouping.decided[layer.name].spec
    if layer.backend is None:
        return ("states", spec)
    order = layer.backend.layout.order
    return (permute(logical_shape(spec, layer.backend, 1), order), order, spec.item_sizes_bytes)


class ViewMaker:
    """Tensors of layers for a number of blocks. Layers of one spec and layout get the same shapes and strides."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        # By identity: hashing a layout costs more than making its views, and equal layers share these objects.
        self._at_zero: dict[tuple[int, int], tuple[TensorView, ...]] = {}

    def views(self, layer: Layer, spec: LayerSpec, offset_bytes: int) -> tuple[TensorView, ...]:
        """The layer's tensors for its final `spec`. Raises `LayoutUnsupported` where its pages cannot be padded."""
        key = (id(spec), id(layer.backend))
        if key not in self._at_zero:
            try:
                self._at_zero[key] = _views_at_zero(layer.backend, spec, self._num_blocks)
            except LayoutUnsupported as error:
                raise LayoutUnsupported(error.message, errors=[layer.fault(error.message, "backend")]) from None
        return tuple(_moved(view, offset_bytes) for view in self._at_zero[key])


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


def _views_at_zero(backend: BackendLayout | None, spec: LayerSpec, num_blocks: int) -> tuple[TensorView, ...]:
    if isinstance(spec, MambaSpec):
        return _state_views(spec, num_blocks)
    assert backend is not None
    assert isinstance(spec, AttentionSpec | MLAAttentionSpec)
    return (_attention_view(backend, spec, num_blocks),)


def _attention_view(backend: BackendLayout, spec: AttentionSpec | MLAAttentionSpec, num_blocks: int) -> TensorView:
    layout = backend.layout
    shape = logical_shape(spec, backend, num_blocks)
    strides = list(dense_strides(permute(shape, layout.order), item_size_bytes(spec.dtype)))
    if spec.page_size_bytes != spec.real_page_size_bytes:
        check_can_pad(spec, backend)
        strides[0] = spec.page_size_bytes  # the block axis is outermost, or the check would have refused
    return TensorView(
        name="kv",
        dtype=spec.dtype,
        shape=shape,
        strides_bytes=permute(strides, inverse(layout.order)),
        offset_bytes=0,
        block_axis=layout.block_axis,
        kernel_blocks_per_block=spec.block_size // kernel_block_size(spec, backend),
    )


def _state_views(spec: MambaSpec, num_blocks: int) -> tuple[TensorView, ...]:
    """Each state begins where the one before ends, inside the page; its blocks are a whole page apart."""
    return tuple(
        TensorView(
            name=f"state.{index}",
            dtype=dtype,
            shape=(num_blocks, *shape),
            strides_bytes=(spec.page_size_bytes, *dense_strides(shape, item_size_bytes(dtype))),
            offset_bytes=start,
            block_axis=0,
            kernel_blocks_per_block=1,
        )
        for index, (shape, dtype, start) in enumerate(
            zip(spec.shapes, spec.dtypes, spec.state_offsets_bytes, strict=True)
        )
    )
