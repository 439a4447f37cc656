"""How much memory a worker may hold for pools."""

from __future__ import annotations

import mmap
import re
from collections.abc import Callable
from fractions import Fraction

from kvpage.errors import NotEnoughMemory, SpecInvalid, shorten

HALF = Fraction(1, 2)

_POWERS = {"K": 1, "M": 2, "G": 3, "T": 4}
_BYTES = re.compile(r"(\d{1,20})(?:\.(\d{1,9}))? ?([KMGT])(i?)B", re.IGNORECASE)
_PLAIN = re.compile(r"\d{1,20}")
_SHARE = re.compile(r"(0|1)\.\d{1,9}")


def parse_memory(text: str) -> int | Fraction:
    """`--memory`: bytes (`8589934592`, `8GiB`, `1.5 GB`), or a share of what is available (`0.5`, `1.0`)."""
    if _PLAIN.fullmatch(text):
        value: int | Fraction = int(text)
    elif _SHARE.fullmatch(text):
        value = Fraction(text)
    elif match := _BYTES.fullmatch(text):
        value = int(Fraction(f"{match[1]}.{match[2] or 0}") * (1024 if match[4] else 1000) ** _POWERS[match[3].upper()])
    else:
        value = 0
    if value <= 0 or (isinstance(value, Fraction) and value > 1):
        raise SpecInvalid(
            f"memory {shorten(repr(text))} is neither a size in bytes such as 8589934592 or 8GiB, nor a share of what"
            " is available such as 0.5"
        )
    return value


def in_pages(size_bytes: int) -> int:
    """What the host gives for `size_bytes`."""
    return -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


class Budget:
    """Bytes promised to pools, and how many may be. A promise is made before the first byte is committed."""

    def __init__(self, memory: int | Fraction, available: Callable[[], int], free_bytes: int | None = None) -> None:
        """`available` reports the most that the device could commit now. `memory` may be a share of `free_bytes`, what
        is free when the worker starts; left out, of what is available then.
        """
        self._available = available
        self._share = memory if isinstance(memory, Fraction) else Fraction(0)
        free_bytes = available() if free_bytes is None else free_bytes
        self.limit_bytes = int(memory * free_bytes) if isinstance(memory, Fraction) else memory
        self.reserved_bytes = 0

    def __repr__(self) -> str:
        return f"<Budget {self.reserved_bytes} of {self.limit_bytes} bytes reserved>"

    def reserve(self, size_bytes: int, *, promised_bytes: int, buffer_bytes: int | None = None) -> None:
        """Promise `size_bytes`, which a pool of `buffer_bytes` takes. `promised_bytes` are reserved by others and not
        committed yet: the device still reports them as available. Raises `NotEnoughMemory`.
        """
        buffer_bytes = size_bytes if buffer_bytes is None else buffer_bytes
        left_bytes = self.limit_bytes - self.reserved_bytes
        there_bytes = self._available() - promised_bytes
        if size_bytes > min(left_bytes, there_bytes):
            limit = "left of --memory" if left_bytes <= there_bytes else "available on the device"
            free_bytes = max(0, min(left_bytes, there_bytes))
            raise NotEnoughMemory(
                f"a pool of {buffer_bytes} bytes takes {size_bytes}, in whole units of memory and on the host with its"
                f" plan; {free_bytes} bytes are {limit} (limit {self.limit_bytes}, reserved {self.reserved_bytes});"
                " make the pool smaller, delete another or raise --memory",
                details={
                    "buffer_size_bytes": buffer_bytes,
                    "needed_bytes": size_bytes,
                    "available_bytes": free_bytes,
                    "limit_bytes": self.limit_bytes,
                },
            )
        self.reserved_bytes += size_bytes

    def adopt(self, size_bytes: int) -> None:
        """Count memory that is there already, whatever the limit. Where the limit is a share of what was available,
        the share of this memory belongs to it: it was not available because it was in use for the same purpose.
        """
        self.limit_bytes += int(self._share * size_bytes)
        self.reserved_bytes += size_bytes

    def release(self, size_bytes: int) -> None:
        self.reserved_bytes -= size_bytes
