"""Host memory: the contract, and what is particular to a memfd."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from pathlib import Path

import pytest
import torch

from kvpage.errors import InternalError, NotEnoughMemory, ProtocolError
from kvpage.memory.fake import FakeCalls, FakeMemory
from kvpage.memory.host import COMMIT_STEP_BYTES, HostMemory
from kvpage.memory.host_calls import F_SEAL_FUTURE_WRITE, SIZE_SEALS
from support.memory_contract import MemoryContract, run_program

SIZE_BYTES = 2 * 4096


class TestHostMemory(MemoryContract):
    @pytest.fixture
    def memory(self) -> HostMemory:
        return HostMemory()


class TestFakeMemory(MemoryContract):
    @pytest.fixture
    def memory(self) -> FakeMemory:
        return FakeMemory()


@pytest.fixture
def memory(no_leaks: None) -> HostMemory:
    return HostMemory()


def sealed_memfd(seals: int, *, committed: bool = True, size_bytes: int = SIZE_BYTES) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size_bytes)
    if committed:
        os.posix_fallocate(fd, 0, size_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def test_a_chunk_is_committed_and_nobody_can_resize_it(memory: HostMemory) -> None:
    with memory.create(SIZE_BYTES) as chunk:
        assert os.fstat(chunk.fd).st_blocks * 512 >= SIZE_BYTES
        for size_bytes in (0, SIZE_BYTES * 2):
            with pytest.raises(PermissionError):
                os.ftruncate(chunk.fd, size_bytes)
        with pytest.raises(PermissionError):
            fcntl.fcntl(chunk.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_a_mapping_keeps_no_descriptor_open(memory: HostMemory) -> None:
    before = len(os.listdir("/proc/self/fd"))
    chunk = memory.create(SIZE_BYTES)
    mapping = chunk.map()
    chunk.close()
    assert len(os.listdir("/proc/self/fd")) == before
    mapping.close()


def test_a_read_only_mapping_sees_the_bytes_and_refuses_to_write(memory: HostMemory) -> None:
    with memory.create(SIZE_BYTES) as chunk, chunk.map() as writer, chunk.map(writable=False) as reader:
        memoryview(writer.buffer).cast("B")[3] = 4
        view = memoryview(reader.buffer).cast("B")
        assert view[3] == 4
        with pytest.raises(TypeError):
            view[3] = 5


@pytest.mark.parametrize(
    "seals",
    [
        0,
        fcntl.F_SEAL_SEAL,
        fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL,
        fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL,
        fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW,
        SIZE_SEALS | fcntl.F_SEAL_WRITE,
        SIZE_SEALS | F_SEAL_FUTURE_WRITE,
    ],
    ids=["none", "seal", "may shrink", "may grow", "may be sealed further", "no writing", "no writing in future"],
)
def test_a_memfd_whose_seals_allow_too_much_or_too_little_is_refused(memory: HostMemory, seals: int) -> None:
    with pytest.raises(ProtocolError):
        memory.import_chunk(sealed_memfd(seals), SIZE_BYTES)


def test_a_memfd_that_was_never_committed_is_refused(memory: HostMemory) -> None:
    with pytest.raises(ProtocolError):
        memory.import_chunk(sealed_memfd(SIZE_SEALS, committed=False), SIZE_BYTES)


def test_a_memfd_opened_for_reading_only_is_refused(memory: HostMemory) -> None:
    fd = sealed_memfd(SIZE_SEALS)
    read_only = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    os.close(fd)
    with pytest.raises(ProtocolError):
        memory.import_chunk(read_only, SIZE_BYTES)


def test_a_file_on_disk_is_refused(memory: HostMemory, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(SIZE_BYTES))
    with pytest.raises(ProtocolError):
        memory.import_chunk(os.open(path, os.O_RDWR), SIZE_BYTES)


def test_more_than_is_available_is_refused_before_anything_is_committed() -> None:
    memory = FakeMemory(available=SIZE_BYTES - 1)
    with pytest.raises(NotEnoughMemory) as caught:
        memory.create(SIZE_BYTES)
    assert caught.value.details == {"needed_bytes": SIZE_BYTES, "available_bytes": SIZE_BYTES - 1}
    assert not memory.calls.counts


def test_memory_that_others_take_meanwhile_is_noticed_between_two_steps(no_leaks: None) -> None:
    memory = FakeMemory(available=2 * COMMIT_STEP_BYTES)

    def others_take_the_rest(committed_bytes: int) -> None:
        memory.available = 0

    with pytest.raises(NotEnoughMemory):
        memory.create(2 * COMMIT_STEP_BYTES, others_take_the_rest)
    assert memory.calls.counts["commit"] == 1
    assert not memory.calls.open_fds


def test_more_than_the_machine_has_is_refused(memory: HostMemory) -> None:
    with pytest.raises(NotEnoughMemory):
        memory.create(1 << 50)


def every_operation(memory: FakeMemory) -> None:
    with memory.create(SIZE_BYTES) as chunk, memory.import_chunk(chunk.export(), SIZE_BYTES) as imported:
        with imported.map() as mapping:
            memoryview(mapping.buffer).cast("B")[0] = 1


def test_whichever_call_fails_nothing_is_left_behind(no_leaks: None) -> None:
    """Fail the first call, then the second, and so on, until there is none left to fail."""
    unhurt = FakeCalls()
    every_operation(FakeMemory(calls=unhurt))
    can_fail = unhurt.counts.total() - unhurt.counts["close"] - unhurt.counts["unmap"]
    assert can_fail >= 10
    for fail_at in range(1, can_fail + 1):
        calls = FakeCalls(fail_at=fail_at)
        with pytest.raises(InternalError) as caught:
            every_operation(FakeMemory(calls=calls))
        assert caught.value.details["errno"] == errno.ENFILE
        assert (calls.open_fds, calls.open_maps) == (set(), set())
    every_operation(FakeMemory(calls=FakeCalls(fail_at=can_fail + 1)))


def test_the_fake_sees_what_is_left_open() -> None:
    memory = FakeMemory()
    chunk = memory.create(SIZE_BYTES)
    mapping = chunk.map()
    assert memory.calls.open_fds == {chunk.fd}
    assert memory.calls.open_maps == {mapping.address}
    chunk.close()
    mapping.close()
    assert (memory.calls.open_fds, memory.calls.open_maps) == (set(), set())


FORKING_PROGRAM = """
import mmap, os
from kvpage.memory.host import HostMemory
with HostMemory().create(4096) as chunk:
    mapping = chunk.map()
