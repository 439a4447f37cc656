"""The audit log's file and its thread: lines that are whole, files that move, disks that fill, and what is owed."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpage.errors import AuditUnavailable, PermissionDenied, SpecInvalid
from kvpage_server import audit_log
from kvpage_server.audit_file import AuditFile
from kvpage_server.audit_log import AuditLog
from support import full_disk_program
from support.eventually import until

asynchronous = pytest.mark.anyio


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "audit.jsonl"


@pytest.fixture
def file(no_leaks: None, path: Path) -> Iterator[AuditFile]:
    file = AuditFile(path)
    yield file
    file.close()


@pytest.fixture
def log(no_leaks: None, path: Path) -> Iterator[AuditLog]:
    log = AuditLog(path)
    yield log
    log.close()


class Disk:
    """Stands for `os.write` to a disk with so much room, which takes what fits and then refuses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room_bytes: int) -> None:
        self.room_bytes = room_bytes
        self._write = os.write
        monkeypatch.setattr(os, "write", self)

    def __call__(self, fd: int, data: Any) -> int:
        if self.room_bytes == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self._write(fd, data[: self.room_bytes])
        self.room_bytes -= written
        return written


# --- the file ---------------------------------------------------------------------------------------------------------


def test_lines_are_added_to_what_is_there_and_nobody_else_may_read_them(file: AuditFile, path: Path) -> None:
    file.append(b"one")
    file.close()
    again = AuditFile(path)
    again.append(b"two")
    again.sync()
    again.close()
    assert path.read_bytes() == b"one\ntwo\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_it_only_ever_writes_at_the_end(file: AuditFile, path: Path) -> None:
    file.append(b"one")
    with path.open("ab") as other:
        other.write(b"another's\n")
    file.append(b"two")
    assert path.read_bytes() == b"one\nanother's\ntwo\n"


@pytest.mark.parametrize("end", [b'{"torn', b'{"torn": 1}'])
def test_a_line_that_a_crash_left_torn_does_not_spoil_the_next(path: Path, end: bytes) -> None:
    path.write_bytes(b"one\n" + end)
    path.chmod(0o600)
    file = AuditFile(path)
    file.append(b"two")
    file.close()
    assert path.read_bytes() == b"one\n" + end + b"\ntwo\n"


@pytest.mark.parametrize("room_bytes", range(7))
def test_a_line_that_a_full_disk_left_torn_does_not_spoil_the_next(
    file: AuditFile, path: Path, monkeypatch: pytest.MonkeyPatch, room_bytes: int
) -> None:
    """Wherever in the line, its end included, and however often."""
    file.append(b"one")
    disk = Disk(monkeypatch, room_bytes)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        file.append(b"failed")
    for _ in range(2):
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            file.append(b"failed")
    disk.room_bytes = 1 << 20
    file.append(b"two")
    torn = b"failed"[:room_bytes]
    assert path.read_bytes() == b"one\n" + (torn + b"\n" if torn else b"") + b"two\n"


def test_it_follows_when_the_file_is_moved_away(file: AuditFile, path: Path) -> None:
    """As logrotate does it; nothing needs to be told."""
    file.append(b"one")
    path.rename(path.with_suffix(".1"))
    file.append(b"two")
    path.unlink()
    file.append(b"three")
    assert path.with_suffix(".1").read_bytes() == b"one\n"
    assert path.read_bytes() == b"three\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_it_goes_on_when_the_file_is_cut(file: AuditFile, path: Path) -> None:
    """As logrotate does it with copytruncate."""
    file.append(b"one")
    os.truncate(path, 0)
    file.append(b"two")
    assert path.read_bytes() == b"two\n"


