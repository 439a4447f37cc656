"""A process that computes prompts on shared memory, and is killed there.

prefix_churn.py SEED DESCRIPTOR    tells of each prompt it has begun

The memory has three parts: the state of a pool, the hashes of its index, and what an "engine" wrote into each block: 16
bytes, the hash of the content once all of it is there, zeros while it is not. Pool and index are `open_cache`'s.
"""

from __future__ import annotations

import mmap
import os
import sys
from random import Random
from typing import NamedTuple

from kvpage.pages.arrays import state_bytes
from kvpage.pages.geometry import Geometry
from kvpage.pages.hashing import HASH_BYTES
from kvpage.pages.lifetimes import Lifetime
from kvpage.pages.prefix import PrefixCache
from kvpage.pages.prefix_index import index_bytes
from kvpage.pages.sequences import Sequences
from support.prefix_parts import make_cache

GROUPS = (Lifetime(kind="full", block_size=2), Lifetime(kind="window", block_size=4, reach=9))
GEOMETRY = Geometry(14, (2, 2))  # cut alike, so that a block's id is its slot
POOL_BYTES, INDEX_BYTES = state_bytes(GEOMETRY), index_bytes(GEOMETRY)
MEMORY_BYTES = POOL_BYTES + 2 * INDEX_BYTES


class Parts(NamedTuple):
    cache: PrefixCache
    written: memoryview
    """By block id, of whichever group."""


def open_cache(memory: memoryview) -> Parts:
    pool_buffer, index_buffer = memory[:POOL_BYTES], memory[POOL_BYTES : POOL_BYTES + INDEX_BYTES]
    cache = make_cache(GROUPS, num_slabs=14, cut=(2, 2), pool_buffer=pool_buffer, index_buffer=index_buffer)
    return Parts(cache, memory[POOL_BYTES + INDEX_BYTES :])


def row(block: int) -> slice:
    return slice(block * HASH_BYTES, (block + 1) * HASH_BYTES)


def prompt(random: Random) -> list[int]:
    family, length = random.randrange(3), random.randint(1, 22)
    return [family * 100 + place for place in range(length)] + [random.randrange(3)]


def work(parts: Parts, tokens: list[int]) -> None:
    """Compute one prompt, in two steps."""
    hashes = parts.cache.hashes()
    hashes.append(tokens)
    with Sequences.cached(parts.cache).new(tokens) as sequence:
        sequence.advance(1)
        sequence.advance()
        for group, lifetime in enumerate(GROUPS):
            first, end = sequence.num_prefix_tokens // lifetime.block_size, len(tokens) // lifetime.block_size
            blocks = sequence.table(group).tolist()
            for number in range(first, len(blocks)):
                if blocks[number]:
                    parts.written[row(blocks[number])] = bytes(HASH_BYTES)
                    if number < end:
                        parts.written[row(blocks[number])] = hashes.of(group, end)[number]
        sequence.commit()


def main() -> None:
    random, memory = Random(int(sys.argv[1])), mmap.mmap(int(sys.argv[2]), MEMORY_BYTES)
    parts = open_cache(memoryview(memory))
    while True:
        tokens = prompt(random)
        os.write(1, b".")
        work(parts, tokens)


if __name__ == "__main__":
    main()
