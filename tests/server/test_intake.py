"""The shares: what is taken is counted, refused beyond the limit, and free again when given back."""

from __future__ import annotations

import pytest

from kvpage.errors import RateLimited, TooManyClients
from kvpage_server.intake import Intake, IntakeLimits, Share


def test_connections_leave_most_descriptors_to_pools() -> None:
    few, many = Share("TCP", IntakeLimits(), max_fds=64), Share("TCP", IntakeLimits(), max_fds=1 << 20)
    for share, limit in ((few, 16), (many, 512)):
        for _ in range(limit):
            share.enter()
        with pytest.raises(TooManyClients):
            share.enter()
        share.leave()
        share.enter()
        assert share.num_connections == limit


def test_bytes_of_bodies_are_counted_exactly() -> None:
    share = Share("TCP", IntakeLimits(max_large_bodies_bytes=100), max_fds=1024)
    share.take(60)
    share.take(40)
    with pytest.raises(RateLimited):
        share.take(1)
    share.give_back(60)
    share.take(60)
    assert share.large_bodies_bytes == 100


def test_the_kinds_of_connections_do_not_share() -> None:
    intake = Intake(IntakeLimits(max_large_bodies_bytes=1), max_fds=1024)
    intake.tcp.take(1)
    intake.unix.take(1)
