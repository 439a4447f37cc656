"""A pool of a worker process, and leases on it over the worker's socket."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvpage
from kvpage.client.socket_lease import SocketLease
from kvpage.plans import Plan
from kvpage.wire import leasing, messages
from support.lease_machine import Way
from support.pools import finish_adoption
from support.worker_process import WorkerProcess

_numbers = itertools.count(1)


class ServedPools:
    """A worker, and a keeper of its pools who hands them to its successor, as the API process does."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.worker = WorkerProcess(run_dir)
        self.keeper = self.worker.client(role="api")
        self._kept: dict[str, tuple[list[messages.ChunkInfo], list[int]]] = {}

    def create(self, plan: Plan, name: str) -> messages.PoolState:
        body = messages.CreatePool(
            name=name, plan_id=plan.plan_id, plan=plan.to_json(), buffer_size_bytes=plan.buffer_size_bytes
        )
        pool = self.keeper.ask(body, messages.PoolCreated).pool
        pool = self.keeper.ask(messages.WaitPool(pool_id=pool.pool_id, timeout_s=60), messages.PoolState)
        assert pool.state == "ready", pool.error
        reply = self.keeper.request(messages.ExportPool(pool_id=pool.pool_id))
        assert isinstance(reply.body, messages.Exported)
        self._kept[pool.pool_id] = (reply.body.chunks, reply.fds)
        return pool

    def delete(self, pool_id: str, *, force: bool = False) -> None:
        self._drop(pool_id)
        self.keeper.ask(messages.DeletePool(pool_id=pool_id, force=force), messages.PoolDeleted)

    def _drop(self, pool_id: str) -> None:
        for fd in self._kept.pop(pool_id)[1]:
            os.close(fd)

    def blocks(self, pool_id: str) -> leasing.BlocksState:
        return self.keeper.ask(leasing.DescribeBlocks(pool_id=pool_id), leasing.BlocksState)

    def kept_fds(self, pool_id: str) -> list[int]:
        """Of the chunks and the control block."""
        return self._kept[pool_id][1]

    def num_mapped(self) -> int:
        """States of pools that the worker has mapped."""
        return Path(f"/proc/{self.worker.pid}/maps").read_text().count("/memfd:")

    def kill(self, before_adoption: Callable[[], None] = lambda: None) -> None:
        """kill -9, and a successor that is handed what was kept."""
        self.keeper.close()
        self.worker.kill()
        self.begin(before_adoption)

    def end(self) -> None:
        """SIGTERM, and no successor yet. It ends while its keeper is there, or its successor would expect no pools."""
        assert self.worker.terminate() == 0
        self.keeper.close()

    def begin(self, before_adoption: Callable[[], None] = lambda: None) -> None:
        """A successor of a worker that has ended."""
        self.worker = WorkerProcess(self.run_dir)
        before_adoption()
        self.keeper = self.worker.client(role="api")
        for chunks, fds in self._kept.values():
            self.keeper.ask(messages.AdoptPool(chunks=chunks), messages.PoolState, fds)
        finish_adoption(self.keeper)

    def replace(self) -> None:
        """A new worker takes over from the one that runs."""
        before, self.worker = self.worker, WorkerProcess(self.run_dir, "--replace")
        assert before.wait() == 0

    def close(self) -> None:
        for pool_id in list(self._kept):
            self._drop(pool_id)
        self.keeper.close()
        if not self.worker.ended:
            self.worker.kill()


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedPools]:
    """One worker for all tests of a file."""
    pools = ServedPools(tmp_path_factory.mktemp("run"))
    yield pools
    pools.close()


class OverSocket(Way):
    def __init__(self, pools: ServedPools, plan: Plan) -> None:
        self.pools, self.name = pools, f"pool {next(_numbers)}"
        self.pool_id = pools.create(plan, self.name).pool_id
        self._restarts = itertools.cycle((pools.kill, pools.replace))

    def open(self, name: str, **options: Any) -> SocketLease:
        return kvpage.open_lease(self.name, name=name, device="host", run_dir=str(self.pools.run_dir), **options)

    def adopt(self, name: str, token: str, **options: Any) -> SocketLease:
        return kvpage.adopt_lease(
            self.name, name=name, token=token, device="host", run_dir=str(self.pools.run_dir), **options
        )

    def free_slabs(self) -> int:
        blocks = self.pools.blocks(self.pool_id)
        return blocks.free_slabs + blocks.idle_slabs

    def check(self) -> None:
        """A worker proves nothing when it is asked; what it says of itself must add up."""
        blocks = self.pools.blocks(self.pool_id)
        owned = sum(group.slabs for group in blocks.groups)
        assert owned + blocks.free_slabs + 1 == blocks.num_slabs

    def restart(self) -> bool:
        next(self._restarts)()
        return True

    def close(self) -> None:
        self.pools.delete(self.pool_id)
