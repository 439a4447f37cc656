"""Who shares a pool: how much each may hold, who is served first, and what keeps their cached prefixes apart."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

from kvpage.errors import SpecInvalid, shorten

MAX_NAME_BYTES = 64
LEAST_PRIORITY, MOST_PRIORITY = -100, 100
MOST_WEIGHT = 1_000
_SALT_BYTES = 16
_SALT_VERSION = b"kvpage tenant 1\0"  # another one, and nobody finds what was cached before


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """Accounting, not protection: whoever may use a pool can read all of it. Raises `SpecInvalid`."""

    name: str
    """Empty: the tenant of those who name none. At most 64 bytes of UTF-8, all of it printable."""
    quota_bytes: int | None = None
    """Most bytes of blocks that its leases may hold. None: no limit."""
    priority: int = 0
    """-100 to 100. The higher is served strictly before the lower."""
    weight: int = 1
    """1 to 1,000: its share among those of the same priority."""

    def __post_init__(self) -> None:
        _check_name(self.name)
        who = f"tenant {self.name!r}"
        if self.quota_bytes is not None and self.quota_bytes < 0:
            raise SpecInvalid(
                f"{who} has a quota of {self.quota_bytes} bytes; it must be 0 or more, or None for no limit"
            )
        if not LEAST_PRIORITY <= self.priority <= MOST_PRIORITY:
            raise SpecInvalid(
                f"{who} has priority {self.priority}; choose one from {LEAST_PRIORITY} to {MOST_PRIORITY}"
            )
        if not 1 <= self.weight <= MOST_WEIGHT:
            raise SpecInvalid(
                f"{who} has weight {self.weight}; choose one from 1 to {MOST_WEIGHT}, and a quota of 0 to stop it"
            )

    @property
    def salt(self) -> bytes:
        """What its prefix hashes begin with (`hashing`), so that no two tenants find each other's blocks.

        Nothing for the tenant without a name, who shares with all that use no salt; else 16 bytes: blake2b of a version
        and the name.
        """
        if not self.name:
            return b""
        return blake2b(_SALT_VERSION + self.name.encode(), digest_size=_SALT_BYTES).digest()


def _check_name(name: str) -> None:
    if not name.isprintable():  # half of a surrogate pair, which UTF-8 cannot say, is not printable either
        raise SpecInvalid(f"a tenant is named {shorten(repr(name))}; use printable characters only")
    num_bytes = len(name.encode())
    if num_bytes > MAX_NAME_BYTES:
        raise SpecInvalid(
            f"the name of tenant {shorten(repr(name))} has {num_bytes} bytes of UTF-8, of at most {MAX_NAME_BYTES}; "
            f"choose a shorter one"
        )
