"""What a report says of the machine and of the software that it was made with."""

from __future__ import annotations

import os
import platform
import re
import time
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from vllm_peer import vllm

PACKAGES = ("kvpage", "numpy", "torch", "fastapi", "uvicorn", "httpx", "transformers")


class Use:
    """Of the processors since this was made: how much of it was not ours."""

    def __init__(self) -> None:
        self._started_s = time.monotonic()
        self._busy_s, self._own_s = _busy_s(), _own_s()

    def facts(self) -> dict[str, str]:
        wall_s = time.monotonic() - self._started_s
        others_s = max(0.0, _busy_s() - self._busy_s - (_own_s() - self._own_s))
        share = others_s / (wall_s * (os.cpu_count() or 1))
        return {
            "took": f"{wall_s / 60:.1f} minutes",
            "other use meanwhile": f"{100 * share:.0f} % of the processors: other programs, or the host of the machine",
        }


def _busy_s() -> float:
    """Of all processors, with what the host took: all fields but those of idling, proc_stat(5)."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    """Of this process and the children that have ended and were waited for."""
    return sum(os.times()[:4])


def facts() -> dict[str, str]:
    return {
        "command": "`make bench`",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{os.cpu_count()} cores, {_processor()}, {_memory_gib()} GiB",
        "system": f"{platform.system()} {platform.release().partition('-')[0]}, Python {platform.python_version()}",
        "packages": ", ".join(f"{name} {_version(name)}" for name in PACKAGES),
        "vLLM": vllm_version(),
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
