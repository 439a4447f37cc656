"""How much host memory can be committed before the kernel would begin to end processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from kvpage.errors import DeviceUnavailable

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")


def available_host_bytes(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """The least of what the machine reports as available and what each control group above this process leaves."""
    return max(0, min([_machine_bytes(proc), *_group_bytes(proc, cgroups)]))


def _machine_bytes(proc: Path) -> int:
    fields = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines() if ":" in line)
    try:
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (KeyError, IndexError, ValueError) as error:
        raise DeviceUnavailable(f"{proc / 'meminfo'} has no MemAvailable; Linux 3.14 or newer is needed") from error


def _group_bytes(proc: Path, cgroups: Path) -> Iterator[int]:
    for line in _lines(proc / "self" / "cgroup"):
        _, controllers, group = line.split(":", 2)
        if not controllers:
            yield from _left_in_each(cgroups, group, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            version_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _left_in_each(cgroups / "memory", group, *version_1)


def _left_in_each(root: Path, group: str, limit: str, usage: str, reclaimable: str) -> Iterator[int]:
    """In a container the group's path may name folders that are not visible here; the root then stands for them."""
    path = PurePosixPath(group.lstrip("/"))
    for folder in dict.fromkeys(root / part for part in (path, *path.parents)):
        limit_bytes, usage_bytes = _number(folder / limit), _number(folder / usage)
        if limit_bytes is not None and usage_bytes is not None:
            yield limit_bytes - usage_bytes + _statistic(folder / "memory.stat", reclaimable)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    """The number in a one-line file; None for `max` and where there is no such file."""
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdecimal() else None


def _statistic(path: Path, name: str) -> int:
    values = (line.split() for line in _lines(path))
    return next((int(value[1]) for value in values if value[0] == name), 0)
