"""`Idempotency-Key`: which requests about a lease have been made, so that none is done twice or taken for another."""

from __future__ import annotations

import secrets
from collections import Counter, OrderedDict
from hashlib import blake2b

from kvpage.errors import Conflict, FieldError, SpecInvalid, shorten

MAX_KEY_BYTES = 200
MAX_KEYS = 64
"""Remembered of one lease."""

_NUM_KEYS = 2**62 - 1


def key_of(header: str | None) -> int:
    """What the worker knows the request by; a new one without a header. Raises `SpecInvalid`."""
    if header is None:
        return 1 + secrets.randbelow(_NUM_KEYS)
    size_bytes = len(header.encode())
    if not 0 < size_bytes <= MAX_KEY_BYTES:
        raise SpecInvalid(f"Idempotency-Key has {size_bytes} bytes; use 1 to {MAX_KEY_BYTES}")
    digest = blake2b(header.encode(), digest_size=8).digest()
    return 1 + int.from_bytes(digest, "little") % _NUM_KEYS


class LeaseKeys:
    """Of one lease. The worker repeats the answer to the last request only; with any other key that has been used the
    request would be done a second time, so it is refused here, as long as it is remembered.
    """

    def __init__(self) -> None:
        self._digests: OrderedDict[int, bytes] = OrderedDict()
        self._under_way: Counter[int] = Counter()

    def begin(self, key: int, body: bytes) -> None:
        """Raises `SpecInvalid` for a key that came with another body, `Conflict` for one before the last."""
        digest = blake2b(body, digest_size=16).digest()
        known = self._digests.get(key)
        if known is None:
            self._digests[key] = digest
            if len(self._digests) > MAX_KEYS:
                self._digests.popitem(last=False)
        elif known != digest:
            text = "this Idempotency-Key came with another request before; use a new one for each request"
            raise SpecInvalid(text, errors=[FieldError("", text)])
        elif key != next(reversed(self._digests)):
            raise Conflict(
                "the request with this Idempotency-Key was made before, and others about the lease after it: the answer"
                " is not known any more; GET what the lease holds"
            )
        self._under_way[key] += 1

    def ended(self, key: int, *, was_refused: bool) -> None:
        """Of what began. Where nothing was done, and no other with this key is under way, it may be used again."""
        self._under_way[key] -= 1
        if self._under_way[key] <= 0:
            del self._under_way[key]
            if was_refused:
                self._digests.pop(key, None)

    def __repr__(self) -> str:
        return f"<LeaseKeys {shorten(len(self._digests))} keys>"
