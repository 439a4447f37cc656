"""Random steps of leases, in process and over a worker's socket, with the worker killed and replaced meanwhile."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from kvpage.pages.block_lease import BlockLease
from kvpage.pages.leased_pool import LeasedPool
from kvpage.pages.local_lease import LocalLease
from kvpage.plans import Plan
from support.lease_machine import LeaseMachine, Way
from support.leased_pools import BLOCKS_PER_SLAB
from support.served_leases import OverSocket, ServedPools


class Local(Way):
    def __init__(self, plan: Plan) -> None:
        self.pool = LeasedPool(plan)

    def open(self, name: str) -> BlockLease:
        return LocalLease(self.pool, name)

    def adopt(self, name: str, token: str) -> BlockLease:
        return LocalLease.adopt(self.pool, name, token)

    def free_slabs(self) -> int:
        slabs = self.pool.blocks.slab_counts()
        return slabs.free + slabs.idle

    def check(self) -> None:
        self.pool.check()

    def close(self) -> None:
        self.pool.close()


@pytest.mark.parametrize("name", BLOCKS_PER_SLAB)
def test_in_process(name: str) -> None:
    class Machine(LeaseMachine):
        plan_name = name
        make = Local

    run_state_machine_as_test(Machine, settings=settings(max_examples=8, stateful_step_count=30, deadline=None))


def test_over_a_socket(no_leaks: None, run_dir: Path) -> None:
    pools = ServedPools(run_dir)
    try:
        for name in ("flat", "cut twice", "cut states"):

            class Machine(LeaseMachine):
                plan_name = name
                make = partial(OverSocket, pools)

            run_state_machine_as_test(
                Machine,
                settings=settings(
                    max_examples=4, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
                ),
            )
    finally:
        pools.close()
