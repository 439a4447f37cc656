"""What a worker refuses to adopt, and that a refusal leaves nothing behind."""

from __future__ import annotations

import hashlib
import os
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvpage.errors import Conflict, PermissionDenied, ProtocolError, StaleHandle
from kvpage.memory.base import Chunk
from kvpage.memory.host import HostMemory
from kvpage.wire import messages
from kvpage.wire.channel import close_fds
from kvpage.wire.client import WorkerClient
from kvpage.wire.messages import AdoptPool, ChunkInfo, PoolState
from kvpage_server.control_block import ControlRecord, write_control_block
from support.leaks import leak_guard
from support.pools import OVERHEAD_BYTES, PLAN, PLAN_ID, SIZE_BYTES, create_pool, export_pool
from support.worker_process import WorkerProcess

EPOCH = "0123456789abcdef" * 2
INFO = ChunkInfo(kind="memfd", size_bytes=SIZE_BYTES)


def record(**changes: object) -> ControlRecord:
    fields: dict[str, object] = {
        "epoch": EPOCH,
        "device": "host",
        "pool_id": "pool-0123456789abcdef",
        "name": "mimo",
        "plan_id": PLAN_ID,
        "plan": PLAN,
        "chunks": [INFO],
    }
    return ControlRecord(**{**fields, **changes})  # type: ignore[arg-type]


class Legacy:
    """What a worker that died has left: a chunk and its control block."""

    def __init__(self, control_record: ControlRecord) -> None:
        self.chunk: Chunk = HostMemory().create(SIZE_BYTES)
        self.control = write_control_block(control_record, HostMemory())

    def offer(self, client: WorkerClient, *, info: ChunkInfo = INFO, fds: list[int] | None = None) -> PoolState:
        return client.ask(AdoptPool(chunks=[info]), PoolState, fds or [self.chunk.fd, self.control.fd])

    def close(self) -> None:
        self.chunk.close()
        self.control.close()


@pytest.fixture(scope="module", autouse=True)
def untouched() -> Iterator[WorkerProcess]:
    """One worker for all tests that leave nothing in it; `nothing_left` sees to that. It is there before they look."""
    with leak_guard(), tempfile.TemporaryDirectory(prefix="kvp-") as folder, WorkerProcess(Path(folder)) as worker:
        yield worker


@pytest.fixture(scope="module")
def num_fds_at_rest(untouched: WorkerProcess) -> int:
    """What it has open while a keeper is connected."""
    with untouched.client(role="api") as keeper:
        keeper.request(messages.ListPools())
        return untouched.num_fds()


@pytest.fixture
def worker(
    request: pytest.FixtureRequest, untouched: WorkerProcess, no_leaks: None, run_dir: Path
) -> Iterator[WorkerProcess]:
    if "nothing_left" in request.fixturenames:
        yield untouched
        return
    with WorkerProcess(run_dir) as worker:
        yield worker


@pytest.fixture
def keeper(worker: WorkerProcess) -> Iterator[WorkerClient]:
    with worker.client(role="api") as keeper:
        yield keeper


@pytest.fixture
def legacy(keeper: WorkerClient) -> Iterator[Legacy]:
    legacy = Legacy(record())
    yield legacy
    legacy.close()


@pytest.fixture
def nothing_left(worker: WorkerProcess, keeper: WorkerClient, num_fds_at_rest: int) -> Iterator[None]:
    """Whatever the test offered, the worker has no pool and no descriptor more than before."""
    assert worker.settles_at(num_fds_at_rest, keeper)
    yield
    assert keeper.ask(messages.ListPools(), messages.PoolList).pools == []
    assert worker.settles_at(num_fds_at_rest, keeper)


def test_what_another_worker_left_is_adopted(keeper: WorkerClient, legacy: Legacy) -> None:
    pool = legacy.offer(keeper)
    assert (pool.pool_id, pool.name, pool.state) == ("pool-0123456789abcdef", "mimo", "ready")
    assert keeper.epoch == EPOCH
    device = keeper.ask(messages.DescribeDevice(), messages.DeviceState)
    assert device.reserved_bytes == SIZE_BYTES + OVERHEAD_BYTES


OFFSETS = {
    "magic": 0,
    "version": 8,
    "header size": 12,
    "record size": 16,
    "state offset": 24,
    "state size": 32,
    "digest": 48,
    "record": 80,
    "middle of the record": 120,
}


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("offset", OFFSETS.values(), ids=OFFSETS)
def test_one_changed_byte_in_a_control_block_is_noticed(keeper: WorkerClient, legacy: Legacy, offset: int) -> None:
    byte = os.pread(legacy.control.fd, 1, offset)
    os.pwrite(legacy.control.fd, bytes([byte[0] ^ 0x40]), offset)
    with pytest.raises(ProtocolError):
        legacy.offer(keeper)


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("size_bytes", [1, 80, 4096, 17 << 20], ids=["tiny", "header only", "zeros", "huge"])
def test_memory_that_is_no_control_block_is_refused(keeper: WorkerClient, legacy: Legacy, size_bytes: int) -> None:
    with HostMemory().create(size_bytes) as other, pytest.raises(ProtocolError):
        legacy.offer(keeper, fds=[legacy.chunk.fd, other.fd])


