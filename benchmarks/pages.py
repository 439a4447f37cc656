"""Blocks taken and given back, beside a Python list of ids and a linked list of objects (how vLLM keeps them)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from hashlib import blake2b
from itertools import chain, count
from pathlib import Path

from kvpage.pages.allocator import BlockPool
from kvpage.pages.arrays import Ints
from kvpage.pages.geometry import Geometry
from kvpage.pages.lifetimes import Lifetime
from kvpage.pages.prefix import PrefixCache
from kvpage.pages.prefix_index import PrefixIndex
from linked_blocks import Block, LinkedBlocks, ListStack
from measure import Timing, print_table, take_turns

NUM_BLOCKS = 100_000
ROUNDS = 60
SIZES = (1, 10, 100, 1000)
LINKED = "linked list of objects"
Side = tuple[Callable[[], object], Callable[[], object]]
"""Takes some blocks; gives them back. Called in turn."""


def main() -> None:
    for size in SIZES:
        in_turn(f"{size} of {NUM_BLOCKS:,} blocks, nothing cached", size, nothing_cached(size))
    for size in SIZES:
        in_turn(
            f"{size} of {NUM_BLOCKS:,} blocks, all cached: each evicts; to free includes to commit",
            size,
            evicting(size),
        )
    in_turn("1000 cached blocks, found by a prefix hit", 1000, prefix_hit(), verbs=("retain", "free"))
    in_turn("one request of 8,192 tokens: 10 groups of 512 blocks, 4 of 65", 1000, admission())
    in_turn("a step of 256 sequences: 16 take a block", 100, decode_step())
    construction()


def in_turn(title: str, size: int, sides: dict[str, Side], verbs: tuple[str, str] = ("allocate", "free")) -> None:
    """Time for one call of each side's two halves."""
    calls = calls_of(size)
    halves: dict[str, Callable[[], object]] = {}
    for name, (take, give) in sides.items():
        halves[f"{name} take"], halves[f"{name} give"] = repeated(take, calls), repeated(give, calls)
    timings = take_turns(halves, rounds=ROUNDS, warm_up=3)
    for verb, half in zip(verbs, ("take", "give"), strict=True):
        rows = [timing.divided(calls) for timing in timings if timing.name.endswith(half)]
        rows = [Timing(row.name.removesuffix(f" {half}"), row.runs_s) for row in rows]
        print_table(f"{verb} {title}", rows, floor=LINKED)


