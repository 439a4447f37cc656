"""Run as a program: a client process with leases, told what to do by JSON, one command on a line of standard input.

It keeps books of what it was given and has given back, and compares them with what the worker says (`audit`).
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from typing import Any

import kvpage
from kvpage.client.block_stock import BlockStock
from kvpage.client.socket_lease import SocketLease, SocketReservation
from kvpage.errors import KvpageError
from kvpage.pages.steps import Content, Grant, Step

TIMEOUT_S = 60.0
Groups = dict[str, Any]


def numbered(groups: Groups) -> dict[int, Any]:
    return {int(group): value for group, value in groups.items()}


class Program:
    """One method for each command; `lease` is the name of one."""

    def __init__(self) -> None:
        self.leases: dict[str, SocketLease] = {}
        self.books: dict[str, Counter[tuple[int, int]]] = {}
        self.reservations: dict[str, SocketReservation] = {}

    def open(self, *, pool: str, run_dir: str, lease: str, token: str, keep_s: float = 0.0) -> dict[str, Any]:
        options = {"device": "host", "run_dir": run_dir, "timeout_s": TIMEOUT_S}
        self.leases[lease] = kvpage.open_lease(pool, name=lease, token=token, keep_s=keep_s, **options)  # type: ignore[arg-type]
        self.books[lease] = Counter()
        return {}

    def adopt(self, *, pool: str, run_dir: str, lease: str, token: str, keep_s: float = 0.0) -> dict[str, Any]:
        options = {"device": "host", "run_dir": run_dir, "timeout_s": TIMEOUT_S}
        self.leases[lease] = kvpage.adopt_lease(pool, name=lease, token=token, keep_s=keep_s, **options)  # type: ignore[arg-type]
        self.books[lease] = self._held(lease)
        return {}

    def _held(self, lease: str) -> Counter[tuple[int, int]]:
        return Counter(
            {
                (group, int(block)): int(times)
                for group, held in self.leases[lease].held().items()
                for block, times in zip(held.ids, held.times, strict=True)
            }
        )

    def step(
        self,
        *,
        lease: str,
        allocate: Groups | None = None,
        free: Groups | None = None,
        retain: Groups | None = None,
        commit: Groups | None = None,
        wait_s: float = 0.0,
    ) -> dict[str, Any]:
        contents = {
            group: Content(ids, [bytes.fromhex(one) for one in hashes])
            for group, (ids, hashes) in numbered(commit or {}).items()
        }
        step = Step(
            key=self.leases[lease].new_key(), commit=contents, retain=numbered(retain or {}),
            free=numbered(free or {}), allocate=numbered(allocate or {}),
        )  # fmt: skip
        grant = self.leases[lease].step(step, wait_s=wait_s)
        book = self.books[lease]
        book.update((group, block) for group, ids in step.retain.items() for block in ids)
        book.subtract((group, block) for group, ids in step.free.items() for block in ids)
        return self._granted(lease, grant)

    def _granted(self, lease: str, grant: Grant) -> dict[str, Any]:
        ids = {group: sorted(ids.tolist()) for group, ids in grant.ids.items()}
        self.books[lease].update((group, block) for group, some in ids.items() for block in some)
        return {"ids": ids}

    def take_prefix(self, *, lease: str, hashes: list[list[str]], tokens: int) -> dict[str, Any]:
        found = self.leases[lease].take_prefix([[bytes.fromhex(one) for one in some] for some in hashes], tokens)
        ids = {group: some.tolist() for group, some in enumerate(found.ids)}
        self.books[lease].update((group, block) for group, some in ids.items() for block in some)
        return {"tokens": found.num_tokens, "ids": ids}

    def reserve(self, *, lease: str, counts: Groups) -> dict[str, Any]:
        self.reservations[lease] = self.leases[lease].reserve(numbered(counts))
        return {}

    def commit(self, *, lease: str) -> dict[str, Any]:
        return self._granted(lease, self.reservations.pop(lease).commit())

    def give_back(self, *, lease: str) -> dict[str, Any]:
        self.reservations.pop(lease).give_back()
        return {}

    def stock(self, *, lease: str, group: int, count: int) -> dict[str, Any]:
        """Take so many by a stock, and leave what else is in it to nobody."""
        with BlockStock(self.leases[lease], group, batch=2) as stock:
            ids = [stock.take() for _ in range(count)]
        self.books[lease].update((group, block) for block in ids)
        return {"ids": {group: ids}}

    def close(self, *, lease: str) -> dict[str, Any]:
        self.leases.pop(lease).close()
        del self.books[lease]
        return {}

    def audit(self) -> dict[str, Any]:
        """By lease: group, block, times. Raises AssertionError where the worker says something else."""
        for lease in self.leases:
            book, held = +self.books[lease], self._held(lease)
            assert held == book, f"{lease} has got {sorted(book.items())}, and is said to hold {sorted(held.items())}"
        return {
            "books": {lease: [[*place, times] for place, times in self.books[lease].items()] for lease in self.leases}
        }

    def leave(self) -> dict[str, Any]:
        """As one who dies without a word."""
        os.kill(os.getpid(), 9)
        return {}


def main() -> None:
    program = Program()
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = getattr(program, command.pop("do"))(**command)
        except (KvpageError, AssertionError) as error:
            answer = {"error": getattr(error, "code", "wrong"), "message": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
