"""Pools made directly at a worker, with a made-up plan: a worker keeps plans and does not read them."""

from __future__ import annotations

import ctypes
import os

from kvpage.memory.base import Mapping
from kvpage.memory.kinds import memory_kind
from kvpage.wire import messages, succession
from kvpage.wire.client import WorkerClient

PLAN_ID = "sha256:" + "0123456789abcdef" * 4
OTHER_PLAN_ID = "sha256:" + "fedcba9876543210" * 4
PLAN = b'{"made": "up"}'
SIZE_BYTES = 1 << 20
OVERHEAD_BYTES = 2 * 4096  # what a pool with this plan takes of the host beside its buffer: control block and plan


def create_pool(client: WorkerClient, name: str = "mimo", *, size_bytes: int = SIZE_BYTES) -> messages.PoolState:
    """The pool, when its memory is there or has failed to be."""
    body = messages.CreatePool(name=name, plan_id=PLAN_ID, plan=PLAN, buffer_size_bytes=size_bytes)
    pool = client.ask(body, messages.PoolCreated).pool
    return client.ask(messages.WaitPool(pool_id=pool.pool_id, timeout_s=60), messages.PoolState)


def attach_pool(client: WorkerClient, name: str = "mimo") -> tuple[messages.Attached, Mapping]:
    reply = client.request(messages.Attach(name=name))
    assert isinstance(reply.body, messages.Attached)
    [fd], [info] = reply.fds, reply.body.chunks
    try:
        mapping = memory_kind(info.kind, info.device_uuid).map_chunk(fd, info.size_bytes, info.handle)
    finally:
        os.close(fd)
    return reply.body, mapping


def export_pool(client: WorkerClient, pool_id: str) -> tuple[list[messages.ChunkInfo], list[int]]:
    """Chunks, and the descriptors of the chunks and of the control block, owned by the caller."""
    reply = client.request(messages.ExportPool(pool_id=pool_id))
    assert isinstance(reply.body, messages.Exported)
    return reply.body.chunks, reply.fds


def finish_adoption(client: WorkerClient) -> int:
    """As whoever keeps pools for a worker: it has been offered all of them. How many it has now."""
    return client.ask(succession.FinishAdoption(), succession.AdoptionFinished).num_pools


def contents(mapping: Mapping) -> memoryview:
    """The bytes, which keep the memory mapped. Device memory too: the driver double has it in host memory."""
    array = (ctypes.c_ubyte * mapping.size_bytes).from_address(mapping.address)
    array._claim = mapping.claim  # type: ignore[attr-defined]
    return memoryview(array).cast("B")
