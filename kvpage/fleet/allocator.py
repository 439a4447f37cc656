"""The allocator of one node: does what coordinators ask, with the service of its machine. Knows nothing of Ray.

It keeps nothing but records. Whoever takes its place after it died sees the same pools and the same records.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import Protocol

import msgspec

from kvpage.client.fleet_resources import FleetDevice
from kvpage.client.resources import Device, Pool
from kvpage.errors import Conflict, DeviceUnavailable, KvpageError, NotFound, PoolNotFound
from kvpage.fleet import messages
from kvpage.fleet.record_store import Kept, RecordStore
from kvpage.fleet.records import (
    PHASES,
    FleetRecord,
    HeldPlan,
    HeldRank,
    NodeReport,
    ServiceOptions,
)

HOST_HEADROOM_BYTES = 12 << 20
"""The most that the plan and the state of blocks of a pool take of the host's memory beside its buffer."""
GPU_HEADROOM_BYTES = 2 << 20
"""A buffer takes whole units of a GPU's memory."""


class Service(Protocol):
    """The kvpage service of a node, as `kvpage.Client` and a node in memory have it."""

    def devices(self) -> list[Device]: ...

    def pools(self) -> list[Pool]: ...

    def create_pool(self, record: FleetRecord, rank: int) -> Pool:
        """Wait until it is ready. The same again finds the same pool."""
        ...

    def delete_pool(self, pool_id: str, *, force: bool) -> None:
        """Raises `Conflict` while it is held."""
        ...

    def stop(self) -> None: ...


class Allocator:
    """`handle` may be called from several threads: changes take turns, looks do not wait for them."""

    def __init__(
        self, node: str, service: Service, records: RecordStore, options: ServiceOptions, run_dir: str = ""
    ) -> None:
        self._node = node
        self._service = service
        self._records = records
        self._options = options
        self._run_dir = run_dir
        self._changing = threading.Lock()

    def handle(self, data: bytes) -> bytes:
        """The answer to a message, errors too."""
        try:
            return messages.encode(self._answer(messages.decode_message(data)))
        except KvpageError as error:
            return messages.encode(messages.Failed.of(error))

    def _answer(self, message: messages.Message) -> messages.Answer:
        match message:
            case messages.Look():
                return messages.Report(report=self._report())
            case messages.Read():
                return messages.Record(record=self._records.get(message.id))
        with self._changing:
            self._change(message)
        return messages.Done()

    def _change(self, message: messages.Message) -> None:
        match message:
            case messages.Reserve():
                self._reserve(message.record)
            case messages.Commit():
                self._commit(message.id)
            case messages.Abort():
                self._abort(message.id)
            case messages.Restore():
                self._restore(message.record)
            case messages.Release():
                self._release(message.record, force=message.force)
            case messages.Drop():
                self._drop(message.id)
            case messages.Stop():
                self._service.stop()

    # --- changes -----------------------------------------------------------------------------------------------------

    def _reserve(self, record: FleetRecord) -> None:
        for kept in self._records.all():
            if kept.record.name == record.name and kept.record.id != record.id and kept.record.phase != "released":
                raise Conflict(
                    f"node {self._node} has another plan {record.name!r} ({kept.record.id}); choose another name, or "
                    f"give that one back",
                    details={"id": kept.record.id, "node": self._node},
                )
        self._records.put(record)
        try:
            self._make_pools(record)
        except KvpageError:
            self._give_back(record)
            raise

    def _commit(self, plan_id: str) -> None:
        record = self._records.get(plan_id)
        if record.phase == "released":
            raise Conflict(f"the plan {plan_id} was given back", details={"id": plan_id})
        if record.phase == "reserved":
            self._records.put(msgspec.structs.replace(record, phase="committed"))

    def _abort(self, plan_id: str) -> None:
        record = self._known(plan_id)
        if record is None:
            return
        if record.phase != "reserved":
            raise Conflict(f"the plan {plan_id} is {record.phase}, which no abort undoes", details={"id": plan_id})
        self._give_back(record)

    def _restore(self, record: FleetRecord) -> None:
        known = self._known(record.id)
        if known is not None and PHASES.index(known.phase) > PHASES.index("committed"):
            raise Conflict(f"the plan {record.id} was given back", details={"id": record.id})
        if known is None or known.phase != "committed":
            self._records.put(msgspec.structs.replace(record, phase="committed"))
        self._make_pools(record)

    def _release(self, record: FleetRecord, *, force: bool) -> None:
        self._records.put(msgspec.structs.replace(record, phase="released"))
        self._delete_pools(record, force=force)

    def _drop(self, plan_id: str) -> None:
        record = self._known(plan_id)
        if record is not None and record.phase != "released":
            raise Conflict(f"the plan {plan_id} is {record.phase} and cannot be forgotten", details={"id": plan_id})
        self._records.drop(plan_id)

    def _make_pools(self, record: FleetRecord) -> None:
        """Those of this node that are not there; a pool whose memory could not be had is made anew."""
        for held in self._ranks_now(record):
            if held.state == "foreign":
                raise Conflict(f"rank {held.rank} of {record.name!r} on {self._node}: {held.detail}")
            if held.state == "failed":
                self._service.delete_pool(held.pool_id, force=True)
            if held.state != "ready":
                self._service.create_pool(record, held.rank)

    def _give_back(self, record: FleetRecord) -> None:
        """The record last: as long as it is there, somebody will come and do the rest."""
        self._delete_pools(record, force=True)
        self._records.drop(record.id)

    def _delete_pools(self, record: FleetRecord, *, force: bool) -> None:
        for held in self._ranks_now(record):
            if held.state == "unknown":
                raise DeviceUnavailable(f"rank {held.rank} of {record.name!r} on {self._node}: {held.detail}")
            if held.pool_id:
                with contextlib.suppress(PoolNotFound):
                    self._service.delete_pool(held.pool_id, force=force)

    def _ranks_now(self, record: FleetRecord) -> list[HeldRank]:
        return self._ranks_of(record, self._service.devices(), self._service.pools())

    def _known(self, plan_id: str) -> FleetRecord | None:
        try:
            return self._records.get(plan_id)
        except NotFound:
            return None

    # --- reports -----------------------------------------------------------------------------------------------------

    def _report(self) -> NodeReport:
        kept, fault = self._records.all(), ""
        devices: list[Device] = []
        pools: list[Pool] = []
        try:
            devices, pools = self._service.devices(), self._service.pools()
        except KvpageError as error:
            fault = error.message
        return NodeReport(
            node=self._node,
            run_dir=self._run_dir,
            options=self._options,
            devices=tuple(device_report(device) for device in devices),
            plans=tuple(self._held_plan(one, devices, pools) for one in kept),
            fault=fault,
        )

    def _held_plan(self, kept: Kept, devices: Sequence[Device], pools: Sequence[Pool]) -> HeldPlan:
        record = kept.record
        return HeldPlan(
            id=record.id,
            name=record.name,
            phase=record.phase,
            age_s=max(0.0, self._records.now_s() - kept.since_s),
            ranks=tuple(self._ranks_of(record, devices, pools)),
        )

    def _ranks_of(self, record: FleetRecord, devices: Sequence[Device], pools: Sequence[Pool]) -> list[HeldRank]:
        there = {(pool.device, pool.name): pool for pool in pools}
        states = {device.device: device.state for device in devices}
        held = []
        for rank in record.ranks_on(self._node):
            device = record.places[rank].device
            pool = there.get((device, record.pool_name(rank)))
            held.append(held_rank(record, rank, pool, states.get(device, "not served")))
        return held


