"""One pool as its worker knows it."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

from msgspec.structs import replace

from kvpage.errors import Conflict, KvpageError, StaleHandle, shorten
from kvpage.memory.base import Chunk
from kvpage.wire.messages import MAX_HOLDERS_NAMED, ChunkInfo, Holder, PoolStateName


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolMemory:
    """What makes a pool real. Whoever removes it from a pool closes it."""

    chunks: tuple[Chunk, ...]
    control: Chunk

    @property
    def all(self) -> tuple[Chunk, ...]:
        """In the order in which descriptors are handed over."""
        return (*self.chunks, self.control)

    def close(self) -> None:
        for chunk in self.all:
            chunk.close()


@dataclass(slots=True, kw_only=True, eq=False)
class Pool:
    """One entry of a `PoolTable`, which alone changes it."""

    pool_id: str
    name: str
    plan_id: str
    plan: bytes
    chunks: tuple[ChunkInfo, ...]
    state: PoolStateName = "creating"
    committed_bytes: int = 0
    reserved_bytes: int = 0
    """Of the budget."""
    memory: PoolMemory | None = None
    holders: dict[int, Holder] = field(default_factory=dict)
    error: KvpageError | None = None
    abandoned: threading.Event = field(default_factory=threading.Event)
    """Set when the thread that commits the memory should stop."""

    @property
    def size_bytes(self) -> int:
        return sum(chunk.size_bytes for chunk in self.chunks)

    @property
    def is_held(self) -> bool:
        """Whether somebody holds memory that is there."""
        return bool(self.holders) and self.state != "failed"

    def require_ready(self) -> PoolMemory:
        """Raises `StaleHandle` when the memory is lost, `Conflict` when it is not there for another reason."""
        if self.state == "ready" and self.memory is not None:
            for chunk in self.memory.chunks:
                chunk.require_there()
            return self.memory
        if isinstance(self.error, StaleHandle):
            raise StaleHandle(f"pool {self.pool_id} ({shorten(self.name)}): {self.error.message}")
        raise Conflict(
            f"pool {self.pool_id} ({shorten(self.name)}) is {self.state}, not ready; "
            + ("wait for it" if self.state == "creating" else "create it again"),
            details={"pool_id": self.pool_id, "state": self.state},
        )


def with_handles(infos: Iterable[ChunkInfo], chunks: Iterable[Chunk]) -> tuple[ChunkInfo, ...]:
    """The descriptions of chunks that have been made."""
    return tuple(replace(info, handle=chunk.handle) for info, chunk in zip(infos, chunks, strict=True))


def held(pool: Pool) -> Conflict:
    """Why a pool is not deleted now, naming the first holders."""
    named = list(pool.holders.values())[:MAX_HOLDERS_NAMED]
    people = ", ".join(f"pid {holder.pid} uid {holder.uid} ({shorten(holder.client_name)})" for holder in named[:3])
    return Conflict(
        f"pool {pool.pool_id} ({shorten(pool.name)}) has {len(pool.holders)} holders: {people}"
        f"{', …' if len(pool.holders) > 3 else ''}; end them, let them detach first, or forget the pool by force",
        details={
            "num_holders": len(pool.holders),
            "holders": [{"pid": h.pid, "uid": h.uid, "client_name": h.client_name} for h in named],
        },
    )
