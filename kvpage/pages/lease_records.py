"""Which leases a pool has, in memory that outlives the process: one row for each, and the settings of its tenants.

Layout, native byte order:

    magic     int64[8]             which content this is; how often all cached content was forgotten, and 1
                                   while that is under way; zeros
    rows      int64[rows, 2]       0: unused, 1 or 2: the text of which half counts; until when it is kept, in
                                   milliseconds of CLOCK_MONOTONIC, 0: not by time
    halves    byte[rows, 2, 1024] u16 length, and a `LeaseRecord` in msgpack
    settings  int64[8], byte[2, 128 KiB]  the same for the tenants: which half counts, u32 length, list of `Tenant`

A text is changed by writing the half that does not count, and then the one word that says which does: a process that is
killed leaves the one or the other.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

import msgspec

from kvpage.errors import Conflict, SpecInvalid, TooManyClients
from kvpage.pages.holding_arrays import MAX_HOLDERS
from kvpage.pages.machine_time import offset_s
from kvpage.pages.tenants import Tenant

MAGIC = int.from_bytes(b"kvplse1\0", "little")
_HEADER_BYTES, _HALF_BYTES, _SETTINGS_BYTES = 64, 1024, 128 << 10
_NUM_ROWS = MAX_HOLDERS + 1  # row 0 is nobody's: 0 holds nothing
_ROWS_BYTES = 16 * _NUM_ROWS
_HALVES_AT = _HEADER_BYTES + _ROWS_BYTES
_SETTINGS_AT = _HALVES_AT + 2 * _HALF_BYTES * _NUM_ROWS
RECORDS_BYTES = _SETTINGS_AT + _HEADER_BYTES + 2 * _SETTINGS_BYTES
"""Size of the buffer that `LeaseRecords` need."""


class LeaseRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What must be known of a lease to go on with it in another process."""

    lease_id: str
    """`lease-` and 16 hex digits; of a reservation that of the lease it is for."""
    name: str
    tenant: str = ""
    digest: bytes = b""
    """sha256 of the token that its owner has."""
    generation: int = 1
    """How often it has had an owner."""
    pid: int = 0
    """Of the owner as the worker sees it; 0: not seen."""
    born: int = 0
    """When that process began, in clock ticks since boot; 0: not known."""
    client_name: str = ""
    key: int = 0
    """Of the request by which that process became its owner."""
    ttl_s: float = 0.0
    """It ends when it was not renewed for so long; 0: it is bound to a connection."""
    keep_s: float = 0.0
    """How long after its owner's end it waits for somebody who adopts it."""
    is_reservation: bool = False


_encoder = msgspec.msgpack.Encoder()
_record_decoder = msgspec.msgpack.Decoder(LeaseRecord)
_tenants_decoder = msgspec.msgpack.Decoder(list[Tenant])