def held_rank(record: FleetRecord, rank: int, pool: Pool | None, device_state: str) -> HeldRank:
    device = record.places[rank].device
    if pool is None and device_state != "ready":  # its worker may have the pool, or get it from who keeps it
        return HeldRank(rank=rank, device=device, state="unknown", detail=f"device {device} is {device_state}")
    if pool is None:
        return HeldRank(rank=rank, device=device, state="missing", detail="there is no such pool")
    is_foreign = pool.plan_id != record.plan_ids[rank]
    detail = f"the pool has plan {pool.plan_id}, not {record.plan_ids[rank]}" if is_foreign else ""
    return HeldRank(
        rank=rank,
        device=device,
        state="foreign" if is_foreign else pool.state,
        pool_id=pool.id,
        epoch=pool.epoch,
        holders=tuple(f"{one.client_name or 'a process'} (pid {one.pid or '?'})" for one in pool.holders),
        num_holders=pool.num_holders,
        detail=detail if pool.error is None else pool.error.message,
    )


def device_report(device: Device) -> FleetDevice:
    limit_bytes, reserved_bytes = device.memory_limit_bytes or 0, device.reserved_bytes or 0
    left_bytes = limit_bytes - reserved_bytes
    if device.free_bytes is not None:
        left_bytes = min(left_bytes, device.free_bytes)
    headroom_bytes = HOST_HEADROOM_BYTES if device.device == "host" else GPU_HEADROOM_BYTES
    return FleetDevice(
        device=device.device,
        state=device.state,
        available_bytes=max(0, left_bytes - headroom_bytes) if device.state == "ready" else 0,
        limit_bytes=limit_bytes,
        reserved_bytes=reserved_bytes,
    )
