"""One sequence: its tokens, its block table in every group, and how it grows, goes back, forks and ends."""

from __future__ import annotations

from contextlib import ExitStack
from typing import NamedTuple, Self

from kvpage.errors import Conflict, SpecInvalid
from kvpage.pages.arrays import Ints
from kvpage.pages.batches import whole_number
from kvpage.pages.block_table import BlockTable
from kvpage.pages.checkpoint import Checkpoint
from kvpage.pages.hashing import TokenHashes, Tokens
from kvpage.pages.lifetimes import FOR_EVER
from kvpage.pages.needs import Copy, Needs
from kvpage.pages.prefix import Match
from kvpage.pages.sharing import Shared


class Sequence:
    """Made by `Sequences.new`. Every method does everything or, when it raises, nothing.

    `num_tokens` have blocks. For states, the first block of the table holds the settled state.
    """

    def __init__(self, shared: Shared, hashes: TokenHashes, encoder_tokens: int, recomputes_last_token: bool) -> None:
        self._shared, self._pool, self._hashes = shared, shared.pool, hashes
        self._prefix = shared.prefix if shared.prefix and shared.prefix.is_usable else None
        self._encoder_tokens, self._recomputes_last_token = encoder_tokens, recomputes_last_token
        self._tables = [BlockTable() for _ in shared.lifetimes]
        self._growing = [group for group, one in enumerate(shared.lifetimes) if one.grows]
        self._committed = [0] * len(self._tables)  # by group: blocks, from the first on
        self._checkpoint = None if self._prefix is None else Checkpoint(self._prefix)
        self.num_tokens = self._num_settled = self.num_prefix_tokens = 0
        self._has_begun = self._is_closed = self._may_share = False
        self._era = 0  # of the prefix cache, when this began
        self._steady_until = self._room_until = 0  # from and to so many tokens a step changes no table

    # --- what is there ------------------------------------------------------------------------------------------------

    @property
    def num_known_tokens(self) -> int:
        """Tokens, with blocks or without yet."""
        return len(self._hashes)

    @property
    def closed(self) -> bool:
        return self._is_closed

    def table(self, group: int) -> Ints:
        """The block of each run of tokens, 0 where it was given back; a view, right until the sequence changes."""
        return self._tables[group].ids

    def held(self, group: int) -> list[int]:
        """Every block that the sequence holds in the group, those of a checkpoint that waits too."""
        waiting = self._checkpoint.blocks if self._checkpoint else {}
        return [*self._tables[group].held.tolist(), *(block for at, block in waiting.items() if at == group)]

    def num_held(self) -> tuple[int, ...]:
        """By group: blocks."""
        return tuple(len(self.held(group)) for group in range(len(self._tables)))

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else f"{self.num_tokens} of {self.num_known_tokens} tokens"
        return f"<Sequence, {state}, blocks {list(self.num_held())}>"

    # --- growing ------------------------------------------------------------------------------------------------------

    def needs(self, step_tokens: int | None = None) -> Needs:
        """What `advance(step_tokens)` would take now. Takes nothing. Raises as `advance`, without `OutOfBlocks`."""
        if not self._has_begun:
            match = self._match()
            end = self._end(match.num_tokens, step_tokens)
            return self._first_needs(match, end)
        return self._next_needs(self._end(self.num_tokens, step_tokens))

    def advance(self, step_tokens: int | None = None) -> tuple[Copy, ...]:
        """Take blocks for the next `step_tokens` known tokens (None: all); the first time the cached prefix comes too,
        and these are after it. All tokens before are taken to be computed: blocks that no coming token looks back to
        are given back first, even where this then raises `OutOfBlocks`.

        Returns the copies to make. Raises `Conflict` for a closed sequence, `SpecInvalid` for more tokens than known.
        """
        if not self._has_begun:
            match = self._match()
            return self._begin(match, self._end(match.num_tokens, step_tokens))
        return self._grow(self._end(self.num_tokens, step_tokens))

    def append(self, tokens: Tokens) -> tuple[Copy, ...]:
        """Take these tokens too, and blocks for all that have none. Raises as `advance`, `SpecInvalid` for no token."""
        before = len(self._hashes)
        self._hashes.append(tokens)
        try:
            return self.advance()
        except BaseException:
            self._hashes.truncate(before)
            raise

    def _check_open(self) -> None:
        if self._is_closed:
            raise Conflict("the sequence is closed; begin a new one")

    def _end(self, start: int, step_tokens: int | None) -> int:
        self._check_open()
        known = len(self._hashes)
        if step_tokens is None:
            return known
        end = start + whole_number(step_tokens, "step_tokens")
        if end > known:
            raise SpecInvalid(f"{step_tokens} tokens after {start} are more than the {known} known ones; append them")
        return end

    def _match(self) -> Match:
        self._check_open()
        if self._prefix is None:
            return Match.of_nothing(len(self._tables))
        return self._prefix.find(self._hashes, len(self._hashes) - self._recomputes_last_token)

    # --- the first step -----------------------------------------------------------------------------------------------

    def _first_needs(self, match: Match, end: int) -> Needs:
        new = []
        for lifetime in self._shared.lifetimes:
            prefix_blocks = match.num_tokens // lifetime.block_size
            grown = lifetime.end_block(end) - prefix_blocks
            new.append(grown if lifetime.grows else lifetime.fixed_blocks(self._encoder_tokens))
        nothing = (0,) * len(new)
        revived = nothing if self._prefix is None else self._prefix.num_revived(match)
        return Needs(match.num_tokens, tuple(new), revived, nothing)

    def _begin(self, match: Match, end: int) -> tuple[Copy, ...]:
        needs = self._first_needs(match, end)
        with ExitStack() as undo:
            if self._prefix is not None:
                self._prefix.take(match)
                undo.callback(self._prefix.give_back, match)
            taken = self._pool.allocate_all(dict(enumerate(needs.new_blocks)))
            undo.pop_all()
        if self._prefix is not None:
            self._prefix.count(match, len(self._hashes))
            self._era = self._prefix.era
        self._has_begun = True
        self._num_settled = self.num_prefix_tokens = match.num_tokens
        self.num_tokens = end
        copies = tuple(copy for group in taken for copy in self._lay(group, match, taken[group]))
        self._note_quiet_steps()
        return copies

    def _lay(self, group: int, match: Match, taken: Ints) -> list[Copy]:
        """Begin the table of a group with its part of the prefix and what was allocated."""
        table, lifetime, found = self._tables[group], self._shared.lifetimes[group], match.blocks[group]
        if lifetime.grows:
            prefix_blocks = match.num_tokens // lifetime.block_size
            table.skip_to(prefix_blocks - len(found))
            table.append(found)
            self._committed[group] = prefix_blocks
        table.append(taken)
        if lifetime.grows or not len(found):
            return []
        # The state that was found stays as it is for others: this sequence goes on in a copy.
        self._shared.sharing.hold_source(group, int(found[0]))
        return [Copy(group, int(found[0]), int(taken[0]))]

    # --- later steps --------------------------------------------------------------------------------------------------

    def _next_needs(self, end: int) -> Needs:
        new, given_back = [0] * len(self._tables), [0] * len(self._tables)
        for group in self._growing:
            table, lifetime = self._tables[group], self._shared.lifetimes[group]
            new[group] = lifetime.end_block(end) - table.end + self._copies_last(group, end)
            given_back[group] = max(0, lifetime.first_block(self.num_tokens) - table.start)
        return Needs(0, tuple(new), (0,) * len(new), tuple(given_back))

    def _copies_last(self, group: int, end: int) -> bool:
        """Whether tokens up to `end` go into a block that others read."""
        lifetime = self._shared.lifetimes[group]
        if not self._may_share or end == self.num_tokens or self.num_tokens % lifetime.block_size == 0:
            return False
        return not self._shared.sharing.is_writable(group, self._tables[group].last())

    def _note_quiet_steps(self) -> None:
        """Most steps of a token change nothing: found out once for many of them."""
        lifetimes = self._shared.lifetimes
        settled, tables = self._num_settled, self._tables
        self._steady_until = min(
            (lifetimes[group].unchanged_until(settled) for group in self._growing), default=FOR_EVER
        )
        self._room_until = min(
            (tables[group].end * lifetimes[group].block_size for group in self._growing), default=FOR_EVER
        )

    def _grow(self, end: int) -> tuple[Copy, ...]:
        if self.num_tokens <= self._steady_until and end <= self._room_until and not self._may_share:
            self._num_settled, self.num_tokens = self.num_tokens, end
            return ()
        needs = self._next_needs(end)
        for group in self._growing:
            if needs.given_back_blocks[group]:
                self._give_back(group, self._shared.lifetimes[group].first_block(self.num_tokens))
        self._num_settled = self.num_tokens
        taken = self._pool.allocate_all({group: needs.new_blocks[group] for group in self._growing})
        copies = []
        for group in self._growing:
            table, new = self._tables[group], taken[group]
            if len(new) > self._shared.lifetimes[group].end_block(end) - table.end:
                copies.append(Copy(group, table.last(), int(new[0])))
                self._shared.sharing.hold_source(group, table.last())
                table.replace_last(int(new[0]))
                new = new[1:]
            table.append(new)
        self.num_tokens = end
        self._note_quiet_steps()
        return tuple(copies)

    def _give_back(self, group: int, start: int) -> None:
        table = self._tables[group]
        self._pool.free(group, table.held[: start - table.start])
        table.cut_before(start)

    # --- keeping ------------------------------------------------------------------------------------------------------

    def commit(self, num_tokens: int | None = None) -> None:
        """The first `num_tokens` (None: all that have blocks) are computed, and so is a checkpoint's copy up to there:
        others find their whole blocks from now on. Blocks given back before are not kept: commit before the next step.
        """
        count = self.num_tokens if num_tokens is None else whole_number(num_tokens, "num_tokens")
        if count > self.num_tokens:
            raise SpecInvalid(f"{count} tokens cannot be computed where {self.num_tokens} have blocks")
        if self._prefix is None or self._prefix.era != self._era:
            return
        for group in self._growing:
            table, end = self._tables[group], count // self._shared.lifetimes[group].block_size
            start = max(self._committed[group], table.start)
            if start < end:
                hashes = self._hashes.of(group, end)[start:end]
                self._prefix.commit(group, table.ids[start:end].tolist(), hashes)
                self._committed[group] = end
        if self._checkpoint and self._checkpoint.num_tokens <= count:
            self._checkpoint.commit()

    def checkpoint(self) -> tuple[Copy, ...]:
        """Keep the states as they are after `num_tokens` for others, in blocks of their own: make the copies, and then
        `commit`. Nothing where there are no states, or these are kept already.

        Raises `SpecInvalid` where no prefix may end, `Conflict` while another checkpoint waits, `OutOfBlocks`.
        """
        self._check_open()
        states = {group: int(self._tables[group].ids[0]) for group in self._state_groups() if self._has_begun}
        if not self._prefix or not self._checkpoint or not states or self._prefix.era != self._era:
            return ()
        self._checkpoint.check_place(self.num_tokens)
        ends = {group: self.num_tokens // self._shared.lifetimes[group].block_size for group in states}
        hashes = {group: self._hashes.of(group, end)[end - 1] for group, end in ends.items()}
        return self._checkpoint.take(self.num_tokens, states, hashes)

    def _state_groups(self) -> list[int]:
        return [group for group, one in enumerate(self._shared.lifetimes) if one.kind == "state"]

    # --- going other ways ---------------------------------------------------------------------------------------------

    def fork(self) -> Fork:
        """A sequence with the same tokens and blocks. Neither writes into a block of both: it then gets a copy. States
        are copied now. Raises `Conflict` for a closed sequence, `OutOfBlocks`."""
        self._check_open()
        twin = Sequence(self._shared, self._hashes.copy(), self._encoder_tokens, self._recomputes_last_token)
        states = {group: self._tables[group].num_held for group in self._state_groups()}
        with ExitStack() as undo:
            taken = self._pool.allocate_all(states)
            for group, ids in taken.items():
                undo.callback(self._pool.free, group, ids)
            for group, table in enumerate(self._tables):
                if group not in states:
                    self._pool.retain(group, table.held)
                    undo.callback(self._pool.free, group, table.held)
            undo.pop_all()
        copies = []
        for group, table in enumerate(self._tables):
            twin._tables[group] = table.copy()
            if group in taken and len(taken[group]):
                twin._tables[group].cut_from(0)
                twin._tables[group].append(taken[group])
                copies.append(Copy(group, int(table.ids[0]), int(taken[group][0])))
        twin._committed = self._committed.copy()
        twin.num_tokens, twin._num_settled, twin._era = self.num_tokens, self._num_settled, self._era
        twin.num_prefix_tokens, twin._has_begun = self.num_prefix_tokens, self._has_begun
        self._may_share = twin._may_share = True
        return Fork(twin, tuple(copies))

    def truncate(self, num_tokens: int) -> None:
        """Forget all tokens after the first `num_tokens`, and give back the blocks of them alone: speculative tokens
        were rejected.

        Raises `SpecInvalid` for more tokens than have blocks, and `Conflict` where the sequence cannot go back so far:
        blocks were given back, or states kept for fewer tokens.
        """
        count = whole_number(num_tokens, "num_tokens")
        self._check_open()
        if count > self.num_tokens:
            raise SpecInvalid(f"cannot go back to {count} tokens of a sequence with blocks for {self.num_tokens}")
        self._check_way_back(count)
        if self._checkpoint and self._checkpoint.num_tokens > count:
            self._checkpoint.drop()
        for group in self._growing:
            table, lifetime = self._tables[group], self._shared.lifetimes[group]
            end = lifetime.end_block(count)
            if end < table.end:
                self._pool.free(group, table.held[max(0, end - table.start) :])
                table.cut_from(end)
            whole = count // lifetime.block_size
            self._may_share |= self._committed[group] > whole  # the last block, of which a part is left, may be found
            self._committed[group] = min(self._committed[group], whole)
        self._hashes.truncate(count)
        self.num_tokens, self._num_settled = count, min(count, self._num_settled)
        self._note_quiet_steps()

    def _check_way_back(self, count: int) -> None:
        for group, lifetime in enumerate(self._shared.lifetimes):
            if lifetime.kind == "state":
                least = max(self._num_settled, self.num_tokens - lifetime.num_speculative_blocks)
                if count < least:
                    raise Conflict(
                        f"group {group} has no state after {count} tokens: the last step ended at {self.num_tokens}, "
                        f"and states are kept of {lifetime.num_speculative_blocks} tokens before; begin a new sequence"
                    )
            elif lifetime.grows and lifetime.first_block(count) < self._tables[group].start:
                raise Conflict(f"group {group} has given back what token {count} looks back to; begin a new sequence")

    def close(self) -> None:
        """Give everything back, the end first to be evicted. Only when nothing that was asked of its blocks is under
        way. Does nothing the second time."""
        self._is_closed = True
        if self._checkpoint:
            self._checkpoint.drop()
        for group, table in enumerate(self._tables):
            if table.num_held:
                self._pool.free(group, table.held)
                table.cut_from(table.start)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class Fork(NamedTuple):
    sequence: Sequence
    copies: tuple[Copy, ...]
    """To be made before either sequence goes on."""
