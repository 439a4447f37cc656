"""Encoded plans and what they were asked by, least recently used out first, bounded by bytes.

Everything in it can be computed again, so forgetting is never wrong. Used from the event loop only.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Literal, NamedTuple, TypeAlias

from kvpage._version import __version__

Form: TypeAlias = Literal["full", "groups", "picture"]
Encoding: TypeAlias = Literal["identity", "gzip"]

ENTRY_OVERHEAD_BYTES = 512  # an entry's key, list node and object headers, roughly and rather too much


class Representation(NamedTuple):
    """One way to send one plan."""

    plan_id: str
    form: Form = "full"
    encoding: Encoding = "identity"
    said: str = ""
    """Which words of a search go with the plan; "": none."""

    @property
    def etag(self) -> str:
        """Strong: differs whenever the bytes differ."""
        is_plain = self.form == "full" and self.encoding == "identity"
        form = f"picture-{__version__}" if self.form == "picture" else self.form  # another version draws differently
        suffix = "" if is_plain else f"-{form}-{self.encoding}"
        suffix += f"-{self.said}" if self.said else ""
        return f'"{self.plan_id}{suffix}"'


class RequestDigest(NamedTuple):
    """sha256 of a request body as it was sent."""

    digest: bytes


class PlanCache:
    """Two kinds of entry share one budget: a representation's bytes, and what a request body leads to."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.size_bytes = 0
        self._entries: OrderedDict[Representation | RequestDigest, bytes] = OrderedDict()

    def __repr__(self) -> str:
        return f"<PlanCache {len(self._entries)} entries, {self.size_bytes} of {self.max_bytes} bytes>"

    def get(self, key: Representation | RequestDigest) -> bytes | None:
        """The bytes, which become the most recently used; None when they were never put or are forgotten."""
        value = self._entries.get(key)
        if value is not None:
            self._entries.move_to_end(key)
        return value

    def put(self, key: Representation | RequestDigest, value: bytes) -> None:
        """Remember `value` and forget the oldest entries over the budget, `value` itself when it alone is over it."""
        self._forget(key)
        self._entries[key] = value
        self.size_bytes += _cost_bytes(value)
        while self.size_bytes > self.max_bytes:
            self._forget(next(iter(self._entries)))

    def check(self) -> None:
        """Raise AssertionError unless the running total is the sum of the entries and within the budget."""
        total = sum(_cost_bytes(value) for value in self._entries.values())
        if not total == self.size_bytes <= self.max_bytes:
            raise AssertionError(f"{self!r} holds {total} bytes")

    def _forget(self, key: Representation | RequestDigest) -> None:
        value = self._entries.pop(key, None)
        if value is not None:
            self.size_bytes -= _cost_bytes(value)


def _cost_bytes(value: bytes) -> int:
    return len(value) + ENTRY_OVERHEAD_BYTES
