"""Random steps of leases: in process, over HTTP, and over a worker's socket, the worker killed and replaced."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from kvpage.client.http import Client
from kvpage.pages.block_lease import BlockLease
from kvpage.pages.leased_pool import LeasedPool
from kvpage.pages.local_lease import LocalLease
from kvpage.plans import Plan
from support.api_service import ApiService
from support.lease_machine import LeaseMachine, Way
from support.leased_pools import BLOCKS_PER_SLAB, request_of
from support.served_leases import OverSocket, ServedPools

_numbers = itertools.count(1)


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


class OverHttp(Way):
    def __init__(self, client: Client, plan_name: str, plan: Plan) -> None:
        self.client, self.num_slabs = client, plan.num_blocks
        self.pool = client.create_pool(request_of(plan_name), device="host", name=f"pool {next(_numbers)}")
        assert self.pool.plan_id == plan.plan_id

    def open(self, name: str) -> BlockLease:
        return self.client.create_lease(self.pool.id, name=name, ttl_s=60)

    def adopt(self, name: str, token: str) -> BlockLease:
        return self.client.adopt_lease(self.pool.id, name=name, token=token, ttl_s=60)

    def free_slabs(self) -> int:
        blocks = self.client.get_pool(self.pool.id).blocks
        assert blocks is not None
        return blocks.free_slabs + blocks.idle_slabs

    def check(self) -> None:
        """What can be seen is what the machine compares already."""

    def close(self) -> None:
        self.client.delete_pool(self.pool.id)


def test_over_http(no_leaks: None, run_dir: Path) -> None:
    with ApiService(run_dir) as service, service.client() as client:

        class Machine(LeaseMachine):
            plan_name = "cut states"
            make = partial(OverHttp, client, plan_name)

        run_state_machine_as_test(
            Machine,
            settings=settings(
                max_examples=4, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
            ),
        )


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
