"""The contract of shareable memory: create a chunk, export it, import it, map it, close it.

A `MemoryKind` makes chunks; a `Chunk` is one physical allocation, named by a file descriptor; a `Mapping` is a chunk
in the address space of this process. Memory is given back to the system when the last descriptor and the last mapping
of it are gone, in whichever processes they are. Nobody can take memory back from a process that has mapped it.

Sizes and addresses are bytes. What is owned has an idempotent `close`; nothing relies on `__del__`.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Self, TypeAlias

from kvpage.errors import SpecInvalid, StaleHandle

MAX_CHUNK_BYTES = 2**62

Progress: TypeAlias = Callable[[int], None]
"""Told the bytes committed so far, from the thread that commits. What it raises abandons the creation."""


def no_progress(committed_bytes: int) -> None:
    """A `Progress` for callers who do not ask."""


def checked_size(size_bytes: int) -> int:
    if not 0 < size_bytes <= MAX_CHUNK_BYTES:
        raise SpecInvalid(f"a chunk of {size_bytes} bytes: it must have 1 to {MAX_CHUNK_BYTES} bytes")
    return size_bytes


class _Owned(ABC):
    @property
    @abstractmethod
    def closed(self) -> bool: ...

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Mapping(_Owned):
    """A chunk in this process's address space. A forked child does not inherit the memory."""

    @property
    @abstractmethod
    def address(self) -> int:
        """Of the first byte; a page boundary."""

    @property
    @abstractmethod
    def size_bytes(self) -> int: ...

    @property
    @abstractmethod
    def claim(self) -> Any:
        """The object that keeps the memory mapped: it stays so as long as this, or anything that refers to it, lives.

        Of host memory it has the buffer protocol, which `torch.frombuffer` and `memoryview` take. Raises `StaleHandle`
        after `close`.
        """

    @property
    @abstractmethod
    def unmapped(self) -> bool:
        """True once the memory has left the address space."""

    @abstractmethod
    def close(self) -> None:
        """Give up this object's own claim: the memory is unmapped when the last view of it dies, never before."""

    @abstractmethod
    def on_unmapped(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, when the memory has been unmapped; at once if it has been.

        It may run in any thread and in the middle of garbage collection: it must neither block nor raise. It does not
        run when the process ends first.
        """


class Chunk(_Owned):
    """One physical allocation. Closing it ends neither its mappings nor what was exported."""

    @property
    @abstractmethod
    def size_bytes(self) -> int: ...

    @property
    @abstractmethod
    def fd(self) -> int:
        """The descriptor that names the chunk, owned by it and closed on exec. Raises `StaleHandle` after `close`."""

    @property
    def handle(self) -> bytes:
        """What names the chunk beside its descriptor, where that is needed; a secret, for it needs no descriptor."""
        return b""

    @property
    def loss_fd(self) -> int | None:
        """A descriptor that is ready for reading, to a selector, when the memory is lost although the chunk is held;
        None where that cannot be. Not to be read from, and open only as long as the chunk.
        """
        return None

    def require_there(self) -> None:
        """Raises `StaleHandle` when the memory is lost. Never blocks."""

    @abstractmethod
    def export(self) -> int:
        """Another descriptor for the same memory, closed on exec, owned by the caller."""

    @abstractmethod
    def map(self, *, writable: bool = True) -> Mapping:
        """Bring the whole chunk into the address space. Two mappings of one chunk show the same bytes."""


class DescriptorChunk(Chunk):
    """What every chunk has that is nothing but a descriptor to whoever holds it."""

    def __init__(self, fd: int, size_bytes: int, close: Callable[[int], None] = os.close) -> None:
        """Owns `fd`, which `close` gives back."""
        self._fd: int | None = fd
        self._size_bytes = size_bytes
        self._close_fd = close

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    @property
    def fd(self) -> int:
        if self._fd is None:
            raise StaleHandle("the chunk is closed")
        return self._fd

    @property
    def closed(self) -> bool:
        return self._fd is None

    def close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            self._close_fd(fd)


class MemoryKind(ABC):
    """One way to make memory that other processes can map."""

    handle_kind: ClassVar[str]
    """How chunks of this kind are called on the wire."""
    unit_bytes: int
    """Memory is taken from the device in multiples of this."""

    def taken_bytes(self, size_bytes: int) -> int:
        """What a chunk of `size_bytes` takes from the device."""
        return -(-size_bytes // self.unit_bytes) * self.unit_bytes

    @abstractmethod
    def available_bytes(self) -> int:
        """What could be committed now, by what the system reports."""

    @abstractmethod
    def create(self, size_bytes: int, on_progress: Progress = no_progress) -> Chunk:
        """A chunk whose memory is all there, so that no later access can run out of it.

        Raises `NotEnoughMemory` before anything is committed where that can be known. Undoes itself when it fails.
        """

    @abstractmethod
    def import_chunk(self, fd: int, size_bytes: int, handle: bytes = b"") -> Chunk:
        """The chunk that a peer named by `fd`, which is owned by the chunk from now on and closed if it is refused.

        The peer is not trusted: raises `ProtocolError`, here or at the latest when it is mapped, unless `fd` and
        `handle` name memory of this kind, of `size_bytes`, all committed, that nobody can shrink or grow.
        """

    def map_chunk(self, fd: int, size_bytes: int, handle: bytes = b"") -> Mapping:
        """Map the chunk that a peer named by `fd`, which stays the caller's. Raises as `import_chunk` does."""
        with self.import_chunk(os.dup(fd), size_bytes, handle) as chunk:
            return chunk.map()
