"""A pool in which leases hold blocks of every kind, and an operation of every kind on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from kvpage.pages.leased_pool import LeasedPool
from kvpage.pages.leases import Lease, Owner
from kvpage.pages.pool_buffer import PoolBuffer
from kvpage.pages.reservations import commit_reservation, reserve
from kvpage.pages.steps import Content, Step
from kvpage.pages.tenants import Tenant
from support.leased_pools import content, plan_of
from support.memory_moments import Moments

TOKEN = "of the lease of this name"
KEY = 77
NUM_SLABS = 16
_ROWS_BYTES, _TEXTS_BYTES, _SETTINGS_BYTES = 64 + 16 * 1024, 2 * 1024 * 10, 128 << 10


class Scene(NamedTuple):
    pool: LeasedPool
    buffer: Any
    one: Lease
    """Holds blocks of each group once, the first two with content; the very first is held twice by it and once by
    `other`. It has a reservation."""
    other: Lease
    ids: dict[int, list[int]]
    """Of `one`, by group; none of them is also in `cached`."""
    cached: dict[int, list[int]]
    """Nobody holds them."""
    reservation: Lease
    num_spare: int
    """Slabs that are free or idle."""


def furnish(name: str, buffer: Any) -> Scene:
    pool = LeasedPool(plan_of(name, NUM_SLABS), buffer)
    cuts = pool.geometry.blocks_per_slab
    one, other = (pool.open(lease, token=TOKEN, tenant=lease).lease for lease in ("one", "other"))
    groups = range(len(cuts))
    few = {group: cut + 1 if cut > 1 else 2 for group, cut in enumerate(cuts)}
    more = {group: max(3, count) for group, count in few.items()}
    ids = {group: some.tolist() for group, some in pool.do(one, Step(allocate=more)).ids.items()}
    cached = {group: some.tolist() for group, some in pool.do(one, Step(allocate=few)).ids.items()}
    cached = {group: sorted(some) for group, some in cached.items()}
    for group in groups:
        blocks = ids[group][:2] + cached[group]
        commit = {group: Content(blocks, [content(1000 * group + block) for block in blocks])}
        pool.do(one, Step(commit=commit, retain={group: ids[group][:1]}))
        pool.do(other, Step(retain={group: ids[group][:1]}))
    pool.do(one, Step(key=3, free=cached))
    reservation = reserve(pool, one, dict.fromkeys(groups, 1))
    slabs = pool.blocks.slab_counts()
    return Scene(pool, buffer, one, other, ids, cached, reservation, slabs.free + slabs.idle)


def scene_of(name: str, buffer: Any, before: Scene) -> Scene:
    """What is in the buffer, a copy of that of `before`, for whoever adopts both leases; nothing is reserved."""
    pool = LeasedPool(plan_of(name, NUM_SLABS), buffer)
    one, other = (pool.adopt(lease, TOKEN) for lease in ("one", "other"))
    return before._replace(pool=pool, buffer=buffer, one=one, other=other)


def moments_of(scene: Scene) -> Moments:
    """Of all of its buffer that is ever used in these scenes."""
    parts = PoolBuffer.of(scene.pool.geometry, scene.buffer)
    start = len(memoryview(scene.buffer)) + -parts.records.nbytes // 4096 * 4096  # each part begins at a page
    settings = start + _ROWS_BYTES + 2 * 1024 * 1024
    halves = [(at, at + 4096) for at in (settings, settings + 64 + _SETTINGS_BYTES)]
    return Moments(scene.buffer, [(0, start + _ROWS_BYTES + _TEXTS_BYTES), *halves])


def everything(scene: Scene, key: int = KEY) -> object:
    """A step that commits, retains what is shared, cached and its own, frees, and allocates in all groups."""
    last = max(scene.ids)
    return scene.pool.do(
        scene.one,
        Step(
            key=key,
            commit={last: Content(scene.ids[last][-1:], [content(5)])},
            retain={0: [*scene.cached[0][:1], *scene.ids[0][:1]]},
            free={0: scene.ids[0][:2] + scene.ids[0][:1], last: scene.ids[last][:1]} if last else {0: scene.ids[0]},
            allocate=dict.fromkeys(reversed(scene.ids), 2),
        ),
    )


def most_of_all(scene: Scene) -> object:
    """All that the lease holds of the first group goes, and the last group is given the room."""
    last = max(scene.ids)
    free = {0: scene.ids[0] + scene.ids[0][:1]}
    count = scene.num_spare * scene.pool.geometry.blocks_per_slab[last] + 1
    return scene.pool.do(scene.one, Step(key=KEY, free=free, allocate={last: count}))


Operation = Callable[[Scene], object]
STEPS: dict[str, Operation] = {
    "everything at once": everything,
    "free and take the room": most_of_all,
    "allocate": lambda here: here.pool.do(here.one, Step(key=KEY, allocate=dict.fromkeys(here.ids, 2))),
    "allocate runs": lambda here: here.pool.do(
        here.one, Step(key=KEY, free={0: here.ids[0][1:]}, allocate=dict.fromkeys(here.ids, 2), as_runs=True)
    ),
    "retain": lambda here: here.pool.do(
        here.one, Step(key=KEY, retain={group: some + some for group, some in here.cached.items()})
    ),
    "retain what is shared": lambda here: here.pool.do(here.other, Step(key=KEY, retain=here.ids)),
    "free": lambda here: here.pool.do(here.one, Step(key=KEY, free=here.ids)),
    "allocate_one": lambda here: here.pool.allocate_one(here.one, max(here.ids), KEY),
    "free_one": lambda here: here.pool.free_one(here.one, 0, here.ids[0][1], KEY),
    "free_one of a shared one": lambda here: here.pool.free_one(here.one, 0, here.ids[0][0], KEY),
    "take_prefix": lambda here: here.pool.take_prefix(
        here.other, [[content(1000 * group + some[0])] for group, some in here.cached.items()], 16, KEY
    ),
}  # fmt: skip
"""With the key `KEY`."""
OPERATIONS: dict[str, Operation] = {
    **STEPS,
    "open": lambda here: here.pool.open("new", Owner(pid=4), tenant="t", token=TOKEN, ttl_s=5.0),
    "adopt": lambda here: here.pool.adopt("one", TOKEN, Owner(pid=5)),
    "close": lambda here: here.pool.close_lease(here.one),
    "close of one who died": lambda here: here.pool.close_lease(here.one, owner_died=True),
    "reserve": lambda here: reserve(here.pool, here.one, dict.fromkeys(here.ids, 1)),
    "commit a reservation": lambda here: commit_reservation(here.pool, here.reservation, key=KEY),
    "commit a part": lambda here: commit_reservation(here.pool, here.reservation, {0: 1}, KEY),
    "give a reservation back": lambda here: here.pool.close_lease(here.reservation),
    "set_tenants": lambda here: here.pool.book.set_tenants([Tenant(name="one", quota_bytes=1 << 20)]),
    "expire_at": lambda here: here.pool.book.expire_at(here.one, 12.5),
}
