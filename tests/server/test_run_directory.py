"""What is wrong with a run directory stops both programs, and what lies in the place of a socket is never followed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from support.api_service import run_refused
from support.worker_process import run_refused_worker

STRANGER = 60001

Program = Callable[[Path], subprocess.CompletedProcess[str]]


def serve(run_dir: Path) -> subprocess.CompletedProcess[str]:
    return run_refused(run_dir, "--external-workers")


def work(run_dir: Path) -> subprocess.CompletedProcess[str]:
    return run_refused_worker(run_dir, "--device", "host")


each = pytest.mark.parametrize("program", [serve, work])


@each
@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o720])
def test_a_folder_that_others_may_write_to_is_refused(
    no_leaks: None, run_dir: Path, program: Program, mode: int
) -> None:
    run_dir.chmod(mode)
    done = program(run_dir)
    assert done.returncode != 0
    assert "others may write to it" in done.stderr
    assert list(run_dir.iterdir()) == []


@each
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_of_another_user_is_refused(no_leaks: None, run_dir: Path, program: Program) -> None:
    os.chown(run_dir, STRANGER, STRANGER)
    done = program(run_dir)
    assert done.returncode != 0
    assert f"belongs to uid {STRANGER}" in done.stderr
    assert list(run_dir.iterdir()) == []


@each
def test_a_link_to_another_folder_is_refused(no_leaks: None, run_dir: Path, tmp_path: Path, program: Program) -> None:
    link = run_dir / "link"
    link.symlink_to(tmp_path)
    done = program(link)
    assert done.returncode != 0
    assert "is not a folder" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_link_to_a_socket_that_answers_is_left_alone(no_leaks: None, run_dir: Path) -> None:
    """By the server; a worker goes by its lock alone and replaces whatever lies there."""
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(run_dir / "other"))
        other.listen()
        (run_dir / "kvpage.sock").symlink_to("other")
        assert serve(run_dir).returncode == 1
    assert (run_dir / "kvpage.sock").is_symlink()


STARTS = {
    "kvpage.sock": "from kvpage_server.listeners import Listeners as Opened\n"
    "from kvpage_server.settings import Settings\n"
    "opened = Opened(Settings(run_directory=directory))",
    "worker-host.sock": "from kvpage_server.worker_endpoint import Endpoint\n"
    "opened = Endpoint.open(directory, 'host', None)",
}
PROGRAM = """
import pathlib, stat, sys
from kvpage.run_directory import RunDirectory
directory = RunDirectory(pathlib.Path(sys.argv[1]))
{start}
print(stat.filemode((directory.path / sys.argv[2]).lstat().st_mode))
opened.close()
"""


@pytest.mark.parametrize("socket_name", STARTS)
@pytest.mark.parametrize("target", ["a file", "nothing"])
def test_a_link_to_anything_else_is_not_followed(run_dir: Path, tmp_path: Path, socket_name: str, target: str) -> None:
    """It is replaced by the socket, or refused; what it points to stays as it was."""
    aim = tmp_path / "aim"
    if target == "a file":
        aim.write_text("mine")
    (run_dir / socket_name).symlink_to(aim)
    command = [sys.executable, "-c", PROGRAM.format(start=STARTS[socket_name]), str(run_dir), socket_name]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout == "srw-------\n" or done.returncode != 0, done
    assert (aim.read_text() if target == "a file" else aim.exists()) == ("mine" if target == "a file" else False)
