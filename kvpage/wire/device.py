"""Messages about the device of a worker."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from kvpage.wire.values import Body, Epoch, Id

DeviceStateName: TypeAlias = Literal["ready", "draining"]


class DescribeDevice(Body, frozen=True, kw_only=True):
    pass


class DeviceState(Body, frozen=True, kw_only=True):
    device: str
    epoch: Epoch
    worker_pid: int
    state: DeviceStateName
    handle_kinds: list[str]
    """Those that were tried and work."""
    unsupported: dict[str, str] = msgspec.field(default_factory=dict)
    """Those that were tried and do not, and why."""
    device_uuid: str = ""
    """Of a GPU or MIG instance; empty for the host."""
    device_number: int | None = None
    """N of `cuda:N` as the worker's process numbers the device; None for the host."""
    device_name: str = ""
    free_bytes: Id = 0
    """On the device, whoever uses the rest."""
    free_age_s: float = 0.0
    """How long ago that was seen: asking a GPU takes a context on it, so it is seen when a pool is made."""
    memory_limit_bytes: Id
    reserved_bytes: Id
    """Of pools, and of forgotten pools that are still held."""
    pinned_bytes: Id
    """Of the latter alone."""
    num_pools: Id
    num_clients: Id
