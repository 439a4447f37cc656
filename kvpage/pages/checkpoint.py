"""The states of a sequence after some of its tokens, in blocks that others can find."""

from __future__ import annotations

from collections.abc import Mapping

from kvpage.errors import Conflict, SpecInvalid
from kvpage.pages.block_source import PrefixSource
from kvpage.pages.needs import Copy


class Checkpoint:
    """At most one that waits for its copies: `take`, make the copies, `commit`."""

    def __init__(self, prefix: PrefixSource) -> None:
        self._prefix, self._pool = prefix, prefix.pool
        self._hashes: dict[int, bytes] = {}
        self.blocks: dict[int, int] = {}
        """Of those that wait, by group."""
        self.num_tokens = 0
        """Tokens after which they are taken."""

    def check_place(self, num_tokens: int) -> None:
        """Raises `SpecInvalid` where no prefix may end, `Conflict` while another checkpoint waits."""
        if self.blocks:
            raise Conflict(f"a checkpoint after {self.num_tokens} tokens waits for its commit; commit it first")
        step = self._prefix.step_tokens
        if not num_tokens or num_tokens % step:
            raise SpecInvalid(
                f"a checkpoint after {num_tokens} tokens is of no use; prefixes end after multiples of {step} tokens"
            )

    def take(self, num_tokens: int, states: Mapping[int, int], hashes: Mapping[int, bytes]) -> tuple[Copy, ...]:
        """A block for each state (group to block) whose content, by group in `hashes`, nobody knows yet."""
        unknown = [group for group in states if not self._prefix.knows(group, hashes[group])]
        taken = self._pool.allocate_all(dict.fromkeys(unknown, 1))
        self.blocks = {group: int(taken[group][0]) for group in unknown}
        self._hashes = {group: hashes[group] for group in unknown}
        self.num_tokens = num_tokens
        return tuple(Copy(group, states[group], block) for group, block in self.blocks.items())

    def commit(self) -> None:
        """The copies are made: others find them, and nobody holds them."""
        for group, block in self.blocks.items():
            self._prefix.commit(group, [block], [self._hashes[group]])
        self.drop()

    def drop(self) -> None:
        while self.blocks:
            group, block = self.blocks.popitem()
            self._pool.free(group, [block])
