"""Memory shared by descriptor between unrelated processes."""

from __future__ import annotations

import base64

from gpu_checks.gpu import MIB, Gpu
from gpu_checks.peer import Peer, PeerDied, PeerFailed
from gpu_checks.tensors import bytes_of, torch_device
from gpu_checks.trial import Skip, Trial, expect
from kvpage.memory.cuda import CudaIpcMemory, CudaVmmMemory
from kvpage.memory.cuda_mapping import CudaMapping

SIZE_BYTES = 64 * MIB
_HALF = SIZE_BYTES // 2


def by_driver(trial: Trial) -> None:
    """What one side writes with the driver the other reads; a second mapping in one process shows it too."""
    gpu = Gpu(trial.device_uuid)
    with CudaVmmMemory(gpu.uuid).create(SIZE_BYTES) as chunk, Peer(gpu.uuid) as peer:
        with chunk.map() as one, chunk.map() as other:
            peer.do("attach", fd=chunk.fd, size_bytes=SIZE_BYTES)
            peer.do("fill", value=0x11, size_bytes=_HALF)
            gpu.fill(one.address + _HALF, 0x22, _HALF)
            for mapping in (one, other):
                seen = gpu.read(mapping.address, SIZE_BYTES)
                expect(seen == b"\x11" * _HALF + b"\x22" * _HALF, "the bytes of the other process are not seen here")
            there = bytes.fromhex(peer.do("read", offset=_HALF - 2, size_bytes=4)["bytes"])
            expect(there == b"\x11\x11\x22\x22", f"the other process sees {there.hex()}")
            expect(peer.do("detach")["unmapped"], "the other process could not unmap it")
    trial.saw(f"{SIZE_BYTES // MIB} MiB, both ways, and through a second mapping of the same process")


def by_kernel(trial: Trial) -> None:
    """What a kernel of one process writes a kernel of the other reads."""
    gpu = Gpu(trial.device_uuid)
    torch_device(gpu.uuid)
    with CudaVmmMemory(gpu.uuid).create(SIZE_BYTES) as chunk, Peer(gpu.uuid) as peer, chunk.map() as mapping:
        peer.do("attach", fd=chunk.fd, size_bytes=SIZE_BYTES)
        _exchange_by_kernel(gpu, mapping, peer)
    trial.saw(f"{SIZE_BYTES // MIB} MiB, both ways")


def _exchange_by_kernel(gpu: Gpu, mapping: CudaMapping, peer: Peer) -> None:
    here = bytes_of(mapping)
    peer.do("kernel_fill", value=0x33, size_bytes=_HALF)
    here[_HALF:].fill_(0x44)
    gpu.synchronize()
    expect(bool((here[:_HALF] == 0x33).all()), "a kernel here does not see what a kernel there wrote")
    there = bytes.fromhex(peer.do("read", offset=_HALF - 1, size_bytes=2)["bytes"])
    expect(there == b"\x33\x44", f"the other process sees {there.hex()}")


def by_handle(trial: Trial) -> None:
    """The same by the 64-byte handle of `cuda_ipc`."""
    gpu = Gpu(trial.device_uuid)
    with CudaIpcMemory(gpu.uuid).create(SIZE_BYTES) as chunk, Peer(gpu.uuid) as peer, chunk.map() as mapping:
        handle = base64.b64encode(chunk.handle).decode()
        peer.do("attach", fd=chunk.fd, size_bytes=SIZE_BYTES, kind="cuda_ipc", handle=handle)
        peer.do("fill", value=0x55, size_bytes=_HALF)
        gpu.fill(mapping.address + _HALF, 0x66, _HALF)
        seen = gpu.read(mapping.address, SIZE_BYTES)
        expect(seen == b"\x55" * _HALF + b"\x66" * _HALF, "the bytes of the other process are not seen here")
        there = bytes.fromhex(peer.do("read", offset=_HALF - 1, size_bytes=2)["bytes"])
        expect(there == b"\x55\x66", f"the other process sees {there.hex()}")
        expect(peer.do("detach")["unmapped"], "the other process could not unmap it")
        trial.saw(f"{SIZE_BYTES // MIB} MiB, both ways, written by the driver")
        try:
            torch_device(gpu.uuid)
        except Skip as reason:
            trial.saw(f"no kernel was tried: {reason}")
        else:
            peer.do("attach", fd=chunk.fd, size_bytes=SIZE_BYTES, kind="cuda_ipc", handle=handle)
            _exchange_by_kernel(gpu, mapping, peer)
            trial.saw("and by kernels")


def read_only(trial: Trial) -> None:
    """A read-only mapping can be read, and a write through it fails in the process that tries, and only there."""
    gpu = Gpu(trial.device_uuid)
    with CudaVmmMemory(gpu.uuid).create(SIZE_BYTES) as chunk, Peer(gpu.uuid) as peer, chunk.map() as mapping:
        gpu.fill(mapping.address, 0x77, SIZE_BYTES)
        peer.do("attach", fd=chunk.fd, size_bytes=SIZE_BYTES, writable=False)
        there = peer.do("read", size_bytes=2)["bytes"]
        expect(there == "7777", f"a read-only mapping shows {there}")
        trial.saw(f"driver's fill: {_refusal(peer, 'fill')}")
        expect(set(gpu.read(mapping.address, SIZE_BYTES)) == {0x77}, "it was written through a read-only mapping")
    trial.saw("the bytes are as before, the process that maps them for writing is not harmed")


def read_only_for_kernels(trial: Trial) -> None:
    """The same for a kernel."""
    gpu = Gpu(trial.device_uuid)
    torch_device(gpu.uuid)
    with CudaVmmMemory(gpu.uuid).create(SIZE_BYTES) as chunk, Peer(gpu.uuid) as peer, chunk.map() as mapping:
        gpu.fill(mapping.address, 0x77, SIZE_BYTES)
        peer.do("attach", fd=chunk.fd, size_bytes=SIZE_BYTES, writable=False)
        trial.saw(f"kernel: {_refusal(peer, 'kernel_fill')}")
        expect(bool((bytes_of(mapping) == 0x77).all()), "a kernel wrote through a read-only mapping")
    trial.saw("the bytes are as before, the process that maps them for writing is not harmed")


def _refusal(peer: Peer, command: str) -> str:
    try:
        peer.do(command, value=0, size_bytes=SIZE_BYTES)
    except (PeerFailed, PeerDied) as error:
        return str(error)
    return "not refused"
