"""Python, kvpage and the packages that its parts need."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from kvpage._version import __version__
from kvpage.doctor.findings import Finding
from kvpage.errors import how_to_install

_PARTS = {
    "torch": ("torch", "tensors of attached pools"),
    "fastapi": ("server", "kvpage serve"),
    "uvicorn": ("server", "kvpage serve"),
    "cuda-bindings": ("cuda", "memory of NVIDIA devices"),
    "cuda-core": ("cuda", "tensors over memory of NVIDIA devices"),
}


def check_python() -> Iterator[Finding]:
    yield Finding("python", "ok", f"{platform.python_version()}, kvpage {__version__}, Linux {platform.release()}")


def check_packages() -> Iterator[Finding]:
    """Installed or not, by their metadata: nothing is imported."""
    for package, (extra, use) in _PARTS.items():
        try:
            yield Finding(package, "ok", version(package))
        except PackageNotFoundError:
            yield Finding(package, "absent", f"not installed; needed for {use}", how_to_install(extra))
