"""Which requests about a lease are remembered, and for how long."""

from __future__ import annotations

import pytest

from kvpage.errors import Conflict, SpecInvalid
from kvpage_server.lease_keys import MAX_KEYS, LeaseKeys, key_of


def test_a_key_is_a_number_that_the_worker_takes() -> None:
    keys = {key_of(text) for text in ("a", "b", "x" * 200, "ä" * 100)}
    assert len(keys) == 4
    assert all(0 < key <= 2**62 for key in keys)
    assert key_of("a") == key_of("a")
    assert key_of(None) != key_of(None)


@pytest.mark.parametrize("text", ["", "x" * 201, "ä" * 101])
def test_what_is_no_key_is_refused(text: str) -> None:
    with pytest.raises(SpecInvalid, match="1 to 200"):
        key_of(text)


def test_the_last_request_may_be_repeated_and_no_other() -> None:
    keys = LeaseKeys()
    keys.begin(1, b"first")
    keys.begin(1, b"first")
    with pytest.raises(SpecInvalid):
        keys.begin(1, b"other")
    keys.begin(2, b"second")
    with pytest.raises(Conflict):
        keys.begin(1, b"first")
    keys.begin(2, b"second")


def test_a_refused_request_leaves_the_one_before_as_the_last() -> None:
    keys = LeaseKeys()
    keys.begin(1, b"first")
    keys.begin(2, b"refused")
    keys.ended(2, was_refused=True)
    keys.begin(1, b"first")
    keys.begin(2, b"another")


def test_a_key_is_not_forgotten_while_another_request_with_it_is_under_way() -> None:
    keys = LeaseKeys()
    keys.begin(1, b"waits")
    keys.begin(1, b"waits")
    keys.ended(1, was_refused=True)
    keys.begin(2, b"another")
    with pytest.raises(Conflict):
        keys.begin(1, b"waits")
    keys.ended(1, was_refused=False)
    with pytest.raises(Conflict):
        keys.begin(1, b"waits")


def test_so_many_are_remembered_and_no_more() -> None:
    keys = LeaseKeys()
    for key in range(1, MAX_KEYS + 2):
        keys.begin(key, b"body")
    with pytest.raises(Conflict):
        keys.begin(2, b"body")
    keys.begin(1, b"body")  # forgotten, as if it were new
    assert repr(keys) == f"<LeaseKeys {MAX_KEYS} keys>"
