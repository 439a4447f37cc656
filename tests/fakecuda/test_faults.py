"""The fault schedule, the log and the counters: what lets a test make any call fail and see what was left behind."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from fakecuda.driver_process import DriverProcess
from support.fakecuda import FakeDevices, library

GRAIN = 65536
OUT_OF_MEMORY = 2


@pytest.fixture
def devices(no_leaks: None) -> Iterator[FakeDevices]:
    with FakeDevices(granularity_bytes=GRAIN) as devices:
        yield devices


def test_the_nth_call_fails_and_does_nothing(devices: FakeDevices) -> None:
    with DriverProcess(devices, faults="cuMemCreate:2:2,cuMemCreate:3:999", log=True) as driver:
        assert [driver.code("create", GRAIN) for _ in range(4)] == [0, OUT_OF_MEMORY, 999, 0]
        assert driver.ok("live")["handles"] == 2
    assert [call.note for call in devices.log() if call.function == "cuMemCreate"][1:3] == ["injected"] * 2


def test_every_call_fails(devices: FakeDevices) -> None:
    with DriverProcess(devices, faults="cuMemRelease:0:700") as driver:
        handle = driver.ok("create", GRAIN)
        assert {driver.code("call", "cuMemRelease", handle) for _ in range(3)} == {700}
        assert driver.ok("live")["handles"] == 1


def test_the_first_of_two_faults_of_a_call_decides(devices: FakeDevices) -> None:
    with DriverProcess(devices, faults="cuMemCreate:1:2,cuMemCreate:0:999") as driver:
        assert [driver.code("create", GRAIN) for _ in range(2)] == [OUT_OF_MEMORY, 999]


def test_a_function_is_named_with_or_without_its_version(devices: FakeDevices) -> None:
    for name in ("cuMemGetInfo", "cuMemGetInfo_v2"):
        with DriverProcess(devices, faults=f"{name}:1:2", context=True) as driver:
            assert [driver.code("out2", "cuMemGetInfo_v2") for _ in range(2)] == [OUT_OF_MEMORY, 0]


def test_a_call_can_kill_its_process_before_it_does_anything(devices: FakeDevices) -> None:
    with DriverProcess(devices, faults="cuMemCreate:2:kill", log=True) as driver:
        driver.ok("create", GRAIN)
        assert driver.dies("create", GRAIN) == -signal.SIGKILL
    assert (devices.log()[-1].function, devices.log()[-1].result) == ("cuMemCreate", "killed")
    assert devices.used_bytes(devices.uuids[0]) == 0


def test_a_delayed_call_waits_and_holds_up_no_other_thread(devices: FakeDevices) -> None:
    with DriverProcess(devices, faults="cuMemCreate:1:delay=3600000", log=True) as driver:
        driver.in_background("create", GRAIN)
        for _ in range(100):
            driver.ok("out", "cuDeviceGetCount")
        assert "cuMemCreate" not in {call.function for call in devices.log()}
        driver.kill()


def test_a_delayed_call_is_done_in_the_end(devices: FakeDevices) -> None:
    with DriverProcess(devices, faults="cuMemCreate:1:delay=20,cuMemCreate:1:2") as driver:
        assert [driver.code("create", GRAIN) for _ in range(2)] == [OUT_OF_MEMORY, 0]


def test_the_schedule_can_change_while_the_process_runs(devices: FakeDevices) -> None:
    with DriverProcess(devices) as driver:
        driver.ok("create", GRAIN)
        driver.ok("faults", "cuMemCreate:1:2")
        assert [driver.code("create", GRAIN) for _ in range(2)] == [OUT_OF_MEMORY, 0]
        driver.ok("faults", "")
        driver.ok("create", GRAIN)


BAD = ["cuMemCreate", "cuMemCreate:1", "cuMemCreat:1:2", "cuMemCreate:x:2", "cuMemCreate:1:0", "cuMemCreate:1:delay=x"]


@pytest.mark.parametrize("schedule", [*BAD, "cuMemCreate:1:die", "cuMemCreate:-1:2", "cuMemCreate:1:1000"])
def test_a_schedule_that_means_nothing_is_refused(devices: FakeDevices, schedule: str) -> None:
    with DriverProcess(devices) as driver:
        driver.ok("faults", "cuMemCreate:0:2")
        assert driver.code("faults", schedule) == 1
        assert driver.code("create", GRAIN) == OUT_OF_MEMORY  # the one before it is still in force


def test_a_bad_schedule_in_the_environment_stops_the_process() -> None:
    command = [sys.executable, "-c", f"import ctypes; ctypes.CDLL({str(library())!r})"]
    done = subprocess.run(command, env={"KVPAGE_FAKECUDA_FAULTS": "cuMemMap:1"}, capture_output=True, text=True)
    assert done.returncode == -signal.SIGABRT
    assert "KVPAGE_FAKECUDA_FAULTS=cuMemMap:1" in done.stderr


def test_the_log_has_one_line_for_each_call_of_any_process(devices: FakeDevices) -> None:
    with DriverProcess(devices, log=True) as one, DriverProcess(devices, log=True) as other:
        handle = one.ok("create", GRAIN)
        assert other.code("create", GRAIN - 1, thread="second") == 1
        calls = devices.log()
    assert [(call.pid, call.function) for call in calls[-2:]] == [(one.pid, "cuMemCreate"), (other.pid, "cuMemCreate")]
    assert calls[-2].arguments == f"size={GRAIN} device=0 types=1"
    assert (calls[-2].result, calls[-2].note) == ("0", f"handle={handle}")
    assert (calls[-1].result, calls[-1].tid == other.pid) == ("1", False)


def test_a_log_that_nobody_writes_is_not_an_empty_one(devices: FakeDevices) -> None:
    with DriverProcess(devices), pytest.raises(AssertionError):
        devices.log()


def test_the_counters_count_each_thing_that_is_held(devices: FakeDevices) -> None:
    with DriverProcess(devices, context=True) as owner, DriverProcess(devices, context=True) as driver:
        handle = driver.ok("create", 2 * GRAIN)
        driver.ok("out", "cuMemRetainAllocationHandle", driver.mapped(2 * GRAIN, handle))
        driver.ok("out", "cuMemAlloc_v2", GRAIN)
        driver.ok("out", "cuStreamCreate", 0)
        driver.ok("ipc_open", owner.ok("ipc_handle", owner.ok("out", "cuMemAlloc_v2", GRAIN)))
        assert driver.ok("live") == {
            "handles": 2,
            "mappings": 1,
            "mapped_bytes": 4 * GRAIN,
            "reservations": 1,
            "reserved_bytes": 2 * GRAIN,
            "allocations": 1,
            "opened": 1,
            "contexts": 1,
            "streams": 1,
        }
