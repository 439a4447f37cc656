"""Where the time of the tests goes: for each file how long it took, and what it cost the processor.

Seconds of the clock depend on what else the machine does, those of the processor hardly do. The latter count children
too, once they have ended: a file that waits has few of them, one that starts processes many.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

_CPU = "cpu_s"


@dataclass(slots=True)
class FileTimes:
    """Of all tests of a file together, with what was set up and taken down for them."""

    tests: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    slowest_s: float = 0.0
    """By the clock, of one test."""


class FileDurations:
    """A plugin that writes the table when the run ends. Side by side, each process measures and one adds up."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last_cpu_s = cpu_seconds()
        self._test_wall_s: defaultdict[str, float] = defaultdict(float)
        self._files: defaultdict[str, FileTimes] = defaultdict(FileTimes)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        now_s = cpu_seconds()
        report.user_properties.append((_CPU, now_s - self._last_cpu_s))
        self._last_cpu_s = now_s
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        times = self._files[report.nodeid.partition("::")[0]]
        times.tests += report.when == "setup"
        times.wall_s += report.duration
        times.cpu_s += next((float(str(value)) for name, value in report.user_properties[::-1] if name == _CPU), 0.0)
        self._test_wall_s[report.nodeid] += report.duration
        times.slowest_s = max(times.slowest_s, self._test_wall_s[report.nodeid])

    def pytest_sessionfinish(self) -> None:
        if "PYTEST_XDIST_WORKER" not in os.environ:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text("\n".join(table(self._files)) + "\n")


def cpu_seconds() -> float:
    """What this process and its children that have ended used so far."""
    return sum(os.times()[:4])


def table(files: dict[str, FileTimes]) -> Iterator[str]:
    """Lines of Markdown, the file that costs most first."""
    yield "| file | tests | seconds | processor seconds | slowest test, seconds |"
    yield "| --- | --- | --- | --- | --- |"
    for name, one in sorted(files.items(), key=lambda item: -item[1].wall_s):
        yield f"| {name} | {one.tests} | {one.wall_s:.1f} | {one.cpu_s:.1f} | {one.slowest_s:.1f} |"
