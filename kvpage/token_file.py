"""The bearer token in a file, as server and clients read it."""

from __future__ import annotations

import os
from pathlib import Path

from kvpage.errors import SpecInvalid, shorten

MAX_TOKEN_CHARS = 4096


def read_token(path: Path) -> str:
    """One line of printable ASCII without spaces. Raises `SpecInvalid` naming the file; never says what is in it."""
    try:
        with path.open("rb") as file:
            token = file.read(MAX_TOKEN_CHARS + 2).strip()  # and its end of line
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        reason = error.strerror if isinstance(error, OSError) else error
        raise SpecInvalid(f"the token file {shown_path(path)} cannot be read: {reason}") from error
    if not 0 < len(token) <= MAX_TOKEN_CHARS or not is_token(token):
        raise SpecInvalid(
            f"the token file {shown_path(path)} must hold one line of 1 to {MAX_TOKEN_CHARS} printable ASCII "
            f"characters without spaces; `openssl rand -hex 32` makes one"
        )
    return token.decode("ascii")


def is_token(text: bytes) -> bool:
    """Whether an HTTP header can carry it."""
    return all(0x21 <= char <= 0x7E for char in text)


def shown_path(path: Path | str) -> str:
    """For messages: not a name without a folder that no file has, as people give the token itself by mistake."""
    return "(not shown: it names no file, and may be the token itself)" if may_be_token(path) else shorten(str(path))


def may_be_token(path: Path | str) -> bool:
    return not str(path).startswith(("/", "./", "../", "~")) and not os.path.exists(path)
