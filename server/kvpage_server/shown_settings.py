"""Values of settings as they may be shown to people: never with a secret."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from kvpage.errors import shorten
from kvpage_server.setting_fields import Fields, setting_of

_USER_INFO = re.compile(r"(?<=://)[^/?#\s]*@")


def shown(name: str, value: object) -> str:
    """`value` for a message. Not that of a file of tokens which is no file: it may be the token itself."""
    if not is_shown(name, value):
        return "(not shown: it names no file, and may be the token itself)"
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
        return shorten(",".join(str(part) for part in value))
    return shorten(repr(without_password(value)) if isinstance(value, str) else str(value))


def is_shown(name: str, value: object) -> bool:
    return name not in Fields.model_fields or not setting_of(name).may_hold_a_token or _is_a_path(value)


def without_password(text: str) -> str:
    """`text` with what stands before the @ of a URL taken out."""
    return _USER_INFO.sub("***@", text)


def _is_a_path(value: object) -> bool:
    """Whether `value` is surely meant as one."""
    return isinstance(value, (str, Path)) and (str(value).startswith(("/", "./", "../", "~")) or os.path.exists(value))
