"""Memory of NVIDIA devices, on the driver double: the contract of both kinds, and what is particular to each."""

from __future__ import annotations

import errno
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from kvpage.errors import (
    DeviceUnavailable,
    InternalError,
    KvpageError,
    NotEnoughMemory,
    NotFound,
    NotSupported,
    ProtocolError,
    SpecInvalid,
    StaleHandle,
)
from kvpage.memory import cuda_child, cuda_descriptor, cuda_maker
from kvpage.memory.base import Mapping, MemoryKind
from kvpage.memory.cuda import CudaIpcMemory, CudaVmmMemory, probe
from kvpage.memory.cuda_device import CONTEXTS, CudaDevice, find_device
from kvpage.memory.cuda_driver import CudaDriver
from kvpage.memory.device_names import same_device
from support.eventually import until
from support.fakecuda import FakeDevice, FakeDevices, fake_uuid, live, set_faults
from support.fakecuda_here import GRANULARITY_BYTES, devices_here, wrap_double
from support.memory_contract import SIZE_BYTES, MemoryContract, imported, run_program


@pytest.fixture
def devices(no_leaks: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevices]:
    """The devices of this process, and of every process a test starts. Nothing may be left on them."""
    devices = devices_here()
    for name, value in devices.env().items():
        monkeypatch.setenv(name, value)
    before = live()
    yield devices
    set_faults("")
    for child in cuda_maker.HOLDERS:
        child.wait(60)
    before["contexts"] = live()["contexts"]  # retained once and kept
    until(lambda: live() == before)  # views that died with the test are unmapped by a thread
    assert [devices.used_bytes(uuid) for uuid in devices.uuids] == [0, 0]


class _OnTheDouble(MemoryContract):
    num_cycles = 8  # each starts a process; the long tier has more

    def bytes_of(self, mapping: Mapping) -> torch.Tensor:
        return wrap_double(mapping)


class TestCudaVmm(_OnTheDouble):
    wrong_sizes = (GRANULARITY_BYTES + 1,)

    @pytest.fixture
    def memory(self, devices: FakeDevices) -> MemoryKind:
        return CudaVmmMemory(devices.uuids[0])


class TestCudaIpc(_OnTheDouble):
    wrong_sizes = ((2 << 20) + 1,)

    @pytest.fixture
    def memory(self, devices: FakeDevices) -> MemoryKind:
        return CudaIpcMemory(devices.uuids[1])


@contextmanager
def dirty_memory() -> Iterator[tuple[CudaDriver, CudaDevice, int]]:
    """Memory as the driver gives it, and its address."""
    driver = CudaDriver()
    device = find_device(driver, "cuda:0")
    with CONTEXTS.current(driver, device):
        address = driver.allocate(SIZE_BYTES, device.uuid)
        yield driver, device, address
        driver.free(address)


@pytest.fixture
def vmm(devices: FakeDevices) -> CudaVmmMemory:
    return CudaVmmMemory(devices.uuids[0])


@pytest.fixture
def ipc(devices: FakeDevices) -> CudaIpcMemory:
    return CudaIpcMemory(devices.uuids[0])


@pytest.mark.long
@pytest.mark.parametrize("kind", [CudaVmmMemory, CudaIpcMemory])
def test_a_thousand_cycles_leave_nothing_behind(
    kind: type[CudaVmmMemory], devices: FakeDevices, no_leaks: None
) -> None:
    memory = kind(devices.uuids[0])
    for _ in range(1000):
        with memory.create(SIZE_BYTES) as chunk, imported(memory, chunk) as again:
            again.map().close()


# --- finding out -----------------------------------------------------------------------------------------------------


def test_probing_tells_what_the_device_is(devices: FakeDevices) -> None:
    facts = probe(devices.uuids[1])
    assert facts == probe("cuda:1")
    assert (facts.uuid, facts.number) == (devices.uuids[1], 1)
    assert "driver double" in facts.name
    assert (facts.total_bytes, facts.granularity_bytes) == (64 << 20, GRANULARITY_BYTES)
    assert 0 < facts.free_bytes <= facts.total_bytes
    assert facts.unsupported == {}


