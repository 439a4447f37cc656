"""The bearer tokens of a file, each with a name and a role; and the file noticed when it changes.

    # who it is for, after the role; then the token
    read      prometheus  3f9c…
    allocate  scheduler   b01d…

Only digests are kept. A file of one line with nothing but a token is valid too: its role is `admin`.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvpage.errors import SpecInvalid, shorten
from kvpage.token_file import MAX_TOKEN_CHARS, is_token
from kvpage_server.roles import ROLES_BY_LABEL, Role
from kvpage_server.watched_file import FileState, read_private

MIN_TOKEN_CHARS = 16
MAX_TOKENS = 1000  # every one of them is compared at every request that has a token
MAX_FILE_BYTES = 1 << 20
LONE_NAME = "token"
"""Of the token that a file has alone, without a name."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HINT = "`openssl rand -hex 32` makes one"
logger = logging.getLogger("kvpage.api")


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    name: str
    role: Role
    digest: bytes = field(repr=False)


def parse_tokens(content: bytes, path: Path) -> tuple[Token, ...]:
    """Raises `SpecInvalid` naming the first line at fault, and never what is in it: it may be the token."""
    lines = [
        (number, words)
        for number, line in enumerate(content.split(b"\n"), 1)
        if (words := line.split()) and not words[0].startswith(b"#")
    ]
    if not lines:
        raise SpecInvalid(f"the token file {_named(path)} has no token; {_HINT}")
    if len(lines) > MAX_TOKENS:
        raise SpecInvalid(f"the token file {_named(path)} has {len(lines)} tokens; at most {MAX_TOKENS} are taken")
    if len(lines) == 1 and len(lines[0][1]) == 1:
        number, [secret] = lines[0]
        return (Token(name=LONE_NAME, role=Role.ADMIN, digest=_checked_digest(secret, f"{_named(path)}:{number}")),)
    tokens = tuple(_token(words, f"{_named(path)}:{number}") for number, words in lines)
    numbers = [number for number, _ in lines]
    _check_unique("name", [token.name for token in tokens], numbers, path)
    _check_unique("token", [token.digest for token in tokens], numbers, path)
    return tokens


class TokenFile:
    """The tokens there are now: a changed file is read at the next request. One that is faulty or gone changes
    nothing but the log: an operator's half-written file must not lock everybody out.
    """

    def __init__(self, path: Path) -> None:
        """Raises `SpecInvalid` when it cannot be used."""
        self._path = path
        self._state = FileState.of(path)
        self._tokens = _read(path)

    def __repr__(self) -> str:
        return f"<TokenFile {self._path}: {len(self._tokens)} tokens>"

    def find(self, given: bytes) -> Token | None:
        """The token with these bytes. Which one it is, and how much of one they are, does not show in the time."""
        self._read_again_if_changed()
        digest = _digest(given)
        found = None
        for token in self._tokens:  # all of them, whichever it was
            if hmac.compare_digest(token.digest, digest):
                found = token
        return found

    def _read_again_if_changed(self) -> None:
        state = FileState.of(self._path)
        if state == self._state:
            return
        self._state = state
        try:
            self._tokens = _read(self._path)
        except SpecInvalid as error:
            logger.error("the tokens before stay valid: %s", error)
        else:
            logger.info("read %d tokens from %s again", len(self._tokens), self._path)


def _read(path: Path) -> tuple[Token, ...]:
    return parse_tokens(read_private(path, "the token file", MAX_FILE_BYTES), path)


def _token(words: list[bytes], where: str) -> Token:
    if len(words) != 3:
        raise SpecInvalid(f"{where} has {len(words)} words; it must have three: a role, a name and the token")
    role = ROLES_BY_LABEL.get(words[0].decode("ascii", "replace"))
    if role is None:
        raise SpecInvalid(f"{where} does not begin with a role; the roles are {', '.join(ROLES_BY_LABEL)}")
    name = words[1].decode("ascii", "replace")
    if not _NAME.fullmatch(name):
        raise SpecInvalid(
            f"{where}: the name, its second word, must be 1 to 64 letters, digits, dots, dashes and underscores, and"
            " begin with a letter or digit"
        )
    return Token(name=name, role=role, digest=_checked_digest(words[2], where))


def _checked_digest(secret: bytes, where: str) -> bytes:
    if not MIN_TOKEN_CHARS <= len(secret) <= MAX_TOKEN_CHARS:
        raise SpecInvalid(
            f"{where}: the token has {len(secret)} characters; it must have {MIN_TOKEN_CHARS} to {MAX_TOKEN_CHARS}. "
            f"{_HINT}"
        )
    if not is_token(secret):
        raise SpecInvalid(f"{where}: the token has characters other than printable ASCII; {_HINT}")
    return _digest(secret)


def _check_unique(what: str, values: Sequence[str | bytes], numbers: list[int], path: Path) -> None:
    first: dict[str | bytes, int] = {}
    for value, number in zip(values, numbers, strict=True):
        if value in first:
            raise SpecInvalid(f"{_named(path)}:{number} has the {what} of line {first[value]}; each must be another")
        first[value] = number


def _digest(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()


def _named(path: Path) -> str:
    return shorten(os.fspath(path))
