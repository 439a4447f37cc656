"""A hold that this process takes for a client whose own connection carries no descriptors."""

from __future__ import annotations

import base64
from typing import Any

from kvpage.errors import Conflict, ProtocolError
from kvpage.owned import Descriptors
from kvpage.wire import messages
from kvpage.wire.client import Received, WorkerClient


class RemoteHold:
    """A connection to the worker with one hold on it, and the memory's lifeline. Blocking until it is made."""

    def __init__(self, client: WorkerClient, pool_id: str) -> None:
        """Owns `client`. Raises what the worker answers with, and `Conflict` for memory that no handle names."""
        self._client = client
        self._lifeline = Descriptors()
        try:
            self._attached = self._attach(pool_id)
        except BaseException:
            self.close()
            raise

    def _attach(self, pool_id: str) -> messages.Attached:
        received = Received()
        self._client.request_into(received, messages.Attach(pool_id=pool_id))
        received.fds.move(self._lifeline, len(received.fds))
        attached = received.body
        if not isinstance(attached, messages.Attached) or (len(attached.chunks), len(self._lifeline)) != (1, 1):
            raise ProtocolError(
                f"the worker answered an attach with {type(attached).__name__} and {len(self._lifeline)} descriptors"
            )
        chunk = attached.chunks[0]
        if not chunk.handle:
            raise Conflict(
                f"memory of kind {chunk.kind} is named by a descriptor, which HTTP cannot carry; attach through the"
                " worker's socket, or create the pool with handle kind cuda_ipc",
                details={"handle_kind": chunk.kind},
            )
        return attached

    @property
    def event(self) -> dict[str, Any]:
        """What a client needs to map the memory. A secret: whoever has the handle can open it."""
        pool, chunk = self._attached.pool, self._attached.chunks[0]
        return {
            "pool_id": pool.pool_id,
            "plan_id": pool.plan_id,
            "epoch": pool.epoch,
            "device_uuid": chunk.device_uuid,
            "kind": chunk.kind,
            "handle": base64.b64encode(chunk.handle).decode(),
            "offset_bytes": 0,
            "size_bytes": chunk.size_bytes,
        }

    @property
    def lifeline_fd(self) -> int:
        """Owned by the hold."""
        return self._lifeline[0]

    def close(self) -> None:
        """May be called twice."""
        self._client.close()
        self._lifeline.close()
