"""What the HTTP API says about pools, devices and health: the server encodes these, the clients decode them.

Fields a reader does not know are ignored, so a server may add some without breaking older clients.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from kvpage.client.block_resources import PoolBlocks

PoolStateName = Literal["creating", "ready", "failed", "deleting"]
DeviceStateName = Literal["starting", "ready", "draining", "lost"]
HealthStatus = Literal["ok", "ready", "not-ready", "draining"]


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """A connection that holds a pool. For people to read: process ids may come from another PID namespace."""

    pid: int
    """0 when the process lives in a PID namespace the worker cannot see."""
    uid: int
    client_name: str


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Why a pool failed, in the terms of `kvpage.errors`."""

    code: str
    message: str
    details: dict[str, Any] = {}


class Pool(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A plan made real on one device."""

    id: str
    name: str
    """Unique on its device."""
    device: str
    state: PoolStateName
    plan_id: str
    epoch: str
    """Changes when the pool's memory was lost."""
    buffer_size_bytes: int
    committed_bytes: int
    """Memory that is really there; grows while the pool is creating."""
    num_holders: int
    holders: list[Holder]
    """The first few of them."""
    error: Failure | None = None
    blocks: PoolBlocks | None = None
    """Of a pool that was asked for by its id; None where no block of it can be leased, or no worker tells."""


class PoolList(msgspec.Struct, frozen=True, kw_only=True):
    pools: list[Pool]


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """A device the server serves. What only its worker knows is None while there is none."""

    device: str
    state: DeviceStateName
    handle_kinds: list[str]
    """How its memory can be shared, tried out."""
    epoch: str | None
    worker_pid: int | None
    memory_limit_bytes: int | None
    """What pools may take."""
    reserved_bytes: int | None
    """What pools have, and forgotten pools that are still held."""
    num_pools: int
    pinned_bytes: int | None = None
    """What forgotten pools have that are still held."""
    device_uuid: str = ""
    """Of a GPU or MIG instance; empty for the host."""
    device_name: str = ""
    unsupported: dict[str, str] = {}
    """Handle kinds that were tried and do not work, and why."""
    free_bytes: int | None = None
    """On the device, whoever uses the rest."""
    free_age_s: float | None = None
    """How long ago that was seen."""
    detail: str = ""
    """Why the device is not ready."""


class ForgottenPool(msgspec.Struct, frozen=True, kw_only=True):
    """A pool that was deleted by force. Its memory stays in use until its holders have let go of it."""

    id: str
    pinned_bytes: int
    num_holders: int
    holders: list[Holder]
    """The first few of them."""


class DeviceList(msgspec.Struct, frozen=True, kw_only=True):
    devices: list[Device]


class PoolTensor(msgspec.Struct, frozen=True, kw_only=True):
    """One strided tensor in a pool's buffer, axes in the backend's logical order."""

    layer: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    offset_bytes: int


class PoolTensors(msgspec.Struct, frozen=True, kw_only=True):
    pool_id: str
    plan_id: str
    epoch: str
    device: str
    buffer_size_bytes: int
    tensors: list[PoolTensor]


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that must be so for the server to be ready."""

    name: str
    ok: bool
    detail: str = ""


class Health(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    status: HealthStatus
    checks: list[Check] = []
