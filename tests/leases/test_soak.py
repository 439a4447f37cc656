"""Clients of one pool at random work, while they, the worker and the API process are killed: nothing is lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import kvpage
from support.lease_soak import POOL, Soak, SoakClient, soak, telling


def test_random_work_and_kills(no_leaks: None, run_dir: Path) -> None:
    outcome = soak(run_dir, seed=1, duration_s=4, num_clients=4)
    assert outcome.counts["operations"]
    assert outcome.blows


@pytest.mark.long
def test_random_work_and_kills_for_a_minute(no_leaks: None, run_dir: Path, seed: int) -> None:
    outcome = soak(run_dir, seed=seed, duration_s=60)
    assert outcome.blows["worker"]


class Spoilt:
    """A soak that ran for a moment, of two clients that have stopped and hold blocks."""

    def __init__(self, folder: Path) -> None:
        self.soak = Soak(folder, seed=5, num_clients=2)
        try:
            self.soak.begin()
            while not all(client.total()["operations"] > 20 for client in self.soak.clients):
                self.soak.listen(0.1)
            self.soak.stop()
        except BaseException:
            self.soak.close()
            raise

    @property
    def first(self) -> SoakClient:
        return self.soak.clients[0]

    def entry(self) -> tuple[int, int]:
        """A block that the first client holds."""
        assert self.first.report is not None
        group, block, _, _ = self.first.report["held"][0]
        return group, block


@pytest.fixture
def spoilt(no_leaks: None, run_dir: Path) -> Iterator[Spoilt]:
    made = Spoilt(run_dir)
    yield made
    made.soak.close()


def test_a_soak_sees_a_byte_that_another_wrote(spoilt: Spoilt) -> None:
    group, block = spoilt.entry()
    with kvpage.attach(POOL, run_dir=str(spoilt.soak.run_dir)) as kv:
        start = block * kv.plan.groups[group].block_stride_bytes
        kv.buffer[start] ^= 1
    with pytest.raises(AssertionError, match="is another's"):
        spoilt.soak.finish()


def test_a_soak_sees_a_block_that_a_client_does_not_know_of(spoilt: Spoilt) -> None:
    assert spoilt.first.report is not None
    spoilt.first.report["held"].pop()
    with pytest.raises(AssertionError, match="is written, and clients have"):
        spoilt.soak.finish()


def test_a_soak_tells_its_seed_and_what_was_done_last_when_a_client_finds_bytes_of_another(
    no_leaks: None, run_dir: Path
) -> None:
    made = Soak(run_dir, seed=6, num_clients=2)
    with (
        pytest.raises(AssertionError, match=r"(?s)seed 6: .*ended by itself.*AssertionError: .*last did"),
        telling(made),
    ):
        made.begin()
        with kvpage.attach(POOL, run_dir=str(made.run_dir)) as kv:
            while True:
                made.listen(0.05)
                kv.buffer.fill_(1)