@pytest.mark.parametrize(("lacking", "kind"), [("vmm", "cuda_vmm"), ("posix_fd", "cuda_vmm"), ("ipc", "cuda_ipc")])
def test_what_a_device_cannot_do_is_found_by_doing_it(
    lacking: str, kind: str, monkeypatch: pytest.MonkeyPatch, no_leaks: None
) -> None:
    with FakeDevices([FakeDevice(uuid=fake_uuid(7), **{lacking: False})]) as poor:
        for name, value in poor.env().items():
            monkeypatch.setenv(name, value)
        assert list(probe("cuda:0").unsupported) == [kind]
        if kind == "cuda_vmm":
            with pytest.raises(NotSupported, match="cuda_ipc"):
                CudaVmmMemory(fake_uuid(7)).create(SIZE_BYTES)


def test_memory_that_one_side_wrote_and_the_other_did_not_see_is_noticed(devices: FakeDevices) -> None:
    """What the driver claims is not believed: here nothing has been written."""
    with dirty_memory() as (driver, device, address), pytest.raises(DeviceUnavailable, match="did not see"):
        cuda_child.check_nonce(driver, address, device)


def test_a_device_that_does_not_exist_is_told_with_those_that_do(devices: FakeDevices) -> None:
    for wanted in ("cuda:2", fake_uuid(9)):
        with pytest.raises(NotFound) as caught:
            probe(wanted)
        assert caught.value.details["visible"] == devices.uuids
        assert devices.uuids[0] in str(caught.value)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("GPU-{}", "{}", True),
        ("GPU-{}", "MIG-{}", True),
        ("gpu-{}", "GPU-{}", True),
        ("GPU-{}", "GPU-{}0", False),
        ("cuda:0", "cuda:0", False),
    ],
)
def test_a_uuid_is_the_same_however_it_is_written(one: str, other: str, same: bool) -> None:
    digits = fake_uuid(0).removeprefix("GPU-")
    assert same_device(one.format(digits), other.format(digits.upper())) is same


# --- making ----------------------------------------------------------------------------------------------------------


def test_fresh_memory_is_dirty_without_being_cleared(devices: FakeDevices) -> None:
    """The other half of the contract's first test, which cannot fail otherwise."""
    with dirty_memory() as (driver, _, address):
        assert all(driver.read(address, SIZE_BYTES))


def test_more_than_is_free_is_refused_with_both_numbers(vmm: CudaVmmMemory, ipc: CudaIpcMemory) -> None:
    for memory in (vmm, ipc):
        with memory.create(40 << 20), pytest.raises(NotEnoughMemory) as caught:
            memory.create(40 << 20)
        assert caught.value.details["needed_bytes"] == 40 << 20
        assert caught.value.details["available_bytes"] <= 24 << 20
        assert fake_uuid(0) in str(caught.value)
        for child in cuda_maker.HOLDERS:
            child.wait(60)


MAKING = {
    "vmm": ("cuInit", "cuDeviceGetCount", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent", "cuMemGetInfo",
            "cuMemCreate", "cuMemExportToShareableHandle", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess",
            "cuMemsetD8", "cuCtxSynchronize", "cuMemUnmap", "cuMemAddressFree", "cuMemRelease"),
    "ipc": ("cuInit", "cuDevicePrimaryCtxRetain", "cuMemGetInfo", "cuMemAlloc", "cuMemsetD8", "cuCtxSynchronize",
            "cuIpcGetMemHandle"),
}  # fmt: skip


@pytest.mark.sampled(8)
@pytest.mark.parametrize("action", ["999", "kill"])
@pytest.mark.parametrize(("task", "function"), [(task, name) for task, names in MAKING.items() for name in names])
def test_whichever_call_fails_while_memory_is_made_nothing_is_left(
    task: str, function: str, action: str, devices: FakeDevices, monkeypatch: pytest.MonkeyPatch, no_leaks: None
) -> None:
    monkeypatch.setenv("KVPAGE_FAKECUDA_FAULTS", f"{function}:1:{action}")
    memory = CudaVmmMemory(devices.uuids[0]) if task == "vmm" else CudaIpcMemory(devices.uuids[0])
    with pytest.raises(KvpageError) as caught:
        memory.create(SIZE_BYTES)
    if action != "kill":
        assert caught.value.details["operation"] == function
        assert caught.value.details["driver_code"] == int(action)
    else:
        assert "status -9" in str(caught.value)


