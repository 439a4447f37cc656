"""The double is compiled once for each state of its sources, cleanly, and its absence is a skip that says why."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.fakecuda import FakeDevices, build, compiler, library, sources
from support.tree import MAX_FILE_LINES


@pytest.fixture
def forgotten() -> Iterator[None]:
    """Before and after, this process does not remember where the compiler and the library are."""
    for known in (compiler, library):
        known.cache_clear()
    yield
    for known in (compiler, library):
        known.cache_clear()


def test_it_compiles_without_a_warning_for_two_at_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(build, [tmp_path / "libcuda.so.1"] * 2))
    assert [path.name for path in tmp_path.iterdir()] == ["libcuda.so.1"]


def test_the_same_sources_are_compiled_once(forgotten: None) -> None:
    made = library().stat().st_mtime_ns
    library.cache_clear()
    assert library().stat().st_mtime_ns == made


def test_without_a_compiler_its_tests_are_skipped(
    forgotten: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with FakeDevices() as devices, pytest.raises(pytest.skip.Exception, match="`cc`"):
        devices.env()


def test_its_files_are_short_and_its_lines_fit() -> None:
    for path in sources():
        lines = path.read_text().splitlines()
        assert len(lines) <= MAX_FILE_LINES, path.name
        assert max(map(len, lines)) <= 120, path.name
