"""The wall clock jumps while everything that has to do with time is under way. Nothing may depend on it but what is
shown: clocks are set by hand, by a time server, or come up wrong on machines without a battery.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest

from support.api_service import COMMAND, ApiService, kill_process
from support.attacked_service import Bystander, faults_in, losing
from support.checkout import ROOT
from support.eventually import until
from support.http_leases import Lease, Pool, http_client
from support.tally import Tally

_SOURCE = ROOT / "tests" / "shiftedclock" / "shifted_clock.c"
DAY_S, YEAR_S = 86_400, 365 * 86_400
TTL_S = 60.0
JUMPS_S = {
    "a second forwards": 1, "a second backwards": -1, "a day forwards": DAY_S, "a day backwards": -DAY_S,
    "ten years forwards": 10 * YEAR_S, "ten years backwards": -10 * YEAR_S, "to 2225": 199 * YEAR_S,
    "to the last second of 32 bits": int(datetime(2038, 1, 19, 3, 14, tzinfo=UTC).timestamp() - time.time()),
    "to the epoch": 30 - int(time.time()), "before the epoch": -int(time.time()) - YEAR_S,
}  # fmt: skip


@contextmanager
def shifted_clock() -> Iterator[tuple[list[str], Callable[[int], None]]]:
    """What a command begins with so that its wall clock is shifted, and what sets by how many seconds. Skips the test
    where there is no compiler.
    """
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("the shifted clock needs a C compiler, and there is no `cc` on the path")
    with tempfile.TemporaryDirectory(prefix="kvp-") as folder:
        library, file = Path(folder) / "shifted_clock.so", Path(folder) / "shift"
        subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, _SOURCE, "-ldl"], check=True)
        file.write_bytes(bytes(8))
        with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 8) as shared:
            before = ["env", f"LD_PRELOAD={library}", f"SHIFTED_CLOCK_FILE={file}"]
            yield before, lambda shift_s: struct.pack_into("q", shared, 0, shift_s)


def clock_jumps(jumps: dict[str, int], before: list[str], jump: Callable[[int], None]) -> Tally:
    """After each jump all that waits, expires or is repeated goes on as before, also in the next worker."""
    tally = Tally()
    with tempfile.TemporaryDirectory(prefix="kvp-") as folder:
        with ApiService(Path(folder), "--port", "0", "--memory", "64MiB", command=[*before, *COMMAND]) as service:
            with http_client(service) as http:
                scene = _Scene(service, Pool(http))
                for name, shift_s in jumps.items():
                    for what, check in scene.checks().items():
                        with losing(tally, f"{what}, {name}"):
                            scene.renew()
                            check(lambda shift_s=shift_s: jump(shift_s))  # type: ignore[misc]
                            tally.survive(what)
                    jump(0)
            for fault in faults_in(service.log()):
                tally.lose(fault)
    return tally


_Jump = Callable[[], None]


class _Scene:
    def __init__(self, service: ApiService, pool: Pool) -> None:
        self._service, self._pool = service, pool
        self._lease: Lease = pool.lease(ttl_s=TTL_S)
        self._blocks = self._lease.take(2)
        self._left_s = TTL_S
        self._number = 0

    def checks(self) -> dict[str, Callable[[_Jump], None]]:
        return {
            "plans": self._plans,
            "leases that live by time": self._lease_lives,
            "keys of repeated requests": self._same_answer,
            "leases that end by time": self._lease_ends,
            "requests that wait": self._waits,
            "event streams": self._streams,
            "the next worker": self._next_worker,
            "the time in the log": self._shown,
        }

    def _plans(self, jump: _Jump) -> None:
        jump()
        Bystander(self._service).ask()

    def _lease_lives(self, jump: _Jump) -> None:
        self._check_lease()
        jump()
        self._check_lease()
        self.renew()

    def renew(self) -> None:
        renewed = self._lease.post("renew")
        assert renewed.json() == {"expires_in_s": TTL_S}, renewed.text
        self._left_s = TTL_S

    def _check_lease(self) -> None:
        (shown,) = [lease for lease in self._pool.leases() if lease["name"] == "scheduler"]
        assert 0 < shown["expires_in_s"] <= self._left_s, shown
        self._left_s = shown["expires_in_s"]
        assert set(self._blocks) <= set(self._lease.held())

    def _same_answer(self, jump: _Jump) -> None:
        key = self._next_name()
        first = self._lease.batch(key=key, allocate={"0": 1})
        jump()
        again = self._lease.batch(key=key, allocate={"0": 1})
        assert again.json() == first.json(), again.text
        assert self._lease.batch(free={"0": first.json()["ids"]["0"]}).is_success

    def _lease_ends(self, jump: _Jump) -> None:
        name = self._next_name()
        self._pool.lease(name, ttl_s=0.3).take(1)
        jump()
        until(lambda: name not in [lease["name"] for lease in self._pool.leases()])

    def _waits(self, jump: _Jump) -> None:
        lease, other = self._pool.lease(self._next_name(), ttl_s=60), self._pool.lease(self._next_name(), ttl_s=60)
        room = self._pool.blocks()["groups"][0]
        held = other.take(room["available"])
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(lease.batch, allocate={"0": 1}, wait_s=30)
            until(lambda: any(tenant["num_waiting"] for tenant in self._pool.blocks()["tenants"]))
            jump()
            assert other.batch(free={"0": held}).is_success
            assert waiting.result(60).status_code == 200
        for one in (lease, other):
            assert self._pool.http.delete(one.path).is_success

    def _streams(self, jump: _Jump) -> None:
        with self._pool.http.stream("GET", "/v1/events") as response:
            lines = response.iter_lines()
            assert next(lines) == ": kvpage"
            jump()
            name = self._next_name()
            with self._service.client() as client:
                other = client.create_pool({**_SMALL}, name=name)
                assert any(name in line for line in lines)
                client.delete_pool(other.id, wait_s=30)

    def _next_worker(self, jump: _Jump) -> None:
        before = self._service.worker_pid()
        jump()
        kill_process(before)
        until(lambda: self._again_ready(before))
        self._check_lease()

    def _again_ready(self, before: int) -> bool:
        devices = self._pool.http.get("/v1/devices").json()["devices"]
        return devices[0]["worker_pid"] not in (None, before) and self._pool.http.get(self._lease.path).is_success

    def _shown(self, jump: _Jump) -> None:
        """By which one sees that the clock has jumped at all."""
        jump()
        log = self._service.run_directory.path / "worker-host.log"
        kill_process(self._service.worker_pid())
        until(lambda: self._pool.http.get(self._lease.path).is_success)
        last = json.loads(log.read_text().splitlines()[-1])
        shift = struct.unpack("q", Path(self._shift_file()).read_bytes())[0]
        told = datetime.fromisoformat(last["time"]).timestamp() - shift
        assert abs(told - time.time()) < 600, last["time"]

    def _shift_file(self) -> str:
        variables = Path(f"/proc/{self._service.pid}/environ").read_bytes().split(b"\0")
        (found,) = [value for value in variables if value.startswith(b"SHIFTED_CLOCK_FILE=")]
        return os.fsdecode(found.partition(b"=")[2])

    def _next_name(self) -> str:
        self._number += 1
        return f"number {self._number}"


_SMALL = {
    "layers": [
        {"name": "l", "kind": "full_attention", "num_kv_heads": 1, "head_size": 8, "dtype": "float16", "block_size": 16}
    ],
    "strategy": "unify",
    "num_blocks": 2,
}  # fmt: skip
