"""What a descriptor that a peer sent can be, as far as that can be told without the driver."""

from __future__ import annotations

import fcntl
import os
import select
import stat
from pathlib import Path

from kvpage.errors import ProtocolError, StaleHandle


def check_exported_memory(fd: int, size_bytes: int) -> None:
    """Raises `ProtocolError` unless `fd` may be what a driver exports: a device file of NVIDIA's, a DMA buffer, or a
    file as large as the memory. Whether it is, the driver says when the memory is mapped.
    """
    status = os.fstat(fd)
    target = os.readlink(f"/proc/self/fd/{fd}")
    if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_PATH:
        fault = "it was opened with O_PATH"
    elif stat.S_ISCHR(status.st_mode):
        fault = "" if is_nvidia(os.major(status.st_rdev)) else "this device is not one of NVIDIA's (/proc/devices)"
    elif stat.S_ISREG(status.st_mode) and not target.startswith("/memfd:"):
        fault = "" if status.st_size >= size_bytes else f"it has {status.st_size} bytes, announced were {size_bytes}"
    else:
        fault = "" if target.startswith("/dmabuf:") else "no driver names memory by that"
    if fault:
        raise ProtocolError(f"descriptor {fd} ({target}) cannot name device memory: {fault}")


def is_nvidia(major: int, listed: Path = Path("/proc/devices")) -> bool:
    """Whether a driver of NVIDIA's has the character devices of this major number: nvidia, nvidiactl, nvidia-uvm, …"""
    characters = listed.read_text().split("Block devices:")[0].splitlines()
    return any(line.split()[0] == str(major) and "nvidia" in line for line in characters if line.strip())


def check_lifeline(fd: int) -> None:
    """Raises `ProtocolError` unless `fd` is the end for writing of a pipe, `StaleHandle` when its holder has ended."""
    if not stat.S_ISFIFO(os.fstat(fd).st_mode) or fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_WRONLY:
        raise ProtocolError(f"descriptor {fd} is no end of a pipe for writing, as a lifeline is")
    if holder_has_ended(fd):
        raise holder_ended()


def holder_has_ended(lifeline: int) -> bool:
    """Whether nobody reads from the lifeline any more: the process that holds the memory has the only other end."""
    poll = select.poll()
    poll.register(lifeline, 0)  # POLLERR, which is told always
    return bool(poll.poll(0))


def holder_ended() -> StaleHandle:
    return StaleHandle(
        "the process that held the memory has ended, killed for example, and the memory is lost with it; delete the"
        " pool and create it again"
    )
