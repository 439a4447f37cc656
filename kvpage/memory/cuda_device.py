"""Which device is meant, whatever it is numbered in this process, and its context."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from kvpage.errors import NotFound, shorten
from kvpage.memory.cuda_driver import CudaDriver
from kvpage.memory.cuda_errors import quietly
from kvpage.memory.device_names import check_device_name, names_device
from kvpage.owned import uninterrupted


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """One GPU or MIG instance as this process sees it."""

    ordinal: int
    """Differs between processes with other CUDA_VISIBLE_DEVICES, so it never leaves this one."""
    uuid: str
    """`GPU-…` or `MIG-…`; the name of the device everywhere else."""
    name: str


def visible_devices(driver: CudaDriver) -> list[CudaDevice]:
    """In this process's order."""
    return [_device(driver, ordinal) for ordinal in range(driver.count())]


def _device(driver: CudaDriver, ordinal: int) -> CudaDevice:
    name = driver.name(ordinal)
    prefix = "MIG" if " MIG " in name else "GPU"  # the driver says which only in the name
    return CudaDevice(ordinal, f"{prefix}-{UUID(bytes=driver.uuid_bytes(ordinal))}", name)


def find_device(driver: CudaDriver, wanted: str) -> CudaDevice:
    """The device called `cuda:N`, N counted as in this process, or by UUID with or without its prefix.

    Raises `SpecInvalid` for any other name, `NotFound` naming what is visible when it is not among it.
    """
    check_device_name(wanted)
    devices = visible_devices(driver)
    for device in devices:
        if names_device(wanted, uuid=device.uuid, number=device.ordinal):
            return device
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    seen = ", ".join(f"cuda:{device.ordinal} = {device.uuid}" for device in devices) or "none"
    raise NotFound(
        f"device {wanted} is not visible to this process; visible are: {seen}"
        + (" (CUDA_VISIBLE_DEVICES is not set)" if hidden is None else f" (CUDA_VISIBLE_DEVICES={shorten(hidden)})")
        + "; make the same device visible to both processes",
        details={"device": wanted, "visible": [device.uuid for device in devices]},
    )


class PrimaryContexts:
    """The primary contexts this process has retained. They are kept: torch and mapped memory rely on them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._retained: dict[int, Any] = {}

    @contextlib.contextmanager
    def current(self, driver: CudaDriver, device: CudaDevice) -> Iterator[None]:
        """The device's context, current in this thread for the block; what was current before is so again after it.

        The current context belongs to a thread, so every thread that calls the driver needs this. That the old one
        could not be brought back is told to the log alone: whoever needs it hears so from the driver.
        """
        context = self._retained.get(device.ordinal)
        if context is None:
            context = uninterrupted(lambda: self._retain(driver, device))
        before = driver.current_context()
        # Setting is done again without harm, as pushing and popping is not: so after an interruption, which may come
        # at the first instruction of any call here, it does not matter which of them were made.
        try:
            driver.set_context(context)
            yield
        finally:
            try:
                quietly(driver.set_context, before)
            except BaseException:
                quietly(driver.set_context, before)
                raise

    def _retain(self, driver: CudaDriver, device: CudaDevice) -> Any:
        with self._lock:
            if device.ordinal not in self._retained:
                self._retained[device.ordinal] = driver.retain_context(device.ordinal, device.uuid)
            return self._retained[device.ordinal]


CONTEXTS = PrimaryContexts()
