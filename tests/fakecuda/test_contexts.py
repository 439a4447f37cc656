"""The current context belongs to a thread; what needs one answers 201 without it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fakecuda.driver_process import DriverProcess
from support.fakecuda import FakeDevices

GRAIN = 65536
INVALID_VALUE, NOT_INITIALIZED, INVALID_CONTEXT, ILLEGAL_ADDRESS, DESTROYED = 1, 3, 201, 700, 709
READ = 1


@pytest.fixture
def devices(no_leaks: None) -> Iterator[FakeDevices]:
    with FakeDevices(2, granularity_bytes=GRAIN) as devices:
        yield devices


@pytest.fixture
def driver(devices: FakeDevices) -> Iterator[DriverProcess]:
    with DriverProcess(devices) as driver:
        yield driver


def retain(driver: DriverProcess, device: int = 0) -> int:
    return int(driver.ok("out", "cuDevicePrimaryCtxRetain", device))


def test_nothing_works_before_init(devices: FakeDevices) -> None:
    with DriverProcess(devices, init=False) as driver:
        assert driver.code("out", "cuDeviceGetCount") == NOT_INITIALIZED
        assert driver.code("create", GRAIN) == NOT_INITIALIZED
        assert driver.code("call", "cuInit", 1) == INVALID_VALUE
        driver.ok("call", "cuInit", 0)
        driver.ok("create", GRAIN)


def test_nothing_works_in_a_forked_child(driver: DriverProcess) -> None:
    assert driver.code("in_forked_child", "cuDeviceGetCount") == NOT_INITIALIZED
    assert driver.code("out", "cuDeviceGetCount") == 0


def needing_a_context(driver: DriverProcess, pointer: int, thread: str = "") -> dict[str, int]:
    calls: list[tuple[object, ...]] = [
        ("out", "cuMemAlloc_v2", GRAIN),
        ("call", "cuMemFree_v2", pointer),
        ("ipc_handle", pointer),
        ("ipc_open", "00" * 64),
        ("call", "cuIpcCloseMemHandle", pointer),
        ("call", "cuMemsetD8_v2", pointer, 0, GRAIN),
        ("to_device", pointer, "00"),
        ("to_host", pointer, 1),
        ("out2", "cuMemGetInfo_v2"),
        ("out2", "cuMemGetAddressRange_v2", pointer),
        ("out", "cuCtxGetDevice"),
        ("call", "cuCtxSynchronize"),
        ("out", "cuStreamCreate", 0),
        ("call", "cuStreamSynchronize", 0),
    ]
    return {str(call[:2]): driver.code(str(call[0]), *call[1:], thread=thread) for call in calls}


def test_virtual_memory_needs_no_context_and_the_rest_does(driver: DriverProcess) -> None:
    pointer = driver.mapped(GRAIN, driver.ok("create", GRAIN))
    assert set(needing_a_context(driver, pointer).values()) == {INVALID_CONTEXT}
    driver.ok("call", "cuCtxSetCurrent", retain(driver))
    assert INVALID_CONTEXT not in needing_a_context(driver, pointer).values()


def test_a_context_is_current_in_one_thread_only(driver: DriverProcess) -> None:
    context = retain(driver)
    driver.ok("call", "cuCtxSetCurrent", context)
    assert driver.ok("out", "cuCtxGetCurrent") == context
    assert driver.ok("out", "cuCtxGetCurrent", thread="other") == 0
    assert driver.code("call", "cuCtxSynchronize", thread="other") == INVALID_CONTEXT
    driver.ok("call", "cuCtxSetCurrent", retain(driver, 1), thread="other")
    assert driver.ok("out", "cuCtxGetDevice", thread="other") == 1
    assert driver.ok("out", "cuCtxGetDevice") == 0


def test_contexts_are_stacked(driver: DriverProcess) -> None:
    first, second = retain(driver, 0), retain(driver, 1)
    driver.ok("call", "cuCtxPushCurrent_v2", first)
    driver.ok("call", "cuCtxPushCurrent_v2", second)
    assert driver.ok("out", "cuCtxPopCurrent_v2") == second
    assert driver.ok("out", "cuCtxGetCurrent") == first
    driver.ok("call", "cuCtxSetCurrent", second)  # in place of the first
    assert driver.ok("out", "cuCtxPopCurrent_v2") == second
    assert driver.code("out", "cuCtxPopCurrent_v2") == INVALID_CONTEXT
    driver.ok("call", "cuCtxSetCurrent", first)
    driver.ok("call", "cuCtxSetCurrent", 0)
    assert driver.ok("out", "cuCtxGetCurrent") == 0


def test_a_primary_context_lives_from_the_first_retain_to_the_last_release(driver: DriverProcess) -> None:
    assert driver.ok("context_state", 0) == 0
    assert driver.code("call", "cuDevicePrimaryCtxRelease_v2", 0) == INVALID_CONTEXT
    context = retain(driver)
    assert retain(driver) == context
    driver.ok("call", "cuCtxSetCurrent", context)
    driver.ok("call", "cuDevicePrimaryCtxRelease_v2", 0)
    assert (driver.ok("context_state", 0), driver.ok("live")["contexts"]) == (1, 1)
    driver.ok("out", "cuMemAlloc_v2", GRAIN)
    driver.ok("out", "cuStreamCreate", 0)
    driver.ok("call", "cuDevicePrimaryCtxRelease_v2", 0)
    assert driver.ok("context_state", 0) == 0
    assert driver.code("call", "cuCtxSynchronize") == DESTROYED
    assert driver.code("call", "cuCtxPushCurrent_v2", context) == INVALID_CONTEXT
    assert set(driver.ok("live").values()) == {0}  # its memory and streams are gone with it


def test_copies_and_fills_go_through_mapped_memory(driver: DriverProcess) -> None:
    driver.ok("call", "cuCtxSetCurrent", retain(driver))
    pointer = driver.reserve(3 * GRAIN)
    for start in (0, GRAIN):
        driver.map(pointer + start, GRAIN, driver.ok("create", GRAIN))
    driver.ok("access", pointer, 2 * GRAIN)
    driver.ok("call", "cuMemsetD8_v2", pointer, 0x11, 2 * GRAIN)  # over the seam of two chunks
    driver.ok("to_device", pointer + GRAIN - 1, "2233")
    assert driver.ok("to_host", pointer + GRAIN - 2, 4) == "11223311"
    driver.ok("call", "cuMemcpyDtoD_v2", pointer, pointer + GRAIN - 2, 4)
    assert driver.ok("peek", pointer, 4) == "11223311"
    assert driver.code("call", "cuMemsetD8_v2", pointer + GRAIN, 0, 2 * GRAIN) == INVALID_VALUE  # into the hole
    assert driver.code("to_host", pointer + 2 * GRAIN, 1) == INVALID_VALUE


def test_memory_of_another_device_is_not_the_current_contexts(driver: DriverProcess) -> None:
    driver.ok("call", "cuCtxSetCurrent", retain(driver, 1))
    pointer = driver.mapped(GRAIN, driver.ok("create", GRAIN, 0))
    assert driver.code("call", "cuMemsetD8_v2", pointer, 0, GRAIN) == INVALID_VALUE


def test_a_forbidden_access_ends_the_context_and_not_virtual_memory(driver: DriverProcess) -> None:
    handle = driver.ok("create", GRAIN)
    pointer = driver.mapped(GRAIN, handle, READ)
    driver.ok("call", "cuCtxSetCurrent", retain(driver))
    assert driver.ok("to_host", pointer, 1) == "a5"
    assert driver.code("call", "cuMemsetD8_v2", pointer, 0, 1) == ILLEGAL_ADDRESS
    assert driver.code("to_host", pointer, 1) == ILLEGAL_ADDRESS
    assert set(needing_a_context(driver, pointer).values()) == {ILLEGAL_ADDRESS}
    driver.ok("call", "cuMemUnmap", pointer, GRAIN)


def test_a_stream_is_known_from_its_creation_to_its_end(driver: DriverProcess) -> None:
    driver.ok("call", "cuCtxSetCurrent", retain(driver))
    stream = driver.ok("out", "cuStreamCreate", 0)
    for known in (0, 1, 2, stream):
        driver.ok("call", "cuStreamSynchronize", known)
    pointer = driver.mapped(GRAIN, driver.ok("create", GRAIN))
    driver.ok("call", "cuMemsetD8Async", pointer, 9, GRAIN, stream)
    assert driver.ok("peek", pointer, 1) == "09"
    driver.ok("call", "cuStreamDestroy_v2", stream)
    assert driver.code("call", "cuStreamSynchronize", stream) == 400
    assert driver.code("call", "cuMemsetD8Async", pointer, 9, GRAIN, stream) == 400
