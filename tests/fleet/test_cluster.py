"""A fleet of three nodes on a real Ray cluster, one of which is killed: one cluster for all tests of this file."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from support.eventually import until

TESTS = Path(__file__).parents[1]
MARK = "FLEET_TEST_FOLDER"
TIMEOUT_S = 240
IN_A_NETWORK_OF_ITS_OWN = ["unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]

AGENTS_OF_RAY = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""Whose raylet was killed: they end when Ray notices, which may take longer than a test waits."""

Facts = dict[str, Any]


@pytest.fixture(scope="module")
def facts() -> Iterator[Facts]:
    """What `support.fleet_scenario` saw. Whatever it leaves behind is ended, and then fails the last test."""
    if find_spec("ray") is None:
        pytest.skip("ray is not installed: see the extra `fleet`")
    tried = subprocess.run([*IN_A_NETWORK_OF_ITS_OWN, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"no network namespace can be made here (unshare: {tried.stderr.strip()})")
    folder = Path(tempfile.mkdtemp(prefix="kvf-"))
    try:
        seen = _run(folder)
        with contextlib.suppress(AssertionError):  # agents of Ray end a moment after their raylet
            until(lambda: not _left(folder), 20)
        names = [_name_of(pid) for pid in _left(folder)]
        yield seen | {"left": [name for name in names if not name.startswith(AGENTS_OF_RAY)]}
    finally:
        for pid in _left(folder):
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def _run(folder: Path) -> Facts:
    environment = {name: value for name, value in os.environ.items() if name != "KVPAGE_RUN_DIR"}
    done = subprocess.run(
        [*IN_A_NETWORK_OF_ITS_OWN, sys.executable, "-m", "support.fleet_scenario", str(folder)],
        cwd=TESTS,
        env=environment | {MARK: str(folder), "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr[-8000:]
    seen: Facts = json.loads(done.stdout.splitlines()[-1])
    return seen


def _left(folder: Path) -> list[int]:
    """Processes that were started by the scenario, however indirectly."""
    wanted, found = f"{MARK}={folder}".encode(), []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (process / "environ").read_bytes().split(b"\0"):
                found.append(int(process.name))
        except OSError:  # it has ended, or is another user's
            continue
    return found


def _name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def _ranks(plan: Facts, *fields: str) -> list[tuple[Any, ...]]:
    return [tuple(rank[field] for field in fields) for rank in plan["ranks"]]


def test_up_starts_a_service_on_each_node(facts: Facts) -> None:
    assert facts["up"]["command"]["status"] == 0
    nodes = facts["up"]["command"]["said"]["nodes"]
    assert [(node["name"], node["state"], node["devices"][0]["state"]) for node in nodes] == [
        ("a", "ready", "ready"), ("b", "ready", "ready"), ("c", "ready", "ready"),
    ]  # fmt: skip
    assert len({node["run_dir"] for node in nodes}) == 3


def test_every_rank_has_a_pool_in_the_run_directory_of_its_node(facts: Facts) -> None:
    plan = facts["plan"]["command"]["said"]
    assert plan["state"] == "ready"
    assert _ranks(plan, "rank", "node", "state") == [(0, "a", "ready"), (1, "b", "ready"), (2, "c", "ready")]
    assert {name: list(pools) for name, pools in facts["plan"]["pools"].items()} == {
        rank["node"]: [rank["pool"]] for rank in plan["ranks"]
    }


def test_blocks_are_as_many_as_the_rank_with_the_most_layers_can_hold(facts: Facts) -> None:
    up, plan = facts["up"]["command"]["said"], facts["plan"]["command"]["said"]
    bytes_per_block_of_six_layers = 6 * 2 * 16 * 2 * 64 * 2
    assert plan["num_blocks"] == up["nodes"][1]["devices"][0]["available_bytes"] // bytes_per_block_of_six_layers


def test_the_same_name_and_request_find_the_same_plan_and_another_request_is_refused(facts: Facts) -> None:
    assert facts["plan"]["again"] == facts["plan"]["command"]["said"]["id"]
    assert facts["plan"]["other request"][0] == "conflict"


def test_an_engine_attaches_by_its_rank_and_a_wrong_one_is_told_what_is_wrong(facts: Facts) -> None:
    assert facts["attach"]["by local rank"] == [f"layer.{index}" for index in range(2, 8)]
    assert facts["attach"]["two ranks"][0] == "conflict"
    code, message = facts["attach"]["another node's rank"]
    assert code == "conflict"
    assert "node c" in message


@pytest.mark.parametrize("moment", ["after phase 1", "after phase 2", "after its death"])
def test_nothing_is_kept_anywhere_of_a_plan_that_was_not_committed(facts: Facts, moment: str) -> None:
    assert facts["abort"][moment] == facts["abort"]["before"]


def test_a_plan_that_fails_names_the_node_and_the_reason(facts: Facts) -> None:
    code, message = facts["abort"]["not enough memory"]
    assert code == "not-enough-memory"
    assert message.startswith("node b: ")
    assert facts["abort"]["commit refused"][0] == "not-found"
    assert facts["abort"]["coordinator died"] == ["reserving"]


def test_a_server_that_joins_the_cluster_is_its_head(facts: Facts) -> None:
    assert facts["head"]["nodes"] == ["a ready", "b ready", "c ready"]
    assert facts["head"]["plan"] == "ready"
    assert facts["head"]["plans"] == ["by-http", "mimo"]
    assert facts["head"]["left"] is None
    assert facts["head"]["status"] == -signal.SIGTERM


def test_a_new_allocator_finds_the_pools_of_the_one_that_died(facts: Facts) -> None:
    assert facts["allocator"]["same pools"] is True


def test_a_lost_node_is_reported_and_the_others_are_left_alone(facts: Facts) -> None:
    assert facts["lost"]["command"]["status"] == 0
    said = facts["lost"]["command"]["said"]
    assert [(node["name"], node["state"]) for node in said["nodes"]] == [
        ("a", "ready"), ("b", "ready"), ("c", "lost"),
    ]  # fmt: skip
    [plan] = said["plans"]
    assert (plan["state"], plan["unreachable"]) == ("degraded", ["c"])
    assert _ranks(plan, "rank", "state") == [(0, "ready"), (1, "ready"), (2, "unreachable")]
    assert facts["lost"]["healthy"] is True


def test_a_node_that_returns_is_mended_without_touching_the_others(facts: Facts) -> None:
    assert facts["mended"]["healthy untouched"] is True
    assert facts["mended"]["c made again"] == [True, True]  # under the same name, as other memory
    events = [tuple(event) for event in facts["mended"]["events"]]
    plan = facts["plan"]["command"]["said"]
    whole = f"mimo ({plan['id']})"
    of_c = [event[2:] for event in events if event[:2] == ("node", "c")]
    assert of_c[0][0] == of_c[-1][1] == "ready"
    assert "lost" in [after for _, after in of_c]  # it may have been silent first
    assert ("plan", whole, "ready", "degraded") in events
    assert ("plan", whole, "degraded", "ready") in events
    assert not [event for event in events if event[1] in ("a", "b") or event[1].endswith((" on a", " on b"))]


def test_bytes_on_a_healthy_node_survive_and_the_returned_node_can_be_attached(facts: Facts) -> None:
    assert facts["bytes"]["still 7"] is True
    assert facts["bytes"]["detached"] is False
    assert facts["bytes"]["on the node that returned"] == [facts["plan"]["command"]["said"]["num_blocks"], 0]


def test_a_plan_that_is_held_stays_and_one_that_is_not_goes_everywhere(facts: Facts) -> None:
    held = facts["down"]["held"]
    assert (held["status"], held["said"]["code"]) == (1, "conflict")
    assert "on a" in held["said"]["message"]
    assert facts["down"]["plan"] == {"status": 0, "said": {"left": []}}
    assert facts["down"]["kept"] == {name: [0, 0, []] for name in "abc"}


def test_down_ends_every_process_and_leaves_no_socket(facts: Facts) -> None:
    assert facts["down"]["fleet"] == {"status": 0, "said": {"left": []}}
    assert facts["down"]["sockets"] == []
    assert facts["left"] == []
