"""Values of settings as they may be shown to people: never with a secret."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from kvpage.errors import shorten, without_password
from kvpage.token_file import may_be_token
from kvpage_server.setting_fields import Fields, setting_of

_WITH_USER = re.compile(r":.*@")
_LIKE_A_SECRET = re.compile(r"[\w+=-]{16,}|(?s:.*-----BEGIN.*)")
"""A token, or a key as PEM. Names of files and addresses have dots, slashes or colons."""


def shown(name: str, value: object) -> str:
    """`value` for a message."""
    if may_be_secret(name, value):
        return "(not shown: it names no file, and may be the token itself)"
    if isinstance(value, str) and _LIKE_A_SECRET.fullmatch(value):
        return "(not shown: it may be a secret)"
    if isinstance(value, str):
        return shorten(repr(masked(value)))
    if isinstance(value, Iterable) and not isinstance(value, bytes):
        return shorten(",".join(str(part) for part in value))
    return shorten(str(value))


def masked(text: str) -> str:
    """`text`, without the password of a URL."""
    return without_password(text) if has_password(text) else text


def has_password(text: object) -> bool:
    """Whether it is like a URL with a user, which no setting takes."""
    return isinstance(text, str) and _WITH_USER.search(text) is not None


def may_be_secret(name: str, value: object) -> bool:
    """Whether it is the token or the key, given in place of the name of its file."""
    if name == "audit_log":  # a file that need not be there yet
        return _LIKE_A_SECRET.fullmatch(str(value)) is not None and may_be_token(str(value))
    is_such = name in Fields.model_fields and setting_of(name).may_hold_a_token
    return is_such and (not isinstance(value, (str, Path)) or may_be_token(value))
