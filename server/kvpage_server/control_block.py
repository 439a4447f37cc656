"""A pool's record in shared memory: what a worker needs to go on with the pool of a worker that died.

A control block is a sealed memfd whose descriptor travels with those of the pool's chunks. Layout, little-endian:

    0   8s   magic, `KVPGCTRL`
    8   u32  version, 2
    12  u32  size of this header, 80
    16  u64  size of the record
    24  u64  offset of the block state, a multiple of 4096
    32  u64  size of the block state (docs/protocol.md); 0 for a pool whose blocks are not leased
    40  8s   zeros
    48  32s  sha256 of the header with zeros in this place, and the record
    80       record: a `ControlRecord` in msgpack

The record never changes. The block state does, so the memfd is sealed against resizing but not against writing, and a
reader copies before it checks. Of the block state only pages that were touched take memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import struct
from typing import Self

import msgspec

from kvpage.errors import ProtocolError, SpecInvalid, shorten
from kvpage.memory.base import Chunk
from kvpage.memory.host import HostMemory
from kvpage.wire.messages import MAX_PLAN_BYTES, ChunkInfo
from kvpage.wire.values import Epoch, Name, PlanId, PoolId, Value, check_name

MAX_BLOCK_BYTES = 1 << 40
"""Most of it would be block state, which takes memory only where it is touched."""
MAX_RECORD_BYTES = 8 << 20

_MAGIC = b"KVPGCTRL"
_VERSION = 2
_HEADER = struct.Struct("<8sIIQQQ8s32s")
_NO_DIGEST = bytes(32)
_STATE_ALIGNMENT = 4096


class ControlRecord(Value, frozen=True, kw_only=True):
    """Everything about a pool that outlives its worker."""

    epoch: Epoch
    device: str
    pool_id: PoolId
    name: Name
    plan_id: PlanId
    plan: bytes
    chunks: list[ChunkInfo]

    @property
    def buffer_size_bytes(self) -> int:
        return sum(chunk.size_bytes for chunk in self.chunks)


class _Header(msgspec.Struct, frozen=True, kw_only=True):
    record_bytes: int
    state_offset: int
    state_bytes: int

    def pack(self, digest: bytes) -> bytes:
        sizes = (self.record_bytes, self.state_offset, self.state_bytes)
        return _HEADER.pack(_MAGIC, _VERSION, _HEADER.size, *sizes, bytes(8), digest)

    def digest(self, record: bytes) -> bytes:
        return hashlib.sha256(self.pack(_NO_DIGEST) + record).digest()

    @classmethod
    def unpack(cls, data: bytes, block_bytes: int) -> tuple[Self, bytes]:
        magic, version, header_bytes, record_bytes, state_offset, state_bytes, zeros, digest = _HEADER.unpack(data)
        if magic != _MAGIC:
            raise ProtocolError(f"not a control block: it begins with {magic.hex()}")
        if version != _VERSION or header_bytes != _HEADER.size:
            raise ProtocolError(f"a control block of version {version}; this worker reads version {_VERSION}")
        if zeros != bytes(8) or state_offset % _STATE_ALIGNMENT:
            raise ProtocolError(
                f"a control block with {zeros.hex()} where zeros belong, or with its state at {state_offset}, which is"
                f" no multiple of {_STATE_ALIGNMENT}"
            )
        if not _HEADER.size + record_bytes <= state_offset <= state_offset + state_bytes <= block_bytes:
            raise ProtocolError(
                f"a control block of {block_bytes} bytes cannot have a record of {record_bytes} bytes and"
                f" {state_bytes} bytes of state at {state_offset}"
            )
        return cls(record_bytes=record_bytes, state_offset=state_offset, state_bytes=state_bytes), digest


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ControlRecord)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _STATE_ALIGNMENT) * _STATE_ALIGNMENT


def control_block_bytes(record: ControlRecord) -> int:
    """How large the control block is that holds `record`, without block state."""
    return _aligned(_HEADER.size + len(_encoder.encode(record)))


def write_control_block(record: ControlRecord, memory: HostMemory, state_bytes: int = 0) -> Chunk:
    """A new control block that holds `record`, and zeros for its block state."""
    data = _encoder.encode(record)
    end = _HEADER.size + len(data)
    state_offset = _aligned(end)
    header = _Header(record_bytes=len(data), state_offset=state_offset, state_bytes=state_bytes)
    with contextlib.ExitStack() as undo:
        size_bytes = state_offset + _aligned(state_bytes)
        block = undo.enter_context(memory.create(size_bytes, committed_bytes=state_offset))
        written = os.pwrite(block.fd, header.pack(header.digest(data)) + data, 0)
        if written != end:
            raise ProtocolError(f"only {written} of {end} bytes of a control block could be written")
        undo.pop_all()
        return block


def adopt_control_block(fd: int, memory: HostMemory) -> tuple[Chunk, ControlRecord]:
    """The control block that a peer named by `fd`, which it owns from now on, and its record.

    Raises `ProtocolError` for anything a worker of this version did not write, or that was changed since.
    """
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, fd)
        size_bytes = os.fstat(fd).st_size
        if not _HEADER.size < size_bytes <= MAX_BLOCK_BYTES:
            raise ProtocolError(f"a control block has {_HEADER.size + 1} to {MAX_BLOCK_BYTES} bytes, not {size_bytes}")
        undo.pop_all()
        block = undo.enter_context(memory.import_chunk(fd, size_bytes, committed_bytes=0))
        record = _read(block)
        undo.pop_all()
        return block, record


def map_block_state(block: Chunk) -> mmap.mmap | None:
    """The block state of a control block that was written or adopted here; None where there is none."""
    header, _ = _Header.unpack(os.pread(block.fd, _HEADER.size, 0), block.size_bytes)
    if not header.state_bytes:
        return None
    return mmap.mmap(block.fd, header.state_bytes, mmap.MAP_SHARED, offset=header.state_offset)


def _read(block: Chunk) -> ControlRecord:
    header, digest = _Header.unpack(os.pread(block.fd, _HEADER.size, 0), block.size_bytes)
    if header.record_bytes > MAX_RECORD_BYTES:
        raise ProtocolError(
            f"the record of a control block has {header.record_bytes} bytes, at most {MAX_RECORD_BYTES}"
        )
    data = os.pread(block.fd, header.record_bytes, _HEADER.size)
    if header.digest(data) != digest:
        raise ProtocolError("the checksum of a control block does not match its contents")
    try:
        record = _decoder.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolError(f"the record of a control block cannot be read: {shorten(str(error))}") from error
    if not record.chunks or len(record.plan) > MAX_PLAN_BYTES:
        raise ProtocolError(f"a control block with {len(record.chunks)} chunks and a plan of {len(record.plan)} bytes")
    try:
        check_name("pool name", record.name)
    except SpecInvalid as error:
        raise ProtocolError(f"the record of a control block has a wrong name: {error.message}") from error
    return record
