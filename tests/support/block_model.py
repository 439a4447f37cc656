"""An obviously correct block pool: dictionaries of what is held and what keeps content, and slow questions to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvpage.pages.clearing import NOTHING, Clearing

Block = tuple[int, int]
"""Group, block id."""
Age = tuple[int, ...]
"""When something was last used: the operation, then blocks before slabs, then the tail of a batch before its head."""


@dataclass
class BlockModel:
    num_slabs: int
    blocks_per_slab: tuple[int, ...]
    held: Counter[Block] = field(default_factory=Counter)
    content: dict[Block, Age] = field(default_factory=dict)
    idle_since: dict[int, Age] = field(default_factory=dict)
    last_owner: dict[int, int] = field(default_factory=dict)
    clearing: Clearing = NOTHING
    stale: set[tuple[int, int]] = field(default_factory=set)
    """(slab, index) of blocks that must be cleared before they are used."""
    operations: int = 0

    # --- looking ------------------------------------------------------------------------------------------------------

    def slab_of(self, block: Block) -> int:
        return block[1] // self.blocks_per_slab[block[0]]

    def place_of(self, block: Block) -> tuple[int, int]:
        return self.slab_of(block), block[1] % self.blocks_per_slab[block[0]]

    def owners(self) -> dict[int, int]:
        """Slab -> group, for slabs of which something is held or keeps content."""
        return {self.slab_of(block): block[0] for block in [*self.held, *self.content]}

    def is_in_use(self, slab: int) -> bool:
        return any(self.slab_of(block) == slab for block in self.held)

    def cached(self, group: int) -> list[Block]:
        return [block for block in self.content if block[0] == group and block not in self.held]

    def blocks_of(self, group: int, slab: int) -> list[Block]:
        cut = self.blocks_per_slab[group]
        return [(group, slab * cut + index) for index in range(cut)]

    def free_in(self, group: int, slab: int) -> int:
        blocks = self.blocks_of(group, slab)
        return sum(block not in self.held and block not in self.content for block in blocks)

    def free_slabs(self) -> set[int]:
        return set(range(1, self.num_slabs)) - self.owners().keys()

    def idle_slabs(self) -> set[int]:
        return {slab for slab in self.owners() if not self.is_in_use(slab)}

    def open_blocks(self, group: int) -> int:
        """What is not held of the group's slabs in use."""
        mine = [slab for slab, owner in self.owners().items() if owner == group and self.is_in_use(slab)]
        return sum(block not in self.held for slab in mine for block in self.blocks_of(group, slab))

    def is_possible(self, counts: dict[int, int]) -> bool:
        slabs = 0
        for group, count in counts.items():
            slabs += -(-max(0, count - self.open_blocks(group)) // self.blocks_per_slab[group])
        return slabs <= len(self.free_slabs()) + len(self.idle_slabs())

    def available(self, group: int) -> int:
        slabs = len(self.free_slabs()) + len(self.idle_slabs())
        return self.open_blocks(group) + slabs * self.blocks_per_slab[group]

    def available_clean(self, group: int) -> int:
        """Without evicting."""
        own = [slab for slab, owner in self.owners().items() if owner == group]
        return sum(self.free_in(group, slab) for slab in own) + len(self.free_slabs()) * self.blocks_per_slab[group]

    def next_of(self, group: int) -> tuple[set[int], set[Block]]:
        """Where the next block of the group comes from: slabs it may be of, and what is evicted for it."""
        own = [slab for slab, owner in self.owners().items() if owner == group and self.free_in(group, slab)]
        for candidates in (
            [slab for slab in own if self.is_in_use(slab)],
            [slab for slab in own if not self.is_in_use(slab)],
        ):
            if candidates:
                return {min(candidates, key=lambda slab: (self.free_in(group, slab), slab))}, set()
        if self.free_slabs():
            return self.free_slabs(), set()
        cached = self.cached(group) if self.blocks_per_slab[group] > 1 else []
        oldest = min(cached, key=self.content.__getitem__, default=None)
        slab_age = min((self.idle_since[slab] for slab in self.idle_slabs()), default=None)
        if oldest is not None and (slab_age is None or self.content[oldest] < slab_age):
            return {self.slab_of(oldest)}, {oldest}
        slabs = {slab for slab in self.idle_slabs() if self.idle_since[slab] == slab_age}
        return slabs, {block for block in self.content if self.slab_of(block) in slabs}

    # --- doing --------------------------------------------------------------------------------------------------------

    def evict(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            assert block in self.content, f"{block} had no content to evict"
            assert block not in self.held, f"{block} was evicted while it was held"
            del self.content[block]
            self.give_up(block)
        self.settle()

    def hand_out(self, group: int, ids: Iterable[int]) -> None:
        for number in ids:
            block = (group, int(number))
            slab = self.slab_of(block)
            assert 1 <= slab < self.num_slabs
            assert block not in self.held, f"{block} has two owners"
            assert block not in self.content, f"{block} was handed out with content"
            assert self.owners().get(slab, group) == group, f"{block} is in the slab of group {self.owners()[slab]}"
            if self.last_owner.get(slab, group) != group and self.clearing.on_group_change:
                self.stale |= {(slab, index) for index in range(max(self.blocks_per_slab))}
            self.last_owner[slab] = group
            self.held[block] = 1
        self.settle()

    def retain(self, group: int, ids: Iterable[int]) -> None:
        for number in ids:
            self.held[group, number] += 1
        self.settle()

    def free(self, group: int, ids: list[int]) -> None:
        ended: list[Block] = []
        for number in dict.fromkeys(ids):
            block = (group, number)
            self.held[block] -= ids.count(number)
            assert self.held[block] >= 0
            if not self.held[block]:
                del self.held[block]
                ended.append(block)
        kept = [block for block in ended if block in self.content]
        for place, block in enumerate(kept):
            self.content[block] = (self.operations, 0, -place)
        for block in set(ended) - set(kept):
            self.give_up(block)
        self.settle()

    def commit(self, group: int, ids: Iterable[int]) -> None:
        for number in ids:
            self.content.setdefault((group, number), (self.operations, 0, 0))

    def drop(self, group: int, ids: Iterable[int]) -> None:
        for number in ids:
            if self.content.pop((group, number), None) and (group, number) not in self.held:
                self.give_up((group, number))
        self.settle()

    def give_up(self, block: Block) -> None:
        """Nobody has it any more, and somebody else may get it."""
        if self.clearing.is_on_reuse(block[0]):
            self.stale.add(self.place_of(block))

    def to_clear(self, group: int, ids: Iterable[int]) -> set[int]:
        """Of these blocks; they are clean then."""
        found = {
            number
            for number in ids
            if self.place_of((group, number)) in self.stale and (group, number) not in self.content
        }
        self.stale -= {self.place_of((group, number)) for number in found}
        return found

    def settle(self) -> None:
        """Slabs become idle, or are so no more."""
        idle, owners = self.idle_slabs(), self.owners()
        for slab in set(self.idle_since) - idle:
            del self.idle_since[slab]
        for slab in idle - set(self.idle_since):
            is_cut = self.blocks_per_slab[owners[slab]] > 1
            self.idle_since[slab] = (self.operations, 1) if is_cut else self._last_use(slab)

    def reopen(self) -> None:
        """What no array says is found again: a slab is idle since the last use of what it keeps."""
        self.idle_since = {slab: self._last_use(slab) for slab in self.idle_slabs()}

    def _last_use(self, slab: int) -> Age:
        return max(age for block, age in self.content.items() if self.slab_of(block) == slab)
