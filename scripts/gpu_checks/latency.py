"""How long making, mapping and unmapping takes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from gpu_checks.gpu import MIB, Gpu
from gpu_checks.trial import Trial, expect, percentile
from kvpage.memory.cuda import CudaIpcMemory, CudaVmmMemory
from kvpage.memory.cuda_maker import HOLDERS

SIZES_BYTES = (2 * MIB, 32 * MIB, 256 * MIB)
IPC_SIZES_BYTES = (64 * MIB, 1024 * MIB)
NUM_REPEATS = 60
NUM_MADE = 3  # each is a process of its own
LARGEST_SHARE = 0.8  # of what is free

_TABLE = "Latency"


class Watch:
    """Times by name, in microseconds."""

    def __init__(self) -> None:
        self.times_us: dict[str, list[float]] = {}

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        started_ns = time.perf_counter_ns()
        yield
        self.times_us.setdefault(name, []).append((time.perf_counter_ns() - started_ns) / 1000)

    def tell(self, trial: Trial, size_bytes: int) -> None:
        for name, times_us in self.times_us.items():
            trial.row(
                _TABLE,
                what=name,
                MiB=size_bytes // MIB,
                n=len(times_us),
                p50_us=round(percentile(times_us, 50), 1),
                p99_us=round(percentile(times_us, 99), 1),
            )


def by_size(trial: Trial) -> None:
    """Each driver call, and what kvpage makes of them: `make`, in a process of its own, `attach` and `close`."""
    gpu = Gpu(trial.device_uuid)
    for size_bytes in SIZES_BYTES:
        watch = Watch()
        for _ in range(NUM_REPEATS):
            _every_call(gpu, gpu.rounded(size_bytes), watch)
        _through_kvpage(gpu, size_bytes, watch, num_made=NUM_MADE, num_repeats=NUM_REPEATS)
        watch.tell(trial, size_bytes)


def _every_call(gpu: Gpu, size_bytes: int, watch: Watch) -> None:
    driver, uuid = gpu.driver, gpu.uuid
    with gpu.current():
        with watch.time("cuMemCreate"):
            handle = driver.create(gpu.device.ordinal, size_bytes, uuid)
        with watch.time("cuMemExportToShareableHandle"):
            fd = driver.export_fd(handle, uuid)
        with watch.time("cuMemImportFromShareableHandle"):
            imported = driver.import_fd(fd, size_bytes, uuid)
        os.close(fd)
        with watch.time("cuMemAddressReserve"):
            address = driver.reserve(size_bytes, uuid)
        with watch.time("cuMemMap"):
            driver.map(address, size_bytes, imported, uuid)
        with watch.time("cuMemSetAccess"):
            driver.allow_access(address, size_bytes, gpu.device.ordinal, uuid, writable=True)
        with watch.time("cuMemUnmap"):
            driver.unmap(address, size_bytes)
        driver.free_range(address, size_bytes)
        driver.release(imported)
        with watch.time("cuMemRelease, the last one"):
            driver.release(handle)


def _through_kvpage(gpu: Gpu, size_bytes: int, watch: Watch, *, num_made: int, num_repeats: int) -> None:
    memory = CudaVmmMemory(gpu.uuid)
    for _ in range(num_made):
        with watch.time("kvpage: make, clear, export"):
            chunk = memory.create(size_bytes)
        chunk.close()
    with memory.create(size_bytes) as chunk:
        for _ in range(num_repeats):
            with memory.import_chunk(chunk.export(), size_bytes) as again:
                with watch.time("kvpage: import, map"):
                    mapping = again.map()
            with watch.time("kvpage: close, unmapped"):
                mapping.close()


def largest(trial: Trial) -> None:
    """The same for most of what is free: the only check that takes more than 2 GiB."""
    gpu = Gpu(trial.device_uuid)
    size_bytes = int(gpu.free_bytes() * LARGEST_SHARE) // (1024 * MIB) * (1024 * MIB)
    expect(size_bytes > 0, "less than 1.25 GiB is free")
    watch = Watch()
    _through_kvpage(gpu, size_bytes, watch, num_made=1, num_repeats=5)
    watch.tell(trial, size_bytes)
    trial.saw(f"{size_bytes / 2**30:.0f} GiB in one chunk")


def by_handle(trial: Trial) -> None:
    """`cuda_ipc`: opening and closing."""
    gpu = Gpu(trial.device_uuid)
    for size_bytes in IPC_SIZES_BYTES:
        watch = Watch()
        memory = CudaIpcMemory(gpu.uuid)
        with watch.time("cuda_ipc: make, clear"):
            chunk = memory.create(size_bytes)
        for _ in range(NUM_REPEATS):
            with watch.time("cuda_ipc: open"):
                mapping = chunk.map()
            with watch.time("cuda_ipc: close"):
                mapping.close()
        chunk.close()
        HOLDERS.pop().wait()  # it ends with the last copy of its lifeline, and the memory with it
        watch.tell(trial, size_bytes)
