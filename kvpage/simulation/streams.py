"""Request streams: endless sequences of (prompt tokens, output tokens), the same for the same seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from math import exp
from random import Random
from statistics import NormalDist
from typing import NamedTuple

from kvpage.errors import SpecInvalid, shorten

MAX_TOKENS = 1 << 24
MAX_FILE_REQUESTS = 1_000_000
_NORMAL = NormalDist()


class RequestLengths(NamedTuple):
    """Tokens of one request; both at least 1."""

    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Uniform:
    """Whole numbers from `low` to `high`, both included, each as likely."""

    low: int
    high: int

    def draw(self, random: Random) -> int:
        return self.low + int(random.random() * (self.high - self.low + 1))


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Half of the values are below `median`; `sigma` is the standard deviation of the natural logarithm."""

    median: float
    sigma: float

    def draw(self, random: Random) -> int:
        # By the inverse of the distribution: random() is the one generator that Python promises never to change.
        quantile = min(max(random.random(), 1e-12), 1 - 1e-12)
        return min(max(1, round(self.median * exp(self.sigma * _NORMAL.inv_cdf(quantile)))), MAX_TOKENS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """Where requests come from. There is always another one waiting."""

    name: str
    about: str
    """The lengths, in words."""
    steps: int
    """How many steps to replay when nothing else is said."""
    make: Callable[[int], Iterator[RequestLengths]]
    """seed → endless requests."""


@dataclass(frozen=True, slots=True)
class _Mix:
    prompt: Uniform | LogNormal
    output: Uniform | LogNormal

    def __call__(self, seed: int) -> Iterator[RequestLengths]:
        random = Random(seed)
        while True:
            yield RequestLengths(self.prompt.draw(random), self.output.draw(random))


# Ranges, medians and sigmas are assumptions; docs/planning.md says so.
SHORT = Stream(
    name="short",
    about="prompt 16-400 and output 16-300 tokens, uniform",
    steps=300,
    make=_Mix(Uniform(16, 400), Uniform(16, 300)),
)
CHAT = Stream(
    name="chat",
    about="log-normal: prompt median 545 (sigma 1.08), output median 200 (sigma 0.8) tokens",
    steps=1_500,
    make=_Mix(LogNormal(545, 1.08), LogNormal(200, 0.8)),
)
LONG = Stream(
    name="long",
    about="log-normal: prompt median 14,800 (sigma 0.78), output median 490 (sigma 0.8) tokens",
    steps=3_000,
    make=_Mix(LogNormal(14_800, 0.78), LogNormal(490, 0.8)),
)
BUILT_IN = {stream.name: stream for stream in (SHORT, CHAT, LONG)}


def stream_of_lengths(text: str, name: str) -> Stream:
    """The requests of a file, `prompt,output` a line, again and again in the order of the file; the seed is not used.

    Empty lines and what follows `#` are skipped. Raises `SpecInvalid` naming the line.
    """
    lengths = tuple(_parse_lines(text, name))
    if not lengths:
        raise SpecInvalid(f"{name} names no request; write one `prompt,output` a line, in tokens")
    longest = max(each.output_tokens for each in lengths)
    return Stream(
        name=name,
        about=f"{len(lengths):,} requests of a file, repeated",
        steps=min(max(2_000, 10 * longest), 50_000),
        make=lambda seed: cycle(lengths),
    )


def _parse_lines(text: str, name: str) -> Iterator[RequestLengths]:
    found = 0
    for number, line in enumerate(text.splitlines(), 1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        found += 1
        if found > MAX_FILE_REQUESTS:
            raise SpecInvalid(f"{name} has more than {MAX_FILE_REQUESTS:,} requests; take a sample of them")
        yield _parse_line(content, f"{name}, line {number}")


def _parse_line(content: str, where: str) -> RequestLengths:
    fields = [field.strip() for field in content.split(",")]
    if len(fields) != 2 or not all(field.isascii() and field.isdigit() and len(field) < 10 for field in fields):
        raise SpecInvalid(f"{where}: {shorten(content)!r} is not `prompt,output`, two whole numbers of tokens")
    prompt, output = int(fields[0]), int(fields[1])
    if not (1 <= prompt <= MAX_TOKENS and 1 <= output <= MAX_TOKENS):
        raise SpecInvalid(f"{where}: {shorten(content)!r}: both are from 1 to {MAX_TOKENS:,} tokens")
    return RequestLengths(prompt, output)
