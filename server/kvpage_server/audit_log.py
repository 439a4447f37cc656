"""Records on their way to the disk: what is intended is there before it is done, or it is not done.

One thread writes, so that a slow disk stops nobody but those who wait for it; what has come meanwhile is written
together and synced once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvpage.errors import AuditUnavailable, KvpageError
from kvpage_server.audit_file import AuditFile

PATIENCE_S = 5.0
"""How long a request waits for its record before it is refused."""
MAX_WAITING = 4096
"""Records on their way, beyond which only what is owed is taken: a disk that does not answer must not fill memory."""
_AGAIN_S = 1.0
_CLOSE_S = 5.0
logger = logging.getLogger("kvpage.api")


@dataclass(eq=False, slots=True)
class _Entry:
    line: bytes
    is_owed: bool
    """Of something that was done: written as soon as it can be. Others are dropped when they cannot be."""
    written: asyncio.Future[None] | None = None

    def tell(self, error: Exception | None) -> None:
        """Wake who waits for it. Runs in the thread."""
        future = self.written
        if future is None:
            return

        def wake() -> None:
            if not future.done():
                if error is None:
                    future.set_result(None)
                else:
                    future.set_exception(error)

        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            future.get_loop().call_soon_threadsafe(wake)


class AuditLog:
    def __init__(self, path: Path) -> None:
        """Raises `SpecInvalid` where no log can be kept."""
        self._file = AuditFile(path)
        self._path = path
        self._arrived: queue.SimpleQueue[_Entry | None] = queue.SimpleQueue()
        self._owed: deque[_Entry] = deque()  # the thread's; as many as requests were being served when the disk filled
        self._is_failing = False  # the thread's
        self._is_late = False
        """A record was not written in time, and nothing was since."""
        self._thread = threading.Thread(target=self._write_all, name="audit-log", daemon=True)
        self._thread.start()

    async def intend(self, line: bytes) -> None:
        """Return when the record is on the disk. Raises `AuditUnavailable` when it cannot be put there; first ask
        `check_moving`.
        """
        entry = _Entry(line, is_owed=False, written=asyncio.get_running_loop().create_future())
        self._arrived.put(entry)
        assert entry.written is not None
        try:
            async with asyncio.timeout(PATIENCE_S):
                await entry.written
        except TimeoutError:
            self._is_late = True
            raise _unavailable(f"it was not written within {PATIENCE_S:g} s") from None
        except (OSError, KvpageError) as error:
            raise _unavailable(_reason(error)) from error

    def check_moving(self) -> None:
        """Raises `AuditUnavailable` at once while the disk does not answer; then there is nothing to add either."""
        if self._stands_still():
            raise _unavailable("records before it wait for the disk, which does not answer")

    def add(self, line: bytes, *, is_owed: bool, follows_intent: bool = False) -> None:
        """Have it written, and wait for nothing. `is_owed`: kept until it can be; else dropped when it cannot.
        `follows_intent`: says what came of a record that may be written yet.
        """
        if is_owed or follows_intent or not self._stands_still():
            self._arrived.put(_Entry(line, is_owed))

    def _stands_still(self) -> bool:
        return self._is_late or self._arrived.qsize() >= MAX_WAITING

    def close(self) -> None:
        """Write what is owed if it can be written now. May be called twice; waits a bounded time for a disk."""
        if self._thread.is_alive():
            self._arrived.put(None)
            self._thread.join(_CLOSE_S)

    # --- the thread --------------------------------------------------------------------------------------------------

    def _write_all(self) -> None:
        is_open = True
        while is_open:
            arrived = self._next()
            is_open = None not in arrived
            entries = [*self._owed, *(entry for entry in arrived if entry is not None)]
            if entries:
                self._write(entries)
        if self._owed:
            logger.error("the outcome of %d changes is not in the audit log", len(self._owed))
        self._file.close()

    def _next(self) -> list[_Entry | None]:
        """All that has come; waits for the first, but not for long while something is owed."""
        arrived: list[_Entry | None] = []
        with contextlib.suppress(queue.Empty):
            arrived.append(self._arrived.get(timeout=_AGAIN_S if self._owed else None))
            while True:
                arrived.append(self._arrived.get_nowait())
        return arrived

    def _write(self, entries: Sequence[_Entry]) -> None:
        """In order; after one that cannot be written none is tried, so that the order stays."""
        self._owed.clear()
        error: Exception | None = None
        written: list[_Entry] = []
        for entry in entries:
            error = error or self._failure(entry)
            if error is None:
                written.append(entry)
            else:
                self._put_off(entry, error)
        if written:
            error = self._sync(written) or error
        self._is_late = False
        self._tell_once(error)

    def _failure(self, entry: _Entry) -> Exception | None:
        try:
            self._file.append(entry.line)
        except (OSError, KvpageError) as error:
            return error
        return None

    def _sync(self, written: Sequence[_Entry]) -> Exception | None:
        failed: Exception | None = None
        try:
            self._file.sync()
        except OSError as error:
            failed = error
        for entry in written:
            entry.tell(failed)
        return failed

    def _put_off(self, entry: _Entry, error: Exception) -> None:
        if entry.is_owed:
            self._owed.append(entry)
        entry.tell(error)

    def _tell_once(self, error: Exception | None) -> None:
        if error is not None and not self._is_failing:
            logger.error(
                "nothing is changed any more: the audit log %s cannot be written: %s", self._path, _reason(error)
            )
        elif error is None and self._is_failing:
            logger.warning("the audit log %s is written again", self._path)
        self._is_failing = error is not None


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _unavailable(reason: str) -> AuditUnavailable:
    return AuditUnavailable(f"the audit log cannot record this request, so it was not done: {reason}")
