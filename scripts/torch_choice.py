"""Which torch to install: facts about the machine in, one choice out. Pure, so every case is a test."""

from __future__ import annotations

from dataclasses import dataclass

CHOOSING = (
    "To choose: KVPAGE_TORCH takes what pip should install (a requirement or the path of a wheel), and "
    "KVPAGE_TORCH_INDEX the address of a package index with CPU builds, named on PyTorch's install page."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFacts:
    """What the choice depends on; None where there is nothing."""

    importable: str | None = None
    """Version of the torch that the environment can import already."""
    wanted: str | None = None
    """KVPAGE_TORCH: what the user told pip to install."""
    cpu_build: str | None = None
    """Exact CPU build that pip's configured sources hold, such as "2.13.0+cpu"."""
    nvidia_driver: bool = False
    cpu_index: str | None = None
    """KVPAGE_TORCH_INDEX: address of an index with CPU builds."""
    system: str = "Linux"
    """As `platform.system()` names it; elsewhere the default build is the CPU build."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchChoice:
    """What to do about torch, and the sentence that tells the user."""

    step: str
    """wanted, importable, cpu-build, nvidia, cpu-index or default."""
    pip_arguments: tuple[str, ...]
    """What follows `pip install`; empty when nothing is to be installed."""
    message: str


def choose_torch(facts: TorchFacts) -> TorchChoice:
    """Take the first source that applies, from the user's own word down to the default build.

    An exact CPU build comes before the version range of the `torch` extra: given a range, pip takes the highest
    version it sees, and that is a CUDA build of several gigabytes as soon as one is newer than the CPU build.
    """
    if facts.wanted is not None:
        return TorchChoice(step="wanted", pip_arguments=(facts.wanted,), message=f"KVPAGE_TORCH={facts.wanted}")
    if facts.importable is not None:
        return TorchChoice(step="importable", pip_arguments=(), message=f"using the installed {facts.importable}")
    if facts.cpu_build is not None:
        return TorchChoice(
            step="cpu-build",
            pip_arguments=(f"torch=={facts.cpu_build}",),
            message=_cpu_build_message(facts.cpu_build, nvidia_driver=facts.nvidia_driver),
        )
    if facts.nvidia_driver:
        message = "an NVIDIA driver is present: installing the CUDA build, several gigabytes"
        return TorchChoice(step="nvidia", pip_arguments=("torch",), message=message)
    if facts.cpu_index is not None:
        arguments = ("torch", "--index-url", facts.cpu_index)
        return TorchChoice(step="cpu-index", pip_arguments=arguments, message="taking it from KVPAGE_TORCH_INDEX")
    return TorchChoice(step="default", pip_arguments=("torch",), message=_default_message(facts.system))


def _cpu_build_message(version: str, *, nvidia_driver: bool) -> str:
    message = f"the configured package sources hold the CPU build {version}: installing it, about 200 MB"
    if nvidia_driver:
        message += ". An NVIDIA driver is present too: KVPAGE_TORCH=torch installs the CUDA build instead"
    return message


def _default_message(system: str) -> str:
    if system != "Linux":
        return "installing the default build, which on this system is the CPU build"
    return (
        "no NVIDIA driver here and no CPU build in the configured package sources. Going on with the default build, "
        "which brings the CUDA libraries: several gigabytes to download and to store. " + CHOOSING
    )
