"""Groups whose blocks are cleared before somebody else has them: when one is given up, that is noted first.

Batches do so (`clears_on_reuse`). One block is given up as a batch of one, so that the short way of other groups has
nothing to ask.
"""

from __future__ import annotations

from kvpage.pages.cut_group import CutGroup
from kvpage.pages.flat_group import FlatGroup


class ReusedFlatGroup(FlatGroup):
    clears_on_reuse = True

    def _evict_one(self) -> int | None:
        return None

    def free_one(self, block: int) -> bool:
        return False


class ReusedCutGroup(CutGroup):
    clears_on_reuse = True

    def _evict_one(self) -> int | None:
        return None

    def free_one(self, block: int) -> bool:
        return False
