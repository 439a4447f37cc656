"""Why a request for blocks is refused, in numbers."""

from __future__ import annotations

from collections.abc import Mapping

from kvpage.errors import Conflict, KvpageError, OutOfBlocks, SpecInvalid
from kvpage.pages.arrays import Arrays
from kvpage.pages.cut_group import CutGroup
from kvpage.pages.flat_group import FlatGroup
from kvpage.pages.ledger import SlabLedger

Group = FlatGroup | CutGroup


def out_of_blocks(held: Group, ledger: SlabLedger, wanted: int) -> OutOfBlocks:
    free = held.num_free + ledger.free.count * held.blocks_per_slab
    available = held.num_open + ledger.num_available * held.blocks_per_slab
    return OutOfBlocks(
        f"group {held.group} needs {wanted} blocks and can have {available}: {free} are free, evicting gives "
        f"{available - free} more; free some, or wait until others do",
        details={"group": held.group, "wanted": wanted, "available": available, "evictable": available - free},
    )


def out_of_slabs(
    held: Mapping[int, Group], ledger: SlabLedger, wanted: Mapping[int, int], needed: Mapping[int, int]
) -> OutOfBlocks:
    for group, count in wanted.items():
        if needed[group] > ledger.num_available:
            return out_of_blocks(held[group], ledger, count)
    return OutOfBlocks(
        f"groups {sorted(wanted)} together need {sum(needed.values())} slabs besides those they use, and can have "
        f"{ledger.num_available}: {ledger.free.count} are free, evicting gives {ledger.num_idle} more; free some "
        f"blocks, or wait until others do",
        details={
            "wanted": {str(group): count for group, count in wanted.items()},
            "slabs_wanted": sum(needed.values()),
            "slabs_available": ledger.num_available,
            "slabs_evictable": ledger.num_idle,
        },
    )


class Fragmented(OutOfBlocks):
    """There may be blocks, but none that follow each other."""


def out_of_run(held: Group, wanted: int, longest: int) -> Fragmented:
    return Fragmented(
        f"group {held.group} needs {wanted} blocks that follow each other; the longest run, with what evicting gives, "
        f"has {longest}; ask for shorter runs, or free some blocks",
        details={"group": held.group, "wanted": wanted, "available": longest},
    )


def why_not(arrays: Arrays, group: int, block: int, state: str) -> KvpageError:
    """Why nothing can be done with a block that the caller says is theirs."""
    slab = block // arrays.geometry.blocks_per_slab[group]
    if slab == 0:
        return SpecInvalid(f"block {block} of group {group} is in slab 0, the null block's, which nobody is ever given")
    owner = arrays.owners_at[slab] - 1
    if owner not in (-1, group):
        return Conflict(f"block {block} of group {group} is in slab {slab}, which was given to group {owner}")
    return Conflict(f"block {block} of group {group} {state}; it may have been freed before")
