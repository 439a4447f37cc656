"""What a worker does for each request: about itself here, about pools in `worker_lifecycle` and `worker_sharing`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from kvpage.errors import Draining, KvpageError, NotSupported, PermissionDenied
from kvpage.wire import leasing, messages, succession
from kvpage.wire.channel import MAX_FRAME_BYTES
from kvpage_server.worker_adoption import AdoptionWindow
from kvpage_server.worker_connection import Connection
from kvpage_server.worker_contents import Contents
from kvpage_server.worker_handover import Handover
from kvpage_server.worker_leasing import LeaseOwner, Leasing
from kvpage_server.worker_lifecycle import PoolLifecycle
from kvpage_server.worker_limits import Limits
from kvpage_server.worker_loop import Loop
from kvpage_server.worker_memory import MemoryKeeper
from kvpage_server.worker_pool_entry import Pool
from kvpage_server.worker_pools import PoolTable
from kvpage_server.worker_retirement import Retirement
from kvpage_server.worker_sharing import PoolSharing
from kvpage_server.worker_steps import Steps

SuccessionBody: TypeAlias = (
    succession.FinishAdoption
    | succession.TakeOver
    | succession.TakeConnection
    | succession.FinishTakeOver
    | succession.DrainWorker
)


class Requests:
    """Finds the one who answers."""

    def __init__(
        self,
        pools: PoolTable,
        keeper: MemoryKeeper,
        loop: Loop,
        limits: Limits,
        *,
        window: AdoptionWindow,
        handover: Handover,
        retirement: Retirement,
        num_clients: Callable[[], int],
        on_kept: Callable[[], None],
    ) -> None:
        self._pools = pools
        self._device = keeper.device
        self._window = window
        self._handover = handover
        self._retirement = retirement
        self._num_clients = num_clients
        self._leasing = Leasing(pools, loop, limits, on_released=self._released, on_parted=self._parted)
        self._contents = Contents(self._leasing.blocks, loop)
        self._leased = self._leased_requests(Steps(self._leasing, loop))
        self._lifecycle = PoolLifecycle(
            pools, keeper, loop, limits, num_clients=num_clients, on_unheld=retirement.hold_released
        )
        self._sharing = PoolSharing(
            pools,
            keeper,
            limits,
            on_released=self._released,
            on_adopted=self._adopted,
            on_kept=on_kept,
        )

    def handle(self, connection: Connection, request_id: int, body: messages.RequestBody, fds: list[int]) -> None:
        if self._window.defers(connection, request_id, body):
            return
        steps = self._leased.get(type(body))
        if steps is not None:  # first: of these there are the most
            steps(connection, request_id, body)
            return
        match body:
            case messages.Hello():
                self._hello(connection, request_id, body)
            case messages.DescribeDevice():
                connection.reply(request_id, self._device_state())
            case messages.ListPools() | messages.GetPool() | messages.FindPool():
                connection.reply(request_id, self._look_up(body))
            case messages.CreatePool() | messages.WaitPool() | messages.DeletePool():
                self._live(connection, request_id, body)
            case messages.Attach() | messages.Detach() | messages.ExportPool():
                self._share(connection, request_id, body)
            case messages.AdoptPool():
                self._sharing.adopt(connection, request_id, body, fds)
            case (
                succession.FinishAdoption()
                | succession.TakeOver()
                | succession.TakeConnection()
                | succession.FinishTakeOver()
                | succession.DrainWorker()
            ):
                self._succeed(connection, request_id, body)

    def _leased_requests(self, steps: Steps) -> dict[type[messages.Body], Callable[[Connection, int, Any], None]]:
        leases, contents = self._leasing, self._contents
        return {
            leasing.TakeStep: steps.take_step,
            leasing.TakePrefix: steps.take_prefix,
            leasing.FindPrefix: steps.find_prefix,
            leasing.Reserve: steps.reserve,
            leasing.CommitReservation: steps.commit_reservation,
            leasing.EndReservation: steps.end_reservation,
            leasing.DescribeLease: steps.describe,
            leasing.ListHeld: steps.list_held,
            leasing.InspectBlocks: steps.inspect,
            leasing.FindContents: steps.find_contents,
            leasing.OpenLease: self._open_lease,
            leasing.AdoptLease: self._adopt_lease,
            leasing.RenewLease: leases.renew,
            leasing.CloseLease: leases.close,
            leasing.DescribeBlocks: contents.describe,
            leasing.MapBlocks: contents.map,
            leasing.SetTenants: contents.set_tenants,
            leasing.ReadEvents: contents.read,
            leasing.ListContents: contents.list,
            leasing.ClearContents: contents.clear,
        }

    def _open_lease(self, connection: Connection, request_id: int, body: leasing.OpenLease) -> None:
        self._retirement.require_serving()
        self._leasing.open(connection, request_id, body)

    def _adopt_lease(self, connection: Connection, request_id: int, body: leasing.AdoptLease) -> None:
        self._retirement.require_serving()
        self._leasing.adopt(connection, request_id, body)

    def serve_leases(self, owners: Mapping[str, LeaseOwner]) -> None:
        """Of all pools, which another worker served until now; `owners` by lease id."""
        for pool in self._pools:
            self._leasing.found_again(pool, owners)

    @property
    def num_fds(self) -> int:
        return self._leasing.num_fds

    def _parted(self, pool: Pool) -> None:
        self._contents.pool_gone(pool)

    def leave(self) -> None:
        """Another worker serves from now on: change nothing of any pool."""
        self._leasing.leave()

    def _adopted(self, pool: Pool) -> None:
        self._lifecycle.watch(pool)
        self._leasing.found_again(pool, {})

    def disconnected(self, connection: Connection) -> None:
        self._window.forget(connection)
        self._contents.disconnected(connection)
        self._leasing.disconnected(connection)
        self._lifecycle.disconnected(connection)
        self._sharing.disconnected(connection)
        self._retirement.disconnected(connection)

    def drain(self) -> None:
        """Begin nothing new and leave nobody waiting."""
        self._window.end_all(Draining("the worker is ending; ask its successor"))
        self._end_waiting_leases()
        self._lifecycle.drain()

    def end_waiting(self) -> None:
        """Leave nobody waiting."""
        self._end_waiting_leases()
        self._lifecycle.end_waiting()

    def _end_waiting_leases(self) -> None:
        ending = Draining("the worker is ending; ask its successor")
        self._leasing.end_waiting(ending)
        self._contents.end_waiting(ending)

    def _released(self, pool: Pool) -> None:
        self._lifecycle.released(pool)
        self._retirement.hold_released()

    def _live(
        self,
        connection: Connection,
        request_id: int,
        body: messages.CreatePool | messages.WaitPool | messages.DeletePool,
    ) -> None:
        match body:
            case messages.CreatePool():
                self._retirement.require_serving()
                self._lifecycle.create(connection, request_id, body)
            case messages.WaitPool():
                self._lifecycle.wait(connection, request_id, body)
            case messages.DeletePool():
                self._lifecycle.delete(connection, request_id, body)

    def _share(
        self, connection: Connection, request_id: int, body: messages.Attach | messages.Detach | messages.ExportPool
    ) -> None:
        match body:
            case messages.Attach():
                self._retirement.require_serving()
                self._sharing.attach(connection, request_id, body)
            case messages.Detach():
                self._sharing.detach(connection, request_id, body)
            case messages.ExportPool():
                self._sharing.export(connection, request_id, body)

    def _succeed(self, connection: Connection, request_id: int, body: SuccessionBody) -> None:
        match body:
            case succession.FinishAdoption():
                connection.require_api()
                self._window.close()
                connection.reply(request_id, succession.AdoptionFinished(num_pools=len(self._pools)))
            case succession.TakeOver():
                self._retirement.require_serving()
                self._handover.begin(connection, request_id)
            case succession.TakeConnection():
                self._handover.give_connection(connection, request_id, body.number)
            case succession.FinishTakeOver():
                self._handover.finish(connection, request_id)
            case succession.DrainWorker():
                self._retirement.begin(connection, request_id, body)

    def _look_up(self, body: messages.ListPools | messages.GetPool | messages.FindPool) -> messages.ReplyBody:
        if isinstance(body, messages.ListPools):
            max_holders = messages.MAX_HOLDERS_LISTED
            return messages.PoolList(
                pools=[self._pools.describe(pool, max_holders=max_holders) for pool in self._pools]
            )
        found = self._pools.get(body.pool_id) if isinstance(body, messages.GetPool) else self._pools.find(body.name)
        return self._pools.describe(found)

    def _hello(self, connection: Connection, request_id: int, body: messages.Hello) -> None:
        try:
            _check_hello(connection, body)
        except KvpageError as refusal:
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
            handle_kinds=list(self._device.kinds),
            max_frame_bytes=MAX_FRAME_BYTES,
        )

    def _device_state(self) -> messages.DeviceState:
        free_bytes, free_age_s = self._device.free()
        return messages.DeviceState(
            device=self._pools.device,
            epoch=self._pools.epoch,
            worker_pid=os.getpid(),
            state="draining" if self._retirement.is_under_way else "ready",
            handle_kinds=list(self._device.kinds),
            unsupported=dict(self._device.unsupported),
            device_uuid=self._device.uuid,
            device_number=self._device.number,
            device_name=self._device.name,
            free_bytes=free_bytes,
            free_age_s=round(free_age_s, 3),
            memory_limit_bytes=self._pools.budget.limit_bytes,
            reserved_bytes=self._pools.budget.reserved_bytes,
            pinned_bytes=self._pools.pinned_bytes,
            num_pools=len(self._pools),
            num_clients=self._num_clients(),
        )


def _check_hello(connection: Connection, body: messages.Hello) -> None:
    """Raises what refuses the client."""
    if body.version != messages.PROTOCOL_VERSION:
        raise NotSupported(
            f"the client speaks version {body.version} of the worker protocol, this worker version"
            f" {messages.PROTOCOL_VERSION}; install the same kvpage on both sides",
            details={"version": messages.PROTOCOL_VERSION},
        )
    if body.role == "api" and connection.peer.uid not in (0, os.geteuid()):
        raise PermissionDenied(
            f"role 'api' is for root and the worker's own user (uid {os.geteuid()}), not uid {connection.peer.uid}"
        )
    messages.check_name("client name", body.client_name)
