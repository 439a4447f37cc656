"""NVIDIA devices: the driver, and what each device can share, by a real round trip."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from kvpage.doctor.findings import Finding
from kvpage.errors import KvpageError, how_to_install
from kvpage.memory.cuda import probe
from kvpage.memory.cuda_device import CudaDevice, visible_devices
from kvpage.memory.cuda_driver import CudaDriver

_DEVICE_FILES = Path("/dev")


def check_devices(device_files: Path = _DEVICE_FILES) -> Iterator[Finding]:
    files = sorted(path.name for path in device_files.glob("nvidia[0-9]*"))
    try:
        driver = CudaDriver()
    except KvpageError as error:
        yield _no_driver(files, error)
        return
    version = driver.version()
    devices = visible_devices(driver)
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    limit = "" if hidden is None else f", CUDA_VISIBLE_DEVICES={hidden}"
    text = f"supports CUDA {version // 1000}.{version % 1000 // 10}, {len(devices)} devices visible{limit}"
    yield Finding("NVIDIA driver", "ok", text)
    for device in devices:
        yield from _device(device)


def _no_driver(files: list[str], error: KvpageError) -> Finding:
    if not files:
        return Finding("NVIDIA driver", "absent", f"{error.message}; pools are in host memory")
    return Finding(
        "NVIDIA driver",
        "problem",
        f"the files {', '.join(files)} are there, but the driver cannot be used: {error.message}",
        f"start the container with the driver's libraries (NVIDIA container toolkit); {how_to_install('cuda')}",
    )


def _device(device: CudaDevice) -> Iterator[Finding]:
    topic = f"cuda:{device.ordinal}"
    try:
        facts = probe(device.uuid)
    except KvpageError as error:
        yield Finding(topic, "problem", f"{device.uuid} ({device.name}) cannot be used: {error.message}")
        return
    memory = f"{facts.free_bytes:,} of {facts.total_bytes:,} bytes free, allocated in {facts.granularity_bytes:,}"
    yield Finding(topic, "ok", f"{facts.uuid} ({facts.name}); {memory}")
    for kind, other in (("cuda_vmm", "cuda_ipc"), ("cuda_ipc", "cuda_vmm")):
        reason = facts.unsupported.get(kind)
        if reason is None:
            yield Finding(topic, "ok", f"{kind}: written by one mapping, read by another")
        elif other in facts.unsupported:
            yield Finding(topic, "problem", f"{kind}: {reason}", "use --device host on this machine")
        else:
            yield Finding(topic, "absent", f"{kind}: {reason}", f"create pools with handle kind {other}")
