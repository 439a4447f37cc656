"""How much memory is available: the least of what the machine and the control groups leave."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpage.errors import DeviceUnavailable
from kvpage.memory.host_available import available_host_bytes

GIB = 1 << 30


class Machine:
    """A made-up /proc and /sys/fs/cgroup."""

    def __init__(self, root: Path) -> None:
        self.proc, self.cgroups = root / "proc", root / "cgroup"
        self.write(self.proc / "meminfo", f"MemTotal: {64 << 20} kB\nMemFree: 1 kB\nMemAvailable: {16 << 20} kB\n")

    def write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def join(self, line: str) -> None:
        self.write(self.proc / "self" / "cgroup", line + "\n")

    def group(self, name: str, limit: object, used: int, inactive_file: int = 0) -> None:
        folder = self.cgroups / name
        self.write(folder / "memory.max", f"{limit}\n")
        self.write(folder / "memory.current", f"{used}\n")
        self.write(folder / "memory.stat", f"anon 5\ninactive_file {inactive_file}\n")

    def group_v1(self, name: str, limit: int, used: int, inactive_file: int = 0) -> None:
        folder = self.cgroups / "memory" / name
        self.write(folder / "memory.limit_in_bytes", f"{limit}\n")
        self.write(folder / "memory.usage_in_bytes", f"{used}\n")
        self.write(folder / "memory.stat", f"inactive_file 1\ntotal_inactive_file {inactive_file}\n")

    def available_bytes(self) -> int:
        return available_host_bytes(self.proc, self.cgroups)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_without_control_groups_it_is_what_the_machine_reports(machine: Machine) -> None:
    assert machine.available_bytes() == 16 * GIB


def test_a_group_without_a_limit_changes_nothing(machine: Machine) -> None:
    machine.join("0::/user.slice/app")
    machine.group("user.slice/app", "max", GIB)
    assert machine.available_bytes() == 16 * GIB


def test_a_group_leaves_its_limit_less_its_use_with_cached_files_counted_as_free(machine: Machine) -> None:
    machine.join("0::/app")
    machine.group("app", 8 * GIB, 6 * GIB, inactive_file=GIB)
    assert machine.available_bytes() == 3 * GIB


def test_the_tightest_group_above_counts(machine: Machine) -> None:
    machine.join("0::/outer/inner")
    machine.group("outer/inner", 8 * GIB, GIB)
    machine.group("outer", 4 * GIB, 3 * GIB)
    assert machine.available_bytes() == GIB


def test_a_group_whose_folder_is_hidden_by_a_container_is_found_at_the_root(machine: Machine) -> None:
    machine.join("0::/../../not-visible-here")
    machine.group("", 2 * GIB, GIB)
    assert machine.available_bytes() == GIB


def test_version_1_groups_count_too(machine: Machine) -> None:
    machine.join("3:cpu,cpuacct:/x\n9:memory:/docker/abc\n0::/")
    machine.group_v1("docker/abc", 4 * GIB, 3 * GIB, inactive_file=GIB // 2)
    assert machine.available_bytes() == GIB + GIB // 2


def test_the_huge_number_that_means_no_limit_in_version_1_changes_nothing(machine: Machine) -> None:
    machine.join("9:memory:/")
    machine.group_v1("", 9223372036854771712, GIB)
    assert machine.available_bytes() == 16 * GIB


def test_a_group_over_its_limit_leaves_nothing(machine: Machine) -> None:
    machine.join("0::/app")
    machine.group("app", GIB, 2 * GIB)
    assert machine.available_bytes() == 0


def test_a_kernel_that_does_not_say_is_refused(machine: Machine) -> None:
    machine.write(machine.proc / "meminfo", "MemTotal: 5 kB\n")
    with pytest.raises(DeviceUnavailable):
        machine.available_bytes()


def test_this_machine_has_memory() -> None:
    assert available_host_bytes() > 0
