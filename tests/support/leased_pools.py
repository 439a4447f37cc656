"""Small pools whose blocks leases hold, of plans that cut their slabs in every way."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import kvpage
from kvpage.pages.geometry import Geometry
from kvpage.pages.leased_pool import LeasedPool
from kvpage.pages.leases import Lease
from kvpage.pages.pool_buffer import pool_buffer_bytes
from kvpage.plans import Plan

Layer = dict[str, Any]


def attention(kind: str, heads: int = 1, **more: Any) -> Layer:
    shape = {"block_size": 16, "num_kv_heads": heads, "head_size": 64, "dtype": "bfloat16"}
    return {"kind": kind, "name": f"{kind}.{heads}", "backend": "flash_attn"} | shape | more


def window(heads: int) -> Layer:
    return attention("sliding_window", heads, sliding_window=40)


def state(bytes_: int) -> Layer:
    return {"kind": "mamba", "name": "state", "block_size": 16, "shapes": [[bytes_ // 4]], "dtypes": ["float32"]}


LAYERS: dict[str, list[Layer]] = {
    "flat": [attention("full_attention")],
    "flat groups": [attention("full_attention"), window(1)],
    "mixed": [attention("full_attention", 4), window(1)],
    "cut twice": [attention("full_attention", 3), window(2)],
    "three": [
        attention("full_attention", 4), window(1), attention("chunked_local_attention", 2, attention_chunk_size=64)
    ],
    "states": [attention("full_attention"), state(16384)],
    "cut states": [attention("full_attention", 2), state(4096)],
}  # fmt: skip
BLOCKS_PER_SLAB = {
    "flat": (1,), "flat groups": (1, 1), "mixed": (1, 4), "cut twice": (2, 3), "three": (1, 4, 2), "states": (4, 1),
    "cut states": (1, 2),
}  # fmt: skip


def request_of(name: str, num_slabs: int = 9) -> dict[str, Any]:
    return {
        "layers": LAYERS[name],
        "strategy": "nested",
        "allocator": "slabs",
        "num_blocks": num_slabs,
        "max_model_len": 16,
        "max_num_batched_tokens": 16,
    }


@cache
def plan_of(name: str, num_slabs: int = 9) -> Plan:
    plan = kvpage.plan(request_of(name, num_slabs))
    assert tuple(group.blocks_per_slab for group in plan.groups) == BLOCKS_PER_SLAB[name]
    return plan


def new_buffer(plan: Plan) -> mmap.mmap:
    """Zeros, which take memory only where they are touched."""
    return mmap.mmap(-1, pool_buffer_bytes(Geometry.of(plan)))


def content(number: int) -> bytes:
    """A hash."""
    return number.to_bytes(16, "big")


class LeaseState(NamedTuple):
    tenant: str
    generation: int
    pid: int
    expires_s: float | None
    last: tuple[int, int]
    """Key and result of its last operation."""
    held: dict[int, dict[int, int]]
    """By group and block, how often."""


class PoolState(NamedTuple):
    """What outlives a process, told so that two pools can be compared."""

    leases: dict[str, LeaseState]
    tenants: list[Any]
    content: dict[int, frozenset[bytes]]
    """By group, hashes that can be found."""


def held_of(pool: LeasedPool, lease: Lease) -> dict[int, dict[int, int]]:
    return {
        group: dict(zip(held.ids.tolist(), held.times.tolist(), strict=True))
        for group, held in pool.held(lease).items()
    }


def state_of(pool: LeasedPool) -> PoolState:
    leases = {}
    for lease in pool.book:
        last, record = pool.holdings.last(lease.row), lease.record
        leases[record.name] = LeaseState(
            record.tenant, record.generation, record.pid, pool.book.expires_s(lease), (last.key, last.result),
            held_of(pool, lease),
        )  # fmt: skip
    hashes = pool.index.snapshot().hashes
    return PoolState(leases, pool.book.tenants(), {group: frozenset(some) for group, some in enumerate(hashes)})


def num_held(held: Mapping[int, Mapping[int, int]]) -> dict[int, int]:
    """Blocks by group."""
    return {group: sum(times.values()) for group, times in held.items() if times}
