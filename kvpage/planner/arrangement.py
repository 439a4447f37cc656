"""How the layers of a plan share the buffer, and which layouts can live together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from kvpage.errors import LayoutUnsupported
from kvpage.layers import BackendLayout, Layer, check_layouts, logical_shape
from kvpage.planner.groups import Grouping
from kvpage.specs import LayerSpec
from kvpage.strides import permute


def arrange(grouping: Grouping, layers: Sequence[Layer], *, layered: bool) -> Grouping:
    """`grouping` with the arrangement that the layers' layouts ask for, proven possible.

    `layered`: one cross-layer buffer by the backend's layered stride order. Raises `LayoutUnsupported`.
    """
    with_backend = [layer for layer in layers if layer.backend is not None and layer.spec is not None]
    # What fitted the layer as it was asked for must fit the block and page that it was given.
    decided = ((layer, grouping.decided[layer.name].spec) for layer in with_backend)
    check_layouts([replace(layer, spec=spec) for layer, spec in decided if spec is not layer.spec])
    if layered:
        return _interleaved(grouping, with_backend, layers, "layered is true")
    asked = {layer.backend.arrangement: layer for layer in with_backend if layer.backend is not None}
    if len(asked) > 1:
        first, second = list(asked.values())[:2]
        _refuse(
            second, f"layers {first.name!r} and {second.name!r} place the layers axis differently; use one layout order"
        )
    by_name = {layer.name: layer for layer in layers}
    if "interleaved" in asked:
        name = asked["interleaved"].name
        return _interleaved(grouping, with_backend, layers, f"the layout of layer {name!r} puts heads outside layers")
    if "packed" in asked or grouping.arrangement == "packed":
        return _packed(grouping, by_name)
    _check_sharing(grouping, by_name)
    return grouping


def _refuse(layer: Layer, detail: str) -> None:
    raise LayoutUnsupported(detail, errors=[layer.fault(detail, "backend")])


def _packed(grouping: Grouping, layers: Mapping[str, Layer]) -> Grouping:
    """Side by side in every block: each page one piece that the kernel reads as one block."""
    packed = replace(grouping, arrangement="packed")
    for name, choice in grouping.decided.items():
        backend = layers[name].backend
        if backend is None:
            continue
        if not backend.keeps_pages_whole(choice.spec):
            _refuse(
                layers[name], f"layer {name!r} shares each block with others, so its page must be one piece in memory"
            )
        if not backend.kernel_block_sizes.takes_whole(choice.spec.storage_block_size):
            detail = f"layer {name!r} shares each block with others, so its kernel must read a block as one"
            _refuse(layers[name], detail)
        if not backend.steps_by_whole_rows(choice.spec, packed.bytes_per_block):
            detail = f"layer {name!r} shares blocks of {packed.bytes_per_block} bytes, not a whole number of its rows"
            _refuse(layers[name], detail)
    return packed


def _interleaved(grouping: Grouping, attention: Sequence[Layer], layers: Sequence[Layer], why: str) -> Grouping:
    """One buffer over all layers: they must be alike, and none may be padded."""
    first = next(iter(attention), None)
    if first is None or first.spec is None or first.backend is None:
        return grouping
    for layer in layers:
        if layer.spec is not None and (layer.spec != first.spec or layer.backend != first.backend):
            _refuse(layer, f"{why}, so all layers must be alike, but {layer.name!r} differs from {first.name!r}")
    if first.backend.layout.layered_stride_order is None:
        _refuse(first, f"{why}, but backend {first.backend.name} has no layered stride order")
    if first.spec.page_size_bytes != first.spec.real_page_size_bytes:
        _refuse(first, f"{why}, so pages cannot be padded, but layer {first.name!r} asks for padding")
    return replace(grouping, arrangement="interleaved")


def _check_sharing(grouping: Grouping, layers: Mapping[str, Layer]) -> None:
    """A layer whose pages are not one piece shares memory only with layers that lie in it just alike."""
    for names in grouping.slots:
        split = [name for name in names if not _is_whole(layers[name], grouping.decided[name].spec)]
        for name in names if split else ():
            first = layers[split[0]]
            if _pattern(layers[name], grouping) != _pattern(first, grouping):
                _refuse(
                    first,
                    f"layer {first.name!r} keeps K and V of all blocks apart in memory, so it can share memory only "
                    f"with layers of the same layout and page size, not with layer {name!r}; choose a backend with "
                    f"num_blocks outermost",
                )


def sharing_pattern(layer: Layer, grouping: Grouping) -> tuple[object, ...] | None:
    """What layers must have in common with `layer` to share its memory; None where any page of its size may."""
    return None if _is_whole(layer, grouping.decided[layer.name].spec) else _pattern(layer, grouping)


def _is_whole(layer: Layer, spec: LayerSpec) -> bool:
    return layer.backend is None or layer.backend.keeps_pages_whole(spec)


def _pattern(layer: Layer, grouping: Grouping) -> tuple[object, ...]:
    spec, backend = grouping.decided[layer.name].spec, layer.backend
    if backend is None:
        return ("states", spec)
    return (_physical_shape(spec, backend), backend.layout.order, spec.item_sizes_bytes)


def _physical_shape(spec: LayerSpec, backend: BackendLayout) -> tuple[int, ...]:
    return permute(logical_shape(spec, backend, 1), backend.layout.order)
