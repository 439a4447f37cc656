"""What a server says of a fleet (docs/fleet.md): it encodes these, clients decode them.

Fields a reader does not know are ignored, so a server may add some without breaking older clients.
"""

from __future__ import annotations

from typing import Literal

import msgspec

FleetPlanState = Literal["reserving", "abandoned", "in-doubt", "ready", "degraded", "releasing"]
FleetNodeState = Literal["ready", "not-ready", "silent", "no-allocator", "lost"]
FleetEventKind = Literal["node", "plan", "rank"]


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank is."""

    node: str
    device: str


class FleetRank(msgspec.Struct, frozen=True, kw_only=True):
    """A rank of a plan, and what became of its pool."""

    rank: int
    node: str
    device: str
    state: str
    """`ready`, `creating`, `failed`, `deleting`; `missing`: there is no such pool; `foreign`: one of another plan;
    `unknown`: the device's worker is silent; `unreachable`: its node is.
    """
    plan_id: str
    pool: str
    """Name of its pool on that node."""
    epoch: str = ""
    """Changes when the pool's memory was lost."""
    num_holders: int = 0
    holders: tuple[str, ...] = ()
    """The first few of them."""
    detail: str = ""


class FleetPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A plan of the fleet, and how it is with each of its ranks."""

    id: str
    """Of this making of it: a later plan of the same name has another."""
    name: str
    state: FleetPlanState
    num_blocks: int
    """On every rank."""
    world_size: int
    ranks: tuple[FleetRank, ...]
    unreachable: tuple[str, ...] = ()
    """Nodes of the plan that do not answer."""
    detail: str = ""
    """What could not be done of what was asked."""


class FleetDevice(msgspec.Struct, frozen=True, kw_only=True):
    device: str
    state: str
    available_bytes: int
    """For buffers of pools."""
    limit_bytes: int
    reserved_bytes: int


class FleetNode(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    state: FleetNodeState
    """`silent`: its allocator does not answer. `lost`: a plan has ranks on it, and it is not in the cluster."""
    run_dir: str = ""
    devices: tuple[FleetDevice, ...] = ()
    detail: str = ""
    """Why it is not ready."""


class FleetEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Something that became another between two looks at the fleet."""

    time: str
    """UTC, when it was seen."""
    kind: FleetEventKind
    subject: str
    """The node, the plan's name, or the plan's name and the rank."""
    before: str
    """Empty for what was not there."""
    after: str
    """Empty for what is no longer there."""


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """All of it at one moment."""

    nodes: tuple[FleetNode, ...]
    plans: tuple[FleetPlan, ...]
    events: tuple[FleetEvent, ...] = ()
    """The last ones that this server saw."""
    undone: dict[str, tuple[str, ...]] = {}
    """What could not be mended at the last attempt, by the id of the plan."""
