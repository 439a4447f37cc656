"""What `kvpage top` shows at one moment, as the service says it, and what has happened since the moment before."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import msgspec

from kvpage.client.http import Client
from kvpage.client.resources import Device, Pool
from kvpage.errors import PoolNotFound, shorten


class PoolFrame(msgspec.Struct, frozen=True, kw_only=True):
    pool: Pool
    """With its blocks, while a worker tells."""
    steps_per_s: float | None
    """Of all leases together, since the frame before; None in the first, and after its worker was started again."""


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    devices: list[Device]
    pools: list[PoolFrame]


class Frames:
    """Read from one service, one after the other."""

    def __init__(self, client: Client, only: str | None, clock: Callable[[], float] = time.monotonic) -> None:
        """`only`: the pools of this name or id."""
        self._client, self._only, self._clock = client, only, clock
        self._before: dict[str, tuple[int, float]] = {}
        """By pool id: steps so far, and when that was."""

    def read(self) -> Frame:
        """Raises what the service answers, and `PoolNotFound` where it has no pool that is asked for."""
        devices, pools = self._client.devices(), self._client.pools()
        if self._only is not None:
            pools = [pool for pool in pools if self._only in (pool.name, pool.id)]
            if not pools:
                raise PoolNotFound(f"there is no pool {shorten(self._only)}; see `kvpage pools list`")
            devices = [device for device in devices if device.device in {pool.device for pool in pools}]
        seen = dict(self._before)
        self._before.clear()
        return Frame(devices=devices, pools=[frame for pool in pools for frame in self._read_pool(pool, seen)])

    def _read_pool(self, pool: Pool, seen: dict[str, tuple[int, float]]) -> list[PoolFrame]:
        """None for one that has gone meanwhile."""
        if pool.state == "ready":
            with contextlib.suppress(PoolNotFound):
                pool = self._client.get_pool(pool.id)
                return [PoolFrame(pool=pool, steps_per_s=self._rate(pool, seen.get(pool.id)))]
            return []
        return [PoolFrame(pool=pool, steps_per_s=None)]

    def _rate(self, pool: Pool, before: tuple[int, float] | None) -> float | None:
        if pool.blocks is None:
            return None
        num_steps, now_s = sum(pool.blocks.steps.counts), self._clock()
        self._before[pool.id] = num_steps, now_s
        if before is None or num_steps < before[0] or now_s <= before[1]:
            return None
        return (num_steps - before[0]) / (now_s - before[1])
