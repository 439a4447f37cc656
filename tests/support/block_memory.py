"""What an engine writes into blocks, without the bytes: which token of which text stands where."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvpage.pages.lifetimes import Lifetime
from kvpage.pages.needs import Copy
from kvpage.pages.sequence import Sequence as Blocks
from support.prefix_parts import looks_back_to

Text = tuple[bytes, tuple[int, ...]]
"""Salt and tokens from the first on: what the data of the last one depends on."""
Place = tuple[int, int]
"""Group and block."""


class BlockMemory:
    """Each row of a block holds the text up to its token, a state's block the text it stands for.

    Groups lie over each other: what one writes into a slab destroys what another had there.
    """

    def __init__(self, lifetimes: Sequence[Lifetime], cut: Sequence[int]) -> None:
        self._lifetimes, self._cut = lifetimes, cut
        self._rows: dict[Place, dict[int, Text]] = {}

    def _write(self, group: int, block: int, row: int, text: Text) -> None:
        assert block > 0, "the null block was written"
        slab = block // self._cut[group]
        others = [place for place in self._rows if place[0] != group and place[1] // self._cut[place[0]] == slab]
        for place in others:
            del self._rows[place]
        self._rows.setdefault((group, block), {})[row] = text

    def copy(self, copies: Iterable[Copy]) -> None:
        for group, source, target in copies:
            rows = dict(self._rows.get((group, source), {}))
            self._rows.pop((group, target), None)
            for row, text in rows.items():
                self._write(group, target, row, text)

    def compute(self, blocks: Blocks, salt: bytes, tokens: Sequence[int], start: int) -> None:
        """Tokens from `start` on; each reads what it looks back to before it is written."""
        for position in range(start, len(tokens)):
            self.check(blocks, salt, tokens[:position])
            text = (salt, tuple(tokens[: position + 1]))
            for group, lifetime in enumerate(self._lifetimes):
                if lifetime.kind == "state":
                    self._write(group, int(blocks.table(group)[0]), 0, text)
                elif lifetime.grows:
                    block = int(blocks.table(group)[position // lifetime.block_size])
                    self._write(group, block, position % lifetime.block_size, text)

    def accept_state(self, blocks: Blocks, salt: bytes, tokens: Sequence[int]) -> None:
        """Later tokens were rejected: of the states kept for each of them, that after these is the settled one."""
        for group, lifetime in enumerate(self._lifetimes):
            if lifetime.kind == "state" and tokens:
                self._write(group, int(blocks.table(group)[0]), 0, (salt, tuple(tokens)))

    def check(self, blocks: Blocks, salt: bytes, tokens: Sequence[int]) -> None:
        """All that the token after these looks back to is there."""
        for group, lifetime in enumerate(self._lifetimes):
            table = blocks.table(group)
            if lifetime.kind == "state" and tokens:
                assert self._rows.get((group, int(table[0])), {}).get(0) == (salt, tuple(tokens))
            elif lifetime.grows:
                for position in looks_back_to(lifetime, len(tokens)):
                    place = (group, int(table[position // lifetime.block_size]))
                    found = self._rows.get(place, {}).get(position % lifetime.block_size)
                    assert found == (salt, tuple(tokens[: position + 1])), (place, position)