def test_creation_is_abandoned_while_the_driver_does_not_answer(
    vmm: CudaVmmMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Enough(Exception):
        pass

    def stop(committed_bytes: int) -> None:
        raise Enough

    monkeypatch.setenv("KVPAGE_FAKECUDA_FAULTS", "cuMemCreate:1:delay=600000")
    with pytest.raises(Enough):
        vmm.create(SIZE_BYTES, stop)


def test_memory_whose_descriptor_found_no_room_is_told_and_given_back(
    devices: FakeDevices, vmm: CudaVmmMemory, ipc: CudaIpcMemory
) -> None:
    """The kernel drops what it has no number for, and the message comes without it."""
    ours, theirs = socket.socketpair()
    with ours, theirs, open("/dev/null") as file:
        socket.send_fds(theirs, [b'{"made": true}\n'], [file.fileno()])
        messages = cuda_maker.Messages(ours)
        with no_room_for_descriptors(), pytest.raises(InternalError, match="no room in this process"):
            messages.next(60)
        messages.close()


# --- mapping ---------------------------------------------------------------------------------------------------------


def test_the_worker_of_vmm_memory_needs_no_driver(devices: FakeDevices, vmm: CudaVmmMemory) -> None:
    """A chunk is a descriptor: creating, exporting, importing and closing call nothing in this process."""
    set_faults("cuInit:0:999,cuMemCreate:0:999,cuMemImportFromShareableHandle:0:999,cuMemRelease:0:999")
    with vmm.create(SIZE_BYTES) as chunk, imported(vmm, chunk) as again:
        assert again.size_bytes == SIZE_BYTES
        assert devices.used_bytes(devices.uuids[0]) == GRANULARITY_BYTES


MAPPING = ("cuMemGetAllocationGranularity", "cuCtxGetCurrent", "cuCtxSetCurrent", "cuMemImportFromShareableHandle",
           "cuMemGetAllocationPropertiesFromHandle", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess")  # fmt: skip


@pytest.mark.parametrize("function", MAPPING)
def test_whichever_call_fails_while_memory_is_mapped_nothing_is_left(function: str, vmm: CudaVmmMemory) -> None:
    with vmm.create(SIZE_BYTES) as chunk:
        chunk.map().close()
        before = live()
        set_faults(f"{function}:1:999")
        with pytest.raises(KvpageError) as caught:
            chunk.map()
        assert caught.value.details["operation"] == function
        assert live() == before
        set_faults("")
        chunk.map().close()


@pytest.mark.parametrize(
    "function", ["cuCtxGetCurrent", "cuCtxSetCurrent", "cuIpcOpenMemHandle", "cuMemGetAddressRange"]
)
def test_whichever_call_fails_while_a_handle_is_opened_nothing_is_left(function: str, ipc: CudaIpcMemory) -> None:
    with ipc.create(SIZE_BYTES) as chunk:
        chunk.map().close()
        before = live()
        set_faults(f"{function}:1:999")
        with pytest.raises(KvpageError) as caught:
            chunk.map()
        assert caught.value.details["operation"] == function
        assert live() == before


UNDOING_PROGRAM = """
from kvpage.errors import KvpageError
from kvpage.memory.cuda import CudaVmmMemory
with CudaVmmMemory("cuda:0").create(4096) as chunk:
    try:
        chunk.map()
    except KvpageError as error:
        print(error.details["operation"])
"""


def test_an_error_while_undoing_does_not_hide_the_first(devices: FakeDevices, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPAGE_FAKECUDA_FAULTS", "cuMemImportFromShareableHandle:1:999,cuCtxSetCurrent:2:1")
    assert run_program(UNDOING_PROGRAM) == "cuMemImportFromShareableHandle"


def test_memory_of_another_device_is_refused(devices: FakeDevices, vmm: CudaVmmMemory) -> None:
    other = CudaVmmMemory(devices.uuids[1])
    with vmm.create(SIZE_BYTES) as chunk, imported(other, chunk) as again, pytest.raises(ProtocolError):
        again.map()


def test_what_is_no_device_memory_is_refused_by_the_driver(vmm: CudaVmmMemory, tmp_path: Path) -> None:
    fd = os.open(tmp_path / "not of a device", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, SIZE_BYTES)
    with vmm.import_chunk(fd, SIZE_BYTES) as chunk, pytest.raises(ProtocolError, match="names no memory"):
        chunk.map()


def _file_of(size_bytes: int, folder: Path) -> int:
    fd = os.open(folder / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, size_bytes)
    return fd


def _memfd() -> int:
    fd = os.memfd_create("of the host")
    os.ftruncate(fd, SIZE_BYTES)
    return fd


NO_MEMORY: dict[str, tuple[Callable[[Path], int], str]] = {
    "a device of somebody else": (lambda folder: os.open("/dev/null", os.O_RDWR), "not one of NVIDIA's"),
    "a file that is too small": (lambda folder: _file_of(SIZE_BYTES - 1, folder), f"has {SIZE_BYTES - 1} bytes"),
    "memory of the host": (lambda folder: _memfd(), "memfd"),
    "a name without a file": (lambda folder: os.open("/dev/null", os.O_PATH), "O_PATH"),
    "a folder": (lambda folder: os.open(folder, os.O_RDONLY), "no driver"),
    "an event": (lambda folder: os.eventfd(0), "no driver"),
    "a socket": (lambda folder: socket.socket(socket.AF_UNIX).detach(), "no driver"),
}


@pytest.mark.parametrize("what", NO_MEMORY)
def test_what_cannot_name_device_memory_is_refused_without_a_driver(
    what: str, vmm: CudaVmmMemory, tmp_path: Path
) -> None:
    """As a worker does, which has no driver, when pools are handed over to it."""
    opened, message = NO_MEMORY[what]
    with pytest.raises(ProtocolError, match=message):
        vmm.import_chunk(opened(tmp_path), SIZE_BYTES)


def test_an_nvidia_device_is_known_by_its_number(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    listed = tmp_path / "devices"
    listed.write_text(
        "Character devices:\n  1 mem\n195 nvidia-frontend\n507 nvidia-uvm\n\nBlock devices:\n195 nvidia\n"
    )
    assert [major for major in (1, 195, 507, 508) if cuda_descriptor.is_nvidia(major, listed)] == [195, 507]


def test_two_devices_are_mapped_at_once(devices: FakeDevices) -> None:
    chunks = [CudaVmmMemory(uuid).create(SIZE_BYTES) for uuid in devices.uuids]
    mappings = [chunk.map() for chunk in chunks]
    for number, mapping in enumerate(mappings):
        wrap_double(mapping).fill_(number + 1)
    assert [int(wrap_double(mapping)[0]) for mapping in mappings] == [1, 2]
    assert [mapping.device.ordinal for mapping in mappings] == [0, 1]
    for closing in (*mappings, *chunks):
        closing.close()


def test_a_thread_that_never_used_the_device_may_map_and_unmap(vmm: CudaVmmMemory) -> None:
    with vmm.create(SIZE_BYTES) as chunk:
        mapped: list[Mapping] = []
        for use in (lambda: mapped.append(chunk.map()), lambda: mapped.pop().close()):
            thread = threading.Thread(target=use)
            thread.start()
            thread.join()
        assert mapped == []


def test_the_callers_context_is_as_it_was(devices: FakeDevices, vmm: CudaVmmMemory) -> None:
    from cuda.bindings import driver

    other = driver.cuDevicePrimaryCtxRetain(1)[1]
    driver.cuCtxPushCurrent(other)
    try:
        with vmm.create(SIZE_BYTES) as chunk, chunk.map():
            assert int(driver.cuCtxGetCurrent()[1]) == int(other)
    finally:
        driver.cuCtxPopCurrent()
        driver.cuDevicePrimaryCtxRelease(1)


def test_a_read_only_mapping_is_asked_for_as_such(vmm: CudaVmmMemory, ipc: CudaIpcMemory) -> None:
    with vmm.create(SIZE_BYTES) as chunk, chunk.map() as writer, chunk.map(writable=False) as reader:
        wrap_double(writer)[3] = 4
        assert wrap_double(reader)[3] == 4
        maps = Path("/proc/self/maps").read_text().splitlines()
        (rights,) = (line.split()[1] for line in maps if line.startswith(f"{reader.address:x}-"))
        assert rights.startswith("r--")
    with ipc.create(SIZE_BYTES) as chunk, pytest.raises(NotSupported, match="cuda_vmm"):
        chunk.map(writable=False)


def test_a_process_without_room_for_a_descriptor_is_told(vmm: CudaVmmMemory) -> None:
    with vmm.create(SIZE_BYTES) as chunk:
        chunk.map().close()
        with no_room_for_descriptors():
            for use in (chunk.export, chunk.map):
                with pytest.raises(InternalError, match="copying a descriptor") as caught:
                    use()
                assert caught.value.details["errno"] == errno.EMFILE
        os.close(chunk.export())


@contextmanager
def no_room_for_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare = os.dup(0)  # the lowest number that is free: all below are taken
    resource.setrlimit(resource.RLIMIT_NOFILE, (spare + 1, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        os.close(spare)


# --- unmapping -------------------------------------------------------------------------------------------------------


def test_the_device_is_waited_for_before_memory_is_unmapped(
    devices: FakeDevices, vmm: CudaVmmMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with vmm.create(SIZE_BYTES) as chunk:
        mapping = chunk.map()
    monkeypatch.setenv("KVPAGE_FAKECUDA_LOG", devices.env(log=True)["KVPAGE_FAKECUDA_LOG"])
    mapping.close()
    called = [call.function for call in devices.log()]
    setting = ["cuCtxGetCurrent", "cuCtxSetCurrent"]
    assert called == [*setting, "cuCtxSynchronize", "cuMemUnmap", "cuMemAddressFree", "cuCtxSetCurrent"]


@pytest.mark.parametrize("function", ["cuCtxSynchronize", "cuMemUnmap"])
def test_memory_that_cannot_be_unmapped_is_never_called_free(
    function: str, devices: FakeDevices, caplog: pytest.LogCaptureFixture
) -> None:
    memory = CudaVmmMemory(devices.uuids[0])
    told: list[str] = []
    with memory.create(SIZE_BYTES) as chunk:
        mapping = chunk.map()
        mapping.on_unmapped(lambda: told.append("unmapped"))
        set_faults(f"{function}:1:700")
        mapping.close()
    assert (mapping.unmapped, told) == (False, [])
    assert "stay in use" in caplog.text
    assert devices.used_bytes(devices.uuids[0]) == GRANULARITY_BYTES
    set_faults("")
    mapping._region.settle()  # so that the next test finds nothing of this one
    assert mapping.unmapped


def test_a_handle_that_was_not_given_back_when_mapping_is_given_back_when_unmapping(
    vmm: CudaVmmMemory, caplog: pytest.LogCaptureFixture
) -> None:
    before = live()
    set_faults("cuMemRelease:1:999")
    with vmm.create(SIZE_BYTES) as chunk:
        mapping = chunk.map()
    assert live()["handles"] == before["handles"] + 1
    assert "given back when they are unmapped" in caplog.text
    wrap_double(mapping)[0] = 1
    mapping.close()
    assert mapping.unmapped
    assert live() == before | {"contexts": live()["contexts"]}


def test_memory_whose_handle_cannot_be_given_back_is_never_called_free(
    devices: FakeDevices, vmm: CudaVmmMemory, caplog: pytest.LogCaptureFixture
) -> None:
    """The handle alone keeps it, when nothing is mapped any more."""
    told: list[str] = []
    set_faults("cuMemRelease:0:999")
    with vmm.create(SIZE_BYTES) as chunk:
        mapping = chunk.map()
        mapping.on_unmapped(lambda: told.append("unmapped"))
        mapping.close()
    assert (mapping.unmapped, told) == (False, [])
    assert "stay in use" in caplog.text
    assert devices.used_bytes(devices.uuids[0]) == GRANULARITY_BYTES
    set_faults("")
    mapping._region.settle()  # what was done is not done twice
    assert (mapping.unmapped, told) == (True, ["unmapped"])


# --- the holder of cuda_ipc memory -----------------------------------------------------------------------------------


def test_memory_by_handle_is_freed_after_its_last_descriptor_and_not_before(
    devices: FakeDevices, ipc: CudaIpcMemory
) -> None:
    chunk = ipc.create(SIZE_BYTES)
    mapping = chunk.map()
    chunk.close()
    (holder,) = (child for child in cuda_maker.HOLDERS if child.poll() is None)
    assert devices.used_bytes(devices.uuids[0]) == 2 << 20
    wrap_double(mapping)[0] = 1
    mapping.close()
    assert holder.wait(60) == 0
    assert devices.used_bytes(devices.uuids[0]) == 0


def test_opening_a_handle_twice_gives_one_mapping_to_the_driver(ipc: CudaIpcMemory) -> None:
    with ipc.create(SIZE_BYTES) as chunk, chunk.map() as one, chunk.map() as other:
        assert one.address == other.address
        assert live()["opened"] == 1
        one.close()
        wrap_double(other)[0] = 1
        assert live()["opened"] == 1
    until(lambda: live()["opened"] == 0)


def test_a_handle_of_memory_that_is_gone_is_refused(ipc: CudaIpcMemory) -> None:
    with ipc.create(SIZE_BYTES) as chunk:
        handle = chunk.handle
    for child in cuda_maker.HOLDERS:
        child.wait(60)
    ours, theirs = os.pipe()
    with ipc.import_chunk(theirs, SIZE_BYTES, handle) as again, pytest.raises(ProtocolError):
        again.map()
    os.close(ours)


def test_memory_whose_holder_was_killed_is_told_to_be_lost(ipc: CudaIpcMemory) -> None:
    with ipc.create(SIZE_BYTES) as chunk:
        for child in cuda_maker.HOLDERS:
            child.kill()
            child.wait(60)
        for use in (chunk.map, lambda: ipc.import_chunk(chunk.export(), SIZE_BYTES, chunk.handle)):
            with pytest.raises(StaleHandle, match="has ended"):
                use()


def test_the_handle_is_shown_nowhere(ipc: CudaIpcMemory) -> None:
    with ipc.create(SIZE_BYTES) as chunk, chunk.map() as mapping:
        assert len(chunk.handle) == 64
        for shown in (repr(chunk), repr(mapping)):
            assert chunk.handle.hex() not in shown
            assert repr(chunk.handle)[2:20] not in shown


@pytest.mark.parametrize("handle", [b"", bytes(63), bytes(65)])
def test_a_handle_of_another_length_is_refused_and_the_descriptor_closed(handle: bytes, ipc: CudaIpcMemory) -> None:
    inside, outside = os.pipe()
    with pytest.raises(ProtocolError):
        ipc.import_chunk(outside, SIZE_BYTES, handle)
    assert os.read(inside, 1) == b""
    os.close(inside)


# --- other processes -------------------------------------------------------------------------------------------------

AT_EXIT_PROGRAM = """
import atexit
atexit.register(lambda: print(int(tensor.add_(1).sum())))  # runs after whatever is registered from here on
from kvpage.memory.cuda import CudaVmmMemory
from support.fakecuda_here import wrap_double
with CudaVmmMemory("cuda:0").create(4096) as chunk:
    mapping = chunk.map()
tensor = wrap_double(mapping)
mapping.close()
"""


def test_a_tensor_may_live_until_the_interpreter_ends(devices: FakeDevices) -> None:
    assert run_program(AT_EXIT_PROGRAM) == "4096"


FORKING_PROGRAM = """
import os, warnings
from kvpage.memory.cuda import CudaVmmMemory
from support.fakecuda import live
warnings.simplefilter("ignore")  # of a fork in a process with threads
with CudaVmmMemory("cuda:0").create(4096) as chunk:
    mapping = chunk.map()
child = os.fork()
if child == 0:
    mapping.close()  # must unmap nothing, and wait for no thread that is not there
    os._exit(0 if live()["mappings"] == 1 and not mapping.unmapped else 1)
_, status = os.waitpid(child, 0)
mapping.close()
print(os.waitstatus_to_exitcode(status), mapping.unmapped)
"""


def test_a_forked_child_unmaps_nothing(devices: FakeDevices) -> None:
    assert run_program(FORKING_PROGRAM) == "0 True"


FORKED_PROGRAM = """
import os, sys, warnings
from kvpage.errors import KvpageError
from kvpage.memory.cuda import CudaVmmMemory
from kvpage.memory.cuda_driver import CudaDriver
warnings.simplefilter("ignore")  # of a fork in a process with threads
if sys.argv[1] == "ours":
    with CudaVmmMemory("cuda:0").create(4096) as chunk:
        mapping = chunk.map()
        use = chunk.map
        if os.fork() == 0:
            try:
                use()
            except KvpageError as error:
                print(error.code, error, flush=True)
            os._exit(0)
        os.wait()
        mapping.close()
else:
    from cuda.bindings import driver
    driver.cuInit(0)  # as torch does
    if os.fork() == 0:
        try:
            CudaDriver()
        except KvpageError as error:
            print(error.code, error, flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.mark.parametrize("whose", ["ours", "torch's"])
def test_a_forked_child_that_maps_is_told_to_spawn(whose: str, devices: FakeDevices) -> None:
    told = run_program(FORKED_PROGRAM, whose)
    assert all(part in told for part in ("not-supported", "was forked", "spawn"))


VISIBLE_PROGRAM = """
import ctypes, sys
from kvpage.errors import NotFound
from kvpage.memory.cuda import CudaVmmMemory
memory = CudaVmmMemory(sys.argv[1])
with memory.import_chunk(int(sys.argv[2]), 4096) as chunk:
    try:
        with chunk.map() as mapping:
            ctypes.c_ubyte.from_address(mapping.address + 5).value += 1
            print(mapping.device.ordinal)
    except NotFound as error:
        print(error)
"""


@pytest.mark.parametrize(("visible", "ordinal"), [("0,1", 1), ("1,0", 0), ("{1}", 0)])
def test_a_device_is_found_by_uuid_however_the_process_numbers_it(
    visible: str, ordinal: int, devices: FakeDevices, monkeypatch: pytest.MonkeyPatch
) -> None:
    uuid = devices.uuids[1]
    with CudaVmmMemory(uuid).create(4096) as chunk, chunk.map() as mapping:
        wrap_double(mapping)[5] = 7
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible.format(*devices.uuids))
        assert run_program(VISIBLE_PROGRAM, uuid, str(chunk.fd), pass_fds=[chunk.fd]) == str(ordinal)
        assert wrap_double(mapping)[5] == 8


def test_a_device_that_is_hidden_from_a_process_is_told_with_what_it_sees(
    devices: FakeDevices, monkeypatch: pytest.MonkeyPatch
) -> None:
    uuid = devices.uuids[1]
    with CudaVmmMemory(uuid).create(4096) as chunk:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
        told = run_program(VISIBLE_PROGRAM, uuid, str(chunk.fd), pass_fds=[chunk.fd])
    assert all(part in told for part in (*devices.uuids, "CUDA_VISIBLE_DEVICES=0"))


CREATING_PROGRAM = """
import sys, socket
from kvpage.memory.cuda import CudaIpcMemory, CudaVmmMemory
ours = socket.socket(fileno=int(sys.argv[2]))
kind = {kind.handle_kind: kind for kind in (CudaIpcMemory, CudaVmmMemory)}[sys.argv[1]]
chunk = kind("cuda:0").create(4096)
socket.send_fds(ours, [chunk.handle or b"-"], [chunk.fd])
ours.recv(1)  # until it is killed
"""


@pytest.mark.parametrize("kind", [CudaVmmMemory, CudaIpcMemory])
def test_memory_outlives_the_process_that_had_it_made(kind: type[CudaVmmMemory], devices: FakeDevices) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-c", CREATING_PROGRAM, kind.handle_kind, str(theirs.fileno())]
        with subprocess.Popen(command, pass_fds=[theirs.fileno()]) as creator:
            handle, (fd,), _, _ = socket.recv_fds(ours, 100, 1)
            creator.kill()
    memory = kind(devices.uuids[0])
    with memory.import_chunk(fd, 4096, handle.removeprefix(b"-")) as chunk, chunk.map() as mapping:
        wrap_double(mapping)[1] = 3
        assert wrap_double(mapping)[1] == 3
    until(lambda: devices.used_bytes(devices.uuids[0]) == 0)  # its holder is nobody's child any more


# --- what must not happen to the thread that unmaps ------------------------------------------------------------------

INTERRUPTED_PROGRAM = """
import os, sys
from pathlib import Path
from kvpage.memory.cuda import CudaIpcMemory, CudaVmmMemory
from support.eventually import until
from support.fakecuda import live, set_faults
from support.fakecuda_here import wrap_double
from support.interrupting import interrupted

def held():
    return live() | {"descriptors": len(os.listdir("/proc/self/fd"))}

kind = {kind.handle_kind: kind for kind in (CudaIpcMemory, CudaVmmMemory)}[sys.argv[1]]
one, other = kind("cuda:0").create(4096), CudaVmmMemory("cuda:0").create(4096)
one.map().close()
other.map().close()
set_faults("cuCtxSynchronize:0:delay=5")  # so that what was given up is still to be unmapped when the next one is made
before = held()
moment = 1
while interrupted(one.map, moment):
    mapping = other.map()
    view = wrap_double(mapping)
    view.fill_(7)
    spare = other.map()
    spare.close()  # everything that was given up before is settled now
    assert spare.unmapped, f"moment {moment}: nothing is unmapped any more"
    assert view.eq(7).all(), f"moment {moment}"
    del view
    mapping.close()
    assert mapping.unmapped
    until(lambda: held() == before)  # what the interrupted one had mapped has left the address space
    moment += 1
print(moment)
"""


@pytest.mark.parametrize("kind", ["cuda_vmm", "cuda_ipc"])
def test_an_interruption_while_mapping_leaves_nothing_and_takes_nothing_from_another_mapping(
    kind: str, devices: FakeDevices
) -> None:
    assert int(run_program(INTERRUPTED_PROGRAM, kind)) > 15


RETAINING_PROGRAM = """
from cuda.bindings import driver as bindings
from kvpage.memory.cuda_device import PrimaryContexts, find_device
from kvpage.memory.cuda_driver import CudaDriver
from support.fakecuda import live
from support.interrupting import interrupted
driver = CudaDriver()
device = find_device(driver, "cuda:0")
moment, is_over = 1, False
while not is_over:
    contexts = PrimaryContexts()

    def use():
        with contexts.current(driver, device):
            pass

    is_over = not interrupted(use, moment)
    use()
    bindings.cuDevicePrimaryCtxRelease(device.ordinal)
    assert live()["contexts"] == 0, f"moment {moment}: it was retained twice"
    moment += 1
print(moment)
"""


def test_a_context_is_retained_once_whatever_interrupts(devices: FakeDevices) -> None:
    assert int(run_program(RETAINING_PROGRAM)) > 15


CONTEXT_PROGRAM = """
from cuda.bindings import driver as bindings
from kvpage.memory.cuda_device import CONTEXTS, visible_devices
from kvpage.memory.cuda_driver import CudaDriver
from support.interrupting import interrupted
driver = CudaDriver()
one, other = visible_devices(driver)

def use():
    with CONTEXTS.current(driver, other):
        pass

use()
for outer in (None, driver.retain_context(one.ordinal, one.uuid)):
    if outer is not None:
        bindings.cuCtxPushCurrent(outer)
    wanted = int(driver.current_context())
    moment = 1
    while interrupted(use, moment):
        assert int(driver.current_context()) == wanted, f"moment {moment}"
        moment += 1
    if outer is not None:
        bindings.cuCtxPopCurrent()
    assert int(driver.current_context()) == 0, "something lies below"
print(moment)
"""


def test_an_interruption_leaves_the_callers_context_current(devices: FakeDevices) -> None:
    assert int(run_program(CONTEXT_PROGRAM)) > 10


def test_a_callback_that_fails_keeps_nobody_from_hearing(vmm: CudaVmmMemory, caplog: pytest.LogCaptureFixture) -> None:
    told: list[str] = []

    def failing() -> None:
        told.append("failing")
        raise IndexError("its own")

    with vmm.create(SIZE_BYTES) as chunk:
        for _ in range(2):
            mapping = chunk.map()
            mapping.on_unmapped(lambda: told.append("first"))
            mapping.on_unmapped(failing)
            mapping.close()
            assert mapping.unmapped
    assert sorted(told) == ["failing", "failing", "first", "first"]
    assert "its own" in caplog.text


STARTING_PROGRAM = """
import resource, threading
from kvpage.memory.cuda import CudaVmmMemory
from kvpage.memory import cuda_reaper

class Refusing(threading.Thread):
    def start(self):
        raise RuntimeError("can't start new thread")

with CudaVmmMemory("cuda:0").create(4096) as chunk:
    real, threading.Thread = threading.Thread, Refusing
    try:
        chunk.map()
    except RuntimeError as error:
        print(error)
    threading.Thread = real
    mapping = chunk.map()
    mapping.close()
    print(mapping.unmapped)
"""


def test_a_thread_that_could_not_be_started_is_started_the_next_time(devices: FakeDevices) -> None:
    assert run_program(STARTING_PROGRAM) == "can't start new thread\nTrue"


def test_bytes_in_the_lifeline_free_nothing(devices: FakeDevices, ipc: CudaIpcMemory) -> None:
    with ipc.create(SIZE_BYTES) as chunk:
        os.write(chunk.fd, b"anybody can")
        with chunk.map() as mapping:
            assert devices.used_bytes(devices.uuids[0]) == 2 << 20
            wrap_double(mapping)[0] = 1
        assert [child.poll() for child in cuda_maker.HOLDERS] == [None]


def test_a_pipe_that_is_no_lifeline_is_refused(ipc: CudaIpcMemory) -> None:
    reading, writing = os.pipe()
    with pytest.raises(ProtocolError, match="for writing"):
        ipc.import_chunk(reading, SIZE_BYTES, bytes(64))
    with pytest.raises(BrokenPipeError):
        os.write(writing, b"nobody reads")
    os.close(writing)


@pytest.mark.parametrize("name", ["cuda:٤", "cuda:", "cuda:-1", "tpu", "", "GPU-1234"])
def test_what_is_no_name_of_a_device_is_refused(name: str) -> None:
    with pytest.raises(SpecInvalid, match="no name of a device"):
        probe(name)
