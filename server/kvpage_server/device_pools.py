"""The pools of one device as the API sees them: asked from the worker, held for its successor."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass

import msgspec

from kvpage.client.resources import Device
from kvpage.errors import (
    Conflict,
    Draining,
    KvpageError,
    NotSupported,
    PoolNotFound,
    ProtocolError,
    StaleHandle,
    WorkerLost,
)
from kvpage.memory.device_names import names_device
from kvpage.wire import leasing, messages, succession
from kvpage.wire.channel import close_fds
from kvpage.wire.messages import PoolState
from kvpage_server.device_link import DeviceLink
from kvpage_server.held_pools import HeldPool, HeldPools
from kvpage_server.planning import EncodedPlan
from kvpage_server.settings import Settings
from kvpage_server.worker_threads import WorkerThreads

logger = logging.getLogger("kvpage.api")

WAIT_STEP_S = 1.0
"""Longest single wait at the worker: a thread sleeps in it, and ending the server waits for the thread."""
_UNSETTLED = ("creating", "deleting")


@dataclass(frozen=True, slots=True, kw_only=True)
class NewPool:
    """What a caller asks to be created."""

    name: str
    device: str
    plan: EncodedPlan
    handle_kind: str = ""
    """Empty for the device's default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Creation:
    pool: PoolState
    created: bool
    """False when the pool was there already."""


