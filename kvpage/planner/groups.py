"""Groups of layers and the memory they share: what grouping decides and placement reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import lcm

from kvpage.layers import Arrangement
from kvpage.planner.unify import Decided
from kvpage.plans import Efficiency, FrontPoint, RejectedStrategy
from kvpage.specs import LayerSpec


@dataclass(frozen=True, slots=True)
class Group:
    """Layers with one block table. `spec` stands for all of them: blocks a request needs, block size, page size."""

    layers: tuple[str, ...]
    spec: LayerSpec
    page_size_bytes: int
    blocks_per_slab: int = 1
    offsets_in_block_bytes: tuple[int, ...] = ()
    """Where each layer's page begins in a block, where groups lie over each other in slabs; else slots say it."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a strategy says of the grouping it made."""

    strategy: str
    efficiency: Efficiency | None
    """None where the grouping is a part of a model's."""
    front: tuple[FrontPoint, ...]
    rejected: tuple[RejectedStrategy, ...]


@dataclass(frozen=True, slots=True)
class Grouping:
    """`slots[j]` names the layers over one piece of memory, a page of `slot_page_sizes_bytes[j]` in each block.

    In slabs there are no slots: each group has its own offsets.
    """

    groups: tuple[Group, ...]
    decided: Mapping[str, Decided]
    slots: tuple[tuple[str, ...], ...]
    slot_page_sizes_bytes: tuple[int, ...]
    arrangement: Arrangement = "regions"
    slab_bytes: int | None = None
    """Bytes of a slab, in the arrangement of that name."""
    verdict: Verdict | None = None
    charged_slots_bytes: int | None = None
    """Bytes that a request is charged for a block, where that is not what a block has (vLLM's latent windows)."""

    @property
    def slot_offsets_in_block_bytes(self) -> tuple[int, ...]:
        """Where each slot's page begins in a packed block."""
        return self._packed_offsets()[:-1]

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one slab: of one block over all slots, where a slab is one block."""
        if self.slab_bytes is not None:
            return self.slab_bytes
        return self._packed_offsets()[-1] if self.arrangement == "packed" else sum(self.slot_page_sizes_bytes)

    @property
    def charged_bytes_per_block(self) -> int:
        """What one block of a request counts as request bytes."""
        return self.bytes_per_block if self.charged_slots_bytes is None else self.charged_slots_bytes

    def block_bytes(self, group: Group) -> int:
        """Bytes that one block of `group` owns."""
        return self.bytes_per_block // group.blocks_per_slab

    def slot_item_sizes(self, slot: int) -> int:
        """Bytes that the slot's offset must be a multiple of."""
        return lcm(*(item for name in self.slots[slot] for item in self.decided[name].spec.item_sizes_bytes))

    def _packed_offsets(self) -> tuple[int, ...]:
        offsets, end = [], 0
        for slot, page in enumerate(self.slot_page_sizes_bytes):
            end += -end % self.slot_item_sizes(slot)
            offsets.append(end)
            end += page
        alignment = lcm(*(choice.spec.page_alignment for choice in self.decided.values()))
        return (*offsets, end + -end % alignment)


def deal(names: Sequence[str], num_groups: int) -> list[tuple[str, ...]]:
    """Group i takes layers i, i + num_groups, …: consecutive layers spread over groups, so pipeline stages balance."""
    return [tuple(names[start::num_groups]) for start in range(num_groups)]
