"""Who else keeps blocks: a linked list of objects, and vLLM's pool where it is at hand, by the same four verbs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from linked_blocks import LinkedBlocks
from report import VLLM_POOL
from vllm_peer import request_of, vllm

LINKED = "a linked list of objects"
Side = tuple[Callable[[], object], Callable[[], object]]
"""Takes some blocks; gives them back. Called in turn."""


class Keeper(NamedTuple):
    """Bound methods, so that the time is theirs."""

    allocate: Callable[[int], Any]
    commit: Callable[[Sequence[Any], Any], object]
    """Blocks, and what `prepare` made of their hashes."""
    touch: Callable[[Sequence[Any]], object]
    free: Callable[[Iterable[Any]], object]
    prepare: Callable[[list[bytes]], Any] = lambda hashes: hashes


def keepers(num_blocks: int) -> dict[str, Keeper]:
    """New ones, by the names of the peers that they are."""
    blocks = LinkedBlocks(num_blocks)
    found = {LINKED: Keeper(blocks.allocate, blocks.commit, blocks.touch, blocks.free)}
    modules = vllm()
    if modules is not None:
        pool = modules.pool(num_blocks)
        cache = pool.cache_full_blocks

        def commit(full: Sequence[Any], request: Any) -> None:
            cache(request, full, 0, len(full), 16, 0)

        found[VLLM_POOL] = Keeper(pool.get_new_blocks, commit, pool.touch, pool.free_blocks, request_of)
    return found


def taking(keeper: Keeper, size: int) -> Side:
    taken: list[Any] = []
    return (lambda: taken.append(keeper.allocate(size))), (lambda: keeper.free(taken.pop()))


def one_by_one(keeper: Keeper, count: int) -> Side:
    taken: list[Any] = []

    def take() -> None:
        for _ in range(count):
            taken.append(keeper.allocate(1))

    def give() -> None:
        for _ in range(count):
            keeper.free(taken.pop())

    return take, give


def evicting(keeper: Keeper, size: int, cached: list[bytes], to_come: Sequence[list[bytes]]) -> Side:
    """All blocks hold content by the hashes `cached`; what is given back is committed by those `to_come` first."""
    everything = keeper.allocate(len(cached))
    keeper.commit(everything, keeper.prepare(cached))
    keeper.free(everything)
    ready = [keeper.prepare(hashes) for hashes in to_come]
    taken: list[Any] = []

    def give() -> None:
        mine = taken.pop()
        keeper.commit(mine, ready.pop())
        keeper.free(mine)

    return (lambda: taken.append(keeper.allocate(size))), give


def held_again(keeper: Keeper, hashes: list[bytes]) -> Side:
    mine = keeper.allocate(len(hashes))
    keeper.commit(mine, keeper.prepare(hashes))
    keeper.free(mine)
    return (lambda: keeper.touch(mine)), (lambda: keeper.free(mine))


def tables(keeper: Keeper, counts: Sequence[int]) -> Side:
    """A request's blocks, table by table."""
    taken: list[list[Any]] = []

    def give() -> None:
        for blocks in taken.pop():
            keeper.free(blocks)

    return (lambda: taken.append([keeper.allocate(size) for size in counts])), give
