"""The time in which a new worker waits to be handed the pools of one that died."""

from __future__ import annotations

from dataclasses import dataclass

from kvpage.errors import KvpageError
from kvpage.wire import leasing, messages, succession
from kvpage_server.worker_connection import Connection
from kvpage_server.worker_endpoint import Endpoint
from kvpage_server.worker_log import log
from kvpage_server.worker_loop import Loop, Timer
from kvpage_server.worker_pools import PoolTable

_ABOUT_POOLS = (
    messages.CreatePool,
    messages.GetPool,
    messages.FindPool,
    messages.WaitPool,
    messages.DeletePool,
    messages.Attach,
    messages.ListPools,
    messages.ExportPool,
    leasing.OpenLease,
    leasing.AdoptLease,
    leasing.RenewLease,
    leasing.CloseLease,
    leasing.TakeStep,
    leasing.TakePrefix,
    leasing.FindPrefix,
    leasing.Reserve,
    leasing.CommitReservation,
    leasing.EndReservation,
    leasing.DescribeLease,
    leasing.ListHeld,
    leasing.InspectBlocks,
    leasing.FindContents,
    leasing.DescribeBlocks,
    leasing.MapBlocks,
    leasing.SetTenants,
    leasing.ReadEvents,
    leasing.ListContents,
    leasing.ClearContents,
    succession.TakeOver,
    succession.DrainWorker,
)
_OF_THE_KEEPER = (messages.ListPools, messages.ExportPool)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Deferred:
    connection: Connection
    request_id: int
    body: messages.RequestBody


class AdoptionWindow:
    """While it is open, requests about pools wait: an answer now could be "no such pool" about one that is coming.

    It opens when the predecessor's lock file says that somebody keeps its pools, and closes when they say that they
    have handed over everything, or when `window_s` have passed.
    """

    def __init__(self, pools: PoolTable, endpoint: Endpoint, loop: Loop, window_s: float) -> None:
        self._pools = pools
        self._endpoint = endpoint
        self._deferred: list[_Deferred] = []
        self._timer: Timer | None = None
        if window_s > 0 and endpoint.predecessor_epoch is not None:
            self._timer = loop.call_after(window_s, self._run_out)
            log("awaiting_pools", epoch=pools.epoch, window_s=window_s)

    def __repr__(self) -> str:
        return f"<AdoptionWindow {'open' if self.is_open else 'closed'}, {len(self._deferred)} requests wait>"

    @property
    def is_open(self) -> bool:
        return self._timer is not None

    def defers(self, connection: Connection, request_id: int, body: messages.RequestBody) -> bool:
        """Whether the request is kept until the window closes."""
        if not self.is_open or not isinstance(body, _ABOUT_POOLS):
            return False
        if connection.role == "api" and isinstance(body, _OF_THE_KEEPER):
            return False
        connection.require_room_to_wait()
        connection.num_waits += 1
        self._deferred.append(_Deferred(connection=connection, request_id=request_id, body=body))
        return True

    def close(self) -> None:
        """Serve everybody from now on. May be called twice."""
        if self._timer is None:
            return
        self._timer.cancel()
        self._timer = None
        if not len(self._pools):
            self._pools.renew_epoch()
            self._endpoint.forget_kept_epoch()
        log("adoption_finished", num_pools=len(self._pools), epoch=self._pools.epoch)
        for deferred in self._take_all():
            deferred.connection.perform(deferred.request_id, deferred.body, [])

    def end_all(self, error: KvpageError) -> None:
        for deferred in self._take_all():
            deferred.connection.fail(deferred.request_id, error)

    def forget(self, connection: Connection) -> None:
        self._deferred = [deferred for deferred in self._deferred if deferred.connection is not connection]

    def _take_all(self) -> list[_Deferred]:
        deferred, self._deferred = self._deferred, []
        for one in deferred:
            one.connection.num_waits -= 1
        return deferred

    def _run_out(self) -> None:
        log("nobody_handed_over", level="warning", num_pools=len(self._pools))
        self.close()
