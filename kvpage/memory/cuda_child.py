"""The program that makes device memory: `python -m kvpage.memory.cuda_child FD TASK DEVICE [SIZE_BYTES]`.

A worker holds memory of a device without a context on it, which would take some of that memory, and without ever
waiting for the driver. It starts this program, which allocates and clears the memory, sends what names it over the
socket FD, and ends. Whatever goes wrong here, at whichever call, the end of the process undoes it.

Tasks:
    probe   say what the device is and can do, having done it once
    vmm     memory that its descriptor alone keeps alive
    ipc     memory that a 64-byte handle names; this process then lives until the last copy of its lifeline is closed
    open    write to the memory of the IPC handle that stands on standard input: the other half of probing
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from kvpage.errors import DeviceUnavailable, KvpageError, NotEnoughMemory, NotSupported
from kvpage.memory.cuda_device import CONTEXTS, CudaDevice, find_device
from kvpage.memory.cuda_driver import CudaDriver

FILL_STEP_BYTES = 1 << 30  # how often progress is told
IPC_UNIT_BYTES = 2 << 20  # below it the driver may share a larger block, with somebody else's data in it

_NONCE = 0xC5


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """What probing a device has found."""

    uuid: str
    number: int
    """N of `cuda:N` in a process with this environment."""
    name: str
    driver_version: int
    """1000 times the major plus 10 times the minor number of the CUDA version."""
    total_bytes: int
    free_bytes: int
    """While this process's own context was there."""
    granularity_bytes: int
    """What sizes of `cuda_vmm` chunks are rounded up to."""
    unsupported: dict[str, str]
    """Handle kinds that were tried and failed, and why."""


