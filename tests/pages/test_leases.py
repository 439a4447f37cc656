"""Leases of a pool: found by id and name, adopted, mended when something breaks into a change of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from kvpage.errors import Conflict, NotFound, PermissionDenied, StaleHandle
from kvpage.pages.lease_records import RECORDS_BYTES, LeaseRecords
from kvpage.pages.leases import LeaseBook, Owner
from kvpage.pages.tenants import Tenant
from support.interrupting import interrupted
from support.memory_moments import failing

TOKEN = "what only its owner knows"


def open_lease(book: LeaseBook, name: str, tenant: str = "") -> None:
    book.open(name, Owner(), tenant=tenant, token=TOKEN, ttl_s=0, keep_s=0)


def make() -> tuple[LeaseBook, bytearray]:
    buffer = bytearray(RECORDS_BYTES)
    book = LeaseBook(LeaseRecords(buffer), 2)
    for name in "ab":
        open_lease(book, name, "tenant")
    book.reserve(book.named("a"))
    return book, buffer


def names(book: LeaseBook) -> dict[str, int]:
    """And generations."""
    return {lease.record.name: lease.record.generation for lease in book}


def test_leases_are_found_by_id_and_by_name() -> None:
    book, _ = make()
    lease = book.named("a")
    assert book.get(lease.lease_id) is lease
    assert len(book) == 2
    assert [one.parent is None for one in book.with_reservations()] == [True, False, True]
    with pytest.raises(NotFound):
        book.named("c")
    with pytest.raises(StaleHandle):
        book.get("lease-0")
    with pytest.raises(Conflict) as refused:
        open_lease(book, "a")
    assert refused.value.details == {"name": "a", "state": "active"}


def test_who_adopts_has_another_lease_in_the_same_row() -> None:
    book, buffer = make()
    with pytest.raises(PermissionDenied):
        book.proved("b", "a guess")
    old = book.proved("b", TOKEN)
    new = book.adopt(old, Owner(pid=7, client_name="engine"), ttl_s=1, keep_s=2)
    assert (new.row, new.record.generation, new.record.pid, new.tenant) == (old.row, 2, 7, "tenant")
    assert (old.state, new.state) == ("ended", "active")
    assert book.named("b") is new is book.get(new.lease_id)
    with pytest.raises(StaleHandle):
        book.get(old.lease_id)
    again = LeaseBook(LeaseRecords(bytearray(buffer)), 2)
    assert again.named("b").record == new.record
    assert again.proved("b", TOKEN).state == "quarantined"


def test_nothing_is_left_of_reservations_in_the_next_process() -> None:
    _, buffer = make()
    book = LeaseBook(LeaseRecords(buffer), 2)
    assert len(list(book.with_reservations())) == 2
    assert book.fault() is None


def test_tenants_are_those_that_were_set_and_those_that_have_leases() -> None:
    book, _ = make()
    assert book.tenants() == [Tenant(name="tenant")]
    book.set_tenants([Tenant(name="other", weight=3)])
    assert book.tenants() == [Tenant(name="other", weight=3), Tenant(name="tenant")]
    assert book.tenant("unknown") == Tenant(name="unknown")


CHANGES: dict[str, Callable[[LeaseBook], object]] = {
    "open": lambda book: open_lease(book, "c"),
    "adopt": lambda book: book.adopt(book.named("b"), Owner(pid=7), ttl_s=0, keep_s=0),
    "reserve": lambda book: book.reserve(book.named("a")),
    "remove": lambda book: book.remove(book.named("b")),
    "remove a reservation": lambda book: book.remove(next(iter(book.named("a").reservations.values()))),
    "set_tenants": lambda book: book.set_tenants([Tenant(name="t", quota_bytes=3)]),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("broken", [interrupted, failing])
def test_a_change_that_breaks_is_done_or_undone(
    change: str, broken: Callable[[Callable[[], object], int], bool]
) -> None:
    book, _ = make()
    before = (names(book), book.tenants(), len(list(book.with_reservations())))
    CHANGES[change](book)
    after = (names(book), book.tenants(), len(list(book.with_reservations())))
    moment = 1
    book, buffer = make()
    while broken(partial(CHANGES[change], book), moment):
        assert book.fault() is None
        assert (names(book), book.tenants(), len(list(book.with_reservations()))) in (before, after)
        assert not any(lease.state == "ended" for lease in book)
        again = LeaseBook(LeaseRecords(bytearray(buffer)), 2)
        assert (names(again), again.tenants()) == (names(book), book.tenants())
        open_lease(book, "d")
        assert book.fault() is None
        book, buffer = make()
        moment += 1
    assert moment > 3
