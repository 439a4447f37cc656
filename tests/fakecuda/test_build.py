"""The double is compiled once, by the system's compiler, without a warning."""

from __future__ import annotations

from pathlib import Path

from support.fakecuda import build, library


def test_it_compiles_without_a_warning(tmp_path: Path) -> None:
    build(tmp_path / "libcuda.so.1")
    assert [path.name for path in tmp_path.iterdir()] == ["libcuda.so.1"]


def test_the_same_sources_are_compiled_once() -> None:
    made = library().stat().st_mtime_ns
    library.cache_clear()
    assert library().stat().st_mtime_ns == made
