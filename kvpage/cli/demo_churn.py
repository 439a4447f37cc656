"""A process of the demo that uses a pool as a scheduler would: `python -m kvpage.cli.demo_churn POOL NAME RUN_DIR`.

Requests come, find their beginnings in the prefix cache, grow block by block, and end; some share what others hold. It
goes on until its standard input is closed, so it ends with whoever started it, however that ends.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import sys
from dataclasses import dataclass, field

import kvpage
from kvpage.client.socket_lease import SocketLease
from kvpage.errors import NotSupported, OutOfBlocks
from kvpage.pages.hashing import HASH_BYTES

_STEP_S = 0.08
_FULL_SHARE = 0.8
"""Of the pool: as many blocks are held in the busiest hours."""
_BUSY_STEPS = 120  # then as many quiet ones


@dataclass(frozen=True, slots=True)
class _Request:
    """Blocks of one request, by group; a block that it holds twice stands there twice."""

    blocks: dict[int, list[int]] = field(default_factory=dict)


class Churn:
    """Takes and gives back blocks of a lease, a step at a time."""

    def __init__(self, lease: SocketLease, num_groups: int, num_blocks: int, generator: random.Random) -> None:
        """`num_blocks`: to hold at most."""
        self._lease, self._num_groups, self._num_blocks = lease, num_groups, num_blocks
        self._random = generator
        self._requests: list[_Request] = []
        self._num_held = self._num_steps = 0

    def step(self) -> None:
        self._num_steps += 1
        is_busy = self._num_steps // _BUSY_STEPS % 2 == 0
        wanted = self._num_blocks if is_busy else self._num_blocks // 4
        if self._num_held < wanted and self._random.random() < 0.75:
            self._begin_or_grow()
        elif self._requests:
            self._end(self._requests.pop(self._random.randrange(len(self._requests))))

    def _begin_or_grow(self) -> None:
        if not self._requests or self._random.random() < 0.3:
            self._requests.append(_Request())
        request, group = self._random.choice(self._requests), self._random.randrange(self._num_groups)
        try:
            blocks = self._lease.allocate(group, self._random.randint(1, 6)).tolist()
        except OutOfBlocks:
            self._end(self._requests.pop(0))
            return
        if self._random.random() < 0.5:
            self._keep(group, blocks)
        request.blocks.setdefault(group, []).extend(blocks)
        self._num_held += len(blocks)
        if self._random.random() < 0.2:  # another request goes on from the same beginning
            self._lease.retain(group, blocks)
            self._requests.append(_Request({group: list(blocks)}))

    def _keep(self, group: int, blocks: list[int]) -> None:
        """Their content stays cached once nobody holds them, where the plan allows it."""
        with contextlib.suppress(NotSupported):
            self._lease.commit(group, blocks, [self._random.randbytes(HASH_BYTES) for _ in blocks])

    def _end(self, request: _Request) -> None:
        for group, blocks in request.blocks.items():
            self._lease.free(group, blocks)
            self._num_held -= len(blocks)


def main(pool: str, name: str, run_dir: str) -> int:
    with kvpage.Client(run_dir=run_dir) as client:
        found = client.find_pool(pool)
        blocks = client.get_pool(found.id).blocks
    if blocks is None:
        raise NotSupported(f"no blocks of pool {pool!r} can be leased")
    share = int(_FULL_SHARE * sum(group.available for group in blocks.groups) / len(blocks.groups) / 2)
    with kvpage.open_lease(pool, name=name, tenant=name.split("-")[0], run_dir=run_dir, client_name=name) as lease:
        churn = Churn(lease, len(blocks.groups), share, random.Random(os.getpid()))
        while not select.select([sys.stdin], [], [], _STEP_S)[0]:
            churn.step()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
