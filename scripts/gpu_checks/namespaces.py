"""Sharing with a process in other PID and IPC namespaces, as in another container."""

from __future__ import annotations

import base64
import os
import subprocess

from gpu_checks.gpu import MIB, Gpu
from gpu_checks.peer import Peer, PeerDied, PeerFailed
from gpu_checks.trial import Skip, Trial, expect
from kvpage.memory.cuda import CudaIpcMemory, CudaVmmMemory

SIZE_BYTES = 32 * MIB
_WAYS = (
    ("unshare", "--pid", "--ipc", "--fork", "--kill-child"),
    ("unshare", "--user", "--map-root-user", "--pid", "--ipc", "--fork", "--kill-child"),
)


def by_descriptor(trial: Trial) -> None:
    """`cuda_vmm` must work there: nothing but the descriptor is shared."""
    _share(trial, CudaVmmMemory(trial.device_uuid))
    trial.saw(f"written there, read here, {SIZE_BYTES // MIB} MiB")


def by_handle(trial: Trial) -> None:
    """Whether `cuda_ipc` works there is only told: kvpage promises nothing."""
    try:
        _share(trial, CudaIpcMemory(trial.device_uuid))
    except (PeerFailed, PeerDied) as error:
        trial.saw(f"refused: {error}")
    else:
        trial.saw("works")


def _share(trial: Trial, memory: CudaVmmMemory | CudaIpcMemory) -> None:
    gpu = Gpu(trial.device_uuid)
    prefix = permitted()
    with memory.create(SIZE_BYTES) as chunk, chunk.map() as mapping, Peer(gpu.uuid, prefix=prefix) as peer:
        there = peer.do("who")
        for space in ("pid", "ipc"):
            expect(there[space] != os.readlink(f"/proc/thread-self/ns/{space}"), f"the {space} namespace is the same")
        trial.saw(f"by {' '.join(prefix)}; it calls itself process {there['number']}")
        handle = base64.b64encode(chunk.handle).decode()
        peer.do("attach", fd=chunk.fd, size_bytes=SIZE_BYTES, kind=memory.handle_kind, handle=handle)
        peer.do("fill", value=0x3C, size_bytes=SIZE_BYTES)
        expect(set(gpu.read(mapping.address, SIZE_BYTES)) == {0x3C}, "what was written there is not seen here")
        peer.do("detach")


def permitted() -> tuple[str, ...]:
    """The command that runs another in namespaces of its own. Raises `Skip` when this process may not."""
    refused = []
    for way in _WAYS:
        try:
            done = subprocess.run([*way, "true"], capture_output=True, text=True, check=False, timeout=10)
        except OSError as error:
            raise Skip(f"unshare cannot be run: {error}") from error
        if done.returncode == 0:
            return way
        refused.append(done.stderr.strip() or f"status {done.returncode}")
    raise Skip(f"this process may not make namespaces: {'; '.join(refused)}")
