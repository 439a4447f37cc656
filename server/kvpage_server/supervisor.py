"""All devices of the server: their workers kept running, their pools found by id and by name."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Coroutine

from kvpage.client.resources import Check, Device
from kvpage.errors import (
    DeviceUnavailable,
    Draining,
    FieldError,
    KvpageError,
    PlanNotFound,
    PoolNotFound,
    SpecInvalid,
    WorkerLost,
    shorten,
)
from kvpage.memory.device_names import is_cuda_name
from kvpage.wire import leasing, messages
from kvpage.wire.messages import PoolState
from kvpage_server.device_pools import Creation, DevicePools, NewPool
from kvpage_server.remote_hold import RemoteHold
from kvpage_server.settings import Settings
from kvpage_server.worker_threads import WorkerThreads

logger = logging.getLogger("kvpage.api")

_POOL_ID = re.compile(r"pool-[0-9a-f]{16}")


class Supervisor:
    """Started and stopped by the lifespan; everything runs on its event loop."""

    def __init__(self, settings: Settings) -> None:
        self._threads = WorkerThreads()
        self._devices = {device: DevicePools(device, settings, self._threads) for device in settings.devices}
        self._runs: list[asyncio.Task[None]] = []
        self._stopping = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Supervisor {list(self._devices.values())!r}>"

    def start(self) -> None:
        """Begin to look for workers; `checks()` says when they answer."""
        self._runs = [asyncio.ensure_future(pools.link.run()) for pools in self._devices.values()]

    async def wait_ready(self) -> None:
        """Until every device's worker has answered once."""
        await asyncio.gather(*(pools.link.ready.wait() for pools in self._devices.values()))

    def drain(self) -> None:
        """Take nothing new, and let nobody wait any longer."""
        self._stopping.set()

    async def stop(self) -> None:
        self.drain()
        for run in self._runs:
            run.cancel()
        await asyncio.gather(*self._runs, return_exceptions=True)
        await asyncio.gather(*(pools.stop() for pools in self._devices.values()))
        await asyncio.to_thread(self._threads.shutdown)

    @property
    def is_draining(self) -> bool:
        return self._stopping.is_set()

    def checks(self) -> list[Check]:
        """One for each thing that must be so for the server to be ready."""
        checks = [Check(name="serving", ok=not self.is_draining, detail="shutting down" if self.is_draining else "")]
        for device, pools in self._devices.items():
            checks.append(Check(name=f"worker:{device}", ok=pools.link.is_ready, detail=pools.link.detail))
            refused = "; ".join(f"{pool_id}: {error.message}" for pool_id, error in pools.not_adopted.items())
            checks.append(Check(name=f"pools:{device}", ok=not refused, detail=refused))
        return checks

    @property
    def stopping(self) -> asyncio.Event:
        """Set when whoever waits should stop."""
        return self._stopping

    @property
    def each(self) -> list[DevicePools]:
        """Each device by itself, for whoever must not wait for all of them."""
        return list(self._devices.values())

    async def devices(self) -> list[Device]:
        return list(await asyncio.gather(*(pools.describe() for pools in self._devices.values())))

    async def all_blocks(self) -> dict[str, list[leasing.BlocksState]]:
        """By device: of every ready pool whose blocks can be leased."""
        found = await asyncio.gather(*(pools.all_blocks() for pools in self._devices.values()))
        return dict(zip(self._devices, found, strict=True))

    # --- pools -------------------------------------------------------------------------------------------------------

    async def create_pool(self, new: NewPool, *, wait_s: float) -> Creation:
        """Create it, or find the one of that name and plan, and wait up to `wait_s` for a worker and for the memory.

        Raises the pool's own error when it has failed.
        """
        if self.is_draining:
            raise _draining()
        pools = self._served(new.device)
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + wait_s
        await self._unless_stopping(pools.link.wait_ready(wait_s))
        creation = await pools.create(new)
        left_s = deadline_s - loop.time()
        pool = await pools.settled(creation.pool, timeout_s=left_s, stopping=self._stopping)
        return Creation(pool=pool, created=creation.created)

    async def pools(self, *, device: str | None = None, name: str | None = None) -> list[PoolState]:
        """In the order of the devices; those of a device without a worker as they last were."""
        asked = list(self._devices.values()) if device is None else [self._served(device)]
        listed = await asyncio.gather(*(pools.states() for pools in asked))
        return [pool for states in listed for pool in states if name is None or pool.name == name]

    async def pool(self, pool_id: str, *, wait_s: float = 0.0) -> PoolState:
        """Waits up to `wait_s` while the pool is creating or deleting."""
        owner, pool = await self._find(pool_id)
        return await owner.settled(pool, timeout_s=wait_s, stopping=self._stopping)

    async def delete_pool(self, pool_id: str, *, wait_s: float = 0.0, force: bool = False) -> messages.PoolDeleted:
        """Waits up to `wait_s` for holders to let go. Raises `Conflict` naming those who have not, unless the pool is
        to be forgotten by `force`.
        """
        owner, _ = await self._find(pool_id)
        return await owner.delete(pool_id, timeout_s=wait_s, force=force, stopping=self._stopping)

    async def owner(self, pool_id: str) -> DevicePools:
        """The device that has the pool; nobody is asked about one that is held. Raises `PoolNotFound`."""
        for pools in self._devices.values():
            if pool_id in pools.held:
                return pools
        owner, _ = await self._find(pool_id)
        return owner

    async def blocks(self, pool_id: str) -> leasing.BlocksState | None:
        """None where none can be leased, or nobody can tell now."""
        try:
            return await (await self.owner(pool_id)).blocks(pool_id)
        except (DeviceUnavailable, WorkerLost, PoolNotFound):
            return None

    async def leasable_blocks(self, pool_id: str) -> leasing.BlocksState:
        """As `blocks`, or the reason why not: `NotSupported`, `Conflict`, and what keeps the worker from telling."""
        return await (await self.owner(pool_id)).leasable_blocks(pool_id)

    async def block_map(self, pool_id: str, max_cells: int) -> leasing.BlockMap:
        """Raises as `leasable_blocks`."""
        return await (await self.owner(pool_id)).block_map(pool_id, max_cells)

    async def hold(self, pool_id: str) -> RemoteHold:
        """Raises `Conflict` for a pool whose memory no handle names."""
        owner, _ = await self._find(pool_id)
        return await owner.link.hold(pool_id)

    async def plan(self, plan_id: str) -> bytes:
        """The plan of a pool that is held. Raises `PlanNotFound`."""
        for pools in self._devices.values():
            plan = pools.plan(plan_id)
            if plan is not None:
                return plan
        raise PlanNotFound(
            f"plan {shorten(plan_id)} is not known here; POST its request to /v1/plans again",
            details={"plan_id": plan_id},
        )

    async def _unless_stopping(self, waiting: Coroutine[None, None, None]) -> None:
        """Raises `Draining` when the server is to end before `waiting` has."""
        wait, stop = asyncio.ensure_future(waiting), asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait({wait, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not wait.done():
                raise _draining()
            wait.result()
        finally:
            wait.cancel()
            stop.cancel()

    async def _find(self, pool_id: str) -> tuple[DevicePools, PoolState]:
        """Raises `PoolNotFound` when every device's worker said so, `DeviceUnavailable` when one could not be asked."""
        missing: KvpageError | None = None
        if not _POOL_ID.fullmatch(pool_id):
            raise _no_pool(pool_id)
        for pools in self._devices.values():
            try:
                return pools, await pools.get(pool_id)
            except PoolNotFound:
                continue
            except DeviceUnavailable as error:
                missing = error
        raise missing or _no_pool(pool_id)

    def _served(self, device: str) -> DevicePools:
        """By either of its names: `cuda:N` as its worker numbers it, or its UUID."""
        called = self._devices.get(device) or next(
            (one for one in self._devices.values() if one.is_called(device)), None
        )
        if called is not None:
            return called
        unknown = [one.device for one in self._devices.values() if one.may_be_called_otherwise]
        if unknown and is_cuda_name(device):
            raise DeviceUnavailable(f"{', '.join(unknown)} may be {shorten(device)}: no worker has told yet; try again")
        served = ", ".join(self._devices)
        text = f"device {shorten(repr(device))} is not served here; this server has {served}: start it with --device"
        raise SpecInvalid(text, errors=[FieldError("/device", text)])


def _no_pool(pool_id: str) -> PoolNotFound:
    return PoolNotFound(f"there is no pool {shorten(pool_id)}", details={"pool_id": pool_id})


def _draining() -> Draining:
    return Draining("the server is shutting down and creates no more pools")
