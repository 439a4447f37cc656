"""What is used up ends in a clear error, and the service goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from support import exhaustion

pytestmark = pytest.mark.usefixtures("no_leaks")

QUICK = [
    exhaustion.slow_clients,
    exhaustion.more_clients_than_files,
    exhaustion.many_clients,
    exhaustion.more_memory_than_allowed,
    exhaustion.races_for_memory,
    exhaustion.most_layers,
]


@pytest.mark.parametrize("exhaust", QUICK, ids=lambda function: function.__name__)
def test_the_service_is_unharmed(run_dir: Path, exhaust: Callable[[Path], str]) -> None:
    assert exhaust(run_dir)


@pytest.mark.long
def test_a_client_that_never_reads_harms_nobody(run_dir: Path) -> None:
    assert exhaustion.a_client_that_never_reads(run_dir)


def test_nothing_leaks(run_dir: Path, request: pytest.FixtureRequest) -> None:
    assert exhaustion.cycles(run_dir, 1000 if request.config.getoption("--tier") == "long" else 50)


def test_the_check_of_what_is_left_fires(run_dir: Path) -> None:
    with pytest.raises(AssertionError, match="descriptors are left"):
        with exhaustion._worker(run_dir, settle_s=0.05) as worker:
            left = worker.client()
    left.close()
