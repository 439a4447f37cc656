"""Blocks taken and given back, beside vLLM's block pool and beside a linked list of objects, which is how vLLM keeps
them.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from hashlib import blake2b
from itertools import count
from pathlib import Path

import block_keepers
from block_keepers import LINKED, Keeper, Side, keepers
from kvpage.pages.allocator import BlockPool
from kvpage.pages.arrays import Ints
from kvpage.pages.geometry import Geometry
from kvpage.pages.lifetimes import Lifetime
from kvpage.pages.prefix import PrefixCache
from kvpage.pages.prefix_index import PrefixIndex
from measure import Effort, Row, Runs, compare, take_turns
from report import VLLM_POOL, Pair, Subject, main_of
from vllm_peer import vllm

NUM_BLOCKS = 100_000
ROUNDS, MEMORY_ROUNDS = 30, 2
WARM_UP = 3
SIZES = (1, 10, 1000)
OURS, FOUND, CUT = "kvpage", "kvpage with its prefix cache", "kvpage, slabs"
BATCH, SINGLY = "kvpage, a batch of 16", "kvpage, one by one"
BYTES, TIME = "bytes of a million blocks", "a million blocks made"
ALLOCATE, FREE, AGAIN = "allocate", "free", "hold again"
ABOUT = """
`benchmarks/pages.py`. Blocks of a pool of 100,000 are taken and given back. Beside it:

- vLLM's own `BlockPool`, with caching, where a vLLM is at hand. It keeps hashes of what is cached, so it stands beside
  kvpage with its prefix cache where content is cached.
- A linked list of objects (`benchmarks/linked_blocks.py`): written anew, as vLLM keeps its blocks, without what else
  its pool does. It is always there.

