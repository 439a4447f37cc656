"""A pool's arrays and what is found from them: opening, recovering, closing."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, Self

import numpy as np

from kvpage.errors import Conflict, SpecInvalid, shorten
from kvpage.pages.arrays import Arrays, Ints, state_bytes
from kvpage.pages.census import fault_of, take_census
from kvpage.pages.clearing import NOTHING, Clearing
from kvpage.pages.cut_group import CutGroup
from kvpage.pages.flat_group import FlatGroup, OnEvict
from kvpage.pages.geometry import Geometry
from kvpage.pages.ledger import SlabLedger
from kvpage.pages.reused_group import ReusedCutGroup, ReusedFlatGroup
from kvpage.plans import Plan

Group = FlatGroup | CutGroup
_KINDS: dict[tuple[bool, bool], type[FlatGroup] | type[CutGroup]] = {
    (False, False): FlatGroup,
    (False, True): ReusedFlatGroup,
    (True, False): CutGroup,
    (True, True): ReusedCutGroup,
}
"""By whether it cuts its slabs, and whether its blocks are cleared when they are used again."""


class PoolState:
    def __init__(
        self,
        geometry: Geometry,
        buffer: Any = None,
        *,
        on_evict: OnEvict = None,
        clearing: Clearing = NOTHING,
        times_held: Callable[[], Ints] | None = None,
    ) -> None:
        """`buffer`: writable, `state_bytes(geometry)` bytes, zeros for a new pool, else what a pool of this geometry
        left in it, even one that was killed; None: memory of this process.

        `on_evict(group, ids)` is called before content of these blocks goes because their room is needed; it must not
        call the pool. If it raises, the operation is refused with its exception, and the content stays.

        `times_held()`: how often each slot is held in truth, int32 of `num_slots`, where who holds what is written
        elsewhere and this buffer may have fallen behind it or run ahead. What it does not name is free, or cached.

        Raises `SpecInvalid` for a buffer or counts of another size, `Conflict` for a buffer that holds no sound state
        of such a pool, or would not with these counts; nothing is changed then.
        """
        self.geometry = geometry
        self._on_evict = partial(self._tell, on_evict) if on_evict else None
        self._arrays = Arrays(geometry, _own_memory(state_bytes(geometry)) if buffer is None else buffer, clearing)
        self._make_sound(None if times_held is None else _counts(times_held(), geometry))
        self._groups: dict[int, Group] = {}
        self._is_closed = self._is_telling = False
        self._whole = _Whole(self)
        self._recover()
        self._arrays.is_new = False

    @classmethod
    def of(
        cls,
        plan: Plan,
        buffer: Any = None,
        *,
        on_evict: OnEvict = None,
        times_held: Callable[[], Ints] | None = None,
    ) -> Self:
        """The blocks of a plan's groups, cleared where the plan needs it.

        Raises as the constructor, and `SpecInvalid` for a plan without blocks.
        """
        geometry, clearing = Geometry.of(plan), Clearing.of(plan)
        return cls(geometry, buffer, on_evict=on_evict, clearing=clearing, times_held=times_held)

    def _make_sound(self, held: Ints | None) -> None:
        """What a predecessor left, as it says itself or, where they are given, as these counts say."""
        arrays = self._arrays
        if not arrays.is_new:
            fault = fault_of(arrays, held)
        else:
            fault = "it is new, and some of it is said to be held" if held is not None and held.any() else None
        if fault:
            raise Conflict(f"the buffer is no sound state of a pool: {fault}; start the pool anew, with zeros")
        arrays.undo()
        if held is not None and not arrays.is_new:
            arrays.hold(held)

    def _recover(self) -> None:
        """Take back what was under way, and find everything that is not in the arrays again.

        Until this succeeds there are no groups, and the next call tries again.
        """
        self._forget()
        self._arrays.undo()
        census = take_census(self._arrays)
        self._ledger = SlabLedger(self._arrays, census)
        groups: dict[int, Group] = {}
        for group, cut in enumerate(self.geometry.blocks_per_slab):
            kind = _KINDS[cut > 1, self._arrays.clearing.is_on_reuse(group)]
            groups[group] = kind(group, self._ledger, census, self._on_evict)
        self._ledger.groups = tuple(groups.values())
        self._groups = groups

    def _forget(self) -> None:
        """Drop every reference into the buffer but the arrays' own; cycles would keep them until garbage collection."""
        groups, self._groups = self._groups, {}
        for part in groups.values():
            vars(part).clear()
        if groups:
            vars(self._ledger).clear()

    def close(self) -> None:
        """Let go of the buffer, which keeps its state; the pool is of no more use."""
        if not self._is_closed:
            self._is_closed = True
            self._forget()
            vars(self._arrays).clear()

    @property
    def closed(self) -> bool:
        return self._is_closed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _tell(self, on_evict: Callable[[int, Ints], object], group: int, ids: Ints) -> None:
        """Amid an operation nothing else may be done: while `on_evict` looks for groups there are none."""
        groups, self._groups, self._is_telling = self._groups, {}, True
        try:
            on_evict(group, ids)
        finally:
            self._groups, self._is_telling = groups, False

    def _group(self, group: int) -> Group:
        if not self._groups:
            if self._is_closed:
                raise Conflict("the block pool is closed")
            if self._is_telling:
                raise Conflict("on_evict called the block pool amid an operation; note what goes, and act on it later")
            self._recover()
        try:
            return self._groups[group]
        except (KeyError, TypeError):
            last = len(self._groups) - 1
            raise SpecInvalid(f"there is no group {shorten(repr(group))}; the groups are 0 to {last}") from None


def _counts(held: Ints, geometry: Geometry) -> Ints:
    if held.dtype != np.int32 or held.shape != (geometry.num_slots,):
        raise SpecInvalid(
            f"times_held must give int32 of shape ({geometry.num_slots},), not {held.dtype} of {held.shape}"
        )
    return held


def _own_memory(size_bytes: int) -> mmap.mmap:
    """Zeros that take memory page by page when they are touched, as a memfd's do; a bytearray takes all at once."""
    return mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class _Whole:
    """Around an operation that has begun: if anything is raised in it, even an interruption, it never happened."""

    def __init__(self, pool: PoolState) -> None:
        self._pool = pool

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            self._pool._recover()
