"""The sequences of a batch, one for each of its rows, and the step that a forward pass computes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import numpy as np
import torch

from kvpage.errors import Conflict, NotSupported, OutOfBlocks, SpecInvalid, StaleHandle
from kvpage.pages.leased_sequences import Lease, leased_sequences
from kvpage.pages.lifetimes import Lifetime, lifetimes_of
from kvpage.pages.needs import Copy
from kvpage.pages.sequence import Sequence as BlockSequence
from kvpage.pages.sequences import Sequences
from kvpage.plans import Plan

MakeCopies = Callable[[Iterable[Copy]], object]
Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Coming:
    """What the model is about to compute."""

    tokens: list[list[int]]
    """By row; all rows have as many."""
    is_shared: list[bool]
    """By row: the tokens say all of what is computed, so that others may find it by them."""


def _as_masked(lifetime: Lifetime) -> Lifetime:
    """Chunks of a padded row begin where its padding ends, so anywhere: what a window of their size sees is kept."""
    return replace(lifetime, kind="window") if lifetime.kind == "chunk" else lifetime


@dataclass(slots=True)
class Row:
    sequence: BlockSequence
    is_shared: bool


class Batch:
    """All rows have the same number of tokens, padding included, as in the tensors of transformers.

    What a step takes it takes for all rows or for none.
    """

    def __init__(self, plan: Plan, lease: Lease, copy: MakeCopies, device: torch.device, salt: bytes = b"") -> None:
        """`copy`: `Attachment.copy`. `salt`: what tells the weights apart whose keys are in one pool."""
        self._lifetimes = [_as_masked(one) for one in lifetimes_of(plan, num_speculative_blocks=0)]
        self._found = leased_sequences(plan, lease, self._lifetimes)
        self._alone = Sequences(self._found.pool, self._lifetimes)  # nobody finds them, and they find nothing
        self._copy, self._device, self._salt = copy, device, lease.salt + salt
        self._is_findable = not self.keeps_states or plan.capacity.blocks_per_request is not None
        """Of states the pool must know how many a request has."""
        self._rows: list[Row] = []
        self._tables: dict[int, torch.Tensor] = {}
        self._promised: list[list[int]] = []
        self._is_closed = False
        self.coming: Coming | None = None

    # --- what is there ------------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Rows; 0 before the first step."""
        return len(self._rows)

    @property
    def num_tokens(self) -> int:
        """Of each row, those of the step under way included."""
        return self._rows[0].sequence.num_tokens if self._rows else 0

    @property
    def keeps_states(self) -> bool:
        return any(one.kind == "state" for one in self._lifetimes)

    def table(self, group: int) -> torch.Tensor:
        """Blocks of all rows, [rows, blocks]; 0 where a block was given back."""
        table = self._tables.get(group)
        if table is None:
            blocks = np.stack([row.sequence.table(group) for row in self._rows]).astype(np.int64)
            table = self._tables[group] = torch.from_numpy(blocks).to(self._device)
        return table

    def first_held(self, group: int) -> int:
        """The first token whose block is held."""
        blocks = self._rows[0].sequence.table(group)
        first = int(np.argmax(blocks != 0)) if len(blocks) else 0
        return first * self._lifetimes[group].block_size

    def num_held(self) -> tuple[int, ...]:
        """By group, blocks of all rows; one that several rows share counts for each."""
        counts = [row.sequence.num_held() for row in self._rows] or [(0,) * len(self._lifetimes)]
        return tuple(map(sum, zip(*counts, strict=True)))

    # --- steps --------------------------------------------------------------------------------------------------------

    def step(self, size: int, past: int, count: int) -> None:
        """Blocks for `count` tokens after `past`, unless a layer before has asked for them. Raises `OutOfBlocks`, and
        `Conflict` for layers that are at different tokens, as after a forward pass that failed."""
        self.check_open()
        if self._rows and len(self._rows) != size:
            raise SpecInvalid(f"the cache holds {len(self._rows)} sequences, not {size}; reset it before another batch")
        if self._rows and self.num_tokens == past + count:
            return
        if self.num_tokens != past:
            raise Conflict(
                f"a layer is at {past} tokens where the sequences have {self.num_tokens}: a forward pass has failed; "
                f"reset the cache"
            )
        self._wait()
        coming = self._coming(size, count)
        if not self._rows:
            self._begin(coming)
        self._grow(coming)

    def step_if_new(self, size: int, count: int) -> None:
        """`step` for a layer that does not count its tokens, and has its block from the first step on."""
        if not self._rows:
            self.step(size, 0, count)

    def _coming(self, size: int, count: int) -> Coming:
        coming, self.coming = self.coming, None
        if not self._is_findable or coming is None or [len(tokens) for tokens in coming.tokens] != [count] * size:
            coming = Coming([[0] * count] * size, [False] * size)
        for promised, tokens, is_shared in zip(self._promised, coming.tokens, coming.is_shared, strict=False):
            if is_shared and promised[:count] != tokens[: len(promised)]:
                raise SpecInvalid("these are not the tokens whose prefix was taken; pass the same prompts")
        self._promised = [promised[count:] for promised in self._promised]
        return coming

    def _begin(self, coming: Coming) -> None:
        with self._closed_if_it_fails():
            for is_shared in coming.is_shared:
                source = self._found if is_shared else self._alone
                sequence = source.new([], salt=self._salt, recomputes_last_token=False)
                self._rows.append(Row(sequence, is_shared))
                self._make(sequence.advance())  # begins with nothing: what is cached, the model computes again

    def _grow(self, coming: Coming) -> None:
        before, grown = self.num_tokens, []
        try:
            for row, tokens, is_shared in zip(self._rows, coming.tokens, coming.is_shared, strict=True):
                row.is_shared &= is_shared
                copies = row.sequence.append(tokens)
                grown.append(row)
                self._make(copies)
        except BaseException:
            for row in grown:
                row.sequence.truncate(before)
            if not before:
                self._close_rows()
            raise
        finally:
            self._tables.clear()

    def finish(self) -> None:
        """The step is computed: others find the whole blocks of the tokens so far."""
        if not any(row.is_shared for row in self._rows):
            return
        self._wait()
        for row in self._rows:
            if row.is_shared:
                row.sequence.commit()
                self._keep_states(row.sequence)

    def _keep_states(self, sequence: BlockSequence) -> None:
        """States are found only where they were kept. Where there is no room to, they are not."""
        prefix = self._found.prefix
        if not self.keeps_states or prefix is None or sequence.num_tokens % prefix.step_tokens:
            return
        with suppress(OutOfBlocks):
            self._make(sequence.checkpoint())
            self._wait()
            sequence.commit()

    def _make(self, copies: Sequence[Copy]) -> None:
        if copies:
            self._copy(copies)
            self._wait()
            for sequences in (self._found, self._alone):
                sequences.copies_done()

    def _wait(self) -> None:
        """Before blocks pass to or from others: until the device has done what it was asked."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)

    # --- prefixes -----------------------------------------------------------------------------------------------------

    def take_prefix(self, prompts: Prompts) -> int:
        """Begin with the longest prefix that all prompts have in the pool: its tokens. 0, and nothing is held, where
        there is none. Raises `Conflict` for a batch that has begun, or where blocks are evicted meanwhile."""
        self.check_open()
        if self._rows:
            raise Conflict(f"the cache has {self.num_tokens} tokens already; reset it before a prefix is taken")
        at_most = max(0, min(map(len, prompts), default=0) - 1) if self._is_findable else 0
        while at_most > 0:
            least = self._take(prompts, at_most)
            if least == at_most:  # of all, and none has further tokens
                break
            self._close_rows()
            at_most = least
        self._promised = [list(prompt[at_most:]) for prompt in prompts]
        return at_most

    def _take(self, prompts: Prompts, at_most: int) -> int:
        """The prefix of each, of the first `at_most` tokens; how long the shortest is."""
        with self._closed_if_it_fails():
            for prompt in prompts:
                sequence = self._found.new(list(prompt[:at_most]), salt=self._salt, recomputes_last_token=False)
                self._rows.append(Row(sequence, True))
                self._make(sequence.advance(0))
        return min(row.sequence.num_tokens for row in self._rows)

    # --- going other ways ---------------------------------------------------------------------------------------------

    def truncate(self, num_tokens: int) -> None:
        """Forget the tokens after `num_tokens`. Raises `Conflict` where what they look back to was given back."""
        self.check_open()
        self._wait()
        if self.keeps_states and num_tokens < self.num_tokens:
            raise NotSupported("recurrent states cannot go back to fewer tokens; generate without assisted decoding")
        for row in self._rows:
            row.sequence.truncate(num_tokens)
        self._tables.clear()

    def select(self, rows: Sequence[int]) -> None:
        """Row i goes on as row `rows[i]` was: rows that are named twice share their blocks, until one writes.

        Raises `SpecInvalid` for a row that is not there, `OutOfBlocks` where states cannot be copied; the rows are
        as they were then.
        """
        self.check_open()
        if wrong := [row for row in rows if not 0 <= row < len(self._rows)]:
            raise SpecInvalid(f"there is no row {wrong[0]} in a batch of {len(self._rows)}")
        self._wait()
        chosen: list[Row] = []
        forks: list[BlockSequence] = []
        try:
            for place in rows:
                chosen.append(self._again(self._rows[place], chosen, forks))
        except BaseException:
            for fork in forks:
                fork.close()
            raise
        for row in self._rows:
            if row not in chosen:
                row.sequence.close()
        self._rows = chosen
        self._tables.clear()

    def _again(self, row: Row, chosen: list[Row], forks: list[BlockSequence]) -> Row:
        if row not in chosen:
            return row
        fork = row.sequence.fork()
        forks.append(fork.sequence)
        self._make(fork.copies)
        return Row(fork.sequence, row.is_shared)

    # --- ending -------------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Give everything back and begin again. Raises `StaleHandle` once closed."""
        self.check_open()
        self._wait()
        self._close_rows()

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._wait()
            self._close_rows()

    def _close_rows(self) -> None:
        while self._rows:
            self._rows.pop().sequence.close()
        self._tables.clear()
        self._promised, self.coming = [], None

    @contextmanager
    def _closed_if_it_fails(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._close_rows()
            raise

    def check_open(self) -> None:
        if self._is_closed:
            raise StaleHandle("the cache is closed; open another")
