"""Leases are written so that a kill leaves one text or the other, and what nobody wrote so is refused."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from kvpage.errors import Conflict, SpecInvalid, TooManyClients
from kvpage.pages.holding_arrays import MAX_HOLDERS
from kvpage.pages.lease_records import RECORDS_BYTES, LeaseRecord, LeaseRecords
from kvpage.pages.leases import MAX_NAME_BYTES, MAX_TENANTS, LeaseBook, Owner
from kvpage.pages.tenants import MAX_NAME_BYTES as MAX_TENANT_BYTES
from kvpage.pages.tenants import MOST_PRIORITY, MOST_WEIGHT, Tenant
from support.memory_moments import Moments

TOKEN = "what only its owner knows"
ROWS_AT, HALVES_AT = 64, 64 + 16 * (MAX_HOLDERS + 1)
SETTINGS_AT = HALVES_AT + 2048 * (MAX_HOLDERS + 1)


def book_of(buffer: bytearray) -> LeaseBook:
    return LeaseBook(LeaseRecords(buffer), 1)


def open_lease(book: LeaseBook, name: str = "a", token: str | None = TOKEN, tenant: str = "") -> int:
    return book.open(name, Owner(), tenant=tenant, token=token, ttl_s=0, keep_s=0).lease.row


def half(buffer: bytearray, row: int, number: int) -> bytes:
    start = HALVES_AT + (2 * row + number - 1) * 1024
    return bytes(buffer[start : start + 1024])


def test_a_token_is_nowhere_to_be_read() -> None:
    buffer = bytearray(RECORDS_BYTES)
    book = book_of(buffer)
    open_lease(book)
    made = book.open("b", Owner(), tenant="", token=None, ttl_s=0, keep_s=0).token
    for token in (TOKEN, made):
        assert token.encode() not in buffer
        book.proved("a" if token == TOKEN else "b", token)  # though it is known
    assert len(made) >= 32
    assert made not in repr(book.named("b"))


def test_texts_alternate_between_two_halves() -> None:
    buffer = bytearray(RECORDS_BYTES)
    records = LeaseRecords(buffer)
    row = records.add(LeaseRecord(lease_id="lease-1", name="a"))
    for generation in range(2, 6):
        number = 2 - generation % 2
        counts = memoryview(buffer)[ROWS_AT:HALVES_AT].cast("q")[2 * row]
        assert counts == 3 - number
        before = half(buffer, row, counts)
        records.change(row, LeaseRecord(lease_id="lease-1", name="a" * generation))
        assert half(buffer, row, counts) == before  # what counted is as it was
        assert LeaseRecords(bytearray(buffer)).all()[row].name == "a" * generation


def test_a_kill_at_any_store_leaves_the_one_text_or_the_other() -> None:
    buffer = bytearray(RECORDS_BYTES)
    records = LeaseRecords(buffer)
    old, new = (LeaseRecord(lease_id="lease-1", name=name * 99) for name in "ab")
    row = records.add(old)
    records.set_tenants([Tenant(name="old")])
    moments = Moments(buffer, [(0, RECORDS_BYTES - 1)])

    def change() -> None:
        records.change(row, new)
        records.set_tenants([Tenant(name="new")])

    seen = set()
    for moment in moments.of(change):
        left = bytearray(RECORDS_BYTES)
        moments.put(moment, left)
        found = LeaseRecords(left)
        seen.add((found.read(row).name[0], found.tenants()[0].name))
    assert seen == {("a", "old"), ("b", "old"), ("b", "new")}


def test_the_longest_names_fit() -> None:
    buffer = bytearray(RECORDS_BYTES)
    book = book_of(buffer)
    name, tenant = "é" * (MAX_NAME_BYTES // 2), "é" * (MAX_TENANT_BYTES // 2)
    owner = Owner(pid=2**22, born=2**62, client_name="é" * (MAX_NAME_BYTES // 2))
    lease = book.open(name, owner, tenant=tenant, token="t" * 256, ttl_s=1e300, keep_s=1e300).lease
    for _ in range(3):
        lease = book.adopt(lease, owner, ttl_s=1e300, keep_s=1e300)
    assert book_of(bytearray(buffer)).named(name).record == lease.record


@pytest.mark.parametrize("owner", [Owner(client_name="n" * 1000), Owner(client_name="\ud800")])
def test_what_cannot_be_kept_is_refused_and_changes_nothing(owner: Owner) -> None:
    buffer = bytearray(RECORDS_BYTES)
    book = book_of(buffer)
    for name in ("a", "b"):
        with pytest.raises(SpecInvalid):
            book.open(name, owner, tenant="", token=None, ttl_s=0, keep_s=0)
    open_lease(book)
    with pytest.raises(SpecInvalid):
        book.adopt(book.named("a"), owner, ttl_s=0, keep_s=0)
    assert book.fault() is None
    assert book.get(book.named("a").lease_id).state == "active"
    assert list(LeaseRecords(bytearray(buffer)).rows()) == [book.named("a").row]


@pytest.mark.parametrize("name", ["", "n" * (MAX_NAME_BYTES + 1), "é" * MAX_NAME_BYTES, "a\nb", "\x1b[2J", "\ud800"])
def test_unfit_names_are_refused(name: str) -> None:
    with pytest.raises(SpecInvalid):
        open_lease(book_of(bytearray(RECORDS_BYTES)), name)


@pytest.mark.parametrize("token", ["", "short", "t" * 257])
def test_unfit_tokens_are_refused_and_not_shown(token: str) -> None:
    with pytest.raises(SpecInvalid) as refused:
        open_lease(book_of(bytearray(RECORDS_BYTES)), token=token)
    assert not token or token not in str(refused.value)


def test_all_rows_can_be_used_and_used_again() -> None:
    records = LeaseRecords(bytearray(RECORDS_BYTES))
    rows = [records.add(LeaseRecord(lease_id=f"lease-{n}", name=str(n))) for n in range(MAX_HOLDERS)]
    assert rows == list(range(1, MAX_HOLDERS + 1))
    with pytest.raises(TooManyClients):
        records.add(LeaseRecord(lease_id="one more", name="one more"))
    assert len(records.all()) == MAX_HOLDERS
    records.expire_at(500, 7.5)
    records.remove(500)
    assert records.add(LeaseRecord(lease_id="x", name="x")) == 500
    assert records.expires_s(500) is None  # that was another lease's
    assert records.expires_s(499) is None


def test_when_a_lease_ends_is_kept() -> None:
    buffer = bytearray(RECORDS_BYTES)
    book = book_of(buffer)
    open_lease(book)
    book.expire_at(book.named("a"), 12.25)
    again = book_of(bytearray(buffer))
    assert again.expires_s(again.named("a")) == 12.25
    book.expire_at(book.named("a"), 0.0)
    assert book.expires_s(book.named("a")) is not None  # long ago, but it ends
    book.expire_at(book.named("a"), None)
    assert book.expires_s(book.named("a")) is None


def test_as_many_tenants_as_may_be_fit_with_the_longest_names() -> None:
    buffer = bytearray(RECORDS_BYTES)
    book = book_of(buffer)
    tenants = [
        Tenant(name=f"{n:064}", quota_bytes=2**62 + n, priority=MOST_PRIORITY, weight=MOST_WEIGHT)
        for n in range(MAX_TENANTS)
    ]
    book.set_tenants(tenants)
    assert book_of(bytearray(buffer)).tenants() == tenants
    with pytest.raises(SpecInvalid):
        book.set_tenants([Tenant(name="one more")])
    assert book.tenants() == tenants
    book.set_tenants([Tenant(name=tenants[0].name)])
    assert book.tenant(tenants[0].name).quota_bytes is None


def test_another_size_or_content_is_refused() -> None:
    for buffer in (bytearray(RECORDS_BYTES + 1), bytearray(8), bytes(RECORDS_BYTES)):
        with pytest.raises(SpecInvalid):
            LeaseRecords(buffer)
    with pytest.raises(Conflict):
        LeaseRecords(bytearray(b"\1" + bytes(RECORDS_BYTES - 1)))


def packed(record: object) -> bytes:
    data = msgspec.msgpack.encode(record)
    return len(data).to_bytes(2, "little") + data


NONSENSE: dict[str, Callable[[bytearray], object]] = {
    "another half": lambda buffer: memoryview(buffer)[ROWS_AT:HALVES_AT].cast("q").__setitem__(2, 3),
    "no text": lambda buffer: buffer.__setitem__(slice(HALVES_AT + 2048, HALVES_AT + 2050), bytes(2)),
    "too long a text": lambda buffer: buffer.__setitem__(slice(HALVES_AT + 2048, HALVES_AT + 2050), b"\xff\xff"),
    "bytes": lambda buffer: buffer.__setitem__(slice(HALVES_AT + 2050, HALVES_AT + 2060), b"\xc1" * 10),
    "no record": lambda buffer: buffer.__setitem__(slice(HALVES_AT + 2048, HALVES_AT + 3072), packed([1]).ljust(1024)),
    "the same twice": lambda buffer: (
        buffer.__setitem__(slice(HALVES_AT + 4096, HALVES_AT + 6144), buffer[HALVES_AT + 2048 : HALVES_AT + 4096]),
        memoryview(buffer)[ROWS_AT:HALVES_AT].cast("q").__setitem__(4, 1),
    ),
    "tenants of another half": lambda buffer: buffer.__setitem__(SETTINGS_AT, 7),
    "no tenants": lambda buffer: buffer.__setitem__(slice(SETTINGS_AT + 64, SETTINGS_AT + 74), b"\xff" * 10),
}


@pytest.mark.parametrize("nonsense", NONSENSE)
def test_a_row_that_makes_no_sense_is_refused(nonsense: str) -> None:
    buffer = bytearray(RECORDS_BYTES)
    book = book_of(buffer)
    assert open_lease(book) == 1
    book.set_tenants([Tenant(name="t")])
    book.close()
    book_of(bytearray(buffer))
    NONSENSE[nonsense](buffer)
    with pytest.raises(Conflict):
        book_of(buffer)
