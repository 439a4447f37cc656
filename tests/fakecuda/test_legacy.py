"""Legacy inter-process memory: 64 bytes that open elsewhere while their owner lives and has not freed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fakecuda.driver_process import DriverProcess
from support.fakecuda import FakeDevice, FakeDevices, fake_uuid

GRAIN = 65536
INVALID_VALUE, OUT_OF_MEMORY, INVALID_DEVICE, INVALID_CONTEXT, MAP_FAILED, NO_PEER = 1, 2, 101, 201, 205, 217


@pytest.fixture
def devices(no_leaks: None) -> Iterator[FakeDevices]:
    with FakeDevices(2, granularity_bytes=GRAIN, total_bytes=8 * GRAIN) as devices:
        yield devices


@pytest.fixture
def owner(devices: FakeDevices) -> Iterator[DriverProcess]:
    with DriverProcess(devices, context=True, log=True) as driver:
        yield driver


@pytest.fixture
def importer(devices: FakeDevices) -> Iterator[DriverProcess]:
    with DriverProcess(devices, context=True) as driver:
        yield driver


def used(devices: FakeDevices) -> int:
    return devices.used_bytes(devices.uuids[0])


def test_an_allocation_is_whole_granules_of_usable_garbage(owner: DriverProcess, devices: FakeDevices) -> None:
    pointer = owner.ok("out", "cuMemAlloc_v2", GRAIN + 1)
    assert owner.ok("out2", "cuMemGetAddressRange_v2", pointer + 5) == [pointer, 2 * GRAIN]
    assert (owner.ok("to_host", pointer, 2), used(devices)) == ("a5a5", 2 * GRAIN)
    assert owner.code("out", "cuMemAlloc_v2", 0) == INVALID_VALUE
    assert owner.code("out", "cuMemAlloc_v2", 7 * GRAIN) == OUT_OF_MEMORY
    assert owner.code("call", "cuMemFree_v2", pointer + GRAIN) == INVALID_VALUE
    owner.ok("call", "cuMemFree_v2", pointer)
    assert owner.code("call", "cuMemFree_v2", pointer) == INVALID_VALUE
    assert (used(devices), set(owner.ok("live").values())) == (0, {0, 1})  # 1: the context


def test_both_processes_see_the_same_bytes(owner: DriverProcess, importer: DriverProcess) -> None:
    theirs = owner.ok("out", "cuMemAlloc_v2", 2 * GRAIN)
    owner.ok("to_device", theirs + GRAIN, "01020304")
    ours = importer.ok("ipc_open", owner.ok("ipc_handle", theirs))
    assert importer.ok("to_host", ours + GRAIN, 4) == "01020304"
    importer.ok("to_device", ours, "ff")
    assert owner.ok("peek", theirs, 1) == "ff"


def test_a_handle_names_the_base_of_the_allocation(owner: DriverProcess) -> None:
    pointer = owner.ok("out", "cuMemAlloc_v2", 2 * GRAIN)
    assert owner.ok("ipc_handle", pointer) == owner.ok("ipc_handle", pointer + GRAIN)


def test_memory_of_the_other_kind_has_no_handle(owner: DriverProcess) -> None:
    pointer = owner.mapped(GRAIN, owner.ok("create", GRAIN))
    assert owner.code("ipc_handle", pointer) == INVALID_VALUE
    assert owner.code("call", "cuMemFree_v2", pointer) == INVALID_VALUE
    allocated = owner.ok("out", "cuMemAlloc_v2", GRAIN)
    assert owner.code("call", "cuMemUnmap", allocated, GRAIN) == INVALID_VALUE
    assert owner.code("out", "cuMemRetainAllocationHandle", allocated) == INVALID_VALUE


def test_a_handle_does_not_open_in_its_own_process(owner: DriverProcess) -> None:
    handle = owner.ok("ipc_handle", owner.ok("out", "cuMemAlloc_v2", GRAIN))
    assert owner.code("ipc_open", handle) == INVALID_CONTEXT


def test_opening_again_answers_the_same_address_and_is_counted(owner: DriverProcess, importer: DriverProcess) -> None:
    handle = owner.ok("ipc_handle", owner.ok("out", "cuMemAlloc_v2", GRAIN))
    pointer = importer.ok("ipc_open", handle)
    assert importer.ok("ipc_open", handle) == pointer
    assert importer.ok("live")["opened"] == 2
    assert importer.code("call", "cuMemFree_v2", pointer) == INVALID_VALUE
    assert importer.code("ipc_handle", pointer) == INVALID_VALUE  # not ours to hand on
    importer.ok("call", "cuIpcCloseMemHandle", pointer)
    importer.ok("to_host", pointer, 1)
    importer.ok("call", "cuIpcCloseMemHandle", pointer)
    assert importer.code("to_host", pointer, 1) == INVALID_VALUE
    assert importer.code("call", "cuIpcCloseMemHandle", pointer) == INVALID_VALUE


def test_a_bad_handle_is_refused(owner: DriverProcess, importer: DriverProcess) -> None:
    handle = owner.ok("ipc_handle", owner.ok("out", "cuMemAlloc_v2", GRAIN))
    assert importer.code("ipc_open", "00" * 64) == INVALID_VALUE
    assert importer.code("ipc_open", handle[:-2] + "01") == INVALID_VALUE
    assert importer.code("ipc_open", handle, 0) == INVALID_VALUE
    guessed = handle[:48] + "00" * 8 + handle[64:]  # another allocation of that device
    assert importer.code("ipc_open", guessed) == MAP_FAILED


def test_it_opens_on_its_own_device_only(owner: DriverProcess, devices: FakeDevices) -> None:
    handle = owner.ok("ipc_handle", owner.ok("out", "cuMemAlloc_v2", GRAIN))
    with DriverProcess(devices, visible="1", context=True) as blind:
        assert blind.code("ipc_open", handle) == INVALID_DEVICE
    with DriverProcess(devices, visible="1,0", context=True) as other:
        assert other.code("ipc_open", handle) == NO_PEER


def test_it_is_closed_with_its_own_context_current(owner: DriverProcess, importer: DriverProcess) -> None:
    pointer = importer.ok("ipc_open", owner.ok("ipc_handle", owner.ok("out", "cuMemAlloc_v2", GRAIN)))
    importer.ok("call", "cuCtxPushCurrent_v2", importer.ok("out", "cuDevicePrimaryCtxRetain", 1))
    assert importer.code("call", "cuIpcCloseMemHandle", pointer) == INVALID_VALUE
    importer.ok("out", "cuCtxPopCurrent_v2")
    importer.ok("call", "cuIpcCloseMemHandle", pointer)


def test_a_killed_owner_leaves_the_mapping_and_ends_the_handle(
    owner: DriverProcess, importer: DriverProcess, devices: FakeDevices
) -> None:
    handle = owner.ok("ipc_handle", owner.ok("out", "cuMemAlloc_v2", GRAIN))
    pointer = importer.ok("ipc_open", handle)
    owner.kill()
    importer.ok("to_device", pointer, "77")
    assert (importer.ok("to_host", pointer, 1), used(devices)) == ("77", GRAIN)
    assert importer.code("ipc_open", handle) == MAP_FAILED
    importer.ok("call", "cuIpcCloseMemHandle", pointer)
    assert used(devices) == 0
    assert importer.code("ipc_open", handle) == MAP_FAILED


def test_a_killed_importer_takes_nothing_along(
    owner: DriverProcess, importer: DriverProcess, devices: FakeDevices
) -> None:
    pointer = owner.ok("out", "cuMemAlloc_v2", GRAIN)
    importer.ok("ipc_open", owner.ok("ipc_handle", pointer))
    importer.kill()
    owner.ok("call", "cuMemFree_v2", pointer)
    assert (used(devices), devices.log()[-1].note) == (0, "")


def test_the_log_tells_when_something_was_freed_while_open(
    owner: DriverProcess, importer: DriverProcess, devices: FakeDevices
) -> None:
    pointer = owner.ok("out", "cuMemAlloc_v2", GRAIN)
    handle = owner.ok("ipc_handle", pointer)
    importer.ok("ipc_open", handle)
    owner.ok("call", "cuMemFree_v2", pointer)
    assert devices.log()[-1].note.startswith("undefined: ")
    assert importer.code("ipc_open", handle) == MAP_FAILED


def test_a_handle_is_a_secret_that_no_log_repeats(
    owner: DriverProcess, importer: DriverProcess, devices: FakeDevices
) -> None:
    handle = owner.ok("ipc_handle", owner.ok("out", "cuMemAlloc_v2", GRAIN))
    importer.ok("ipc_open", handle)
    secret = handle[48:64]
    assert secret != "00" * 8
    assert secret not in (devices.folder / "log").read_text()


def test_a_device_can_lack_it(no_leaks: None) -> None:
    device = FakeDevice(uuid=fake_uuid(0), granularity_bytes=GRAIN, ipc=False)
    with FakeDevices([device]) as devices, DriverProcess(devices, context=True) as driver:
        assert driver.code("ipc_handle", driver.ok("out", "cuMemAlloc_v2", GRAIN)) == 801
        assert driver.ok("attribute", 125) == 0