class DevicePools:
    """Owner of the link to the worker and of the descriptors of its pools. Lives on the event loop."""

    def __init__(self, device: str, settings: Settings, threads: WorkerThreads) -> None:
        self.device = device
        self.link = DeviceLink(device, settings, threads, self)
        self.held = HeldPools()
        self.not_adopted: dict[str, KvpageError] = {}
        """Held pools that the worker would not take, with its reason. They can only be looked at and deleted."""
        self._known: messages.DeviceState | None = None
        """What the last worker said of the device."""
        self._holding = asyncio.Lock()  # held pools change one at a time, so that no old list undoes a new hold
        self._settling: dict[str, asyncio.Task[PoolState]] = {}

    def __repr__(self) -> str:
        return f"<DevicePools {self.link!r} {self.held!r}, {len(self._settling)} settling>"

    async def stop(self) -> None:
        """End what runs in the background, the worker if it is this server's, and give the descriptors up."""
        for task in list(self._settling.values()):
            task.cancel()
        await asyncio.gather(*self._settling.values(), return_exceptions=True)
        await self.link.stop()
        self.held.close()

    def is_called(self, name: str) -> bool:
        """Whether `name` means this device: by its other name too, once its worker has told it."""
        known = self._known
        return name == self.device or (
            known is not None and names_device(name, uuid=known.device_uuid, number=known.device_number)
        )

    @property
    def may_be_called_otherwise(self) -> bool:
        """Whether the other name of the device is still to be heard from its worker."""
        return self._known is None and self.device != "host"

    # --- what requests ask -------------------------------------------------------------------------------------------

    async def create(self, new: NewPool) -> Creation:
        """Begin to make a pool; the same name and plan again give the pool that is there."""
        plan = new.plan
        body = messages.CreatePool(
            name=new.name, plan_id=plan.plan_id, plan=plan.json, buffer_size_bytes=plan.buffer_size_bytes,
            handle_kind=new.handle_kind,
        )  # fmt: skip
        reply = await self.link.ask(body, messages.PoolCreated)
        return Creation(pool=self._as_safe_as_it_is(reply.pool), created=reply.created)

    async def states(self) -> list[PoolState]:
        """All pools. While the device has no worker: those held for the next one, as they last were."""
        if not self.link.is_ready:
            return [pool.state for pool in self.held]
        listed = [self._as_safe_as_it_is(pool) for pool in await self._listed()]
        return [*listed, *(self._refused(pool_id) for pool_id in self.not_adopted)]

    async def get(self, pool_id: str) -> PoolState:
        """Raises `PoolNotFound`, or `DeviceUnavailable` when only a worker could tell."""
        if pool_id in self.not_adopted:
            return self._refused(pool_id)
        if not self.link.is_ready and (held := self.held.get(pool_id)):
            return held.state
        return self._as_safe_as_it_is(await self.link.ask(messages.GetPool(pool_id=pool_id), PoolState))

    async def settled(self, pool: PoolState, *, timeout_s: float, stopping: asyncio.Event) -> PoolState:
        """`pool` when it is neither creating nor deleting any more and is held, or as it is when time is over."""
        task = self._watch(pool)
        if task is None or timeout_s <= 0:
            return pool
        stop = asyncio.ensure_future(stopping.wait())
        try:
            await asyncio.wait({task, stop}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
        return await task if task.done() else await self.get(pool.pool_id)

    async def delete(
        self, pool_id: str, *, timeout_s: float, force: bool, stopping: asyncio.Event
    ) -> messages.PoolDeleted:
        """Give the memory back. Raises `Conflict` naming the holders that have not let go within `timeout_s`, unless
        the pool is to be forgotten then.
        """
        deleted = messages.PoolDeleted(pool_id=pool_id)
        if pool_id not in self.not_adopted:
            deleted = await self._deleted(pool_id, timeout_s, stopping, force=force)
        async with self._holding:
            self.not_adopted.pop(pool_id, None)
            self.held.release(pool_id)
        return deleted

    async def _deleted(
        self, pool_id: str, timeout_s: float, stopping: asyncio.Event, *, force: bool
    ) -> messages.PoolDeleted:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        while True:
            left_s = max(0.0, deadline_s - loop.time())
            step_s = min(left_s, WAIT_STEP_S)
            body = messages.DeletePool(pool_id=pool_id, timeout_s=step_s, force=force and left_s <= WAIT_STEP_S)
            try:
                return await self.link.ask_apart(body, messages.PoolDeleted)
            except Draining:  # the worker is being replaced: its successor can be asked as well
                if left_s <= 0 or stopping.is_set():
                    raise
            except Conflict as error:
                if stopping.is_set() and left_s > 0:
                    text = f"the server is shutting down and waits no longer for holders: {error.message}"
                    raise Draining(text, details=error.details) from error
                if left_s <= WAIT_STEP_S:
                    raise

    async def blocks(self, pool_id: str) -> leasing.BlocksState | None:
        """Of a ready pool; None where none of its blocks can be leased, or it or its memory has gone meanwhile.

        Raises as `link.ask` does.
        """
        try:
            return await self.leasable_blocks(pool_id)
        except (NotSupported, Conflict, PoolNotFound, StaleHandle):
            return None

    async def leasable_blocks(self, pool_id: str) -> leasing.BlocksState:
        """As `blocks`. Raises `NotSupported` or `Conflict` with the reason where none can be leased, `PoolNotFound`."""
        return await self.link.ask(leasing.DescribeBlocks(pool_id=pool_id), leasing.BlocksState)

    async def block_map(self, pool_id: str, max_cells: int) -> leasing.BlockMap:
        """Raises as `leasable_blocks`."""
        return await self.link.ask(leasing.MapBlocks(pool_id=pool_id, max_cells=max_cells), leasing.BlockMap)

    async def all_blocks(self) -> list[leasing.BlocksState]:
        """Of every ready pool whose blocks can be leased; none while the device has no worker."""
        if not self.link.is_ready:
            return []
        ready = [pool.pool_id for pool in await self._listed() if pool.state == "ready"]
        found = [await self.blocks(pool_id) for pool_id in ready]
        return [blocks for blocks in found if blocks is not None]

    def plan(self, plan_id: str) -> bytes | None:
        """The plan of a held pool."""
        return next((pool.plan() for pool in self.held if pool.state.plan_id == plan_id), None)

    async def describe(self) -> Device:
        """What the worker says about the device, or what is known without one."""
        if self.link.is_ready:
            try:
                return _described(await self.link.ask(messages.DescribeDevice(), messages.DeviceState))
            except WorkerLost:
                pass
        return Device(
            device=self.device, state=self.link.state, handle_kinds=[], epoch=None, worker_pid=None,
            memory_limit_bytes=None, reserved_bytes=None, num_pools=len(list(self.held)), detail=self.link.detail,
        )  # fmt: skip

    # --- what the link tells -----------------------------------------------------------------------------------------

    async def connected(self, *, is_new_worker: bool) -> None:
        """Hand a new worker every held pool it does not have, then hold what it has."""
        async with self._holding:
            self._known = await self.link.ask_early(messages.DescribeDevice(), messages.DeviceState)
            pools = await self._listed()
            if is_new_worker:
                await self._hand_over(known={pool.pool_id for pool in pools})
                await self.link.ask_early(succession.FinishAdoption(), succession.AdoptionFinished)
                pools = await self._listed()
                self._known = await self.link.ask_early(messages.DescribeDevice(), messages.DeviceState)
                _warn_of_budget(self._known)
            await self._follow(pools)

    async def tick(self) -> None:
        """Hold pools that came and release pools that went without this server's doing."""
        async with self._holding:
            await self._follow(await self._listed())

    async def _listed(self) -> list[PoolState]:
        return (await self.link.ask_early(messages.ListPools(), messages.PoolList)).pools

    async def _hand_over(self, known: set[str]) -> None:
        self.not_adopted.clear()
        for pool in self.held:
            pool_id = pool.state.pool_id
            if pool_id in known:
                continue
            try:
                await self.link.ask_early(pool.adoption, PoolState, pool.fds)
                logger.info("device %s: worker took over %s (%s)", self.device, pool_id, pool.state.name)
            except WorkerLost:
                raise
            except KvpageError as error:  # the pool stays held: its memory is still there for its clients
                logger.error("device %s: worker refused %s: %s", self.device, pool_id, error.message)
                self.not_adopted[pool_id] = error

    def _as_safe_as_it_is(self, pool: PoolState) -> PoolState:
        """A pool is shown as ready when the death of its worker cannot lose it any more: when it is held here too."""
        watching = self._watch(pool)
        return pool if watching is None or pool.state != "ready" else msgspec.structs.replace(pool, state="creating")

    def _refused(self, pool_id: str) -> PoolState:
        held, error = self.held.get(pool_id), self.not_adopted[pool_id]
        assert held is not None  # a pool leaves both at once
        return msgspec.structs.replace(held.state, state="failed", error=messages.WireError.from_error(error))

    async def _follow(self, pools: list[PoolState]) -> None:
        listed = {pool.pool_id for pool in pools}
        for held in self.held:
            if held.state.pool_id not in listed and held.state.pool_id not in self.not_adopted:
                self.held.release(held.state.pool_id)
        for pool in pools:
            if pool.state in _UNSETTLED:
                self._watch(pool)
            elif pool.state == "failed":  # of one that was ready the memory is lost
                self.held.release(pool.pool_id)
            elif pool.state == "ready" and pool.pool_id not in self.held:
                with contextlib.suppress(PoolNotFound, Conflict):  # deleted since it was listed
                    await self._hold(pool.pool_id)

    # --- background --------------------------------------------------------------------------------------------------

    def _watch(self, pool: PoolState) -> asyncio.Task[PoolState] | None:
        """The task that sees the pool settle and holds it; None when it is settled and held."""
        is_done = pool.state not in _UNSETTLED and (pool.state != "ready" or pool.pool_id in self.held)
        if is_done:
            return None
        task = self._settling.get(pool.pool_id)
        if task is None:
            task = self._settling[pool.pool_id] = asyncio.ensure_future(self._settle(pool))
            task.add_done_callback(lambda done: self._settled(pool.pool_id, done))
        return task

    async def _settle(self, pool: PoolState) -> PoolState:
        while pool.state in _UNSETTLED:
            wait = messages.WaitPool(pool_id=pool.pool_id, timeout_s=WAIT_STEP_S)
            pool = await self.link.ask_apart(wait, PoolState)
        if pool.state == "ready":
            async with self._holding:
                if pool.pool_id not in self.held:
                    await self._hold(pool.pool_id)
        return pool

    def _settled(self, pool_id: str, task: asyncio.Task[PoolState]) -> None:
        del self._settling[pool_id]
        if task.cancelled():
            return
        error = task.exception()  # taken here too, as nobody may be waiting
        if error is not None and not isinstance(error, PoolNotFound):
            logger.warning("device %s: %s: %s", self.device, pool_id, error)

    async def _hold(self, pool_id: str) -> None:
        reply = await self.link.request_early(messages.ExportPool(pool_id=pool_id))
        exported = reply.body
        if not isinstance(exported, messages.Exported) or len(reply.fds) != len(exported.chunks) + 1:
            close_fds(reply.fds)
            raise ProtocolError(f"the worker exported {pool_id} with {len(reply.fds)} descriptors")
        self.held.hold(HeldPool(state=exported.pool, chunks=tuple(exported.chunks), fds=tuple(reply.fds)))


def _described(state: messages.DeviceState) -> Device:
    return Device(
        device=state.device,
        state=state.state,
        handle_kinds=state.handle_kinds,
        epoch=state.epoch,
        worker_pid=state.worker_pid,
        memory_limit_bytes=state.memory_limit_bytes,
        reserved_bytes=state.reserved_bytes,
        pinned_bytes=state.pinned_bytes,
        num_pools=state.num_pools,
        device_uuid=state.device_uuid,
        device_name=state.device_name,
        unsupported=state.unsupported,
        free_bytes=state.free_bytes,
        free_age_s=state.free_age_s,
    )


def _warn_of_budget(known: messages.DeviceState) -> None:
    """A slip of a unit is seen when it is made, not when the first pool does not fit."""
    there_bytes = known.free_bytes + known.reserved_bytes
    if known.memory_limit_bytes > there_bytes:
        logger.warning(
            "device %s: pools may take %d bytes, and there are %d, free or in pools; is --memory meant to be so much?",
            known.device, known.memory_limit_bytes, there_bytes,
        )  # fmt: skip
