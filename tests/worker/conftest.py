"""A worker process for each test, and what it leaves behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.served_leases import pools as pools
from support.worker_process import WorkerProcess


@pytest.fixture
def worker(no_leaks: None, run_dir: Path) -> Iterator[WorkerProcess]:
    with WorkerProcess(run_dir) as worker:
        yield worker
