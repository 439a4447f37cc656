"""Which GPU and which software the other checks run on: the first check, on whose result the rest depends."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from gpu_checks.gpu import Gpu
from gpu_checks.outcome import MACHINE_TABLE
from gpu_checks.peer import Peer, PeerFailed
from gpu_checks.tensors import torch_device
from gpu_checks.trial import Failed, Skip, Trial, expect
from kvpage import __version__
from kvpage.errors import DeviceUnavailable, KvpageError
from kvpage.memory.cuda import probe
from kvpage.memory.cuda_device import visible_devices
from kvpage.memory.cuda_driver import CudaDriver

PACKAGES = ("torch", "triton", "cuda-bindings", "cuda-core", "flash-attn", "flashinfer-python")

_DEVICE_FILES = Path("/dev")


def describe(trial: Trial) -> None:
    """Skips when there is no GPU; one that is there and cannot be used is a failure."""
    try:
        devices = visible_devices(CudaDriver())
        if not devices:
            raise DeviceUnavailable("the driver shows no device")
    except KvpageError as error:
        raise no_gpu(error.message, _DEVICE_FILES) from error
    facts = probe(devices[0].uuid)
    cuda = f"{facts.driver_version // 1000}.{facts.driver_version % 1000 // 10}"
    rows = {
        "GPU": facts.name,
        "UUID": facts.uuid,
        "memory, bytes": f"{facts.free_bytes:,} of {facts.total_bytes:,} free",
        "granularity, bytes": f"{facts.granularity_bytes:,}",
        "driver": f"{kernel_driver()}, supports CUDA {cuda}",
        "kvpage": __version__,
        "Python": f"{platform.python_version()}, Linux {platform.release()}, {os.cpu_count()} CPUs",
        **{package: package_version(package) for package in PACKAGES},
    }
    for what, value in rows.items():
        trial.row(MACHINE_TABLE, what=what, value=value)
    for kind, reason in facts.unsupported.items():
        trial.saw(f"{kind} does not work: {reason}")


def no_gpu(reason: str, device_files: Path) -> Skip | Failed:
    """A machine without a GPU, or whose GPU this process was told not to see, is no failure."""
    files = sorted(path.name for path in device_files.glob("nvidia[0-9]*"))
    if files and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
        return Failed(f"{', '.join(files)} are there, but the driver cannot be used: {reason}")
    return Skip(reason)


def kernel_driver() -> str:
    """The number that NVIDIA gives its driver."""
    try:
        found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        found = None
    if found is not None:
        return found[0]
    return next(iter(smi("--query-gpu=driver_version").splitlines()), "unknown")


def smi(query: str) -> str:
    """What nvidia-smi answers; empty where there is none."""
    command = ["nvidia-smi", query, "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def package_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def same_device_for_torch(trial: Trial) -> None:
    """The device that a UUID names is the same one for kvpage and for torch, however a process numbers it."""
    gpu = Gpu(trial.device_uuid)
    torch_ordinal = torch_device(gpu.uuid).index
    expect(torch_ordinal == gpu.device.ordinal, f"torch: cuda:{torch_ordinal}, driver: cuda:{gpu.device.ordinal}")
    trial.saw(f"{gpu.uuid} is cuda:{torch_ordinal} for both")
    with Peer(gpu.uuid, environment={"CUDA_VISIBLE_DEVICES": gpu.uuid}) as peer:
        ordinals = peer.do("ordinals")
    expect(ordinals == {"driver": 0, "torch": 0}, f"alone in CUDA_VISIBLE_DEVICES it is {ordinals}")
    with Peer(gpu.uuid, environment={"CUDA_VISIBLE_DEVICES": ""}) as peer:
        try:
            peer.do("ordinals")
        except PeerFailed as refusal:
            trial.saw(f"hidden, it is refused: {refusal}")
        else:
            raise Failed("a device that CUDA_VISIBLE_DEVICES hides was found")
