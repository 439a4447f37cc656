"""Tenants: what they may be, and the salts that keep their prefixes apart."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpage.errors import SpecInvalid
from kvpage.pages.hashing import block_hashes
from kvpage.pages.tenants import MAX_NAME_BYTES, Tenant

NAMES = st.text(st.characters(exclude_categories=("C", "Z")), max_size=MAX_NAME_BYTES // 4)


def test_a_tenant_has_no_limit_and_an_equal_share_unless_it_says_so() -> None:
    tenant = Tenant(name="")
    assert (tenant.quota_bytes, tenant.priority, tenant.weight) == (None, 0, 1)


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "n" * 64},
        {"name": "é" * 32},
        {"name": "two words"},
        {"quota_bytes": 0},
        {"quota_bytes": 2**60},
        {"priority": -100},
        {"priority": 100},
        {"weight": 1},
        {"weight": 1000},
    ],
)
def test_the_limits_themselves_are_allowed(fields: dict[str, Any]) -> None:
    Tenant(**{"name": "a", **fields})


@pytest.mark.parametrize(
    ("fields", "value", "limit"),
    [
        ({"name": "n" * 65}, "65", "64"),
        ({"name": "é" * 33}, "66", "64"),
        ({"name": "a\nb"}, r"a\nb", "printable"),
        ({"name": "\ud800"}, r"\ud800", "printable"),
        ({"quota_bytes": -1}, "-1", "0"),
        ({"priority": -101}, "-101", "-100 to 100"),
        ({"priority": 101}, "101", "-100 to 100"),
        ({"weight": 0}, "0", "1 to 1000"),
        ({"weight": 1001}, "1001", "1 to 1000"),
    ],
)
def test_what_is_beyond_a_limit_is_refused_with_its_value_and_the_limit(
    fields: dict[str, Any], value: str, limit: str
) -> None:
    with pytest.raises(SpecInvalid) as refused:
        Tenant(**{"name": "a", **fields})
    assert value in refused.value.message
    assert limit in refused.value.message


def test_a_refused_name_is_not_echoed_whole() -> None:
    with pytest.raises(SpecInvalid) as refused:
        Tenant(name="n" * 100_000)
    assert len(refused.value.message) < 400


def test_salts_stay_what_they_are_from_version_to_version() -> None:
    """Prefixes that are cached are found again after an upgrade; taken from `b2sum -l 128`."""
    assert Tenant(name="").salt == b""
    assert Tenant(name="search").salt.hex() == "cbb05418e25845f09185d6e7bbeb5c6e"
    assert Tenant(name="Zoë").salt.hex() == "3fe5c588a43956d1e382337aead0da8f"


@given(one=NAMES, other=NAMES)
def test_only_the_same_tenant_finds_a_cached_prefix(one: str, other: str) -> None:
    found, sought = (
        block_hashes(range(8), group=0, block_size=4, salt=Tenant(name=name).salt) for name in (one, other)
    )
    assert (found == sought) == (one == other)
    assert set(found).isdisjoint(sought) == (one != other)


def test_settings_do_not_change_the_salt() -> None:
    """Else a new quota would cost a tenant its cache."""
    assert Tenant(name="a", quota_bytes=1, priority=2, weight=3).salt == Tenant(name="a").salt
