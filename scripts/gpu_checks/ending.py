"""Processes killed by SIGKILL while others share memory with them."""

from __future__ import annotations

import base64
import os
import select
import time

from gpu_checks.gpu import MIB, Gpu
from gpu_checks.peer import Peer, PeerDied, PeerFailed, wait_until_gone
from gpu_checks.tensors import torch_device
from gpu_checks.trial import Trial, expect
from kvpage.memory.cuda import CudaIpcMemory, CudaVmmMemory
from kvpage.memory.cuda_maker import HOLDERS

SIZE_BYTES = 64 * MIB
KERNEL_BYTES = 512 * MIB
_SLACK_BYTES = 32 * MIB  # what the driver keeps for itself, of a process that has a context
_PATIENCE_S = 20.0


def exporter(trial: Trial) -> None:
    """Whoever made and gave the memory is killed; the one who mapped it goes on reading and writing."""
    gpu = Gpu(trial.device_uuid)
    with Peer(gpu.uuid) as maker, Peer(gpu.uuid) as other:
        made = maker.do("create", size_bytes=SIZE_BYTES)
        with CudaVmmMemory(gpu.uuid).import_chunk(made["fd"], SIZE_BYTES) as chunk, chunk.map() as mapping:
            gpu.fill(mapping.address, 0x11, SIZE_BYTES)
            wait_until_gone(maker.kill())
            expect(set(gpu.read(mapping.address, SIZE_BYTES)) == {0x11}, "the bytes have changed")
            gpu.fill(mapping.address, 0x22, SIZE_BYTES)
            expect(set(gpu.read(mapping.address, SIZE_BYTES)) == {0x22}, "it cannot be written any more")
            other.do("attach", fd=chunk.fd, size_bytes=SIZE_BYTES)
            there = other.do("read", size_bytes=2)["bytes"]
            expect(there == "2222", f"a process that attached afterwards sees {there}")
    trial.saw("read, written, and attached by a third process afterwards")


def importer(trial: Trial) -> None:
    """A process is killed while its kernels write to the memory, which only it still holds: it becomes free."""
    gpu = Gpu(trial.device_uuid)
    torch_device(gpu.uuid)
    with Peer(gpu.uuid) as peer:
        with CudaVmmMemory(gpu.uuid).create(KERNEL_BYTES) as chunk:
            peer.do("attach", fd=chunk.fd, size_bytes=KERNEL_BYTES)
        peer.do("spin")
        before_bytes = gpu.free_bytes()
        pidfd = peer.kill()
        gone_ms, free_ms, free_when_gone = _watch(gpu, pidfd, before_bytes + KERNEL_BYTES - _SLACK_BYTES)
        returned = gpu.free_bytes() - before_bytes
    trial.row(
        "A process killed during its kernels",
        shared_MiB=KERNEL_BYTES // MIB,
        free_again_MiB=returned // MIB,
        until_pidfd_ms=round(gone_ms, 1),
        until_free_ms=round(free_ms, 1),
    )
    trial.saw(f"when its pidfd became readable, the memory was {'free' if free_when_gone else 'not yet free'}")


def _watch(gpu: Gpu, pidfd: int, wanted_bytes: int) -> tuple[float, float, bool]:
    """Milliseconds from now until the process is gone and until the memory is free, and whether it was so by then.

    Raises `Failed` when it does not become free.
    """
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    started_s = time.monotonic()
    gone_ms = free_ms = None
    free_when_gone = False
    while gone_ms is None or free_ms is None:
        gone_now = gone_ms is None and bool(poll.poll(0))
        free_now = free_ms is None and gpu.free_bytes() >= wanted_bytes
        now_ms = (time.monotonic() - started_s) * 1000
        if free_now:
            free_ms = now_ms
        if gone_now:
            gone_ms = now_ms
            free_when_gone = free_ms is not None
        expect(now_ms < _PATIENCE_S * 1000, f"the memory is not free {_PATIENCE_S:g} s after the kill")
    os.close(pidfd)
    return gone_ms, free_ms, free_when_gone


def ipc_holder(trial: Trial) -> None:
    """The process that holds `cuda_ipc` memory is killed: what becomes of those who opened it, and of who opens."""
    gpu = Gpu(trial.device_uuid)
    with CudaIpcMemory(gpu.uuid).create(SIZE_BYTES) as chunk, Peer(gpu.uuid) as reader, Peer(gpu.uuid) as late:
        arguments = {"size_bytes": SIZE_BYTES, "kind": "cuda_ipc", "handle": base64.b64encode(chunk.handle).decode()}
        reader.do("attach", fd=chunk.fd, **arguments)
        reader.do("fill", value=0x11, size_bytes=SIZE_BYTES)
        [holder] = HOLDERS
        holder.kill()
        holder.wait()
        trial.saw(f"who had opened it reads {_tried(reader, 'read', size_bytes=2)}")
        trial.saw(f"a new open: {_tried(late, 'attach', fd=chunk.fd, **arguments)}")
    with Peer(gpu.uuid) as afterwards, CudaVmmMemory(gpu.uuid).create(SIZE_BYTES) as chunk:
        afterwards.do("attach", fd=chunk.fd, size_bytes=SIZE_BYTES)
    trial.saw("the device serves others as before")


def _tried(peer: Peer, command: str, **arguments: object) -> str:
    try:
        answer = peer.do(command, **arguments)  # type: ignore[arg-type] # fd among them
    except (PeerFailed, PeerDied) as error:
        return f"refused: {error}"
    return str(answer.get("bytes", "works"))
