"""The plan cache never holds more than it may, and forgets what was used longest ago."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpage_server.plan_cache import ENTRY_OVERHEAD_BYTES, PlanCache, Representation, RequestDigest

REPRESENTATIONS = [
    Representation("p"),
    Representation("p", "full", "gzip"),
    Representation("p", "groups"),
    Representation("p", "groups", "gzip"),
]


def test_the_least_recently_used_entry_goes_first() -> None:
    cache = PlanCache(2 * (ENTRY_OVERHEAD_BYTES + 10))
    first, second, third = (Representation(name) for name in "abc")
    cache.put(first, bytes(10))
    cache.put(second, bytes(10))
    assert cache.get(first) == bytes(10)
    cache.put(third, bytes(10))
    assert [cache.get(key) is not None for key in (first, second, third)] == [True, False, True]


def test_an_entry_over_the_whole_budget_is_not_kept() -> None:
    cache = PlanCache(ENTRY_OVERHEAD_BYTES + 10)
    cache.put(Representation("a"), bytes(11))
    assert cache.get(Representation("a")) is None
    assert cache.size_bytes == 0


def test_representations_and_requests_do_not_meet() -> None:
    cache = PlanCache(1 << 20)
    keys: list[Representation | RequestDigest] = [*REPRESENTATIONS, RequestDigest(b"p")]
    for position, key in enumerate(keys):
        cache.put(key, bytes([position]))
    assert [cache.get(key) for key in keys] == [b"\0", b"\1", b"\2", b"\3", b"\4"]


def test_every_representation_has_its_own_tag() -> None:
    assert REPRESENTATIONS[0].etag == '"p"'
    assert len({representation.etag for representation in REPRESENTATIONS}) == len(REPRESENTATIONS)


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 3000), st.booleans()), max_size=60))
def test_it_behaves_like_a_list_of_recently_used_entries(steps: list[tuple[str, int, bool]]) -> None:
    cache, max_bytes = PlanCache(6000), 6000
    model: list[tuple[str, bytes]] = []  # oldest first
    for name, size, is_put in steps:
        key = Representation(name)
        known = dict(model).get(name)
        if is_put:
            cache.put(key, bytes(size))
            model = [entry for entry in model if entry[0] != name] + [(name, bytes(size))]
            while sum(len(value) + ENTRY_OVERHEAD_BYTES for _, value in model) > max_bytes:
                model.pop(0)
        else:
            assert cache.get(key) == known
            if known is not None:
                model = [entry for entry in model if entry[0] != name] + [(name, known)]
        cache.check()
    assert {name: cache.get(Representation(name)) for name, _ in model} == dict(model)


def test_the_check_fires() -> None:
    cache = PlanCache(6000)
    cache.put(Representation("a"), bytes(10))
    cache.size_bytes += 1
    with pytest.raises(AssertionError):
        cache.check()
