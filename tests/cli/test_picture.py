"""`kvpage plan --svg`: the picture of the plan, in a file or on standard output."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

import kvpage
from kvpage.drawing.picture import layout_svg
from support.command_line import run_here
from support.plan_requests import small_request


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_here("plan", "-", *arguments, stdin=json.dumps(small_request()))


@pytest.fixture(scope="module")
def picture() -> str:
    return layout_svg(kvpage.plan(small_request()))


def test_the_picture_goes_to_the_file_and_the_plan_is_printed(tmp_path: Path, picture: str) -> None:
    done = run("--svg", str(tmp_path / "layout.svg"), "--json")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "layout.svg").read_text() == picture
    assert kvpage.Plan.from_json(done.stdout.encode()) == kvpage.plan(small_request())


def test_a_dash_is_standard_output(picture: str) -> None:
    done = run("--svg", "-")
    assert (done.returncode, done.stdout) == (0, picture)


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "no" / "folder.svg", tmp_path / ("x" * 300)):
        done = run("--svg", str(place))
        assert done.returncode == 2
        assert done.stderr.startswith("error spec-invalid: cannot write")


def test_a_comparison_has_no_picture(tmp_path: Path) -> None:
    done = run("--svg", str(tmp_path / "layout.svg"), "--compare")
    assert done.returncode == 2
    assert not list(tmp_path.iterdir())
