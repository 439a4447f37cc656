"""Unix groups as `--group` names them."""

from __future__ import annotations

import grp

from kvpage.errors import SpecInvalid, shorten

MAX_GID = 2**32 - 2  # the next one means "leave it as it is"


def gid_of(group: str) -> int:
    """The id of a group given by name or number. Raises `SpecInvalid`."""
    if group.isascii() and group.isdecimal():
        if len(group) > 10 or int(group) > MAX_GID:
            raise SpecInvalid(f"group {shorten(group)} is over {MAX_GID}, the largest group id there is")
        return int(group)
    try:
        return grp.getgrnam(group).gr_gid
    except (KeyError, UnicodeEncodeError):
        raise SpecInvalid(
            f"there is no group '{shorten(group)}' on this machine; make it, or give its number"
        ) from None
