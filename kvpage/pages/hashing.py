"""Names of what blocks hold: hashes chained from the start of a prompt, the same in every process.

A block's hash is blake2b with a digest of 16 bytes over, without gaps, integers little-endian:

    u32 version · u32 group · u32 block size in tokens · u32 bytes of salt · u32 bytes of extra
    salt · 16 bytes hash of the block before, zeros for the first · token ids, u32 each · extra

`extra` names what the tokens alone do not say, such as images: for each span that overlaps the block, in the order of
their starts: i64 start of the span in tokens, counted from the block's start · u32 bytes of content · content. Only
whole blocks have a hash. docs/protocol.md has vectors.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from kvpage.errors import SpecInvalid, shorten

HASH_VERSION = 1
HASH_BYTES = 16
ROOT = bytes(HASH_BYTES)
"""Stands for the hash of the block before the first."""
MAX_CONTENT_BYTES = 65_536  # of a salt, and of what a span says: names and digests, not pictures
_TOKEN_BYTES = 4
_HEADER = struct.Struct("<5I")
_SPAN = struct.Struct("<qI")

Tokens = Sequence[int] | npt.NDArray[np.integer[Any]]
"""Token ids, each at least 0 and less than 2^32."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Span:
    """Tokens whose meaning is in `content` too: the digest of an image, the name of an adapter."""

    start_tokens: int
    end_tokens: int
    """One past the last."""
    content: bytes

    def __post_init__(self) -> None:
        if not 0 <= self.start_tokens < self.end_tokens < 2**62:
            raise SpecInvalid(
                f"a span of tokens {self.start_tokens} to {self.end_tokens} is empty or out of range; it begins at 0 "
                f"or later and ends, below 2^62, after it begins"
            )
        _check_length(self.content, "the content of a span")


def _check_length(content: bytes, what: str) -> None:
    if len(content) > MAX_CONTENT_BYTES:
        raise SpecInvalid(
            f"{what} has {len(content)} bytes, of at most {MAX_CONTENT_BYTES}; give a digest of it instead"
        )


def token_bytes(tokens: Tokens) -> bytes:
    """Token ids as they are hashed. Raises `SpecInvalid` for what is no sequence of ids."""
    if isinstance(tokens, np.ndarray):
        return _array_bytes(tokens)
    if isinstance(tokens, str | bytes | bytearray | memoryview) or not isinstance(tokens, Iterable):
        raise SpecInvalid(
            f"token ids are a list or an array of integers, not {type(tokens).__name__}; tokenize text first"
        )
    try:
        packed = array("I", tokens)
    except (TypeError, OverflowError) as error:
        raise SpecInvalid(_first_fault(tokens)) from error
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _array_bytes(tokens: npt.NDArray[np.integer[Any]]) -> bytes:
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise SpecInvalid(
            f"an array of token ids has one axis and integers, not {tokens.ndim} axes of {tokens.dtype}; flatten it"
        )
    if len(tokens) and (tokens.min() < 0 or tokens.max() >= 2**32):
        raise SpecInvalid(_first_fault(tokens.tolist()))
    return tokens.astype("<u4", copy=False).tobytes()


def _first_fault(tokens: Any) -> str:
    for position, token in enumerate(tokens):
        if not isinstance(token, int | np.integer) or not 0 <= token < 2**32:
            return (
                f"token {position} is {shorten(repr(token))}; ids are integers from 0 to 2^32 - 1: leave padding and "
                f"placeholders out"
            )
    return "token ids are a list or an array of integers from 0 to 2^32 - 1"


def split_hashes(data: bytes) -> tuple[bytes, ...]:
    """Hashes that lie one after the other."""
    return tuple(data[start : start + HASH_BYTES] for start in range(0, len(data), HASH_BYTES))


