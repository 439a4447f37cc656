"""A fleet without machines behind the HTTP server and the manager."""

from __future__ import annotations

import random

from kvpage.fleet.manager import FleetManager
from simulated_fleet import MemoryTransport, memory_fleet

LIMIT_BYTES = 64 << 20


def manager_of(transport: MemoryTransport) -> FleetManager:
    rng = random.Random(7)
    return FleetManager(transport, new_id=lambda: f"fleet-{rng.getrandbits(64):016x}")


def small_fleet(num_nodes: int = 3, num_devices: int = 2) -> MemoryTransport:
    return memory_fleet(random.Random(1), num_nodes=num_nodes, num_devices=num_devices, limit_bytes=LIMIT_BYTES)
