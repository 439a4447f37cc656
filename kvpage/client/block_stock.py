"""Blocks at hand: an extent of a pool, leased at once, of which single ones are taken without asking the worker."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from kvpage.client.socket_lease import SocketLease
from kvpage.errors import Conflict, SpecInvalid, shorten
from kvpage.pages.batches import whole_number
from kvpage.pages.steps import Step

DEFAULT_BATCH = 64


class BlockStock:
    """Blocks of one group that a lease holds and nobody uses yet. One thread at a time.

    `take` hands one out, and asks the worker for `batch` more when there is none; `put` takes one back, which was not
    committed, and gives `batch` of them back to the worker once it has three times as many. While they are here nobody
    else can have them: the pool counts them as used.
    """

    def __init__(self, lease: SocketLease, group: int, batch: int = DEFAULT_BATCH) -> None:
        """Raises `SpecInvalid` for a batch of less than one block."""
        if whole_number(batch, "the batch of a stock") < 1:
            raise SpecInvalid(f"a stock is filled by 1 block or more at a time, not {batch}")
        num_groups = len(lease.clears_on_reuse)
        if whole_number(group, "the group of a stock") >= num_groups:
            raise SpecInvalid(f"there is no group {group}; the groups are 0 to {num_groups - 1}")
        self._lease, self._group, self._batch = lease, group, batch
        self._blocks: list[int] = []
        self._taken: set[int] = set()
        self._most = 3 * batch
        # A state is read before it is written: that of another sequence of this process is as wrong as a stranger's.
        self._is_reused = not lease.clears_on_reuse[group]

    def __repr__(self) -> str:
        return f"<BlockStock of group {self._group}, {len(self)} blocks>"

    def __len__(self) -> int:
        """Blocks at hand."""
        return len(self._blocks)

    def take(self) -> int:
        """A block that nobody uses. Raises as `SocketLease.allocate`."""
        if not self._blocks or self._lease.closed:
            self._fill()
        block = self._blocks.pop()
        self._taken.add(block)
        return block

    def _fill(self) -> None:
        self._blocks = self._lease.allocate(self._group, self._batch).tolist()[::-1]

    def put(self, block: int) -> None:
        """Nobody uses the block any more. Raises `Conflict` for one that was not taken here, or was put back before."""
        self._forget(block)
        if not self._is_reused:
            self._lease.free(self._group, [block])
            return
        self._blocks.append(block)
        if len(self._blocks) > self._most:
            surplus, self._blocks = self._blocks[: self._batch], self._blocks[self._batch :]
            self._lease.free(self._group, surplus)

    def _forget(self, block: int) -> None:
        try:
            self._taken.remove(block)
        except (KeyError, TypeError):
            raise Conflict(
                f"block {shorten(repr(block))} of group {self._group} was not taken from this stock, or was put back"
                " before"
            ) from None

    def keep(self, block: int) -> None:
        """The block is the lease's from now on, to be committed and freed there. Raises as `put`."""
        self._forget(block)

    def close(self) -> None:
        """Give back what is at hand. Blocks that were taken stay the lease's. May be called twice."""
        blocks, self._blocks = self._blocks, []
        if blocks and not self._lease.closed:
            self._lease.step(Step(free={self._group: blocks}))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
