"""What a fresh process loads: `import kvpage` next to nothing, the worker neither torch nor a web framework."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("fastapi", "httpx", "numpy", "pydantic", "starlette", "torch", "uvicorn")


def modules_after(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after `statement`."""
    program = f"{statement}\nimport sys\nprint(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_import_kvpage_loads_nothing_heavy() -> None:
    assert modules_after("import kvpage").isdisjoint(HEAVY)


@pytest.mark.parametrize("name", HEAVY)
def test_the_check_sees_each_heavy_module(name: str) -> None:
    assert name in modules_after(f"import {name}")


def test_the_worker_loads_neither_torch_nor_a_web_framework() -> None:
    loaded = modules_after("import kvpage_server.worker, kvpage_server.__main__")
    assert loaded.isdisjoint({"torch", "fastapi", "starlette", "uvicorn", "pydantic", "httpx"})


def test_the_api_process_loads_no_torch() -> None:
    assert "torch" not in modules_after("import kvpage_server.app")


def test_planning_loads_no_torch() -> None:
    assert "torch" not in modules_after("import kvpage; kvpage.plan, kvpage.Client")


def test_the_command_line_loads_nothing_heavy_before_a_command_needs_it() -> None:
    assert modules_after("import kvpage.cli.commands").isdisjoint(HEAVY)


def test_leasing_blocks_loads_no_torch() -> None:
    """A scheduler hands blocks out and touches none of them."""
    assert "torch" not in modules_after("import kvpage; kvpage.open_lease, kvpage.adopt_lease")