def calls_of(size: int) -> int:
    return max(5, 2000 // size)


def repeated(work: Callable[[], object], calls: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(calls):
            work()

    return run


def nothing_cached(size: int) -> dict[str, Side]:
    flat, cut = BlockPool(Geometry(NUM_BLOCKS + 1, (1,))), BlockPool(Geometry(NUM_BLOCKS // 16 + 1, (16, 1)))
    cut.allocate_one(0)  # a slab stays in use
    return {
        "list of ids": list_of_ids(size),
        LINKED: linked(LinkedBlocks(NUM_BLOCKS), size),
        "kvpage": blocks_of(flat, size),
        "kvpage, 16 blocks a slab": blocks_of(cut, size),
    }


def list_of_ids(size: int) -> Side:
    stack, taken = ListStack(NUM_BLOCKS), list[list[int]]()
    return (lambda: taken.append(stack.allocate(size))), (lambda: stack.free(taken.pop()))


def linked(blocks: LinkedBlocks, size: int) -> Side:
    taken: list[list[Block]] = []
    return (lambda: taken.append(blocks.allocate(size))), (lambda: blocks.free(taken.pop()))


def blocks_of(pool: BlockPool, size: int) -> Side:
    if size == 1:
        ones: list[int] = []
        return (lambda: ones.append(pool.allocate_one(0))), (lambda: pool.free_one(0, ones.pop()))
    taken: list[Ints] = []
    return (lambda: taken.append(pool.allocate(0, size))), (lambda: pool.free(0, taken.pop()))


# --- a full cache: what is taken is evicted, and what is given back was committed -------------------------------------


def evicting(size: int) -> dict[str, Side]:
    hashes = count(1)
    blocks = LinkedBlocks(NUM_BLOCKS)
    everything = blocks.allocate(NUM_BLOCKS)
    blocks.commit(everything, hashes_of(hashes, NUM_BLOCKS))
    blocks.free(everything)
    taken: list[list[Block]] = []
    ready = [
        hashes_of(hashes, size) for _ in range((ROUNDS + 3) * calls_of(size))
    ]  # of all rounds, and those that warm up

    def give() -> None:
        mine = taken.pop()
        blocks.commit(mine, ready.pop())
        blocks.free(mine)

    return {
        LINKED: ((lambda: taken.append(blocks.allocate(size))), give),
        "kvpage": committed(full_pool(Geometry(NUM_BLOCKS + 1, (1,))), size),
        "kvpage, and who finds it by hash": found_by_hash(size, hashes),
        "kvpage, 16 blocks a slab": committed(full_pool(Geometry(NUM_BLOCKS // 16 + 1, (16, 1))), size),
    }


def hashes_of(hashes: Iterator[int], number: int) -> list[bytes]:
    """Made beforehand by whoever reads the tokens; here each is one that has not been."""
    return [blake2b(next(hashes).to_bytes(8, "big"), digest_size=16).digest() for _ in range(number)]


def full_pool(geometry: Geometry, on_evict: Callable[[int, Ints], object] | None = None) -> BlockPool:
    pool = BlockPool(geometry, on_evict=on_evict)
    ids = pool.allocate(0, pool.available(0))
    pool.commit(0, ids)
    pool.free(0, ids)
    return pool


def committed(pool: BlockPool, size: int) -> Side:
    taken: list[Ints] = []
    ones: list[int] = []

    def give_one() -> None:
        block = ones.pop()
        pool.commit_one(0, block)
        pool.free_one(0, block)

    def give() -> None:
        ids = taken.pop()
        pool.commit(0, ids)
        pool.free(0, ids)

    if size == 1:
        return (lambda: ones.append(pool.allocate_one(0))), give_one
    return (lambda: taken.append(pool.allocate(0, size))), give


def found_by_hash(size: int, hashes: Iterator[int]) -> Side:
    """With its prefix cache, as the linked list with its map."""
    geometry = Geometry(NUM_BLOCKS + 1, (1,))
    index = PrefixIndex(geometry)
    cache = PrefixCache(BlockPool(geometry, on_evict=index.evicted), index, [Lifetime(kind="full", block_size=16)])
    pool = cache.pool
    everything = pool.allocate(0, NUM_BLOCKS)
    cache.commit(0, everything.tolist(), hashes_of(hashes, NUM_BLOCKS))
    pool.free(0, everything)
    ready = [hashes_of(hashes, size) for _ in range((ROUNDS + 3) * calls_of(size))]
    taken: list[Ints] = []
    ones: list[int] = []

    def give_one() -> None:
        block = ones.pop()
        cache.commit(0, [block], ready.pop())
        pool.free_one(0, block)

    def give() -> None:
        ids = taken.pop()
        cache.commit(0, ids.tolist(), ready.pop())
        pool.free(0, ids)

    if size == 1:
        return (lambda: ones.append(pool.allocate_one(0))), give_one
    return (lambda: taken.append(pool.allocate(0, size))), give


def prefix_hit() -> dict[str, Side]:
    """The same blocks five times: held once more each time, as prefixes are that many begin with."""
    blocks, ready = LinkedBlocks(NUM_BLOCKS), hashes_of(count(1), 1000)
    mine = blocks.allocate(1000)
    blocks.commit(mine, ready)
    blocks.free(mine)
    sides: dict[str, Side] = {LINKED: ((lambda: blocks.touch(mine)), (lambda: blocks.free(mine)))}
    for name, cut in (("kvpage", 1), ("kvpage, 16 blocks a slab", 16)):
        pool = BlockPool(Geometry(NUM_BLOCKS // cut + 1, (cut,)))
        ids = pool.allocate(0, 1000)
        pool.commit(0, ids)
        pool.free(0, ids)
        sides[name] = (partial(pool.retain, 0, ids), partial(pool.free, 0, ids))
    return sides


# --- whole requests ---------------------------------------------------------------------------------------------------


def admission() -> dict[str, Side]:
    counts = dict.fromkeys(range(10), 512) | dict.fromkeys(range(10, 14), 65)
    blocks, taken = LinkedBlocks(NUM_BLOCKS), list[list[list[Block]]]()
    sides: dict[str, Side] = {
        LINKED: (
            lambda: taken.append([blocks.allocate(size) for size in counts.values()]),
            lambda: blocks.free(chain.from_iterable(taken.pop())),
        )
    }
    for name, cut in (("kvpage", (1,) * 14), ("kvpage, 13 blocks a slab", (13,) * 10 + (1,) * 4)):
        sides[name] = tables_of(BlockPool(Geometry(NUM_BLOCKS // cut[0], cut)), counts)
    return sides


def tables_of(pool: BlockPool, counts: dict[int, int]) -> Side:
    held: list[dict[int, Ints]] = []

    def give() -> None:
        for group, ids in held.pop().items():
            pool.free(group, ids)

    return (lambda: held.append(pool.allocate_all(counts))), give


def decode_step() -> dict[str, Side]:
    blocks, singles = LinkedBlocks(NUM_BLOCKS), BlockPool(Geometry(NUM_BLOCKS + 1, (1,)))
    taken, ones = list[list[Block]](), list[int]()

    def take_linked() -> None:
        for _ in range(16):
            taken.append(blocks.allocate(1))

    def give_linked() -> None:
        for _ in range(16):
            blocks.free(taken.pop())

    def take_ones() -> None:
        for _ in range(16):
            ones.append(singles.allocate_one(0))

    def give_ones() -> None:
        for _ in range(16):
            singles.free_one(0, ones.pop())

    return {
        LINKED: (take_linked, give_linked),
        "kvpage, one by one": (take_ones, give_ones),
        "kvpage, a batch of 16": blocks_of(BlockPool(Geometry(NUM_BLOCKS + 1, (1,))), 16),
    }


# --- a million blocks -------------------------------------------------------------------------------------------------

MILLION = """
import sys, time
from pathlib import Path
import linked_blocks
from kvpage.pages.allocator import BlockPool
from kvpage.pages.geometry import Geometry
from kvpage.pages.lifetimes import Lifetime
from kvpage.pages.prefix import PrefixCache
from kvpage.pages.prefix_index import PrefixIndex

def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

BlockPool(Geometry(1000, (1,))).allocate(0, 999)
before, started = resident_bytes(), time.perf_counter()
pool = {
    "kvpage": lambda: BlockPool(Geometry(1_000_001, (1,))),
    "list of ids": lambda: linked_blocks.ListStack(1_000_000),
    "linked list of objects": lambda: linked_blocks.LinkedBlocks(1_000_000),
}[sys.argv[1]]()
took_s = time.perf_counter() - started
if sys.argv[1] == "kvpage":
    for ids in [pool.allocate(0, 1000) for _ in range(1000)]:
        pool.free(0, ids)
    del ids
print(f"{took_s * 1e3:10,.1f} ms {(resident_bytes() - before) / 1e6:8.1f} bytes a block", end="")
if sys.argv[1] == "kvpage":
    taken = [pool.allocate(0, 1000) for _ in range(1000)]
    for ids in taken:
        pool.commit(0, ids)
        pool.free(0, ids)
    del taken
    print(f", {(resident_bytes() - before) / 1e6:.1f} once all keep content", end="")
"""


def construction() -> None:
    print("a million blocks, each side in a process of its own (kvpage: after each was taken and given back)")
    here = Path(__file__).parent  # where linked_blocks is
    for name in ("list of ids", LINKED, "kvpage"):
        done = subprocess.run(
            [sys.executable, "-c", MILLION, name], capture_output=True, text=True, check=True, cwd=here
        )
        print(f"  {name:<40} {done.stdout}")


if __name__ == "__main__":
    main()
