"""The examples run as they stand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvpage
from support.api_service import ApiService
from support.checkout import ROOT
from support.markdown import page

EXAMPLES = ROOT / "examples"


def run_example(name: str, run_dir: Path | None = None) -> str:
    environment = os.environ | ({"KVPAGE_RUN_DIR": str(run_dir)} if run_dir else {})
    command = [sys.executable, str(EXAMPLES / name)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def run_readme(run_dir: Path) -> None:
    """The Python of the first page, from the root of the checkout."""
    [code] = [fence.text for fence in page(ROOT / "README.md").fences if fence.info == "python"]
    environment = os.environ | {"KVPAGE_RUN_DIR": str(run_dir)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120, env=environment)
    assert (done.returncode, done.stderr) == (0, "")


def test_planning_in_the_library() -> None:
    printed = run_example("plan.py")
    assert "draft.0: pad, page of 98304 bytes" in printed
    assert "cannot-unify-page-size: {'layer': 'draft.0', 'page_size_bytes': 65536" in printed


def test_blocks_of_a_plan() -> None:
    printed = run_example("blocks.py")
    assert "out-of-blocks: wanted 1000000000, available " in printed
    assert "done: 0 used, 2 cached" in printed
    assert "found again: 2 used, 0 cached" in printed


def test_a_scheduler_makes_a_pool_and_an_engine_writes_to_it(run_dir: Path) -> None:
    with ApiService(run_dir):
        first, second = run_example("scheduler.py", run_dir), run_example("scheduler.py", run_dir)
        assert first == second
        assert "block stride 98304 bytes" in run_example("engine.py", run_dir)
        with kvpage.attach("mimo", run_dir=str(run_dir)) as kv:
            cache = kv.tensor("draft.1")
            assert bool((cache[3, 0, 4] == 1).all())
            assert bool((cache[3, 1, 4] == 2).all())
            assert int((cache != 0).sum()) == 2 * 8 * 128
            del cache
        assert run_example("lease.py", run_dir) == "96 of 100 tokens were cached; their first value is 7\n"
        printed = run_example("generate.py", run_dir)
        assert printed == "48 of 50 tokens were cached; the answer is the same\n"
        run_readme(run_dir)
        with kvpage.attach("mimo", run_dir=str(run_dir)) as kv:
            assert bool((kv.tensor("draft.0")[7] == 1).all())


IMPATIENT = """
import functools, runpy, sys
import kvpage
kvpage.attach = functools.partial(kvpage.attach, timeout_s=0)
runpy.run_path(sys.argv[1], run_name="__main__")
"""
"""An example run without its ten seconds of waiting for a server."""


@pytest.mark.parametrize("name", ["scheduler.py", "engine.py", "lease.py"])
def test_without_a_server_an_example_says_so_in_one_line(run_dir: Path, name: str) -> None:
    environment = os.environ | {"KVPAGE_RUN_DIR": str(run_dir)}
    command = [sys.executable, "-c", IMPATIENT, str(EXAMPLES / name)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=environment)
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith("device-unavailable: ")


def test_every_example_is_listed_and_run() -> None:
    scripts = {path.name for path in EXAMPLES.iterdir()} - {"README.md", "__pycache__"}
    listed = (EXAMPLES / "README.md").read_text()
    assert [name for name in sorted(scripts) if f"`{name}`" not in listed] == []
    tested = Path(__file__).read_text() + (ROOT / "docs/layout.md").read_text()  # whose code is run too
    assert [name for name in sorted(scripts) if name not in tested] == []
