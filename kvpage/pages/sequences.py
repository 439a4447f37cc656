"""Sequences: requests with a block table in every group of a plan, each with exactly the blocks it needs.

    sequences = Sequences.cached(PrefixCache.of(plan))
    with sequences.new(prompt) as sequence:
        sequence.needs()                   # what the next line takes
        copies = sequence.advance()        # the cached prefix, and blocks for the rest of the prompt
        ...                                # copy those blocks, compute, then:
        sequences.copies_done()
        sequence.commit()                  # what is computed, others may find
        sequence.append([token])           # a block where one is needed

Whoever computes performs copies in the order in which they were returned, before writing into any block.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Self

from kvpage.errors import SpecInvalid
from kvpage.pages.batches import whole_number
from kvpage.pages.block_source import BlockSource, PrefixSource
from kvpage.pages.hashing import Span, TokenHashes, Tokens
from kvpage.pages.lifetimes import Lifetime
from kvpage.pages.sequence import Sequence
from kvpage.pages.sharing import Shared, Sharing


class Sequences:
    def __init__(self, pool: BlockSource, lifetimes: SequenceOf[Lifetime], prefix: PrefixSource | None = None) -> None:
        """`prefix`: None where nothing is to be found again. Raises `SpecInvalid` where they are not of one pool."""
        geometry = getattr(pool, "geometry", None)  # a lease has none: what it may not do its worker says
        if (geometry and len(lifetimes) != len(geometry.blocks_per_slab)) or (prefix and prefix.pool is not pool):
            raise SpecInvalid(
                "sequences need a pool, lifetimes of its groups, and a prefix cache of the same pool or none"
            )
        self.pool, self.prefix, self.sharing = pool, prefix, Sharing(pool, prefix)
        self._shared = Shared(pool, tuple(lifetimes), prefix, self.sharing)

    @classmethod
    def cached(cls, prefix: PrefixSource) -> Self:
        return cls(prefix.pool, prefix.lifetimes, prefix)

    def new(
        self,
        tokens: Tokens,
        *,
        salt: bytes | None = None,
        spans: SequenceOf[Span] = (),
        encoder_tokens: int = 0,
        recomputes_last_token: bool = True,
    ) -> Sequence:
        """A sequence of these tokens that holds nothing yet. `salt`: what hashes begin with; None: as the lease
        says, where one holds the blocks. `recomputes_last_token`: at least one token is left to compute, as whoever
        needs the next token's logits wants it. Raises `SpecInvalid`.
        """
        whole_number(encoder_tokens, "encoder_tokens")
        if salt is None:
            salt = b"" if self.prefix is None else self.prefix.salt
        hashes = TokenHashes([one.block_size for one in self._shared.lifetimes], salt=salt, spans=spans)
        hashes.append(tokens)
        return Sequence(self._shared, hashes, encoder_tokens, recomputes_last_token)

    def most_blocks(self, num_tokens: int, step_tokens: int, encoder_tokens: int = 0) -> tuple[int, ...]:
        """By group: most blocks that a sequence holds while it grows to `num_tokens` in steps of `step_tokens`, beside
        what copies are read from."""
        return tuple(one.most_blocks(num_tokens, step_tokens, encoder_tokens) for one in self._shared.lifetimes)

    def copies_done(self) -> None:
        """All copies returned so far are done: what they read may be evicted or written again."""
        self.sharing.copies_done()
