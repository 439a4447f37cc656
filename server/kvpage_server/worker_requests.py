"""What a worker does for each request: about itself here, about pools in `worker_lifecycle` and `worker_sharing`."""

from __future__ import annotations

import os
from collections.abc import Callable

from kvpage.errors import NotSupported, PermissionDenied
from kvpage.wire import messages
from kvpage.wire.channel import MAX_FRAME_BYTES
from kvpage_server.worker_connection import Connection
from kvpage_server.worker_lifecycle import PoolLifecycle
from kvpage_server.worker_limits import Limits
from kvpage_server.worker_loop import Loop
from kvpage_server.worker_memory import MemoryKeeper
from kvpage_server.worker_pools import PoolTable
from kvpage_server.worker_sharing import PoolSharing


class Requests:
    """Finds the one who answers."""

    def __init__(
        self, pools: PoolTable, keeper: MemoryKeeper, loop: Loop, limits: Limits, *, num_clients: Callable[[], int]
    ) -> None:
        self._pools = pools
        self._handle_kinds = [keeper.memory.handle_kind]
        self._num_clients = num_clients
        self._lifecycle = PoolLifecycle(pools, keeper, loop, limits, num_clients=num_clients)
        self._sharing = PoolSharing(pools, keeper, limits, on_released=self._lifecycle.released)

    def handle(self, connection: Connection, request_id: int, body: messages.RequestBody, fds: list[int]) -> None:
        match body:
            case messages.Hello():
                self._hello(connection, request_id, body)
            case messages.DescribeDevice():
                connection.reply(request_id, self._device_state())
            case messages.CreatePool():
                self._lifecycle.create(connection, request_id, body)
            case messages.WaitPool():
                self._lifecycle.wait(connection, request_id, body)
            case messages.DeletePool():
                self._lifecycle.delete(connection, request_id, body)
            case messages.Attach():
                self._sharing.attach(connection, request_id, body)
            case messages.Detach():
                self._sharing.detach(connection, request_id, body)
            case messages.ExportPool():
                self._sharing.export(connection, request_id, body)
            case messages.AdoptPool():
                self._sharing.adopt(connection, request_id, body, fds)
            case _:
                connection.reply(request_id, self._look_up(body))

    def disconnected(self, connection: Connection) -> None:
        self._lifecycle.disconnected(connection)
        self._sharing.disconnected(connection)

    def drain(self) -> None:
        """Begin nothing new and leave nobody waiting."""
        self._lifecycle.drain()

    def _look_up(self, body: messages.ListPools | messages.GetPool | messages.FindPool) -> messages.ReplyBody:
        if isinstance(body, messages.ListPools):
            return messages.PoolList(pools=[self._pools.describe(pool) for pool in self._pools])
        found = self._pools.get(body.pool_id) if isinstance(body, messages.GetPool) else self._pools.find(body.name)
        return self._pools.describe(found)

    def _hello(self, connection: Connection, request_id: int, body: messages.Hello) -> None:
        refusal: NotSupported | PermissionDenied | None = None
        if body.version != messages.PROTOCOL_VERSION:
            refusal = NotSupported(
                f"the client speaks version {body.version} of the worker protocol, this worker version"
                f" {messages.PROTOCOL_VERSION}; install the same kvpage on both sides",
                details={"version": messages.PROTOCOL_VERSION},
            )
        elif body.role == "api" and connection.peer.uid not in (0, os.geteuid()):
            refusal = PermissionDenied(
                f"role 'api' is for root and the worker's own user (uid {os.geteuid()}), not uid {connection.peer.uid}"
            )
        if refusal is not None:
            connection.fail(request_id, refusal)
            connection.end()
            return
        connection.welcome(body.role, body.client_name)
        connection.reply(request_id, self._welcome())

    def _welcome(self) -> messages.Welcome:
        return messages.Welcome(
            version=messages.PROTOCOL_VERSION,
            epoch=self._pools.epoch,
            device=self._pools.device,
            worker_pid=os.getpid(),
            handle_kinds=self._handle_kinds,
            max_frame_bytes=MAX_FRAME_BYTES,
        )

    def _device_state(self) -> messages.DeviceState:
        return messages.DeviceState(
            device=self._pools.device,
            epoch=self._pools.epoch,
            worker_pid=os.getpid(),
            state="ready",
            handle_kinds=self._handle_kinds,
            memory_limit_bytes=self._pools.budget.limit_bytes,
            reserved_bytes=self._pools.budget.reserved_bytes,
            num_pools=len(self._pools),
            num_clients=self._num_clients(),
        )