*Slabs* are groups that cut a slab into 16 blocks, or 13 for the request. *All cached*: each block that is taken was
evicted, and is committed before it is freed; to free includes that. A request of 8,192 tokens takes 512 blocks of ten
groups and 65 of four. In a step of decoding, 16 of 256 sequences take a block.
"""


def measure(effort: Effort) -> list[Row]:
    rounds = effort.rounds(ROUNDS)
    rows: list[Row] = []
    for size in SIZES:
        rows += in_turn(nothing_cached(size), _free_title(size), size, rounds)
    for size in SIZES:
        rows += in_turn(evicting(size, rounds), _cached_title(size), size, rounds)
    rows += in_turn(prefix_hit(), PREFIX_HIT, 1000, rounds, verbs=(AGAIN, FREE))
    rows += in_turn(admission(), REQUEST, 1000, rounds)
    rows += in_turn(decode_step(), STEP, 100, rounds)
    return rows + construction(effort.rounds(MEMORY_ROUNDS))


PREFIX_HIT, REQUEST, STEP = "1,000 cached blocks", "a request of 8,192 tokens", "a step of decoding"


def _free_title(size: int) -> str:
    return f"{size:,} of {NUM_BLOCKS:,}"


def _cached_title(size: int) -> str:
    return f"{_free_title(size)}, all cached"


def _row_name(side: str, verb: str, title: str) -> str:
    return f"{side}: {verb} {title}"


def _peers_of(sides: Sequence[str]) -> Iterator[Pair]:
    """Each side of ours and its peers, whether vLLM is there or not."""
    ours = [side for side in sides if side not in (LINKED, VLLM_POOL)]
    yield from ((side, LINKED) for side in ours)
    like_theirs = [FOUND] if FOUND in ours else [side for side in ours if side != CUT]
    yield from ((side, VLLM_POOL) for side in like_theirs)


def in_turn(
    sides: dict[str, Side], title: str, size: int, rounds: int, verbs: tuple[str, str] = (ALLOCATE, FREE)
) -> list[Row]:
    """A row for each of the two halves of a side and each of its peers, for one call."""
    calls = calls_of(size)
    halves: dict[str, Callable[[], object]] = {}
    for name, (take, give) in sides.items():
        halves[f"{name} {verbs[0]}"], halves[f"{name} {verbs[1]}"] = repeated(take, calls), repeated(give, calls)
    timed = {name: runs.divided(calls) for name, runs in take_turns(halves, rounds=rounds, warm_up=WARM_UP).items()}
    return [
        compare(timed[f"{ours} {verb}"].named(_row_name(ours, verb, title)), timed[f"{peer} {verb}"].named(peer))
        for verb in verbs
        for ours, peer in _peers_of(list(sides))
        if peer in sides
    ]


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
    return peers(partial(block_keepers.taking, size=size)) | {OURS: blocks_of(flat, size), CUT: blocks_of(cut, size)}


def peers(side_of: Callable[[Keeper], Side]) -> dict[str, Side]:
    """The same of each peer, with a pool of its own."""
    return {name: side_of(keeper) for name, keeper in keepers(NUM_BLOCKS).items()}


def blocks_of(pool: BlockPool, size: int) -> Side:
    if size == 1:
        ones: list[int] = []
        return (lambda: ones.append(pool.allocate_one(0))), (lambda: pool.free_one(0, ones.pop()))
    taken: list[Ints] = []
    return (lambda: taken.append(pool.allocate(0, size))), (lambda: pool.free(0, taken.pop()))


# --- a full cache: what is taken is evicted, and what is given back was committed -------------------------------------


def evicting(size: int, rounds: int) -> dict[str, Side]:
    """Each hash is used once: those of all rounds, and of those that warm up, are made beforehand."""
    hashes = count(1)
    cached = hashes_of(hashes, NUM_BLOCKS)
    to_come = [hashes_of(hashes, size) for _ in range((rounds + WARM_UP) * calls_of(size))]
    return peers(partial(block_keepers.evicting, size=size, cached=cached, to_come=to_come)) | {
        OURS: committed(full_pool(Geometry(NUM_BLOCKS + 1, (1,))), size),
        FOUND: found_by_hash(size, cached, to_come),
        CUT: committed(full_pool(Geometry(NUM_BLOCKS // 16 + 1, (16, 1))), size),
    }


def hashes_of(hashes: Iterator[int], number: int) -> list[bytes]:
    """Made beforehand by whoever reads the tokens; here each is one that has not been."""
    return [blake2b(next(hashes).to_bytes(8, "big"), digest_size=16).digest() for _ in range(number)]


def full_pool(geometry: Geometry) -> BlockPool:
    pool = BlockPool(geometry)
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


def found_by_hash(size: int, cached: list[bytes], to_come: Sequence[list[bytes]]) -> Side:
    """With its prefix cache, as the peers with their maps."""
    geometry = Geometry(NUM_BLOCKS + 1, (1,))
    index = PrefixIndex(geometry)
    cache = PrefixCache(BlockPool(geometry, on_evict=index.evicted), index, [Lifetime(kind="full", block_size=16)])
    pool = cache.pool
    everything = pool.allocate(0, NUM_BLOCKS)
    cache.commit(0, everything.tolist(), cached)
    pool.free(0, everything)
    ready = list(to_come)
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
    """The same blocks again and again: held once more each time, as prefixes are that many begin with."""
    sides = peers(partial(block_keepers.held_again, hashes=hashes_of(count(1), 1000)))
    for name, cut in ((OURS, 1), (CUT, 16)):
        pool = BlockPool(Geometry(NUM_BLOCKS // cut + 1, (cut,)))
        ids = pool.allocate(0, 1000)
        pool.commit(0, ids)
        pool.free(0, ids)
        sides[name] = (partial(pool.retain, 0, ids), partial(pool.free, 0, ids))
    return sides


# --- whole requests ---------------------------------------------------------------------------------------------------


def admission() -> dict[str, Side]:
    counts = dict.fromkeys(range(10), 512) | dict.fromkeys(range(10, 14), 65)
    sides = peers(partial(block_keepers.tables, counts=tuple(counts.values())))
    for name, cut in ((OURS, (1,) * 14), (CUT, (13,) * 10 + (1,) * 4)):
        sides[name] = tables_of(BlockPool(Geometry(NUM_BLOCKS // cut[0], cut)), counts)
    return sides


def tables_of(pool: BlockPool, counts: dict[int, int]) -> Side:
    held: list[dict[int, Ints]] = []

    def give() -> None:
        for group, ids in held.pop().items():
            pool.free(group, ids)

    return (lambda: held.append(pool.allocate_all(counts))), give


def decode_step() -> dict[str, Side]:
    singles, ones = BlockPool(Geometry(NUM_BLOCKS + 1, (1,))), list[int]()

    def take_ones() -> None:
        for _ in range(16):
            ones.append(singles.allocate_one(0))

    def give_ones() -> None:
        for _ in range(16):
            singles.free_one(0, ones.pop())

    return peers(partial(block_keepers.one_by_one, count=16)) | {
        SINGLY: (take_ones, give_ones),
        BATCH: blocks_of(BlockPool(Geometry(NUM_BLOCKS + 1, (1,))), 16),
    }


# --- a million blocks -------------------------------------------------------------------------------------------------

MILLION = """
import sys, time
from pathlib import Path
import block_keepers
from kvpage.pages.allocator import BlockPool
from kvpage.pages.geometry import Geometry

