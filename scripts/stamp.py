"""What an environment was made from, so that a second run knows what is old."""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from environment import CHECKOUT, CONSTRAINTS

Missing = Literal["everything", "wheel", "nothing"]

SOURCE_FOLDERS = ("kvpage", "server")
SOURCE_FILES = ("README.md", "LICENSE")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """Digests of everything that decides what is installed."""

    requirements: str
    """Of pyproject.toml, the lock and the Python version."""
    sources: str
    """Of every file that goes into the wheel; "editable" where the checkout itself is installed."""
    extras: tuple[str, ...]

    def missing(self, wanted: Stamp) -> Missing:
        """What an environment with this stamp lacks of `wanted`."""
        if self.requirements != wanted.requirements or not set(wanted.extras) <= set(self.extras):
            return "everything"
        return "nothing" if self.sources == wanted.sources else "wheel"

    def write(self, path: Path) -> None:
        """Record it; called after the last install step, so an interrupted set-up starts again."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Stamp | None:
        """The stamp at `path`, or None where there is none that this version can read."""
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            return cls(
                requirements=str(fields["requirements"]),
                sources=str(fields["sources"]),
                extras=tuple(str(extra) for extra in fields["extras"]),
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None


def requirements_digest(checkout: Path = CHECKOUT) -> str:
    """Digest of what decides which packages are installed."""
    digest = hashlib.sha256(sys.version.encode())
    for path in (checkout / "pyproject.toml", checkout / CONSTRAINTS.name):
        _add(digest, path, checkout)
    return digest.hexdigest()


def sources_digest(checkout: Path = CHECKOUT) -> str:
    """Digest of the names and contents of the files that go into the wheel."""
    digest = hashlib.sha256()
    files = [path for folder in SOURCE_FOLDERS for path in (checkout / folder).rglob("*") if path.is_file()]
    files += [checkout / name for name in SOURCE_FILES]
    for path in sorted(files):
        if "__pycache__" not in path.parts:
            _add(digest, path, checkout)
    return digest.hexdigest()


def _add(digest: hashlib._Hash, path: Path, checkout: Path) -> None:
    content = path.read_bytes() if path.exists() else b""
    digest.update(f"{path.relative_to(checkout)} {len(content)}\n".encode())
    digest.update(content)
