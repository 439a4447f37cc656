"""The leases of a pool: who may hold blocks, under which name, and how to prove to be the same again.

A lease holds blocks for its owner. `adopt` gives it to another owner by its name and token: from then on it has another
id, so the one before can do nothing with it any more.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from typing import Literal, NamedTuple

from msgspec.structs import replace

from kvpage.errors import Conflict, NotFound, OutOfBlocks, PermissionDenied, SpecInvalid, StaleHandle, shorten
from kvpage.pages.arrays import Ints
from kvpage.pages.holding_arrays import MAX_HOLDERS
from kvpage.pages.lease_records import LeaseRecord, LeaseRecords
from kvpage.pages.steps import NOT_KEPT, Grant
from kvpage.pages.tenants import Tenant
from kvpage.pages.whole import Whole

MIN_TOKEN_BYTES, MAX_TOKEN_BYTES = 16, 256
MAX_NAME_BYTES = 256
MAX_TENANTS = 1000

LeaseState = Literal["active", "quarantined", "kept", "ended"]
"""`active`: its owner is there. `quarantined`: it has let go without a word, and may still write into the blocks.
`kept`: it is known to be gone, and somebody may adopt the blocks for a while. `ended`: closed, or adopted."""


class Owner(NamedTuple):
    """The process that a lease is of."""

    pid: int = 0
    born: int = 0
    client_name: str = ""
    key: int = 0
    """Of the request by which it became the owner; 0: of none."""


@dataclass(slots=True, eq=False)
class Lease:
    """One lease of one owner, or a reservation. `LeaseBook` changes it."""

    row: int
    record: LeaseRecord
    blocks: list[int]
    """By group: how many it holds, each once however often."""
    state: LeaseState = "active"
    parent: Lease | None = None
    """Of a reservation: the lease it is for."""
    reservations: dict[str, Lease] = field(default_factory=dict)
    reserved: dict[int, Ints] = field(default_factory=dict)
    """Of a reservation: its blocks by group."""
    last_grant: tuple[int, Grant] = NOT_KEPT
    """Serial of the last step that this process has answered, and with what."""

    def __repr__(self) -> str:
        return f"<Lease {self.record.name} {self.state} blocks {self.blocks}>"

    @property
    def lease_id(self) -> str:
        return self.record.lease_id

    @property
    def tenant(self) -> str:
        return self.record.tenant


class QuotaExceeded(OutOfBlocks):
    """There may be blocks, but not for this tenant."""


class Opened(NamedTuple):
    lease: Lease
    token: str


class LeaseBook:
    """Keeps `records`, and finds what is in them."""

    def __init__(self, records: LeaseRecords, num_groups: int) -> None:
        self._records = records
        self._num_groups = num_groups
        self._by_id: dict[str, Lease] = {}
        self._by_name: dict[str, Lease] = {}
        self._tenants = {tenant.name: tenant for tenant in records.tenants()}
        self._whole = Whole(self.mend)
        for row, record in records.all().items():
            if record.is_reservation:
                records.remove(row)  # nobody was told which blocks it has
            elif record.lease_id in self._by_id or record.name in self._by_name:
                raise Conflict(f"two leases are named {shorten(record.name)}, so the buffer does not hold leases")
            else:
                self._note(Lease(row, record, [0] * num_groups, "quarantined"))

    def mend(self) -> None:
        """After something went wrong at any moment: what was being opened is not there, nor what was being closed."""
        rows = self._records.rows()
        found = [lease for lease in (*self._by_id.values(), *self._by_name.values()) if lease.row in rows]
        leases = {lease.row: lease for lease in sorted(found, key=lambda lease: lease.state != "ended")}
        known = set(leases)
        for lease in leases.values():
            if lease.state == "ended":
                lease.state = "quarantined"  # it was about to be adopted
            lease.reservations = {name: child for name, child in lease.reservations.items() if child.row in rows}
            known |= {child.row for child in lease.reservations.values()}
            if self._records.read(lease.row) != lease.record:
                self._records.change(lease.row, lease.record)
        for row in rows - known:
            self._records.remove(row)
        self._records.find_unused()
        self._by_id = {lease.lease_id: lease for lease in leases.values()}
        self._by_name = {lease.record.name: lease for lease in leases.values()}
        self._tenants = {tenant.name: tenant for tenant in self._records.tenants()}

    def close(self) -> None:
        """Let go of the buffer."""
        self._records.close()

    def _note(self, lease: Lease) -> None:
        self._by_id[lease.lease_id] = lease
        self._by_name[lease.record.name] = lease

    def __iter__(self) -> Iterator[Lease]:
        """Leases; reservations are theirs."""
        return iter(list(self._by_id.values()))

    def __len__(self) -> int:
        return len(self._by_id)

    def with_reservations(self) -> Iterator[Lease]:
        """Everything that may hold blocks."""
        for lease in self:
            yield lease
            yield from lease.reservations.values()

    def get(self, lease_id: str) -> Lease:
        """Raises `StaleHandle` where there is none."""
        lease = self._by_id.get(lease_id)
        if lease is None:
            raise StaleHandle(
                f"there is no {shorten(lease_id)}: it was closed, its time ran out, or another has adopted it; open a"
                " lease, or adopt this one by its name and token",
                details={"lease_id": shorten(lease_id)},
            )
        return lease

    def named(self, name: str) -> Lease:
        """Raises `NotFound`."""
        lease = self._by_name.get(name)
        if lease is None:
            raise NotFound(f"the pool has no lease named {shorten(name)}; open one", details={"name": shorten(name)})
        return lease

    def open(self, name: str, owner: Owner, *, tenant: str, token: str | None, ttl_s: float, keep_s: float) -> Opened:
        """Raises `Conflict` where the name is taken, `SpecInvalid` for an unfit name or token, `TooManyClients`."""
        check_lease_name(name)
        token = secrets.token_hex(16) if token is None else checked_token(token)
        there = self._by_name.get(name)
        if there is not None:
            raise Conflict(
                f"a lease named {shorten(name)} is {there.state}; adopt it with its token, or choose another name",
                details={"name": name, "state": there.state},
            )
        record = LeaseRecord(
            lease_id=_new_id(), name=name, tenant=tenant, digest=_digest(token), ttl_s=ttl_s, keep_s=keep_s,
            pid=owner.pid, born=owner.born, client_name=owner.client_name, key=owner.key,
        )  # fmt: skip
        with self._whole:
            lease = Lease(self._records.add(record), record, [0] * self._num_groups)
            self._note(lease)
        return Opened(lease, token)

    def next_row(self) -> int:
        """The row of the lease or reservation that comes next. Raises `TooManyClients`."""
        return self._records.next_row()

    def is_of(self, name: str, key: int) -> bool:
        """Whether the lease of this name has its owner by the request with this key."""
        lease = self._by_name.get(name)
        return bool(key) and lease is not None and lease.record.key == key

    def proved(self, name: str, token: str) -> Lease:
        """The lease of this name. Raises `NotFound`, and `PermissionDenied` unless that is its token."""
        lease = self.named(name)
        if not hmac.compare_digest(_digest(token), lease.record.digest):
            raise PermissionDenied(f"that is not the token of lease {shorten(name)}")
        return lease

    def adopt(self, lease: Lease, owner: Owner, *, ttl_s: float, keep_s: float) -> Lease:
        """The same lease with another id and owner; what it was before has ended, and had no reservations."""
        record = replace(
            lease.record, lease_id=_new_id(), generation=lease.record.generation + 1, ttl_s=ttl_s, keep_s=keep_s,
            pid=owner.pid, born=owner.born, client_name=owner.client_name, key=owner.key,
        )  # fmt: skip
        adopted = Lease(lease.row, record, lease.blocks, last_grant=lease.last_grant)
        with self._whole:
            self._records.change(lease.row, record)
            lease.state = "ended"
            del self._by_id[lease.lease_id]
            self._note(adopted)
        return adopted

    def reserve(self, lease: Lease) -> Lease:
        """A reservation of the lease, which holds nothing yet. Raises `TooManyClients`."""
        record = LeaseRecord(
            lease_id=f"reservation-{secrets.token_hex(8)}", name="", tenant=lease.tenant, is_reservation=True
        )
        with self._whole:
            child = Lease(self._records.add(record), record, [0] * self._num_groups, parent=lease)
            lease.reservations[child.lease_id] = child
        return child

    def remove(self, lease: Lease) -> None:
        """It has ended, without reservations. What it holds is to be given back."""
        with self._whole:
            self._records.remove(lease.row)
            lease.state = "ended"
            if lease.parent is not None:
                del lease.parent.reservations[lease.lease_id]
            else:
                del self._by_id[lease.lease_id]
                del self._by_name[lease.record.name]

    def expires_s(self, lease: Lease) -> float | None:
        """When it ends, by `time.monotonic()`, if by time."""
        return self._records.expires_s(lease.row)

    def expire_at(self, lease: Lease, when_s: float | None) -> None:
        self._records.expire_at(lease.row, when_s)

    def fault(self) -> str | None:
        """What cannot be, if anything."""
        leases = list(self.with_reservations())
        rows = {lease.row for lease in leases}
        if len(rows) < len(leases) or rows != self._records.rows():
            return f"leases are in rows {sorted(rows)[:8]}, not in {sorted(self._records.rows())[:8]}"
        if any(self._records.read(lease.row) != lease.record for lease in leases):
            return "a lease is not as it was noted"
        if any(self._by_name.get(lease.record.name) is not lease for lease in self) or len(self._by_name) != len(self):
            return "leases are not found by their names"
        return None if self._records.num_unused + len(rows) == MAX_HOLDERS else "rows for leases are lost"

    @property
    def era(self) -> int:
        """How often all cached content was forgotten: what was computed in another era is of no use in this one."""
        return self._records.era

    @property
    def is_forgetting(self) -> bool:
        """Whether an era has begun and the content of the one before is not all forgotten."""
        return self._records.is_forgetting

    def begin_era(self) -> None:
        self._records.begin_era()

    def end_forgetting(self) -> None:
        self._records.end_forgetting()

    # --- tenants ------------------------------------------------------------------------------------------------------

    def tenant(self, name: str) -> Tenant:
        """As it was set, or as all are that were not."""
        found = self._tenants.get(name)
        return _as_all_are(name) if found is None else found

    def tenants(self) -> list[Tenant]:
        """Those that were set, and those that have leases, by name."""
        names = {*self._tenants, *(lease.tenant for lease in self._by_id.values())}
        return [self.tenant(name) for name in sorted(names)]

    def set_tenants(self, tenants: Iterable[Tenant]) -> None:
        """These settings instead of those of the same names. Raises `SpecInvalid` for too many."""
        new = self._tenants | {tenant.name: tenant for tenant in tenants}
        if len(new) > MAX_TENANTS:
            raise SpecInvalid(f"{len(new)} tenants; a pool keeps settings of at most {MAX_TENANTS}")
        with self._whole:
            self._records.set_tenants(new.values())
            self._tenants = new


@lru_cache(MAX_TENANTS)
def _as_all_are(name: str) -> Tenant:
    return Tenant(name=name)


def check_lease_name(name: str) -> None:
    """Raises `SpecInvalid` for a name that is too long or that a terminal would obey instead of show."""
    length = len(name.encode("utf-8", "surrogatepass"))
    if not 0 < length <= MAX_NAME_BYTES or not name.isprintable():
        raise SpecInvalid(
            f"lease name {shorten(name)} has {length} bytes or characters that cannot be printed; use 1 to"
            f" {MAX_NAME_BYTES} bytes of printable text",
            details={"length_bytes": length, "limit_bytes": MAX_NAME_BYTES},
        )


def checked_token(token: str) -> str:
    """Raises `SpecInvalid`, without showing it, for a token that can be guessed or is too long."""
    length = len(token.encode("utf-8", "surrogatepass"))
    if not MIN_TOKEN_BYTES <= length <= MAX_TOKEN_BYTES:
        raise SpecInvalid(f"the token has {length} bytes; use {MIN_TOKEN_BYTES} to {MAX_TOKEN_BYTES} random ones")
    return token


def _digest(token: str) -> bytes:
    return sha256(token.encode("utf-8", "surrogatepass")).digest()


def _new_id() -> str:
    return f"lease-{secrets.token_hex(8)}"