class BlockHasher:
    """Hashes the blocks of one group."""

    def __init__(self, group: int, block_size: int, salt: bytes = b"", spans: Sequence[Span] = ()) -> None:
        """`salt`: what keeps tenants apart; only equal salts find each other's blocks. Raises `SpecInvalid`."""
        _check_length(salt, "the salt")
        self._group, self._block_size, self._salt = group, block_size, salt
        self._spans = sorted(spans)
        last_token = max((span.end_tokens for span in spans), default=0)
        self._end_of_spans = -(-last_token // block_size)
        """Blocks from here on have no span."""
        self._plain = blake2b(self._header(b""), digest_size=HASH_BYTES)

    def extend(self, hashes: list[bytes], data: bytes | bytearray, num_blocks: int) -> None:
        """Append to `hashes`, those of the first blocks, until there are `num_blocks`; `data`: `token_bytes` of all."""
        step = self._block_size * _TOKEN_BYTES
        parent = hashes[-1] if hashes else ROOT
        for block in range(len(hashes), min(num_blocks, self._end_of_spans)):
            extra = self._extra(block)
            content = self._header(extra) + parent + data[block * step : (block + 1) * step] + extra
            parent = blake2b(content, digest_size=HASH_BYTES).digest()
            hashes.append(parent)
        copy_plain, append = self._plain.copy, hashes.append
        for start in range(len(hashes) * step, num_blocks * step, step):
            state = copy_plain()  # it has the header already, and so costs half of a new one
            state.update(parent)
            state.update(data[start : start + step])
            parent = state.digest()
            append(parent)

    def _header(self, extra: bytes) -> bytes:
        sizes = HASH_VERSION, self._group, self._block_size, len(self._salt), len(extra)
        return _HEADER.pack(*sizes) + self._salt

    def _extra(self, block: int) -> bytes:
        start, end = block * self._block_size, (block + 1) * self._block_size
        overlapping = (span for span in self._spans if span.start_tokens < end and span.end_tokens > start)
        return b"".join(_SPAN.pack(span.start_tokens - start, len(span.content)) + span.content for span in overlapping)


def block_hashes(
    tokens: Tokens, *, group: int, block_size: int, salt: bytes = b"", spans: Sequence[Span] = ()
) -> list[bytes]:
    """The hash of every whole block of `block_size` tokens, from the first on. Raises `SpecInvalid`."""
    data = token_bytes(tokens)
    hashes: list[bytes] = []
    BlockHasher(group, block_size, salt, spans).extend(hashes, data, len(data) // (block_size * _TOKEN_BYTES))
    return hashes


class TokenHashes:
    """The tokens of one request, and the hashes of its blocks in every group, each computed when first asked for."""

    def __init__(self, block_sizes: Sequence[int], *, salt: bytes = b"", spans: Sequence[Span] = ()) -> None:
        """`block_sizes`: by group."""
        self._data = bytearray()
        self._block_sizes = tuple(block_sizes)
        self._hashers = [BlockHasher(group, size, salt, spans) for group, size in enumerate(block_sizes)]
        self._hashes: list[list[bytes]] = [[] for _ in block_sizes]

    def __len__(self) -> int:
        """Tokens."""
        return len(self._data) // _TOKEN_BYTES

    def append(self, tokens: Tokens) -> None:
        """Raises `SpecInvalid` for what is no token id, and appends nothing."""
        self._data += token_bytes(tokens)

    def truncate(self, num_tokens: int) -> None:
        """Keep the first `num_tokens`."""
        del self._data[num_tokens * _TOKEN_BYTES :]
        for hashes, size in zip(self._hashes, self._block_sizes, strict=True):
            del hashes[num_tokens // size :]

    def of(self, group: int, num_blocks: int) -> list[bytes]:
        """Hashes of at least the first `num_blocks` blocks of the group, all of them whole; not to be changed."""
        hashes = self._hashes[group]
        if len(hashes) < num_blocks:
            self._hashers[group].extend(hashes, self._data, num_blocks)
        return hashes

    def copy(self) -> Self:
        """Of another request that has the same tokens so far."""
        twin = object.__new__(type(self))
        twin._data = self._data.copy()
        twin._block_sizes, twin._hashers = self._block_sizes, self._hashers
        twin._hashes = [hashes.copy() for hashes in self._hashes]
        return twin
