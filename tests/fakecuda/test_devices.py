"""Which devices a process sees, and what it is told about them and their memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fakecuda.driver_process import DriverProcess
from support.fakecuda import FakeDevice, FakeDevices, fake_uuid

GRAIN = 65536
INVALID_VALUE, NO_DEVICE, INVALID_DEVICE, NOT_SUPPORTED, UNKNOWN = 1, 100, 101, 801, 999
MEMORY_TYPE, DEVICE_ORDINAL, RANGE_SIZE = 2, 9, 12

FIRST, SECOND, INSTANCE = fake_uuid(0), fake_uuid(1), fake_uuid(2, "MIG")
TWIN = SECOND[:-1] + ("0" if SECOND[-1] != "0" else "1")  # differs in the last digit only


@pytest.fixture
def devices(no_leaks: None) -> Iterator[FakeDevices]:
    described = [FakeDevice(uuid=uuid, granularity_bytes=GRAIN) for uuid in (FIRST, SECOND, INSTANCE, TWIN)]
    with FakeDevices(described) as devices:
        yield devices


def seen(devices: FakeDevices, visible: str | None) -> list[str]:
    """UUIDs in the order in which a process counts them."""
    with DriverProcess(devices, init=False, visible=visible) as driver:
        if (code := driver.code("call", "cuInit", 0)) != 0:
            assert code == NO_DEVICE
            return []
        known = {device.uuid_bytes.hex(): device.uuid for device in devices.devices}
        return [known[driver.ok("uuid", number)] for number in range(driver.ok("out", "cuDeviceGetCount"))]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, [FIRST, SECOND, INSTANCE, TWIN]),
        ("1,0", [SECOND, FIRST]),
        (SECOND, [SECOND]),
        (f"{INSTANCE},{FIRST}", [INSTANCE, FIRST]),
        (FIRST[:9], [FIRST]),
        (TWIN[:-1], []),  # could be either
        (SECOND.upper(), [SECOND]),
        (INSTANCE[:8], [INSTANCE]),
        ("", []),
        ("-1", []),
        ("GPU-", []),
        ("0,7,1", [FIRST]),  # ends at what is no device
        ("0,GPU-ffffffff,1", [FIRST]),
        ("0,0", []),
        ("GPU-" + INSTANCE[4:], []),
    ],
)
def test_visible_devices(devices: FakeDevices, visible: str | None, expected: list[str]) -> None:
    assert seen(devices, visible) == expected


def test_a_device_says_that_it_is_none(devices: FakeDevices) -> None:
    with DriverProcess(devices) as driver:
        names = [driver.ok("text", "cuDeviceGetName", number) for number in range(3)]
        assert names == ["kvpage driver double: host memory, no GPU"] * 2 + [names[0] + " MIG 1g"]
        assert driver.ok("text", "cuDeviceGetPCIBusId", 1) == "0000:02:00.0"
        assert driver.ok("out", "cuDeviceTotalMem_v2", 0) == devices.devices[0].total_bytes
        assert driver.ok("granularity") == GRAIN
        assert [driver.ok("attribute", number) for number in (41, 102, 103, 115, 125)] == [1, 1, 1, 0, 1]


def test_what_is_no_device_is_refused(devices: FakeDevices) -> None:
    with DriverProcess(devices) as driver:
        for ordinal in (-1, 4):
            assert driver.code("text", "cuDeviceGetName", ordinal) == INVALID_DEVICE
            assert driver.code("uuid", ordinal) == INVALID_DEVICE
            assert driver.code("attribute", 41, ordinal) == INVALID_DEVICE
            assert driver.code("granularity", ordinal) == INVALID_DEVICE
            assert driver.code("out", "cuDevicePrimaryCtxRetain", ordinal) == INVALID_DEVICE


def test_a_pointer_is_known_while_it_is_mapped(devices: FakeDevices) -> None:
    with DriverProcess(devices) as driver:
        pointer = driver.reserve(2 * GRAIN)
        driver.map(pointer, GRAIN, driver.ok("create", GRAIN, 1))
        inside, hole = pointer + 100, pointer + GRAIN
        assert [driver.ok("pointer_attribute", MEMORY_TYPE, at) for at in (inside, hole)] == [2, 0]
        assert [driver.ok("pointer_attribute", DEVICE_ORDINAL, at) for at in (inside, hole)] == [1, -2]
        assert [driver.ok("pointer_attribute", RANGE_SIZE, at) for at in (inside, hole)] == [GRAIN, 0]
        assert driver.code("pointer_attribute", 999, inside) == NOT_SUPPORTED
        driver.ok("call", "cuMemUnmap", pointer, GRAIN)
        assert driver.ok("pointer_attribute", MEMORY_TYPE, inside) == 0


@pytest.mark.parametrize("line", ["uuid=12 total_bytes=4096\n", "total_gb=1\n", "x\n", "total_bytes=0\n"])
def test_a_description_that_cannot_be_read_is_an_error(devices: FakeDevices, line: str) -> None:
    (devices.folder / "devices").write_text(line)
    with DriverProcess(devices, init=False) as driver:
        assert driver.code("call", "cuInit", 0) == UNKNOWN


def test_a_machine_without_devices(no_leaks: None) -> None:
    with FakeDevices([]) as none, DriverProcess(none, init=False) as driver:
        assert driver.code("call", "cuInit", 0) == NO_DEVICE
