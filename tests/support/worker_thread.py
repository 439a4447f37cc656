"""A worker in a thread of the test, with fake memory and limits of the test's choice, behind a real socket."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Self

from kvpage.memory.fake import FakeCalls, FakeMemory
from kvpage.memory.host import HostMemory
from kvpage.run_directory import RunDirectory
from kvpage.wire.client import WorkerClient
from kvpage.wire.messages import Role
from kvpage_server.worker_budget import Budget
from kvpage_server.worker_device import DeviceMemory
from kvpage_server.worker_disposal import Disposal
from kvpage_server.worker_endpoint import Endpoint
from kvpage_server.worker_limits import Limits
from kvpage_server.worker_loop import Loop
from kvpage_server.worker_memory import MemoryKeeper
from kvpage_server.worker_pools import PoolTable
from kvpage_server.worker_server import Server


class Gate:
    """Holds up whoever is about to make one system call: `arrived` is set when one waits, `open` lets all pass."""

    def __init__(self, call: str = "commit") -> None:
        self._call = call
        self.arrived = threading.Event()
        self._opened = threading.Event()

    def open(self) -> None:
        self._opened.set()

    def pass_through(self, call: str) -> None:
        if call != self._call:
            return
        self.arrived.set()
        assert self._opened.wait(60), "nobody opened the gate"


class WorkerThread:
    """`with` drains it. When it has ended, every pool the table still has must add up."""

    def __init__(
        self,
        run_dir: Path,
        *,
        limits: Limits | None = None,
        gate: Gate | None = None,
        fail_at: int | None = None,
        memory_bytes: int = 64 << 20,
        device: DeviceMemory | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`device`: other memory than the fake. When `clock` has jumped, the worker looks at it in its next turn."""
        self.gate = gate
        self._closed = False
        self.calls = FakeCalls(fail_at=fail_at, before=gate.pass_through if gate else lambda call: None)
        self.memory = FakeMemory(available=memory_bytes, calls=self.calls)
        self._endpoint = Endpoint.open(RunDirectory(run_dir), "host", None)
        self.socket_path = self._endpoint.path
        self._loop = Loop(clock)
        self._keeper = MemoryKeeper(self._loop, device or DeviceMemory.of(self.memory), HostMemory())
        budget = Budget(Fraction(1), self._keeper.device.available_bytes)
        self.pools = PoolTable("host", budget, taken_bytes=self._keeper.device.taken_bytes)
        self.disposal = Disposal()
        self._draining = threading.Event()
        limits = limits or Limits()
        self._server = Server(self._endpoint, self.pools, self._keeper, self._loop, self.disposal, limits=limits)
        self._thread = threading.Thread(target=self._loop.run, name="worker")
        self._thread.start()

    def client(self, *, role: Role = "client", client_name: str = "test") -> WorkerClient:
        return WorkerClient(self.socket_path, role=role, client_name=client_name, timeout_s=60)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Whatever is sent meanwhile waits for the worker."""
        arrived, go_on = threading.Event(), threading.Event()

        def wait() -> None:
            arrived.set()
            assert go_on.wait(60), "the worker was not let go"

        self._loop.post(wait)
        assert arrived.wait(60), "the worker is busy"
        try:
            yield
        finally:
            go_on.set()

    def begin_drain(self) -> None:
        self._loop.post(self._drain)

    def _drain(self) -> None:
        self._server.drain()
        self._draining.set()

    def close(self) -> None:
        """May be called twice."""
        if self._closed:
            return
        self._closed = True
        self.begin_drain()
        if self.gate is not None:
            assert self._draining.wait(60)  # else a pool could become real when nobody is left to be told
            self.gate.open()
        self._thread.join()
        self._keeper.stop()
        self._loop.close()
        self._endpoint.close()
        self.disposal.stop()
        self.pools.check()
        for pool in self.pools:
            if pool.memory is not None:
                pool.memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
