"""Blocks leased from a worker process, beside a bare exchange of a few bytes between two processes of plain Python, and
the same steps in this process."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import kvpage
from attaching import create, worker
from kvpage.client.block_stock import BlockStock
from kvpage.pages.leased_pool import LeasedPool
from kvpage.pages.local_lease import LocalLease
from measure import Effort, Row, beside, take_turns
from report import Subject, main_of

ROUNDS = 1500
FLOOR = "64 bytes there and back"
STOCKED = "a block of a stock, taken and put back"
LOCAL = "the same in this process"
OVER_SOCKET = ("one block", "free one", "100 blocks", "free 100 blocks", "1,000 blocks", "free 1,000 blocks")
ABOUT = """
`benchmarks/leasing.py`. Blocks of a lease are asked of the worker over its socket, in a pool of 100,000 blocks. Beside
it: 64 bytes sent to another process of plain Python and back, which is as quick as asking another process can be in
Python. A stock asks the worker once for a thousand blocks. The last rows are batches without a worker.
"""
ECHO = """
import socket
with socket.socket(fileno=0) as sock:
    while data := sock.recv(65536):
        sock.send(data)
"""


def request() -> dict[str, Any]:
    """100,000 small blocks in two groups, so that making the pool takes no time."""
    layer = {"kind": "full_attention", "block_size": 16, "num_kv_heads": 1, "head_size": 16, "dtype": "bfloat16"}
    window = layer | {"kind": "sliding_window", "sliding_window": 1024, "name": "window"}
    layers = [layer | {"name": "full", "backend": "flash_attn"}, window | {"backend": "flash_attn"}]
    return {"strategy": "unify", "num_blocks": 100_000, "max_model_len": 8192, "layers": layers}


def measure(effort: Effort) -> list[Row]:
    plan = kvpage.plan(request())
    with tempfile.TemporaryDirectory(prefix="kvpage-bench-") as folder, worker(folder):
        create(folder, plan)
        with kvpage.open_lease("bench", name="bench", run_dir=folder) as lease, _echo() as echo:
            sides = {FLOOR: echo} | _halves(lease.allocate_one, lease.free_one)
            sides |= _batches(lease, 100) | _batches(lease, 1000)
            rows = beside(FLOOR, take_turns(sides, rounds=effort.rounds(ROUNDS), warm_up=50))
            with BlockStock(lease, 0, batch=1000) as stock:
                timed = take_turns({FLOOR: echo, STOCKED: _many(stock)}, rounds=effort.rounds(ROUNDS // 10), warm_up=10)
                timed[STOCKED] = timed[STOCKED].divided(1000)
                rows += beside(FLOOR, timed)
            with LeasedPool(plan) as pool, LocalLease(pool, "bench") as local:
                sides = {FLOOR: echo} | {f"{name}, {LOCAL}": work for name, work in _batches(local, 1000).items()}
                rows += beside(FLOOR, take_turns(sides, rounds=effort.rounds(ROUNDS), warm_up=50))
    return rows


def _halves(allocate: Callable[[int], int], free: Callable[[int, int], object]) -> dict[str, Callable[[], object]]:
    held: list[int] = []
    return {
        "one block": lambda: held.append(allocate(0)),
        "free one": lambda: free(0, held.pop()),
    }


def _batches(lease: Any, count: int) -> dict[str, Callable[[], object]]:
    held: list[Any] = []
    return {
        f"{count:,} blocks": lambda: held.append(lease.allocate(0, count)),
        f"free {count:,} blocks": lambda: lease.free(0, held.pop()),
    }


def _many(stock: BlockStock) -> Callable[[], None]:
    def take_and_put() -> None:
        for _ in range(1000):
            stock.put(stock.take())

    return take_and_put


@contextmanager
def _echo() -> Iterator[Callable[[], None]]:
    """The floor: another process sends back what it is sent, and does nothing else."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    process = subprocess.Popen([sys.executable, "-c", ECHO], stdin=theirs.fileno())
    theirs.close()
    message = bytes(64)

    def exchange() -> None:
        ours.send(message)
        ours.recv(65536)

    try:
        yield exchange
    finally:
        ours.close()
        process.wait()


PAIRS = (*OVER_SOCKET, STOCKED, f"1,000 blocks, {LOCAL}", f"free 1,000 blocks, {LOCAL}")
SUBJECT = Subject(title="Leasing", about=ABOUT, pairs=tuple((name, FLOOR) for name in PAIRS), measure=measure)

if __name__ == "__main__":
    main_of(SUBJECT)
