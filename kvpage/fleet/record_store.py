"""The records of one node: files in its run directory, or, where there are no machines, in memory."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from kvpage.errors import DeviceUnavailable, NotFound
from kvpage.fleet.records import FleetRecord, check_id
from kvpage.run_directory import RunDirectory


@dataclass(frozen=True, slots=True)
class Kept:
    """A record, and since when it is kept, by a clock that goes on through restarts of processes."""

    record: FleetRecord
    since_s: float


class RecordStore(Protocol):
    """A change is there for good when its call returns, or not at all."""

    def all(self) -> list[Kept]:
        """In the order of ids."""
        ...

    def get(self, plan_id: str) -> FleetRecord:
        """Raises `NotFound`."""
        ...

    def put(self, record: FleetRecord) -> None: ...

    def drop(self, plan_id: str) -> None:
        """Also of what is not there."""
        ...

    def now_s(self) -> float: ...


class _Stored(msgspec.Struct, frozen=True, kw_only=True):
    """Content of a file."""

    node: str
    since_s: float
    record: FleetRecord


class RecordFiles:
    """`fleet-<id>.json`, each replaced whole. Whoever attaches reads them too."""

    def __init__(self, runs: RunDirectory, node: str) -> None:
        self._runs = runs
        self._node = node

    def all(self) -> list[Kept]:
        return [Kept(stored.record, stored.since_s) for stored in _read_all(self._runs.path)]

    def get(self, plan_id: str) -> FleetRecord:
        try:
            return _read(self._path(plan_id)).record
        except FileNotFoundError:
            raise _unknown(plan_id) from None

    def put(self, record: FleetRecord) -> None:
        path = self._path(record.id)
        whole = _Stored(node=self._node, since_s=self.now_s(), record=record)
        new = path.with_suffix(".new")
        try:
            descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o640)
            with open(descriptor, "wb") as file:
                file.write(msgspec.json.encode(whole))
            new.replace(path)
        except OSError as error:
            raise DeviceUnavailable(f"cannot write {path}: {error.strerror}") from error

    def drop(self, plan_id: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._path(plan_id).unlink()

    def now_s(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def _path(self, plan_id: str) -> Path:
        return self._runs.path / f"{check_id(plan_id)}.json"


def records_in(folder: Path) -> list[tuple[str, FleetRecord]]:
    """The node and its records, read by somebody else than its allocator."""
    return [(stored.node, stored.record) for stored in _read_all(folder)]


def _read_all(folder: Path) -> list[_Stored]:
    found = []
    for path in sorted(folder.glob("fleet-*.json")):
        with contextlib.suppress(FileNotFoundError):  # dropped meanwhile
            found.append(_read(path))
    return found


def _read(path: Path) -> _Stored:
    """Raises FileNotFoundError, `DeviceUnavailable` for what is no record."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Stored)
    except FileNotFoundError:
        raise
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DeviceUnavailable(
            f"{path} is no record of a fleet's plan: {error}; remove it if no pool needs it"
        ) from None


class MemoryRecords:
    """The same without files."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._kept: dict[str, Kept] = {}

    def all(self) -> list[Kept]:
        return [self._kept[plan_id] for plan_id in sorted(self._kept)]

    def get(self, plan_id: str) -> FleetRecord:
        try:
            return self._kept[plan_id].record
        except KeyError:
            raise _unknown(plan_id) from None

    def put(self, record: FleetRecord) -> None:
        self._kept[record.id] = Kept(record, self.now_s())

    def drop(self, plan_id: str) -> None:
        self._kept.pop(plan_id, None)

    def now_s(self) -> float:
        return self._clock()


def _unknown(plan_id: str) -> NotFound:
    return NotFound(f"this node has no record of the fleet's plan {plan_id}", details={"id": plan_id})