def test_a_folder_that_is_gone_is_told_and_mended(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    path = tmp_path / "logs" / "audit.jsonl"
    file = AuditFile(path)
    path.unlink()
    path.parent.rmdir()
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            file.append(b"one")
    path.parent.mkdir()
    file.append(b"two")
    file.close()
    assert path.read_bytes() == b"two\n"


def _link(path: Path) -> None:
    path.with_name("elsewhere").touch(mode=0o600)
    path.symlink_to("elsewhere")


def _writable_by_others(path: Path) -> None:
    path.touch()
    path.chmod(0o620)


@pytest.mark.parametrize(
    "make",
    [
        _link,
        os.mkfifo,
        Path.mkdir,
        _writable_by_others,
        lambda path: path.parent.rmdir(),
    ],
    ids=["a link", "a pipe", "a folder", "writable by others", "no folder"],
)
def test_what_cannot_be_a_log_is_refused_at_once(
    no_leaks: None, tmp_path: Path, make: Callable[[Path], object]
) -> None:
    (tmp_path / "logs").mkdir()
    path = tmp_path / "logs" / "audit.jsonl"
    make(path)
    with pytest.raises(SpecInvalid, match="audit log"):
        AuditFile(path)


def test_a_log_that_belongs_to_somebody_else_is_refused(
    file: AuditFile, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(SpecInvalid, match=f"belongs to user {owner}"):
        AuditFile(path)
    path.rename(path.with_name("rotated"))
    path.touch(mode=0o600)
    with pytest.raises(PermissionDenied, match=f"belongs to user {owner}"):
        file.append(b"one")


def test_a_link_put_in_its_place_is_not_followed(file: AuditFile, path: Path) -> None:
    path.unlink()
    _link(path)
    with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
        file.append(b"one")
    assert path.with_name("elsewhere").read_bytes() == b""


# --- the log ----------------------------------------------------------------------------------------------------------


@asynchronous
async def test_what_is_intended_is_on_the_disk_before_it_is_done(
    log: AuditLog, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = []
    monkeypatch.setattr(os, "fdatasync", lambda fd: synced.append(path.read_bytes()))
    await log.intend(b"one")
    assert synced == [b"one\n"]


@asynchronous
async def test_many_at_once_are_all_there_in_order(log: AuditLog, path: Path) -> None:
    lines = [b"%d" % number for number in range(200)]
    await asyncio.gather(*map(log.intend, lines))
    assert path.read_bytes().split() == lines


@asynchronous
async def test_a_disk_that_is_full_refuses_and_one_with_room_goes_on(
    log: AuditLog, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = Disk(monkeypatch, 0)
    for _ in range(3):
        with pytest.raises(AuditUnavailable, match=os.strerror(errno.ENOSPC)):
            await log.intend(b"refused")
    disk.room_bytes = 1 << 20
    await log.intend(b"done")
    assert path.read_bytes() == b"done\n"
    until(lambda: len(caplog.messages) == 2)
    assert ["written: " in caplog.messages[0], "again" in caplog.messages[1]] == [True, True]  # once each


@asynchronous
async def test_the_outcome_of_what_was_done_is_owed_and_comes_before_anything_new(
    log: AuditLog, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await log.intend(b"begin")
    disk = Disk(monkeypatch, 0)
    log.add(b"end", is_owed=True)
    log.add(b"a refusal", is_owed=False)
    with pytest.raises(AuditUnavailable):
        await log.intend(b"refused")
    disk.room_bytes = 1 << 20
    await log.intend(b"next")
    assert path.read_bytes() == b"begin\nend\nnext\n"


def test_what_is_owed_is_written_though_nobody_asks_again(
    log: AuditLog, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_log, "_AGAIN_S", 0.01)
    disk = Disk(monkeypatch, 0)
    log.add(b"end", is_owed=True)
    until(lambda: log._is_failing)
    disk.room_bytes = 1 << 20
    until(lambda: path.read_bytes() == b"end\n")


def test_closing_writes_what_is_owed_and_says_what_cannot_be(
    log: AuditLog, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patched:
        Disk(patched, 0)
        log.add(b"lost", is_owed=True)
        log.close()
    assert "outcome of 1 changes" in caplog.messages[-1]
    log.close()
    other = AuditLog(path)
    other.add(b"end", is_owed=True)
    other.close()
    assert path.read_bytes() == b"end\n"


@asynchronous
async def test_a_disk_that_does_not_answer_refuses_too(log: AuditLog, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    monkeypatch.setattr(os, "fdatasync", lambda fd: answers.wait())
    monkeypatch.setattr(audit_log, "PATIENCE_S", 0.05)
    with pytest.raises(AuditUnavailable, match="within"):
        await log.intend(b"one")
    answers.set()


@asynchronous
async def test_while_a_disk_does_not_answer_nothing_is_kept_but_what_is_owed(
    log: AuditLog, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(os, "fdatasync", lambda fd: answers.wait())
    monkeypatch.setattr(audit_log, "PATIENCE_S", 0.05)
    log.check_moving()
    with pytest.raises(AuditUnavailable, match="within"):
        await log.intend(b"late")
    with pytest.raises(AuditUnavailable, match="does not answer"):
        log.check_moving()
    log.add(b"refused", is_owed=False)
    log.add(b"outcome of late", is_owed=False, follows_intent=True)
    log.add(b"owed", is_owed=True)
    answers.set()
    until(lambda: path.read_bytes() == b"late\noutcome of late\nowed\n")
    until(lambda: not log._is_late)
    log.check_moving()
    await log.intend(b"next")


def test_records_that_nobody_waits_for_are_bounded_too(
    log: AuditLog, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, answers = threading.Event(), threading.Event()

    def answer_late(_fd: int) -> None:
        asked.set()
        answers.wait()

    monkeypatch.setattr(os, "fdatasync", answer_late)
    log.add(b"0", is_owed=False)
    assert asked.wait(60)
    for _ in range(audit_log.MAX_WAITING + 10):
        log.add(b"1", is_owed=False)
    answers.set()
    log.close()
    assert path.read_bytes().split() == [b"0"] + [b"1"] * audit_log.MAX_WAITING


@asynchronous
async def test_a_sync_that_fails_refuses(log: AuditLog, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(AuditUnavailable, match=os.strerror(errno.EIO)):
        await log.intend(b"one")


def test_a_real_disk_that_is_full_refuses_and_goes_on_when_there_is_room(tmp_path: Path) -> None:
    """A file system of 64 KiB in a mount namespace of a process's own; that process tells what it saw."""
    command = ["unshare", "--user", "--map-root-user", "--mount", sys.executable, full_disk_program.__file__]
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, check=False, timeout=60)
    if done.returncode == full_disk_program.NO_DISK or "unshare" in done.stderr:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip() or done.stdout.strip()}")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["refused"] == [os.strerror(errno.ENOSPC)] * 3
    assert told["whole_lines"] > 10
    assert told["last_lines"] == ["after"]
    assert told["torn_lines"] <= 1
