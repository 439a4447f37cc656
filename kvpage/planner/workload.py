"""The requests that a layout is judged by, and how many blocks they hold of it.

Lengths are those of requests in their steady state, prompt done: a window keeps `sliding_window` tokens, which may
straddle one block more; tokens in flight, which a scheduler admits by, are not counted here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from kvpage.specs import LayerSpec, Lengths, ceil_div

_DENSE_TOKENS = 2**17  # lengths up to here are summed by table, every one of them
_MOST_LENGTHS = 2**11  # of all parts together that go beyond: an even choice of them
DEFAULT_LONGEST_TOKENS = 131_072


@dataclass(frozen=True, slots=True)
class WorkloadPart:
    """Requests of `min_tokens` to `max_tokens` tokens, all equally likely, with a share of `weight`."""

    min_tokens: int
    max_tokens: int
    weight: float = 1.0

    def lengths(self, at_most: int = _MOST_LENGTHS) -> range:
        """All of them; of very long ones about `at_most`, by an odd step so that no block size divides it."""
        step = 1 if self.is_dense else ceil_div(self.max_tokens - self.min_tokens + 1, at_most)
        step += 1 - step % 2
        return range(self.min_tokens + step // 2, self.max_tokens + 1, step)

    @property
    def is_dense(self) -> bool:
        """Whether its lengths are summed by table."""
        return self.min_tokens < self.max_tokens <= _DENSE_TOKENS


Workload = tuple[WorkloadPart, ...]
DEFAULT_WORKLOAD: Workload = (
    WorkloadPart(512, 4_096),
    WorkloadPart(4_096, 32_768),
    WorkloadPart(DEFAULT_LONGEST_TOKENS, DEFAULT_LONGEST_TOKENS),
)
"""Short, middle and long requests as often. Ranges, so that no plan is fitted to a few round lengths."""


def default_workload(max_model_len: int | None) -> Workload:
    """`DEFAULT_WORKLOAD` without what is longer than the longest request."""
    if max_model_len is None:
        return DEFAULT_WORKLOAD
    longest = [part for part in DEFAULT_WORKLOAD if part.min_tokens <= max_model_len]
    cut = tuple(WorkloadPart(part.min_tokens, min(part.max_tokens, max_model_len), part.weight) for part in longest)
    return cut or (WorkloadPart(max_model_len, max_model_len),)


@dataclass(frozen=True, slots=True)
class Kept:
    """What requests keep of layers alike: `bytes_per_token` of their last `at_most_tokens`, and `fixed_bytes`."""

    bytes_per_token: float
    at_most_tokens: int | None
    fixed_bytes: float

    def bytes_of(self, tokens: int) -> float:
        capped = tokens if self.at_most_tokens is None else min(tokens, self.at_most_tokens)
        return self.fixed_bytes + self.bytes_per_token * capped


def kept_of(spec: LayerSpec, count: int, lengths: Lengths) -> Kept:
    """What one request keeps in `count` layers of `spec`."""
    if not spec.is_attention:
        return Kept(0.0, None, float(count * spec.real_page_size_bytes * spec.max_blocks(lengths)))
    token_bytes = count * spec.real_page_size_bytes / spec.block_size
    if not spec.grows_with_request:
        return Kept(0.0, None, token_bytes * spec.max_tokens_held(lengths))
    return Kept(token_bytes, spec.keeps_at_most_tokens, 0.0)


class Demand:
    """Blocks that the requests of a workload hold, each request divided by the bytes it keeps, and the mean taken.

    So the bytes of a block times `blocks` is the share of a group in mean (bytes held / bytes kept).
    """

    def __init__(self, workload: Workload, kept: Sequence[Kept], lengths: Lengths) -> None:
        """`kept`: of all layers of the model. At least one must keep something of every request."""
        self._lengths = lengths
        total_weight = sum(part.weight for part in workload)
        steps = [0.0] * (2 + max((part.max_tokens for part in workload if part.is_dense), default=0))
        for part in workload:
            if part.is_dense:
                each = part.weight / total_weight / len(part.lengths())
                steps[part.min_tokens] += each
                steps[part.max_tokens + 1] -= each
        self._above = _sums_above(_divided(list(accumulate(steps))[:-1], kept))
        self._points = [*_points([part for part in workload if not part.is_dense], total_weight, kept)]
        """(tokens, share of these requests / bytes they keep)."""
        self.requests = self._above[0] + sum(share for _, share in self._points)
        """Mean of 1 / bytes kept."""
        self._known: dict[tuple[int | None, int], float] = {}

    def blocks(self, spec: LayerSpec, block_size: int) -> float:
        """Mean of (blocks of `block_size` tokens that a request holds / bytes that it keeps)."""
        if not spec.is_attention:
            return self.requests * spec.max_blocks(self._lengths)
        if not spec.grows_with_request:
            return self.requests * ceil_div(spec.max_tokens_held(self._lengths), block_size)
        key = (spec.keeps_at_most_tokens, block_size)
        if key not in self._known:
            self._known[key] = self._growing_blocks(*key)
        return self._known[key]

    def _growing_blocks(self, window: int | None, block_size: int) -> float:
        above, last = self._above, len(self._above) - 1
        cap = last if window is None else min(window, last)
        # Sum over lengths up to cap of ceil(length / block size), as one for each block boundary below the length.
        total = sum(above[0:cap:block_size]) - ceil_div(cap, block_size) * above[cap]
        straddling = 0 if window is None else ceil_div(window - 1, block_size) + 1
        if window is not None and window < last:
            total += straddling * above[cap]
        for tokens, share in self._points:
            is_inside = window is None or tokens <= window
            total += share * (ceil_div(tokens, block_size) if is_inside else straddling)
        return total


def _divided(shares: list[float], kept: Sequence[Kept]) -> list[float]:
    """The share of each length by the bytes kept: between two windows' lengths those grow evenly."""
    corners = sorted({one.at_most_tokens for one in kept if one.at_most_tokens is not None})
    divided: list[float] = []
    for corner in (*corners, len(shares) - 1):
        start, end = len(divided), min(corner + 1, len(shares))
        base, slope = _line(start, kept)
        divided += [share and share / (base + slope * n) for n, share in enumerate(shares[start:end], start)]
    return divided


def _points(parts: Sequence[WorkloadPart], total_weight: float, kept: Sequence[Kept]) -> Iterator[tuple[int, float]]:
    for part in parts:
        among = part.lengths(max(1, _MOST_LENGTHS // len(parts)))
        share = part.weight / total_weight / len(among)
        yield from ((tokens, share / sum(one.bytes_of(tokens) for one in kept)) for tokens in among)


def _line(tokens: int, kept: Sequence[Kept]) -> tuple[float, float]:
    """Bytes kept of requests about as long as `tokens`: (base, slope)."""
    base = slope = 0.0
    for one in kept:
        base += one.fixed_bytes
        if one.at_most_tokens is None or tokens <= one.at_most_tokens:
            slope += one.bytes_per_token
        else:
            base += one.bytes_per_token * one.at_most_tokens
    return base, slope


def _sums_above(at: Sequence[float]) -> list[float]:
    """Entry n: the sum of all entries above n."""
    above = list(accumulate(reversed(at)))
    return [*above[-2::-1], 0.0]
