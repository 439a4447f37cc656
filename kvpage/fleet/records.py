"""What the nodes of a fleet keep and say: records of plans, and reports about what is there.

A record lies in the run directory of each node that has a rank, beside the sockets, and lives as long as they do. It is
written before the first pool of its plan is made and removed after the last is gone, so no pool is ever without one.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from kvpage.client.fleet_resources import FleetDevice, Place
from kvpage.errors import SpecInvalid, shorten

Phase = Literal["reserved", "committed", "released"]
RankState = Literal["ready", "creating", "failed", "deleting", "missing", "foreign", "unknown"]

PHASES: tuple[Phase, ...] = ("reserved", "committed", "released")
"""In the order in which a record goes through them; never back."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_ID = re.compile(r"fleet-[0-9a-f]{16}")


class FleetRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A plan of a fleet, whole and alike on each of its nodes but for the phase."""

    id: str
    """Of this making of it: a later plan of the same name has another."""
    name: str
    phase: Phase = "reserved"
    asked: str
    """Digest of the request as it came: who asks again the same gets the same plan."""
    request: dict[str, Any]
    """With the memory of each rank in it, so that planning it again gives `plan_ids`, whatever is free by then."""
    num_blocks: int
    plan_ids: tuple[str, ...]
    """A rank each."""
    places: tuple[Place, ...]
    """The same."""

    @property
    def world_size(self) -> int:
        return len(self.places)

    @property
    def nodes(self) -> tuple[str, ...]:
        """Those with a rank, in the order of their first."""
        return tuple(dict.fromkeys(place.node for place in self.places))

    def ranks_on(self, node: str) -> tuple[int, ...]:
        return tuple(rank for rank, place in enumerate(self.places) if place.node == node)

    def pool_name(self, rank: int) -> str:
        return f"fleet/{self.name}/{rank}/{self.id}"


class HeldRank(msgspec.Struct, frozen=True, kw_only=True):
    """A rank, as the node says on which it is."""

    rank: int
    device: str
    state: RankState
    """`missing`: there is no such pool. `foreign`: there is one, of another plan. `unknown`: its worker is silent."""
    pool_id: str = ""
    epoch: str = ""
    """Changes when the bytes were lost."""
    holders: tuple[str, ...] = ()
    num_holders: int = 0
    detail: str = ""


class HeldPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A record on one node, in short, and what became of its ranks there."""

    id: str
    name: str
    phase: Phase
    age_s: float
    """Since the record was written here."""
    ranks: tuple[HeldRank, ...]


class ServiceOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How the service of a node is started."""

    devices: tuple[str, ...] = ("host",)
    memory: str | None = None
    run_dir: str | None = None
    """None: as the node's own environment has it."""
    is_external: bool = False
    """Something else starts it (an init system); then no allocator starts or ends it."""


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one allocator sees."""

    node: str
    run_dir: str
    options: ServiceOptions
    devices: tuple[FleetDevice, ...] = ()
    plans: tuple[HeldPlan, ...] = ()
    fault: str = ""
    """Why there is nothing to be seen, if so."""


def check_name(name: object) -> str:
    """`name`, refused unless it can be the name of a fleet's plan. Raises `SpecInvalid`."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise SpecInvalid(
            f"{shorten(repr(name))} cannot name a fleet's plan: use 1 to 64 letters, digits, '.', '_' and '-', with a "
            f"letter or digit first"
        )
    return name


def check_id(plan_id: str) -> str:
    """Refused unless it is an id as `FleetRecord` has it: it becomes part of a file's name. Raises `SpecInvalid`."""
    if not _ID.fullmatch(plan_id):
        raise SpecInvalid(f"{shorten(repr(plan_id))} is no id of a fleet's plan; they look like fleet-0123456789abcdef")
    return plan_id


def digest(request: Mapping[str, Any]) -> str:
    """Of a request as it came. Raises `SpecInvalid` for what is no JSON."""
    try:
        text = msgspec.json.encode(request, order="sorted")
    except (TypeError, ValueError, RecursionError) as error:
        raise SpecInvalid(f"the request cannot be written as JSON: {shorten(str(error))}") from error
    return f"sha256:{hashlib.sha256(text).hexdigest()}"