def make_pipe(legacy: Legacy) -> int:
    inside, outside = os.pipe()
    os.close(outside)
    return inside


def make_unsealed(legacy: Legacy) -> int:
    fd = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, SIZE_BYTES)
    os.posix_fallocate(fd, 0, SIZE_BYTES)
    return fd


def make_smaller(legacy: Legacy) -> int:
    with HostMemory().create(SIZE_BYTES - 4096) as smaller:
        return smaller.export()


def make_read_only(legacy: Legacy) -> int:
    return os.open(f"/proc/self/fd/{legacy.chunk.fd}", os.O_RDONLY)


def make_path_only(legacy: Legacy) -> int:
    return os.open(f"/proc/self/fd/{legacy.chunk.fd}", os.O_PATH)


STRANGERS: dict[str, Callable[[Legacy], int]] = {
    "a pipe": make_pipe,
    "not sealed": make_unsealed,
    "too small": make_smaller,
    "read only": make_read_only,
    "a path only": make_path_only,
}


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("make", STRANGERS.values(), ids=STRANGERS)
@pytest.mark.parametrize("place", [0, 1], ids=["as chunk", "as control block"])
def test_descriptors_of_anything_else_are_refused(
    keeper: WorkerClient, legacy: Legacy, make: Callable[[Legacy], int], place: int
) -> None:
    stranger = make(legacy)
    fds = [legacy.chunk.fd, legacy.control.fd]
    fds[place] = stranger
    with pytest.raises(ProtocolError):
        legacy.offer(keeper, fds=fds)
    os.close(stranger)


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(
    "changes",
    [
        {"device": "cuda:0"},
        {"chunks": [ChunkInfo(kind="memfd", size_bytes=SIZE_BYTES - 1)]},
        {"chunks": [INFO, INFO]},
        {"chunks": []},
        {"epoch": "not an epoch"},
        {"pool_id": "../pool"},
        {"name": ""},
        {"plan_id": "md5:1"},
    ],
    ids=lambda changes: f"{next(iter(changes))}",
)
def test_a_control_block_about_something_else_is_refused(keeper: WorkerClient, changes: dict[str, object]) -> None:
    legacy = Legacy(record(**changes))
    with pytest.raises(ProtocolError):
        legacy.offer(keeper)
    legacy.close()


@pytest.mark.usefixtures("nothing_left")
def test_a_kind_of_memory_the_worker_does_not_have_is_refused(keeper: WorkerClient, legacy: Legacy) -> None:
    with pytest.raises(ProtocolError):
        legacy.offer(keeper, info=ChunkInfo(kind="cuda_vmm", size_bytes=SIZE_BYTES))


def test_a_refusal_leaves_the_connection_usable(keeper: WorkerClient, legacy: Legacy) -> None:
    with pytest.raises(ProtocolError):
        legacy.offer(keeper, fds=[legacy.control.fd, legacy.chunk.fd])
    assert legacy.offer(keeper).state == "ready"


@pytest.mark.usefixtures("nothing_left")
def test_an_ordinary_client_may_neither_adopt_nor_export(worker: WorkerProcess, legacy: Legacy) -> None:
    with worker.client() as client:
        with pytest.raises(PermissionDenied):
            client.request(messages.ExportPool(pool_id="pool-0123456789abcdef"))
        with pytest.raises(ProtocolError):  # its descriptors are not even received
            legacy.offer(client)


def test_a_worker_with_pools_of_its_own_refuses_another_epoch(
    worker: WorkerProcess, keeper: WorkerClient, legacy: Legacy
) -> None:
    create_pool(keeper, "own")
    epoch, before = keeper.epoch, worker.num_fds()
    with pytest.raises(StaleHandle):
        legacy.offer(keeper)
    assert keeper.epoch == epoch
    assert worker.settles_at(before, keeper)


@pytest.mark.parametrize(
    "changes", [{}, {"name": "other"}, {"pool_id": "pool-fedcba9876543210"}], ids=["both", "same id", "same name"]
)
def test_a_name_or_id_that_is_taken_is_a_conflict(
    worker: WorkerProcess, keeper: WorkerClient, legacy: Legacy, changes: dict[str, object]
) -> None:
    legacy.offer(keeper)
    before = worker.num_fds()
    again = Legacy(record(**changes))
    with pytest.raises(Conflict):
        again.offer(keeper)
    again.close()
    assert worker.settles_at(before, keeper)


