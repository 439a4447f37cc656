"""What one does with a lease, whichever way it is held: in this process, over a worker's socket, or over HTTP."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np

from kvpage.errors import Conflict, KvpageError, NotFound, StaleHandle
from kvpage.pages.arrays import Ints
from kvpage.pages.batches import Ids
from kvpage.pages.leased_pool import HeldBlocks
from kvpage.pages.steps import Content, Counts, Grant, Step, new_key

Clear = Callable[[int, Ints], object]
"""Writes zeros into blocks of a group: `Attachment.clear`."""


class FoundPrefix(NamedTuple):
    """The longest cached beginning of a prompt, and its blocks that are needed."""

    num_tokens: int
    ids: tuple[Ints, ...]
    """By group, in the order of the sequence; the last one ends with the prefix."""
    num_revived: tuple[int, ...] = ()
    """By group, where it was only looked for: blocks of it that nobody holds, so that taking it leaves as many fewer to
    be had."""


class Reservation(ABC):
    """Blocks set aside, until they are committed or given back, or their time runs out. `with` gives back the rest."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with suppress(NotFound, StaleHandle):  # nothing of it is left, or of the lease
            self.give_back()

    @abstractmethod
    def commit(self, counts: Counts | None = None) -> Grant:
        """So many of them (None: all) are the lease's from now on. Raises `OutOfBlocks` for more than are left."""

    @abstractmethod
    def give_back(self) -> None: ...


class BlockLease(ABC):
    """Blocks held under a name. One thread at a time.

    `clear` is called with the blocks that must be cleared before they are used; without it `step` names them in its
    grant, and the other ways to take blocks refuse to.
    """

    def __init__(self, clear: Clear | None) -> None:
        self._clear = clear
        self._keys = itertools.count(new_key())

    def new_key(self) -> int:
        """For a step that may have to be asked for again."""
        return next(self._keys)

    # --- what each way does in its own way ----------------------------------------------------------------------------

    @property
    @abstractmethod
    def name(self) -> str: ...

    @property
    @abstractmethod
    def token(self) -> str:
        """What proves, to `adopt` the lease by its name, that one may. A secret."""

    @property
    @abstractmethod
    def salt(self) -> bytes:
        """What hashes of its tenant's prefixes begin with: `TokenHashes(…, salt=lease.salt)`."""

    @property
    @abstractmethod
    def closed(self) -> bool: ...

    @abstractmethod
    def close(self) -> None:
        """Everything that it holds is given back. May be called twice."""

    @abstractmethod
    def held(self) -> dict[int, HeldBlocks]:
        """By group, what it holds, without what is reserved."""

    @abstractmethod
    def reserve(self, counts: Counts, *, wait_s: float = 0.0, ttl_s: float = 60.0) -> Reservation:
        """Set blocks aside. `ttl_s`: after which they are given back. Raises as `step`."""

    @abstractmethod
    def find_prefix(self, hashes: Sequence[Sequence[bytes]], at_most_tokens: int) -> FoundPrefix:
        """The longest cached beginning of a prompt; holds nothing. `hashes`: by group, of its whole blocks in order."""

    @abstractmethod
    def take_prefix(self, hashes: Sequence[Sequence[bytes]], at_most_tokens: int) -> FoundPrefix:
        """As `find_prefix`, and holds its blocks."""

    @abstractmethod
    def _take(self, step: Step, wait_s: float) -> Grant: ...

    # --- what is made of it -------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def step(self, step: Step, *, wait_s: float = 0.0) -> Grant:
        """All of it or nothing. `wait_s`: how long to wait for room, in fair order.

        Raises `OutOfBlocks`, `Conflict` for blocks that the lease does not hold, `SpecInvalid` for what is no block id,
        `NotSupported` to commit where the plan allows no prefix cache, `StaleHandle` when another has adopted it.
        """
        return self._cleared(self._take(step, wait_s))

    def _cleared(self, grant: Grant) -> Grant:
        """With what is to be cleared cleared, if that can be done here."""
        if self._clear is None or not grant.clear:
            return grant
        for group, ids in grant.clear.items():
            self._clear(group, ids)
        return Grant(ids=grant.ids)

    def _ready(self, step: Step, wait_s: float) -> Mapping[int, Ints]:
        """Blocks that may be used at once."""
        grant = self.step(step, wait_s=wait_s)
        if not grant.clear:
            return grant.ids
        with suppress(KvpageError):
            self._take(Step(key=self.new_key(), free=grant.ids), 0.0)
        raise must_be_cleared(grant.clear)

    def allocate(self, group: int, count: int, *, wait_s: float = 0.0) -> Ints:
        """`count` block ids. Raises as `step`."""
        ids = self._ready(Step(key=self.new_key(), allocate={group: count}), wait_s)
        return ids.get(group, np.empty(0, np.int32))

    def allocate_all(self, counts: Counts, *, wait_s: float = 0.0) -> dict[int, Ints]:
        """For every group its number of block ids, or nothing. Raises as `step`."""
        ids = self._ready(Step(key=self.new_key(), allocate=counts), wait_s)
        return {group: ids.get(group, np.empty(0, np.int32)) for group in counts}

    def allocate_run(self, group: int, count: int, *, wait_s: float = 0.0) -> Ints:
        """`count` block ids that follow each other. Raises as `step`."""
        ids = self._ready(Step(key=self.new_key(), allocate={group: count}, as_runs=True), wait_s)
        return ids.get(group, np.empty(0, np.int32))

    def free(self, group: int, ids: Ids) -> None:
        """Hold these blocks once less each time they stand in `ids`. Raises as `step`."""
        self._take(Step(key=self.new_key(), free={group: ids}), 0.0)

    def retain(self, group: int, ids: Ids) -> None:
        """Hold these blocks, which somebody holds or which are cached, once more. Raises as `step`."""
        self._take(Step(key=self.new_key(), retain={group: ids}), 0.0)

    def commit(self, group: int, ids: Ids, hashes: Sequence[bytes]) -> None:
        """These blocks hold what the hashes say: others find them from now on. Raises as `step`."""
        self._take(Step(key=self.new_key(), commit={group: Content(ids, hashes)}), 0.0)


def must_be_cleared(clear: Mapping[int, Ints]) -> Conflict:
    """Why blocks are not simply handed out."""
    return Conflict(
        f"blocks of groups {sorted(clear)} must be cleared before they are used; open the lease with"
        " clear=attachment.clear, or take a `step` and clear what it names"
    )
