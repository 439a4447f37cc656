"""The run directory: which one, what its files are called, and when it is refused."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kvpage.errors import PermissionDenied, SpecInvalid, TooLarge
from kvpage.run_directory import RunDirectory

ABSENT = Path("/nonexistent/system-folder")


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVPAGE_RUN_DIR", raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # what gettempdir answers
    return tmp_path


def test_the_folder_asked_for_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPAGE_RUN_DIR", "/from/environment")
    assert RunDirectory.default("/asked/for").path == Path("/asked/for")


def test_a_relative_folder_is_made_absolute() -> None:
    assert RunDirectory.default("here").path == Path.cwd() / "here"


def test_the_environment_comes_before_the_system_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert RunDirectory.default(system=tmp_path).path == tmp_path
    monkeypatch.setenv("KVPAGE_RUN_DIR", "/from/environment")
    assert RunDirectory.default(system=tmp_path).path == Path("/from/environment")


def listening(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(str(path))
    return sock


def as_nobody(code: str, folder: Path) -> str:
    """What `code` prints for a user who owns nothing, whose folder for temporary files is `folder`."""
    program = f"""
import os, tempfile
from pathlib import Path
from kvpage.run_directory import RunDirectory
os.setgroups([]); os.setgid(65534); os.setuid(65534)
tempfile.tempdir = {str(folder)!r}
{code}
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize(
    ("name", "mode", "is_chosen"),
    [
        ("kvpage.sock", 0o666, True),
        ("worker-cuda-0.sock", 0o666, True),
        ("kvpage.sock", 0o600, False),
        ("other.sock", 0o666, False),
    ],
)
def test_the_system_folder_is_chosen_by_who_may_connect_but_not_write(
    run_dir: Path, name: str, mode: int, is_chosen: bool
) -> None:
    run_dir.chmod(0o755)
    with listening(run_dir / name):
        (run_dir / name).chmod(mode)
        code = f"print(RunDirectory.default(system=Path({str(run_dir)!r})).path)"
        assert (as_nobody(code, run_dir / "tmp") == str(run_dir)) == is_chosen


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_file_that_is_no_socket_does_not_count_and_a_closed_folder_is_no_error(run_dir: Path) -> None:
    (run_dir / "kvpage.sock").write_text("")
    (run_dir / "kvpage.sock").chmod(0o666)
    code = f"print(RunDirectory.default(system=Path({str(run_dir)!r})).path)"
    for mode in (0o755, 0o700):
        run_dir.chmod(mode)
        assert as_nobody(code, run_dir / "tmp") == str(run_dir / "tmp" / "kvpage-65534")


def test_the_users_runtime_folder_is_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1000")
    assert RunDirectory.default(system=ABSENT).path == Path("/run/user/1000/kvpage")


def test_a_private_folder_among_the_temporary_files_is_last(temporary: Path) -> None:
    assert RunDirectory.default(system=ABSENT).path == temporary / f"kvpage-{os.geteuid()}"


def test_a_private_folder_that_others_may_write_to_is_refused(temporary: Path) -> None:
    planted = temporary / f"kvpage-{os.geteuid()}"
    planted.mkdir()
    planted.chmod(0o777)
    with pytest.raises(PermissionDenied):
        RunDirectory.default(system=ABSENT)


def test_a_private_folder_that_is_a_link_is_refused(temporary: Path) -> None:
    (temporary / f"kvpage-{os.geteuid()}").symlink_to(temporary)
    with pytest.raises(PermissionDenied):
        RunDirectory.default(system=ABSENT)


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("host", "worker-host.sock"),
        ("cuda:0", "worker-cuda-0.sock"),
        ("cuda:15", "worker-cuda-15.sock"),
        ("GPU-8c5f1b1e-1111-2222-3333-444455556666", "worker-GPU-8c5f1b1e-1111-2222-3333-444455556666.sock"),
        ("MIG-8c5f1b1e-1111-2222-3333-444455556666", "worker-MIG-8c5f1b1e-1111-2222-3333-444455556666.sock"),
    ],
)
def test_a_socket_is_named_after_its_device_and_gives_it_back(run_dir: Path, device: str, name: str) -> None:
    directory = RunDirectory(run_dir)
    path = directory.worker_socket(device)
    assert path.name == name
    path.touch()
    assert directory.worker_sockets() == [(device, path)]


@pytest.mark.parametrize("device", ["", "..", "a/b", "../host", "cuda:", "cuda:x", "cuda-0", "a..b", "-x", "a\0b", "ä"])
def test_names_that_could_leave_the_folder_or_be_mistaken_are_refused(tmp_path: Path, device: str) -> None:
    with pytest.raises(SpecInvalid):
        RunDirectory(tmp_path).worker_socket(device)


def test_a_socket_path_may_have_107_bytes_and_the_refusal_of_108_names_the_length() -> None:
    root = Path("/" + "x" * (107 - len("/") - len("/worker-host.sock")))
    assert len(os.fsencode(RunDirectory(root).worker_socket("host"))) == 107
    with pytest.raises(TooLarge) as caught:
        RunDirectory(Path(f"{root}x")).worker_socket("host")
    assert caught.value.details["length_bytes"] == 108


def test_a_new_folder_is_for_its_owner_alone(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "deep" / "run")
    directory.create()
    directory.create()
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700


def test_a_group_may_enter_and_read(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.create(group=os.getegid())
    status = directory.path.stat()
    assert (stat.S_IMODE(status.st_mode), status.st_gid) == (0o750, os.getegid())


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777, 0o1777])
def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(mode)
    with pytest.raises(PermissionDenied):
        RunDirectory(shared).create()


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    theirs = Path("/proc/1") if os.geteuid() else tmp_path / "theirs"
    if not os.geteuid():
        theirs.mkdir()
        os.chown(theirs, 65534, -1)
    with pytest.raises(PermissionDenied):
        RunDirectory(theirs).create()


def test_a_file_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    with pytest.raises(PermissionDenied):
        RunDirectory(tmp_path / "run").create()


def test_nothing_is_listed_where_there_is_no_folder(tmp_path: Path) -> None:
    assert RunDirectory(tmp_path / "absent").worker_sockets() == []
