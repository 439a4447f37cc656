"""What the workers say of their devices, pools and blocks when somebody reads the metrics, within a bounded time."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from kvpage.client.resources import Device
from kvpage.errors import KvpageError
from kvpage.wire.leasing import BlocksState
from kvpage.wire.messages import PoolState
from kvpage_server.device_pools import DevicePools

READ_S = 2.0
"""How long a worker has to answer everything; Prometheus gives up after 10 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolReading:
    state: PoolState
    blocks: BlocksState | None
    """Said by the worker in one answer; None where no blocks can be leased, and while there is no worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReading:
    device: Device | None
    """None: its worker did not answer in time."""
    name: str
    device_uuid: str
    """As its last worker said; empty for the host, and before the first worker has answered."""
    num_workers: int
    """That have served it since this process started."""
    pools: tuple[PoolReading, ...]
    """While there is no worker, or it does not answer: those that are held for the next, as they last were."""

    @property
    def is_ready(self) -> bool:
        return self.device is not None and self.device.state == "ready"


class DeviceReader:
    """Asks the worker of one device. Whoever reads while it is being asked gets the same answer, so that however often
    a worker that hangs is read, no more than one thread waits for it.
    """

    def __init__(self, pools: DevicePools, *, read_s: float = READ_S) -> None:
        self._pools = pools
        self._read_s = read_s
        self._under_way: asyncio.Task[DeviceReading] | None = None
        self._device_uuid = ""

    async def read(self) -> DeviceReading:
        """Raises nothing for a worker that does not answer: that is a reading too."""
        reading = self._under_way
        if reading is None:
            reading = self._under_way = asyncio.ensure_future(self._ask())
            reading.add_done_callback(self._finished)
        await asyncio.wait({reading}, timeout=self._read_s)
        return reading.result() if reading.done() else self._unanswered()

    async def close(self) -> None:
        if self._under_way is not None:
            self._under_way.cancel()
            await asyncio.wait({self._under_way})

    def _finished(self, reading: asyncio.Task[DeviceReading]) -> None:
        self._under_way = None
        if not reading.cancelled():
            reading.exception()  # nobody may have waited for it so long

    async def _ask(self) -> DeviceReading:
        try:
            device = await self._pools.describe()
            states = await self._pools.states()
            pools = [PoolReading(state=state, blocks=await self._blocks(state)) for state in states]
        except KvpageError:
            return self._unanswered()
        self._device_uuid = device.device_uuid or self._device_uuid
        return replace(self._unanswered(), device=device, device_uuid=self._device_uuid, pools=tuple(pools))

    async def _blocks(self, state: PoolState) -> BlocksState | None:
        is_there = state.state == "ready" and self._pools.link.is_ready
        return await self._pools.blocks(state.pool_id) if is_there else None

    def _unanswered(self) -> DeviceReading:
        return DeviceReading(
            device=None,
            name=self._pools.device,
            device_uuid=self._device_uuid,
            num_workers=self._pools.link.num_workers,
            pools=tuple(PoolReading(state=pool.state, blocks=None) for pool in self._pools.held),
        )
