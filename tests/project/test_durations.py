"""The table of what each file of tests took, made by a run of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.checkout import ROOT
from support.durations import FileTimes, table

TESTS = """
import subprocess, sys

def test_waits():
    import time
    time.sleep(0.2)

def test_has_a_child_that_computes():
    subprocess.run([sys.executable, "-S", "-c", "import time\\nwhile time.process_time() < 0.4: pass"], check=True)
"""


def test_each_file_has_a_row_with_what_its_children_used_too(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(TESTS)
    (tmp_path / "test_two.py").write_text("def test_nothing(): pass")
    (tmp_path / "conftest.py").write_text(
        "from pathlib import Path\n"
        "from support.durations import FileDurations\n"
        "def pytest_configure(config):\n"
        "    config.pluginmanager.register(FileDurations(Path('out/table.md')))\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "xdist.plugin", "-n", "2", "--dist", "loadfile", "."]
    environment = {"PYTHONPATH": str(ROOT / "tests"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    rows = [line.strip("| ").split(" | ") for line in (tmp_path / "out/table.md").read_text().splitlines()[2:]]
    assert [row[:2] for row in rows] == [["test_one.py", "2"], ["test_two.py", "1"]]
    _, _, wall_s, cpu_s, slowest_s = rows[0]
    assert float(wall_s) >= 0.6
    assert float(cpu_s) >= 0.4
    assert 0.4 <= float(slowest_s) <= float(wall_s)


def test_the_file_that_costs_most_comes_first() -> None:
    lines = [*table({"a": FileTimes(tests=1, wall_s=1.0), "b": FileTimes(tests=2, wall_s=2.06, cpu_s=0.5)})]
    assert lines[2:] == ["| b | 2 | 2.1 | 0.5 | 0.0 |", "| a | 1 | 1.0 | 0.0 | 0.0 |"]