class LeaseRecords:
    """Rows are numbered from 1, as the holders of `Holdings` are."""

    def __init__(self, buffer: Any) -> None:
        """`buffer`: writable, `RECORDS_BYTES` bytes; zeros at first. Raises `SpecInvalid` for another size, `Conflict`
        for another content."""
        view = memoryview(buffer).cast("B")
        if view.nbytes != RECORDS_BYTES or view.readonly:
            raise SpecInvalid(f"leases need a writable buffer of {RECORDS_BYTES} bytes; this one has {view.nbytes}")
        self._view = view
        self._magic = view[:_HEADER_BYTES].cast("q")
        self._rows = view[_HEADER_BYTES:_HALVES_AT].cast("q")
        self._settings = view[_SETTINGS_AT : _SETTINGS_AT + 8].cast("q")
        if self._magic[0] not in (0, MAGIC):
            raise Conflict(f"the buffer begins with {self._magic[0]}, so it does not hold leases")
        self._magic[0] = MAGIC
        self.find_unused()

    def find_unused(self) -> None:
        """Again, after something went wrong at any moment."""
        self._unused = [row for row in range(MAX_HOLDERS, 0, -1) if not self._rows[2 * row]]

    def close(self) -> None:
        """Let go of the buffer."""
        vars(self).clear()

    def all(self) -> dict[int, LeaseRecord]:
        """By row. Raises `Conflict` for what cannot be read."""
        return {row: self.read(row) for row in sorted(self.rows())}

    def read(self, row: int) -> LeaseRecord:
        """Raises `Conflict`."""
        half = self._rows[2 * row]
        if half not in (1, 2):
            raise Conflict(f"the row of lease {row} says {half}, so it does not hold leases")
        record: LeaseRecord = _unpacked(self._half(row, half), "<H", _record_decoder, f"lease {row}")
        return record

    def _half(self, row: int, half: int) -> memoryview[int]:
        start = _HALVES_AT + (2 * row + half - 1) * _HALF_BYTES
        return self._view[start : start + _HALF_BYTES]

    def rows(self) -> set[int]:
        """Those that are used."""
        return {row for row in range(1, _NUM_ROWS) if self._rows[2 * row]}

    @property
    def num_unused(self) -> int:
        return len(self._unused)

    def next_row(self) -> int:
        """The one that `add` takes next. Raises `TooManyClients` when all are taken."""
        if not self._unused:
            raise TooManyClients(
                f"the pool has {MAX_HOLDERS} leases and reservations, as many as it may have; close some",
                details={"limit": MAX_HOLDERS},
            )
        return self._unused[-1]

    def add(self, record: LeaseRecord) -> int:
        """Its row. Raises `TooManyClients` when all are taken, `SpecInvalid` for what is too long."""
        row = self.next_row()
        self._rows[2 * row + 1] = 0
        self.change(row, record)
        return self._unused.pop()

    def change(self, row: int, record: LeaseRecord) -> None:
        half = 2 if self._rows[2 * row] == 1 else 1
        try:
            data = _encoder.encode(record)
        except UnicodeEncodeError as error:
            raise SpecInvalid(f"lease {record.name}: what its owner is called is no text that can be kept") from error
        _pack(data, self._half(row, half), "<H", f"lease {record.name}")
        self._rows[2 * row] = half

    def remove(self, row: int) -> None:
        """It is nobody's any more."""
        self._rows[2 * row] = 0
        self._unused.append(row)

    def expires_s(self, row: int) -> float | None:
        """Until when it is kept, by `time.monotonic()`, if it is by time."""
        milliseconds = self._rows[2 * row + 1]
        return milliseconds / 1000 + offset_s("monotonic") if milliseconds else None

    def expire_at(self, row: int, when_s: float | None) -> None:
        self._rows[2 * row + 1] = 0 if when_s is None else max(1, int((when_s - offset_s("monotonic")) * 1000))

    @property
    def era(self) -> int:
        """How often all cached content was forgotten."""
        return self._magic[1]

    @property
    def is_forgetting(self) -> bool:
        """Whether an era has begun and the content of the one before is not all forgotten."""
        return self._magic[2] != 0

    def begin_era(self) -> None:
        self._magic[2] = 1
        self._magic[1] += 1

    def end_forgetting(self) -> None:
        self._magic[2] = 0

    def tenants(self) -> list[Tenant]:
        """Those that were ever set. Raises `Conflict` for what cannot be read."""
        half = self._settings[0]
        if half not in (0, 1, 2):
            raise Conflict(f"the tenants' row says {half}, so it does not hold tenants")
        return _unpacked(self._settings_half(half), "<I", _tenants_decoder, "tenants") if half else []

    def set_tenants(self, tenants: Iterable[Tenant]) -> None:
        """Raises `SpecInvalid` where they are more than fit."""
        half = 2 if self._settings[0] == 1 else 1
        _pack(_encoder.encode(list(tenants)), self._settings_half(half), "<I", "the tenants' settings")
        self._settings[0] = half

    def _settings_half(self, half: int) -> memoryview[int]:
        start = _SETTINGS_AT + _HEADER_BYTES + (half - 1) * _SETTINGS_BYTES
        return self._view[start : start + _SETTINGS_BYTES]


def _pack(data: bytes, half: memoryview[int], length_format: str, what: str) -> None:
    start = struct.calcsize(length_format)
    if start + len(data) > len(half):
        raise SpecInvalid(f"{what}: {len(data)} bytes, at most {len(half) - start} are kept; use shorter names")
    half[start : start + len(data)] = data
    struct.pack_into(length_format, half, 0, len(data))


def _unpacked(half: memoryview[int], length_format: str, decoder: msgspec.msgpack.Decoder[Any], what: str) -> Any:
    start = struct.calcsize(length_format)
    (length,) = struct.unpack_from(length_format, half)
    try:
        return decoder.decode(half[start : start + length])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise Conflict(f"{what}: what is kept cannot be read: {error}") from error