def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

BlockPool(Geometry(1000, (1,))).allocate(0, 999)
make = {
    "kvpage": lambda: BlockPool(Geometry(1_000_001, (1,))),
    "a linked list of objects": lambda: block_keepers.LinkedBlocks(1_000_000),
    "vLLM's block pool": lambda: block_keepers.vllm().pool(1_000_000),
}[sys.argv[1]]
block_keepers.vllm()
before, started = resident_bytes(), time.perf_counter()
pool = make()
took_s = time.perf_counter() - started
if sys.argv[1] == "kvpage":
    for ids in [pool.allocate(0, 1000) for _ in range(1000)]:
        pool.free(0, ids)
    del ids
print(took_s, resident_bytes() - before)
"""


def construction(rounds: int) -> list[Row]:
    """A million blocks, each time in a process of its own; kvpage's after each block was taken and given back."""
    peers = [LINKED, *([VLLM_POOL] if vllm() else [])]
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in (OURS, *peers)}
    for _ in range(rounds):
        for name, found in runs.items():
            found.append(_in_a_process(name))
    seconds = {name: Runs(name, tuple(took_s for took_s, _ in found)) for name, found in runs.items()}
    sizes = {name: Runs(name, tuple(size for _, size in found)) for name, found in runs.items()}
    return [
        row
        for peer in peers
        for row in (
            compare(seconds[OURS].named(TIME), seconds[peer]),
            compare(sizes[OURS].named(BYTES), sizes[peer], unit="bytes"),
        )
    ]


def _in_a_process(name: str) -> tuple[float, float]:
    here = Path(__file__).parent  # where block_keepers is
    done = subprocess.run([sys.executable, "-c", MILLION, name], capture_output=True, text=True, check=True, cwd=here)
    took_s, size_bytes = done.stdout.split()
    return float(took_s), float(size_bytes)


def _pairs() -> tuple[Pair, ...]:
    """All rows, whether vLLM is there or not."""
    parts = [([OURS, CUT], _free_title(size), ALLOCATE) for size in SIZES]
    parts += [([OURS, FOUND, CUT], _cached_title(size), ALLOCATE) for size in SIZES]
    parts += [([OURS, CUT], PREFIX_HIT, AGAIN), ([OURS, CUT], REQUEST, ALLOCATE), ([SINGLY, BATCH], STEP, ALLOCATE)]
    blocks = [
        (_row_name(ours, verb, title), peer)
        for sides, title, first in parts
        for verb in (first, FREE)
        for ours, peer in _peers_of(sides)
    ]
    return (*blocks, *((what, peer) for peer in (LINKED, VLLM_POOL) for what in (TIME, BYTES)))


IN_SHORT = (
    (_row_name(OURS, ALLOCATE, REQUEST), VLLM_POOL),
    (_row_name(OURS, FREE, REQUEST), VLLM_POOL),
    (_row_name(SINGLY, ALLOCATE, STEP), VLLM_POOL),
    (_row_name(FOUND, FREE, _cached_title(1)), VLLM_POOL),
    (_row_name(FOUND, FREE, _cached_title(1000)), VLLM_POOL),
)
SUBJECT = Subject(title="Blocks", about=ABOUT, pairs=_pairs(), measure=measure, in_short=IN_SHORT)

if __name__ == "__main__":
    main_of(SUBJECT)
