"""Every attack in full, as `make reliability` runs them: name by name, what it came to."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvpage_server.worker_limits import Limits
from support.attacked_service import attacked_service, losing
from support.clock_jumps import JUMPS_S, clock_jumps, shifted_clock
from support.command_line import run
from support.config_fuzz import check_answer, config_file
from support.http_fuzz import fuzzed_http
from support.many_planners import Planning, many_planners
from support.service_on_full_disk import full_disk
from support.slow_peers import HASTY, slow_http_clients, slow_worker_clients
from support.tally import Tally
from support.vanishing_peers import killed_clients, vanishing_clients

NUM_SLOW, NUM_VANISHING, NUM_KILLED = 20, 5, 5
NUM_REQUESTS, NUM_CONFIGS, NUM_SHOWN, NUM_PLANNERS = 2000, 10_000, 20, 1000
_PROCESSES = 2


def all_attacks(seed: int) -> Iterator[tuple[str, Tally]]:
    attacks: dict[str, Callable[[], Tally]] = {
        "slow clients of the server": lambda: slow_http_clients(NUM_SLOW, HASTY, patience_s=300),
        "slow clients of a worker": _slow_at_a_worker,
        "connections that end in every phase of a request": lambda: vanishing_clients(NUM_VANISHING),
        "processes that are stopped, and then killed": lambda: killed_clients(NUM_KILLED),
        "bytes that are almost HTTP": lambda: fuzzed_http(seed, NUM_REQUESTS),
        "jumps of the wall clock": _clock_jumps,
        "a full disk": full_disk,
        "model configs, fuzzed": lambda: fuzzed_configs(seed, NUM_CONFIGS),
        "of these, by command line and over HTTP": lambda: shown_configs(seed, NUM_SHOWN),
    }
    for name, attack in attacks.items():
        tally = Tally()
        with losing(tally, "the attack itself"):
            try:
                tally = attack()
            except pytest.skip.Exception as reason:
                tally.outcomes[f"not tried: {reason}"] += 1
        yield name, tally


def planners() -> Planning:
    return many_planners(NUM_PLANNERS)


def _slow_at_a_worker() -> Tally:
    with tempfile.TemporaryDirectory(prefix="kvp-") as folder:
        return slow_worker_clients(Path(folder), NUM_SLOW, Limits(hello_s=1, stall_s=1, frame_s=1))


def _clock_jumps() -> Tally:
    with shifted_clock() as (before, jump):
        return clock_jumps(JUMPS_S, before, jump)


def fuzzed_configs(seed: int, num: int) -> Tally:
    """In several processes: each config costs the processor."""
    share = -(-num // _PROCESSES)
    with ThreadPoolExecutor(_PROCESSES) as threads:
        tallies = threads.map(lambda start: _child(seed, start, min(num, start + share)), range(0, num, share))
    tally = Tally()
    for one in tallies:
        tally.add(one)
    return tally


def _child(seed: int, start: int, end: int) -> Tally:
    program = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent.parent)!r});"
        f"from support.config_fuzz import main; main({seed}, {start}, {end})"
    )
    said = json.loads(subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=True).stdout)
    tally = Tally(tried=said["tried"], losses=said["losses"])
    tally.outcomes.update(said["outcomes"])
    return tally


def shown_configs(seed: int, num: int) -> Tally:
    """The real command line, and `model` in a request to the server."""
    tally = Tally()
    with attacked_service() as service, tempfile.TemporaryDirectory() as folder, service.client() as client:
        file = Path(folder) / "config.json"
        for number in range(num):
            data = config_file(seed, number)
            file.write_bytes(data)
            with losing(tally, f"seed {seed}, config {number}, by command line"):
                done = run("plan", "--model", str(file), "--memory", "40GiB")
                assert done.returncode in (0, 1, 2), f"status {done.returncode}"
                assert "Traceback" not in done.stderr, done.stderr
                assert done.stdout if done.returncode == 0 else done.stderr, "it says nothing"
                tally.survive("shown" if done.returncode == 0 else "refused in words")
            with losing(tally, f"seed {seed}, config {number}, over HTTP"):
                tally.survive(check_answer(client, data))
    return tally
