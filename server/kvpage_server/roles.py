"""Who may do what: the one table of operations, and the role that each needs.

Over the Unix socket everybody whom the kernel lets in is `admin`. Over TCP a token has a role; without one only what is
open here is served, and only under a name this server is bound to.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Role(enum.IntEnum):
    """Each may do what the ones before it may."""

    READ = 1
    """Look at everything but memory: pools and who holds them, leases without their ids, events, metrics."""
    PLAN = 2
    """Compute plans."""
    ALLOCATE = 3
    """Create and delete pools, lease their blocks, hold their memory."""
    ADMIN = 4
    """Set what tenants may have, forget prefixes, and delete what others hold."""

    @property
    def label(self) -> str:
        """As token files and answers spell it."""
        return self.name.lower()


ROLES_BY_LABEL = {role.label: role for role in Role}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    role: Role
    is_open: bool = False
    """Served over TCP without a token too."""
    is_change: bool = False
    """Counts against the rate limit."""
    is_recorded: bool = False
    """Is in the audit log. Steps of a lease are not: there may be thousands a second, each between two fsyncs, and the
    lease's beginning and end, which are recorded, say whose they were."""
    begins_in_route: bool = False
    """Its body or query names what it changes. So its route begins the record, when it has read them and before it
    changes anything."""
    is_secret: bool = False
    """Answers with what opens memory: not in the clear to another machine."""


_OPEN = Rule(role=Role.READ, is_open=True)
_READ = Rule(role=Role.READ)
_STEP = Rule(role=Role.ALLOCATE, is_change=True)
_ALLOCATE = Rule(role=Role.ALLOCATE, is_change=True, is_recorded=True)
_NAMED_INSIDE = Rule(role=Role.ALLOCATE, is_change=True, is_recorded=True, begins_in_route=True)
_HANDLE = Rule(role=Role.ALLOCATE, is_change=True, is_recorded=True, is_secret=True)
_ADMIN = Rule(role=Role.ADMIN, is_change=True, is_recorded=True)

FORCED_DELETE = "delete_pool?force=true"  # an operation's parameter that needs more than the operation
RULES: dict[str, Rule] = {
    "livez": _OPEN,
    "readyz": _OPEN,
    "health": _OPEN,
    "errors": _OPEN,
    "openapi": _OPEN,
    "get_root": _OPEN,  # the web page: files that are the same for everybody
    "get_slash": _OPEN,
    "get_page": _OPEN,
    "get_file": _OPEN,
    "list_devices": _OPEN,
    "create_plan": Rule(role=Role.PLAN, is_open=True),  # pure, and bounded by the queue of plans
    "get_plan": _OPEN,
    "get_layout_svg": _OPEN,
    "get_picture": _OPEN,  # HEAD of the same
    "metrics": _READ,
    "list_pools": _READ,
    "get_pool": _READ,
    "get_pool_tensors": _READ,
    "get_block_map": _READ,
    "list_contents": _READ,
    "list_leases": _READ,
    "get_lease": _READ,
    "list_tenants": _READ,
    "get_tenant": _READ,
    "read_events": _READ,
    "get_fleet": _READ,
    "get_fleet_plan": _READ,
    "create_fleet_plan": _NAMED_INSIDE,
    "delete_fleet_plan": _NAMED_INSIDE,
    "create_pool": _NAMED_INSIDE,
    "delete_pool": _NAMED_INSIDE,
    "hold_pool": _HANDLE,
    "create_lease": _NAMED_INSIDE,
    "adopt_lease": _NAMED_INSIDE,
    "delete_lease": _ALLOCATE,
    "renew_lease": _STEP,
    "batch_blocks": _STEP,
    "find_prefix": Rule(role=Role.ALLOCATE),
    "take_prefix": _STEP,
    "create_reservation": _STEP,
    "commit_reservation": _STEP,
    "delete_reservation": _STEP,
    "set_tenant": Rule(role=Role.ADMIN, is_change=True, is_recorded=True, begins_in_route=True),
    "clear_prefixes": _ADMIN,
    FORCED_DELETE: _ADMIN,
}
