"""The driver double in the test's own process, loaded once: a driver cannot be unloaded, nor told of other devices."""

from __future__ import annotations

import atexit
import ctypes
import os
from functools import cache

import torch

from kvpage.memory.base import Mapping
from support.fakecuda import FakeDevices, library

GRANULARITY_BYTES = 64 << 10


@cache
def devices_here() -> FakeDevices:
    """Two devices of 64 MiB. Skips the test when the double cannot be compiled."""
    devices = FakeDevices(2, granularity_bytes=GRANULARITY_BYTES)
    atexit.register(devices.close)
    inherited = os.environ.get("KVPAGE_FAKECUDA_DIR")
    os.environ["KVPAGE_FAKECUDA_DIR"] = str(devices.folder)
    try:
        ctypes.CDLL(str(library()), ctypes.RTLD_GLOBAL)  # before the bindings look for a driver
        from kvpage.memory.cuda_driver import CudaDriver

        assert CudaDriver().count() == 2
    finally:
        del os.environ["KVPAGE_FAKECUDA_DIR"]
        if inherited is not None:
            os.environ["KVPAGE_FAKECUDA_DIR"] = inherited
    return devices


def wrap_double(mapping: Mapping) -> torch.Tensor:
    """uint8, shape (size_bytes,), over "device" memory, which the double has in host memory."""
    array = (ctypes.c_ubyte * mapping.size_bytes).from_address(mapping.address)
    array._claim = mapping.claim  # type: ignore[attr-defined]  # torch keeps the array, and so the mapping
    return torch.frombuffer(array, dtype=torch.uint8)
