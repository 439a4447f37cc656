"""A pool's arrays and what is found from them: opening, recovering, closing."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, Self

from kvpage.errors import Conflict, SpecInvalid, shorten
from kvpage.pages.arrays import Arrays, Ints, state_bytes
from kvpage.pages.census import fault_of, take_census
from kvpage.pages.cut_group import CutGroup
from kvpage.pages.flat_group import FlatGroup
from kvpage.pages.geometry import Geometry
from kvpage.pages.ledger import SlabLedger
from kvpage.plans import Plan

Group = FlatGroup | CutGroup


class PoolState:
    def __init__(
        self, geometry: Geometry, buffer: Any = None, *, on_evict: Callable[[int, Ints], object] | None = None
    ) -> None:
        """`buffer`: writable, `state_bytes(geometry)` bytes, zeros for a new pool, else what a pool of this geometry
        left in it, even one that was killed; None: memory of this process.

        `on_evict(group, ids)` is called before content of these blocks goes because their room is needed; it must not
        call the pool. If it raises, the operation is refused with its exception, and the content stays.

        Raises `SpecInvalid` for a buffer of another size, `Conflict` for one that holds no sound state of such a pool.
        """
        self.geometry = geometry
        self._on_evict = partial(self._tell, on_evict) if on_evict else None
        self._arrays = Arrays(geometry, _own_memory(state_bytes(geometry)) if buffer is None else buffer)
        fault = None if self._arrays.is_new else fault_of(self._arrays)
        if fault:
            raise Conflict(f"the buffer is no sound state of a pool: {fault}; start the pool anew, with zeros")
        self._groups: dict[int, Group] = {}
        self._is_closed = self._is_telling = False
        self._whole = _Whole(self)
        self._recover()
        self._arrays.is_new = False

    @classmethod
    def of(cls, plan: Plan, buffer: Any = None, *, on_evict: Callable[[int, Ints], object] | None = None) -> Self:
        """The blocks of a plan's groups. Raises as the constructor, and `SpecInvalid` for a plan without blocks."""
        return cls(Geometry.of(plan), buffer, on_evict=on_evict)

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
            groups[group] = (FlatGroup if cut == 1 else CutGroup)(group, self._ledger, census, self._on_evict)
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