class _Peer:
    """The process that asked."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def tell(self, **message: Any) -> None:
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def give(self, fd: int, **message: Any) -> None:
        """Send `message` with a copy of `fd`."""
        socket.send_fds(self._socket, [json.dumps(message).encode() + b"\n"], [fd])


def main(arguments: list[str]) -> int:
    peer = _Peer(socket.socket(fileno=int(arguments[0])))
    task, wanted = arguments[1:3]
    size_bytes = int(arguments[3]) if len(arguments) > 3 else 0
    try:
        driver = CudaDriver()
        device = find_device(driver, wanted)
        with CONTEXTS.current(driver, device):
            _TASKS[task](peer, driver, device, size_bytes)
    except KvpageError as error:
        peer.tell(error={"code": error.code, "message": error.message, "details": error.details})
        return 1
    return 0


# --- making memory ---------------------------------------------------------------------------------------------------


def _make_vmm(peer: _Peer, driver: CudaDriver, device: CudaDevice, size_bytes: int) -> None:
    if not driver.shares_vmm(device.ordinal):
        raise _no_vmm(device)
    asked_bytes, size_bytes = size_bytes, _rounded(size_bytes, driver.granularity_bytes(device.ordinal))
    _check_free(driver, device, asked_bytes, size_bytes)
    handle = driver.create(device.ordinal, size_bytes, device.uuid)
    fd = driver.export_fd(handle, device.uuid)
    os.set_inheritable(fd, False)
    address = _mapped(driver, device, handle, size_bytes)
    _clear(driver, address, size_bytes, peer)
    driver.unmap(address, size_bytes)
    driver.free_range(address, size_bytes)
    driver.release(handle)
    peer.give(fd, made=True, free_bytes=driver.memory_info()[0])


def _mapped(driver: CudaDriver, device: CudaDevice, handle: int, size_bytes: int) -> int:
    address = driver.reserve(size_bytes, device.uuid)
    driver.map(address, size_bytes, handle, device.uuid)
    driver.allow_access(address, size_bytes, device.ordinal, device.uuid, writable=True)
    return address


def _hold_ipc(peer: _Peer, driver: CudaDriver, device: CudaDevice, size_bytes: int) -> None:
    asked_bytes, size_bytes = size_bytes, _rounded(size_bytes, IPC_UNIT_BYTES)
    _check_free(driver, device, asked_bytes, size_bytes)
    address = driver.allocate(size_bytes, device.uuid)
    _clear(driver, address, size_bytes, peer)
    handle = driver.ipc_handle(address, device.uuid)
    ours, lifeline = os.pipe()
    peer.give(lifeline, made=True, handle=base64.b64encode(handle).decode(), free_bytes=driver.memory_info()[0])
    os.close(lifeline)
    while os.read(ours, 4096):  # nothing that anybody writes ends it, but the last copy of the lifeline being closed
        pass
    driver.free(address)


def _rounded(size_bytes: int, unit_bytes: int) -> int:
    return -(-size_bytes // unit_bytes) * unit_bytes


def _check_free(driver: CudaDriver, device: CudaDevice, asked_bytes: int, size_bytes: int) -> None:
    free_bytes, total_bytes = driver.memory_info()
    if size_bytes > free_bytes:
        raise NotEnoughMemory(
            f"{asked_bytes} bytes of device memory take {size_bytes} in whole units, {free_bytes} of {total_bytes} are"
            f" free on {device.uuid}; make the pool smaller, or end what else uses the device",
            details={
                "buffer_size_bytes": asked_bytes,
                "needed_bytes": size_bytes,
                "available_bytes": free_bytes,
                "device_uuid": device.uuid,
            },
        )


def _clear(driver: CudaDriver, address: int, size_bytes: int, peer: _Peer) -> None:
    """Fresh memory holds what its last owner left."""
    for offset in range(0, size_bytes, FILL_STEP_BYTES):
        driver.fill(address + offset, 0, min(FILL_STEP_BYTES, size_bytes - offset))
        driver.synchronize()
        peer.tell(progress=min(offset + FILL_STEP_BYTES, size_bytes))


# --- finding out what works ------------------------------------------------------------------------------------------


def _probe(peer: _Peer, driver: CudaDriver, device: CudaDevice, _: int) -> None:
    unsupported = {}
    for kind, trial in (("cuda_vmm", _try_vmm), ("cuda_ipc", _try_ipc)):
        try:
            trial(driver, device)
        except KvpageError as error:
            unsupported[kind] = error.message
    free_bytes, total_bytes = driver.memory_info()
    facts = DeviceFacts(
        uuid=device.uuid,
        number=device.ordinal,
        name=device.name,
        driver_version=driver.version(),
        total_bytes=total_bytes,
        free_bytes=free_bytes,
        granularity_bytes=IPC_UNIT_BYTES if "cuda_vmm" in unsupported else driver.granularity_bytes(device.ordinal),
        unsupported=unsupported,
    )
    peer.tell(facts=asdict(facts))


def _try_vmm(driver: CudaDriver, device: CudaDevice) -> None:
    """Export a chunk twice, import both, and see through one mapping what was written through the other."""
    if not driver.shares_vmm(device.ordinal):
        raise _no_vmm(device)
    size_bytes = driver.granularity_bytes(device.ordinal)
    with contextlib.ExitStack() as undo:
        handle = driver.create(device.ordinal, size_bytes, device.uuid)
        undo.callback(driver.release, handle)
        addresses = []
        for _ in range(2):
            fd = driver.export_fd(handle, device.uuid)
            undo.callback(os.close, fd)
            imported = driver.import_fd(fd, size_bytes, device.uuid)
            undo.callback(driver.release, imported)
            addresses.append(_mapped(driver, device, imported, size_bytes))
            undo.callback(driver.free_range, addresses[-1], size_bytes)
            undo.callback(driver.unmap, addresses[-1], size_bytes)
        driver.fill(addresses[0], _NONCE, size_bytes)
        driver.synchronize()
        check_nonce(driver, addresses[1], device)


def _try_ipc(driver: CudaDriver, device: CudaDevice) -> None:
    """Let another process open a handle and write; a process cannot open its own."""
    with contextlib.ExitStack() as undo:
        address = driver.allocate(IPC_UNIT_BYTES, device.uuid)
        undo.callback(driver.free, address)
        handle = driver.ipc_handle(address, device.uuid)
        _open_elsewhere(handle, device)
        check_nonce(driver, address, device)


def _open_elsewhere(handle: bytes, device: CudaDevice) -> None:
    # Here and not at the top: only probing starts a process.
    from kvpage.memory.cuda_maker import run_task

    run_task("open", device.uuid, IPC_UNIT_BYTES, given=handle)


def _open(peer: _Peer, driver: CudaDriver, device: CudaDevice, size_bytes: int) -> None:
    address = driver.open_ipc(sys.stdin.buffer.read(), size_bytes, device.uuid)
    driver.fill(address, _NONCE, size_bytes)
    driver.synchronize()
    driver.close_ipc(address)
    peer.tell(opened=True)


def check_nonce(driver: CudaDriver, address: int, device: CudaDevice) -> None:
    """Raises `DeviceUnavailable` when the byte that the other side wrote is not there."""
    if driver.read(address, 1) != bytes([_NONCE]):
        raise DeviceUnavailable(f"memory of {device.uuid} was shared, but what one side wrote the other did not see")


def _no_vmm(device: CudaDevice) -> NotSupported:
    return NotSupported(
        f"{device.uuid} ({device.name}) cannot share memory by descriptor: the driver reports no virtual memory"
        " management with POSIX descriptors; ask for handle kind cuda_ipc instead"
    )


_TASKS: dict[str, Callable[[_Peer, CudaDriver, CudaDevice, int], None]] = {
    "probe": _probe,
    "vmm": _make_vmm,
    "ipc": _hold_ipc,
    "open": _open,
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
