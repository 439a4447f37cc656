"""A linked list of objects, which `pages.py` compares with where no vLLM is at hand.

It is how vLLM 0.33 keeps free blocks (v1/core/block_pool.py), written anew, call for call what a block costs there: an
object a block in a doubly linked queue with a sentinel at each end; blocks with a hash at the back and in a map by hash
and group, evicted from the front; those without at the front. Left out: events, metrics, reading the tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise


class Block:
    __slots__ = ("_block_hash", "after", "before", "block_id", "is_null", "ref_cnt")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.is_null = False
        self._block_hash: bytes | None = None
        self.before: Block | None = None
        self.after: Block | None = None

    @property
    def block_hash(self) -> bytes | None:
        return self._block_hash

    @block_hash.setter
    def block_hash(self, block_hash: bytes) -> None:
        assert self._block_hash is None
        self._block_hash = block_hash

    def reset_hash(self) -> None:
        self._block_hash = None


class HashMap:
    """Hash -> a block, or several by their ids."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, Block | dict[int, Block]] = {}

    def insert(self, block_hash: bytes, block: Block) -> None:
        known = self._blocks.get(block_hash)
        if known is None:
            self._blocks[block_hash] = block
        elif isinstance(known, Block):
            self._blocks[block_hash] = {known.block_id: known, block.block_id: block}
        else:
            known[block.block_id] = block

    def pop(self, block_hash: bytes, block_id: int) -> Block | None:
        known = self._blocks.pop(block_hash, None)
        if known is None or isinstance(known, Block):
            return known
        found = known.pop(block_id, None)
        if known:
            self._blocks[block_hash] = known
        return found


class FreeQueue:
    def __init__(self, blocks: list[Block]) -> None:
        self.num_free = len(blocks)
        self.head, self.tail = Block(-1), Block(-1)
        for before, after in pairwise([self.head, *blocks, self.tail]):
            before.after, after.before = after, before

    def pop(self, count: int) -> list[Block]:
        self.num_free -= count
        taken: list[Block] = []
        block = self.head.after
        for _ in range(count):
            assert block is not None
            taken.append(block)
            last, block = block, block.after
            last.before = last.after = None
        assert block is not None
        self.head.after, block.before = block, self.head
        return taken

    def append(self, blocks: list[Block]) -> None:
        last = self.tail.before
        assert last is not None
        self._link(last, blocks, self.tail)

    def prepend(self, blocks: list[Block]) -> None:
        first = self.head.after
        assert first is not None
        self._link(self.head, blocks, first)

    def remove(self, block: Block) -> None:
        before, after = block.before, block.after
        assert before is not None
        assert after is not None
        before.after, after.before = after, before
        block.before = block.after = None
        self.num_free -= 1

    def _link(self, before: Block, blocks: list[Block], after: Block) -> None:
        for block in blocks:
            block.before, before.after = before, block
            before = block
        before.after, after.before = after, before
        self.num_free += len(blocks)


class LinkedBlocks:
    def __init__(self, num_blocks: int) -> None:
        self.blocks = [Block(number) for number in range(num_blocks + 1)]
        self.queue = FreeQueue(self.blocks[1:])
        self.by_hash = HashMap()
        self.metrics = None

    def allocate(self, count: int) -> list[Block]:
        if count > self.queue.num_free:
            raise ValueError(f"{count} blocks of {self.queue.num_free}")
        taken = self.queue.pop(count)
        for block in taken:
            self._maybe_evict(block)
            assert block.ref_cnt == 0
            block.ref_cnt += 1
            if self.metrics:
                raise NotImplementedError
        return taken

    def _maybe_evict(self, block: Block) -> bool:
        if self.metrics:
            raise NotImplementedError
        block_hash = block.block_hash
        if block_hash is None:
            return False
        if self.by_hash.pop(block_hash, block.block_id) is None:
            return False
        block.reset_hash()
        return True

    def commit(self, blocks: Sequence[Block], hashes: Iterable[bytes]) -> None:
        for block, content_hash in zip(blocks, hashes, strict=True):
            if block.is_null:
                continue
            block_hash = content_hash + (0).to_bytes(4, "big")  # the group's number
            block.block_hash = block_hash
            self.by_hash.insert(block_hash, block)

    def touch(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            if block.ref_cnt == 0 and not block.is_null:
                self.queue.remove(block)
            block.ref_cnt += 1

    def free(self, ordered: Iterable[Block]) -> None:
        blocks = list(ordered)
        for block in blocks:
            block.ref_cnt -= 1
        free = [block for block in blocks if block.ref_cnt == 0 and not block.is_null]
        bare = [block for block in free if block.block_hash is None]
        hashed = [block for block in free if block.block_hash is not None]
        if bare:
            self.queue.prepend(bare)
        if hashed:
            self.queue.append(hashed)