child = os.fork()
if child == 0:
    maps = open("/proc/self/maps").read()
    other = mmap.mmap(-1, 4096)  # likely at the address that is free now
    other[0] = 5
    mapping.close()  # must unmap nothing here
    os._exit(0 if "memfd:kvpage" not in maps and other[0] == 5 else 1)
_, status = os.waitpid(child, 0)
assert "memfd:kvpage" in open("/proc/self/maps").read()
print(os.waitstatus_to_exitcode(status))
"""


def test_a_forked_child_does_not_inherit_the_mapping() -> None:
    assert run_program(FORKING_PROGRAM) == "0"


TENSOR_AT_EXIT_PROGRAM = """
import atexit
atexit.register(lambda: print(int(tensor.add_(1).sum())))  # runs after whatever is registered from here on
import torch
from kvpage.memory.host import HostMemory
with HostMemory().create(4096) as chunk:
    mapping = chunk.map()
tensor = torch.frombuffer(mapping.buffer, dtype=torch.uint8)
mapping.close()
"""


def test_a_tensor_may_live_until_the_interpreter_ends() -> None:
    assert run_program(TENSOR_AT_EXIT_PROGRAM) == "4096"


def test_why_the_buffer_is_no_mmap_object(no_leaks: None) -> None:
    """A ctypes array cannot be taken away from its views; a `mmap.mmap` could be closed while torch reads it."""
    with HostMemory().create(SIZE_BYTES) as chunk:
        mapping = chunk.map()
    assert not isinstance(mapping.buffer, mmap.mmap)
    assert not hasattr(mapping.buffer, "close")
    assert not hasattr(mapping.buffer, "release")
    tensor = torch.frombuffer(mapping.buffer, dtype=torch.uint8)
    assert tensor.data_ptr() == mapping.address
    del tensor
    mapping.close()
