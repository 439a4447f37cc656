"""The prefix of a prompt of 100,000 tokens looked up, beside sha256 over pickled tuples, how vLLM hashes by default."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from hashlib import sha256

from kvpage.pages.allocator import BlockPool
from kvpage.pages.geometry import Geometry
from kvpage.pages.lifetimes import Lifetime
from kvpage.pages.prefix import PrefixCache
from kvpage.pages.prefix_index import PrefixIndex
from kvpage.pages.sequences import Sequences
from measure import Effort, Row, beside, take_turns
from report import Subject, main_of

BLOCK_SIZE = 16
PROMPT = [(7919 * place) % 150_000 for place in range(100_000)]
FULL = Lifetime(kind="full", block_size=BLOCK_SIZE)
WINDOW = Lifetime(kind="window", block_size=BLOCK_SIZE, reach=1024)
PICKLED = "sha256 of pickled tuples, looked up in a dict"
ONE, FIVE = "a prompt looked up, one full group", "a prompt looked up, one full group and 4 windows"
ROUNDS = 15
ABOUT = """
`benchmarks/prefixes.py`. A cached prompt of 100,000 tokens is hashed block by block, and its blocks are found. Beside
it: sha256 over pickled tuples of tokens and one look-up in a dict for each block, which is how vLLM hashes by default.
Each group hashes for itself.
"""


def measure(effort: Effort) -> list[Row]:
    sides = {PICKLED: pickled(), ONE: lookup([FULL]), FIVE: lookup([FULL, *[WINDOW] * 4])}
    return beside(PICKLED, take_turns(sides, rounds=effort.rounds(ROUNDS)))


def lookup(groups: Sequence[Lifetime]) -> Callable[[], object]:
    geometry = Geometry(len(groups) * len(PROMPT) // BLOCK_SIZE + 2, (1,) * len(groups))
    index = PrefixIndex(geometry)
    sequences = Sequences.cached(PrefixCache(BlockPool(geometry, on_evict=index.evicted), index, groups))
    with sequences.new(PROMPT) as sequence:
        sequence.advance()
        sequence.commit()

    def find() -> None:
        needs = sequences.new(PROMPT).needs()
        assert needs.prefix_tokens == len(PROMPT) - BLOCK_SIZE  # the last token is left to compute

    return find


def pickled() -> Callable[[], object]:
    blocks: dict[bytes, int] = {}

    def hashes() -> list[bytes]:
        parent, found = b"", []
        for start in range(0, len(PROMPT), BLOCK_SIZE):
            content = (parent, tuple(PROMPT[start : start + BLOCK_SIZE]), None)
            parent = sha256(pickle.dumps(content, protocol=pickle.HIGHEST_PROTOCOL)).digest()
            found.append(parent)
        return found

    blocks |= {one: number for number, one in enumerate(hashes())}

    def find() -> None:
        assert all(one in blocks for one in hashes())

    return find


SUBJECT = Subject(title="Prefixes", about=ABOUT, pairs=((ONE, PICKLED), (FIVE, PICKLED)), measure=measure)

if __name__ == "__main__":
    main_of(SUBJECT)