def test_a_worker_adopts_several_pools_of_one_epoch(keeper: WorkerClient, legacy: Legacy) -> None:
    legacy.offer(keeper)
    other = Legacy(record(name="other", pool_id="pool-fedcba9876543210"))
    other.offer(keeper)
    other.close()
    assert [pool.name for pool in keeper.ask(messages.ListPools(), messages.PoolList).pools] == ["mimo", "other"]


def test_what_is_adopted_counts_even_beyond_the_budget(run_dir: Path, no_leaks: None) -> None:
    with WorkerProcess(run_dir, "--memory", "4096") as worker, worker.client(role="api") as keeper:
        legacy = Legacy(record())
        assert legacy.offer(keeper).state == "ready"
        legacy.close()
        device = keeper.ask(messages.DescribeDevice(), messages.DeviceState)
        assert (device.memory_limit_bytes, device.reserved_bytes) == (4096, SIZE_BYTES + OVERHEAD_BYTES)


def test_the_control_block_tells_who_keeps_it_what_the_pool_is(keeper: WorkerClient) -> None:
    pool = create_pool(keeper)
    chunks, fds = export_pool(keeper, pool.pool_id)
    header = os.pread(fds[-1], 48, 0)
    magic, version, header_bytes, record_bytes, state_offset, state_bytes = struct.unpack_from("<8sIIQQQ", header)
    assert (magic, version, header_bytes, state_bytes) == (b"KVPGCTRL", 2, 80, 0)
    assert state_offset == os.fstat(fds[-1]).st_size
    assert PLAN in os.pread(fds[-1], record_bytes, header_bytes)
    assert chunks == [INFO]
    close_fds(fds)


# --- what is odd though it adds up -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("name", ["\x1b[2J", "two\nlines", "💣" * 65], ids=["escape", "newline", "too long"])
def test_a_name_that_no_client_could_give_is_refused(keeper: WorkerClient, name: str) -> None:
    legacy = Legacy(record(name=name))
    with pytest.raises(ProtocolError) as caught:
        legacy.offer(keeper)
    assert caught.value.message.isprintable()
    legacy.close()


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("offset", range(40, 48))
def test_reserved_bytes_must_be_zero(keeper: WorkerClient, legacy: Legacy, offset: int) -> None:
    os.pwrite(legacy.control.fd, b"\1", offset)
    with pytest.raises(ProtocolError):
        legacy.offer(keeper)


@pytest.mark.usefixtures("nothing_left")
def test_the_state_begins_at_a_page(keeper: WorkerClient, legacy: Legacy) -> None:
    [record_bytes] = struct.unpack("<Q", os.pread(legacy.control.fd, 8, 16))
    head = struct.pack("<8sIIQQQ8x", b"KVPGCTRL", 2, 80, record_bytes, 4090, 0)
    data = os.pread(legacy.control.fd, record_bytes, 80)
    os.pwrite(legacy.control.fd, head + hashlib.sha256(head + bytes(32) + data).digest(), 0)
    with pytest.raises(ProtocolError, match="4090"):
        legacy.offer(keeper)


@pytest.mark.usefixtures("nothing_left")
def test_a_control_block_is_no_chunk(keeper: WorkerClient) -> None:
    with HostMemory().create(4096) as placeholder:
        info = ChunkInfo(kind="memfd", size_bytes=placeholder.size_bytes)
        legacy = Legacy(record(chunks=[info]))
        assert legacy.control.size_bytes == info.size_bytes
        with pytest.raises(ProtocolError, match="1 files"):
            legacy.offer(keeper, info=info, fds=[legacy.control.fd, legacy.control.fd])
        legacy.close()


@pytest.mark.usefixtures("nothing_left")
def test_a_pool_of_several_chunks_is_refused_as_nobody_could_map_it(keeper: WorkerClient) -> None:
    legacy, other = Legacy(record(chunks=[INFO, INFO])), Legacy(record())
    fds = [legacy.chunk.fd, other.chunk.fd, legacy.control.fd]
    with pytest.raises(ProtocolError, match="2 chunks"):
        keeper.ask(AdoptPool(chunks=[INFO, INFO]), PoolState, fds)
    legacy.close()
    other.close()


def test_one_memfd_is_not_several_pools(worker: WorkerProcess, keeper: WorkerClient, legacy: Legacy) -> None:
    legacy.offer(keeper)
    before = worker.num_fds()
    other = Legacy(record(name="other", pool_id="pool-fedcba9876543210"))
    with pytest.raises(Conflict, match="has this memory"):
        legacy.offer(keeper, fds=[legacy.chunk.fd, other.control.fd])
    other.close()
    assert worker.settles_at(before, keeper)
