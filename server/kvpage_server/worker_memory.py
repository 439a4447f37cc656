"""Making a pool's memory real and giving it back, on helper threads."""

from __future__ import annotations

import contextlib
import selectors
from collections.abc import Callable
from functools import partial

from msgspec.structs import replace

from kvpage.errors import Conflict, KvpageError
from kvpage.memory.host import HostMemory
from kvpage_server.block_plan import read_block_plan
from kvpage_server.control_block import ControlRecord, write_control_block
from kvpage_server.worker_device import DeviceMemory
from kvpage_server.worker_helper import Helper
from kvpage_server.worker_loop import Loop
from kvpage_server.worker_pool_entry import Pool, PoolMemory, with_handles


class MemoryKeeper:
    """Commits and closes the memory of pools. Every callback runs in the loop."""

    def __init__(self, loop: Loop, device: DeviceMemory, control_memory: HostMemory) -> None:
        self.device = device
        self.control_memory = control_memory
        self._loop = loop
        self._committing = Helper("commit", loop.post)
        self._closing = Helper("close", loop.post)  # giving back must not queue behind a commit that takes a minute

    def commit(
        self,
        pool: Pool,
        record: ControlRecord,
        *,
        progress: Callable[[int], None],
        done: Callable[[PoolMemory | KvpageError], None],
    ) -> None:
        """Commit what `record` describes, until `pool.abandoned` is set."""

        def report(committed_bytes: int) -> None:
            if pool.abandoned.is_set():
                raise Conflict(f"pool {pool.pool_id} was deleted while it was being created")
            self._loop.post(lambda: progress(committed_bytes))

        self._committing.submit(lambda: self._commit(record, report), done)

    def _commit(self, record: ControlRecord, report: Callable[[int], None]) -> PoolMemory:
        report(0)
        with contextlib.ExitStack() as undo:
            (info,) = record.chunks
            chunk = undo.enter_context(self.device.kind(info.kind).create(info.size_bytes, report))
            record = replace(record, chunks=list(with_handles(record.chunks, [chunk])))
            blocks = read_block_plan(record.plan, record.buffer_size_bytes)
            control = undo.enter_context(write_control_block(record, self.control_memory, blocks.state_bytes))
            undo.pop_all()
            return PoolMemory(chunks=(chunk,), control=control)

    def watch(self, memory: PoolMemory, lost: Callable[[KvpageError], None]) -> None:
        """Call `lost` with the reason when the memory is lost, until it is closed here."""
        for chunk in memory.chunks:
            if chunk.loss_fd is not None:
                self._loop.watch(chunk.loss_fd, selectors.EVENT_READ, partial(self._look, memory, lost))

    def _look(self, memory: PoolMemory, lost: Callable[[KvpageError], None]) -> None:
        try:
            for chunk in memory.chunks:
                chunk.require_there()
        except KvpageError as error:
            self._unwatch(memory)
            lost(error)

    def _unwatch(self, memory: PoolMemory) -> None:
        for chunk in memory.chunks:
            if chunk.loss_fd is not None:
                self._loop.watch(chunk.loss_fd, 0, lambda: None)

    def close(self, memory: PoolMemory, done: Callable[[], None]) -> None:
        """Give memory back: freeing many GiB takes as long as committing them."""
        self._unwatch(memory)
        self._closing.submit(memory.close, lambda _: done())

    def stop(self) -> None:
        """Finish what was begun and end the threads."""
        self._committing.stop()
        self._closing.stop()
