"""Token files as operators write them."""

from __future__ import annotations

from pathlib import Path

ROLES = ("read", "plan", "allocate", "admin")


def token_of(role: str) -> str:
    """The token that `with_every_role` gives the role."""
    return f"{role}-0123456789abcdef"


def token_file(folder: Path, content: str, name: str = "token") -> Path:
    """A new one, or in place of the one before, as whoever changes a token puts it there."""
    written = folder / f"{name}.new"
    written.touch(mode=0o600)
    written.write_text(content)
    return written.rename(folder / name)


def with_every_role(folder: Path) -> Path:
    """A token for each role, with the role's name."""
    return token_file(folder, "".join(f"{role} the-{role} {token_of(role)}\n" for role in ROLES))
