"""A device's bytes are counted over all processes, and come back when the last holder of any kind is gone."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from fakecuda.driver_process import DriverProcess
from support.eventually import until
from support.fakecuda import FakeDevices

GRAIN = 65536
OUT_OF_MEMORY = 2


@pytest.fixture
def devices(no_leaks: None) -> Iterator[FakeDevices]:
    with FakeDevices(2, granularity_bytes=GRAIN, total_bytes=4 * GRAIN) as devices:
        yield devices


def used(devices: FakeDevices, device: int = 0) -> int:
    return devices.used_bytes(devices.uuids[device])


def test_all_processes_share_one_budget(devices: FakeDevices) -> None:
    with DriverProcess(devices) as one, DriverProcess(devices) as other:
        handle = one.ok("create", 3 * GRAIN)
        assert other.code("create", 2 * GRAIN) == OUT_OF_MEMORY
        other.ok("create", GRAIN)
        assert (used(devices), one.code("create", GRAIN)) == (4 * GRAIN, OUT_OF_MEMORY)
        one.ok("call", "cuMemRelease", handle)
        other.ok("create", 3 * GRAIN)


def test_each_device_has_its_own(devices: FakeDevices) -> None:
    with DriverProcess(devices, visible="1,0") as driver:
        driver.ok("create", 4 * GRAIN, 0)
        assert (used(devices, 0), used(devices, 1)) == (0, 4 * GRAIN)
        driver.ok("create", GRAIN, 1)


def test_more_than_a_device_has_is_refused(devices: FakeDevices) -> None:
    with DriverProcess(devices) as driver:
        assert driver.code("create", 5 * GRAIN) == OUT_OF_MEMORY
        assert driver.code("create", (1 << 64) - GRAIN) == OUT_OF_MEMORY


def test_the_driver_reports_what_is_free(devices: FakeDevices) -> None:
    with DriverProcess(devices) as owner, DriverProcess(devices, context=True) as other:
        assert other.ok("out2", "cuMemGetInfo_v2") == [4 * GRAIN, 4 * GRAIN]
        owner.ok("create", 3 * GRAIN)
        assert other.ok("out2", "cuMemGetInfo_v2") == [GRAIN, 4 * GRAIN]


def test_a_killed_process_gives_back_what_only_it_had(devices: FakeDevices) -> None:
    with DriverProcess(devices) as driver:
        driver.ok("create", GRAIN)
        mapped = driver.ok("create", GRAIN)
        driver.mapped(GRAIN, mapped)
        assert used(devices) == 2 * GRAIN
        driver.kill()
        assert used(devices) == 0


def test_an_importer_keeps_the_bytes_of_a_killed_owner(devices: FakeDevices) -> None:
    with DriverProcess(devices) as owner, DriverProcess(devices) as importer:
        handle = owner.ok("create", 4 * GRAIN)
        owner.ok("poke", owner.mapped(4 * GRAIN, handle), "beef")
        fd = owner.export(handle)
        imported = importer.ok("import_", fds=[fd])
        os.close(fd)
        pointer = importer.mapped(4 * GRAIN, imported)
        importer.ok("call", "cuMemRelease", imported)
        owner.kill()
        assert (importer.ok("peek", pointer, 2), used(devices)) == ("beef", 4 * GRAIN)
        assert importer.code("create", GRAIN) == OUT_OF_MEMORY
        importer.ok("call", "cuMemUnmap", pointer, 4 * GRAIN)
        importer.ok("create", GRAIN)


def test_a_descriptor_holds_the_bytes_in_a_process_without_the_driver(devices: FakeDevices) -> None:
    with DriverProcess(devices) as owner:
        fd = owner.export(owner.ok("create", GRAIN))
        owner.kill()
        assert used(devices) == GRAIN
        with DriverProcess(devices) as successor:  # from this process, which never loaded the driver
            pointer = successor.mapped(GRAIN, successor.ok("import_", fds=[fd]))
            assert successor.ok("peek", pointer, 1) == "a5"
        assert used(devices) == GRAIN
        os.close(fd)
        assert used(devices) == 0


def test_a_descriptor_in_an_unread_message_holds_the_bytes_and_a_lost_one_does_not(devices: FakeDevices) -> None:
    with DriverProcess(devices) as owner:
        fd = owner.export(owner.ok("create", GRAIN))
        owner.kill()
    sender, receiver = socket.socketpair()
    with receiver, sender:
        socket.send_fds(sender, [b"x"], [fd])
        os.close(fd)
        assert used(devices) == GRAIN
    assert used(devices) == 0


def test_counting_removes_the_files_of_what_is_free(devices: FakeDevices) -> None:
    with DriverProcess(devices) as driver:
        driver.ok("create", 4 * GRAIN)
        driver.kill()
    assert len(list(devices.folder.iterdir())) == 3  # devices, ledger and one chunk nobody holds
    with DriverProcess(devices) as driver:
        driver.ok("create", 4 * GRAIN)
        assert len(list(devices.folder.iterdir())) == 3


def waits_for_a_lock(pid: int) -> bool:
    """Whether the kernel lists the process as one that another's lock holds up."""
    return any(f" {pid} " in line for line in Path("/proc/locks").read_text().splitlines() if "->" in line)


def test_a_process_counts_only_while_no_other_does(devices: FakeDevices) -> None:
    with DriverProcess(devices) as one, DriverProcess(devices) as other:
        with (devices.folder / "ledger").open("a") as ledger:
            fcntl.flock(ledger, fcntl.LOCK_EX)
            for driver in (one, other):
                driver.start("create", 3 * GRAIN)
                until(partial(waits_for_a_lock, driver.pid))
        assert sorted([one.finish(), other.finish()]) == [0, OUT_OF_MEMORY]
