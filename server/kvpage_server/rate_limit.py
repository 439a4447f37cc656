"""How often something may be done: a bucket for each name, filled at a steady rate, empty when too much was taken."""

from __future__ import annotations

import math
import time
from collections.abc import Callable


class Buckets:
    """Used from the event loop only."""

    def __init__(
        self, per_s: float, *, burst: float, max_names: int, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        """`burst`: what a full bucket has, at least 1. `max_names`: how many buckets are remembered."""
        self._interval_s = 1 / per_s
        self._depth_s = burst / per_s
        self._max_names = max_names
        self._clock_s = clock_s
        self._full_at_s: dict[str, float] = {}
        """When each bucket will be full again; one that is full needs no remembering."""

    def __len__(self) -> int:
        return len(self._full_at_s)

    def take(self, name: str) -> float:
        """0 when one could be taken, else the seconds until one can; then nothing is taken."""
        now_s = self._clock_s()
        full_at_s = max(now_s, self._full_at_s.get(name, 0.0)) + self._interval_s
        wait_s = full_at_s - self._depth_s - now_s
        if wait_s > 1e-9:  # sums of intervals are a little off
            return wait_s
        if len(self._full_at_s) >= self._max_names:
            self._forget(now_s)
        self._full_at_s[name] = full_at_s
        return 0.0

    def _forget(self, now_s: float) -> None:
        """Those that are full; and all of them when none is, which lets everybody do a little more, once."""
        left = {name: at_s for name, at_s in self._full_at_s.items() if at_s > now_s}
        self._full_at_s = left if len(left) < self._max_names else {}


class ChangeLimit:
    """Of requests that change something: so many a second with each token. There are no more buckets than tokens."""

    def __init__(self, per_s: float, *, max_tokens: int, clock_s: Callable[[], float] = time.monotonic) -> None:
        self.per_s = per_s
        self._window_s = 1 if per_s >= 1 else math.ceil(1 / per_s)
        self._quota = max(1, math.floor(per_s))
        burst = max(1.0, per_s)
        self._buckets = Buckets(per_s, burst=burst, max_names=max_tokens, clock_s=clock_s)

    def wait_s(self, token_name: str) -> float:
        """0: go on."""
        return self._buckets.take(token_name)

    def headers(self, wait_s: float) -> dict[str, str]:
        """Of the refusal: draft-ietf-httpapi-ratelimit-headers, and `Retry-After`."""
        seconds = math.ceil(wait_s)
        return {
            "Retry-After": str(seconds),
            "RateLimit-Policy": f'"changes";q={self._quota};w={self._window_s}',
            "RateLimit": f'"changes";r=0;t={seconds}',
        }
