"""What every suite shares: tiers, the seed, a private environment, and the leak check."""

from __future__ import annotations

import gc
import os
import random
import re
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from support.durations import FileDurations
from support.leaks import leak_guard
from support.sampling import left_out

TESTS = Path(__file__).parent
NVIDIA_DRIVER = Path("/proc/driver/nvidia")

# Each run has a seed of its own, so the examples of many runs add up.
settings.register_profile("default", max_examples=75, deadline=None, print_blob=True)
settings.register_profile("long", max_examples=10_000, deadline=None, print_blob=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    tier = os.environ.get("KVPAGE_TEST_TIER", "default")
    parser.addoption("--tier", choices=("default", "long"), default=tier, help="how many random examples, and how long")
    parser.addoption("--file-durations", type=Path, metavar="FILE", help="write what each file of tests took into FILE")


@pytest.hookimpl(tryfirst=True)  # before hypothesis reads its seed
def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile(config.getoption("--tier"))
    if config.option.hypothesis_seed is None:
        given = getattr(config, "workerinput", {})  # of the process that collects and runs for another
        config.option.hypothesis_seed = given.get("seed") or random.SystemRandom().getrandbits(32)
    if path := config.getoption("--file-durations"):
        config.pluginmanager.register(FileDurations(path))
    isolate_environment()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: many tests wait for other processes. The command line bounds it."""
    return len(os.sched_getaffinity(0)) + 1


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """All processes of a run have one seed: they must choose the same cases, and the header names it."""
    node.workerinput["seed"] = node.config.option.hypothesis_seed


def isolate_environment() -> None:
    """Let no setting of the person who runs the tests in, and no folder of theirs be written to."""
    for name in [name for name in os.environ if name.startswith("KVPAGE_") and name != "KVPAGE_TEST_TIER"]:
        del os.environ[name]
    os.environ["KVPAGE_RUN_DIR"] = "/nonexistent/set-by-the-tests"
    os.environ["KVPAGE_CONFIG"] = os.devnull  # no settings of this machine
    # Threads of torch that wait for each other by spinning take the cores from the processes under test.
    os.environ["OMP_NUM_THREADS"] = "1"
    # Children started in the checkout import the installed kvpage too, not the folder they stand in.
    os.environ["PYTHONSAFEPATH"] = "1"
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a shell; children would inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)


LONGEST_FIRST = (
    "fleet/test_cluster.py",
    "ui/test_page.py",
    "pages/test_leased_crash.py",
    "server/test_kill_matrix.py",
    "integrations/test_transformers.py",
    "integrations/test_transformers_processes.py",
    "cuda/test_service.py",
    "deploy/test_image.py",
    "server/test_survival.py",
    "cuda/test_interruptions.py",
    "client/test_interruptions.py",
    "cuda/test_kill_matrix.py",
    "cli/test_demo.py",
    "memory/test_cuda.py",
    "project/test_gpu_check.py",
    "pages/test_crash.py",
    "server/test_serve.py",
    "server/test_against_description.py",
    "cli/test_bad_input.py",
    "planner/test_ranks.py",
    "pages/test_sequences_machine.py",
    "client/test_states.py",
    "worker/test_adoption.py",
    "project/test_bootstrap.py",
    "docs/test_examples.py",
    "docs/test_quickstart.py",
)
"""Files of more than ten seconds. One of them taken up last would keep one process busy while the others are idle."""

ADDRESS = re.compile(r" at 0x[0-9a-f]{6}")


def pytest_report_header(config: pytest.Config) -> str:
    seed = config.option.hypothesis_seed
    return f"tier: {config.getoption('--tier')}; seed: {seed} (repeat with --hypothesis-seed={seed})"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    places = {TESTS / name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))
    if config.getoption("--tier") != "long":
        others = left_out(items, config.option.hypothesis_seed)
        config.hook.pytest_deselected(items=list(others))
        items[:] = [item for item in items if item not in others]
    for item in items:
        if item.get_closest_marker("long") and config.getoption("--tier") != "long":
            item.add_marker(pytest.mark.skip(reason="runs in the long tier: make test-long"))
        if item.get_closest_marker("gpu") and not NVIDIA_DRIVER.exists():
            item.add_marker(pytest.mark.skip(reason=f"no NVIDIA driver: {NVIDIA_DRIVER} is absent"))


def pytest_collection_finish(session: pytest.Session) -> None:
    repeated = [node_id for node_id, count in Counter(item.nodeid for item in session.items).items() if count > 1]
    if repeated:  # of those only one would run when the suite runs in several processes
        raise pytest.UsageError(f"tests with the same id: {', '.join(repeated)}")
    passing = [item.nodeid for item in session.items if ADDRESS.search(item.nodeid)]
    if passing:  # each process would collect tests of its own
        raise pytest.UsageError(f"tests whose ids hold an address: {', '.join(passing)}")
    freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is None or nextitem.path != item.path:
        freeze()


def freeze() -> None:
    """What has been imported by now stays: no collection of a leak check needs to walk all of torch again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def seed(request: pytest.FixtureRequest) -> int:
    """The run's seed, for random tests that do not use hypothesis."""
    return int(request.config.option.hypothesis_seed)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Tests marked `anyio` run on asyncio, the loop the server uses."""
    return "asyncio"


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """A private run directory whose path leaves room for a socket's name (107 bytes in all)."""
    path = Path(tempfile.mkdtemp(prefix="kvp-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """Fail a passing test that leaves a descriptor, a memfd mapping or a child behind.

    Name it first among a test's fixtures: those set up after it are torn down before it looks.
    """
    with leak_guard():
        yield
