"""What a worker has given to one attachment: a hold on a pool and the descriptors of its memory."""

from __future__ import annotations

import sys
from collections.abc import Callable

from kvpage.wire import messages
from kvpage.wire.client import Received, WorkerClient


class Hold:
    """Made before it is asked for, so that what the worker gives belongs to it from the first moment. Given back by
    `release`, and at the latest when nobody refers to it any more.
    """

    _holds: Holds | None = None

    def __init__(self, holds: Holds) -> None:
        """Look at `holds.closed` only after this: `close` sets it before it looks who is there."""
        self.received = Received()
        self._holds = holds
        holds.add(self)

    @property
    def ended(self) -> bool:
        """Whether the worker knows nothing of it any more."""
        return self._holds is None or self._holds.client.ended

    def release(self) -> None:
        """May be called twice. Never blocks and never raises, so finalisers may call it from any thread."""
        if self._holds is None:
            return
        self.received.fds.close()
        if isinstance(self.received.body, messages.Attached) and not self._holds.end_with(self):
            self._holds.client.send_later(messages.Detach(hold_id=self.received.body.hold_id))
        holds, self._holds = self._holds, None  # interrupted before this it sends another message, which is harmless
        holds.forget(self)

    def __del__(self, _at_exit: Callable[[], bool] = sys.is_finalizing) -> None:
        if not _at_exit():
            self.release()


class Holds:
    """The holds of one connection, which ends with the last of them once it is closed."""

    def __init__(self, client: WorkerClient) -> None:
        self.client = client
        self.closed = False
        self._living: set[int] = set()  # by id, for this must not keep them alive; each takes its own out

    def add(self, hold: Hold) -> None:
        self._living.add(id(hold))

    def close(self) -> None:
        self.closed = True
        self._close_when_unused()

    def end_with(self, hold: Hold) -> bool:
        """Whether the connection ends when `hold` is forgotten, which says to the worker all that there is to say."""
        return self.closed and self._living == {id(hold)}

    def forget(self, hold: Hold) -> None:
        self._living.discard(id(hold))
        if self.closed:
            self._close_when_unused()

    def _close_when_unused(self) -> None:
        if not self._living:
            self.client.close()
