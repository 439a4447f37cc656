"""What a report says of the machine and of the software that it was made with."""

from __future__ import annotations

import os
import platform
import re
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from vllm_peer import vllm

PACKAGES = ("kvpage", "numpy", "torch", "fastapi", "uvicorn", "httpx", "transformers")


def facts() -> dict[str, str]:
    """Take them before anything is measured: the load is that of others then."""
    load = os.getloadavg()[0]
    others = "others used the machine" if load >= 0.5 else "nobody else used the machine"
    return {
        "command": "`make bench`",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{os.cpu_count()} cores, {_processor()}, {_memory_gib()} GiB",
        "system": f"{platform.system()} {platform.release().partition('-')[0]}, Python {platform.python_version()}",
        "packages": ", ".join(f"{name} {_version(name)}" for name in PACKAGES),
        "vLLM": vllm_version(),
        "load before it began": f"{load:.1f} on average over a minute: {others}",
    }


def vllm_version() -> str:
    modules = vllm()
    return "not there" if modules is None else f"{modules.version}: its planner and its block pool, loaded alone"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not there"


def _processor() -> str:
    found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1].strip() if found else platform.machine()


def _memory_gib() -> int:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30))
