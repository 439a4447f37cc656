"""What the CUDA driver refuses, as errors that say what was asked for, of which device, and what is likely wrong."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from kvpage.errors import DeviceUnavailable, InternalError, KvpageError, NotEnoughMemory, NotSupported, ProtocolError

log = logging.getLogger("kvpage")

_STICKY = frozenset({214, 220, 700, 701, 702, 709, 714, 715, 716, 717, 718, 719})  # CUresult, as all numbers here
"""After one of these the context answers every further call with the same: only the end of the process cleans up."""


class _Kind(NamedTuple):
    error: type[KvpageError]
    cause: str


_KINDS = {
    2: _Kind(
        NotEnoughMemory,
        "the device's memory is used up, by other programs or by clients that still map what was deleted; kvpage"
        " doctor shows what is free",
    ),
    3: _Kind(
        NotSupported,
        "this process was forked from one that uses CUDA, and the driver does not work in such a child: start it with"
        " spawn instead, multiprocessing.get_context('spawn'), or as a program of its own",
    ),
    4: _Kind(DeviceUnavailable, "the process is ending, the driver has been shut down in it"),
    34: _Kind(NotSupported, "only a stub of the driver library was found; install the NVIDIA driver"),
    100: _Kind(
        NotSupported,
        "no device can be seen: a container started without it (--gpus, nvidia.com/gpu), or CUDA_VISIBLE_DEVICES hides"
        " it",
    ),
    101: _Kind(NotSupported, "CUDA_VISIBLE_DEVICES hides the device, or its number has changed"),
    201: _Kind(InternalError, "no context is current in this thread"),
    304: _Kind(
        DeviceUnavailable,
        "the operating system refused: the limit of open files, a container that lacks a /dev/nvidia* file, or another"
        " user namespace",
    ),
    800: _Kind(NotSupported, "a container or security profile forbids it, or the device is in exclusive mode"),
    801: _Kind(
        NotSupported,
        "this device or its driver cannot do it, as WSL2, vGPU and some MIG instances cannot; kvpage doctor shows what"
        " it can",
    ),
    999: _Kind(DeviceUnavailable, "the driver does not say; the kernel log (dmesg, Xid) may"),
}
_NOT_OURS = _Kind(
    ProtocolError,
    "the descriptor or handle names no memory of this driver and size: it is of another kind, machine or owner",
)
_REFUSALS = {
    "cuMemImportFromShareableHandle": (1, 400),
    "cuMemMap": (1, 400),
    "cuIpcOpenMemHandle": (1, 205, 400),
}
"""What these say of a descriptor or handle that is not what it was said to be."""
_UNKNOWN = _Kind(InternalError, "")


def driver_error(operation: str, code: int, name: str, facts: dict[str, Any]) -> KvpageError:
    """The error for CUresult `code`, called `name`, of driver function `operation`; `facts` become its details."""
    kind = _KINDS.get(code, _UNKNOWN)
    if code in _REFUSALS.get(operation, ()):
        kind = _NOT_OURS
    if operation in ("cuCtxSynchronize", "cuMemcpyDtoH", "cuMemsetD8") and code in _STICKY:
        kind = _Kind(DeviceUnavailable, "earlier work on the device has failed; only the end of this process cleans up")
    about = ", ".join(f"{key} {value}" for key, value in facts.items())
    message = f"{operation} failed with {name} ({code})" + (f": {about}" if about else "")
    if kind.cause:
        message += f"; likely cause: {kind.cause}"
    details = {**facts, "operation": operation, "driver_code": code, "driver_error": name}
    return kind.error(message, details=details)


def quietly(undo: Callable[..., None], *arguments: Any) -> None:
    """An error while undoing is told to the log, and does not hide the first one."""
    try:
        undo(*arguments)
    except KvpageError as error:
        log.error("%s", error)
