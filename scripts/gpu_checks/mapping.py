"""Mapping and unmapping: in any thread, many times, and while kernels run."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

from gpu_checks.gpu import MIB, Gpu
from gpu_checks.tensors import bytes_of, torch_on
from gpu_checks.trial import Trial, expect
from kvpage.errors import KvpageError
from kvpage.memory.cuda import CudaChunk, CudaVmmMemory

SIZE_BYTES = 32 * MIB
KERNEL_BYTES = 1024 * MIB
NUM_CYCLES = 200
NUM_FIRST_CYCLES = 10  # for what is taken once and for all
NUM_KERNELS = 400  # a few hundred ms of them


def in_a_fresh_thread(trial: Trial) -> None:
    """A thread in which nothing was bound imports, maps, unmaps; and what the driver allows there without binding."""
    gpu = Gpu(trial.device_uuid)
    with CudaVmmMemory(gpu.uuid).create(SIZE_BYTES) as chunk:
        expect(_in_thread(lambda: _import_and_close(gpu, chunk)) == "works", "kvpage cannot map in a fresh thread")
        trial.saw("import, map and close through kvpage work")
        size_bytes = gpu.rounded(SIZE_BYTES)

        def unbound() -> None:
            handle = gpu.driver.import_fd(chunk.fd, size_bytes, gpu.uuid)
            try:
                with gpu.raw_mapping(handle, size_bytes):
                    pass
            finally:
                gpu.driver.release(handle)

        trial.saw(f"the same calls with no context bound: {_in_thread(unbound)}")
        trial.saw(f"synchronising with no context bound: {_in_thread(gpu.driver.synchronize)}")
        mapping = chunk.map()
        expect(_in_thread(mapping.close) == "works", "closing in another thread than that which mapped fails")
        expect(mapping.unmapped, "closing in another thread left it mapped")


def _import_and_close(gpu: Gpu, chunk: CudaChunk) -> None:
    again = CudaVmmMemory(gpu.uuid).import_chunk(chunk.export(), chunk.size_bytes)
    with again, again.map() as mapping:
        gpu.fill(mapping.address, 1, MIB)
    expect(mapping.unmapped, "closed, but not unmapped")


def _in_thread(work: Callable[[], None]) -> str:
    told: list[str] = []

    def run() -> None:
        try:
            work()
        except KvpageError as error:
            told.append(error.message)
        else:
            told.append("works")

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return told[0] if told else "raised"


def cycles(trial: Trial) -> None:
    """Importing, mapping and closing, over and over, leaves nothing behind; the last descriptor frees the memory."""
    gpu = Gpu(trial.device_uuid)
    with CudaVmmMemory(gpu.uuid).create(SIZE_BYTES) as chunk:
        leaves_nothing_behind(trial, gpu, "import, map, close", SIZE_BYTES, lambda: _import_and_close(gpu, chunk))
        held_bytes = gpu.free_bytes()
    freed_bytes = gpu.free_bytes() - held_bytes
    trial.saw(f"{freed_bytes} bytes became free when the chunk of {SIZE_BYTES} was closed")
    expect(freed_bytes > SIZE_BYTES // 2, "the memory did not become free with the last descriptor")


def leaves_nothing_behind(trial: Trial, gpu: Gpu, what: str, size_bytes: int, cycle: Callable[[], None]) -> None:
    """Raises `Failed` when many times `cycle` cost a descriptor, or as much of the device as one of them maps."""
    for _ in range(NUM_FIRST_CYCLES):
        cycle()
    free_bytes, num_fds = gpu.free_bytes(), _num_fds()
    for _ in range(NUM_CYCLES):
        cycle()
    lost_bytes, lost_fds = free_bytes - gpu.free_bytes(), _num_fds() - num_fds
    trial.row(
        "Over and over",
        what=what,
        cycles=NUM_CYCLES,
        MiB=size_bytes // MIB,
        device_bytes_lost=lost_bytes,
        descriptors_lost=lost_fds,
    )
    expect(lost_fds <= 0, f"{lost_fds} descriptors are left")
    expect(lost_bytes < size_bytes, f"{lost_bytes} bytes of device memory are left")


def _num_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def closed_under_kernels(trial: Trial) -> None:
    """`close` waits for kernels that use the memory, and none of them fails."""
    gpu = Gpu(trial.device_uuid)
    torch = torch_on(gpu.uuid)
    with CudaVmmMemory(gpu.uuid).create(KERNEL_BYTES) as chunk:
        mapping = chunk.map()
        tensor = bytes_of(mapping).view(torch.int32)
        done = _queue_kernels(torch, tensor)
        was_running = not done.query()
        started_s = time.monotonic()
        del tensor
        mapping.close()
        waited_ms = (time.monotonic() - started_s) * 1000
        expect(mapping.unmapped, "the memory is still mapped after close")
        expect(done.query(), "close returned while kernels were running")
        torch.cuda.synchronize()
    trial.row(
        "Unmapping while kernels run", how="kvpage close", kernels_ran=str(was_running), took_ms=round(waited_ms, 2)
    )
    expect(was_running, "the kernels had ended before close: nothing was shown")


def unmapped_under_kernels(trial: Trial) -> None:
    """Whether the driver's own unmapping waits for kernels: this is why kvpage waits first. A sacrificial process."""
    gpu = Gpu(trial.device_uuid)
    torch = torch_on(gpu.uuid)
    with CudaVmmMemory(gpu.uuid).create(KERNEL_BYTES) as chunk:
        mapping = chunk.map()
        done = _queue_kernels(torch, bytes_of(mapping).view(torch.int32))
        was_running = not done.query()
        started_s = time.monotonic()
        with gpu.current():
            gpu.driver.unmap(mapping.address, gpu.rounded(KERNEL_BYTES))
        took_ms = (time.monotonic() - started_s) * 1000
        still_running = _running(done)
    trial.row("Unmapping while kernels run", how="cuMemUnmap", kernels_ran=str(was_running), took_ms=round(took_ms, 2))
    trial.saw(f"cuMemUnmap returned {'while kernels were running' if still_running else 'when no kernel was running'}")
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        trial.saw(f"the kernels then failed: {str(error).splitlines()[0]}")
    else:
        trial.saw("no kernel failed")
    trial.verdict("pass")
    os._exit(0)  # the context may be past repair, and the mapping is gone behind kvpage's back


def _queue_kernels(torch: Any, tensor: Any) -> Any:
    """An event behind kernels that write all of `tensor`, one after the other."""
    tensor.add_(1)
    torch.cuda.synchronize()
    for _ in range(NUM_KERNELS):
        tensor.add_(1)
    done = torch.cuda.Event()
    done.record()
    return done


def _running(done: Any) -> bool:
    try:
        return not done.query()
    except RuntimeError:  # a kernel has failed
        return False
