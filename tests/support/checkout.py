"""The checkout that holds these tests, and the files of it that git tracks."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def tracked_files(*patterns: str) -> list[Path]:
    """Absolute paths of tracked files that match one of git's `patterns` (all without one) and still exist."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--", *patterns]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    paths = [ROOT / name for name in listing.split("\0") if name]
    return [path for path in paths if path.is_file()]


def python_sources(*folders: str) -> list[Path]:
    """Every Python file below the named folders of the checkout, tracked or not."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
