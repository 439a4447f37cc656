"""What the demo's processes write and expect: which group owns which block, and the value of every element.

Both sides compute this from the plan alone; they share nothing but the pool.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kvpage.client.attachment import Attachment
from kvpage.plans import LayerPlan, Plan

UNTOUCHED = 0xA5  # every byte before anything is written
_MODULUS = 251  # prime, so that neighbouring pages differ; below 256, so that bfloat16 holds each value exactly


@dataclass(frozen=True, slots=True)
class Counts:
    """Elements compared, and bytes that had to be untouched."""

    values: int = 0
    untouched_bytes: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.values + other.values, self.untouched_bytes + other.untouched_bytes)


def owned_blocks(plan: Plan, group: int) -> list[int]:
    """Blocks are dealt to the groups in turn; block 0, the null block, to none."""
    return list(range(1 + group, plan.num_blocks, len(plan.groups)))


def write_pool(kv: Attachment) -> int:
    """Fill the buffer with `UNTOUCHED`, then write every owned block through its layers' views. Elements written."""
    kv.buffer.fill_(UNTOUCHED)
    written = 0
    for block, view, expected in _pages(kv):
        view[block] = expected
        written += expected.numel()
    if kv.buffer.is_cuda:
        torch.cuda.synchronize(kv.buffer.device)  # sharing gives no order: it is there for others only now
    return written


def check_pool(kv: Attachment) -> Counts:
    """Compare every value and every byte that nobody may have touched. Raises `ValueError` at the first difference."""
    counts = Counts()
    for block, view, expected in _pages(kv):
        if not torch.equal(view[block], expected):
            raise ValueError(f"block {block} of {tuple(view.shape)} {view.dtype} does not hold what was written")
        counts += Counts(values=expected.numel())
    for layers in _slots(kv.plan).values():
        counts += _check_slot(kv, layers)
    return counts


def _pages(kv: Attachment) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """(block, its view with the block axis first, what the block holds) for every owned block of every tensor."""
    for number, layer in enumerate(kv.plan.layers.values()):
        if layer.group is None:
            continue
        blocks = owned_blocks(kv.plan, layer.group)
        for index, (view, tensor) in enumerate(zip(layer.tensors, kv.tensors[layer.name], strict=True)):
            by_block = tensor.movedim(view.block_axis, 0)
            shape = by_block.shape[1:]
            numbers = torch.arange(shape.numel() + _MODULUS, dtype=torch.int32, device=tensor.device)
            counting = (numbers % _MODULUS).to(tensor.dtype)
            for block in blocks:
                start = (number * 31 + index * 17 + block * 7) % _MODULUS
                yield block, by_block, counting[start : start + shape.numel()].view(shape)


def _slots(plan: Plan) -> dict[int, list[LayerPlan]]:
    """Layers by the region of memory they share."""
    slots: dict[int, list[LayerPlan]] = {}
    for layer in plan.layers.values():
        if layer.tensors:
            slots.setdefault(layer.tensors[0].offset_bytes, []).append(layer)
    return slots


def _check_slot(kv: Attachment, layers: list[LayerPlan]) -> Counts:
    """In one region: the padding behind each written page, and whole pages that no layer of this region owns."""
    page, start = layers[0].page_size_bytes, layers[0].tensors[0].offset_bytes
    pages = kv.buffer[start : start + page * kv.plan.num_blocks].view(kv.plan.num_blocks, page)
    unowned = set(range(kv.plan.num_blocks))
    counts = Counts()
    for layer in layers:
        blocks = owned_blocks(kv.plan, layer.group or 0)
        unowned.difference_update(blocks)
        counts += _require_untouched(pages[blocks, layer.real_page_size_bytes :], f"padding of layer {layer.name}")
    return counts + _require_untouched(pages[sorted(unowned)], "a page that no layer owns")


def _require_untouched(found: torch.Tensor, what: str) -> Counts:
    if not bool((found == UNTOUCHED).all()):
        raise ValueError(f"{what} was written to")
    return Counts(untouched_bytes=found.numel())
