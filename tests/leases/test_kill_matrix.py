"""A worker or a client killed at any step of what a lease does: conservation holds, no block is owned twice or lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpage.errors import KvpageError, StaleHandle
from kvpage.wire import leasing
from support import lease_kill_matrix as matrix
from support.leased_pools import plan_of
from support.served_leases import OverSocket, ServedPools

PLAN = plan_of("three", 17)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[matrix.Scene]:
    with matrix.scene(tmp_path_factory.mktemp("k")) as scene:
        yield scene


# --- what the matrix found -------------------------------------------------------------------------------------------


@pytest.fixture
def flat(no_leaks: None, run_dir: Path) -> Iterator[OverSocket]:
    pools = ServedPools(run_dir)
    way = OverSocket(pools, plan_of("flat"))
    yield way
    way.close()
    pools.close()


def test_a_lease_whose_opening_was_not_answered_is_opened_by_asking_again(flat: OverSocket) -> None:
    """The worker had noted it when it died: its name must not be taken for its owner."""
    body = leasing.OpenLease(pool_id=flat.pool_id, name="engine", token="0123456789abcdef", key=7)
    with flat.pools.worker.client() as client:
        opened = client.ask(body, leasing.LeaseOpened)
    flat.pools.kill()
    with flat.pools.worker.client() as client:
        for other in (
            leasing.OpenLease(pool_id=flat.pool_id, name="engine", token="another's, not it", key=7),
            leasing.OpenLease(pool_id=flat.pool_id, name="engine", token="0123456789abcdef", key=8),
            leasing.OpenLease(pool_id=flat.pool_id, name="engine", token="0123456789abcdef"),
        ):
            with pytest.raises(KvpageError):
                client.ask(other, leasing.LeaseOpened)
        again = client.ask(body, leasing.LeaseOpened)
        assert (again.generation, again.blocks) == (2, [0])
        assert again.lease_id != opened.lease_id
        client.ask(leasing.CloseLease(lease_id=again.lease_id), leasing.LeaseClosed)


def test_a_lease_whose_adoption_was_not_answered_is_adopted_by_asking_again(flat: OverSocket) -> None:
    with flat.open("engine", token="0123456789abcdef") as lease:
        lease.allocate(0, 3)
        flat.pools.kill()
        body = leasing.AdoptLease(
            pool_id=flat.pool_id, name="engine", token="0123456789abcdef", generation=1, key=7
        )  # fmt: skip
        with flat.pools.worker.client() as client:
            assert client.ask(body, leasing.LeaseOpened).generation == 2
        flat.pools.kill()
        with flat.pools.worker.client() as client:
            another = leasing.AdoptLease(
                pool_id=flat.pool_id, name="engine", token="0123456789abcdef", generation=1, key=8
            )  # fmt: skip
            with pytest.raises(StaleHandle):
                client.ask(another, leasing.LeaseOpened)
            again = client.ask(body, leasing.LeaseOpened)
            assert again.blocks == [3]
            client.ask(leasing.CloseLease(lease_id=again.lease_id), leasing.LeaseClosed)
