"""Virtual memory management: each rule of the driver that a caller could break is an error here too."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakecuda.driver_process import DriverProcess
from support.fakecuda import FakeDevice, FakeDevices, fake_uuid

GRAIN = 65536
INVALID_VALUE, OUT_OF_MEMORY, INVALID_DEVICE, NOT_SUPPORTED = 1, 2, 101, 801
READ, READ_WRITE = 1, 3


@pytest.fixture
def devices(no_leaks: None) -> Iterator[FakeDevices]:
    with FakeDevices(granularity_bytes=GRAIN, total_bytes=16 * GRAIN) as devices:
        yield devices


@pytest.fixture
def driver(devices: FakeDevices) -> Iterator[DriverProcess]:
    with DriverProcess(devices) as driver:
        yield driver


def test_two_mappings_of_a_chunk_are_the_same_bytes(driver: DriverProcess) -> None:
    handle = driver.ok("create", 2 * GRAIN)
    first, second = driver.mapped(2 * GRAIN, handle), driver.mapped(2 * GRAIN, handle)
    driver.ok("poke", first + GRAIN, "c0ffee")
    assert driver.ok("peek", second + GRAIN, 3) == "c0ffee"


def test_a_mapping_keeps_the_bytes_after_its_handle_is_released(driver: DriverProcess, devices: FakeDevices) -> None:
    handle = driver.ok("create", GRAIN)
    pointer = driver.mapped(GRAIN, handle)
    driver.ok("call", "cuMemRelease", handle)
    driver.ok("poke", pointer, "01")
    assert devices.used_bytes(devices.uuids[0]) == GRAIN
    driver.ok("call", "cuMemUnmap", pointer, GRAIN)
    assert devices.used_bytes(devices.uuids[0]) == 0


def test_fresh_memory_holds_what_somebody_left(driver: DriverProcess) -> None:
    pointer = driver.mapped(GRAIN, driver.ok("create", GRAIN))
    assert driver.ok("peek", pointer, 4) == driver.ok("peek", pointer + GRAIN - 4, 4) == "a5" * 4


@pytest.mark.parametrize(("fill", "found"), [("none", "00"), ("0x17", "17")])
def test_a_test_can_choose_what_fresh_memory_holds(devices: FakeDevices, fill: str, found: str) -> None:
    with DriverProcess(devices, fill=fill) as driver:
        pointer = driver.mapped(GRAIN, driver.ok("create", GRAIN))
        assert driver.ok("peek", pointer + GRAIN - 1, 1) == found


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ((0,), INVALID_VALUE),
        ((GRAIN - 4096,), INVALID_VALUE),
        ((GRAIN, 1), INVALID_DEVICE),
        ((GRAIN, -1), INVALID_DEVICE),
        ((GRAIN, 0, 8), NOT_SUPPORTED),  # a fabric handle
        ((GRAIN, 0, 1, 1), INVALID_VALUE),  # flags
    ],
)
def test_create_refuses(driver: DriverProcess, arguments: tuple[int, ...], code: int) -> None:
    assert driver.code("create", *arguments) == code
    assert driver.ok("live")["handles"] == 0


def test_a_handle_is_released_once(driver: DriverProcess) -> None:
    handle = driver.ok("create", GRAIN)
    driver.ok("call", "cuMemRelease", handle)
    assert driver.code("call", "cuMemRelease", handle) == INVALID_VALUE
    assert driver.ok("create", GRAIN) != handle


@pytest.mark.parametrize("size", [0, GRAIN + 4096])
def test_a_reservation_is_whole_granules(driver: DriverProcess, size: int) -> None:
    assert driver.code("out", "cuMemAddressReserve", size, 0, 0, 0) == INVALID_VALUE


def test_a_reservation_is_aligned_as_asked(driver: DriverProcess) -> None:
    for _ in range(3):
        assert driver.reserve(GRAIN) % GRAIN == 0
    assert driver.ok("out", "cuMemAddressReserve", GRAIN, 8 << 20, 0, 0) % (8 << 20) == 0
    assert driver.code("out", "cuMemAddressReserve", GRAIN, 3 * GRAIN, 0, 0) == INVALID_VALUE


@pytest.mark.parametrize(
    ("base", "size", "offset"),
    [
        (4096, GRAIN, 0),  # not aligned
        (0, GRAIN + 4096, 0),
        (0, GRAIN, GRAIN),  # an offset, which the driver reserves for later
        (0, 3 * GRAIN, 0),  # more than the chunk has
        (3 * GRAIN, 2 * GRAIN, 0),  # beyond the reservation
        (-GRAIN, GRAIN, 0),
        (0, 0, 0),
    ],
)
def test_map_refuses(driver: DriverProcess, base: int, size: int, offset: int) -> None:
    pointer, handle = driver.reserve(4 * GRAIN), driver.ok("create", 2 * GRAIN)
    assert driver.code("call", "cuMemMap", pointer + base, size, offset, handle, 0) == INVALID_VALUE
    assert driver.ok("live")["mappings"] == 0


def test_map_refuses_what_is_mapped_and_what_is_no_handle(driver: DriverProcess) -> None:
    pointer, handle = driver.reserve(4 * GRAIN), driver.ok("create", 2 * GRAIN)
    driver.map(pointer, 2 * GRAIN, handle)
    assert driver.code("call", "cuMemMap", pointer + GRAIN, 2 * GRAIN, 0, handle, 0) == INVALID_VALUE
    assert driver.code("call", "cuMemMap", pointer + 2 * GRAIN, GRAIN, 0, handle + 1, 0) == INVALID_VALUE
    assert driver.code("call", "cuMemMap", pointer + 2 * GRAIN, GRAIN, 0, 0, 0) == INVALID_VALUE


@pytest.mark.parametrize(("base", "size"), [(0, GRAIN), (GRAIN, GRAIN), (0, 3 * GRAIN), (0, 4 * GRAIN)])
def test_only_exactly_one_mapping_is_unmapped(driver: DriverProcess, base: int, size: int) -> None:
    pointer = driver.reserve(4 * GRAIN)
    for start in (0, 2 * GRAIN):
        driver.map(pointer + start, 2 * GRAIN, driver.ok("create", 2 * GRAIN))
    assert driver.code("call", "cuMemUnmap", pointer + base, size) == INVALID_VALUE
    driver.ok("call", "cuMemUnmap", pointer, 2 * GRAIN)
    assert driver.code("call", "cuMemUnmap", pointer, 2 * GRAIN) == INVALID_VALUE


def test_an_address_is_freed_exactly_and_only_when_nothing_is_mapped(driver: DriverProcess) -> None:
    pointer = driver.reserve(2 * GRAIN)
    driver.map(pointer + GRAIN, GRAIN, driver.ok("create", GRAIN))
    assert driver.code("call", "cuMemAddressFree", pointer, 2 * GRAIN) == INVALID_VALUE
    driver.ok("call", "cuMemUnmap", pointer + GRAIN, GRAIN)
    assert driver.code("call", "cuMemAddressFree", pointer, GRAIN) == INVALID_VALUE
    assert driver.code("call", "cuMemAddressFree", pointer + GRAIN, GRAIN) == INVALID_VALUE
    driver.ok("call", "cuMemAddressFree", pointer, 2 * GRAIN)
    assert driver.code("call", "cuMemAddressFree", pointer, 2 * GRAIN) == INVALID_VALUE


@pytest.mark.parametrize("state", ["reserved", "mapped", "unmapped"])
def test_memory_without_access_cannot_be_read(driver: DriverProcess, state: str) -> None:
    pointer = driver.reserve(GRAIN)
    if state != "reserved":
        driver.map(pointer, GRAIN, driver.ok("create", GRAIN))
    if state == "unmapped":
        driver.ok("access", pointer, GRAIN)
        driver.ok("peek", pointer, 1)
        driver.ok("call", "cuMemUnmap", pointer, GRAIN)
    assert driver.dies("peek", pointer, 1) == -signal.SIGSEGV


def test_read_access_reads_and_does_not_write(driver: DriverProcess) -> None:
    handle = driver.ok("create", GRAIN)
    readable, writable = driver.mapped(GRAIN, handle, READ), driver.mapped(GRAIN, handle, READ_WRITE)
    driver.ok("poke", writable, "77")
    assert driver.ok("peek", readable, 1) == "77"
    assert driver.dies("poke", readable, "78") == -signal.SIGSEGV


def test_access_is_set_on_whole_mappings(driver: DriverProcess) -> None:
    pointer = driver.reserve(6 * GRAIN)
    for start in (0, 2 * GRAIN):
        driver.map(pointer + start, 2 * GRAIN, driver.ok("create", 2 * GRAIN))
    for base, size in [(0, GRAIN), (GRAIN, GRAIN), (0, 3 * GRAIN), (0, 6 * GRAIN), (4 * GRAIN, GRAIN), (0, 0)]:
        assert driver.code("access", pointer + base, size) == INVALID_VALUE, (base, size)
    assert driver.code("access", pointer, 2 * GRAIN, 2) == INVALID_VALUE  # write without read
    driver.ok("access", pointer, 4 * GRAIN)
    driver.ok("poke", pointer + 2 * GRAIN - 2, "00010203")


def test_access_is_for_the_memorys_own_device(no_leaks: None) -> None:
    with FakeDevices(2, granularity_bytes=GRAIN) as devices, DriverProcess(devices) as driver:
        pointer = driver.reserve(GRAIN)
        driver.map(pointer, GRAIN, driver.ok("create", GRAIN, 1))
        assert driver.code("access", pointer, GRAIN, READ_WRITE, 0) == INVALID_VALUE
        assert driver.code("access", pointer, GRAIN, READ_WRITE, 2) == INVALID_DEVICE
        driver.ok("access", pointer, GRAIN, READ_WRITE, 1)


def test_what_was_not_made_for_it_is_not_exported(driver: DriverProcess) -> None:
    private = driver.ok("create", GRAIN, 0, 0)
    assert driver.code("export", private) == INVALID_VALUE
    assert driver.code("export", private + 1) == INVALID_VALUE
    assert driver.code("export", driver.ok("create", GRAIN), 8) == NOT_SUPPORTED


def test_an_import_says_which_device_it_is_of(no_leaks: None) -> None:
    with FakeDevices(2, granularity_bytes=GRAIN) as devices:
        with DriverProcess(devices) as owner, DriverProcess(devices, visible="1,0") as other:
            fd = owner.export(owner.ok("create", GRAIN, 1))
            assert other.ok("device_of", other.ok("import_", fds=[fd])) == 0
            with DriverProcess(devices, visible="0") as blind:
                assert blind.code("import_", fds=[fd]) == INVALID_DEVICE
            os.close(fd)


def test_a_descriptor_of_something_else_is_not_imported(driver: DriverProcess, tmp_path: Path) -> None:
    fd = os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT)
    os.truncate(fd, GRAIN)
    assert driver.code("import_", fds=[fd]) == INVALID_VALUE
    os.close(fd)
    with FakeDevices(granularity_bytes=GRAIN) as elsewhere, DriverProcess(elsewhere) as stranger:
        fd = stranger.export(stranger.ok("create", GRAIN))
        assert driver.code("import_", fds=[fd]) == INVALID_VALUE
        os.close(fd)


def test_an_import_keeps_no_descriptor_of_the_caller(driver: DriverProcess) -> None:
    before = driver.ok("open_fds")
    fd = driver.export(driver.ok("create", GRAIN))
    imported = driver.ok("import_", fds=[fd])
    os.close(fd)
    pointer = driver.mapped(GRAIN, imported)
    driver.ok("call", "cuMemRelease", imported)
    assert driver.ok("open_fds") == before + 1  # the created handle; a mapping has none
    driver.ok("poke", pointer, "11")


def test_a_handle_is_found_again_by_its_address(driver: DriverProcess, devices: FakeDevices) -> None:
    handle = driver.ok("create", GRAIN)
    pointer = driver.mapped(GRAIN, handle)
    assert driver.ok("out", "cuMemRetainAllocationHandle", pointer + 5) == handle
    driver.ok("call", "cuMemRelease", handle)
    driver.ok("call", "cuMemRelease", handle)
    assert driver.ok("out", "cuMemRetainAllocationHandle", pointer) == handle  # from the mapping alone
    driver.ok("call", "cuMemUnmap", pointer, GRAIN)
    assert devices.used_bytes(devices.uuids[0]) == GRAIN
    driver.ok("call", "cuMemRelease", handle)
    assert devices.used_bytes(devices.uuids[0]) == 0
    assert driver.code("out", "cuMemRetainAllocationHandle", pointer) == INVALID_VALUE


@pytest.mark.parametrize(("vmm", "posix_fd", "exported", "private"), [(False, True, 801, 801), (True, False, 801, 0)])
def test_a_device_can_lack_what_a_probe_asks_for(
    no_leaks: None, vmm: bool, posix_fd: bool, exported: int, private: int
) -> None:
    device = FakeDevice(uuid=fake_uuid(0), granularity_bytes=GRAIN, vmm=vmm, posix_fd=posix_fd)
    with FakeDevices([device]) as devices, DriverProcess(devices) as driver:
        assert [driver.ok("attribute", number) for number in (102, 103)] == [vmm, posix_fd]
        assert driver.code("granularity") == exported
        assert (driver.code("create", GRAIN), driver.code("create", GRAIN, 0, 0)) == (exported, private)


def test_a_thousand_rounds_leave_nothing(driver: DriverProcess, devices: FakeDevices) -> None:
    before = driver.ok("open_fds")
    for _ in range(1000):
        handle = driver.ok("create", GRAIN)
        pointer = driver.mapped(GRAIN, handle)
        driver.ok("call", "cuMemRelease", handle)
        driver.ok("call", "cuMemUnmap", pointer, GRAIN)
        driver.ok("call", "cuMemAddressFree", pointer, GRAIN)
    assert set(driver.ok("live").values()) == {0}
    assert (driver.ok("open_fds"), devices.used_bytes(devices.uuids[0])) == (before, 0)
