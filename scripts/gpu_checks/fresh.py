"""What is in memory that nobody has written yet, and what holding memory costs."""

from __future__ import annotations

import os

from gpu_checks.gpu import MIB, Gpu
from gpu_checks.machine import smi
from gpu_checks.peer import Peer
from gpu_checks.trial import Trial, expect
from kvpage.memory.cuda import CudaVmmMemory

SIZE_BYTES = 256 * MIB
NUM_TRIES = 2
_OVERHEAD_BYTES = 32 * MIB  # less than any context takes
_DIRT = 0xA5


def is_zero(trial: Trial) -> None:
    """Memory of a pool is zero, whatever was there before. Whether the driver's own is: only told."""
    gpu = Gpu(trial.device_uuid)
    size_bytes = gpu.rounded(SIZE_BYTES)
    for attempt in range(NUM_TRIES):
        _dirty(gpu, size_bytes)
        with gpu.raw_chunk(size_bytes) as handle, gpu.raw_mapping(handle, size_bytes) as address:
            raw = gpu.read(address, size_bytes)
        _dirty(gpu, size_bytes)
        with CudaVmmMemory(gpu.uuid).create(size_bytes) as chunk, chunk.map() as mapping:
            pool = gpu.read(mapping.address, size_bytes)
        for what, seen in (("cuMemCreate", raw), ("kvpage", pool)):
            trial.row(
                "New memory after other memory was written and freed",
                attempt=attempt + 1,
                by=what,
                bytes_not_zero=len(seen) - seen.count(0),
                bytes_of_the_former_owner=seen.count(_DIRT),
                of=size_bytes,
            )
        expect(pool.count(0) == size_bytes, "a new pool is not zero")


def _dirty(gpu: Gpu, size_bytes: int) -> None:
    with gpu.raw_chunk(size_bytes) as handle, gpu.raw_mapping(handle, size_bytes) as address:
        gpu.fill(address, _DIRT, size_bytes)


def holding_costs_no_context(trial: Trial) -> None:
    """A process that makes and holds memory, as a worker does, has no context on the device and takes no more of it."""
    gpu = Gpu(trial.device_uuid)
    before_bytes = gpu.free_bytes()
    with Peer(gpu.uuid) as holder:
        holder.do("create", size_bytes=SIZE_BYTES)
        held_bytes = before_bytes - gpu.free_bytes()
        pids = compute_pids()
        trial.row("What holding memory takes", MiB_held=SIZE_BYTES // MIB, MiB_less_free=round(held_bytes / MIB, 1))
        expect(held_bytes < SIZE_BYTES + _OVERHEAD_BYTES, f"{held_bytes} bytes less are free")
        expect(held_bytes >= SIZE_BYTES // 2, f"only {held_bytes} bytes less are free: the memory is not counted")
        trial.saw(_listed(pids, holder.pid))
        expect(holder.pid not in pids, "nvidia-smi lists the process that holds the memory among those that compute")
        holder.do("bind")
        with_context_bytes = before_bytes - gpu.free_bytes() - held_bytes
    trial.saw(f"a context in that process would take {with_context_bytes / MIB:.0f} MiB")


def _listed(pids: set[int], holder_pid: int) -> str:
    if os.getpid() not in pids:
        return "nvidia-smi does not list this process, which has a context: its list says nothing here"
    return (
        f"nvidia-smi lists this process, which has a context, and {'also' if holder_pid in pids else 'not'} the holder"
    )


def compute_pids() -> set[int]:
    """Processes with a context, as nvidia-smi sees them; empty where it sees none."""
    return {int(pid) for pid in smi("--query-compute-apps=pid").split() if pid.isdigit()}
