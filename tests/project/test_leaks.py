"""The leak check fires for each thing it looks for, and only then."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

import conftest
from support.leaks import Holdings, leak_guard


def open_null() -> int:
    return os.open("/dev/null", os.O_RDONLY)


def test_nothing_left_is_no_leak() -> None:
    with leak_guard():
        os.close(open_null())


def test_an_open_descriptor_is_a_leak() -> None:
    before = Holdings.now()
    fd = open_null()
    leaks = Holdings.now().leaks_since(before)
    os.close(fd)
    assert leaks == [f"descriptor: {fd} -> /dev/null (× 1)"]
    assert Holdings.now().leaks_since(before) == []


def test_a_mapped_memfd_is_a_leak_after_its_descriptor_is_closed() -> None:
    before = Holdings.now()
    fd = os.memfd_create("left-mapped")
    os.ftruncate(fd, mmap.PAGESIZE)
    mapping = mmap.mmap(fd, mmap.PAGESIZE)
    os.close(fd)
    leaks = Holdings.now().leaks_since(before)
    mapping.close()
    # Python's mmap keeps a descriptor of its own, so the same slip shows twice.
    assert [leak.split(":")[0] for leak in leaks] == ["descriptor", "mapping"]
    assert Holdings.now().leaks_since(before) == []


def test_a_child_that_nobody_reaped_is_a_leak() -> None:
    before = Holdings.now()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        leaks = Holdings.now().leaks_since(before)
        child.communicate(b"\n")
    assert f"child process: pid {child.pid} (× 1)" in leaks
    assert Holdings.now().leaks_since(before) == []


def test_a_failing_block_keeps_its_own_error() -> None:
    fds = []
    with pytest.raises(KeyError), leak_guard():
        fds.append(open_null())
        raise KeyError("the real cause")
    os.close(fds[0])


def test_the_fixture_fails_a_passing_test(tmp_path: Path) -> None:
    shared = Path(conftest.__file__)
    (tmp_path / "conftest.py").write_text(shared.read_text())
    (tmp_path / "test_it.py").write_text("import os\ndef test_it(no_leaks): os.open('/dev/null', os.O_RDONLY)\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(shared.parent)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout
    assert "1 passed, 1 error" in done.stdout
