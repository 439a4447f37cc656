"""Views built by torch itself, and the rules of a plan proved by listing every byte.

Nothing here computes a stride: torch does, by cutting pages out of a table of pages and permuting. `faults` is the slow
twin of `Plan.check()`: it writes down which byte belongs to which block of which view and looks for collisions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from planner import layouts
from planner.one_layer import is_state
from planner.rows import ITEM_SIZE_BYTES

Json = dict[str, Any]
TORCH_DTYPES: dict[int, torch.dtype] = {1: torch.uint8, 2: torch.float16, 4: torch.float32}
NUMPY_DTYPES: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32}
NOBODY = -1


def expected_views(layer: Json, page: int, num_blocks: int, offset: int) -> list[Json]:
    """The views of an expanded layer whose `num_blocks` pages are `page` bytes apart, the first at `offset`."""
    if is_state(layer):
        return state_views(layer, page, num_blocks, offset)
    item = ITEM_SIZE_BYTES[layer["dtype"]]
    parts = layouts.kernel_blocks_per_block(layer)
    logical = layouts.extents(layouts.kernel_view_of(layer), num_blocks * parts)
    order = layer["layout"]["order"]
    physical = [logical[axis] for axis in order]
    if layouts.is_whole(layer):
        outside = order.index(layer["layout"]["shape"].index("num_blocks"))  # axes of extent 1
        tensor = cut_from_pages(physical[outside:], page // parts, item).view(physical)
    else:
        tensor = meta(physical, item)
    tensor = tensor.permute([order.index(axis) for axis in range(len(order))])
    return [describe(tensor, item, offset)]


def interleaved_view(layer: Json, num_blocks: int, place: int, num_layers: int) -> Json:
    """The view of one of `num_layers` equal layers that lie in one tensor by the layered stride order."""
    item = ITEM_SIZE_BYTES[layer["dtype"]]
    parts = layouts.kernel_blocks_per_block(layer)
    logical = [num_layers, *layouts.extents(layouts.kernel_view_of(layer), num_blocks * parts)]
    order = layer["layout"]["layered"]
    tensor = meta([logical[axis] for axis in order], item)
    tensor = tensor.permute([order.index(axis) for axis in range(len(order))])[place]
    return describe(tensor, item, int(tensor.storage_offset()) * item)


def state_views(layer: Json, page: int, num_blocks: int, offset: int) -> list[Json]:
    views, start = [], 0
    for shape, dtype in zip(layer["shapes"], layer["dtypes"], strict=True):
        item = ITEM_SIZE_BYTES[dtype]
        tensor = cut_from_pages([num_blocks, *shape], page, item)
        views.append(describe(tensor, item, offset + start))
        start += int(np.prod(shape, dtype=object)) * item
    return views


def meta(shape: list[int], item: int) -> torch.Tensor:
    return torch.empty(shape, dtype=TORCH_DTYPES[item], device="meta")


def cut_from_pages(physical: list[int], page: int, item: int) -> torch.Tensor:
    """A tensor whose first axis walks over whole pages and whose other axes fill the start of each."""
    row = meta(physical[1:], item)
    pages = meta([physical[0], page // item], item)
    return pages[:, : row.numel()].view(physical)  # torch refuses a view that would need a copy


def describe(tensor: torch.Tensor, item: int, offset: int) -> Json:
    return {
        "shape": tuple(tensor.shape),
        "strides_bytes": tuple(stride * item for stride in tensor.stride()),
        "offset_bytes": offset,
    }


# --- every byte -----------------------------------------------------------------------------------


def element_addresses(view: Any) -> npt.NDArray[np.int64]:
    """The first byte of every element of a view (shape, strides_bytes, offset_bytes), in logical order."""
    at = np.full(view.shape, view.offset_bytes, dtype=np.int64)
    for axis, (extent, stride) in enumerate(zip(view.shape, view.strides_bytes, strict=True)):
        steps = np.arange(extent, dtype=np.int64) * stride
        at = at + steps.reshape([-1 if other == axis else 1 for other in range(len(view.shape))])
    return at


def blocks_by_byte(view: Any, block_axis: int, num_blocks: int, buffer_size_bytes: int) -> npt.NDArray[np.int64]:
    """For each byte of the buffer the block whose data the view keeps there, or `NOBODY`."""
    item = ITEM_SIZE_BYTES[view.dtype]
    block = np.arange(view.shape[block_axis]) * num_blocks // view.shape[block_axis]
    block = block.reshape([-1 if axis == block_axis else 1 for axis in range(len(view.shape))])
    table = np.full(buffer_size_bytes, NOBODY, dtype=np.int64)
    at = element_addresses(view)
    for byte in range(item):
        table[at + byte] = block
    return table


def slabs_by_byte(view: Any, block_axis: int, plan: Any, blocks_per_slab: int) -> npt.NDArray[np.int64]:
    """For each byte of the buffer the slab of the block whose data the view keeps there, or `NOBODY`: what groups must
    agree on, as a slab belongs to one of them at a time."""
    num_blocks = plan.num_blocks * blocks_per_slab
    table = blocks_by_byte(view, block_axis, num_blocks, plan.buffer_size_bytes)
    return np.where(table == NOBODY, NOBODY, table // blocks_per_slab)


def faults(plan: Any, block_axes: dict[str, int]) -> set[str]:
    """Which of the rules the plan breaks; `block_axes`: position of the block axis in each layer's views."""
    found: set[str] = set()
    for layer in plan.layers.values():
        owner = plan.layers.get(layer.kv_sharing_target)
        if layer.kv_sharing_target is not None and (owner is None or owner.tensors != layer.tensors):
            found.add("share")
    owners = [layer for layer in plan.layers.values() if layer.kv_sharing_target is None]
    views = [(layer, view) for layer in owners for view in layer.tensors]
    for _, view in views:
        found |= own_faults(view, plan.buffer_size_bytes)
    if found & {"outside", "uneven"}:
        return found  # the table below has no room for it
    tables = [
        (layer.group, slabs_by_byte(view, block_axes[layer.name], plan, plan.groups[layer.group].blocks_per_slab))
        for layer, view in views
    ]
    for i, (group, table) in enumerate(tables):
        for other_group, other in tables[:i]:
            both = (table != NOBODY) & (other != NOBODY)
            if group == other_group and both.any():
                found.add("same group")
            if group != other_group and (table != other)[both].any():
                found.add("other group")
    return found


def own_faults(view: Any, buffer_size_bytes: int) -> set[str]:
    found = set()
    item = ITEM_SIZE_BYTES[view.dtype]
    at = element_addresses(view)
    if at.min() < 0 or at.max() + item > buffer_size_bytes:
        found.add("outside")
    if any(stride % item for stride in view.strides_bytes) or view.offset_bytes % item:
        found.add("uneven")
    if np.unique(at).size != at.size or (np.diff(np.sort(at.ravel())) < item).any():
        found.add("aliases itself")
    return found


def as_array(view: Any, raw: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
    """The view as NumPy makes it over the raw bytes of the buffer: no copy."""
    item = ITEM_SIZE_BYTES[view.dtype]
    cells = raw[view.offset_bytes :]
    cells = cells[: cells.size // item * item].view(NUMPY_DTYPES[item])
    return np.lib.stride_tricks.as_strided(cells, view.shape, view.strides_bytes)
